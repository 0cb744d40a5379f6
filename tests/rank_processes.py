"""Runs a function in several real processes that train together: gloo on the CPU, a fresh group every time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from digenrl.training.ranks.rank_group import RankGroup, join_ranks
from digenrl.transports.processes import prepare_fork_server

TIMEOUT_S = 30.0  # of a rank that waits for others; nobody waits for so long unless something is broken


def on_ranks(
    count: int, folder: Path, job: Callable[..., Any], *arguments: Any, die: frozenset[int] = frozenset()
) -> list[Any]:
    """What job(ranks, *arguments) returns on every rank; raises what the first rank to fail raised.

    Of the ranks that are to `die` nothing is expected; their result is None.
    """
    prepare_fork_server(threads=1)
    context = multiprocessing.get_context("forkserver")
    place = folder / f"ranks-{uuid4().hex}"
    place.mkdir(parents=True)
    processes = [
        context.Process(target=_run, args=(place, index, count, job, arguments)) for index in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(4 * TIMEOUT_S)
        if process.is_alive():
            process.kill()
    results = [None if index in die else _result(place, index) for index in range(count)]
    failures = [result for result in results if isinstance(result, _Failure)]
    assert not failures, failures[0].text
    return results


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _result(place: Path, index: int) -> Any:
    path = place / f"result-{index}"
    if not path.is_file():
        return _Failure(f"rank {index} ended without a result")
    return torch.load(path, weights_only=False)


def _run(place: Path, index: int, count: int, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        ranks: RankGroup = join_ranks(f"file://{place}/meet", index, count, torch.device("cpu"), TIMEOUT_S)
        result = job(ranks, *arguments)
        ranks.close()
    except BaseException:
        result = _Failure(f"rank {index}:\n{traceback.format_exc()}")
    torch.save(result, place / f"result-{index}.partial")
    (place / f"result-{index}.partial").replace(place / f"result-{index}")
