"""One of the journal records at which `benchmarks/crash_points.py` kills a driver."""

from __future__ import annotations

import json
import subprocess
import sys

import crash_points
import pytest


@pytest.mark.slow
def test_a_driver_killed_at_a_journal_record_is_resumed_with_equal_weights() -> None:
    command = [sys.executable, crash_points.__file__, "--first", "30", "--every", "100", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    (point,) = (crash_points.CrashPoint(**json.loads(line)) for line in found.stdout.splitlines())
    assert point.killed and point.good
