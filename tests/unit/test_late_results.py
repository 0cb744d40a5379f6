"""Results that are late, doubled or invalid, and artifacts that are lost while others still read them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fake_workers import FakeRun, begun, fake_recipe

from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.weight_versions import WeightVersions
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import (
    NO_WEIGHTS,
    ArtifactLost,
    Encode,
    Encoded,
    Event,
    Export,
    Exported,
    Generate,
    Generated,
    GroupArtifact,
    JobFailed,
    PromptRow,
    Publish,
    Score,
    Scored,
    Scores,
    Slice,
    SliceArtifact,
    Tick,
    Train,
    WeightsReference,
    WorkerLost,
    slice_name,
)
from digenrl.transports.contract import Gone, InputsLost, Message
from digenrl.worker.assignment import TRAINER

PIECE = Slice(0, 0, 0, 2)


def events_of(run: FakeRun, *messages: Message) -> list[Event]:
    """What the scheduler hears of some messages."""
    run.transport.waiting += messages
    run.driver.receive()
    events = []
    while not isinstance(event := run.driver.next_event(), Tick):
        events.append(event)
    return events


def generate(run: FakeRun, job_id: int = 0) -> Generate:
    job = Generate(job_id, 0, PIECE, 0, version=0)
    run.driver.submit(job)
    return job


def test_a_doubled_result_is_dropped_and_its_slice_stays(tmp_path: Path) -> None:
    run = begun(tmp_path)
    job = generate(run)
    run.exchange.path(slice_name(0)).touch()
    message = Message("generator-0", 0, Generated(0, job, 0))
    assert [type(event) for event in events_of(run, message, message)] == [Generated]
    assert slice_name(0) in run.exchange.names()


def test_a_late_result_of_a_lost_worker_is_dropped_and_its_slice_is_freed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    job = generate(run)
    run.transport.kill("generator-0")
    run.driver.receive()
    run.exchange.path(slice_name(0)).touch()
    events = events_of(run, Message("generator-0", 0, Generated(0, job, 0)))
    assert [type(event) for event in events] == [WorkerLost]
    assert slice_name(0) not in run.exchange.names()


@pytest.mark.parametrize("values", [(1.0, math.nan), (1.0,), (1.0, math.inf), (1.0, 2.0, 3.0)])
def test_rewards_that_are_not_one_finite_number_per_sample_count_as_failed(
    values: tuple[float, ...], tmp_path: Path
) -> None:
    run = begun(tmp_path)
    events_of(run, Message("generator-0", 0, Generated(0, generate(run), 0)))
    score = Score(1, 0, PIECE, scorer=0)
    run.driver.submit(score)
    (event,) = events_of(run, Message("reward-0", 1, Scored(0, score, Scores(values, {}))))
    assert isinstance(event, JobFailed) and "2 finite rewards" in event.reason
    (root := tmp_path / "scoring generators").mkdir()
    run = begun(root, lanes={"rewards": 0})
    result = Generated(0, generate(run), 0, scores=Scores(values, {}))
    (event,) = events_of(run, Message("generator-0", 0, result))
    assert isinstance(event, Generated) and "2 finite rewards" in event.score_failure


def test_a_version_that_a_commit_replaced_is_not_published_with_the_newer_weights(tmp_path: Path) -> None:
    """The scheduler hears of a worker that joins before it hears of a commit that arrived at the same time."""
    run = begun(tmp_path)
    run.driver.stores.versions.take(1, WeightsReference("weights-1", 100, 7))
    run.driver.submit(Publish(5, 0, version=0, lanes=(0,)))
    event = run.driver.next_event()
    assert isinstance(event, ArtifactLost) and event.job.id == 5
    run.driver.submit(Publish(6, 0, version=1, lanes=(0,)))
    assert list(run.transport.workers["generator-0"].jobs) == [6]


def test_an_export_that_a_commit_overtook_does_not_replace_the_newer_version(tmp_path: Path) -> None:
    run = begun(tmp_path)
    export = Export(0, 0, version=0)
    run.driver.submit(export)
    run.driver.stores.versions.take(1, WeightsReference("weights-1", 100, 7))
    events_of(run, Message(TRAINER, 0, Exported(0, export, NO_WEIGHTS)))
    assert run.driver.stores.versions.newest.name == "weights-1"


@pytest.mark.parametrize("trainer_lost_first", [True, False])
def test_a_lane_that_lost_the_weights_of_an_update_also_reports_its_lost_slices(
    trainer_lost_first: bool, tmp_path: Path
) -> None:
    """The lane is free again once the trainer, which made the weights, is lost. Its lost slices are made again."""
    run = begun(tmp_path)
    stores, weights = run.driver.stores, WeightsReference("update-5", 100, 7)
    run.exchange.path("update-5").touch()
    stores.versions.take_update(weights)
    artifact = SliceArtifact(PIECE, slice_name(0), 0)
    stores.samples.add_slice(artifact)
    prompt = stores.prompts.row(0, 0)
    job = Train(7, 0, PIECE, 0, update=1, group=GroupArtifact(0, prompt, (artifact,), (1.0, 2.0)), weights=weights)
    stores.samples.add_slice(SliceArtifact(Slice(0, 0, 2, 2), slice_name(1), 0))
    stores.samples.add_scores(Slice(0, 0, 0, 4), Scores((1.0, 2.0, 3.0, 4.0), {}), artifact)
    run.driver.submit(job)
    lost = Message("generator-0", 7, InputsLost(("update-5", slice_name(0))))
    run.transport.workers.pop(TRAINER)
    gone = Message(TRAINER, None, Gone("lost its machine", fault=False))
    messages = (gone, lost) if trainer_lost_first else (lost, gone)
    events = events_of(run, *messages)
    assert {type(event) for event in events} == {ArtifactLost, WorkerLost}
    (loss,) = [event for event in events if isinstance(event, ArtifactLost)]
    assert loss.slices == (PIECE,)


def test_weights_of_an_update_are_kept_while_a_pending_job_reads_them(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for name in ("update-1", "update-2"):
        run.exchange.path(name).touch()
    versions = WeightVersions(fake_recipe(), run.exchange)
    versions.take_update(WeightsReference("update-1", 100, 7))
    reader = Train(3, 0, PIECE, 0, update=1, weights=versions.of_update)
    versions.take_update(WeightsReference("update-2", 100, 7))
    versions.drop_old([reader])
    assert {"update-1", "update-2"} <= set(run.exchange.names())
    versions.drop_old([])
    assert [name for name in run.exchange.names() if name.startswith("update")] == ["update-2"]


def test_a_version_that_only_a_lost_worker_was_loading_is_freed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.driver.submit(Publish(0, 0, 0, (0,)))
    run.exchange.path("weights-1").touch()
    run.driver.stores.versions.take(1, WeightsReference("weights-1", 100, 7))
    run.driver.stores.versions.drop_old([job for job in [run.transport.workers["generator-0"].jobs[0]] if job])
    assert "weights-0" in run.exchange.names()
    run.transport.kill("generator-0")
    run.driver.receive()
    assert "weights-0" not in run.exchange.names()


def test_a_prompt_lost_while_its_step_is_encoded_without_it_is_reported(tmp_path: Path) -> None:
    """Prompts repeat: one that is encoded already is left out of the job, and may be lost before that ends."""
    run = begun(tmp_path)
    run.driver.submit(Encode(0, 0, 0, (0, 3)))
    run.driver.stores.prompts.forget(run.driver.stores.prompts.row(0, 0).row)
    waiting = Generate(1, 0, PIECE, 0, 0)
    run.driver.submit(waiting)
    assert run.transport.kinds_of_jobs("generator-0") == []
    run.transport.answer("encoder")
    encoded, lost = events_of(run)
    assert isinstance(encoded, Encoded) and isinstance(lost, ArtifactLost)
    assert (lost.job, lost.prompts) == (waiting, ((0, 0),))


def test_rows_that_pending_jobs_read_are_not_dropped_with_their_step() -> None:
    dropped: list[str] = []
    prompts = [Prompt(index, f"prompt {index}") for index in range(4)]
    store = PromptStore(PromptSampler(prompts, 2, seed=0), dropped.append, kept=1)
    rows: tuple[PromptRow, ...] = store.missing(0, (0, 1))
    store.add_encoded(rows)
    store.close_step(0, pending=rows[:1])
    assert store.is_encoded(rows[0]) and dropped == [rows[1].row]


def test_the_first_of_two_copies_of_a_slice_is_kept() -> None:
    store = SampleStore()
    assert store.add_slice(SliceArtifact(PIECE, "slice-0", 0))
    assert not store.add_slice(SliceArtifact(PIECE, "slice-1", 0))
    assert store.holds("slice-0") and not store.holds("slice-1")
