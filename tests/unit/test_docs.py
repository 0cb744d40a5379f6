"""The documentation is correct: links resolve, SPECs parse, and numbers and pictures match the simulator."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml
from doc_pages import DOCS, ROOT, DocPage
from pydantic import BaseModel
from rich.console import Console

from digenrl.algorithms.registry import ALGORITHMS
from digenrl.config.reading import parse_model
from digenrl.config.rewards.table import REWARDS
from digenrl.config.spec import Spec, read_spec
from digenrl.models.registry import FAMILIES, find_family
from digenrl.simulation.ladder import rungs, simulate_ladder
from digenrl.simulation.simulator import simulate
from digenrl.simulation.tables import answer_table, ladder_table, percent, seconds

DOCUMENTS = [
    DocPage(path)
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
        *sorted(DOCS.glob("*.md")),
    )
]
YAML_FILES = sorted([*ROOT.glob("examples/*.yaml"), *DOCS.glob("specs/*.yaml")])
PICTURES = sorted(DOCS.glob("images/*.svg"))
PHOTOGRAPHS = sorted(DOCS.glob("images/*/*"))  # of runs
SCHEDULING, SIMULATING = DocPage(DOCS / "scheduling.md"), DocPage(DOCS / "simulating.md")
MACHINE_PATH = re.compile(r"(?<![\w.:/])(/(home|Users|root|work|tmp|mnt|opt|var|usr)/|[A-Z]:\\)")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda page: page.path.name)


def draw_pictures() -> ModuleType:
    """The module docs/draw_pictures.py."""
    found = importlib.util.spec_from_file_location("draw_pictures", DOCS / "draw_pictures.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["draw_pictures"] = module
    found.loader.exec_module(module)
    return module


def yaml_specs(document: DocPage) -> Iterator[dict[str, Any]]:
    """The SPECs among a document's YAML blocks."""
    for block in document.blocks("yaml", "yml"):
        content = yaml.safe_load(block)
        if isinstance(content, dict) and {"steps", "generators"} <= content.keys():
            yield content


def printed(renderable: object) -> set[tuple[str, ...]]:
    """What the terminal shows, line by line, as words."""
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return {tuple(line.split()) for line in console.file.getvalue().splitlines()}


def keys_of(model: type[BaseModel]) -> set[str]:
    """The dotted names of all keys of a settings model."""
    keys = set(model.model_fields)
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys |= {f"{name}.{key}" for key in keys_of(inner)}
    return keys


def keys_in(content: object) -> set[str]:
    """The dotted names of all keys of a mapping; those of a list's entries count as the list's."""
    if isinstance(content, list):
        return set().union(*map(keys_in, content))
    if not isinstance(content, dict):
        return set()
    keys = {str(name) for name in content}
    return keys.union(*({f"{name}.{key}" for key in keys_in(inner)} for name, inner in content.items()))


@each_document
def test_links_and_images_lead_to_files_and_headings_that_exist(document: DocPage) -> None:
    name = document.path.name
    for target in document.links():
        path, _, anchor = target.partition("#")
        there = (document.path.parent / path).resolve() if path else document.path
        assert there.exists(), f"{name} links to {target}"
        assert there.is_relative_to(ROOT), f"{name} links out of the repository: {target}"
        assert not anchor or anchor in DocPage(there).anchors(), f"{name} links to {target}: no such heading"


@each_document
def test_specs_in_documents_parse(document: DocPage) -> None:
    for content in yaml_specs(document):
        parse_model(Spec, content)


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.stem)
def test_spec_files_parse(path: Path) -> None:
    if "steps" in yaml.safe_load(path.read_text(encoding="utf-8")):
        read_spec(path)


def test_the_annotated_spec_has_every_key() -> None:
    (content,) = yaml_specs(SIMULATING)
    tables = {"generators.seconds", "trainer.helper.seconds"}
    named = {key for key in keys_in(content) if key.rpartition(".")[0] not in tables}
    assert named == keys_of(Spec)


def test_every_picture_is_drawn_by_the_script_and_shown_in_a_document() -> None:
    drawn = {f"{picture.name}.svg" for picture in draw_pictures().PICTURES}
    assert {path.name for path in PICTURES} == drawn
    shown = {(page.path.parent / target).resolve() for page in DOCUMENTS for target in page.links()}
    assert {*PICTURES, *PHOTOGRAPHS} <= shown


def test_every_spec_of_the_docs_is_drawn() -> None:
    assert {path.stem for path in DOCS.glob("specs/*.yaml")} == {each.spec for each in draw_pictures().PICTURES}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_what_the_tool_draws_today(path: Path) -> None:
    script = draw_pictures()
    picture = next(each for each in script.PICTURES if each.name == path.stem)
    assert path.read_text(encoding="utf-8") == script.draw(picture), "run `make docs`, and look at the picture"


def test_the_specs_of_the_docs_describe_the_same_work() -> None:
    def work(path: Path) -> dict[str, Any]:
        content = read_spec(path).model_dump(exclude={"policy", "generators"})
        assert content["trainer"].pop("seconds_per_sample") in (Decimal("0.6"), Decimal("0.42"))
        return content

    first, *others = [work(path) for path in sorted(DOCS.glob("specs/*.yaml"))]
    assert all(other == first for other in others)


@pytest.mark.parametrize("row", SCHEDULING.table("SPEC"), ids=lambda row: row[0])
def test_the_page_about_scheduling_quotes_what_the_simulator_says(row: list[str]) -> None:
    link, *quoted = row
    target = re.search(r"\((.+)\)", link)
    assert target is not None
    answer = simulate(read_spec(DOCS / target[1])).answer
    assert quoted == [seconds(answer.makespan), percent(answer.generator_idle), percent(answer.trainer_idle)]


@pytest.mark.parametrize("row", SCHEDULING.table("stale share"), ids=lambda row: row[0])
def test_the_help_rules_compare_as_the_page_about_scheduling_says(row: list[str]) -> None:
    share, *quoted = row
    spec = read_spec(DOCS / "specs" / "everything_on.yaml")
    rules = ("none", "greedy", "search", "auto")
    runs = [simulate(spec.with_rules(help=rule, stale_fraction=share)).answer for rule in rules]
    assert quoted == [seconds(answer.makespan) for answer in runs]


def test_the_page_about_simulating_quotes_what_the_command_line_prints() -> None:
    spec = read_spec(DOCS / "specs" / "everything_on.yaml")
    ladder = list(simulate_ladder(rungs(spec, Decimal("0.6"))))
    lines = printed(answer_table(spec, simulate(spec).answer)) | printed(ladder_table(ladder))
    first_words = (
        r"makespan|throughput|bound|efficiency|generators|trainer idle|stale|helped|colocated|naive|\+\w+"
    )
    quoted = re.findall(rf"^(?:{first_words}) .*$", "\n".join(SIMULATING.blocks("")), re.M)
    assert len(quoted) == 14
    assert {tuple(line.split()) for line in quoted} <= lines


# Words of the paragraph or table from which each result of the README comes.
SOURCES_OF_RESULTS = (
    ("benchmarks.md", "naive disaggregation"),
    ("benchmarks.md", "naive disaggregation"),
    ("benchmarks.md", "benchmarks/fidelity.py`: "),
    ("benchmarks.md", "| predicted from a profile | measured |"),
    ("benchmarks.md", "| DigenRL over the last |"),
    ("slow_links.md", "| torch GPipe, equal split |"),
    ("benchmarks.md", "| `sd3_one_gpu`, limited to 24 GiB |"),
    ("benchmarks.md", "| `flux_one_gpu` |"),
    ("benchmarks.md", "| `qwen_image_one_gpu`"),
    ("benchmarks.md", "benchmarks/ray_faults.py`): "),
)


def test_the_readme_quotes_figures_of_the_paragraphs_and_tables_from_which_they_come() -> None:
    """Decimals may be rounded to fewer digits."""

    def numbers(text: str) -> set[Decimal]:
        return {Decimal(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}

    def shows(source: str, quoted: Decimal) -> bool:
        digits = -int(quoted.as_tuple().exponent)
        return any(quoted == (round(each, digits) if digits else each) for each in numbers(source))

    rows = DocPage(ROOT / "README.md").table("what")
    for (what, result, _), (page, words) in zip(rows, SOURCES_OF_RESULTS, strict=True):
        sources = [block for block in DocPage(DOCS / page).text.split("\n\n") if words in block]
        quoted = numbers(result) or numbers(what)
        assert any(all(shows(source, each) for each in quoted) for source in sources), what


def test_the_readme_lists_every_family_algorithm_and_reward() -> None:
    """Tests of the contracts run over the same three tables."""
    named = {
        what: set(re.findall(r"`(\w+)`", names)) for what, names in DocPage(ROOT / "README.md").table("choice")
    }
    tasks: dict[str, set[str]] = {
        "text to image": set(),
        "image editing": set(),
        "text to video": set(),
        "image to video": set(),
    }
    headings = dict(zip(("text_to_image", "image_edit", "text_to_video", "image_to_video"), tasks, strict=True))
    for family in map(find_family, FAMILIES):
        for task in family.tasks:
            tasks[headings[task]].add(family.name)
    assert {what: named[what] for what in tasks} == tasks
    assert named["algorithms"] == set(ALGORITHMS)
    rewards = [named[kind] for kind in ("verifiable rewards", "learned rewards", "other rewards")]
    assert set.union(*rewards) == set(REWARDS) and sum(map(len, rewards)) == len(REWARDS)


def test_the_page_about_benchmarks_lists_every_script() -> None:
    listed = {
        name
        for row in DocPage(DOCS / "benchmarks.md").table("script in `benchmarks/`")
        for name in _linked(row[0])
    }
    scripts = {
        path.name for path in ROOT.glob("benchmarks/*.py") if f"python benchmarks/{path.name}" in path.read_text()
    }
    assert listed == scripts


def _linked(cell: str) -> list[str]:
    return re.findall(r"\[(\w+\.py)\]", cell)


def test_no_document_contains_a_path_of_a_machine() -> None:
    readable = [*(page.path for page in DOCUMENTS), *YAML_FILES, *PICTURES, DOCS / "draw_pictures.py"]
    for path in readable:
        found = MACHINE_PATH.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)} names {found[0] if found else ''}"


@pytest.mark.parametrize(
    ("page", "folder"), [(ROOT / "SECURITY.md", ROOT), (DOCS / "reliability.md", ROOT / "tests")]
)
def test_every_fault_and_rule_names_tests_that_exist(page: Path, folder: Path) -> None:
    named = re.findall(r"`([\w/]+/test_\w+\.py)`", page.read_text(encoding="utf-8"))
    assert len(named) > 10 and [name for name in named if not (folder / name).is_file()] == []
