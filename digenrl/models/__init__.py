"""The model families behind one contract, and the stochastic step."""

import os

# Packs of different sizes leave gaps in memory that is handed out in fixed pieces. Host memory is pinned several
# times as fast by several threads. torch reads this before its first allocation; a user's own setting stays.
_SETTINGS = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # since torch 2.10, and before
    os.environ.setdefault(_name, _SETTINGS)
