"""The page: one file, safe against any prompt, complete or absent."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import NASTY_PROMPT, write_run
from handmade_traces import on_policy_trace

from digenrl.report.page import embedded
from digenrl.report.page import write_report as write_report_of
from digenrl.run_folder.reading import read_run
from digenrl.telemetry.perfetto import perfetto_json


def write_report(folder: Path) -> Path:
    return write_report_of(read_run(folder))


class Elements(HTMLParser):
    """Every element's name and attributes, and the text inside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] == "script":
            self.scripts.append(data)


def content_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_page_has_the_run_and_the_trace_is_written_beside_it(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run"))
    assert page == tmp_path / "run" / "report.html"
    content = content_in(page)
    assert (content["name"], content["status"]) == ("handmade", "finished")
    assert "flow_grpo" in content["recipe"]
    assert json.loads((tmp_path / "run" / "trace.json").read_text()) == perfetto_json(on_policy_trace())
    assert not list((tmp_path / "run").glob("*.partial"))


def test_a_prompt_cannot_escape_from_the_embedded_data(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run"))
    assert content_in(page)["grids"]["shown"][0]["cells"][1]["prompt"] == NASTY_PROMPT
    elements = Elements(page.read_text())
    assert elements.names.count("script") == 2
    assert "img" not in elements.names
    assert not [name for name, _ in elements.attributes if name.startswith("on")]


@pytest.mark.parametrize("text", ["</script>", "<!-- <script>", "a & b", "\u2028", "\ud800", 'quote " and \\'])
def test_embedded_text_is_read_back_unchanged(text: str) -> None:
    packed = embedded({"text": text})
    assert json.loads(packed) == {"text": text}
    assert not set("<>&\u2028\ud800") & set(packed)


def test_embedded_numbers_are_short_and_never_invalid() -> None:
    assert embedded([0.1234567891, float("inf"), 123456789, True]) == "[0.123457,null,123456789,true]"


def test_the_page_refers_to_no_other_file(tmp_path: Path) -> None:
    elements = Elements(write_report(write_run(tmp_path / "run")).read_text())
    assert not {name for name, _ in elements.attributes} & {"src", "href", "srcset", "action"}
    (policy,) = [value for name, value in elements.attributes if name == "content" and "-src" in value]
    assert policy.startswith("default-src 'none'; img-src data:;") and "unsafe" not in policy


def test_scripts_never_parse_text_as_markup(tmp_path: Path) -> None:
    script = Elements(write_report(write_run(tmp_path / "run")).read_text()).scripts[-1]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("):
        assert word not in script


def test_a_report_is_reproducible(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
