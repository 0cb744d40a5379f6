"""Sums that are the same to the last bit whatever order their parts come in."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from digenrl.training.packing.packed import PassResult


class OrderedSums:
    """Adds up passes over places in the order of the places.

    A pass that comes before one of an earlier place waits, with gradients of its own. Not `in_order`, passes are
    added as they come: no memory is spent on waiting, and the last bits depend on the order.
    """

    def __init__(self, places: Iterable[int], in_order: bool) -> None:
        self.total = PassResult()
        self._missing = sorted(places)
        self._in_order = in_order
        self._waiting: dict[int, tuple[frozenset[int], PassResult]] = {}  # by each of its places

    def tensors(self) -> dict[str, Tensor]:
        """All gradients that are held, those that wait too, each under a name of its own."""
        waiting = {min(covered): result.sums for covered, result in self._waiting.values()}
        held = {"total": self.total.sums, **{f"waiting {place}": sums for place, sums in waiting.items()}}
        return {
            f"{where}/{kind}/{name}": value
            for where, sums in held.items()
            for kind, gradients in (("waiting", sums.waiting), ("final", sums.final))
            for name, value in gradients.items()
        }

    def add(self, places: Iterable[int], result: PassResult) -> None:
        """Takes over the result of a pass over some of the places, none of them added before."""
        covered = frozenset(places)
        if not self._in_order:
            self.total.add(result)
            return
        self._waiting |= dict.fromkeys(covered, (covered, result))
        while self._missing and self._missing[0] in self._waiting:
            covered, result = self._waiting[self._missing[0]]
            self.total.add(result)
            self._missing = [place for place in self._missing if place not in covered]
            for place in covered:
                del self._waiting[place]
