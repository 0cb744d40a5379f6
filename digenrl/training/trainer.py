"""Accumulates scored groups in the order they come, and takes an optimizer step when an update's groups are there.

The scalar of an update is L = (1 / Z) sum of w * l over its terms, with Z counted before any forward. No statistic
crosses terms and the gradient norm is clipped after the whole sum, so that the gradient does not depend on the
order of groups, the size of packs or the number of ranks: on the order not even in its last bit, as long as groups
come in the same slices (see `sum_in_order`), on the others only by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from digenrl.config.training import TrainerSettings
from digenrl.models.contract import DiffusionModel
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup
from digenrl.training.batch import BatchShape, GroupEntry, check_shape, check_sharding
from digenrl.training.gradients import Gradients, GradientSums, add_into, total_norm
from digenrl.training.metrics import UpdateMetrics, update_metrics
from digenrl.training.offload.host_copies import Copied, HostCopies, cpu_copy
from digenrl.training.offload.last_version import LastVersion
from digenrl.training.offload.switching import EVERYTHING, SUMS, TO_REPLAY, TO_STEP, Switching
from digenrl.training.optimizer import MOMENTS_PER_PARAMETER, make_optimizer, take_step
from digenrl.training.ordered_sums import OrderedSums
from digenrl.training.packing.memory_plan import Packing
from digenrl.training.packing.pack_size import allocation_retries
from digenrl.training.packing.packed import Job, PackedPasses, PassResult
from digenrl.training.packing.packs import Term, terms_of, update_of
from digenrl.training.packing.replay import DrawNoise, Replay
from digenrl.training.policy_weights import PolicyWeights
from digenrl.training.ranks.rank_consensus import Agreed, UpdateFacts, agree
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import ShardSpec
from digenrl.training.trained_state import TrainedState


class Trainer:
    """One rank's trainer. All ranks are handed the same groups in the same order; each takes its share of terms.

    Of several `ranks` each holds the whole model, and gradients are added up when an update is committed. Or the
    model is sharded (see `digenrl.training.ranks.sharding`): every rank holds its parts of weights, gradients and
    moments, and none can generate by itself. An update is committed on all ranks or on none.

    With several updates per batch, `helps` keeps the last version's weights, so that the trainer can generate with
    them inside a batch, and `keep_last_version` a copy of the whole state on the host, so that
    `state_at_last_version` is at hand there too. With one update per batch both come for nothing.

    With `offload` what only training needs leaves the card while the trainer generates; see `switching`.
    """

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        settings: TrainerSettings,
        batch_shape: BatchShape,
        draw_noise: DrawNoise,
        *,
        ranks: RankGroup | None = None,
        helps: bool = False,
        keep_last_version: bool = False,
        offload: bool = False,
    ) -> None:
        check_shape(batch_shape, objective, settings)
        self._device = model.device
        self._objective = objective
        self._settings = settings
        self._shape = batch_shape
        self.ranks = ranks
        recompute = settings.old_log_probs == "recomputed"
        keep_old = objective.needs.old_policy or (objective.updates_per_batch > 1 and (recompute or helps))
        self.policies = PolicyWeights(model, keep_old=keep_old, keep_reference=objective.needs.reference)
        check_sharding(self.policies, ranks, helps or offload)
        self.cut = ShardSpec.of(self.policies.model_parameters, ranks) if ranks and self.policies.sharded else None
        self.ema = None if settings.ema is None else self.policies.snapshot()
        self.optimizer = make_optimizer(self.policies, settings)
        self._trained = TrainedState(self.policies, self.ema, self.optimizer, self.cut)
        autocast = settings.autocast == "bf16"
        replay = Replay(model, objective, self.policies, draw_noise, recompute=recompute, autocast=autocast)
        self._passes = PackedPasses(model, objective, self.policies, replay, settings, ranks, self._bytes_to_come)
        self.batch = 0  # also the version of the weights that fresh samples are made with
        self.update = 0  # of this batch
        self.updates_done = 0
        self._retries = 0  # of the allocator, when the update before was committed
        self.keeps_last_version = keep_last_version and objective.updates_per_batch > 1
        self._entries: dict[int, GroupEntry] = {}
        self._open = self._empty_sums()
        self._host = HostCopies(model.device)
        self._last_version = LastVersion(self._host)
        self.switching = Switching(
            self.policies,
            self.optimizer,
            self.ema,
            self._all_sums,
            model.device,
            moves=offload,
            sums_per_parameter=self._passes.sums_per_parameter,
            host=self._host,
        )

    def add_group(
        self, group: ScoredGroup, place: int | None = None, samples: Iterable[int] | None = None
    ) -> None:
        """Adds a group's gradient, or that of some of its samples, to the update that it belongs to.

        `place` is the group's place in the batch, its own index by default; a group that replaces a discarded one
        takes that one's. A group of a later update is held until the updates before are committed. Whatever raises
        here leaves the trainer as it was.
        """
        place = group.index if place is None else place
        wanted = set(range(self._shape.group_size) if samples is None else samples)
        entry = self._checked(group, place, wanted)
        if self._update_of(place) == self.update:
            self._train(place, entry, wanted)
        else:
            entry.held.append(wanted)
        self._entries[place] = entry

    def discard_group(self, place: int) -> None:
        """Forgets a group, and what was trained of it; one whose samples are all in the gradient stays there."""
        entry = self._entries.get(place)
        if entry is not None and len(entry.trained) == self._shape.group_size:
            raise ValueError(f"the group in place {place} is whole and part of the open gradient")
        self._entries.pop(place, None)

    def calibrate(self, group: ScoredGroup, *, later: bool = False) -> float:
        """Replays a group, of any step and size, and forgets it: finds the pack size and warms caches.

        Its rewards do not matter. Weights, optimizer, the open gradient and all counters stay as they are. `later`
        rehearses the updates after a batch's first, which may need forwards of their own. Returns what share of
        the work of a whole group it was.
        """
        samples = range(len(group.trajectories))
        if len(samples) < 2:
            raise ValueError(f"a rehearsal needs a group of at least 2 samples, got {len(samples)}")
        rows = self._objective.rows_per_term
        advantages = Advantages(
            values=tuple(1.0 if index % 2 else -1.0 for index in samples),
            chosen=tuple(samples[: len(samples) // rows * rows]),
        )
        terms = terms_of(group, advantages, self._objective, samples)
        self.switching.need(*TO_REPLAY)
        self.reserve_version()
        per_sample = len(terms) // len(samples)
        job = Job(
            group.conditioning,
            denominator=len(terms),
            before_updates=self.update == 0 and not later,
            terms_of_group=self._terms_of(group),
        )
        self._passes.run(terms, job)
        self._retries_since()  # those of rehearsals are nobody's
        return self._passes.share_of_group(len(terms), per_sample * self._shape.group_size)

    @property
    def later_updates_differ(self) -> bool:
        """Whether updates after a batch's first need forwards that the first does not."""
        return self._settings.old_log_probs == "recomputed" and self._objective.updates_per_batch > 1

    @property
    def packing(self) -> Packing | None:
        """As set or as chosen; None before anything was measured."""
        return self._passes.packing

    @property
    def pack_size(self) -> int | None:
        """Terms of one forward and backward: as set, as measured, or less after memory ran out; None before."""
        return self._passes.pack_size

    def moments_to_come(self) -> int:
        """Bytes that a state has more of after the first step."""
        return self._trained.moments_to_come()

    def can_commit(self) -> bool:
        """Whether every group of the open update is trained and, for a batch-wide scale, every reward is known."""
        return not self._missing()

    def commit(self) -> UpdateMetrics:
        """Takes the optimizer step of the open update, and begins the next with the groups held for it."""
        if self._missing():
            raise RuntimeError(
                f"update {self.update} of batch {self.batch} is not complete: the groups in places "
                f"{self._missing()} are missing or not whole; add them before the commit"
            )
        gradient = self.gradient()
        agreed = self._agreed(gradient)
        if not math.isfinite(agreed.norm):
            raise FloatingPointError(
                f"gradient norm of update {self.update} of batch {self.batch} is {agreed.norm}; "
                "the weights are unchanged"
            )
        self._passes.pack_size = agreed.pack_size
        if self.update == 0:
            self.policies.leave_version()
        self._last_version.leave()
        self.switching.need(*TO_STEP, changes=True)
        take_step(self.policies, self.optimizer, gradient, agreed.norm, self._settings.gradient_norm)
        self.updates_done += 1
        ema = self._settings.ema
        if ema is not None and self.ema is not None and self.updates_done % ema.every_updates == 0:
            self.ema.follow(ema.decay)
        metrics = replace(self._metrics(agreed), memory_retries=self._retries_since())
        self._next_update()
        return metrics

    def gradient(self) -> Gradients:
        """The gradient of the open update, which is complete, over all ranks and before clipping.

        Of a sharded model this rank's parts of it.
        """
        self.switching.need(SUMS)
        if self._objective.scale_over == "group":
            total = self._sums.total(1.0)
        else:
            in_order = [self._entries[place].rewards for place in sorted(self._entries)]
            scale = self._objective.scale(in_order)
            total = self._sums.total(scale)
            add_into(total, {name: scale * value for name, value in self._clamp_corrections(scale).items()})
        if self.ranks is None or self.policies.sharded:
            return total
        # A rank whose share was empty has nothing to add, but takes part in the sum.
        parameters = self.policies.parameters
        total = {n: total[n] if n in total else torch.zeros_like(p.data) for n, p in parameters.items()}
        self.ranks.sum_up(total)
        return total

    def abandon_batch(self) -> None:
        """Forgets everything of the open batch; its updates that are committed are taken back."""
        if self.update:
            self.load_state(self.state_at_last_version())
        self._forget_open_batch()

    def keep_version(self) -> None:
        """Begins to copy the state of the last version to the host, unless it is there; between batches.

        Who publishes, or asks for the state, takes it from there. An update changes it only when it is whole.
        """
        if self.update or self._last_version.kept:
            return
        self._last_version.keep(lambda copied: self._state_of_now(with_reference=False, copied=copied))
        if self.policies.sharded:
            self._last_version.state()  # other policies' weights are about to be put into the same memory

    def reserve_version(self) -> None:
        """Takes host memory for what a version that is kept will hold, beside all that is there now."""
        if not self.keeps_last_version:
            return
        kept = self._last_version.kept
        moments = MOMENTS_PER_PARAMETER if self.moments_to_come() or not kept else 0
        weights = self._objective.needs.old_policy + (0 if kept else 1 + (self.ema is not None))
        self._host.reserve([*self.policies.parameters.values()] * (moments + weights))

    def published(self) -> dict[str, Tensor]:
        """The weights that the next batch is generated with, by name; to be read before the batch is done.

        Of a sharded model all ranks ask; the first gets whole weights, on its CPU, and the others none.
        """
        if not self._last_version.kept:
            return self.policies.published()
        kept = self._last_version.state()["policies"]
        return self.policies.published(kept["old"] or kept["current"])

    def state(self) -> dict[str, Any]:
        """Everything that a trainer of the same settings needs to go on from here; only between batches.

        A tree of dictionaries with tensors, all copies on the CPU, and of what JSON can hold. Of a sharded model
        it holds this rank's parts, and under "shard" how they are cut.
        """
        if self.update or self._entries:
            raise RuntimeError(f"batch {self.batch} is open; save the trainer when it is committed")
        self.switching.settle()
        return self._state_of_now()

    def state_at_last_version(self) -> dict[str, Any]:
        """The state when the open batch began, whatever has been added and committed since.

        To be read before the batch is done: the memory is used again for the next one.
        """
        self.switching.settle()
        if not self._last_version.kept:
            if self.update:
                raise RuntimeError(
                    f"{self.update} updates of batch {self.batch} are committed and the state before is not kept; "
                    "make the trainer with keep_last_version=True"
                )
            return self._state_of_now()  # what is added to the open gradient is no part of a state
        state = self._last_version.state()
        policies = state["policies"] | {"reference": self.policies.reference_state()}
        return state | {"policies": policies, "pack_size": self._passes.pack_size}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; what is open is forgotten. A state that does not fit changes nothing.

        A sharded trainer takes whole states too, and those of the same rank among as many.
        """
        fitting = self._trained.fitting(state)
        self.switching.need(*EVERYTHING, changes=True)
        self._trained.load(fitting)
        self.batch, self.updates_done = state["batch"], state["updates_done"]
        if state["pack_size"] is not None:
            self._passes.pack_size = state["pack_size"]  # packs of another size round differently
        self._forget_open_batch()

    def _clamp_corrections(self, scale: float) -> Gradients:
        """Samples that the clamp catches, now that the scale is known, once more with the difference as weight."""
        result = PassResult()
        for place in self._places_of(self.update):
            entry = self._entries[place]
            weights = {
                index: self._objective.clamp / (abs(advantage) * scale) - 1
                for index, advantage in enumerate(entry.advantages.values)
                if abs(advantage) * scale > self._objective.clamp
            }
            terms = [
                replace(term, weight=weights[term.trajectories[0].sample.index])
                for term in self._terms(entry, weights)
            ]
            result.add(self._run(place, entry, terms, only_waiting=True))
        return result.sums.waiting

    # --- Inside -----------------------------------------------------------------------------------------------

    def _checked(self, group: ScoredGroup, place: int, wanted: set[int]) -> GroupEntry:
        """The place's entry, once everything about the group is known to be right; changes nothing."""
        where = f"group {group.index} of step {group.trajectories[0].sample.step}"
        if group.trajectories[0].sample.step != self.batch:
            raise ValueError(f"{where} is foreign: the open batch is of step {self.batch}")
        if not 0 <= place < self._shape.groups or self._update_of(place) < self.update:
            raise ValueError(
                f"{where} has no place {place}: {self._shape.groups} groups, update {self.update} open"
            )
        if len(group.trajectories) != self._shape.group_size:
            raise ValueError(f"{where} has {len(group.trajectories)} samples, expected {self._shape.group_size}")
        if not wanted <= set(range(self._shape.group_size)):
            raise ValueError(f"{where} has no samples {sorted(wanted - set(range(self._shape.group_size)))}")
        terms = self._terms_of(group)
        if any(entry.terms != terms for entry in self._entries.values()):
            raise ValueError(f"{where} has {terms} terms, other groups of the batch another number")
        advantages = self._objective.group_advantages(group.rewards)
        if self._objective.scale_over == "group":
            clamp = self._objective.clamp
            held = tuple(max(-clamp, min(clamp, advantage)) for advantage in advantages.values)
            advantages = replace(advantages, values=held)
        sums = OrderedSums(range(self._shape.group_size), self._settings.sum_in_order)
        entry = self._entries.get(place) or GroupEntry(group, group.index, group.rewards, advantages, terms, sums)
        if (entry.index, entry.rewards) != (group.index, group.rewards):
            raise ValueError(f"{where} is not the group that place {place} already holds")
        doubled = wanted & entry.added()
        if doubled:
            raise ValueError(f"{where}: samples {sorted(doubled)} were added before; none is trained twice")
        return entry

    def _terms_of(self, group: ScoredGroup) -> int:
        plans = [trajectory.plan for trajectory in group.trajectories]
        counts = {self._objective.terms_per_group(self._shape.group_size, plan) for plan in plans}
        assert len(counts) == 1, "the samples of a group are trained on equally many steps"
        return counts.pop()

    def _train(self, place: int, entry: GroupEntry, wanted: set[int]) -> None:
        if self.keeps_last_version:
            self.keep_version()
        result = self._run(place, entry, self._terms(entry, wanted))
        self.switching.need(SUMS, changes=True)  # not before: sums come back while the group is replayed
        entry.sums.add(wanted, result)
        entry.trained |= wanted
        if len(entry.trained) == self._shape.group_size:
            self._open.add([place], entry.sums.total)
            entry.sums = OrderedSums([], in_order=False)  # nothing more comes
            entry.group = entry.group if self._objective.scale_over == "batch" else None

    def _terms(self, entry: GroupEntry, samples: Iterable[int]) -> list[Term]:
        assert entry.group is not None
        return terms_of(entry.group, entry.advantages, self._objective, samples)

    def _run(self, place: int, entry: GroupEntry, terms: list[Term], only_waiting: bool = False) -> PassResult:
        assert entry.group is not None
        self.switching.need(*TO_REPLAY)
        return self._passes.run(
            terms,
            Job(
                conditioning=entry.group.conditioning,
                denominator=self._denominator(entry),
                before_updates=self.update == 0,
                only_waiting=only_waiting,
                place=place,
            ),
        )

    def _denominator(self, entry: GroupEntry) -> int:
        """Z of the open update, the same whatever has arrived: every group counts the terms that this one does."""
        return entry.terms * len(self._places_of(self.update))

    def _update_of(self, place: int) -> int:
        return update_of(place, self._shape.groups, self._objective.updates_per_batch)

    def _places_of(self, update: int) -> list[int]:
        return [place for place in range(self._shape.groups) if self._update_of(place) == update]

    def _missing(self) -> list[int]:
        whole = {p for p, entry in self._entries.items() if len(entry.trained) == self._shape.group_size}
        missing = set(self._places_of(self.update)) - whole
        if self._objective.scale_over == "batch":
            missing |= set(range(self._shape.groups)) - self._entries.keys()
        return sorted(missing)

    def _agreed(self, gradient: Gradients) -> Agreed:
        """What all ranks say of the open update, once they agree."""
        facts = UpdateFacts(
            batch=self.batch,
            update=self.update,
            updates_done=self.updates_done,
            groups=[(place, entry.index, entry.rewards) for place, entry in sorted(self._entries.items())],
            norm=total_norm(gradient),
            pack_size=self._passes.pack_size,
            tally=self._open.total.tally,
        )
        return agree(facts, self.ranks, sharded=self.policies.sharded)

    def _metrics(self, agreed: Agreed) -> UpdateMetrics:
        entries = [self._entries[place] for place in self._places_of(self.update)]
        return update_metrics(
            agreed.tally,
            batch=self.batch,
            update=self.update,
            rewards=[reward for entry in entries for reward in entry.rewards],
            gradient_norm=agreed.norm,
            zero_spread_groups=sum(not entry.advantages.chosen for entry in entries),
            terms=self._denominator(entries[0]),
            pack_size=self._passes.pack_size or 0,
        )

    def _retries_since(self) -> int | None:
        """The allocator's retries since this was last asked; None on a CPU."""
        before, now = self._retries, allocation_retries(self._device)
        self._retries = now or 0
        return None if now is None else now - before

    def _next_update(self) -> None:
        self.update += 1
        if self.update == self._objective.updates_per_batch:
            self.policies.finish_batch(self._objective.old_policy_decay(self.batch))
            self.batch += 1
            self._forget_open_batch()
            return
        self._open = self._empty_sums()
        for place in self._places_of(self.update):
            entry = self._entries.get(place)
            while entry is not None and entry.held:
                self._train(place, entry, entry.held[0])
                entry.held.pop(0)

    def _forget_open_batch(self) -> None:
        self.update = 0
        self._entries = {}
        self._open = self._empty_sums()
        self._last_version.forget()

    def _empty_sums(self) -> OrderedSums:
        return OrderedSums(self._places_of(self.update), self._settings.sum_in_order)

    @property
    def _sums(self) -> GradientSums:
        return self._open.total.sums

    def _all_sums(self) -> dict[str, OrderedSums]:
        return {"open": self._open, **{f"group {place}": entry.sums for place, entry in self._entries.items()}}

    def _bytes_to_come(self) -> int:
        """What will be there beside a pass and is not yet: AdamW's two moments, and an update's groups before."""
        several = len(self._places_of(self.update)) > 1
        return self.moments_to_come() + (self._passes.sums_bytes if several and not self._open.tensors() else 0)

    def _state_of_now(self, with_reference: bool = True, copied: Copied = cpu_copy) -> dict[str, Any]:
        counters = {"batch": self.batch, "updates_done": self.updates_done, "pack_size": self._passes.pack_size}
        return counters | self._trained.copy(with_reference, copied)
