"""Writes the tables of recipes.md and the page published_recipes.md: `make docs`.

They compare the shipped recipes with the settings in the authors' code, which published_settings.yaml lists.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from digenrl.config.reading import read_mapping
from digenrl.config.recipes.files import NOT_IN_FINGERPRINT, SHIPPED, read_recipe, shipped_recipes
from digenrl.config.recipes.recipe import EvaluationSettings, Recipe
from digenrl.models.registry import find_family
from digenrl.telemetry.writing import write_atomically

DOCS = Path(__file__).parent
DATA = DOCS / "published_settings.yaml"
RECIPES_PAGE = DOCS / "recipes.md"
PUBLISHED_PAGE = DOCS / "published_recipes.md"
PUBLISHED_INTRODUCTION = """\
Every setting of a published run that a recipe key expresses, with the line of the authors' code that sets it, and the value of
the recipe. Values that differ are bold; [recipes.md](recipes.md#published-runs) has the reasons. `docs/recipe_tables.py` writes
this page from the recipes and from [published_settings.yaml](published_settings.yaml)."""  # noqa: E501
ABSENT = "not set"
WHOLE = ("sample.window", "rewards")  # compared as a whole


@dataclass(frozen=True)
class Source:
    """The authors' repository, at the commit that was read."""

    name: str
    repository: str
    commit: str

    def link(self, text: str, at: str) -> str:
        """A Markdown link to `file:line`."""
        path, _, line = at.rpartition(":")
        return f"[{text}]({self.repository}/blob/{self.commit}/{path}#L{line})"


@dataclass(frozen=True)
class PublishedRun:
    """The settings of one published run, by recipe key, each with the place where the authors set it."""

    source: Source
    name: str
    at: str
    published: dict[str, Any]
    places: dict[str, str]
    deviations: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def differing(self, recipe: Recipe) -> list[str]:
        """The keys whose value in the recipe is not the published one."""
        ours = effective_settings(recipe)
        return [key for key, value in self.published.items() if not _same(key, ours.get(key, ABSENT), value)]

    def compared(self, recipe: Recipe) -> Iterator[tuple[str, str, str]]:
        """Each key with the published value and the recipe's, as they are shown, in the order of the schema."""
        ours = effective_settings(recipe)
        for key, value in sorted(self.published.items(), key=lambda each: _order(each[0])):
            yield key, _shown(value), _shown(_comparable(key, ours.get(key, ABSENT), value))


@dataclass(frozen=True)
class Derived:
    """A recipe without a published run: the recipes whose values it has, and the keys in which it differs."""

    parents: tuple[str, ...]
    changed: dict[str, str] = field(default_factory=dict)


def published_runs() -> dict[str, PublishedRun]:
    """The published run of each recipe that has one, by the recipe's name."""
    content = read_mapping(DATA)
    sources = {name: Source(**each) for name, each in content["sources"].items()}
    return {name: _published_run(sources, each) for name, each in content["recipes"].items()}


def derived_recipes() -> dict[str, Derived]:
    """The recipes that are derived from published ones."""
    found = read_mapping(DATA)["derived"]
    return {name: Derived(tuple(each["from"]), each.get("changed", {})) for name, each in found.items()}


def without_counterpart() -> set[str]:
    """The keys that no published code has."""
    return set(read_mapping(DATA)["no_counterpart"])


def shipped_recipe(name: str) -> Recipe:
    """A shipped recipe."""
    return read_recipe(name, without_prompts=True)


def effective_settings(recipe: Recipe) -> dict[str, Any]:
    """Every value that the update or the evaluation depends on, by dotted key, with defaults resolved."""
    content = recipe.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    settings, sample, model = recipe.algorithm.settings(), content["sample"], content["model"]
    content["steps"] = recipe.steps
    content["algorithm"]["options"] = settings.model_dump(mode="json")
    sample["window"] = recipe.window.model_dump(mode="json")
    if sample["same_initial_noise"] is None:
        sample["same_initial_noise"] = settings.same_initial_noise
    if model["text_tokens"] is None:
        length = find_family(recipe.model.family).model_class.text_length
        model["text_tokens"] = length and length.default
    if recipe.evaluation is not None:
        content["evaluation"] = _evaluation(recipe.evaluation, recipe)
    return dict(_leaves(content))


def tables() -> dict[str, str]:
    """The generated tables of recipes.md, by their names."""
    runs, derived = published_runs(), derived_recipes()
    return {
        "recipes for one GPU": _one_gpu_table(),
        "shipped recipes": _shipped_table(runs, derived),
        "recipes against sources": _sources_table(runs),
        "deviations": _deviations_table(runs),
        "differences": _differences_table(runs),
    }


def with_tables(page: str) -> str:
    """The page with every generated table as it should be now."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: written by docs/recipe_tables.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        assert len(pattern.findall(page)) == 1, f"{RECIPES_PAGE.name} needs one place for: {name}"
        page = pattern.sub(lambda _, text=f"{begin}\n{table}\n{end}": text, page)
    return page


def published_page() -> str:
    """The page published_recipes.md: every setting of every published run beside the recipe's."""
    parts = [
        "# Recipes against their sources",
        PUBLISHED_INTRODUCTION,
    ]
    for name, run in published_runs().items():
        rows = []
        for key, published, here in run.compared(shipped_recipe(name)):
            mark = f"**{here}**" if key in run.deviations else here
            rows.append([f"`{key}`", published, mark, run.places[key]])
        title = f"`{run.name}` ({run.source.link(run.at, run.at)}) of {run.source.name}"
        parts += [f"## {name}", title, _table(["key", "published", "recipe", "set in"], rows)]
    return "\n\n".join(parts) + "\n"


def _published_run(sources: Mapping[str, Source], content: Mapping[str, Any]) -> PublishedRun:
    name, at = content["run"]
    unused = tuple(content.get("unused", ()))
    settings = {key: each for key, each in content["published"].items() if key not in unused}
    return PublishedRun(
        source=sources[content["source"]],
        name=name,
        at=at,
        published={key: value for key, (value, _) in settings.items()},
        places={key: place for key, (_, place) in settings.items()},
        deviations=content.get("deviations", {}),
        unused=unused,
        differences=tuple(content.get("differences", ())),
    )


def _evaluation(evaluation: EvaluationSettings, recipe: Recipe) -> dict[str, Any]:
    return {
        "every": evaluation.every,
        "denoising_steps": evaluation.denoising_steps,
        "guidance": recipe.model.guidance if evaluation.guidance is None else evaluation.guidance,
        "weights": "ema" if recipe.evaluates_average else "trained",
    }


def _leaves(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value and key not in WHOLE:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _same(key: str, ours: Any, published: Any) -> bool:
    return bool(_comparable(key, ours, published) == published)


def _comparable(key: str, ours: Any, published: Any) -> Any:
    """The recipe's value; of its rewards, the settings that the published ones have."""
    if key != "rewards":
        return ours
    known = {name for reward in published for name in reward}
    return [{name: value for name, value in reward.items() if name in known} for reward in ours]


def _one_gpu_table() -> str:
    """The recipes for one GPU, by its memory, which their first comment has, and by what the model does."""
    cells: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in shipped_recipes():
        lines = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
        memory = re.search(r"(?:intended for|on one GPU with) (\d+) GB", comment)
        if memory is not None:
            task = find_family(shipped_recipe(name).model.family).tasks[0]
            cells[int(memory[1])][task].append(f"`{name}`")
    tasks = list(dict.fromkeys(task for row in cells.values() for task in row))
    rows = [[f"{size} GB", *(", ".join(cells[size][task]) for task in tasks)] for size in sorted(cells)]
    return _table(["one GPU with", *(task.replace("_", " ") for task in tasks)], rows)


def _shipped_table(runs: Mapping[str, PublishedRun], derived: Mapping[str, Derived]) -> str:
    rows = []
    for name in shipped_recipes():
        recipe = shipped_recipe(name)
        sample, lora = recipe.sample, recipe.training.lora
        frames = [sample.frames] if sample.frames > 1 else []
        how = "full" if lora is None else f"LoRA {lora.rank}/{lora.alpha:g}"
        noise = "none" if recipe.window.kind == "none" else f"{sample.noise.kind} {sample.noise.level:g}"
        rows.append(
            [
                f"`{name}`",
                " x ".join(str(side) for side in [sample.height, sample.width, *frames]),
                str(sample.denoising_steps),
                noise,
                f"{recipe.batch.samples_per_prompt} x {recipe.batch.prompts}",
                f"{_number(recipe.training.learning_rate)} {how}",
                _origin(name, runs, derived),
            ]
        )
    heads = ["recipe", "size", "steps", "noise", "samples x prompts", "learning rate", "numbers from"]
    return _table(heads, rows)


def _origin(name: str, runs: Mapping[str, PublishedRun], derived: Mapping[str, Derived]) -> str:
    if name in runs:
        return f"published: {runs[name].source.name}"
    if name in derived:
        return ", ".join(f"`{parent}`" for parent in derived[name].parents)
    return "this project"


def _sources_table(runs: Mapping[str, PublishedRun]) -> str:
    rows = []
    for name, run in runs.items():
        count = len(run.published)
        differing = ", ".join(f"`{key}`" for key in run.deviations)
        equal = f"{count - len(run.deviations)} of {count}"
        anchor = f"[{equal}](published_recipes.md#{name})"
        rows.append([f"`{name}`", f"{run.source.link(run.source.name, run.at)}, `{run.name}`", anchor, differing])
    return _table(["recipe", "published run", "equal settings", "deviations"], rows)


def _deviations_table(runs: Mapping[str, PublishedRun]) -> str:
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for name, run in runs.items():
        for key, published, here in run.compared(shipped_recipe(name)):
            if key in run.deviations:
                groups[(key, published, here, run.deviations[key])].append(f"`{name}`")
    rows = [
        [f"`{key}`", published, here, reason, _names(names, len(runs))]
        for (key, published, here, reason), names in sorted(groups.items(), key=lambda each: _order(each[0][0]))
    ]
    return _table(["setting", "published", "recipe", "reason", "recipes"], rows)


def _differences_table(runs: Mapping[str, PublishedRun]) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    for name, run in runs.items():
        for difference in run.differences:
            groups[difference].append(f"`{name}`")
    return _table(["difference", "recipes"], [[text, ", ".join(names)] for text, names in groups.items()])


def _names(names: list[str], count: int) -> str:
    return "all" if len(names) == count else ", ".join(names)


def _order(key: str) -> tuple[int, str]:
    """Sorts keys by section, in the order of the schema."""
    return list(Recipe.model_fields).index(key.partition(".")[0]), key


def _shown(value: Any) -> str:
    if value == ABSENT:
        return ABSENT
    if isinstance(value, float):
        return f"`{_number(value)}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _number(value: float) -> str:
    return re.sub(r"e([+-])0", r"e\1", f"{value:g}") if value >= 1e-2 else re.sub("e-0", "e-", f"{value:.0e}")


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    text[1] = f"|{'|'.join(lines[1])}|"
    return "\n".join(text)


def main() -> None:
    write_atomically(RECIPES_PAGE, with_tables(RECIPES_PAGE.read_text(encoding="utf-8")))
    write_atomically(PUBLISHED_PAGE, published_page())


if __name__ == "__main__":
    main()
