"""The cost of a role switch in full fine-tuning: offloading state to the host, loading it, and copying it.

    python benchmarks/offload.py                  # moments and gradients of 2.5 G parameters, on a GPU
    python benchmarks/offload.py --billions 5
    python benchmarks/offload.py --tiny           # the same code paths, on a CPU

The first offload pins host memory; a run does this during calibration. Products of large matrices stand in for the
rollouts and replays that run meanwhile: sequentially, the device waits for the copies; concurrently, it does not.
A kept state is copied to the host and also stays on the device. It is compared with a plain copy to the CPU, which
allocates new memory every time.
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

ROUNDS = 3  # after the first one, which pins host memory
WORK_PER_COPY = 1.5  # duration of the concurrent work, relative to the copy


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, and whether the state is unchanged at the end."""

    gigabytes: float
    pinning_s: float
    offload_s: float
    load_s: float
    offload_thread_s: float  # how long the calling thread is blocked
    load_thread_s: float
    work_s: float
    work_and_offload_s: float
    work_and_load_s: float
    keep_s: float
    keep_thread_s: float
    work_and_keep_s: float
    plain_copy_s: float
    unchanged: bool

    @property
    def gain(self) -> float:
        """The time of a round trip and the work in sequence, relative to both at the same time."""
        in_turn = 2 * self.work_s + self.offload_s + self.load_s
        return in_turn / (self.work_and_offload_s + self.work_and_load_s)

    @property
    def keep_gain(self) -> float:
        """The time of a plain copy and the work in sequence, relative to keeping the state during the work."""
        return (self.plain_copy_s + self.work_s) / self.work_and_keep_s


def shapes(parameters: int, width: int) -> Iterator[tuple[int, ...]]:
    """The shapes of a transformer's weights, up to the given number of parameters."""
    left = parameters
    block = ((3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (width, 4 * width))
    for shape in cycle(block):
        if left <= 0:
            return
        left -= torch.Size(shape).numel()
        yield shape


def state_of(parameters: int, width: int, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """AdamW's moments and an accumulated gradient, in fp32."""
    parts: dict[str, dict[str, Tensor]] = {"sums": {}, "moments": {}}
    for index, shape in enumerate(shapes(parameters, width)):
        parts["sums"][f"{index}"] = torch.randn(shape, device=device)
        parts["moments"][f"mean/{index}"] = torch.randn(shape, device=device)
        parts["moments"][f"square/{index}"] = torch.rand(shape, device=device)
    return parts


def fingerprint(parts: Mapping[str, Mapping[str, Tensor]]) -> list[int]:
    """A sum over all bits of each tensor."""
    return [
        int(value.view(torch.int32).sum(dtype=torch.int64)) for part in parts.values() for value in part.values()
    ]


def plain_copies(parts: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copies of all tensors in newly allocated host memory."""
    return [copy_all(values, cpu_copy) for values in parts.values()]


def timed(*actions: Callable[[], object]) -> list[float]:
    """Seconds from the start of the first action until each one has returned."""
    began, seconds = time.perf_counter(), []
    for action in actions:
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def work_of(device: torch.device) -> Callable[[int], None]:
    """A function that computes the given number of matrix products."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right)

    return work


def measure(parameters: int, width: int, device: torch.device) -> Measured:
    """Times round trips alone, and then concurrently with other work."""
    parts, host = state_of(parameters, width, device), HostCopies(device)
    offloader = Offloader({"sums": lambda: parts["sums"], "moments": lambda: parts["moments"]}, device, host)
    copies: dict[tuple[str, str], HostCopy] = {}
    before, products = fingerprint(parts), work_of(device)
    wait = partial(synchronize, device)

    def mark_changed() -> None:
        """Waits for the state and marks it as changed, so that the next offload copies all of it again."""
        offloader.require("sums", "moments", changes=True)
        wait()

    pinning_s = timed(offloader.offload, offloader.synchronize)[-1]
    offloader.load()
    mark_changed()
    rounds = []
    for _ in range(ROUNDS):
        offload = timed(offloader.offload, offloader.synchronize)
        load = timed(offloader.load, offloader.synchronize)
        rounds.append((*offload, *load))
        mark_changed()
    offload_thread_s, offload_s, load_thread_s, load_s = map(min, zip(*rounds, strict=True))
    timed(partial(products, 3), wait)
    each_s = timed(partial(products, 20), wait)[-1] / 20
    work = partial(products, max(1, round(WORK_PER_COPY * max(offload_s, load_s) / each_s)))
    work_s = timed(work, wait)[-1]
    work_and_offload_s = timed(offloader.offload, work, wait, offloader.synchronize)[-1]
    work_and_load_s = timed(offloader.load, work, mark_changed)[-1]

    def keep() -> None:
        host.copier.begin()
        for part, values in parts.items():
            copies.update({(part, name): host.acquire(value) for name, value in values.items()})

    def discard() -> None:
        for (part, name), copy in copies.items():
            host.mark_changed([parts[part][name]])
            host.release(copy)

    keeps = []
    for _ in range(ROUNDS):
        keeps.append(timed(keep, host.copier.finish))
        discard()
    keep_thread_s, keep_s = map(min, zip(*keeps, strict=True))
    work_and_keep_s = timed(keep, work, wait, host.copier.finish)[-1]
    plain_copy_s = min(timed(partial(plain_copies, parts))[-1] for _ in range(ROUNDS))
    kept = all(
        torch.equal(copies[part, name].values, value.cpu())
        for part in parts
        for name, value in parts[part].items()
    )
    return Measured(
        gigabytes=sum(value.nbytes for part in parts.values() for value in part.values()) / 1e9,
        pinning_s=pinning_s,
        offload_s=offload_s,
        load_s=load_s,
        offload_thread_s=offload_thread_s,
        load_thread_s=load_thread_s,
        work_s=work_s,
        work_and_offload_s=work_and_offload_s,
        work_and_load_s=work_and_load_s,
        keep_s=keep_s,
        keep_thread_s=keep_thread_s,
        work_and_keep_s=work_and_keep_s,
        plain_copy_s=plain_copy_s,
        unchanged=fingerprint(parts) == before and kept,
    )


def shown(result: Measured) -> Table:
    table = Table("", "alone", "GB/s", "calling thread", "with work", "work alone", box=None)
    for name, alone, thread, beside in (
        ("offload", result.offload_s, result.offload_thread_s, result.work_and_offload_s),
        ("load", result.load_s, result.load_thread_s, result.work_and_load_s),
        ("keep", result.keep_s, result.keep_thread_s, result.work_and_keep_s),
    ):
        seconds = [f"{each:.3f} s" for each in (alone, thread, beside, result.work_s)]
        table.add_row(name, seconds[0], f"{result.gigabytes / alone:.1f}", *seconds[1:])
    return table


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--billions", type=float, default=2.5, help="billions of parameters, with 12 bytes of state each"
    )
    parser.add_argument("--tiny", action="store_true", help="few parameters, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no GPU was found; add --tiny to run on the CPU")
    device = torch.device("cpu" if options.tiny else "cuda")
    parameters, width = (100_000, 64) if options.tiny else (round(options.billions * 1e9), 2432)
    result = measure(parameters, width, device)
    if options.json:
        print(json.dumps(asdict(result) | {"gain": result.gain, "keep_gain": result.keep_gain}))
        return
    out = Console()
    out.print(f"{result.gigabytes:.2f} GB of state; first offload, including pinning: {result.pinning_s:.2f} s")
    out.print(shown(result))
    same = "the state is unchanged, bit for bit" if result.unchanged else "THE STATE HAS CHANGED"
    out.print(f"round trip, sequential / concurrent: {result.gain:.2f}x")
    out.print(f"keeping, plain copy ({result.plain_copy_s:.2f} s) / concurrent: {result.keep_gain:.2f}x")
    out.print(same)


if __name__ == "__main__":
    main()
