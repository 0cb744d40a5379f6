"""Decides how many terms go into one pass and how many blocks are checkpointed, for all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import torch

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.blocks import block_positions, checkpoint_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.training.packing.memory_plan import PackPlan, choose_plan
from digenrl.training.packing.pack_size import free_bytes, measure_largest_pack
from digenrl.training.packing.packs import Term
from digenrl.training.packing.pass_profiler import CudaPassProfiler
from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_group import RankGroup

RunPack = Callable[[Sequence[Term]], None]
"""Runs a pack and leaves nothing behind."""


class PackPlanner:
    """Takes the pack size and checkpointing from the settings, or measures them on the first terms.

    `rank` is this rank's place among those that share the terms. Ranks `in_lockstep` exchange tensors inside a
    pass, and must measure the same packs. `gradient_bytes` is the size of the gradient of a pack, and of that of
    the packs before it in a pass. `bytes_to_come` is what training will still allocate in addition to its passes.
    """

    def __init__(
        self,
        model: DiffusionModel,
        settings: TrainerSettings,
        ranks: RankGroup | None,
        rank: Rank,
        *,
        sharded: bool,
        in_lockstep: bool,
        gradient_bytes: Callable[[], int],
        bytes_to_come: Callable[[], int],
    ) -> None:
        self._model, self._settings, self._ranks, self._rank = model, settings, ranks, rank
        self._sharded, self._in_lockstep = sharded, in_lockstep
        self._gradient_bytes, self._bytes_to_come = gradient_bytes, bytes_to_come
        self._blocks = len(block_positions(model.transformer))
        self._given_checkpointed = self._checkpointed_by_settings()
        self.pack_size = None if settings.pack_size == "auto" else settings.pack_size
        self._checkpointed = self._given_checkpointed or 0
        self._checkpointing_known = self._given_checkpointed is not None
        self._measured: PackPlan | None = None
        checkpoint_blocks(model, self._checkpointed)

    @property
    def plan(self) -> PackPlan | None:
        """The plan in use; None before anything was measured."""
        if self.pack_size is None:
            return None
        measured = self._measured or PackPlan(self.pack_size, self._checkpointed)
        return replace(measured, pack_size=self.pack_size, checkpointed=self._checkpointed)

    @property
    def can_checkpoint_more(self) -> bool:
        """Whether `checkpoint_all` would save memory, and the settings allow it."""
        return self._given_checkpointed is None and self._checkpointed < self._blocks

    def checkpoint_all(self) -> None:
        self._checkpoint(self._blocks)

    def current_pack_size(self, share: Sequence[Term], terms: int, job_terms: int, run: RunPack) -> int:
        """The pack size for this rank's share of `terms` terms; measured on the share if it is not known yet.

        Plans are made for jobs of `job_terms` terms.
        """
        smallest_share = len(share) if self._sharded else terms // self._rank.count
        known = self.pack_size is not None and self._checkpointing_known
        if not known and smallest_share < max(1, min(2, job_terms // self._rank.count)):
            return self.pack_size or 1  # some rank has too few terms to measure with; another job has more
        if not known:
            plan = self._measure(share[:smallest_share], job_terms, run)
            if self._ranks is not None:
                plan = PackPlan.for_all(PackPlan(*each) for each in self._ranks.gather(astuple(plan)))
            self._measured, self.pack_size = plan, plan.pack_size
            self._checkpoint(min(plan.checkpointed, self._blocks))  # stages may have different numbers of them
        assert self.pack_size is not None
        return self.pack_size

    def _checkpointed_by_settings(self) -> int | None:
        """The number of checkpointed blocks that the settings ask for; None if it is to be measured."""
        wanted = self._settings.gradient_checkpointing
        if wanted == "auto":
            on_gpu = self._model.device.type == "cuda"
            if on_gpu and self._in_lockstep:
                return self._blocks
            return None if on_gpu and self._blocks else 0
        if wanted is True or wanted is False:
            return self._blocks if wanted else 0
        if self._model.own_blocks is not None:
            return min(wanted, self._blocks)
        if wanted > self._blocks:
            raise ConfigError(
                f"training.gradient_checkpointing: {wanted}, but {self._model.family} has {self._blocks} blocks; "
                "lower it, or set true for all"
            )
        return wanted

    def _measure(self, share: Sequence[Term], job_terms: int, run: RunPack) -> PackPlan:
        device, settings, gradient_bytes = self._model.device, self._settings, self._gradient_bytes()
        if device.type != "cuda" or self._in_lockstep:
            largest = measure_largest_pack(
                lambda size: run(share[:size]),
                len(share),
                device=device,
                memory_share=settings.memory_share,
                limit=settings.largest_pack,
                reserved_bytes=gradient_bytes + self._bytes_to_come() if self._in_lockstep else 0,
                smallest=self._smallest_of_ranks if self._in_lockstep else lambda size: size,
            )
            return PackPlan(largest, self._checkpointed)
        free = free_bytes(device) - self._bytes_to_come()
        plan = choose_plan(
            CudaPassProfiler(self._model, lambda size: run(_repeated(share, size))),
            budget=settings.memory_share * free - gradient_bytes,  # they stay allocated between packs
            fixed_bytes=gradient_bytes,
            terms=-(-job_terms // self._rank.count),
            largest_pack=settings.largest_pack,
            pack_size=self.pack_size,
            checkpointed=self._given_checkpointed,
        )
        return plan.plus(torch.cuda.memory_allocated(device) + gradient_bytes)

    def _smallest_of_ranks(self, size: int) -> int:
        return size if self._ranks is None else min(self._ranks.gather(size))

    def _checkpoint(self, count: int) -> None:
        self._checkpointed, self._checkpointing_known = count, True
        checkpoint_blocks(self._model, count)


def _repeated(terms: Sequence[Term], size: int) -> list[Term]:
    """That many terms, repeated if necessary: measurements do not depend on their content."""
    return [terms[index % len(terms)] for index in range(size)]
