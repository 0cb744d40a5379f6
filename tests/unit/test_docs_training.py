"""docs/training.md names only what exists: commands, options, keys, files, metrics. Its tables are complete.

CONTRIBUTING.md lists the layers.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from doc_pages import DOCS, ROOT, DocPage, code
from watched_runs import BOTH, KeptNumbers, initial_state_of, watch

from digenrl import records
from digenrl.cli import INTERRUPTED, app
from digenrl.commands.export import ExportFormat
from digenrl.config.recipes.files import read_recipe, shipped_recipes
from digenrl.config.recipes.overrides import all_keys
from digenrl.config.recipes.recipe import Mode, Recipe
from digenrl.driver.step_summary import AVERAGED, step_summary
from digenrl.models.registry import FAMILIES
from digenrl.records import SampleId
from digenrl.run_folder.folder import RunFolder, RunInfo
from digenrl.scheduling import Terms
from digenrl.transports.ray.backend import TransferMetrics
from digenrl.worker.stages import Stages

TRAINING = DocPage(DOCS / "training.md")
OTHER_COMMANDS = {"tensorboard"}


def command_lines() -> list[list[str]]:
    """Every command of the page, split as a shell does."""
    text = "\n".join(TRAINING.blocks("sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def options_of(command: str) -> set[str]:
    click_command: Any = typer.main.get_command(app)
    known = click_command.commands[command].params
    return {option for parameter in known for option in parameter.opts if option.startswith("--")}


def test_the_table_of_jobs_has_them_all_with_their_results_in_the_order_of_the_stages() -> None:
    jobs = {job.__name__ for job in _concrete(records.Job)}
    results = {get_type_hints(result)["job"].__name__: result.__name__ for result in _concrete(records.Result)}
    listed = {code(cells[0])[0]: code(cells[1])[0] for cells in TRAINING.table("job")}
    assert listed == {job: results[job] for job in jobs}
    methods = [name for name, each in vars(Stages).items() if inspect.isfunction(each) and name[0] != "_"]
    stages = [name.replace("_", "") for name in methods if name.replace("_", "") in {job.lower() for job in jobs}]
    assert [job.lower() for job in listed if job != "Calibrate"] == stages


def test_the_other_events_are_named() -> None:
    others = {event.__name__ for event in _concrete(records.Event)} - {
        result.__name__ for result in _concrete(records.Result) if get_type_hints(result)["job"] is not records.Job
    }
    assert others <= set(code(TRAINING.prose))


def _concrete(base: type) -> list[type]:
    """The public subclasses of a record, without those that have subclasses."""
    known = [each for each in vars(records).values() if isinstance(each, type) and issubclass(each, base)]
    return [each for each in known if not any(other is not each and issubclass(other, each) for other in known)]


def test_the_modes_are_all_there() -> None:
    assert {code(cells[0])[0] for cells in TRAINING.table("`mode`")} == set(get_args(Mode))


def test_the_defaults_of_techniques_are_theirs_and_each_can_be_switched_off() -> None:
    plain = read_recipe("demo")
    table = TRAINING.table("technique")
    keys = set()
    for _, default, off, _ in table:
        (given,), (switch,) = code(default), code(off)
        keys.add(given.split("=")[0].removeprefix("techniques."))
        assert read_recipe("demo", [given]).techniques == plain.techniques
        changed = read_recipe("demo", [switch]).techniques
        assert (changed == plain.techniques) == (given == switch), switch
    assert keys == set(type(plain.techniques).model_fields)


def test_the_table_of_the_folder_has_everything_in_it(tmp_path: Path) -> None:
    demo = read_recipe("demo")
    info = RunInfo.model_validate({"name": "demo", "started": "2026-01-02T03:04:05Z"})
    folder = RunFolder(tmp_path, demo, info)
    known = {path.name for path in vars(folder).values() if isinstance(path, Path)} - {tmp_path.name}
    listed = [name for cells in TRAINING.table("name", after="## The run folder") for name in code(cells[0])]
    assert sorted(listed) == sorted(known | {"logs", "sampled", "exported"})


def test_the_table_of_metrics_has_them_all() -> None:
    kept = KeptNumbers()
    watch(initial_state_of(**BOTH), [kept])
    update = dict.fromkeys(
        (*AVERAGED, "ratio_max", "memory_retries", "zero_spread_groups", "pack_size", "skipped"), 1
    )
    measured = {**update, "measures": {"away": 1.0}}
    reported = step_summary(0, {SampleId(0, 0, 0): 1.0}, {"ocr": [1.0]}, [measured], 1)
    written = {
        *kept.steps[-1],
        *reported.values,
        *TransferMetrics().take(),
        "predicted_step_s",
        "failed_evaluation",
    }
    named = (re.sub("^(reward|measure)/.*", r"\1/NAME", name) for name in written)
    known = {re.sub("^busy/.*", "busy/LANE", name) for name in named}
    listed = [name for cells in TRAINING.table("name", after="The metrics of a step") for name in code(cells[0])]
    assert sorted(listed) == sorted(known)


def test_commands_and_their_options_exist() -> None:
    lines = command_lines()
    assert len(lines) > 10
    click_command: Any = typer.main.get_command(app)
    for program, *arguments in lines:
        if program in OTHER_COMMANDS:
            continue
        assert program == "digenrl"
        assert arguments[0] in click_command.commands, arguments
        used = {word for word in arguments if word.startswith("--")}
        assert used <= options_of(arguments[0]), arguments


@pytest.mark.parametrize(
    "arguments", [line[2:] for line in command_lines() if line[1] == "train"], ids=lambda words: " ".join(words)
)
def test_recipes_and_overrides_of_train_commands_are_accepted(arguments: list[str]) -> None:
    positional = [word for before, word in zip(["", *arguments], arguments, strict=False) if before != "--resume"]
    words = [word for word in positional if not word.startswith("--")]
    recipe = words.pop(0) if words and "=" not in words[0] else "demo"
    assert recipe in [*shipped_recipes(), "mine.yaml"]
    read_recipe("demo" if recipe == "mine.yaml" else recipe, words)


def test_the_formats_of_export_are_all_explained() -> None:
    assert [code(cells[0])[0] for cells in TRAINING.table("format")] == list(get_args(ExportFormat))


def test_the_options_of_sample_are_all_explained() -> None:
    listed = {option for cells in TRAINING.table("option") for option in code(cells[0])}
    assert listed == options_of("sample") - {"--help"}


def test_keys_and_settings_in_the_text_are_those_of_recipes() -> None:
    known, parts = set(all_keys(Recipe)), set(Recipe.model_fields)
    settings = [word for word in code(TRAINING.prose) if "=" in word and not word.startswith(("-", "docker"))]
    assert len(settings) > 10
    for setting in settings:
        read_recipe("demo", [setting])
    for word in code(TRAINING.prose):
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.split(".")[0] in parts:
            assert word in known, word


def test_the_exit_codes_are_all_there() -> None:
    assert [int(cells[0]) for cells in TRAINING.table("exit code")] == [0, 1, 2, INTERRUPTED]


def test_the_limits_of_failures_are_the_schedulers() -> None:
    limits = inspect.signature(Terms).parameters
    assert limits["slice_failures_per_group"].default == 3
    assert "three failures in a group" in TRAINING.text
    assert f"{limits['replacements_per_step'].default} replaced groups" in TRAINING.text


def test_the_lines_for_diffusers_are_python_and_name_its_classes() -> None:
    family = FAMILIES["sd3"]
    classes = {family.pipeline_class.__name__, family.full_size().transformer.cls.__name__}
    for block in TRAINING.blocks("python"):
        imported = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
        assert {alias.name for node in imported for alias in node.names} <= classes


def test_the_layers_of_contributing_are_those_of_the_import_rules() -> None:
    rules = (ROOT / ".importlinter").read_text(encoding="utf-8")
    (layers,) = re.findall(r"^layers =\n((?:    .+\n)+)", rules, re.M)
    expected = [re.findall(r"\w+", line) for line in layers.splitlines()]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| layers, from the top .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    named = [code(line.split(" | ")[0]) for line in table.splitlines()]
    assert [sorted(layers) for layers in named] == [sorted(layers) for layers in expected]
    files = re.findall(r"^(.*) are beside them", text, re.M)
    beside = {*code(files[0]), "py.typed", "__init__.py"}
    there = {path.name.removesuffix(".py") for path in (ROOT / "digenrl").iterdir() if path.name[0] != "_"}
    assert there - beside == {layer for layers in expected for layer in layers}
