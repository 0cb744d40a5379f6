"""Forward and backward in packs; one that does not fit in memory is halved and repeated, same gradient.

Of several ranks each runs its share of the terms. Ranks of a sharded model gather weights and add gradients up
inside a pass, so that all run the same packs: fillers make shares equally long, and no rank halves a pack alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace

import torch

from digenrl.config.reading import ConfigError
from digenrl.config.training import TrainerSettings
from digenrl.models.blocks import checkpoint_blocks, repeated_blocks
from digenrl.models.compiled import is_compiled
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.objective import LossTerms, Objective
from digenrl.models.transfers import to_device_like
from digenrl.training.gradients import Gradients, GradientSums, drop_gradients, take_gradients
from digenrl.training.metrics import Tally, log_prob_mismatch
from digenrl.training.packing.memory_plan import Packing, choose_packing
from digenrl.training.packing.pack_size import free_bytes, measure_largest_pack
from digenrl.training.packing.packs import Rank, Term, filled_up, filler, halves, share_of
from digenrl.training.packing.pass_profiler import CardGauge
from digenrl.training.packing.replay import Replay
from digenrl.training.policy_weights import PolicyWeights
from digenrl.training.ranks.rank_consensus import check_same
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import add_up_in_next_backward


@dataclass(frozen=True, slots=True)
class Job:
    """What all terms of one pass share.

    `denominator` is Z. With `only_waiting` only the part that waits for the batch's scale is added up. Another
    `place` gives the odd terms to other ranks. Packs are planned for groups of `terms_of_group` terms, by default
    as many as there are now.
    """

    conditioning: Conditioning
    denominator: int
    before_updates: bool
    only_waiting: bool = False
    place: int = 0
    terms_of_group: int | None = None


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
    """Turns terms into gradients. Parameters have no gradient before and after, whatever happens.

    But for a sharded model, where a pass that fails leaves others' collectives open: no other pass is run then.
    """

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        policies: PolicyWeights,
        replay: Replay,
        settings: TrainerSettings,
        ranks: RankGroup | None = None,
        bytes_to_come: Callable[[], int] = lambda: 0,
    ) -> None:
        """`bytes_to_come` are what training will hold beside its passes and does not hold yet."""
        self._model = model
        self._bytes_to_come = bytes_to_come
        self._objective = objective
        self._parameters = policies.model_parameters
        self._sharded = policies.sharded
        self._replay = replay
        self._settings = settings
        self._ranks = ranks
        self._rank = Rank() if ranks is None else ranks.rank
        self._unfinished = False
        self._fills_packs = is_compiled(model)  # every other size of a pack would have to be compiled
        self._largest_group = 0  # terms of all ranks; a pack is not filled beyond them
        self._blocks = len(repeated_blocks(model.transformer))
        self._told_checkpointed = self._checkpointed_by(settings)
        self.pack_size = None if settings.pack_size == "auto" else settings.pack_size
        self.checkpointed = self._told_checkpointed or 0
        self._found: Packing | None = None
        self._checkpointing_found = self._told_checkpointed is not None
        checkpoint_blocks(model, self.checkpointed)

    def run(self, terms: Sequence[Term], job: Job) -> PassResult:
        """The sum over this rank's share of w * l / Z, as gradients; of a sharded model over all these terms."""
        if self._sharded:
            self._check_all_run(len(terms))
        self._unfinished = True
        result = PassResult()
        drop_gradients(self._parameters)
        share = self._share_of(terms, job)
        self._largest_group = max(self._largest_group, job.terms_of_group or 0, len(terms))
        rest = share
        while rest:
            size = self._current_pack_size(share, len(terms), job)
            pack = self._filled(rest[:size], size) if self._fills_packs else rest[:size]
            result.add(self._run_pack(pack, job, last=len(rest) <= size))
            rest = rest[size:]
        self._unfinished = False
        return result

    def share_of_group(self, terms: int, terms_of_group: int) -> float:
        """How much of the work of a group so many terms are, fillers counted."""
        if not self._fills_packs or self.pack_size is None:
            return terms / terms_of_group
        packs, of_group = (-(-each // self._rank.count // self.pack_size) for each in (terms, terms_of_group))
        return packs / of_group

    @property
    def packing(self) -> Packing | None:
        """As set or as chosen; None before anything was measured."""
        if self.pack_size is None:
            return None
        found = self._found or Packing(self.pack_size, self.checkpointed)
        return replace(found, pack_size=self.pack_size, checkpointed=self.checkpointed)

    def _check_all_run(self, terms: int) -> None:
        """Ranks that run another number of packs would wait for each other in vain."""
        if self._unfinished:
            raise RuntimeError("an earlier pass of this sharded trainer failed; make it anew on all ranks")
        if self._ranks is not None:
            check_same("number of terms of a group", self._ranks.gather(terms))

    def _share_of(self, terms: Sequence[Term], job: Job) -> Sequence[Term]:
        share = share_of(terms, self._rank, offset=job.place)
        return filled_up(share, terms, self._rank.count) if self._sharded and terms else share

    def _filled(self, pack: Sequence[Term], size: int) -> list[Term]:
        """With fillers, so that packs are of one size; a group that is smaller than that is one pack."""
        whole = min(size, -(-self._largest_group // self._rank.count))
        return [*pack, *(filler(pack[0]) for _ in range(whole - len(pack)))]

    def _checkpointed_by(self, settings: TrainerSettings) -> int | None:
        """How many blocks are computed again; None where that is to be found out: on a card of one rank's own."""
        told = settings.gradient_checkpointing
        if told == "auto":
            on_a_card = self._model.device.type == "cuda"
            if on_a_card and self._sharded:
                return self._blocks
            return None if on_a_card and self._blocks else 0
        if told is True or told is False:
            return self._blocks if told else 0
        if told > self._blocks:
            raise ConfigError(
                f"training.gradient_checkpointing: {told}, but {self._model.family} has {self._blocks} blocks; "
                "lower it, or set true for all"
            )
        return told

    def _current_pack_size(self, share: Sequence[Term], terms_of_all: int, job: Job) -> int:
        smallest_share = len(share) if self._sharded else terms_of_all // self._rank.count
        planned = self.pack_size is not None and self._checkpointing_found
        if not planned and smallest_share < 2:
            return self.pack_size or 1  # too few to measure with, on one rank at least
        if not planned:
            packing = self._found_packing(share[:smallest_share], job)
            if self._ranks is not None:
                packing = Packing.for_all(Packing(*each) for each in self._ranks.gather(astuple(packing)))
            self._found, self.pack_size = packing, packing.pack_size
            self._checkpoint(packing.checkpointed)
        assert self.pack_size is not None
        return self.pack_size

    @property
    def sums_per_parameter(self) -> int:
        """Of the gradient of some terms: one, or two where only a part of it waits for the batch's scale."""
        return 2 if self._objective.scale_over == "batch" and self._objective.needs.reference else 1

    @property
    def sums_bytes(self) -> int:
        """Of the gradient of some terms."""
        return self.sums_per_parameter * sum(p.nbytes for p in self._parameters.values())

    def _found_packing(self, share: Sequence[Term], job: Job) -> Packing:
        if self._model.device.type == "cuda" and not self._sharded:
            return self._choose(share, job)
        measured = measure_largest_pack(
            lambda size: self._discarded(share[:size], job),
            len(share),
            device=self._model.device,
            memory_share=self._settings.memory_share,
            limit=self._settings.largest_pack,
            reserved_bytes=self.sums_bytes if self._sharded else 0,
        )
        return Packing(measured, self.checkpointed)

    def _choose(self, share: Sequence[Term], job: Job) -> Packing:
        device = self._model.device
        free = free_bytes(device) - self._bytes_to_come()
        packing = choose_packing(
            CardGauge(self._model, lambda size: self._discarded(_repeated(share, size), job)),
            budget=self._settings.memory_share * free - self.sums_bytes,  # they stay while packs come and go
            fixed_bytes=self.sums_bytes,
            terms=-(-(job.terms_of_group or len(share)) // self._rank.count),
            most=self._settings.largest_pack,
            pack_size=self.pack_size,
            checkpointed=self._told_checkpointed,
        )
        return packing.beside(torch.cuda.memory_allocated(device) + self.sums_bytes)

    def _checkpoint(self, count: int) -> None:
        self.checkpointed, self._checkpointing_found = count, True
        checkpoint_blocks(self._model, count)

    def _discarded(self, terms: Sequence[Term], job: Job) -> None:
        try:
            self._forward_backward(terms, job, last=True)
        except torch.OutOfMemoryError as error:
            if self._sharded:
                raise self._out_of_memory(len(terms)) from error
            raise
        finally:
            drop_gradients(self._parameters)

    def _run_pack(self, terms: Sequence[Term], job: Job, last: bool) -> PassResult:
        try:
            return self._forward_backward(terms, job, last)
        except torch.OutOfMemoryError as error:
            if self._sharded:
                raise self._out_of_memory(len(terms)) from error
            if len(terms) == 1 and (self._told_checkpointed is not None or self.checkpointed == self._blocks):
                raise
        finally:
            drop_gradients(self._parameters)
        # Outside the except block: the error's traceback would keep the tensors of the failed pack alive.
        self._model.release_rollout_memory()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(terms) == 1:
            self._checkpoint(self._blocks)
            return self._run_pack(terms, job, last)
        first, second = halves(terms)
        self.pack_size = min(self.pack_size or len(terms), len(first))
        result = self._run_pack(first, job, last)
        result.add(self._run_pack(second, job, last))
        return result

    def _out_of_memory(self, terms: int) -> ConfigError:
        return ConfigError(
            f"memory ran out in a pack of {terms} terms on rank {self._rank.index} of {self._rank.count}, and "
            "ranks that share weights cannot halve it; lower training.pack_size, or set "
            "training.gradient_checkpointing: true"
        )

    def _forward_backward(self, terms: Sequence[Term], job: Job, last: bool) -> PassResult:
        pairs = self._replay.pairs(terms, job.conditioning, before_updates=job.before_updates)
        loss = self._objective.loss(pairs)
        weights = [term.weight / job.denominator for term in terms]
        result = PassResult(self._backward(loss, weights, job, last))
        counted = sum(term.weight != 0 for term in terms)  # fillers come last
        result.tally.add({name: values[:counted] for name, values in loss.measures.items()})
        if job.before_updates:
            result.tally.add(log_prob_mismatch(pairs, counted * self._objective.rows_per_term))
        return result

    def _backward(self, loss: LossTerms, weights: list[float], job: Job, last: bool) -> GradientSums:
        total_M = loss.total_M()
        assert total_M.shape == (len(weights),), (
            f"{len(weights)} terms, but a loss of shape {tuple(total_M.shape)}"
        )
        weight_M = to_device_like(torch.tensor(weights, dtype=torch.float64), total_M)
        if self._objective.scale_over == "group":
            return GradientSums(final=self._gradient_of((total_M * weight_M).sum(), add_up=last))
        sums = GradientSums()
        fixed_M = None if job.only_waiting else loss.fixed_M
        both = loss.scaled_M is not None and fixed_M is not None
        if loss.scaled_M is not None:
            waiting = (loss.scaled_M * weight_M).sum()
            sums.waiting = self._gradient_of(waiting, add_up=last or both, keep_graph=both)
        if fixed_M is not None:
            sums.final = self._gradient_of((fixed_M * weight_M).sum(), add_up=last or both)
        return sums

    def _gradient_of(self, scalar: torch.Tensor, add_up: bool, keep_graph: bool = False) -> Gradients:
        """Of a sharded model none unless it is to `add_up`, and then also that of the backwards before.

        FSDP2 keeps what is not added up in one place: gradients that are not to mix are added up every time.
        """
        if self._sharded:
            add_up_in_next_backward(self._model.transformer, add_up)
        scalar.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
        return take_gradients(self._parameters)


def _repeated(terms: Sequence[Term], size: int) -> list[Term]:
    """So many terms, whether there are or not: what is measured does not depend on what is in them."""
    return [terms[index % len(terms)] for index in range(size)]
