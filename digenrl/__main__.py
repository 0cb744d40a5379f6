"""`python -m digenrl` and the command `digenrl`. Ctrl-C also ends it quietly while modules are imported."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130  # the exit code of a program that was ended by Ctrl-C


def main() -> NoReturn:
    """The entry point."""
    try:
        from digenrl.cli import main as run

        run()
    except KeyboardInterrupt:
        print("digenrl: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
