"""Test settings: hypothesis runs the same examples every time, without a deadline on shared machines.

One thread per process, as `make` sets it, also where pytest is called by itself: sums of several threads round
differently, and tests compare bits. It is read when torch is imported, which is later than this.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")
