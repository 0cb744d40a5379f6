"""Reading the documentation pages: code blocks, tables and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class DocPage:
    """A Markdown page, by its path."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """The page without its code blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, *languages: str) -> list[str]:
        """The code blocks in one of these languages; "" is a block without a language."""
        return [block for language, block in _FENCE.findall(self.text) if language in languages]

    def table(self, first_heading: str, after: str = "") -> list[list[str]]:
        """The cells of the first table with this heading in its first column, without the head."""
        text = self.text[self.text.index(after) :]
        found = re.search(rf"^\| {re.escape(first_heading)} \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", text, re.M)
        assert found is not None, f"{self.path.name} has no table headed {first_heading}"
        return [[cell.strip() for cell in line.strip("|").split(" |")] for line in found[1].splitlines()]

    def links(self) -> list[str]:
        """The targets of links and images that stay inside the repository."""
        targets = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    def anchors(self) -> set[str]:
        """The headings, as GitHub spells them in links."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(cell: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)
