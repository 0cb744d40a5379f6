"""Tensors that went away with a machine are made again, by the same order and from the same noise. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from digenrl.driver.pending_jobs import Completed, PendingJob
from digenrl.driver.supervisor import TrainerLostError
from digenrl.records import Lease
from digenrl.worker.orders import (
    EncodedPrompt,
    EvaluatePrompts,
    LearnGroups,
    LoadWeights,
    MadeSlice,
    MakeSlice,
    Order,
    OrderFailed,
    RehearseLearning,
    RehearseMaking,
    RestoreState,
    ScoreSamples,
    SliceMade,
    pixels_name,
)


class Maker(Protocol):
    """Who has things made again, each by whoever can; `then` is called when it lies in the exchange."""

    def encode_again(self, prompt: EncodedPrompt, then: Callable[[Completed], None]) -> None: ...

    def make_again(
        self,
        order: MakeSlice,
        then: Callable[[Completed], None],
        otherwise: Callable[[OrderFailed], None],
    ) -> None: ...

    def lay_out_again(self, then: Callable[[Completed], None]) -> None: ...

    def post(self, worker: str, expected: PendingJob) -> None: ...

    def fail(self, worker: str, expected: PendingJob, report: OrderFailed) -> None: ...

    def newest_weights(self, order: Order) -> Order: ...


def remake(worker: str, expected: PendingJob, names: Iterable[str], by: Maker) -> None:
    """Has these names made again that an order reads, and gives the order once more.

    Raises TrainerLostError where only a checkpoint helps.
    """
    order, lost = expected.order, set(names)
    if isinstance(order, RestoreState):
        raise TrainerLostError("trainer is lost, and so is the state that was kept in memory")
    rows = [prompt for prompt in _prompts(order) if prompt.row in lost]
    slices = [(made, prompt) for made, prompt in _slices(order) if {made.name, pixels_name(made.name)} & lost]
    weights = isinstance(order, LoadWeights | EvaluatePrompts) and order.weights.name in lost
    if weights and by.newest_weights(order) != order and isinstance(order, EvaluatePrompts):
        by.fail(worker, expected, OrderFailed(order, "the weights it is about were lost with a machine"))
        return
    awaited = len(rows) + len(slices) + weights
    if not awaited:
        assert expected.lost is not None, f"nobody can make {sorted(lost)} again, which {order} reads"
        expected.lost()
        return
    again = [order]  # with what was made again in place of what was lost

    def back(answered: Completed) -> None:
        nonlocal awaited
        awaited -= 1
        if isinstance(answered.report, SliceMade):
            again[0] = _with_made(again[0], answered.report.made)
        if not awaited:
            loads = isinstance(order, LoadWeights)
            by.post(worker, replace(expected, order=by.newest_weights(order) if loads else again[0]))

    for prompt in rows:
        by.encode_again(prompt, back)
    for made, prompt in slices:
        by.make_again(MakeSlice(_lease(made), prompt), back, lambda failed: by.fail(worker, expected, failed))
    if weights:
        by.lay_out_again(back)


def _prompts(order: Order) -> tuple[EncodedPrompt, ...]:
    if isinstance(order, EvaluatePrompts):
        return order.prompts
    if isinstance(order, LearnGroups):
        return tuple(group.prompt for group in order.groups)
    if isinstance(order, MakeSlice | RehearseMaking | RehearseLearning):
        return (order.prompt,)
    return ()


def _slices(order: Order) -> tuple[tuple[MadeSlice, EncodedPrompt], ...]:
    if isinstance(order, ScoreSamples):
        return ((order.of, order.prompt),)
    if isinstance(order, LearnGroups):
        return tuple((made, group.prompt) for group in order.groups for made in group.slices)
    return ()


def _lease(made: MadeSlice) -> Lease:
    """As it was, but for the lane and the time, which nobody asks for."""
    return Lease(made.slice, lane=-1, epoch=int(made.name.rpartition("-")[2]), version=made.version, started_ns=0)


def _with_made(order: Order, made: MadeSlice) -> Order:
    """The order with a slice made again, perhaps by a newer version."""
    if isinstance(order, ScoreSamples):
        return replace(order, of=made)
    if isinstance(order, LearnGroups):
        groups = tuple(
            replace(group, slices=tuple(made if each.name == made.name else each for each in group.slices))
            for group in order.groups
        )
        return replace(order, groups=groups)
    return order
