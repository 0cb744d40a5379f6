"""Log lines: whose they are, and where they go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, pathlib, sys, warnings
from digenrl.logs import configure_logging
for name in ("first.log", "second.log"):  # a process may drive several runs
    configure_logging("driver", verbose=False, file=pathlib.Path(sys.argv[1]) / name)
    warnings.warn(f"odd, says {name}")
    logging.getLogger("digenrl.driver").info("begun")
"""


def test_warnings_of_libraries_go_to_the_log_and_not_to_the_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""
    for name in ("first.log", "second.log"):
        text = (tmp_path / name).read_text()
        assert text.count(f"odd, says {name}") == 1 and text.count("says") == 1
        assert "INFO    driver - digenrl.driver: begun" in text
