"""The paper's ladder, simulated with one set of constants and listed assumptions, next to its figures.

    python benchmarks/paper_ladder.py [--json]

The paper (arXiv 2606.24369) gives the speed-ups, the cards' number, memory and fp32 rate, the network, the batch,
the denoising steps and the trained share. The rest is assumed here; `SENSITIVITY` shows the effect of each
assumption.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest.mock import patch

from ladder_simulation import (
    RUNGS,
    ColocatedAssumptions,
    LadderRow,
    TechniqueRung,
    best_colocated,
    both_directions,
    colocated_spec,
    simulate_rungs,
)
from rich.console import Console
from rich.table import Table

from digenrl.planning import costs
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.constants import CONSTANTS, Constants
from digenrl.planning.facts.workload import Workload, workload_for
from digenrl.simulation.makespan import predict_makespan

STEPS = 4  # optimizer steps simulated
RUN_STEPS = 100  # of the comparison with the best colocated system, whose gain grows over a run
STALE_SHARES = ("0.5", "1")  # of nodes that do both; the ladder itself uses the first

A = CardPool.model_validate({"card": "RTX A6000", "nodes": 4, "per_node": 8, "network_gbit_s": 200})
B = CardPool.model_validate({"card": "H100", "nodes": 4, "per_node": 8, "network_gbit_s": 400})
C = CardPool.model_validate({"card": "RTX PRO 6000 Blackwell", "nodes": 2, "per_node": 8, "network_gbit_s": 200})
H20 = CardPool.model_validate({"card": "H20", "nodes": 4, "per_node": 8, "network_gbit_s": 400})
TESTBEDS = {"A": (A,), "B": (B,), "C": (C,), "A+C": (A, C)}

CLIP = {"height": 240, "width": 416, "frames": 17}
IMAGE = {"height": 512, "width": 512}
MODELS = {"HunyuanVideo": CLIP, "Wan2.1-14B": CLIP, "FLUX.1": IMAGE, "Qwen-Image": IMAGE}

PAPER_LADDER = {
    "HunyuanVideo": (1.52, 1.84, 2.14, 3.05, 3.34),
    "Wan2.1-14B": (1.58, 1.70, 2.10, 2.79, 2.85),
}
PAPER_RANGE = {"Qwen-Image": (1.56, 2.21)}
# An independent re-implementation on 32 H20 with Wan2.1-1.3B: the gain of each technique over the previous rung.
INDEPENDENT = {"GAP and TCSS": "1.36 to 1.44", "TSP": "1.07 to 1.11", "TAG": "up to 1.42"}
PAPER_MIXED = {"colocated": 1.46, "everything on": 1.85}
SETTINGS = tuple((steps, share) for steps in (20, 30, 40) for share in (0.4, 0.6))
SHOWN_SETTING = (20, 0.6)

ASSUMPTIONS = (
    "Cards by their fp32 rate and memory: A is the RTX A6000, B the H100 SXM, C the RTX PRO 6000 Blackwell.",
    "Nodes of eight cards; the stated network is a node's, shared by its cards. A and C have PCIe inside a node.",
    "Full fine-tuning with FSDP: bf16 weights gathered for forward and for backward, fp32 gradients scattered, "
    "once per pass. 70 % of the shorter of compute and communication hides behind the longer.",
    "Batch 32 is 2 prompts of 16 samples. Videos are 17 frames of 240x416, images 512x512; no second guidance "
    "branch.",
    "Colocated shards over all its cards and runs one time-step at a time, as DanceGRPO's trainer does; generates "
    "with a whole copy of the weights on each card; pays 1 s to wake or stop its inference engine, and the gather "
    "of that copy. Its scaling is otherwise perfect. Unequal cards train at the rate of the slowest.",
    "Disaggregated rungs may keep a copy of the weights per node if that fits. Without TSP a sample stays on "
    "one rank and a pass holds one pair. Every rung gets the split and slice that suit it best.",
    "Rewards and text encoders cost nothing on either side.",
    "Both directions: a node generates and trains as one, sharded inside, with half or all of the samples "
    "stale. A change of its role costs the gather of the weights. One node receives the sum of the gradients over "
    "the network, commits and publishes.",
)

BASELINE = ColocatedAssumptions(engine_switch_s=1.0)


@dataclass(frozen=True)
class Scenario:
    """One set of assumptions: the baseline, the constants, the workload and the network."""

    name: str
    colocated: ColocatedAssumptions = BASELINE
    constants: Constants = CONSTANTS
    workload: dict[str, Any] = field(default_factory=dict)
    network_factor: float = 1.0
    node_shards: bool = True


SENSITIVITY = (
    Scenario("as assumed"),
    Scenario("colocated is cheap: node shards, packed, no engine switch", ColocatedAssumptions(True, True)),
    Scenario("colocated shards inside nodes", replace(BASELINE, node_shards=True)),
    Scenario("no system shards inside nodes", node_shards=False),
    Scenario("colocated packs and spreads time-steps", replace(BASELINE, packed=True)),
    Scenario("colocated switches engines for free", replace(BASELINE, engine_switch_s=0.0)),
    Scenario("colocated switches engines in 5 s", replace(BASELINE, engine_switch_s=5.0)),
    Scenario("colocated training scales to 0.8", replace(BASELINE, scaling=0.8)),
    Scenario("colocated generates with sharded weights", replace(BASELINE, sharded_rollout=True)),
    Scenario(
        "colocated is expensive: sharded rollout, 5 s, scaling 0.8",
        ColocatedAssumptions(sharded_rollout=True, scaling=0.8, engine_switch_s=5.0),
    ),
    Scenario("gathers hide fully", constants=replace(CONSTANTS, gather_overlap=1.0)),
    Scenario("gathers do not hide", constants=replace(CONSTANTS, gather_overlap=0.0)),
    Scenario("the network rate is per card, not per node", network_factor=8.0),
    Scenario("LoRA, colocated still sharded over all cards", workload={"tuning": "lora"}),
    Scenario("4 prompts of 8 samples", workload={"prompts": 4, "samples_per_prompt": 8}),
    Scenario("clips of 33 frames", workload={"frames": 33}),
    Scenario("clips of 53 frames of 480x480", workload={"height": 480, "width": 480, "frames": 53}),
    Scenario("a second guidance branch, if the family has one", workload={"guidance": True}),
)


def workload_of(model: str, setting: tuple[int, float], changes: dict[str, Any]) -> Workload:
    """The workload of one model at one setting of the paper's grid."""
    steps, share = setting
    base = {
        "tuning": "full",
        "prompts": 2,
        "samples_per_prompt": 16,
        "guidance": False,
        "denoise_steps": steps,
        "trained_share": share,
    }
    return workload_for(model, **{**base, **MODELS.get(model, CLIP), **changes})


def ladder_of(
    model: str,
    testbed: str,
    setting: tuple[int, float],
    scenario: Scenario,
    rungs: Sequence[TechniqueRung] = RUNGS,
) -> list[LadderRow]:
    """Colocated and these rungs of one model on one testbed."""
    pools = [
        pool.model_copy(update={"network_gbit_s": pool.network_gbit_s * scenario.network_factor})
        for pool in TESTBEDS[testbed]
    ]
    workload = workload_of(model, setting, scenario.workload)
    rungs = [replace(rung, node_shards=scenario.node_shards) for rung in rungs]
    with patch.object(costs, "CONSTANTS", scenario.constants):
        return simulate_rungs(workload, pools, STEPS, scenario.colocated, rungs)


def last_speedup(model: str, testbed: str, setting: tuple[int, float], scenario: Scenario) -> float:
    """The speed-up of the last rung, everything on."""
    return ladder_of(model, testbed, setting, scenario, RUNGS[-1:])[-1].speedup


def all_ladders() -> dict[str, dict[str, list[LadderRow]]]:
    """The ladders by model and testbed, at the shown setting."""
    return {
        model: {testbed: ladder_of(model, testbed, SHOWN_SETTING, SENSITIVITY[0]) for testbed in TESTBEDS}
        for model in MODELS
    }


def ranges() -> dict[str, dict[str, tuple[float, float]]]:
    """The range of the last rung's speed-up over the paper's six settings."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for model in MODELS:
        found[model] = {}
        for testbed in TESTBEDS:
            last = [last_speedup(model, testbed, setting, SENSITIVITY[0]) for setting in SETTINGS]
            found[model][testbed] = (min(last), max(last))
    return found


def mixed_against_a(ladders: dict[str, dict[str, list[LadderRow]]]) -> dict[str, dict[str, float]]:
    """The gain from adding testbed C's cards to A, relative to colocated on A alone."""
    gains = {}
    for model, by_testbed in ladders.items():
        alone_s, mixed = by_testbed["A"][0].makespan_s, by_testbed["A+C"]
        gains[model] = {
            "colocated": alone_s / mixed[0].makespan_s,
            "everything on": alone_s / mixed[-1].makespan_s,
        }
    return gains


@dataclass(frozen=True)
class BestPair:
    """Seconds per step of colocated at its best, and of nodes that do both, on their own or in turns."""

    colocated_s: float
    both_s: float
    takes_turns: bool


def best_pair(model: str, pools: Sequence[CardPool], stale_share: str) -> BestPair:
    workload = workload_of(model, SHOWN_SETTING, {})
    both = both_directions(workload, pools, RUN_STEPS, stale_share)
    colocated_s = best_colocated(workload, pools, RUN_STEPS)
    return BestPair(colocated_s / RUN_STEPS, both.makespan_s / RUN_STEPS, both.in_turns)


def best_against_both(stale_share: str) -> dict[str, dict[str, BestPair]]:
    """By model and testbed."""
    return {
        model: {testbed: best_pair(model, pools, stale_share) for testbed, pools in TESTBEDS.items()}
        for model in MODELS
    }


def technique_by_technique() -> dict[str, float]:
    """The gain of each technique over the previous rung on 32 H20 with Wan2.1-1.3B."""
    workload = workload_of("Wan2.1-1.3B", SHOWN_SETTING, {})
    _, naive, gap, tsp, tag, tcss = (row.speedup for row in simulate_rungs(workload, [H20], STEPS, BASELINE))
    return {"GAP and TCSS": gap / naive * tcss / tag, "TSP": tsp / gap, "TAG": tag / tsp}


def sensitivity() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """The speed-up of the last rung in every scenario, for the two models whose ladder the paper reports."""
    for scenario in SENSITIVITY:
        yield (
            scenario.name,
            {
                model: {
                    testbed: last_speedup(model, testbed, SHOWN_SETTING, scenario) for testbed in ("A", "B", "C")
                }
                for model in PAPER_LADDER
            },
        )


def ladder_table(model: str, by_testbed: dict[str, list[LadderRow]]) -> Table:
    table = Table(title=f"{model}: speed-up over colocated, {SHOWN_SETTING[0]} steps, {SHOWN_SETTING[1]} trained")
    table.add_column("rung")
    table.add_column("paper", justify="right")
    for testbed in by_testbed:
        table.add_column(f"ours, {testbed}", justify="right")
    paper = PAPER_LADDER.get(model, (None,) * len(RUNGS))
    for index, rung in enumerate(RUNGS):
        ours = [f"{rows[index + 1].speedup:.2f}" for rows in by_testbed.values()]
        table.add_row(rung.name, f"{paper[index]:.2f}" if paper[index] else "-", *ours)
    table.add_row("split of the last rung", "", *(s[-1].split.replace("; ", "\n") for s in by_testbed.values()))
    table.add_row(
        "colocated, seconds per step", "", *(f"{s[0].makespan_s / STEPS:.0f}" for s in by_testbed.values())
    )
    return table


def range_table(found: dict[str, dict[str, tuple[float, float]]]) -> Table:
    table = Table(title="Everything on, over colocated: minimum and maximum over 20/30/40 steps, 0.4/0.6 trained")
    table.add_column("model")
    table.add_column("paper", justify="right")
    for testbed in TESTBEDS:
        table.add_column(f"ours, {testbed}", justify="right")
    for model, by_testbed in found.items():
        last = PAPER_LADDER[model][-1:] if model in PAPER_LADDER else PAPER_RANGE.get(model, ())
        paper = " to ".join(f"{figure:.2f}" for figure in last) or "-"
        table.add_row(model, paper, *(f"{low:.2f} to {high:.2f}" for low, high in by_testbed.values()))
    return table


def mixed_table(gains: dict[str, dict[str, float]]) -> Table:
    table = Table(title="A and C together, against colocated on A alone")
    for heading in ("model", "colocated", "everything on"):
        table.add_column(heading)
    table.add_row("paper (model not stated)", *(f"{figure:.2f}" for figure in PAPER_MIXED.values()))
    for model, gain in gains.items():
        table.add_row(model, *(f"{figure:.2f}" for figure in gain.values()))
    return table


def best_table(found: dict[str, dict[str, BestPair]], stale_share: str) -> Table:
    table = Table(
        title=f"Everything on, with a stale share of up to {stale_share}, over the best colocated: node shards, "
        f"packed, no engine switch; {RUN_STEPS} steps",
        caption="in turns: colocated nodes are faster than nodes on their own",
    )
    table.add_column("model")
    for testbed in TESTBEDS:
        table.add_column(testbed, justify="right")
    for model, by_testbed in found.items():
        cells = [
            f"{pair.colocated_s / pair.both_s:.3f}{', in turns' if pair.takes_turns else ''}"
            for pair in by_testbed.values()
        ]
        table.add_row(model, *cells)
    return table


def technique_table(gains: dict[str, float]) -> Table:
    table = Table(title="32 H20, Wan2.1-1.3B: gain of each technique over the previous rung")
    for heading in ("technique", "independent report", "ours"):
        table.add_column(heading)
    for name, gain in gains.items():
        table.add_row(name, INDEPENDENT[name], f"{gain:.2f}")
    return table


def sensitivity_table(rows: list[tuple[str, dict[str, dict[str, float]]]]) -> Table:
    table = Table(title="Everything on, over colocated, when one assumption changes (paper: 3.34 and 2.85)")
    table.add_column("assumption")
    for model in PAPER_LADDER:
        for testbed in ("A", "B", "C"):
            table.add_column(f"{model.split('2.1')[0]}, {testbed}", justify="right")
    for name, by_model in rows:
        figures = [f"{speedup:.2f}" for by_testbed in by_model.values() for speedup in by_testbed.values()]
        table.add_row(name, *figures)
    return table


def baseline_costs() -> dict[str, dict[str, float]]:
    """The parts of the colocated step of HunyuanVideo on every testbed, in seconds."""
    parts = {}
    for testbed, pools in TESTBEDS.items():
        spec = colocated_spec(workload_of("HunyuanVideo", SHOWN_SETTING, {}), pools, 1, BASELINE)
        lanes = 1 + sum(pool.count for pool in spec.generators)
        samples = spec.prompts * spec.samples_per_prompt
        parts[testbed] = {
            "two switches": float(2 * spec.colocate.switch),
            "training": float(spec.trainer.seconds_per_sample) * samples / lanes,
            "commit": float(spec.trainer.commit),
            "step": predict_makespan(spec),
        }
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    as_json = parser.parse_args().json
    ladders, found = all_ladders(), ranges()
    gains, scenarios = mixed_against_a(ladders), list(sensitivity())
    best = {share: best_against_both(share) for share in STALE_SHARES}
    if as_json:
        content = {
            "assumptions": ASSUMPTIONS,
            "constants": asdict(CONSTANTS),
            "ladders": {
                m: {t: [asdict(row) for row in rows] for t, rows in by.items()} for m, by in ladders.items()
            },
            "paper": {"ladder": PAPER_LADDER, "range": PAPER_RANGE, "mixed": PAPER_MIXED},
            "ranges": found,
            "mixed": gains,
            "best_colocated_and_both_directions": {
                share: {m: {t: asdict(pair) for t, pair in by.items()} for m, by in by_model.items()}
                for share, by_model in best.items()
            },
            "technique_by_technique": technique_by_technique(),
            "colocated_step": baseline_costs(),
            "sensitivity": dict(scenarios),
        }
        print(json.dumps(content, indent=2))
        return
    console = Console(width=max(Console().width, 150))
    for model, by_testbed in ladders.items():
        console.print(ladder_table(model, by_testbed))
    console.print(range_table(found))
    console.print(mixed_table(gains))
    for share, by_model in best.items():
        console.print(best_table(by_model, share))
    console.print(technique_table(technique_by_technique()))
    console.print(sensitivity_table(scenarios))
    console.print("Assumptions, in addition to the constants in digenrl/planning/facts/constants.py:")
    for number, assumption in enumerate(ASSUMPTIONS, start=1):
        console.print(f"{number}. {assumption}")


if __name__ == "__main__":
    main()
