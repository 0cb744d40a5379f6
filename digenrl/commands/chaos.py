"""`digenrl simulate --chaos`: runs the driver and the scheduler in seeded worlds with faults."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import typer
from rich.table import Table

from digenrl.chaos.campaign import Campaign, CampaignResult, run_campaign
from digenrl.chaos.faults import KINDS
from digenrl.chaos.worlds import EVERY_KIND
from digenrl.commands.support.output import out, progress_bar
from digenrl.config.reading import ConfigError, nearest

FAILURES_SHOWN = 5
FAILED = 1  # exit code


def read_campaign(seeds: int, first_seed: int, large: bool, faults: str | None, only: str | None) -> Campaign:
    """The campaign that the options ask for; raises ConfigError for unknown faults or kinds of faults."""
    kinds = EVERY_KIND if faults is None else tuple(faults.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--faults: unknown kind '{kind}'; {nearest(kind, list(KINDS))}")
    campaign = Campaign(seeds, first_seed, kinds, large, _numbers(only))
    if seeds == 1 and campaign.only:  # as a failure is replayed
        known = range(len(campaign.world(first_seed).faults))
        unknown = [number for number in campaign.only if number not in known]
        if unknown:
            numbers = ", ".join(map(str, known)) or "none"
            raise ConfigError(f"--only: seed {first_seed} has no fault {unknown[0]}; known: {numbers}")
    return campaign


def _numbers(only: str | None) -> tuple[int, ...] | None:
    if only is None:
        return None
    try:
        return () if only == "none" else tuple(int(word) for word in only.split(","))
    except ValueError:
        raise ConfigError(f"--only: expected numbers of faults, such as 0,3, or none; got '{only}'") from None


def run_chaos(campaign: Campaign, as_json: bool) -> None:
    """Runs a campaign and prints what was injected, and the failures. Exits with 1 if there are any."""
    with progress_bar("simulating faults", hidden=as_json) as report:
        result = run_campaign(campaign, report)
    if as_json:
        typer.echo(json.dumps(_as_json(result)))
    else:
        _show(campaign, result)
    if result.failures:
        raise typer.Exit(FAILED)


def _as_json(result: CampaignResult) -> dict[str, Any]:
    names = [field.name for field in fields(result) if field.name not in ("struck", "failures")]
    counts = {name: getattr(result, name) for name in names}
    return {**counts, "struck": dict(result.struck), "failures": [asdict(each) for each in result.failures]}


def _show(campaign: Campaign, result: CampaignResult) -> None:
    table = Table("fault", "what happens", box=None, header_style="bold", pad_edge=False)
    table.add_column("injected", justify="right")
    for kind in campaign.kinds:
        table.add_row(kind, KINDS[kind].what, str(result.struck[kind]))
    table.add_row("two at once", "seeds in which two faults strike at one instant", str(result.at_once))
    out.print(table)
    counts = {
        "seed{}": result.seeds,
        "decision{}": result.decisions,
        "fault{}": sum(result.struck.values()),
        "group{} quarantined": result.quarantined,
        "slice{} hedged": result.hedged,
        "run{} resumed": result.resumed,
    }
    words = ", ".join(f"{count} {what.format('' if count == 1 else 's')}" for what, count in counts.items())
    out.print(f"{words}: {len(result.failures)} failed", highlight=False)
    for failure in result.failures[:FAILURES_SHOWN]:
        out.print(f"\nseed {failure.seed}: {failure.error}", style="red", highlight=False)
        for fault in failure.faults or ("no fault is needed",):
            out.print(f"  {fault}", highlight=False)
        out.print(f"replay it with: {failure.command}", highlight=False, soft_wrap=True)
    more = result.failures[FAILURES_SHOWN:]
    if more:
        seeds = " ".join(str(failure.seed) for failure in more)
        out.print(f"\nand {len(more)} more, with the seeds {seeds}", highlight=False, soft_wrap=True)
