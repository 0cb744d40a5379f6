"""Which environment variables a recipe may use as tokens.

A recipe can name a server and a variable whose value is sent there, so a stranger's recipe must not be able to
name any variable. Those with the prefix are meant for DigenRL; others must be listed by the user.
"""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator

PREFIX = "DIGENRL_"
LIST = "DIGENRL_TOKEN_ENV"  # names of further variables, separated by commas
REWARD_TOKEN = "DIGENRL_REWARD_TOKEN"  # of reward servers, unless another variable is named
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_token_variable(name: str, known: tuple[str, ...] = ()) -> str:
    """Returns the name; raises ValueError, which does not repeat what may be a token, if it is not allowed."""
    if _NAME.fullmatch(name) is None:
        raise ValueError("expected the name of an environment variable, not a token itself")
    listed = [each.strip() for each in os.environ.get(LIST, "").split(",")]
    if name.startswith(PREFIX) or name in (*known, *listed):
        return name
    raise ValueError(
        f"the environment variable {name} is not listed for tokens; rename it to {PREFIX}..., or allow it with "
        f"{LIST}={name}"
    )


TokenVariable = Annotated[str, AfterValidator(lambda name: check_token_variable(name))]  # of a recipe's key
