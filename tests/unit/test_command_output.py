"""What commands print does not depend on who reads it, and never ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.commands.support.output import print_written

PRINTS = """
import sys
from digenrl import __main__
from digenrl.commands.support.output import out
import digenrl.cli

def run():
    for number in range(50_000):
        out.print("a line of text")
    print("survived", file=sys.stderr)

digenrl.cli.main = run
__main__.main()
"""


def test_a_reader_that_leaves_does_not_end_a_command() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr.read() == "survived\n"
    command.stderr.close()
    assert command.wait() == 0


def test_what_the_encoding_of_the_output_lacks_is_escaped() -> None:
    code = "import digenrl.cli, digenrl.__main__ as it; digenrl.cli.main = lambda: print('röt'); it.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "r\\xf6t\n"


def test_brackets_in_a_path_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("runs", "[red]cats", "[/x] :cat:")
    print_written(path)
    assert capsys.readouterr().out == f"wrote {path}\n"
