"""Profiles, and what they predict_single_device, as tables for a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from digenrl.config.profiles import Profile, ProfiledWork
from digenrl.simulation.single_device import SingleDevicePrediction
from digenrl.simulation.view import percent, seconds

GIB = 2**30
NOISE = 1e-4  # seconds


def profile_table(profile: Profile) -> Group:
    """What was measured, one line per figure."""
    table = _table()
    rate = profile.device.bf16_tflops, profile.device.fp32_tflops
    table.add_row("device", _gib(profile.device.memory_bytes), f"torch {profile.device.torch}")
    for kind, value in zip(("bf16", "fp32"), rate, strict=True):
        if value is not None:
            table.add_row("matrix products", f"{value:.4g} TFLOPS", kind)
    for size, cost in sorted(profile.slices.items()):
        per_sample = f"{_seconds(cost.seconds / size)} a sample"
        table.add_row(f"slice of {size}", _seconds(cost.seconds), _and(per_sample, _peak(cost.peak_bytes)))
    training = profile.training
    if training is not None:
        packs = f"a sample; packs of {training.pack_size}"
        blocks = f"{training.checkpointed_blocks} blocks checkpointed" if training.checkpointed_blocks else ""
        foreseen = f"{_gib(training.foreseen_bytes)} foreseen" if training.foreseen_bytes else ""
        planned = f"{_gib(training.planned_bytes)} planned" if training.planned_bytes else ""
        about = _and(packs, blocks, foreseen, planned, _peak(training.peak_bytes))
        table.add_row("training", _seconds(training.seconds_per_sample), about)
    for name, value, about in (
        ("commit", profile.commit_seconds, f"a batch: {profile.work.updates_per_batch} updates"),
        ("lay out", profile.lay_out_seconds, "the new version, for other lanes"),
        ("publish", profile.publish_seconds, f"to load {_gib(profile.published_bytes or 0)}"),
        (
            "to generating",
            profile.switch_in_seconds,
            f"the trainer, {_gib(profile.switched_bytes)} leave the card",
        ),
        ("to training", profile.switch_out_seconds, "and back"),
        ("scoring", profile.score_seconds, "a sample"),
    ):
        table.add_row(name, "-" if value is None else _seconds(value), "" if value is None else about)
    return _titled(f"{profile.device.name}: {_work(profile.work)}", table)


def prediction_table(profile: Profile, foretold: SingleDevicePrediction) -> Group:
    """A step, and where its time goes."""
    table = _table()
    rate = foretold.samples / foretold.step_seconds
    table.add_row("step", _seconds(foretold.step_seconds), f"{foretold.samples} samples, {rate:.4g} a second")
    for name, part in foretold.parts.items():
        table.add_row(name, _seconds(part), f"{percent(part / foretold.step_seconds)} of the step")
    return _titled(prediction_title(profile, foretold), table)


def prediction_title(profile: Profile, foretold: SingleDevicePrediction) -> str:
    """The run in one line."""
    work = profile.work
    prompts = "1 prompt" if work.prompts == 1 else f"{work.prompts} prompts"
    batch = f"{prompts} x {work.samples_per_prompt} samples, slices of {foretold.slice}"
    return f"one {profile.device.name}, colocated, {work.recipe}: {batch}"


def _work(work: ProfiledWork) -> str:
    size = f"{work.width}x{work.height}" + (f"x{work.frames}" if work.frames > 1 else "")
    trained = "all weights" if work.lora_rank is None else f"LoRA {work.lora_rank}"
    words = (work.recipe, work.model, size, f"{work.denoising_steps} steps", trained)
    return ", ".join(dict.fromkeys(words))


def _titled(title: str, table: Table) -> Group:
    """A table's own title would be broken to the table's width."""
    return Group(Text(title, style="italic"), table)


def _table() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def _seconds(value: float) -> str:
    """What is too short to be more than noise of a measurement counts as nothing."""
    return seconds(value) if value >= NOISE else "0 s"


def _peak(peak_bytes: int) -> str:
    return f"{_gib(peak_bytes)} at the peak" if peak_bytes else ""


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _and(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
