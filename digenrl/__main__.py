"""`python -m digenrl` and the command `digenrl`. Ctrl-C also ends it quietly while modules are imported."""

from __future__ import annotations

import io
import sys
from typing import NoReturn

INTERRUPTED = 130  # the exit code of a program that was ended by Ctrl-C


def main() -> NoReturn:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what its encoding lacks, such as a name in a label
    if sys.platform == "win32":  # file locks and fork servers, among other things, are those of Unix
        print("digenrl: does not run on Windows itself; install it in WSL, the Linux of Windows", file=sys.stderr)
        sys.exit(2)
    try:
        from digenrl.cli import main as run

        run()
    except KeyboardInterrupt:
        print("digenrl: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
