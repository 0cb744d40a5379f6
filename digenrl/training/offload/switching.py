"""Switches a trainer between training and generating: what only training needs is offloaded in between.

| part | needed |
|---|---|
| trained weights, if another policy generates | from the first forward |
| reference, a frozen copy | from the first forward |
| gradient sums of the open update | after the passes over the next group |
| optimizer moments, moving average | at the optimizer step |

Parts are used only inside the context manager of a phase, which makes the computation wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from digenrl.training.offload.host_copies import HostCopies
from digenrl.training.offload.offloader import CurrentTensors, Offloader
from digenrl.training.trainable_state import TrainableState
from digenrl.training.trainer_state import MOMENTS_PER_PARAMETER

WEIGHTS, REFERENCE, SUMS, MOMENTS, AVERAGE = "weights", "reference", "sums", "moments", "average"
REPLAY_PARTS, STEP_PARTS = (WEIGHTS, REFERENCE), (WEIGHTS, MOMENTS, AVERAGE)
ALL_PARTS = (WEIGHTS, REFERENCE, SUMS, MOMENTS, AVERAGE)


class Switching(Offloader):
    """Offloads and loads a trainer's parts. Unless `enabled`, nothing moves and all methods do nothing.

    `open_sums` returns the gradient sums of the open update, of which a parameter has up to `sums_per_parameter`,
    of its own dtype or of `sums_dtype`.
    """

    def __init__(
        self,
        trainable: TrainableState,
        open_sums: CurrentTensors,
        sums_per_parameter: int,
        host: HostCopies,
        device: torch.device,
        *,
        enabled: bool,
        sums_dtype: torch.dtype | None = None,
    ) -> None:
        self._trainable, self._open_sums, self._sums_per_parameter = trainable, open_sums, sums_per_parameter
        self._sums_dtype = sums_dtype
        self._placeholders: dict[str, dict[str, Tensor]] = {}
        self._enabled = enabled
        super().__init__(self._current_tensors() if enabled else {}, device, host)

    def load(self) -> None:
        """Starts loading everything for training, and blocks until forwards can be computed."""
        super().load()
        self.wait_for(*REPLAY_PARTS)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """For forwards and backwards; everything else is loaded meanwhile."""
        super().load()
        with self._phase(*REPLAY_PARTS):
            yield

    def reading_sums(self) -> AbstractContextManager[None]:
        return self._phase(SUMS)

    def adding_to_sums(self) -> AbstractContextManager[None]:
        """For adding to the gradient sums. Not to be entered before a replay: the sums are loaded meanwhile."""
        return self._phase(SUMS, changes=True)

    def stepping(self) -> AbstractContextManager[None]:
        """For an optimizer step."""
        return self._phase(*STEP_PARTS, changes=True)

    def overwriting(self) -> AbstractContextManager[None]:
        """For loading a state."""
        return self._phase(*ALL_PARTS, changes=True)

    @contextmanager
    def full_size(self) -> Iterator[None]:
        """Inside, as much is moved as in the middle of a step, even before gradients and moments exist."""
        parameters = list(self._trainable.policies.parameters.values())
        if self._enabled and not self._trainable.moments() and self._trainable.missing_moment_bytes():
            self._placeholders[MOMENTS] = _zeros(parameters * MOMENTS_PER_PARAMETER)
        if self._enabled and not self._open_sums():
            self._placeholders[SUMS] = _zeros(parameters * self._sums_per_parameter, self._sums_dtype)
        try:
            yield
        finally:
            with self._phase(*ALL_PARTS, changes=True):
                self._placeholders = {}

    @contextmanager
    def _phase(self, *parts: str, changes: bool = False) -> Iterator[None]:
        self.require(*parts, changes=changes)
        yield

    def _current_tensors(self) -> dict[str, CurrentTensors]:
        return {
            WEIGHTS: self._idle_weights,
            REFERENCE: lambda: self._trainable.policies.reference_values,
            SUMS: lambda: {**self._open_sums(), **self._placeholders.get(SUMS, {})},
            MOMENTS: lambda: self._trainable.moments() | self._placeholders.get(MOMENTS, {}),
            AVERAGE: lambda: {} if self._trainable.average is None else self._trainable.average.values,
        }

    def _idle_weights(self) -> Mapping[str, Tensor]:
        """The trained weights, unless they are the ones to generate with."""
        return {} if self._trainable.policies.old_snapshot is None else self._trainable.policies.parameters


def _zeros(like: list[nn.Parameter], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {
        f"placeholder/{index}": torch.zeros_like(each, dtype=dtype, requires_grad=False)
        for index, each in enumerate(like)
    }
