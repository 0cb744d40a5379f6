"""Simulated schedules, profiles and predictions as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from digenrl.config.profiles import Profile, ProfiledWork
from digenrl.config.spec import Spec
from digenrl.simulation.answer import Answer
from digenrl.simulation.ladder import RungResult
from digenrl.simulation.single_device import SingleDevicePrediction

GIB = 2**30
NOISE = 1e-4  # seconds


def answer_table(spec: Spec, answer: Answer) -> Table:
    """What a schedule cost, one line per figure."""
    samples = spec.steps * spec.prompts * spec.samples_per_prompt
    table = Table(
        title=title_of(spec), title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 1)
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("makespan", seconds(answer.makespan), f"{spec.steps} steps, {samples} samples")
    table.add_row("throughput", f"{answer.throughput:.4g}/s", "samples")
    table.add_row("bound", seconds(answer.bound), "if work were fluid and staleness free")
    table.add_row("efficiency", percent(answer.efficiency), "bound / makespan")
    table.add_row("generators idle", percent(answer.generator_idle), "of their lane-seconds")
    table.add_row("trainer idle", percent(answer.trainer_idle), "of the run")
    table.add_row("stale samples", str(answer.stale_samples), f"{percent(answer.stale_samples / samples)} of all")
    helped = sum(choice == "help" for _, choice in answer.help_decisions)
    bubbles = f"in {helped} of {len(answer.help_decisions)} bubbles"
    table.add_row("helped samples", str(answer.helped_samples), bubbles)
    return table


def ladder_table(climbed: Sequence[Climbed]) -> Table:
    """The rungs side by side, each against the lowest one that could be run."""
    table = Table(
        title="What each technique brings", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for heading in ("", "makespan", "samples/s", "speed-up", "gen. idle", "train. idle", "efficiency"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    notes = [f"{each.rung.name}: {each.rung.note}" for each in climbed if each.rung.note]
    table.caption, table.caption_justify = "; ".join(notes) or None, "left"
    answers = [each.answer for each in climbed if each.answer is not None]
    # One bound for all rungs, the least: each policy's own would make a rung that helps look less efficient.
    bound = min(answer.bound for answer in answers)
    for each in climbed:
        answer = each.answer
        if answer is None:
            table.add_row(each.rung.name, *["-"] * 6)
            continue
        table.add_row(
            each.rung.name,
            seconds(answer.makespan),
            f"{answer.throughput:.4g}",
            f"{answers[0].makespan / answer.makespan:.2f}x",
            percent(answer.generator_idle),
            percent(answer.trainer_idle),
            percent(bound / answer.makespan),
        )
    return table


def title_of(spec: Spec) -> str:
    """The run in one line."""
    lanes = " + ".join(f"{pool.count} {pool.name}" for pool in spec.generators)
    work = f"{spec.prompts} prompts x {spec.samples_per_prompt} samples, slices of {spec.slice}"
    if spec.policy.colocated:
        return f"{lanes}, colocated: {work}"
    policy = spec.policy
    stale = f", stale share {policy.stale_fraction.normalize():f}" if policy.stale_fraction else ", on-policy"
    dispatch = "" if policy.dispatch == "eager" else f", {policy.dispatch.replace('_', ' ')}"
    return f"{lanes}: {work}; {policy.order} order, stream by {policy.stream}, help {policy.help}{stale}{dispatch}"


def seconds(value: float) -> str:
    """Seconds with as many digits as they deserve."""
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.4g} s"


def percent(share: float) -> str:
    """A share of one as per cent."""
    return f"{100 * share:.1f} %"


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
