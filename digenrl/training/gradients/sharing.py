"""Several trainers compute the gradient of one update: who can, with which sums, and how shares change hands."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.adapters.lora import has_lora
from digenrl.models.contract import DiffusionModel
from digenrl.models.parallel.shards import any_sharded
from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.gradients.fixed_point_sums import FixedPointSums
from digenrl.training.gradients.job_sums import JobSums, UpdateSums
from digenrl.training.gradients.joined import parameters_of
from digenrl.training.gradients.ordered_sums import OrderedSums
from digenrl.training.gradients.share import GradientShare
from digenrl.training.gradients.sums import GradientSums
from digenrl.training.metrics import Tally
from digenrl.training.open_batch import OpenBatch
from digenrl.training.policy_weights import PolicyWeights, trained_parameters
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.trainer_state import Tensors


def check_sharing(
    model: DiffusionModel, ranks: RankGroup | None, *, shares_gradients: bool, commits: bool
) -> None:
    """Raises ValueError if a trainer with these parts cannot share gradients as it should."""
    if not shares_gradients:
        if not commits:
            raise ValueError("a trainer that never commits must share its gradients; set shares_gradients=True")
        return
    if any_sharded(trained_parameters(model).values()):
        raise ValueError("a sharded trainer cannot share gradients: no rank holds all of them")
    if ranks is not None and not commits:
        raise ValueError(f"a trainer that never commits works alone, but this is {ranks.rank}")


def make_sums(
    model: DiffusionModel,
    policies: PolicyWeights,
    settings: TrainerSettings,
    scale: AdvantageScale,
    ranks: RankGroup | None,
    *,
    shares_gradients: bool,
) -> UpdateSums:
    """Sums in fixed point if gradients are shared or belong to adapters, else in floating point.

    Fixed point takes eight bytes per parameter, which adapters can afford.
    """
    if shares_gradients or (settings.sum_in_order and has_lora(model)):
        return FixedPointSums(policies.parameters, over_batch=scale.over_batch, ranks=ranks)
    ranks = None if policies.sharded else ranks  # passes of a sharded model sum over ranks
    shared = policies.shared if policies.staged else None
    return OrderedSums(policies.parameters, in_order=settings.sum_in_order, ranks=ranks, shared=shared)


def take_share(batch: OpenBatch, sums: FixedPointSums) -> GradientShare:
    """Moves the sums of a batch's open update to a share. An update with values out of range is skipped later."""
    taken, bound = sums.take()
    taken.tally().means()  # reads all metrics at once
    batch.forget(taken.tallies)
    return GradientShare(
        batch=batch.index,
        update=batch.update,
        job_samples=batch.split.job_samples,
        steps=batch.steps if taken.tallies else None,
        bound=bound,
        tallies={job: tally.as_json() for job, tally in taken.tallies.items()},
        unscaled=taken.gradient.unscaled,
        final=taken.gradient.final,
    )


def check_share(share: GradientShare, batch: OpenBatch, parameters: Tensors) -> None:
    """Raises ValueError unless the share can be added to the open update."""
    facts = {
        "batch": (share.batch, batch.index),
        "update": (share.update, batch.update),
        "job_samples": (share.job_samples, batch.split.job_samples),
    }
    for name, (given, expected) in facts.items():
        if given != expected:
            raise ValueError(f"a share of {name} {given} does not belong to the open update, of {name} {expected}")
    for job in share.jobs:
        if job.place not in batch.places() or not batch.split.has(job):
            raise ValueError(f"the share contains {job}, which are not part of the open update")
        if job in batch.arrived:
            raise ValueError(f"the share contains {job}, which were added before")
    if share.steps is not None:
        batch.check_steps("a share", share.steps)
    for part in (share.unscaled, share.final):
        _check_integers(part, parameters)


def add_share(share: GradientShare, batch: OpenBatch, sums: FixedPointSums, parameters: Tensors) -> None:
    """Adds a share that was checked."""
    tallies = {}
    for job, content in share.tallies.items():
        tallies[job] = Tally()
        tallies[job].add_json(content)
    sums.add_share(JobSums(GradientSums(dict(share.unscaled), dict(share.final)), tallies), share.bound)
    batch.arrived.update(share.jobs)
    batch.trained.update(share.jobs)
    batch.steps = batch.steps if share.steps is None else share.steps


def _check_integers(part: Tensors, parameters: Mapping[str, Tensor]) -> None:
    for joined_name, value in part.items():
        names = parameters_of(joined_name)
        for name in names:
            if name not in parameters:
                raise ValueError(f"a share has a gradient of {name}, which is not trained here")
        expected = sum(parameters[name].numel() for name in names)
        if value.dtype != torch.int64 or value.shape != (expected,):
            more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
            raise ValueError(
                f"a share has a gradient of {names[0]}{more} of {value.dtype} {tuple(value.shape)}, expected "
                f"{torch.int64} {(expected,)}; does it come from another model or LoRA rank?"
            )
