"""The last version: the state that the open batch began with, and the weights to generate and publish.

If a batch has several updates, the state is kept on the host while they are committed. It does not change before
the first of them, so it is copied concurrently with the first replays. Every version reuses the same host memory:
allocating it again would cost more than the copies. A trainer that never commits keeps a snapshot of the weights
instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from digenrl.models.objective import Objective
from digenrl.training.offload.host_copies import HostCopies, HostCopy, cpu_copy, on_host
from digenrl.training.trainable_state import TrainableState
from digenrl.training.trainer_state import MOMENTS_PER_PARAMETER, Tensors, TrainerState


class LastVersion:
    """Reads the last version from the host if it is kept there, else from the live tensors."""

    def __init__(self, trainable: TrainableState, objective: Objective, host: HostCopies) -> None:
        self._trainable, self._policies, self._host = trainable, trainable.policies, host
        self._has_old_policy = objective.needs.old_policy
        self.must_be_kept = trainable.commits and objective.updates_per_batch > 1
        self._kept: TrainerState | None = None
        self._copies: list[tuple[Tensor, HostCopy]] = []
        self._complete: Any = None  # the copier's marker

    def keep(self, batch: int, pack_size: int | None) -> None:
        """Starts copying the state to the host, unless it is kept. Must precede the first optimizer step."""
        if self._kept is not None:
            return
        self._host.copier.begin()
        try:
            self._kept = self._trainable.copy(batch, pack_size, with_reference=False, copy=self._copy)
        except BaseException:
            self._release()
            raise
        self._complete = self._host.copier.mark()
        if self._policies.sharded:
            self._host.copier.finish()  # replays are about to swap other policies' weights into the same memory

    def reserve(self) -> None:
        """Allocates host memory for keeping a version in advance, in addition to everything allocated now."""
        if not self.must_be_kept:
            return
        kept = self._kept is not None
        moments = MOMENTS_PER_PARAMETER if self._trainable.missing_moment_bytes() or not kept else 0
        weights = self._has_old_policy + (0 if kept else 1 + (self._trainable.average is not None))
        self._host.reserve([*self._policies.parameters.values()] * (moments + weights))

    def published(self) -> dict[str, Tensor]:
        if self._kept is None:
            return self._policies.published()
        self._host.copier.finish(self._complete)
        return self._policies.published(self._kept.old_policy or self._kept.weights)

    def trained(self) -> dict[str, Tensor]:
        """The trained weights by their published names; `published` are others if these follow them slowly."""
        if self._kept is None:
            return self._policies.trained()
        self._host.copier.finish(self._complete)
        return self._policies.published(self._kept.weights)

    def average(self) -> Tensors:
        """The moving average by the names of parameters; it is not a copy."""
        average = self._trainable.average
        assert average is not None, "the run keeps no moving average"
        if self._kept is None or self._kept.average is None:
            return average.values
        self._host.copier.finish(self._complete)
        return self._kept.average

    def state(self, batch: int, pack_size: int | None, *, copied: bool = True) -> TrainerState:
        """The state when the batch began; its memory is reused after `discard`.

        If not `copied`, it may consist of the live tensors.
        """
        if not self._trainable.commits:  # its weights may be those of a later update
            with self._policies.generating():
                return self._trainable.copy(batch, pack_size)
        if self._kept is None:  # no update was committed; the open gradient is not part of a state
            return self._trainable.copy(batch, pack_size, copy=cpu_copy if copied else on_host)
        self._host.copier.finish(self._complete)
        return replace(self._kept, reference=self._policies.reference_state(), pack_size=pack_size)

    def before_change(self) -> None:
        """Must be called before the live tensors change; blocks until the kept state is completely copied."""
        if self._kept is not None:
            self._host.copier.finish(self._complete)
            self._host.mark_changed(tensor for tensor, _ in self._copies)

    def discard(self) -> None:
        """Frees the memory for the next version."""
        self.before_change()
        self._release()
        self._kept = None

    def _copy(self, value: Tensor) -> Tensor:
        copy = self._host.acquire(value)
        self._copies.append((value, copy))
        return copy.values

    def _release(self) -> None:
        for _, copy in self._copies:
            self._host.release(copy)
        self._copies = []
