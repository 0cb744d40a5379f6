"""A trainer that also generates: what it holds for training leaves the card meanwhile, and is back when needed.

| part | needed |
|---|---|
| trained weights, where another policy generates | from the first forward on |
| reference, a frozen copy | from the first forward on |
| sums of gradients of the open update | when the next group is added, after its passes |
| moments of the optimizer, moving average | at the optimizer step |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digenrl.training.offload.host_copies import HostCopies
from digenrl.training.offload.offloader import Held, Offload
from digenrl.training.optimizer import MOMENTS_PER_PARAMETER
from digenrl.training.ordered_sums import OrderedSums
from digenrl.training.policy_weights import PolicyWeights, Snapshot

WEIGHTS, REFERENCE, SUMS, MOMENTS, AVERAGE = "weights", "reference", "sums", "moments", "average"
EVERYTHING = (WEIGHTS, REFERENCE, SUMS, MOMENTS, AVERAGE)
TO_REPLAY, TO_STEP = (WEIGHTS, REFERENCE), (WEIGHTS, MOMENTS, AVERAGE)


class Switching:
    """Between training and generating. Not `moves`: nothing leaves the card, and all of this does nothing.

    An open update has `sums_per_parameter`.
    """

    def __init__(
        self,
        policies: PolicyWeights,
        optimizer: torch.optim.Optimizer,
        average: Snapshot | None,
        sums: Callable[[], Mapping[str, OrderedSums]],
        device: torch.device,
        *,
        moves: bool,
        sums_per_parameter: int = 1,
        host: HostCopies | None = None,
    ) -> None:
        self._policies, self._optimizer = policies, optimizer
        self._average, self._sums = average, sums
        self._stand_ins: dict[str, dict[str, Tensor]] = {}
        self._offload = Offload(self._parts() if moves else {}, device, host)
        self.moves = moves
        self._sums_per_parameter = sums_per_parameter

    @property
    def bytes_away(self) -> int:
        """What is not on the card now."""
        return self._offload.bytes_away

    @property
    def host_bytes(self) -> int:
        """Host memory that was taken so far."""
        return self._offload.host_bytes

    def leave(self) -> None:
        """The card is for generating: begins to empty it, and does not wait."""
        self._offload.leave()

    def come_back(self) -> None:
        """Training goes on: all is sent for, and what a forward needs is there."""
        self._offload.come_back()
        self._offload.arrived(*TO_REPLAY)

    def need(self, *parts: str, changes: bool = False) -> None:
        """What is computed from now on finds these parts; it has to say if it `changes` them."""
        self._offload.need(*parts, changes=changes)

    def settle(self) -> None:
        """Waits until everything can be read, wherever it is."""
        self._offload.settle()

    @contextmanager
    def as_in_a_step(self) -> Iterator[None]:
        """Inside, as much moves as in the middle of a step, though there is no gradient and no moment yet."""
        parameters = list(self._policies.parameters.values())
        if self.moves and not self._held_moments():
            self._stand_ins[MOMENTS] = _zeros(parameters * MOMENTS_PER_PARAMETER)
        if self.moves and not self._held_sums():
            self._stand_ins[SUMS] = _zeros(parameters * self._sums_per_parameter)
        try:
            yield
        finally:
            self.need(*EVERYTHING, changes=True)
            self._stand_ins = {}

    def _parts(self) -> dict[str, Held]:
        return {
            WEIGHTS: self._held_weights,
            REFERENCE: lambda: self._policies.reference_values,
            SUMS: lambda: self._held_sums() | self._stand_ins.get(SUMS, {}),
            MOMENTS: lambda: self._held_moments() | self._stand_ins.get(MOMENTS, {}),
            AVERAGE: lambda: {} if self._average is None else self._average.values,
        }

    def _held_weights(self) -> Mapping[str, Tensor]:
        """The trained weights are not those to generate with where there is an old policy."""
        return {} if self._policies.old_snapshot is None else self._policies.parameters

    def _held_sums(self) -> dict[str, Tensor]:
        every = {place: sums.tensors() for place, sums in self._sums().items()}
        return {f"{place}/{name}": value for place, named in every.items() for name, value in named.items()}

    def _held_moments(self) -> dict[str, Tensor]:
        """All that is as large as its parameter: not the number of steps taken."""
        return {
            f"{key}/{name}": value
            for name, parameter in self._policies.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
        }


def _zeros(like: list[nn.Parameter]) -> dict[str, Tensor]:
    return {f"stand-in/{index}": torch.zeros_like(each, requires_grad=False) for index, each in enumerate(like)}
