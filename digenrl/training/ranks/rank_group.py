"""The collective operations of the processes that train one model together.

Small values are exchanged as JSON, never pickled. All ranks must call the same operations in the same order. A
rank that does not, or that has died, causes a `PeersLostError` on the others, immediately or after the timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from digenrl.config.reading import one_line
from digenrl.models.parallel.token_exchange import TokenExchange
from digenrl.stages.links import LinkSettings, connect_stages
from digenrl.stages.messages import gathered
from digenrl.stages.pipeline import Pipeline
from digenrl.training.ranks.cards import CardFacts, measure_card, with_recorded_rates
from digenrl.training.ranks.rank import Rank

BUCKET_BYTES = 25 * 2**20  # per all-reduce: large enough for the network, small enough to be copied


class RanksError(RuntimeError):
    """Ranks could not connect, or disagree, or another one failed."""


TIMEOUT_S = 3600.0  # connections to a rank that died break at once; one that hangs misses its job's deadline


class PeersLostError(RuntimeError):
    """Another rank has ended or does not answer. It is for the driver to start all of them again."""


class RankGroup:
    """This process's connection to the other ranks. A process is in at most one group at a time."""

    def __init__(self, rank: Rank, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self._open = True
        self._meshes: dict[str, DeviceMesh] = {}
        self._exchanges: dict[int, TokenExchange] = {}
        self._pipeline: Pipeline | None = None
        self._cards: list[CardFacts] | None = None

    def sum_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces every tensor, in place, by its sum over all ranks; the result has the same bits on all of them.

        All ranks must pass the same names, dtypes and shapes in the same order.
        """
        for bucket in _buckets(tensors.values()):
            flat = torch.cat([value.reshape(-1) for value in bucket])
            with self.collective("summing gradients"):
                dist.all_reduce(flat)
            parts = torch.split(flat, [value.numel() for value in bucket])
            for value, part in zip(bucket, parts, strict=True):
                value.copy_(part.view_as(value))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; a value is anything that JSON can represent."""
        with self.collective("exchanging values"):
            return gathered(value)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all ranks on the CPU of the first one; the others get none. Names must differ."""
        held = self.gather([[name, str(value.dtype), list(value.shape)] for name, value in tensors.items()])
        found: dict[str, Tensor] = {}
        with self.collective("collecting weights"):
            if not self.rank.is_first:
                for value in tensors.values():
                    dist.send(value.detach().cpu().contiguous(), 0)
                return {}
            found |= {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
            for rank, described in enumerate(held[1:], start=1):
                for name, dtype, shape in described:
                    found[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                    dist.recv(found[name], rank)
        return found

    def mesh(self, device_type: str) -> DeviceMesh:
        """A one-dimensional device mesh of all ranks, for sharded tensors. The first call is a collective."""
        if device_type not in self._meshes:
            with self.collective("creating a device mesh"):
                self._meshes[device_type] = DeviceMesh(device_type, list(range(self.rank.count)))
        return self._meshes[device_type]

    def context(self, count: int) -> TokenExchange:
        """Connects `count` consecutive ranks that compute forwards together. The first call is a collective."""
        assert self.rank.count % count == 0, f"{count} of {self.rank.count} ranks"
        if count not in self._exchanges:
            with self.collective("connecting the ranks that compute forwards together"):
                firsts = range(0, self.rank.count, count)
                groups = [dist.new_group(list(range(first, first + count))) for first in firsts]
            own = groups[self.rank.index // count]
            self._exchanges[count] = TokenExchange(self.rank.index % count, count, own)
        return self._exchanges[count]

    def pipeline(self, settings: LinkSettings | Sequence[LinkSettings] | None = None) -> Pipeline:
        """Connects the ranks as stages of a pipeline. The first call is a collective, and sets the links up."""
        if self._pipeline is None:
            with self.collective("connecting the stages"):
                links = connect_stages(LinkSettings() if settings is None else settings, self.device)
            self._pipeline = Pipeline(links)
        return self._pipeline

    def cards(self, record: Path | None = None) -> list[CardFacts]:
        """The devices of all ranks. The first call is a collective, and measures them.

        With a `record`, a file of the first rank, rates that were measured before are used again.
        """
        if self._cards is None:
            cards = [CardFacts(*each) for each in self.gather(astuple(measure_card(self.device)))]
            if record is not None and self.rank.is_first:
                cards = with_recorded_rates(cards, record)
            self._cards = [CardFacts(*each) for each in self.gather([astuple(card) for card in cards])[0]]
        return self._cards

    def close(self) -> None:
        """Leaves the group; the process may join another one."""
        if self._open:
            self._open = False
            if self._pipeline is not None:
                self._pipeline.links.close()
            dist.destroy_process_group()

    @contextmanager
    def collective(self, activity: str) -> Iterator[None]:
        """Wraps an operation of all ranks; turns torch's errors into a PeersLostError that names the activity."""
        if not self._open:
            raise RanksError(f"{self.rank} has left its group; join another one before {activity}")
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch has no narrower class for a lost peer
            raise PeersLostError(f"{self.rank} lost the others while {activity}: {one_line(error)}") from error


def join_ranks(rendezvous: str, rank: Rank, device: torch.device, timeout_s: float = TIMEOUT_S) -> RankGroup:
    """Connects to the other ranks at a rendezvous that was not used before: `file:///path` or `tcp://host:port`.

    GPU tensors travel over NCCL, CPU tensors over gloo. The timeout holds for all operations of the group. In some
    of them all ranks wait for the first one, which may write a large checkpoint to a slow disk.
    """
    assert 0 <= rank.index < rank.count, str(rank)
    if dist.is_initialized():
        raise RuntimeError("this process is already in a group of ranks; close that one first")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=rendezvous,
            rank=rank.index,
            world_size=rank.count,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
    except RuntimeError as error:
        raise RanksError(
            f"{rank} could not connect to the others at {rendezvous} within {timeout_s:g} s: {one_line(error)}"
        ) from error
    return RankGroup(rank, device)


@contextmanager
def all_or_none(ranks: RankGroup | None) -> Iterator[None]:
    """Makes a block succeed on all ranks or raise on all: its own error, or a RanksError with another rank's."""
    if ranks is None:
        yield
        return
    reason: str | None = None
    try:
        yield
    except BaseException as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise
    finally:
        reasons = ranks.gather(reason)
    failed = [f"rank {index}: {each}" for index, each in enumerate(reasons) if each is not None]
    if failed:
        raise RanksError(failed[0])


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, at most BUCKET_BYTES together unless a single one is larger."""
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
