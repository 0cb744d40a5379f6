"""Workers in one process: jobs of the device run one at a time, and scoring runs beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from fake_recipes import fake_recipe

from digenrl.records import Job, Result
from digenrl.transports.contract import Gone, Message
from digenrl.transports.inline import InlineTransport
from digenrl.worker.assignment import Assignment, Duty, Ready

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Act(Job):
    """Runs the function of this name."""

    name: str


class Stub:
    """A worker whose jobs are functions of a test."""

    def __init__(self, acts: dict[str, Callable[[], Any]]) -> None:
        self._acts = acts

    def handle(self, job: Act) -> Result:
        self._acts.get(job.name, lambda: None)()
        return Result(0, job)


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """The acts of all workers, by name."""
    acts: dict[str, Callable[[], Any]] = {}
    monkeypatch.setattr("digenrl.transports.inline.start_worker", lambda *_: (Stub(acts), Ready()))
    return acts


@pytest.fixture
def transport(acts: dict[str, Callable[[], Any]]) -> Iterator[InlineTransport]:
    """A trainer and a reward worker, both ready."""
    transport = InlineTransport()
    workers: dict[str, set[Duty]] = {"trainer": {"generate", "train"}, "reward-0": {"score"}}
    for name, duties in workers.items():
        transport.start(Assignment(name, frozenset(duties), "cpu", fake_recipe(), Path("exchange")))
        assert transport.receive(0) == [Message(name, None, Ready())]
    yield transport
    transport.stop()


def send(transport: InlineTransport, worker: str, job_id: int, name: str) -> None:
    transport.send(worker, Act(job_id, 0, name))


def received(transport: InlineTransport, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        found = transport.receive(TIMEOUT_S)
        assert found, f"no more messages after {messages}"
        messages += found
    return messages


def test_samples_are_scored_while_the_device_works(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    generating, scored = threading.Event(), threading.Event()

    def generate() -> None:
        generating.set()
        assert scored.wait(TIMEOUT_S)

    def score() -> None:
        assert generating.wait(TIMEOUT_S)
        scored.set()

    acts.update({"slice": generate, "score": score})
    send(transport, "reward-0", 1, "score")
    send(transport, "trainer", 2, "slice")
    messages = received(transport, 2)
    assert {(each.worker, each.job_id, each.report) for each in messages} == {
        ("reward-0", 1, Result(0, Act(1, 0, "score"))),
        ("trainer", 2, Result(0, Act(2, 0, "slice"))),
    }
    assert all(each.waited_ns >= 0 for each in messages)


def test_scores_are_received_before_the_device_starts_its_next_job(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    scored = threading.Event()
    acts.update({"another": scored.set, "slice": lambda: scored.wait(TIMEOUT_S)})
    send(transport, "trainer", 1, "slice")
    send(transport, "trainer", 2, "next slice")
    send(transport, "reward-0", 3, "score")
    send(transport, "reward-0", 4, "another")
    jobs = [each.job_id for each in received(transport, 4)]
    assert jobs.index(3) < jobs.index(2)


def test_a_message_says_how_long_its_report_waited(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    second = threading.Event()
    acts.update({"next": second.set, "slice": lambda: second.wait(TIMEOUT_S)})
    send(transport, "reward-0", 1, "score")
    send(transport, "reward-0", 2, "next")
    send(transport, "trainer", 3, "slice")
    by_job = {each.job_id: each for each in received(transport, 3)}
    assert by_job[1].waited_ns > by_job[3].waited_ns == 0


def test_no_thread_is_left_when_a_worker_or_the_run_ends(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    ended = threading.Event()
    acts["score"] = lambda: ended.wait(TIMEOUT_S)
    send(transport, "reward-0", 1, "score")
    transport.end("reward-0")
    transport.start(Assignment("reward-0", frozenset({"score"}), "cpu", fake_recipe(), Path("exchange")))
    ended.set()
    send(transport, "reward-0", 2, "another")
    reports = [(each.job_id, each.report) for each in received(transport, 2)]
    assert reports == [(None, Ready()), (2, Result(0, Act(2, 0, "another")))], (
        "nothing from the worker that was ended"
    )
    transport.stop()
    transport.stop()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("reward")]
    for thread in left:
        thread.join(TIMEOUT_S)  # that of the worker that was ended may still be on its way out
    assert not any(thread.is_alive() for thread in left)


def test_a_reward_worker_that_exits_is_reported_as_gone(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    def exit_process() -> None:
        raise SystemExit(3)

    acts["score"] = exit_process
    send(transport, "reward-0", 1, "score")
    assert received(transport, 1) == [Message("reward-0", None, Gone("left with exit code 3"), waited_ns=ANY)]
