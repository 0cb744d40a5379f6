"""What a change of role costs where all weights are trained: state that leaves a card, comes back, or is kept.

    python benchmarks/offload.py                  # moments and gradients of 2.5 G parameters, on a GPU
    python benchmarks/offload.py --billions 5
    python benchmarks/offload.py --tiny           # the same ways through the code, on a CPU

The first time, host memory is pinned, which a run does in its rehearsal. Products of large matrices stand for what
is generated and replayed meanwhile: in turn the card waits for the copies, beside them it does not. State that is
kept stays on the card, too; it is compared with a plain copy to the CPU, which takes fresh memory every time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from digenrl.models.transfers import synchronize
from digenrl.training.offload.host_copies import HostCopies, HostCopy, copy_all, cpu_copy
from digenrl.training.offload.offloader import Offloader

ROUNDS = 3  # after the one that pins host memory
LONGER = 1.5  # work beside a copy lasts so many times as long


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, and whether the state came through."""

    gigabytes: float
    pinning_s: float
    leaving_s: float
    returning_s: float
    leaving_thread_s: float  # for which the thread that asks is held up
    returning_thread_s: float
    work_s: float
    work_and_leaving_s: float
    work_and_returning_s: float
    keeping_s: float
    keeping_thread_s: float
    work_and_keeping_s: float
    plain_copy_s: float
    unchanged: bool

    @property
    def gain(self) -> float:
        """A round trip and the work in turn, over both side by side."""
        in_turn = 2 * self.work_s + self.leaving_s + self.returning_s
        return in_turn / (self.work_and_leaving_s + self.work_and_returning_s)

    @property
    def keeping_gain(self) -> float:
        """A plain copy and the work, over the work with a state that is kept beside it."""
        return (self.plain_copy_s + self.work_s) / self.work_and_keeping_s


def shapes(parameters: int, width: int) -> Iterator[tuple[int, ...]]:
    """Of a transformer's blocks, until there are so many parameters."""
    left = parameters
    block = ((3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (width, 4 * width))
    for shape in cycle(block):
        if left <= 0:
            return
        left -= torch.Size(shape).numel()
        yield shape


def state_of(parameters: int, width: int, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """What AdamW and an open gradient hold, in fp32."""
    parts: dict[str, dict[str, Tensor]] = {"sums": {}, "moments": {}}
    for index, shape in enumerate(shapes(parameters, width)):
        parts["sums"][f"{index}"] = torch.randn(shape, device=device)
        parts["moments"][f"mean/{index}"] = torch.randn(shape, device=device)
        parts["moments"][f"square/{index}"] = torch.rand(shape, device=device)
    return parts


def fingerprint(parts: Mapping[str, Mapping[str, Tensor]]) -> list[int]:
    """Of all bits; each tensor's own."""
    return [
        int(value.view(torch.int32).sum(dtype=torch.int64)) for part in parts.values() for value in part.values()
    ]


def plain_copies(parts: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Of everything, in fresh memory of the host."""
    return [copy_all(values, cpu_copy) for values in parts.values()]


def timed(*actions: Callable[[], object]) -> list[float]:
    """Seconds from the first action's beginning until each has returned."""
    began, seconds = time.perf_counter(), []
    for action in actions:
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def work_of(device: torch.device) -> Callable[[int], None]:
    """So many products of matrices."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right)

    return work


def measure(parameters: int, width: int, device: torch.device) -> Measured:
    """Round trips alone, then beside work."""
    parts, host = state_of(parameters, width, device), HostCopies(device)
    offloader = Offloader({"sums": lambda: parts["sums"], "moments": lambda: parts["moments"]}, device, host)
    copies: dict[tuple[str, str], HostCopy] = {}
    before, products = fingerprint(parts), work_of(device)
    wait = partial(synchronize, device)

    def changed() -> None:
        """Back, and about to be written to: the next time all is copied again."""
        offloader.require("sums", "moments", changes=True)
        wait()

    pinning_s = timed(offloader.offload, offloader.synchronize)[-1]
    offloader.load()
    changed()
    rounds = []
    for _ in range(ROUNDS):
        leaving = timed(offloader.offload, offloader.synchronize)
        returning = timed(offloader.load, offloader.synchronize)
        rounds.append((*leaving, *returning))
        changed()
    leaving_thread_s, leaving_s, returning_thread_s, returning_s = map(min, zip(*rounds, strict=True))
    timed(partial(products, 3), wait)
    each_s = timed(partial(products, 20), wait)[-1] / 20
    work = partial(products, max(1, round(LONGER * max(leaving_s, returning_s) / each_s)))
    work_s = timed(work, wait)[-1]
    work_and_leaving_s = timed(offloader.offload, work, wait, offloader.synchronize)[-1]
    work_and_returning_s = timed(offloader.load, work, changed)[-1]

    def keep() -> None:
        host.copier.begin()
        for part, values in parts.items():
            copies.update({(part, name): host.acquire(value) for name, value in values.items()})

    def discard() -> None:
        for (part, name), copy in copies.items():
            host.mark_changed([parts[part][name]])
            host.release(copy)

    keeping = []
    for _ in range(ROUNDS):
        keeping.append(timed(keep, host.copier.finish))
        discard()
    keeping_thread_s, keeping_s = map(min, zip(*keeping, strict=True))
    work_and_keeping_s = timed(keep, work, wait, host.copier.finish)[-1]
    plain_copy_s = min(timed(partial(plain_copies, parts))[-1] for _ in range(ROUNDS))
    kept = all(
        torch.equal(copies[part, name].values, value.cpu())
        for part in parts
        for name, value in parts[part].items()
    )
    return Measured(
        gigabytes=sum(value.nbytes for part in parts.values() for value in part.values()) / 1e9,
        pinning_s=pinning_s,
        leaving_s=leaving_s,
        returning_s=returning_s,
        leaving_thread_s=leaving_thread_s,
        returning_thread_s=returning_thread_s,
        work_s=work_s,
        work_and_leaving_s=work_and_leaving_s,
        work_and_returning_s=work_and_returning_s,
        keeping_s=keeping_s,
        keeping_thread_s=keeping_thread_s,
        work_and_keeping_s=work_and_keeping_s,
        plain_copy_s=plain_copy_s,
        unchanged=fingerprint(parts) == before and kept,
    )


def shown(result: Measured) -> Table:
    table = Table("", "alone", "GB/s", "of it this thread", "with work", "work alone", box=None)
    for name, alone, thread, beside in (
        ("leaving", result.leaving_s, result.leaving_thread_s, result.work_and_leaving_s),
        ("coming back", result.returning_s, result.returning_thread_s, result.work_and_returning_s),
        ("kept", result.keeping_s, result.keeping_thread_s, result.work_and_keeping_s),
    ):
        seconds = [f"{each:.3f} s" for each in (alone, thread, beside, result.work_s)]
        table.add_row(name, seconds[0], f"{result.gigabytes / alone:.1f}", *seconds[1:])
    return table


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=2.5, help="of parameters, with 12 bytes of state each")
    parser.add_argument("--tiny", action="store_true", help="few parameters, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("there is no GPU here; add --tiny for the same on the CPU")
    device = torch.device("cpu" if options.tiny else "cuda")
    parameters, width = (100_000, 64) if options.tiny else (round(options.billions * 1e9), 2432)
    result = measure(parameters, width, device)
    if options.json:
        print(json.dumps(asdict(result) | {"gain": result.gain, "keeping_gain": result.keeping_gain}))
        return
    out = Console()
    out.print(f"{result.gigabytes:.2f} GB of state; the first time, with pinning: {result.pinning_s:.2f} s")
    out.print(shown(result))
    same = "all bits are the same" if result.unchanged else "THE STATE HAS CHANGED"
    out.print(f"there and back, in turn / beside: {result.gain:.2f}x")
    out.print(f"kept, by a plain copy of {result.plain_copy_s:.2f} s before / beside: {result.keeping_gain:.2f}x")
    out.print(same)


if __name__ == "__main__":
    main()
