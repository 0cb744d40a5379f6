"""docs/planning.md quotes what `digenrl plan` prints and writes."""

from __future__ import annotations

import io
import re

import pytest
import yaml
from doc_pages import DOCS, ROOT, DocPage
from rich.console import Console

from digenrl.commands.plan import search_plans
from digenrl.config.plan_files import PlanFile
from digenrl.config.reading import parse_model
from digenrl.config.recipes.files import read_recipe
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.facts.cluster import Cluster, Measured, read_cluster
from digenrl.planning.results.plan_overlay import overlay
from digenrl.planning.results.plan_tables import plan_reasons, plans_table
from digenrl.planning.results.plans import PlanResult

PLANNING = DocPage(DOCS / "planning.md")
RECIPE = read_recipe("sd3_flow_grpo_fast", without_prompts=True)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    cluster = read_cluster(ROOT / "examples" / "cluster_mixed.yaml")
    return search_plans(RECIPE, cluster, PlanOptions(keep=3))


def test_the_example_is_what_the_command_prints(result: PlanResult) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(plans_table(result.plans, result.colocated))
    for reason in plan_reasons(result.plans):
        console.print(reason)
    console.print(result.comparison)
    assert isinstance(console.file, io.StringIO)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    (quoted,) = (block for block in PLANNING.blocks("") if block.startswith("Plans, best first"))
    assert quoted.splitlines()[: len(printed)] == printed, "print it again, 100 columns wide, and look at it"


def test_the_plan_is_what_the_command_writes(result: PlanResult) -> None:
    (quoted,) = (yaml.safe_load(block) for block in PLANNING.blocks("yaml") if block.startswith("plan:"))
    assert quoted == overlay(result.best, RECIPE, "sd3_flow_grpo_fast")
    parse_model(PlanFile, quoted)


def test_the_example_of_cards_that_do_both_is_as_much_faster_as_the_page_says() -> None:
    assert re.search(r"`wan_flow_grpo` with\s+`\S+=1` and `--on-policy` is about 11 % faster", PLANNING.text)
    recipe = read_recipe("wan_flow_grpo", ["algorithm.options.updates_per_batch=1"], without_prompts=True)
    cluster = read_cluster(ROOT / "examples" / "cluster_small.yaml")
    best, split = search_plans(recipe, cluster, PlanOptions(keep=1, stale_shares=(0.0,))).plans
    assert (best.kind, split.layout.split) == ("both directions", "7 H100 train; 1 H100 generate")
    assert best.samples_per_second / split.samples_per_second == pytest.approx(1.11, abs=0.02)


def test_the_cluster_files_of_the_page_read_and_every_measured_key_is_explained() -> None:
    quoted = [yaml.safe_load(block) for block in PLANNING.blocks("yaml") if block.startswith("pools:")]
    assert len(quoted) == 3
    for content in quoted:
        parse_model(Cluster, content)
    assert set(re.findall(r"^\| `(\w+_\w+)` \|", PLANNING.text, re.M)) == set(Measured.model_fields)
