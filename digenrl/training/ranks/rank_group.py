"""The processes that train one model together: they meet, add tensors up, and tell each other small facts.

Facts travel as JSON, never pickled. Whatever one rank asks of the group, all ranks ask for, in the same order: a
rank that does not, or is gone, shows as a `RanksError` of the others, at once or after the timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from digenrl.training.packing.packs import Rank

BUCKET_BYTES = 25 * 2**20  # of one all-reduce: large enough for the network, small enough to hold twice


class RanksError(RuntimeError):
    """The ranks did not meet, lost one of them, or do not agree."""


class RankGroup:
    """This process among all that train together. A process is in one group at a time."""

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index, self.count, self.device = index, count, device
        self._open = True

    @property
    def rank(self) -> Rank:
        """For index arithmetic."""
        return Rank(self.index, self.count)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and tells for all."""
        return self.index == 0

    def sum_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Every tensor becomes, in place, its sum over all ranks, with the same bits everywhere.

        All ranks hand the same names, types and shapes in the same order.
        """
        for bucket in _buckets(tensors.values()):
            flat = torch.cat([value.reshape(-1) for value in bucket])
            with self.collective("adding up gradients"):
                dist.all_reduce(flat)
            parts = torch.split(flat, [value.numel() for value in bucket])
            for value, part in zip(bucket, parts, strict=True):
                value.copy_(part.view_as(value))

    def gather(self, fact: Any) -> list[Any]:
        """What every rank says, in the order of ranks; anything that JSON can hold."""
        own = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
        with self.collective("telling facts"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(own)]))
            longest = max(int(size) for size in sizes)
            padded = torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)])
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(texts, padded)
        return [
            json.loads(bytes(text[: int(size)].tolist()).decode()) for text, size in zip(texts, sizes, strict=True)
        ]

    def barrier(self) -> None:
        """Returns when every rank is here."""
        self.gather(None)

    def mesh(self, device_type: str) -> DeviceMesh:
        """All ranks in a row, as torch's sharded tensors want them."""
        with self.collective("forming a mesh"):
            return DeviceMesh(device_type, list(range(self.count)))

    def close(self) -> None:
        """Leaves the group; the process may join another."""
        if self._open:
            self._open = False
            dist.destroy_process_group()

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What is done inside worked on all ranks, or raises on all: its own error, or another's as RanksError."""
        reason: str | None = None
        try:
            yield
        except BaseException as error:
            reason = getattr(error, "strerror", None) or in_one_line(error)
            raise
        finally:
            told = self.gather(reason)
        failed = [f"rank {index}: {each}" for index, each in enumerate(told) if each is not None]
        if failed:
            raise RanksError(failed[0])

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Around whatever all ranks do together: says who lost whom while doing what."""
        if not self._open:
            raise RanksError(f"rank {self.index} of {self.count} has left its group; join another before {what}")
        try:
            yield
        except RuntimeError as error:  # torch has no narrower class for a peer that is gone
            raise RanksError(
                f"rank {self.index} of {self.count} lost the others while {what}: {in_one_line(error)}"
            ) from error


def join_ranks(
    rendezvous: str, index: int, count: int, device: torch.device, timeout_s: float = 300.0
) -> RankGroup:
    """Waits for the others at `rendezvous`, which no group used before: `file:///path` or `tcp://host:port`.

    Tensors on a GPU travel by NCCL, those on the CPU by gloo. All that the group does has the same timeout.
    """
    assert 0 <= index < count, f"rank {index} of {count}"
    if dist.is_initialized():
        raise RuntimeError("this process is in a group of ranks already; close that one first")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=rendezvous,
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
    except RuntimeError as error:
        raise RanksError(
            f"rank {index} of {count} did not meet the others at {rendezvous} within {timeout_s:g} s: "
            f"{in_one_line(error)}"
        ) from error
    return RankGroup(index, count, device)


def together(ranks: RankGroup | None) -> AbstractContextManager[None]:
    """`all_or_none` of several ranks; of one alone whatever happens."""
    return nullcontext() if ranks is None else ranks.all_or_none()


def in_one_line(error: BaseException) -> str:
    """What went wrong; torch's errors span several lines."""
    return " ".join(str(error).split()) or type(error).__name__


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one type, at most BUCKET_BYTES together unless one alone is larger."""
    bucket: list[Tensor] = []
    size = 0
    for value in tensors:
        if bucket and (value.dtype != bucket[0].dtype or size + value.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(value)
        size += value.nbytes
    if bucket:
        yield bucket
