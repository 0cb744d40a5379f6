"""The process of an isolated reward: reads batches from its standard input and writes scores."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from itertools import islice
from math import prod
from typing import Any

import torch

from digenrl.config.reading import ConfigError, one_line
from digenrl.config.rewards.table import FunctionSettings
from digenrl.rewards.contract import SOURCE_IMAGES, Reward, RewardError
from digenrl.rewards.function import build_here
from digenrl.rewards.serving.isolated import receive, send

BYTES_PER_GB = 10**9
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Builds the reward, says so, and scores until the other side is gone."""
    _end_with_parent()
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs that the reward runs must not read the requests
    os.dup2(2, 1)  # what the reward prints must not end up among the replies
    content, _ = receive(requests)
    sys.path[:] = content["path"]
    settings = FunctionSettings(**content["settings"])
    try:
        reward = build_here(settings)
    except ConfigError as error:
        send(replies, {"error": str(error)})
        return
    except Exception as error:  # the reward is foreign code
        traceback.print_exc()
        send(replies, {"error": f"reward '{settings.target}': {type(error).__name__}: {one_line(error)}"})
        return
    if settings.memory_gb is not None:
        limit = round(settings.memory_gb * BYTES_PER_GB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    send(replies, {"ready": True})
    while True:
        try:
            header, pixels = receive(requests)
        except EOFError:
            return
        send(replies, _answer(reward, header, pixels))


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, even if the reward hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(reward: Reward, header: dict[str, Any], content: bytes) -> dict[str, Any]:
    try:
        shapes = [header["shape"], *(shape for shapes in header["sources"] for shape in shapes)]
        numbers = torch.frombuffer(bytearray(content), dtype=torch.float32)
        flat = torch.split(numbers, [prod(shape) for shape in shapes])
        pixels_BFCHW, *sources = (part.reshape(shape) for part, shape in zip(flat, shapes, strict=True))
        rest = iter(sources)
        metadata = [
            {**one, SOURCE_IMAGES: tuple(islice(rest, len(shapes)))} if shapes else one
            for one, shapes in zip(header["metadata"], header["sources"], strict=True)
        ]
        batch = reward.score(pixels_BFCHW, header["prompts"], metadata)
    except (RewardError, MemoryError) as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            return {"error": "not enough memory for the batch; raise memory_gb"}
        return {"error": error.reason, "samples": list(error.samples)}
    return {"values": list(batch.values), "parts": {name: list(part) for name, part in batch.parts.items()}}


if __name__ == "__main__":
    main()
