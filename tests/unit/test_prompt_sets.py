"""Every prompt set has thousands of different prompts, the same everywhere, and a held-out split of its own."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from pathlib import Path

import pytest
from doc_pages import DOCS, DocPage
from typer.testing import CliRunner, Result

from digenrl.cli import app
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.rewards.quoted_text import quoted
from digenrl.prompt_sets.contract import FRUITLESS_DRAWS, STANDARD_COUNT, GeneratedPrompt, PromptSet
from digenrl.prompt_sets.grammar import SLOT, Draw, Grammar
from digenrl.prompt_sets.registry import PROMPT_SETS
from digenrl.prompts.sources import read_prompts
from digenrl.rewards.ocr import normalized

each_set = pytest.mark.parametrize("name", PROMPT_SETS)


@pytest.fixture(scope="module")
def standard() -> dict[str, list[GeneratedPrompt]]:
    """The training prompts of every set."""
    return {name: each.prompts() for name, each in PROMPT_SETS.items()}


@each_set
def test_a_set_has_thousands_of_different_prompts(name: str, standard: dict[str, list[GeneratedPrompt]]) -> None:
    texts = {prompt.text for prompt in standard[name]}
    assert len(texts) == len(standard[name]) == STANDARD_COUNT["train"] > 4000


@each_set
def test_nothing_is_both_trained_and_held_out_whatever_the_seeds(
    name: str, standard: dict[str, list[GeneratedPrompt]]
) -> None:
    held_out = PROMPT_SETS[name].prompts("held_out", seed=1)
    assert len(held_out) == STANDARD_COUNT["held_out"]
    assert not {prompt.subject for prompt in held_out} & {prompt.subject for prompt in standard[name]}
    assert not {prompt.text for prompt in held_out} & {prompt.text for prompt in standard[name]}


@each_set
def test_more_prompts_begin_with_the_same_ones_and_another_seed_gives_others(
    name: str, standard: dict[str, list[GeneratedPrompt]]
) -> None:
    assert PROMPT_SETS[name].prompts(count=50) == standard[name][:50]
    other = {prompt.text for prompt in PROMPT_SETS[name].prompts(count=50, seed=1)}
    assert len(other & {prompt.text for prompt in standard[name][:50]}) < 5


@each_set
def test_prompts_are_well_formed_sentences(name: str, standard: dict[str, list[GeneratedPrompt]]) -> None:
    for prompt in standard[name]:
        text = prompt.text
        assert text[0].isupper() and text == " ".join(text.split()) and len(text) < 300, text
        assert not re.search(r"[\[\]]|,,| ,|,$|\b[Aa] [aeio]|\b[Aa]n [^aehiou8A-Z1]", QUOTES.sub('""', text)), text
        assert set(prompt.wants) == set(PROMPT_SETS[name].columns)
        assert json.loads(prompt.as_json_line()) == {"prompt": text, **prompt.wants}


QUOTES = re.compile('"[^"]*"')


def test_the_prompts_are_the_same_on_every_machine_and_in_every_version(
    standard: dict[str, list[GeneratedPrompt]],
) -> None:
    digests = {
        name: blake2b("\n".join(each.as_json_line() for each in prompts).encode(), digest_size=4).hexdigest()
        for name, prompts in standard.items()
    }
    assert digests == DIGESTS


DIGESTS = {
    "ocr_signs": "0c152fda",
    "objects": "5d7b4d5a",
    "counts": "a2eaf2b9",
    "colors": "d6883848",
    "positions": "737c93c7",
    "scenes": "7cc9e333",
    "motions": "4c06a944",
}


def test_the_text_of_a_sign_is_the_one_that_the_reward_looks_for(
    standard: dict[str, list[GeneratedPrompt]],
) -> None:
    for prompt in standard["ocr_signs"]:
        assert quoted(prompt.text) == prompt.wants["text"] and len(prompt.wants["text"]) < 40
        assert normalized(prompt.wants["text"]) == prompt.subject
    assert len({prompt.subject for prompt in standard["ocr_signs"]}) > 3000


def test_what_is_asked_of_objects_is_what_the_prompt_says(standard: dict[str, list[GeneratedPrompt]]) -> None:
    kinds = {"counts": "count", "colors": "color", "positions": "position"}
    for name, kind in kinds.items():
        assert {prompt.wants["kind"] for prompt in standard[name]} == {kind}
    assert {prompt.wants["kind"] for prompt in standard["objects"]} == set(kinds.values())
    for prompt in standard["objects"]:
        wants, text = prompt.wants, prompt.text.lower()
        for each in wants["objects"]:
            assert each["name"][:-2] in text and 1 <= each["count"] <= 6
            assert each["color"] is None or f"{each['color']} {each['name']}" in text
        assert (wants["relation"] is None) == (wants["kind"] != "position")
        assert wants["relation"] is None or f" {wants['relation']} " in f" {text} ".replace("to the ", "")
        most = max(each["count"] for each in wants["objects"])
        assert (most > 1) == (wants["kind"] == "count")


def test_a_recipe_gets_the_prompts_with_their_columns() -> None:
    first, second = read_prompts(PromptSettings(name="positions", count=2))
    drawn = PROMPT_SETS["positions"].prompts(count=2)
    assert (first.id, second.id) == (0, 1)
    assert [(each.text, each.metadata) for each in (first, second)] == [(each.text, each.wants) for each in drawn]


def test_a_set_that_has_too_few_prompts_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(draw: Draw) -> GeneratedPrompt:
        number = str(draw.below(16))
        return GeneratedPrompt(number, {}, number)

    assert FRUITLESS_DRAWS > 1000
    small = PromptSet("small", "sixteen numbers", "none", draw)
    train, held_out = small.prompts("train", 20), small.prompts("held_out", 20)
    assert sorted(int(prompt.text) for prompt in (*train, *held_out)) == list(range(16))
    monkeypatch.setitem(PROMPT_SETS, "small", small)
    with pytest.raises(ConfigError, match=rf"small: has {len(train)} prompts, count = 20"):
        read_prompts(PromptSettings(name="small", count=20))


def test_a_file_is_read_up_to_the_count(tmp_path: Path) -> None:
    path = tmp_path / "three.txt"
    path.write_text("a\nb\nc\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(PromptSettings(path=path, count=2))] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"three\.txt: has 3 prompts, count = 4"):
        read_prompts(PromptSettings(path=path, count=4))


def test_slots_choose_case_article_and_numbers() -> None:
    grammar = Grammar({"animal": ("owl",), "pair": ("[animal] and [a animal]",)})
    assert grammar.expand("[a animal], [Animal], [ANIMAL], [pair], [7-7]", Draw("")) == (
        "an owl, Owl, OWL, owl and an owl, 7"
    )
    drawn = {int(grammar.expand("[3-6]", Draw(str(seed)))) for seed in range(100)}
    assert drawn == {3, 4, 5, 6}


@pytest.mark.parametrize("module", ["signs", "scenes", "motions"])
def test_every_rule_of_a_grammar_is_used_and_every_slot_has_a_rule(module: str) -> None:
    grammar = __import__(f"digenrl.prompt_sets.{module}", fromlist=["GRAMMAR"]).GRAMMAR
    texts = [text for rule in grammar.rules.values() for text in rule]
    slots = {slot[4].lower() for text in texts for slot in SLOT.finditer(text) if slot[4]}
    assert slots <= set(grammar.rules)
    assert all(len(set(rule)) >= len(rule) - 1 and rule for rule in grammar.rules.values()), "no word twice"


def test_the_documentation_has_every_set_with_its_columns() -> None:
    page = DocPage(DOCS / "recipes.md")
    rows = {name: cells for cells in page.table("set") for name in re.findall(r"`(\w+)`", cells[0])}
    assert set(rows) == set(PROMPT_SETS)
    for name in PROMPT_SETS.keys() - {"counts", "colors", "positions"}:  # as `objects`
        columns = set(re.findall(r"`(\w+)`", rows[name][3]))
        assert columns == set(PROMPT_SETS[name].columns)
        assert rows[name][1] == PROMPT_SETS[name].description
    example = json.loads(page.blocks("json")[0])
    generated = json.loads(PROMPT_SETS["positions"].prompts(count=1)[0].as_json_line())
    assert example.keys() == generated.keys() and example["objects"][0].keys() == generated["objects"][0].keys()


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["prompts", *map(str, arguments)])


def test_the_command_lists_prints_and_writes(tmp_path: Path) -> None:
    listed = command().output
    assert all(name in listed for name in PROMPT_SETS)
    assert [each["name"] for each in json.loads(command("--json").output)] == list(PROMPT_SETS)
    drawn = PROMPT_SETS["motions"].prompts("held_out", 30, seed=2)
    printed = command("motions", "--count", 30, "--split", "held_out", "--seed", 2).output.splitlines()
    assert printed == [prompt.text for prompt in drawn]
    path = tmp_path / "motions.jsonl"
    assert command("motions", "--count", 30, "--split", "held_out", "--seed", 2, "--out", path).exit_code == 0
    read = read_prompts(PromptSettings(path=path))
    assert [(each.text, each.metadata) for each in read] == [(each.text, each.wants) for each in drawn]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sgins"], "NAME: unknown prompt set 'sgins'"),
        (["scenes", "--split", "test"], "--split: .*'held_out', got 'test'"),
        (["scenes", "--out", "p.csv"], r"--out: .*'\.csv'.*\.txt, \.jsonl"),
        (["--out", "p.txt"], "--out: give the name of a prompt set"),
        (["scenes", "--json", "--out", "p.jsonl"], "--json: prints the prompts, but --out"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: list[str], message: str) -> None:
    error = command(*arguments).exception
    assert isinstance(error, ConfigError) and re.match(message, str(error)) and "\n" not in str(error)


def test_a_file_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("mine\n", encoding="utf-8")
    error = command("counts", "--count", 1, "--out", path).exception
    assert isinstance(error, ConfigError) and "--force" in str(error) and path.read_text() == "mine\n"
    assert command("counts", "--count", 1, "--out", path, "--force").exit_code == 0
    assert path.read_text() == PROMPT_SETS["counts"].prompts(count=1)[0].text + "\n"
