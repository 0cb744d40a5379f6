"""Workers in one process: the device's orders one by one, and scoring beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from digenrl.worker.orders import Order, Ready, Report
from fake_crew import fake_recipe

from digenrl.transports.contract import Gone, Message
from digenrl.transports.inline import InlineTransport
from digenrl.worker.assignment import Assignment, Duty

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Do(Order):
    """Something to do, by name."""

    name: str


@dataclass(frozen=True)
class Did(Report):
    """It is done."""

    name: str


class Stub:
    """A worker that does what a test wants done for each name."""

    def __init__(self, acts: dict[str, Callable[[], Any]]) -> None:
        self._acts = acts

    def handle(self, order: Do) -> Report:
        self._acts.get(order.name, lambda: None)()
        return Did(order.name)


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """What names mean to workers, which have no models."""
    meant: dict[str, Callable[[], Any]] = {}
    monkeypatch.setattr("digenrl.transports.inline.start_worker", lambda *_: (Stub(meant), Ready()))
    return meant


@pytest.fixture
def transport(acts: dict[str, Callable[[], Any]]) -> Iterator[InlineTransport]:
    """A device and one that scores, both ready."""
    transport = InlineTransport()
    duties: dict[str, set[Duty]] = {"trainer": {"generate", "train"}, "reward-0": {"score"}}
    for name, does in duties.items():
        transport.start(Assignment(name, frozenset(does), "cpu", fake_recipe(), Path("exchange")))
        assert transport.receive(0) == [Message(name, None, Ready())]
    yield transport
    transport.stop()


def received(transport: InlineTransport, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        found = transport.receive(PATIENCE_S)
        assert found, f"waited in vain after {messages}"
        messages += found
    return messages


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reward")]


def test_samples_are_scored_while_the_device_goes_on(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    generating, scored = threading.Event(), threading.Event()

    def generate() -> None:
        generating.set()
        assert scored.wait(PATIENCE_S)  # in vain, if the score waited for this slice

    def score() -> None:
        assert generating.wait(PATIENCE_S)
        scored.set()

    acts.update({"slice": generate, "score": score})
    transport.send("reward-0", 1, Do("score"))
    transport.send("trainer", 2, Do("slice"))
    messages = received(transport, 2)
    assert {(each.worker, each.job_id, each.report) for each in messages} == {
        ("reward-0", 1, Did("score")),
        ("trainer", 2, Did("slice")),
    }
    assert all(each.waited_ns >= 0 for each in messages)


def test_what_was_scored_is_told_before_the_device_has_its_next_order(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    scored = threading.Event()
    acts.update({"another": scored.set, "slice": lambda: scored.wait(PATIENCE_S)})
    for job_id, (worker, name) in enumerate(
        (("trainer", "slice"), ("trainer", "next slice"), ("reward-0", "score"), ("reward-0", "another"))
    ):
        transport.send(worker, job_id, Do(name))
    told = [each.report for each in received(transport, 4)]
    assert told.index(Did("score")) < told.index(Did("next slice"))


def test_a_report_says_how_long_nobody_took_it(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    scored, second = threading.Event(), threading.Event()
    acts.update({"score": scored.set, "next": second.set, "slice": lambda: second.wait(PATIENCE_S)})
    transport.send("reward-0", 1, Do("score"))
    transport.send("reward-0", 3, Do("next"))
    transport.send("trainer", 2, Do("slice"))
    by_report = {each.report: each for each in received(transport, 3)}
    assert by_report[Did("score")].waited_ns > by_report[Did("slice")].waited_ns == 0


def test_neither_the_end_of_a_scorer_nor_of_the_run_leaves_a_thread(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    ended = threading.Event()
    acts["score"] = lambda: ended.wait(PATIENCE_S)
    transport.send("reward-0", 1, Do("score"))
    transport.end("reward-0")
    transport.start(Assignment("reward-0", frozenset({"score"}), "cpu", fake_recipe(), Path("exchange")))
    ended.set()
    transport.send("reward-0", 4, Do("another"))
    reports = [(each.job_id, each.report) for each in received(transport, 2)]
    assert reports == [(None, Ready()), (4, Did("another"))], "nothing of the one that ended"
    transport.stop()
    transport.stop()
    assert not threads()


def test_a_scorer_that_leaves_is_reported_like_any_worker(
    acts: dict[str, Callable[[], Any]], transport: InlineTransport
) -> None:
    def leave() -> None:
        raise SystemExit(3)

    acts["score"] = leave
    transport.send("reward-0", 1, Do("score"))
    assert received(transport, 1) == [Message("reward-0", None, Gone("left with exit code 3"), waited_ns=ANY)]
