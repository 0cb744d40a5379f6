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
    """The result of a simulated schedule, one figure per line."""
    samples = spec.steps * spec.prompts * spec.samples_per_prompt
    table = _table()
    table.title, table.title_justify = title_of(spec), "left"
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


def ladder_table(results: Sequence[RungResult]) -> Table:
    """All rungs, with speed-ups over the first one that could be simulated."""
    table = Table(
        title="What each technique brings", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for heading in ("", "makespan", "samples/s", "speed-up", "gen. idle", "train. idle", "efficiency"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    notes = [f"{each.rung.name}: {each.rung.note}" for each in results if each.rung.note]
    table.caption, table.caption_justify = "; ".join(notes) or None, "left"
    answers = [each.answer for each in results if each.answer is not None]
    # The least bound for all rungs: with its own bound, a rung that helps would look less efficient.
    bound = min(answer.bound for answer in answers)
    for each in results:
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
    """The simulated run in one line."""
    lanes = " + ".join(f"{pool.count} {pool.name}" for pool in spec.generators)
    work = f"{spec.prompts} prompts x {spec.samples_per_prompt} samples, slices of {spec.slice}"
    if spec.policy.colocated:
        return f"{lanes}, colocated: {work}"
    rules = spec.policy
    stale = f", stale share {rules.stale_fraction.normalize():f}" if rules.stale_fraction else ", on-policy"
    dispatch = "" if rules.dispatch == "eager" else f", {rules.dispatch.replace('_', ' ')}"
    return f"{lanes}: {work}; {rules.order} order, stream by {rules.stream}, help {rules.help}{stale}{dispatch}"


def seconds(value: float) -> str:
    """Four significant digits, or whole seconds from 1,000 s on."""
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.4g} s"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def profile_table(profile: Profile) -> Group:
    """The measurements of a profile, one figure per line."""
    table = _table()
    rate = profile.device.bf16_tflops, profile.device.fp32_tflops
    table.add_row("device", _gib(profile.device.memory_bytes), f"torch {profile.device.torch}")
    for kind, value in zip(("bf16", "fp32"), rate, strict=True):
        if value is not None:
            table.add_row("matrix products", f"{value:.4g} TFLOPS", kind)
    for size, cost in sorted(profile.slices.items()):
        per_sample = f"{_seconds(cost.seconds / size)} per sample"
        table.add_row(f"slice of {size}", _seconds(cost.seconds), _and(per_sample, _peak(cost.peak_bytes)))
    training = profile.training
    if training is not None:
        packs = f"per sample; packs of {training.pack_size}"
        blocks = f"{training.checkpointed_blocks} blocks checkpointed" if training.checkpointed_blocks else ""
        predicted = f"{_gib(training.foreseen_bytes)} predicted" if training.foreseen_bytes else ""
        planned = f"{_gib(training.planned_bytes)} planned" if training.planned_bytes else ""
        about = _and(packs, blocks, predicted, planned, _peak(training.peak_bytes))
        table.add_row("training", _seconds(training.seconds_per_sample), about)
    for name, value, about in (
        ("commit", profile.commit_seconds, f"per batch: {profile.work.updates_per_batch} updates"),
        ("export weights", profile.lay_out_seconds, "of a new version, for other lanes"),
        ("publish", profile.publish_seconds, f"load {_gib(profile.published_bytes or 0)}"),
        ("switch to generating", profile.switch_in_seconds, f"{_gib(profile.switched_bytes)} offloaded"),
        ("switch to training", profile.switch_out_seconds, "and loaded again"),
        ("scoring", profile.score_seconds, "per sample"),
    ):
        table.add_row(name, "-" if value is None else _seconds(value), "" if value is None else about)
    return _titled(f"{profile.device.name}: {_work(profile.work)}", table)


def prediction_table(profile: Profile, predicted: SingleDevicePrediction) -> Group:
    """The predicted step, and its time by kind of work."""
    table = _table()
    rate = predicted.samples / predicted.step_seconds
    table.add_row("step", _seconds(predicted.step_seconds), f"{predicted.samples} samples, {rate:.4g} per second")
    for name, part in predicted.parts.items():
        table.add_row(name, _seconds(part), f"{percent(part / predicted.step_seconds)} of the step")
    return _titled(prediction_title(profile, predicted), table)


def prediction_title(profile: Profile, predicted: SingleDevicePrediction) -> str:
    """The predicted run in one line."""
    work = profile.work
    prompts = "1 prompt" if work.prompts == 1 else f"{work.prompts} prompts"
    batch = f"{prompts} x {work.samples_per_prompt} samples, slices of {predicted.slice}"
    return f"one {profile.device.name}, colocated, {work.recipe}: {batch}"


def _work(work: ProfiledWork) -> str:
    size = f"{work.width}x{work.height}" + (f"x{work.frames}" if work.frames > 1 else "")
    trained = "all weights" if work.lora_rank is None else f"LoRA {work.lora_rank}"
    words = (work.recipe, work.model, size, f"{work.denoising_steps} steps", trained)
    return ", ".join(dict.fromkeys(words))


def _titled(title: str, table: Table) -> Group:
    """A table below its title; rich would wrap the table's own title to the table's width."""
    return Group(Text(title, style="italic"), table)


def _table() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def _seconds(value: float) -> str:
    """The time, or 0 s if it is below the noise of a measurement."""
    return seconds(value) if value >= NOISE else "0 s"


def _peak(peak_bytes: int) -> str:
    return f"{_gib(peak_bytes)} peak" if peak_bytes else ""


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _and(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
