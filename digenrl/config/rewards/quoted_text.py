"""The text that a prompt asks for."""

from __future__ import annotations

import re

QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|«([^»]+)»')


def quoted(prompt: str) -> str:
    """Everything in double quotes ("…", “…” or «…»), in order, joined by spaces.

    >>> quoted('a sign "OPEN" over a door marked “24 h”')
    'OPEN 24 h'
    """
    return " ".join("".join(groups) for groups in QUOTED.findall(prompt))
