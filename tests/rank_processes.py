"""Runs a function in several real processes that form a group of ranks: gloo on the CPU, a new group each time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_group import RankGroup, join_ranks
from digenrl.transports.processes import prepare_fork_server

TIMEOUT_S = 30.0  # for collectives; reached only if something is broken


def on_ranks(
    count: int, folder: Path, job: Callable[..., Any], *arguments: Any, die: frozenset[int] = frozenset()
) -> list[Any]:
    """The results of job(ranks, *arguments) on all ranks; raises the error of the first rank that failed.

    Ranks that are expected to `die` have the result None.
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
        ranks: RankGroup = join_ranks(f"file://{place}/meet", Rank(index, count), torch.device("cpu"), TIMEOUT_S)
        result = job(ranks, *arguments)
        ranks.close()
    except BaseException:
        result = _Failure(f"rank {index}:\n{traceback.format_exc()}")
    torch.save(result, place / f"result-{index}.partial")
    (place / f"result-{index}.partial").replace(place / f"result-{index}")
