"""500 random schedules: how close `auto` comes to the bound, and how it compares with the other help rules.

    python benchmarks/schedule_suite.py            # all 500 specs, shares 0, 0.25, 0.5 and 1
    python benchmarks/schedule_suite.py --specs 50 # a quick look
    python benchmarks/schedule_suite.py --shares 0 # on-policy only
    python benchmarks/schedule_suite.py --assist both             # cards that do both, switches as drawn
    python benchmarks/schedule_suite.py --assist both --switch 1  # each change of role takes as long as a sample

200 specs are image-like (8-48 prompts of 16-24 samples, 4-24 lanes), 300 video-like (2-8 prompts of 8-24
samples, 16 lanes). Training takes 0.3-3 times as long as generating, a switch 0, 1 or 10 % of a sample, a third of
the specs mix two kinds of lanes; 5 steps. Every rule runs with its own best slice size.

With `--assist both` the same specs have generators that can train, as fast compared with generating as the
trainer's own cards, and `auto` is compared with a trainer that helps alone, with no help, and with all cards
colocated. Efficiency is then relative to the fluid bound of cards that do both, which counts work as divisible.
Colocated cards can be faster than that, because the simulator lets all of them train as fast as the trainer's: two
rows have the lower one of this bound and that of the schedule that was run. The attainable bound is a proved one
for whole samples and groups (attainable_bound.py). What is missing to the fluid bound but not to the attainable
one, no schedule could have gained.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from attainable_bound import attainable_seconds
from rich.console import Console
from rich.progress import track
from rich.table import Table

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.simulation.answer import bound_seconds
from digenrl.simulation.makespan import predict_makespan, with_best_slice
from digenrl.simulation.simulator import simulate

SHARES = (0.0, 0.25, 0.5, 1.0)
HELP_RULES = ("none", "greedy", "search", "auto")
SEARCH_BUDGET = 20_000


@dataclass(frozen=True)
class Outcome:
    """One spec at one stale share: each rule's makespan and, for `auto`, bound / makespan.

    For cards that do both, `of_attainable` is that of the attainable bound, and `of_lower_bound` that of the bound
    of the schedule that was run, if that is lower.
    """

    number: int
    kind: str
    share: float
    makespans: dict[str, float]
    efficiency: float
    of_attainable: float | None = None
    of_lower_bound: float | None = None


def random_spec(number: int, kind: str) -> Spec:
    """A random spec that depends on the number and the kind alone."""
    dice = random.Random(f"{kind} {number}")
    image = kind == "image"
    prompts = dice.randint(8, 48) if image else dice.randint(2, 8)
    group = dice.randint(16, 24) if image else dice.randint(8, 24)
    lanes = dice.randint(4, 24) if image else 16
    sample = dice.uniform(0.5, 2) if image else dice.uniform(10, 60)
    switch = dice.choice([0, 0.01, 0.1]) * sample
    generators = _generators(dice, lanes, sample, image)
    rate = sum(pool["count"] * max(size / time for size, time in pool["seconds"].items()) for pool in generators)
    helper_lanes = max(1, round(lanes * dice.uniform(0.25, 1)))
    return parse_model(
        Spec,
        {
            "steps": 5,
            "prompts": prompts,
            "samples_per_prompt": group,
            "slice": "auto",
            "generators": generators,
            "trainer": {
                "seconds_per_sample": round(dice.uniform(0.3, 3) / rate, 6),
                "commit": round(0.05 * sample, 4),
                "helper": {
                    "lanes": helper_lanes,
                    "seconds": _table(dice, sample * dice.uniform(0.7, 1.5), image),
                    "switch_in": round(switch, 6),
                    "switch_out": round(switch, 6),
                },
            },
            "publish": round(0.05 * sample, 4),
        },
    )


def _generators(dice: random.Random, lanes: int, sample: float, image: bool) -> list[dict[str, Any]]:
    if dice.random() >= 1 / 3:
        return [{"name": "even", "count": lanes, "seconds": _table(dice, sample, image)}]
    quick = dice.randint(1, lanes - 1)
    slow_table = _table(dice, sample * dice.uniform(1.3, 3), image)
    return [
        {"name": "quick", "count": quick, "seconds": _table(dice, sample, image)},
        {"name": "slow", "count": lanes - quick, "seconds": slow_table},
    ]


def _table(dice: random.Random, sample: float, image: bool) -> dict[int, float]:
    """Images gain from larger slices; a video alone nearly fills a card."""
    gain = dice.uniform(0.6, 0.95) if image else dice.uniform(0.93, 1)
    return {size: round(size * sample * gain ** (size > 1) * gain ** (size > 2), 4) for size in (1, 2, 4, 8)}


def run_spec(task: tuple[int, str], shares: Sequence[float]) -> list[Outcome]:
    """All rules at all shares, each with its own best slice size; `auto` is run by the scheduler itself."""
    number, kind = task
    spec = random_spec(number, kind)
    outcomes = []
    for share in shares:
        best = {
            rule: with_best_slice(spec.with_rules(help=rule, stale_fraction=share), SEARCH_BUDGET)
            for rule in HELP_RULES
        }
        makespans = {rule: predict_makespan(best[rule], SEARCH_BUDGET) for rule in HELP_RULES}
        answer = simulate(best["auto"], SEARCH_BUDGET).answer
        makespans["auto"] = answer.makespan
        outcomes.append(Outcome(number, kind, share, makespans, answer.efficiency))
    return outcomes


def both_spec(number: int, kind: str, switch: float | None) -> Spec:
    """The same spec with cards that do both; `switch` is in times of a sample, None for what was drawn."""
    content = random_spec(number, kind).model_dump()
    helper = content["trainer"]["helper"]
    if switch is not None:
        sample = float(content["generators"][0]["seconds"][1])
        helper["switch_in"] = helper["switch_out"] = round(switch * sample, 6)
    alone = float(content["trainer"]["seconds_per_sample"]) * helper["lanes"]
    for pool in content["generators"]:
        relative = float(pool["seconds"][1]) / float(helper["seconds"][1])
        pool["train_seconds"], pool["switch"] = round(alone * relative, 6), helper["switch_in"]
    content["colocate"] = {"switch": helper["switch_in"]}
    content["policy"] |= {"assist": "both", "help": "auto"}
    return parse_model(Spec, content)


def run_both(task: tuple[int, str], shares: Sequence[float], switch: float | None) -> list[Outcome]:
    """Cards that do both at all shares, and what `auto` must not lose to."""
    spec = both_spec(*task, switch)
    outcomes = []
    for share in shares:
        stale = spec.with_rules(stale_fraction=share)
        others = {
            "trainer": stale.with_rules(assist="trainer"),
            "none": stale.with_rules(assist="none"),
            "colocated": stale.with_rules(colocated=True),
        }
        makespans = {name: predict_makespan(other, SEARCH_BUDGET) for name, other in others.items()}
        answer = simulate(stale, SEARCH_BUDGET).answer
        # `auto` may also run a simpler schedule: a trainer that helps or not, or colocated cards, which are exact.
        attainable = min(attainable_seconds(stale), bound_seconds(others["trainer"]), makespans["colocated"])
        makespans["auto"] = answer.makespan
        efficiency = bound_seconds(stale) / answer.makespan
        of_attainable = attainable / answer.makespan
        outcomes.append(Outcome(*task, share, makespans, efficiency, of_attainable, answer.efficiency))
    return outcomes


def tenth_percentile(values: list[float]) -> float:
    """The value that a tenth of the values stay below."""
    return statistics.quantiles(values, n=10)[0]


def summary(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """One row per share."""
    rows = []
    for share in sorted({outcome.share for outcome in outcomes}):
        of_share = [outcome for outcome in outcomes if outcome.share == share]
        efficiency = [outcome.efficiency for outcome in of_share]
        ratios = {
            rule: [o.makespans["auto"] / o.makespans[rule] for o in of_share]
            for rule in of_share[0].makespans
            if rule != "auto"
        }
        rows.append(
            {
                "share": share,
                "specs": len(of_share),
                "median efficiency": statistics.median(efficiency),
                "tenth percentile": tenth_percentile(efficiency),
                **_of_attainable(of_share),
                **{f"worst against {rule}": max(values) for rule, values in ratios.items()},
                **{f"median gain over {rule}": 1 / statistics.median(v) for rule, v in ratios.items()},
            }
        )
        if "greedy" in ratios:
            slower = sum(o.makespans["greedy"] > o.makespans["none"] * (1 + 1e-9) for o in of_share)
            rows[-1]["greedy slower than none"] = slower
    return rows


def _of_attainable(outcomes: list[Outcome]) -> dict[str, float]:
    shares = [outcome.of_attainable for outcome in outcomes if outcome.of_attainable is not None]
    if not shares:
        return {}
    highest = [outcome.efficiency / share for outcome, share in zip(outcomes, shares, strict=True)]
    lower = [outcome.of_lower_bound for outcome in outcomes if outcome.of_lower_bound is not None]
    return {
        "of the lower bound, median": statistics.median(lower),
        "of the lower bound, tenth percentile": tenth_percentile(lower),
        "highest attainable efficiency, tenth percentile": tenth_percentile(highest),
        "of the attainable bound, median": statistics.median(shares),
        "of the attainable bound, tenth percentile": tenth_percentile(shares),
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints one column per share."""
    table = Table(title=title)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['share']:g}", justify="right")
    for figure in list(rows[0])[1:]:
        cells = [f"{row[figure]:.4f}" if isinstance(row[figure], float) else str(row[figure]) for row in rows]
        table.add_row(figure, *cells)
    Console().print(table)
    Console().print(
        "'worst against' is the largest ratio of auto's makespan to the rule's: 1.0000 means never slower."
    )


def main() -> None:
    """Runs the specs on all cores and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=int, default=500, help="number of specs, two fifths of them image-like")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="stale shares, all by default")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--assist", choices=("trainer", "both"), default="trainer", help="who may help")
    parser.add_argument("--switch", type=float, help="with --assist both: a change of role, in times of a sample")
    options = parser.parse_args()
    if options.switch is not None and options.assist != "both":
        parser.error("--switch: goes with --assist both only")
    images = options.specs * 2 // 5
    specs = [(number, "image") for number in range(images)]
    specs += [(number, "video") for number in range(options.specs - images)]
    with ProcessPoolExecutor() as pool:
        run_one = partial(run_spec, shares=options.shares)
        if options.assist == "both":
            run_one = partial(run_both, shares=options.shares, switch=options.switch)
        results = pool.map(run_one, specs)
        runs = track(results, "simulating", len(specs), console=Console(stderr=True), transient=True)
        outcomes = [outcome for run in runs for outcome in run]
    rows = summary(outcomes)
    if options.json:
        print(json.dumps(rows))
    else:
        cards = "cards that do both" if options.assist == "both" else "auto"
        show(rows, f"{cards} over random schedules, by stale share")


if __name__ == "__main__":
    main()
