"""Steps of a pipeline of four unequal cards over slow links: torch's schedules, our cut, our pipeline, codecs.

    python benchmarks/slow_links.py [--model gpt2 resnet101] [--mbit 8 40 100 1000 10000] [--json rows.json]

Cards with the speeds 4 : 2 : 1 : 1 are emulated by sleeps, so that the cores of this machine do not matter. What
crosses the links is as large as in the model, for one sequence of 192 tokens or one image of 112 x 112 pixels per
micro-batch. A link is slowed down by a token bucket in the sending thread. For torch's schedules, which start a
transfer when its receiver waits for it, the receiver waits for as long as the transfer takes. Data parallel is
computed: cards get samples by their speeds, and sum the gradients of all weights in a ring.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from digenrl.stages.codec_choice import ACTIVATION_CODECS, GRADIENT_CODECS, LinkCodecs, mildest_codec
from digenrl.stages.links import LinkSettings, connect_stages
from digenrl.stages.partition import Partition, best_partition, cut_at, even_bounds
from digenrl.stages.pipeline import Pipeline
from digenrl.stages.simulated import simulate_pipeline

SPEEDS = (4.0, 2.0, 1.0, 1.0)
MICRO_BATCHES = 8
FORWARD_SHARE = 1 / 3  # of the time of a forward and backward


@dataclass(frozen=True)
class Emulated:
    """Blocks of a model: seconds of a forward and backward at speed 1, values after each but the last, weights."""

    block_s: tuple[float, ...]
    values: tuple[int, ...]
    parameters: int


MODELS = {
    "gpt2": Emulated((0.05,) * 12, (192 * 768,) * 11, 124_000_000),
    "resnet101": Emulated(
        (0.02,) * 33,
        (256 * 28 * 28,) * 3 + (512 * 14 * 14,) * 4 + (1024 * 7 * 7,) * 23 + (2048 * 4 * 4,) * 2,
        44_500_000,
    ),
}


@dataclass(frozen=True)
class Row:
    """One way to run a step: measured seconds, and those of the simulated pipeline."""

    model: str
    mbit: float
    way: str
    bounds: tuple[int, ...]
    seconds: float
    predicted: float | None


class Block(torch.autograd.Function):
    """Sleeps, and hands on a tensor of the right size."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float, values: int) -> Tensor:
        ctx.seconds, ctx.shape = seconds, value.shape
        time.sleep(FORWARD_SHARE * seconds)
        return torch.zeros(1, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep((1 - FORWARD_SHARE) * ctx.seconds)
        return torch.zeros(ctx.shape), None, None


class Stage(nn.Module):
    """The blocks of one card."""

    def __init__(self, model: Emulated, bounds: Sequence[int], index: int) -> None:
        super().__init__()
        first, end = bounds[index], bounds[index + 1]
        self.seconds = sum(model.block_s[first:end]) / SPEEDS[index]
        self.values = 1 if end == len(model.block_s) else model.values[end - 1]
        self.inputs = 1 if first == 0 else model.values[first - 1]
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = Block.apply(value * self.weight, self.seconds, self.values)  # type: ignore[no-untyped-call]
        return result


def cut_for(model: Emulated, mbit: float, bounds: tuple[int, ...] | None = None) -> Partition:
    """The best cut, or the given one, without codecs."""
    rates, sizes = [mbit * 1e6 / 8] * (len(SPEEDS) - 1), [4.0 * values for values in model.values]
    if bounds is None:
        return best_partition(model.block_s, SPEEDS, sizes, rates, MICRO_BATCHES)
    return cut_at(bounds, model.block_s, SPEEDS, sizes, rates, MICRO_BATCHES)


def codecs_for(model: Emulated, mbit: float, cut: Partition) -> list[LinkCodecs]:
    """The mildest codecs with which no link is slower than the slowest stage."""
    slowest = max(cut.stage_s)
    return [
        LinkCodecs(
            *(
                mildest_codec(names, model.values[end - 1], 4, mbit * 1e6 / 8, slowest)
                for names in (ACTIVATION_CODECS, GRADIENT_CODECS)
            )
        )
        for end in cut.bounds[1:-1]
    ]


def coded_seconds(model: Emulated, mbit: float, cut: Partition, codecs: list[LinkCodecs]) -> float:
    """The prediction of a step with codecs: a link is as slow as its slower direction."""
    links = [
        max(codec.payload_bytes(model.values[end - 1], 4) for codec in (each.activations, each.gradients))
        * 8e-6
        / mbit
        for end, each in zip(cut.bounds[1:-1], codecs, strict=True)
    ]
    return predicted_seconds(cut.stage_s, links)


def predicted_seconds(stage_s: Sequence[float], link_s: Sequence[float]) -> float:
    """When the simulated pipeline ends a step."""
    return max(span.end_s for span in simulate_pipeline(stage_s, link_s, MICRO_BATCHES))


def data_parallel_seconds(model: Emulated, mbit: float) -> float:
    """Cards that have the whole model: computing in proportion to their speeds, and a ring sum of gradients."""
    computing = MICRO_BATCHES * sum(model.block_s) / sum(SPEEDS)
    return computing + 2 * (len(SPEEDS) - 1) / len(SPEEDS) * 4 * model.parameters * 8e-6 / mbit


def our_step(model: Emulated, mbit: float, bounds: Sequence[int], codecs: list[LinkCodecs]) -> float:
    """Seconds of a step of our pipeline, after one to warm up."""
    settings = [LinkSettings(each, bytes_per_s=mbit * 1e6 / 8) for each in codecs]
    with connect_stages(settings) as links:
        stage = Stage(model, bounds, links.index)
        pipeline = Pipeline(links)
        inputs = torch.zeros(1, 1)

        def forward(index: int, received: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            value = stage(inputs if links.is_first else received[0])
            return (value.sum(),) if links.is_last else (value,)

        pipeline.train(2, forward)
        return timed(lambda: pipeline.train(MICRO_BATCHES, forward))


class PacedWork:
    """A transfer of torch's that takes as long as on a slow link."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._seconds = work, seconds

    def wait(self) -> None:
        self._work.wait()
        time.sleep(self._seconds)


def torch_step(model: Emulated, mbit: float, bounds: Sequence[int], schedule_class: type[Any]) -> float:
    """Seconds of a step of one of torch's schedules, after one to warm up."""
    index = dist.get_rank()
    original = schedules._batch_p2p

    def paced(operations: list[dist.P2POp], **named: Any) -> list[Any]:
        received = sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        return [
            PacedWork(work, received * 8e-6 / mbit / max(1, len(operations)))
            for work in original(operations, **named)
        ]

    module = Stage(model, bounds, index)
    stage = PipelineStage(module, index, len(SPEEDS), torch.device("cpu"))
    schedule = schedule_class(stage, MICRO_BATCHES, loss_fn=lambda output, target: output.sum())
    batch = torch.zeros(MICRO_BATCHES, 1)

    def step() -> None:
        if index == 0:
            schedule.step(batch)
        elif index == len(SPEEDS) - 1:
            schedule.step(target=batch)
        else:
            schedule.step()

    step()
    schedules._batch_p2p = paced  # type: ignore[assignment]
    try:
        return timed(step)
    finally:
        schedules._batch_p2p = original


def timed(step: Any) -> float:
    """Seconds until the last rank has finished."""
    dist.barrier()
    began = time.monotonic()
    step()
    dist.barrier()
    return time.monotonic() - began


def rows_of(names: Sequence[str], rates: Sequence[float]) -> list[Row]:
    """All rows, measured by all ranks together."""
    rows = []
    for name in names:
        model = MODELS[name]
        even = even_bounds(len(model.block_s), len(SPEEDS))
        plain = [LinkCodecs()] * (len(SPEEDS) - 1)
        for mbit in rates:
            cut, equal = cut_for(model, mbit), cut_for(model, mbit, even)
            even_s, cut_s = (predicted_seconds(each.stage_s, each.link_s) for each in (equal, cut))
            codecs = codecs_for(model, mbit, cut)
            ways: list[tuple[str, tuple[int, ...], float, float | None]] = [
                ("data parallel (computed)", (), data_parallel_seconds(model, mbit), None),
                ("torch GPipe, equal split", even, torch_step(model, mbit, even, ScheduleGPipe), None),
                ("torch 1F1B, equal split", even, torch_step(model, mbit, even, Schedule1F1B), None),
                ("torch GPipe, our cut", cut.bounds, torch_step(model, mbit, cut.bounds, ScheduleGPipe), None),
                ("our pipeline, equal split", even, our_step(model, mbit, even, plain), even_s),
                ("our pipeline, our cut", cut.bounds, our_step(model, mbit, cut.bounds, plain), cut_s),
            ]
            if any(codec.name != "none" for each in codecs for codec in (each.activations, each.gradients)):
                seconds = our_step(model, mbit, cut.bounds, codecs)
                ways.append((f"  + {shown(codecs)}", cut.bounds, seconds, coded_seconds(model, mbit, cut, codecs)))
            rows += [Row(name, mbit, way, bounds, seconds, predicted) for way, bounds, seconds, predicted in ways]
    return rows


def shown(codecs: list[LinkCodecs]) -> str:
    """The codecs of all links, activations / gradients."""
    return ", ".join(dict.fromkeys(f"{each.activations} / {each.gradients}" for each in codecs))


def run_rank(folder: str, index: int, names: Sequence[str], rates: Sequence[float]) -> None:
    """One card; the first one writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=len(SPEEDS))
    rows = rows_of(names, rates)
    if index == 0:
        (Path(folder) / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def print_table(rows: list[Row]) -> None:
    """Speed-ups are over GPipe with an equal split at the same rate."""
    table = Table("model", "Mbit/s", "way", "blocks", "seconds", "predicted", "over GPipe", box=None)
    for row in rows:
        same = [each for each in rows if (each.model, each.mbit) == (row.model, row.mbit)]
        baseline = next(each for each in same if each.way.startswith("torch GPipe, equal"))
        blocks = " ".join(str(end - first) for first, end in zip(row.bounds, row.bounds[1:], strict=False))
        predicted = "" if row.predicted is None else f"{row.predicted:.2f}"
        speedup = f"{baseline.seconds / row.seconds:.2f}x"
        table.add_row(row.model, f"{row.mbit:g}", row.way, blocks, f"{row.seconds:.2f}", predicted, speedup)
    Console(width=130).print(table)


def main() -> None:
    """Runs four processes on this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mbit", nargs="+", type=float, default=[8, 40, 100, 1000, 10_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = [(folder, index, options.model, options.mbit) for index in range(len(SPEEDS))]
        processes = [context.Process(target=run_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        content = json.loads((Path(folder) / "rows.json").read_text())
    rows = [Row(**{**each, "bounds": tuple(each["bounds"])}) for each in content]
    print_table(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
