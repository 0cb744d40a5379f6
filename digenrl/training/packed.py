"""Forward and backward in packs; one that does not fit in memory is halved and repeated, same gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from digenrl.config.training import TrainerSettings
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.pairs import LossTerms, Objective
from digenrl.training.gradients import Gradients, GradientSums, drop_gradients, take_gradients
from digenrl.training.metrics import Tally, log_prob_mismatch
from digenrl.training.pack_size import measure_largest_pack
from digenrl.training.packs import Term, halves
from digenrl.training.policies import Policies
from digenrl.training.replay import Replay


@dataclass(frozen=True, slots=True)
class Job:
    """What all terms of one pass share.

    `denominator` is Z. With `only_waiting` only the part that waits for the batch's scale is added up.
    """

    conditioning: Conditioning
    denominator: int
    before_updates: bool
    only_waiting: bool = False


@dataclass(slots=True)
class PassResult:
    """The gradient of some terms, and what was measured on the way."""

    sums: GradientSums = field(default_factory=GradientSums)
    tally: Tally = field(default_factory=Tally)

    def add(self, other: PassResult) -> None:
        """Takes over the other's sums; the other is not used again."""
        self.sums.add(other.sums)
        self.tally.merge(other.tally)


class PackedPasses:
    """Turns terms into gradients. Parameters have no gradient before and after, whatever happens."""

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        policies: Policies,
        replay: Replay,
        settings: TrainerSettings,
    ) -> None:
        self._model = model
        self._objective = objective
        self._parameters = policies.parameters
        self._replay = replay
        self._settings = settings
        self.pack_size = None if settings.pack_size == "auto" else settings.pack_size

    def run(self, terms: Sequence[Term], job: Job) -> PassResult:
        """The sum over these terms of w * l / Z, as gradients."""
        result = PassResult()
        drop_gradients(self._parameters)
        rest = terms
        while rest:
            size = self._current_pack_size(terms, job)
            result.add(self._run_pack(rest[:size], job))
            rest = rest[size:]
        return result

    def _current_pack_size(self, terms: Sequence[Term], job: Job) -> int:
        if self.pack_size is None and len(terms) == 1:
            return 1  # too few to measure with
        if self.pack_size is None:
            self.pack_size = measure_largest_pack(
                lambda size: self._discarded(terms[:size], job),
                len(terms),
                device=self._model.device,
                memory_share=self._settings.memory_share,
                limit=self._settings.largest_pack,
            )
        return self.pack_size

    def _discarded(self, terms: Sequence[Term], job: Job) -> None:
        try:
            self._forward_backward(terms, job)
        finally:
            drop_gradients(self._parameters)

    def _run_pack(self, terms: Sequence[Term], job: Job) -> PassResult:
        try:
            return self._forward_backward(terms, job)
        except torch.OutOfMemoryError:
            if len(terms) == 1:
                raise
        finally:
            drop_gradients(self._parameters)
        # Outside the except block: the error's traceback would keep the tensors of the failed pack alive.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        first, second = halves(terms)
        self.pack_size = min(self.pack_size or len(terms), len(first))
        result = self._run_pack(first, job)
        result.add(self._run_pack(second, job))
        return result

    def _forward_backward(self, terms: Sequence[Term], job: Job) -> PassResult:
        pairs = self._replay.pairs(terms, job.conditioning, before_updates=job.before_updates)
        loss = self._objective.loss(pairs)
        result = PassResult(self._backward(loss, [term.weight / job.denominator for term in terms], job))
        result.tally.add(loss.measures)
        if job.before_updates:
            result.tally.add(log_prob_mismatch(pairs))
        return result

    def _backward(self, loss: LossTerms, weights: list[float], job: Job) -> GradientSums:
        total_M = loss.total_M()
        assert total_M.shape == (len(weights),), (
            f"{len(weights)} terms, but a loss of shape {tuple(total_M.shape)}"
        )
        weight_M = torch.tensor(weights, dtype=torch.float64).to(total_M)
        if self._objective.scale_over == "group":
            return GradientSums(final=self._gradient_of((total_M * weight_M).sum()))
        sums = GradientSums()
        fixed_M = None if job.only_waiting else loss.fixed_M
        if loss.scaled_M is not None:
            sums.waiting = self._gradient_of((loss.scaled_M * weight_M).sum(), keep_graph=fixed_M is not None)
        if fixed_M is not None:
            sums.final = self._gradient_of((fixed_M * weight_M).sum())
        return sums

    def _gradient_of(self, scalar: torch.Tensor, keep_graph: bool = False) -> Gradients:
        scalar.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
        return take_gradients(self._parameters)
