"""Forward and backward in packs. A pack that does not fit in memory is halved; the gradient stays the same.

Each rank runs its share of the terms; ranks that divide the tokens of a forward have one share together. Those of
a sharded model gather weights inside a pass, and sum the gradients of those that are trained. So all of them must
run the same packs: padding makes their shares equally long. The stages of a model run all terms together, with
packs as micro-batches. Ranks that exchange anything inside a pass cannot halve a pack on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.contract import Conditioning
from digenrl.models.objective import check_loss
from digenrl.models.parallel.shards import is_sharded, local_shard
from digenrl.models.parallel.token_exchange import TokenExchange
from digenrl.models.passes.compiled import is_compiled
from digenrl.models.transfers import to_device_like
from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.gradients.sums import Gradients, GradientSums, drop_gradients, take_gradients
from digenrl.training.metrics import Tally, log_prob_mismatch
from digenrl.training.offload.switching import Switching
from digenrl.training.packing.pack_planner import PackPlanner
from digenrl.training.packing.pack_size import usable_bytes
from digenrl.training.packing.packs import Term, halves, padded, share_of
from digenrl.training.packing.replay import Replay
from digenrl.training.packing.staged_passes import PackLoss, StagedPasses
from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_consensus import check_same
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import sum_gradients_in_next_backward
from digenrl.training.ranks.stage_links import LinkControl

LARGEST_WHOLE_GRADIENT = 0.2  # of a rank's memory, for the gradients of a sharded model between packs


@dataclass(frozen=True, slots=True)
class PassContext:
    """What all terms of one pass share.

    `denominator` is Z. Packs are planned, and padded, for jobs of `job_terms` terms: no pass has more. With
    `only_unscaled`, only the gradient that awaits the batch's scale is computed. The `offset` decides which ranks
    get one term more.
    """

    conditioning: Conditioning
    denominator: int
    before_updates: bool
    job_terms: int
    only_unscaled: bool = False
    offset: int = 0


@dataclass(slots=True)
class PassResult:
    """The gradient of some terms, and their metrics."""

    sums: GradientSums = field(default_factory=GradientSums)
    tally: Tally = field(default_factory=Tally)

    def add(self, other: PassResult) -> None:
        """Adds the other result, which must not be used afterwards."""
        self.sums.add(other.sums)
        self.tally.merge(other.tally)


class PackedPasses:
    """Computes the gradients of terms. Parameters have no gradient before and after, even if a pass raises.

    Ranks that exchange anything inside a pass are an exception: a pass that raises leaves collectives of the
    others unfinished, and no further pass can be run.
    """

    def __init__(
        self,
        replay: Replay,
        scale: AdvantageScale,
        settings: TrainerSettings,
        switching: Switching,
        ranks: RankGroup | None,
        bytes_to_come: Callable[[], int],
    ) -> None:
        self._replay, self._scale, self._switching, self._ranks = replay, scale, switching, ranks
        self._model, self._objective = replay.model, replay.objective
        self._parameters = replay.policies.model_parameters
        exchange = self._model.exchange
        self._sharded = is_sharded(self._model.transformer)
        self._shards_gradients = replay.policies.sharded
        own_blocks = self._model.own_blocks
        self._stages = None
        if own_blocks is not None:
            assert ranks is not None, "the stages of a model are ranks"
            self._stages = StagedPasses(ranks, own_blocks, self._parameters, settings.links)
        self._rank = Rank() if own_blocks is not None else shared_rank(ranks, exchange)
        self._in_lockstep = self._sharded or exchange is not None or own_blocks is not None
        is_last = own_blocks is None or own_blocks.is_last
        self._counts_metrics = is_last and (exchange is None or exchange.rank == 0)
        self._unfinished = False
        self._pads_packs = is_compiled(self._model)  # every other pack size would have to be compiled
        self.planner = PackPlanner(
            self._model,
            settings,
            ranks,
            self._rank,
            sharded=self._sharded,
            in_lockstep=self._in_lockstep,
            gradient_bytes=self.gradient_bytes,
            bytes_to_come=bytes_to_come,
        )

    def run(self, terms: Sequence[Term], context: PassContext) -> PassResult:
        """The gradient of the sum of w * l / Z over this rank's share or, if it is sharded, over all terms."""
        if self._in_lockstep:
            self._check_same_terms(len(terms))
            _ = self._sums_last  # a collective
        with self._switching.replaying():
            self._unfinished = True
            result = self._run(terms, context)
            self._unfinished = False
        return result

    def _run(self, terms: Sequence[Term], context: PassContext) -> PassResult:
        drop_gradients(self._parameters)
        share = rest = self._share_of(terms, context)
        result, packs = PassResult(), list[Sequence[Term]]()
        while rest:
            size = self.planner.current_pack_size(
                share, len(terms), context.job_terms, lambda pack: self._run_discarded(pack, context)
            )
            pack = self._padded(rest[:size], size, context) if self._pads_packs else rest[:size]
            if self._stages is not None:
                packs.append(pack)
            else:
                result.add(self._run_pack(pack, context, last=len(rest) <= size))
            rest = rest[size:]
        return result if self._stages is None else self._run_in_stages(self._stages, packs, context)

    def _run_in_stages(
        self, stages: StagedPasses, packs: Sequence[Sequence[Term]], context: PassContext
    ) -> PassResult:
        both = self._scale.sums_per_parameter == 2 and not context.only_unscaled
        result = PassResult()
        try:
            tallies, result.sums = stages.run([partial(self._forward, pack, context) for pack in packs], both)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(max(map(len, packs))) from error
        finally:
            drop_gradients(self._parameters)
        for tally in tallies:
            result.tally.merge(tally)
        return result

    @property
    def links(self) -> LinkControl | None:
        """The links between the stages of the model, if it is in stages."""
        return None if self._stages is None else self._stages.links

    def work_share(self, terms: Sequence[int], group_terms: Sequence[int]) -> float:
        """The work of jobs with these numbers of terms, relative to that of a whole group, including padding."""
        if not self._pads_packs or self.planner.pack_size is None:
            return sum(terms) / sum(group_terms)
        packs, group_packs = (
            sum(-(-each // self._rank.count // self.planner.pack_size) for each in jobs)
            for jobs in (terms, group_terms)
        )
        return packs / group_packs

    def gradient_bytes(self) -> int:
        """The size of the gradient that stays on this rank between the packs of a pass."""
        parameters = self._parameters.values()
        return self._scale.sums_per_parameter * sum(
            (p if self._sums_last else local_shard(p.data)).nbytes for p in parameters
        )

    @cached_property
    def _sums_last(self) -> bool:
        """Whether the last pack of a pass sums the gradients of a sharded model over all ranks, to save traffic.

        Until then, every rank has a gradient of all weights: only if that is small. All ranks find out together.
        """
        if not self._shards_gradients or self._ranks is None:
            return self._shards_gradients
        whole = self._scale.sums_per_parameter * sum(p.nbytes for p in self._parameters.values())
        return all(self._ranks.gather(whole <= LARGEST_WHOLE_GRADIENT * usable_bytes(self._model.device)))

    def _check_same_terms(self, terms: int) -> None:
        """Ranks that run different numbers of packs would wait for each other forever."""
        if self._unfinished:
            raise RuntimeError("an earlier pass of this trainer failed; restart it on all ranks")
        if self._ranks is not None:
            check_same("number of terms of a group", self._ranks.gather(terms))

    def _share_of(self, terms: Sequence[Term], context: PassContext) -> Sequence[Term]:
        share = share_of(terms, self._rank, context.offset)
        if not self._sharded or not terms:
            return share
        return padded(share, -(-len(terms) // self._rank.count), like=terms[0])

    def _padded(self, pack: Sequence[Term], size: int, context: PassContext) -> list[Term]:
        """The pack, padded so that all packs have one size; a smaller job is a single pack."""
        return padded(pack, min(size, -(-context.job_terms // self._rank.count)), like=pack[0])

    def _run_discarded(self, terms: Sequence[Term], context: PassContext) -> None:
        if self._stages is not None:
            self._run_in_stages(self._stages, [terms] * self._stages.in_flight, context)
            return
        try:
            self._forward_backward(terms, context, last=True)
        except torch.OutOfMemoryError as error:
            if self._in_lockstep:
                raise self._out_of_memory(len(terms)) from error
            raise
        finally:
            drop_gradients(self._parameters)

    def _run_pack(self, terms: Sequence[Term], context: PassContext, last: bool) -> PassResult:
        try:
            return self._forward_backward(terms, context, last)
        except torch.OutOfMemoryError as error:
            if self._in_lockstep:
                raise self._out_of_memory(len(terms)) from error
            if len(terms) == 1 and not self.planner.can_checkpoint_more:
                raise
        finally:
            drop_gradients(self._parameters)
        # Outside the except block: the error's traceback would keep the tensors of the failed pack alive.
        self._model.release_rollout_memory()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(terms) == 1:
            self.planner.checkpoint_all()
            return self._run_pack(terms, context, last)
        first, second = halves(terms)
        self.planner.pack_size = min(self.planner.pack_size or len(terms), len(first))
        result = self._run_pack(first, context, last)
        result.add(self._run_pack(second, context, last))
        return result

    def _out_of_memory(self, terms: int) -> ConfigError:
        fewer = "lower training.pack_size" if terms > 1 else "use more cards (lanes.ranks) or smaller samples"
        if self._shards_gradients:  # groups that arrive early have gradients of their own
            fewer += ", set training.sum_in_order: false"
        return ConfigError(
            f"out of memory in a pack of {terms} terms on {self._rank}, and ranks of a sharded model, in stages, "
            f"or with lanes.cards_per_replica, cannot halve packs; {fewer}, or set "
            "training.gradient_checkpointing: true"
        )

    def _forward_backward(self, terms: Sequence[Term], context: PassContext, last: bool) -> PassResult:
        loss = self._forward(terms, context)
        both = loss.unscaled is not None and loss.final is not None
        sum_ranks = last or both or not self._sums_last
        sums = GradientSums()
        if loss.unscaled is not None:
            sums.unscaled = self._gradient_of(loss.unscaled, sum_ranks=sum_ranks, keep_graph=both)
        if loss.final is not None:
            sums.final = self._gradient_of(loss.final, sum_ranks=sum_ranks)
        return PassResult(sums, loss.tally)

    def _forward(self, terms: Sequence[Term], context: PassContext) -> PackLoss:
        pairs = self._replay.pairs(terms, context.conditioning, before_updates=context.before_updates)
        terms_of_loss = self._objective.loss(pairs)
        check_loss(self._objective, terms_of_loss, len(terms), differentiable=pairs.velocity_RL.requires_grad)
        weights = [term.weight / context.denominator for term in terms]
        unscaled_M, final_M = self._scale.loss_parts(terms_of_loss)
        loss = PackLoss(
            None if unscaled_M is None else _weighted_sum(unscaled_M, weights),
            None if final_M is None or context.only_unscaled else _weighted_sum(final_M, weights),
        )
        if self._counts_metrics:
            counted = sum(term.weight != 0 for term in terms)  # padding comes last
            loss.tally.add({name: values[:counted] for name, values in terms_of_loss.measures.items()})
            if context.before_updates:
                loss.tally.add(log_prob_mismatch(pairs, counted * self._objective.rows_per_term))
        return loss

    def _gradient_of(self, scalar: Tensor, sum_ranks: bool, keep_graph: bool = False) -> Gradients:
        """The gradient of a scalar. If sharded, empty unless `sum_ranks`, and then including earlier ones.

        FSDP2 accumulates unsummed gradients in one place: parts that must not mix are summed every time.
        """
        if self._shards_gradients:
            sum_gradients_in_next_backward(self._model.transformer, sum_ranks)
        scalar.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
        return take_gradients(self._parameters)


def shared_rank(ranks: RankGroup | None, exchange: TokenExchange | None) -> Rank:
    """The place of this rank among those that share terms: the same for ranks that compute forwards together."""
    rank, together = Rank() if ranks is None else ranks.rank, 1 if exchange is None else exchange.ranks
    return Rank(rank.index // together, rank.count // together)


def _weighted_sum(values_M: Tensor, weights: list[float]) -> Tensor:
    return (values_M * to_device_like(torch.tensor(weights, dtype=torch.float64), values_M)).sum()
