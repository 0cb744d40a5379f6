"""requirements.lock pins the same versions as constraints.txt, each with hashes, and names no package index."""

from __future__ import annotations

import re

from doc_pages import ROOT

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?==([^\s;\\]+)", re.M)


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return {package.lower().replace("_", "-").replace(".", "-"): version for package, version in PIN.findall(text)}


def test_the_lock_has_hashes_for_the_versions_that_continuous_integration_uses() -> None:
    locked, constraints = pins("requirements.lock"), pins("constraints.txt")
    assert {name: constraints[name] for name in locked.keys() & constraints.keys()}.items() <= locked.items()
    assert {"torch", "ray", "diffusers", "setuptools", "pytest", "mypy"} <= locked.keys()
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in entry, entry
