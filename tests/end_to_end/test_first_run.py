"""A first run: a reward in the current folder, and mistakes that leave nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_runs import LiveRuns, metric
from rich.console import Console

from digenrl.commands.train import resume_run, start_run
from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import RunFolder, Status

REWARD = "def brightness(pixels, prompts, metadata):\n    return pixels.flatten(1).mean(dim=1)\n"


@pytest.fixture
def elsewhere(live: LiveRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which is neither that of the recipe nor on the path of modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    yield tmp_path
    sys.modules.pop("own_reward", None)


def start(live: LiveRuns, *overrides: str, out: Path | None = None) -> Status:
    return start_run(str(live.root / "tiny.yaml"), overrides, out, Console(quiet=True), as_json=False)


def test_workers_find_a_module_of_the_current_folder_and_find_it_again_when_resumed(
    live: LiveRuns, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "own_reward.py").write_text(REWARD, encoding="utf-8")
    own = ("rewards=own_reward:brightness", "prompts.name=scenes", "steps=1")
    assert start(live, *own) is Status.FINISHED
    run = RunFolder.open(elsewhere / "runs" / "tiny-1")
    assert run.recipe.python_path == (elsewhere,)
    monkeypatch.chdir(live.root)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(elsewhere)])
    assert resume_run(run.path, ["steps=2"], Console(quiet=True), as_json=False) is Status.FINISHED
    assert all(0 < mean < 1 for mean in metric(run, "reward/brightness"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards=no_such_module:reward"], "no module named 'no_such_module'"),
        (["rewards=own_reward:brightness"], r"own_reward cannot be imported: ZeroDivisionError in .*, line 1"),
        (["evaluation={prompts: {name: scenes}, rewards: ['live_rewards:rednes']}"], "did you mean 'redness'"),
        (["mode=colocated", "rewards={name: clip_score, model: no/such/folder/here}"], "no/such/folder/here"),
    ],
)
def test_a_run_that_does_not_start_leaves_nothing_behind(
    live: LiveRuns, elsewhere: Path, overrides: list[str], message: str
) -> None:
    (elsewhere / "own_reward.py").write_text("wrong = 1 / 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        start(live, *overrides)
    assert "\n" not in str(caught.value)
    assert {path.name for path in elsewhere.iterdir()} - {"__pycache__"} == {"own_reward.py"}


def test_what_was_there_before_stays_if_a_run_does_not_start(live: LiveRuns, elsewhere: Path) -> None:
    existing = [elsewhere / "empty", elsewhere / "runs", elsewhere / "runs" / "tiny-1"]
    for folder in existing:
        folder.mkdir()
    for out in (None, elsewhere / "new", elsewhere / "empty"):
        with pytest.raises(ConfigError, match="evaluation: height"):  # found by a worker, once there is a folder
            start(live, "mode=colocated", "evaluation={prompts: {name: scenes}, height: 17}", out=out)
        assert sorted(elsewhere.rglob("*")) == existing
