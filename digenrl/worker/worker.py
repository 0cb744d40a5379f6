"""A worker: what its assignment loads, and one result for every job."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from socket import gethostname
from time import perf_counter
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from digenrl import records
from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.exchange.tensors import Exchange
from digenrl.host_memory import loading_in_turn
from digenrl.logs import logged_job
from digenrl.models.context_parallel import divide_tokens
from digenrl.models.contract import DiffusionModel
from digenrl.records import Job, JobFailed, Result
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import Reward, RewardError
from digenrl.training.checkpoint.checkpoints import read_checkpoint
from digenrl.training.ranks.rank_group import RankGroup, join_ranks
from digenrl.training.ranks.sharding import shard_model
from digenrl.training.trainer import Trainer
from digenrl.worker.assignment import Assignment, Ready, StartFailed, cards_per_sample
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, make_trainer, read_blueprint
from digenrl.worker.calibration import StageCalibration
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

    def handle(self, job: Job) -> Result:
        """The result of a job, or why it failed."""
        with logged_job(job, self._name):
            logger.debug("started; reads %s", job.reads())
            began = perf_counter()
            result = self._carry_out(job)
            seconds = perf_counter() - began
            if isinstance(result, JobFailed):
                logger.warning("failed after %.3f s: %s\n%s", seconds, result.reason, result.details)
            else:
                logger.info("done in %.3f s", seconds)
            return result

    def _carry_out(self, job: Job) -> Result:
        try:
            return self._handlers[type(job)](job)
        except (ConfigError, RewardError) as error:
            return JobFailed(0, job, str(error), user_error=True)
        except TorchDynamoException as error:
            return JobFailed(0, job, f"{in_short(error)}; {NO_COMPILER}", user_error=True)
        except Exception as error:  # the worker survives; the scheduler decides what follows
            return JobFailed(0, job, in_short(error), details=traceback.format_exc())


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
        return build_worker(assignment, exchange, rendezvous), Ready()
    except ConfigError as error:
        return None, StartFailed(str(error), user_error=True)
    except Exception as error:  # the driver ends the run
        return None, StartFailed(in_short(error), details=traceback.format_exc())


def build_worker(assignment: Assignment, exchange: Exchange, rendezvous: str = "") -> Worker:
    """Loads what the duties need. Raises ConfigError for mistakes in the recipe."""
    duties, recipe = assignment.duties, assignment.recipe
    blueprint = read_blueprint(recipe)
    _check_run_is_visible(assignment)
    follows = "train" not in duties and assignment.rank is not None and not assignment.rank.is_first
    reward, held_out_reward = _build_rewards(recipe) if "score" in duties and not follows else (None, None)
    ranks = _join_ranks(assignment, rendezvous)
    with loading_in_turn(assignment.device):
        encoder = None
        if "encode" in duties:
            shares_device = bool(duties & {"generate", "train"})
            encoder = load_text_encoders(blueprint, assignment.device, shares_device)
        model = _load_model(blueprint, assignment, ranks) if duties & {"generate", "train"} else None
    trainer = None
    if "train" in duties:
        assert model is not None
        trainer = _build_trainer(blueprint, model, assignment, ranks)
    parts = WorkerParts(
        blueprint,
        exchange,
        encoder=encoder,
        model=model,
        reward=reward,
        held_out_reward=held_out_reward,
        trainer=trainer,
        commits=assignment.commits,
        publishes=recipe.topology.publishes,
        ranks=ranks,
        follows=follows,
        slowdown=assignment.slowdown,
    )
    return Worker(assignment.name, Stages(parts))


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
    if assignment.recipe.sharded and assignment.commits:
        ranks.mesh(ranks.device.type)
    if cards_per_sample(assignment) > 1:
        ranks.context(cards_per_sample(assignment))
    return ranks


def _load_model(blueprint: Blueprint, assignment: Assignment, ranks: RankGroup | None) -> DiffusionModel:
    """The model on this worker's device. One that is sharded moves there block by block, each rank its shards."""
    sharded, together = blueprint.recipe.sharded and assignment.commits, cards_per_sample(assignment)
    # Collectives between the ranks that compute a sample together are not compiled.
    model = load_model(blueprint, assignment.device, together == 1, stays_on_host=ranks is not None and sharded)
    if ranks is not None and sharded:
        shard_model(model, ranks)
    if ranks is not None and together > 1:
        divide_tokens(model, ranks.context(together))
    return model


def _build_trainer(
    blueprint: Blueprint, model: DiffusionModel, assignment: Assignment, ranks: RankGroup | None
) -> Trainer:
    helps = assignment.commits and "generate" in assignment.duties
    trainer = make_trainer(blueprint, model, helps=helps, ranks=ranks, commits=assignment.commits)
    if assignment.checkpoint is not None:
        checkpoint = read_checkpoint(assignment.checkpoint, shard=trainer.shard, ranks=trainer.ranks)
        trainer.load_state(checkpoint.trainer_state)
    return trainer


def _check_run_is_visible(assignment: Assignment) -> None:
    """Workers write files where they run, so every machine must see the run's folder."""
    run = assignment.run
    if run is not None and not run.is_dir():
        raise ConfigError(
            f"{assignment.name} on {gethostname()} does not see the run's folder {run}; give one that all "
            "machines share with --out, or run on this machine alone"
        )
