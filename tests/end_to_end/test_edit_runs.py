"""Runs of a tiny model that edits images: training, rewards beside the source, evaluation, resuming, sampling."""

from __future__ import annotations

from pathlib import Path

import pytest
from edit_runs import EditRuns
from live_runs import lines_of, trained
from PIL import Image

from digenrl.commands.sample import SampleRequest, sample_run
from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import RunFolder, Status


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> EditRuns:
    return EditRuns(tmp_path_factory.mktemp("edits"))


def rewards(folder: RunFolder) -> list[float]:
    return [line["reward_mean"] for line in lines_of(folder.metrics)]


def test_processes_and_one_process_edit_the_same_samples(live: EditRuns) -> None:
    apart, together = live.finished(), live.finished("mode=colocated")
    assert rewards(apart) == rewards(together) and len(rewards(apart)) == 2
    assert trained(apart, 2)["weights.safetensors"] == trained(together, 2)["weights.safetensors"]
    assert lines_of(apart.evaluations)[-1]["reward_mean"] == lines_of(together.evaluations)[-1]["reward_mean"]


def test_a_resumed_run_continues_with_the_same_sources(live: EditRuns) -> None:
    whole = live.finished("mode=colocated")
    status, folder = live.run("mode=colocated", "steps=1")
    assert status is Status.FINISHED
    assert live.resume(folder.path, "steps=2") is Status.FINISHED
    assert trained(folder, 2) == trained(whole, 2)


def test_samples_are_made_from_the_sources_of_the_evaluation_or_from_given_ones(
    live: EditRuns, tmp_path: Path
) -> None:
    run = live.finished().path
    evaluated = sample_run(run, SampleRequest(), tmp_path / "evaluated", lambda *_: None)
    assert len(evaluated.pictures) == 3
    image = live.root / "source-0.png"
    given = SampleRequest(prompts=("make it red 0",), images=(image,))
    one = sample_run(run, given, tmp_path / "given", lambda *_: None)
    assert Image.open(one.folder / "0000.png").tobytes() == Image.open(evaluated.folder / "0000.png").tobytes()
    for images in ((), (image, image)):
        with pytest.raises(ConfigError, match="source image"):
            request = SampleRequest(prompts=("make it red",), images=images)
            sample_run(run, request, tmp_path / "never", lambda *_: None)
