"""`digenrl reward serve --env`: continues the command in the environment of the rewards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from digenrl.commands.support.output import out
from digenrl.config.rewards.base import RewardSettings
from digenrl.rewards.serving.environment import RewardEnvironment, prepare, variables

COMMAND = "from digenrl.cli import main; main()"


def serve_in_environment(
    folder: Path, rewards: Sequence[RewardSettings], arguments: Sequence[str], inherit: bool, rebuild: bool
) -> NoReturn:
    """Replaces this process by `digenrl reward serve` with these arguments, in the environment in `folder`."""
    python = prepare(folder, RewardEnvironment.of(rewards, inherit), rebuild, notify=out.print)
    os.execve(python, [str(python), "-c", COMMAND, "reward", "serve", *arguments], variables())
