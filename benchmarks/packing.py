"""The gain from packing time-steps: seconds and memory per trained (sample, time-step) pair, by pack size.

    python benchmarks/packing.py                       # tiny models, on the CPU
    python benchmarks/packing.py --full flux qwen_image  # full size with random weights, on a GPU

Every pack size trains the same eight pairs of one group (LoRA, Flow-GRPO's loss) with the real trainer, and the
gradients are compared with those of pairs trained one at a time. Memory is what training needs in addition to the
weights: the peak on a GPU, the tensors that autograd saves on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.training import TrainerSettings
from digenrl.generation.noise import normal_noise
from digenrl.models.adapters.lora import add_lora
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.family import Family
from digenrl.models.registry import FAMILIES, find_family
from digenrl.models.trajectory import RolloutPlan, ScoredGroup, StepNoise, Trajectory
from digenrl.records import SampleId
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.training.gradients.sums import Gradients, total_norm
from digenrl.training.open_batch import BatchShape
from digenrl.training.packing.pack_size import measured_bytes
from digenrl.training.trainer import Trainer

PACKS = (1, 2, 4, 8)
SAMPLES, KEPT_STEPS, STEPS = 2, (0, 1, 2, 3), 10
FULL_IMAGE = SampleSize(height=512, width=512)
DRAW_NOISE = partial(normal_noise, 0)


@dataclass(frozen=True)
class Row:
    """One pack size of one family; None where the pack does not fit in memory."""

    family: str
    pack: int
    seconds_per_pair: float | None
    peak_gib: float | None
    gradient_error: float | None  # relative difference of the gradient from that of one pair at a time


@dataclass(frozen=True)
class Subject:
    """A model, with the size and prompt that it is trained on."""

    model: DiffusionModel
    size: SampleSize
    conditioning: Conditioning

    def group(self) -> ScoredGroup:
        """A group of random trajectories: only their shapes matter here."""
        plan = RolloutPlan(
            self.model.schedule(STEPS, self.size), self.size, StepNoise("flow", 0.7), 1.0, KEPT_STEPS, KEPT_STEPS
        )
        return ScoredGroup(
            self.conditioning, tuple(self._trajectory(plan, index) for index in range(SAMPLES)), (0.0, 1.0)
        )

    def _trajectory(self, plan: RolloutPlan, index: int) -> Trajectory:
        sample, shape = SampleId(0, 0, index), self.model.noise_shape(self.size)
        drawn = [normal_noise(0, sample, f"step {step}", shape) for step in range(len(KEPT_STEPS) + 1)]
        latents_KL = self.model.initial_latents(torch.stack(drawn), self.size).to(self.model.device)
        log_prob_K = torch.zeros(len(KEPT_STEPS))
        return Trajectory(sample, 0, plan, latents_KL[:-1], latents_KL[1:], log_prob_K)


def tiny_subject(family: Family) -> Subject:
    """The family's tiny pipeline, made in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_pipeline(family.name, Path(folder) / family.name)
        model = family.load(Path(folder) / family.name)
    conditioning = model.encode(["a red cube"])
    add_lora(model, rank=4, alpha=4, seed=0)
    return Subject(model, tiny_size(family.name), conditioning)


def full_subject(family: Family, clip: SampleSize) -> Subject:
    """The family at full size in bf16 on the GPU, with random weights."""
    model = family.build_full(torch.bfloat16, "cuda")
    add_lora(model, rank=32, alpha=32, seed=0)
    conditioning = family.random_conditioning(1, torch.bfloat16, "cuda", seed=0)
    return Subject(model, clip if family.kind == "video" else FULL_IMAGE, conditioning)


def clip_size(text: str) -> SampleSize:
    """Parses HEIGHTxWIDTHxFRAMES, such as 480x640x33."""
    try:
        height, width, frames = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected HEIGHTxWIDTHxFRAMES such as 480x640x33, got '{text}'"
        ) from None
    return SampleSize(height, width, frames)


def new_trainer(subject: Subject, pack: int, checkpointing: bool) -> Trainer:
    """A trainer of one group, with Flow-GRPO's loss and no penalty."""
    advantage = {"std_over": "group"}
    algorithm = build_algorithm("flow_grpo", {"advantage": advantage, "kl_weight": 0, "updates_per_batch": 1})
    on_gpu = subject.model.device.type == "cuda"
    settings = TrainerSettings(
        pack_size=pack, gradient_checkpointing=checkpointing, autocast="bf16" if on_gpu else "off"
    )
    return Trainer(subject.model, algorithm, settings, BatchShape(1, SAMPLES), DRAW_NOISE)


def measure(subject: Subject, pack: int, checkpointing: bool, repeats: int) -> tuple[float, int, Gradients]:
    """Median seconds per pair, peak bytes, and the gradient."""
    group, device = subject.group(), subject.model.device
    peak = measured_bytes(lambda: new_trainer(subject, pack, checkpointing).add_group(group), device)
    seconds = []
    for _ in range(repeats):
        trainer = new_trainer(subject, pack, checkpointing)
        began = time.perf_counter()
        trainer.add_group(group)
        if trainer.plan is None or trainer.plan.pack_size != pack:
            raise torch.OutOfMemoryError(f"a pack of {pack} was halved")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) / (SAMPLES * len(KEPT_STEPS)), peak, trainer.gradient()


def rows_of(name: str, subject: Subject, checkpointing: bool, repeats: int) -> list[Row]:
    """All pack sizes of one family."""
    rows: list[Row] = []
    one_by_one: Gradients | None = None
    for pack in PACKS:
        try:
            seconds, peak, gradient = measure(subject, pack, checkpointing, repeats)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            rows.append(Row(name, pack, None, None, None))
            continue
        one_by_one = one_by_one or gradient
        difference = total_norm({key: gradient[key] - one_by_one[key] for key in gradient})
        rows.append(Row(name, pack, seconds, peak / 2**30, difference / total_norm(one_by_one)))
    return rows


def show(rows: list[Row], where: str) -> None:
    """Prints the rows, with the gain over one pair at a time."""
    table = Table(title=f"Training one pair, by pack size ({where})")
    for heading in ("family", "pack", "s/pair", "gain", "peak GiB", "gradient error"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    alone = {row.family: row.seconds_per_pair for row in rows if row.pack == 1}
    for row in rows:
        first = alone[row.family]
        if row.seconds_per_pair is None or row.peak_gib is None or first is None:
            table.add_row(row.family, str(row.pack), "does not fit", "", "", "")
            continue
        gain = f"{first / row.seconds_per_pair:.2f}x"
        cells = (f"{row.seconds_per_pair:.4g}", gain, f"{row.peak_gib:.3g}", f"{row.gradient_error:.1e}")
        table.add_row(row.family, str(row.pack), *cells)
    Console().print(table)


def main() -> None:
    """Measures the chosen families and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"families to measure, all by default: {', '.join(FAMILIES)}")
    parser.add_argument("--full", action="store_true", help="full size with random weights, on a GPU")
    parser.add_argument("--clip", type=clip_size, default="480x640x33", help="size of a full-size video")
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    try:
        families = [find_family(name) for name in options.families or FAMILIES]
    except ConfigError as error:
        sys.exit(str(error))
    if options.full and not torch.cuda.is_available():
        sys.exit("--full needs a GPU, and none was found; leave it out to run tiny models on the CPU")
    rows: list[Row] = []
    for family in families:
        subject = full_subject(family, options.clip) if options.full else tiny_subject(family)
        rows += rows_of(family.name, subject, options.checkpointing, options.repeats)
        del subject
        if options.full:
            torch.cuda.empty_cache()
    if options.json:
        print(json.dumps([{key: getattr(row, key) for key in Row.__dataclass_fields__} for row in rows]))
    else:
        show(rows, torch.cuda.get_device_name() if options.full else "tiny models, CPU")


if __name__ == "__main__":
    main()
