"""The last version: the state that the open batch began with, and the weights to generate and publish.

If a batch has several updates, the state is kept on the host while they are committed. It does not change before
the first of them, so it is copied concurrently with the first replays.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from digenrl.models.objective import Objective
from digenrl.training.offload.host_copies import HostCopies
from digenrl.training.offload.kept_state import KeptState
from digenrl.training.trainable_state import TrainableState
from digenrl.training.trainer_state import MOMENTS_PER_PARAMETER, TrainerState


class LastVersion:
    """Reads the last version from the host if it is kept there, else from the live tensors."""

    def __init__(self, trainable: TrainableState, objective: Objective, host: HostCopies) -> None:
        self._trainable, self._policies = trainable, trainable.policies
        self._has_old_policy = objective.needs.old_policy
        self._host = host
        self._kept: KeptState[TrainerState] = KeptState(host)
        self.must_be_kept = objective.updates_per_batch > 1

    def keep(self, batch: int, pack_size: int | None) -> None:
        """Starts copying the state to the host, unless it is there; before the batch's first optimizer step."""
        if self._kept.is_kept:
            return
        self._kept.keep(lambda copy: self._trainable.copy(batch, pack_size, with_reference=False, copy=copy))
        if self._policies.sharded:
            self._kept.state()  # replays are about to swap other policies' weights into the same memory

    def reserve(self) -> None:
        """Allocates host memory for keeping a version in advance, in addition to everything allocated now."""
        if not self.must_be_kept:
            return
        kept = self._kept.is_kept
        moments = MOMENTS_PER_PARAMETER if self._trainable.missing_moment_bytes() or not kept else 0
        weights = self._has_old_policy + (0 if kept else 1 + (self._trainable.average is not None))
        self._host.reserve([*self._policies.parameters.values()] * (moments + weights))

    def published(self) -> dict[str, Tensor]:
        """The weights by their published names."""
        if not self._kept.is_kept:
            return self._policies.published()
        kept = self._kept.state()
        return self._policies.published(kept.old_policy or kept.weights)

    def state(self, batch: int, pack_size: int | None) -> TrainerState:
        """The state when the batch began; its memory is reused after `discard`."""
        if not self._kept.is_kept:  # no update was committed; the open gradient is not part of a state
            return self._trainable.copy(batch, pack_size)
        return replace(self._kept.state(), reference=self._policies.reference_state(), pack_size=pack_size)

    def before_change(self) -> None:
        """To be called before an optimizer step."""
        self._kept.before_change()

    def discard(self) -> None:
        """Frees the memory for the next version."""
        self._kept.discard()
