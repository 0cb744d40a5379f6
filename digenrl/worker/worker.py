"""A worker: what its assignment loads, and one result for every job."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from socket import gethostname
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from digenrl import records
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.exchange.tensors import Exchange
from digenrl.host_memory import loading_in_turn
from digenrl.logs import logged_job
from digenrl.models.contract import DiffusionModel
from digenrl.models.parallel.token_exchange import TokenExchange
from digenrl.models.quantized.layers import multiplies_fp8_elsewhere
from digenrl.models.quantized.replacing import BaseWeights
from digenrl.records import Job, JobFailed, Result
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import Reward, RewardError
from digenrl.training.checkpoint.checkpoints import Checkpoint, read_checkpoint, read_version_before
from digenrl.training.checkpoint.format import BASE_WEIGHTS
from digenrl.training.ranks.rank_group import PeersLostError, RankGroup, join_ranks
from digenrl.training.ranks.stage_links import link_settings
from digenrl.training.trainer import Trainer
from digenrl.worker.assignment import Assignment, DeviceFailed, PeersLost, Ready, StartFailed, cards_per_sample
from digenrl.worker.blueprint import (
    Blueprint,
    check_attention,
    fingerprint_of_base,
    load_for_evaluation,
    load_model,
    load_text_encoders,
    make_trainer,
    read_blueprint,
)
from digenrl.worker.calibration import StageCalibration
from digenrl.worker.stage_bounds import CARDS_FILE
from digenrl.worker.stages import Stages, WorkerParts

logger = logging.getLogger(__name__)

NO_COMPILER = "the model could not be compiled; a C compiler is needed, or set model.compile=false"


class Worker:
    """Carries out one job after the other. A failure is a result, too."""

    def __init__(self, name: str, stages: Stages) -> None:
        self._name = name
        self.stages = stages
        self._handlers: dict[type[Job], Callable[[Any], Result]] = {
            records.Encode: stages.encode,
            records.Generate: stages.generate,
            records.Score: stages.score,
            records.Train: stages.train,
            records.SendGradients: stages.send_gradients,
            records.TakeUpdate: stages.take_update,
            records.Commit: stages.commit,
            records.Publish: stages.publish,
            records.SwitchRole: stages.switch_role,
            records.Evaluate: stages.evaluate,
            records.Save: stages.save,
            records.Export: stages.export,
            records.Restore: stages.restore,
            records.Calibrate: StageCalibration(stages).calibrate,
        }

    def handle(self, job: Job) -> Result | PeersLost | DeviceFailed:
        """The result of a job, or why it failed, or why this worker cannot continue."""
        with logged_job(job, self._name):
            logger.debug("started; reads %s", job.reads())
            began = perf_counter()
            result = self._carry_out(job)
            seconds = perf_counter() - began
            if isinstance(result, JobFailed):
                logger.warning("failed after %.3f s: %s\n%s", seconds, result.reason, result.details)
            elif isinstance(result, PeersLost | DeviceFailed):
                logger.warning("given up after %.3f s: %s\n%s", seconds, result.reason, result.details)
            else:
                logger.info("done in %.3f s", seconds)
            return replace(result, job=job.without_data()) if isinstance(result, Result) else result

    def _carry_out(self, job: Job) -> Result | PeersLost | DeviceFailed:
        try:
            return self._handlers[type(job)](job)
        except Exception as error:  # the worker survives; the scheduler decides what follows
            return failure(job, error, traceback.format_exc())


def failure(job: Job, error: Exception, details: str) -> JobFailed | PeersLost | DeviceFailed:
    """What an error of a job means for the job and for its worker."""
    broken = device_error(error)
    if broken is not None:
        first_line = str(broken).partition("\n")[0]
        return DeviceFailed(f"cannot use its device any more: {first_line}", details)
    if isinstance(error, ConfigError | RewardError):
        return JobFailed(0, job, str(error), user_error=True)
    if isinstance(error, PeersLostError):
        return PeersLost(str(error), details)
    if isinstance(error, TorchDynamoException):
        return JobFailed(0, job, f"{in_short(error)}; {NO_COMPILER}", user_error=True)
    return JobFailed(0, job, in_short(error), details=details)


def device_error(error: BaseException | None) -> BaseException | None:
    """The error, or a cause of it, after which no further work succeeds on this process's device; or None.

    Memory that is used up is no such error.
    """
    while error is not None:
        is_cuda = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
        if isinstance(error, RuntimeError) and is_cuda and "out of memory" not in str(error):
            return error
        error = error.__cause__
    return None


def in_short(error: Exception) -> str:
    """The error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def start_worker(
    assignment: Assignment, exchange: Exchange, rendezvous: str = ""
) -> tuple[Worker | None, Ready | StartFailed]:
    """A worker and its first message: that it is ready or, without a worker, why it could not be built.

    `rendezvous` is where the ranks of a trainer meet, as `torch.distributed` takes it.
    """
    try:
        worker = build_worker(assignment, exchange, rendezvous)
        return worker, Ready(_remark(worker.stages.parts.model, assignment))
    except ConfigError as error:
        return None, StartFailed(str(error), user_error=True)
    except Exception as error:  # the driver ends the run
        return None, StartFailed(in_short(error), details=traceback.format_exc())


def build_worker(assignment: Assignment, exchange: Exchange, rendezvous: str = "") -> Worker:
    """Loads what the duties need. Raises ConfigError for mistakes in the recipe."""
    duties, recipe = assignment.duties, assignment.recipe
    blueprint = read_blueprint(recipe)
    _check_run_is_visible(assignment)
    limit_memory(recipe, assignment.device)
    if duties & {"generate", "train"}:
        check_attention(recipe, assignment.device)
    follows = "train" not in duties and assignment.rank is not None and not assignment.rank.is_first
    reward, held_out_reward = _build_rewards(recipe) if "score" in duties and not follows else (None, None)
    ranks = _join_ranks(assignment, rendezvous)
    with loading_in_turn(assignment.device):
        encoder = None
        if "encode" in duties:
            shares_device = bool(duties & {"generate", "train"})
            encoder = load_text_encoders(blueprint, assignment.device, shares_device)
        model = _load_model(blueprint, assignment, ranks) if duties & {"generate", "train"} else None
        held_out_model = None
        if "generate" in duties:
            held_out_model = load_for_evaluation(blueprint, assignment.device, _tokens(assignment, ranks))
    trainer, base_weights = None, ""
    if "train" in duties:
        assert model is not None
        base_weights = fingerprint_of_base(blueprint)
        trainer = _build_trainer(blueprint, model, assignment, ranks, base_weights)
    parts = WorkerParts(
        blueprint,
        exchange,
        encoder=encoder,
        model=model,
        reward=reward,
        held_out_reward=held_out_reward,
        held_out_model=held_out_model,
        trainer=trainer,
        commits=assignment.commits,
        publishes=recipe.topology.publishes,
        ranks=ranks,
        follows=follows,
        slowdown=assignment.slowdown,
        base_weights=base_weights,
        version_before=_version_before(assignment),
    )
    return Worker(assignment.name, Stages(parts))


def _remark(model: DiffusionModel | None, assignment: Assignment) -> str:
    """What the user should know about the model on this device."""
    if model is None or not multiplies_fp8_elsewhere(model.transformer):
        return ""
    return f"{assignment.name}: {assignment.device} has no fp8 units; fp8 weights are multiplied in another dtype"


def limit_memory(recipe: Recipe, device: str) -> None:
    """Limits what this process may reserve on a CUDA card to `lanes.memory_gib`. A CPU has no such limit."""
    limit = recipe.lanes.memory_gib
    if limit is None or not device.startswith("cuda"):
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total), device)


def _build_rewards(recipe: Recipe) -> tuple[Reward, Reward]:
    """The rewards of training and those of the evaluation, which may have some in common."""
    training = build_rewards(recipe.rewards)
    loaded = [(settings, reward) for settings, (reward, _) in zip(recipe.rewards, training.rewards, strict=True)]
    return training, build_rewards(recipe.held_out_rewards, loaded)


def _join_ranks(assignment: Assignment, rendezvous: str) -> RankGroup | None:
    """The worker's ranks, with all that they create together: models are then loaded in turn."""
    if assignment.rank is None:
        return None
    ranks = join_ranks(rendezvous, assignment.rank, torch.device(assignment.device))
    if assignment.recipe.training.stages is not None and assignment.commits:
        ranks.pipeline(link_settings(assignment.recipe.training.links))
        if assignment.recipe.training.stages == "auto":
            ranks.cards(None if assignment.run is None else assignment.run / CARDS_FILE)
    elif assignment.recipe.shards_model and assignment.commits:
        ranks.mesh(ranks.device.type)
    _tokens(assignment, ranks)
    return ranks


def _load_model(blueprint: Blueprint, assignment: Assignment, ranks: RankGroup | None) -> DiffusionModel:
    """The model on this worker's device; its shards or tokens, if the worker's ranks divide those."""
    recipe, trains = blueprint.recipe, "train" in assignment.duties
    base = BaseWeights(recipe.model.base if trains else recipe.generating_base, trains)
    shard_over = ranks if recipe.shards_model and assignment.commits else None
    return load_model(
        blueprint, assignment.device, shard_over=shard_over, base=base, exchange=_tokens(assignment, ranks)
    )


def _tokens(assignment: Assignment, ranks: RankGroup | None) -> TokenExchange | None:
    """The connection to the ranks with which this one computes each sample, if there are any."""
    together = cards_per_sample(assignment)
    return None if ranks is None or together == 1 else ranks.context(together)


def _build_trainer(
    blueprint: Blueprint, model: DiffusionModel, assignment: Assignment, ranks: RankGroup | None, base_weights: str
) -> Trainer:
    helps = assignment.commits and "generate" in assignment.duties
    trainer = make_trainer(blueprint, model, helps=helps, ranks=ranks, commits=assignment.commits)
    if assignment.checkpoint is not None:
        checkpoint = read_checkpoint(assignment.checkpoint, shard=trainer.shard, ranks=trainer.ranks)
        _check_base_weights(assignment, checkpoint, base_weights)
        trainer.load_state(checkpoint.trainer_state)
    return trainer


def _version_before(assignment: Assignment) -> dict[str, Tensor]:
    """The weights with which stale samples of the first step were made, in the worker that exports weights."""
    exports = assignment.rank is None or assignment.rank.is_first
    checkpoint = assignment.checkpoint
    return read_version_before(checkpoint) if checkpoint is not None and exports else {}


def _check_base_weights(assignment: Assignment, checkpoint: Checkpoint, found: str) -> None:
    """Raises ConfigError if the checkpoint was trained on other weights than those that were loaded."""
    recipe, expected = assignment.recipe, checkpoint.facts.get(BASE_WEIGHTS, found)
    if found == expected:
        return
    difference = f"{recipe.model.source} has other weights than this checkpoint was trained on"
    if not recipe.checkpoint.other_base_weights:
        raise ConfigError(
            f"{assignment.checkpoint}: {difference} (fingerprint {found}, expected {expected}); restore them, set "
            "model.revision to the one that was used, or continue with checkpoint.other_base_weights=true"
        )
    logger.warning("%s, as checkpoint.other_base_weights allows", difference)


def _check_run_is_visible(assignment: Assignment) -> None:
    """Raises ConfigError if a trainer, which reads and writes checkpoints, does not see the run's folder."""
    run = assignment.run
    if "train" in assignment.duties and run is not None and not run.is_dir():
        raise ConfigError(
            f"{assignment.name} on {gethostname()} does not see the run's folder {run}, to which it writes "
            "checkpoints; give one that the trainer's machines share with --out, or keep the trainer on this "
            "machine with cluster.trainer"
        )
