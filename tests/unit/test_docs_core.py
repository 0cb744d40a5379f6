"""The tables of docs/core.md match the registries."""

from __future__ import annotations

from doc_pages import DOCS, DocPage

from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.models.registry import FAMILIES

CORE = DocPage(DOCS / "core.md")
STD = {"batch": "whole batch", "group": "group"}


def rows(heading: str, first_heading: str) -> dict[str, list[str]]:
    """The other cells of each row of a section's table, by the name in its first cell."""
    table = CORE.table(first_heading, after=f"## {heading}\n")
    return {cells[0].strip("`"): cells[1:] for cells in table}


def test_the_table_of_algorithms_has_them_all_with_their_std() -> None:
    table = rows("Algorithms", "name")
    assert list(table) == list(ALGORITHMS)
    for name, (loss, std, _) in table.items():
        algorithm = build_algorithm(name)
        assert std == ("none" if name == "flow_dpo" else STD[algorithm.scale_over]), name
        penalized = getattr(algorithm.settings, "kl_weight", None) or 0
        assert ("KL to the reference" in loss) == (penalized > 0 and name != "diffusion_nft"), name


def test_the_table_of_models_has_every_family_and_size() -> None:
    table = rows("Models", "family")
    assert list(table) == list(FAMILIES)
    for name, (pipeline, sizes, guidance) in table.items():
        family = FAMILIES[name]
        assert pipeline == family.pipeline_class.__name__
        for size in family.sizes.values():
            assert f"{size.billions:.2f} B" in sizes, name
        assert guidance.startswith("classifier-free" if family.uses_negative_prompts else "embedded"), name
