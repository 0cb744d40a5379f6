"""Gradient sums whose bits do not depend on the order in which groups arrive."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from digenrl.training.packing.packed_passes import PassResult


class OrderedSums:
    """Adds up the passes over an update's groups in the order of their places.

    A pass that arrives before one with a lower place is held back, with its own gradient. Without `in_order`,
    passes are added as they arrive: this saves memory, but the last bits depend on the order of arrival.
    """

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self.reset(())

    def reset(self, places: Iterable[int]) -> None:
        """Discards all sums and starts an update whose groups have these places."""
        self.total = PassResult()
        self._missing = sorted(places)
        self._held_back: dict[int, PassResult] = {}

    def tensors(self) -> dict[str, Tensor]:
        """All gradients, including those held back, by unique names."""
        results = {"total": self.total, **{f"place {place}": each for place, each in self._held_back.items()}}
        return {
            f"{owner}/{part}/{name}": value
            for owner, result in results.items()
            for part, gradients in (("unscaled", result.sums.unscaled), ("final", result.sums.final))
            for name, value in gradients.items()
        }

    def add(self, place: int, result: PassResult) -> None:
        """Adds the pass over one group, which must not be used afterwards."""
        if not self._in_order:
            self.total.add(result)
            return
        self._held_back[place] = result
        while self._missing and self._missing[0] in self._held_back:
            self.total.add(self._held_back.pop(self._missing.pop(0)))
