"""Simulated schedules as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from digenrl.config.spec import Spec
from digenrl.simulation.answer import Answer
from digenrl.simulation.ladder import Climbed


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
