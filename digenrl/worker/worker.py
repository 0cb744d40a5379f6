"""A worker: the roles of its assignment, and one report for every order."""

from __future__ import annotations

import traceback
from socket import gethostname

from torch._dynamo.exc import TorchDynamoException

from digenrl.config.reading import ConfigError
from digenrl.exchange.tensors import Exchange
from digenrl.models.contract import DiffusionModel
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import RewardError
from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_group import join_ranks
from digenrl.training.ranks.sharding import shard_model
from digenrl.training.trainer import Trainer
from digenrl.worker.assignment import Assignment
from digenrl.worker.blueprint import load_model, load_text_encoders, read_blueprint
from digenrl.worker.orders import Order, OrderFailed, Ready, Report
from digenrl.worker.roles import Encoding, Generating, Learning, Role, Scoring
from digenrl.worker.saving import Saving
from digenrl.worker.stages import Blueprint, make_trainer

WITHOUT_COMPILER = "the model could not be compiled; a compiler for C is needed, or set model.compile=false"


class Worker:
    """Carries out one order after the other. What goes wrong is a report, too."""

    def __init__(self, roles: list[Role]) -> None:
        self._handlers = {kind: handler for role in roles for kind, handler in role.handlers.items()}

    def handle(self, order: Order) -> Report:
        """The report of an order that is carried out, or of why it could not be."""
        try:
            return self._handlers[type(order)](order)
        except (ConfigError, RewardError) as error:
            return OrderFailed(order, str(error), mistake=True)
        except TorchDynamoException as error:
            return OrderFailed(order, f"{in_short(error)}; {WITHOUT_COMPILER}", mistake=True)
        except Exception as error:  # a worker outlives its order: whoever gave it decides what follows
            return failure(order, error)


def failure(order: Order, error: Exception) -> OrderFailed:
    """A report of something that nobody expected."""
    return OrderFailed(order, in_short(error), details=traceback.format_exc())


def in_short(error: Exception) -> str:
    """Its kind and its words, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def start_worker(assignment: Assignment, exchange: Exchange, rendezvous: str = "") -> tuple[Worker | None, Report]:
    """A worker and its first report: that it is ready or, without one, why it could not be built.

    `rendezvous` is where the ranks of a trainer meet, as `torch.distributed` takes it.
    """
    try:
        return build_worker(assignment, exchange, rendezvous), Ready()
    except ConfigError as error:
        return None, OrderFailed(Order(), str(error), mistake=True)
    except Exception as error:  # whoever starts it tells it, and ends the run
        return None, failure(Order(), error)


def build_worker(assignment: Assignment, exchange: Exchange, rendezvous: str = "") -> Worker:
    """Loads what the duties need, each once; raises ConfigError for what a user got wrong."""
    duties, recipe = assignment.duties, assignment.recipe
    blueprint = read_blueprint(recipe)
    _check_run_is_here(assignment)
    roles: list[Role] = []
    scoring = Scoring(blueprint, build_rewards(recipe.rewards), exchange) if "score" in duties else None
    if scoring is not None:
        roles.append(scoring)
    if "encode" in duties:
        shares_device = bool(duties & {"generate", "learn"})
        encoders = load_text_encoders(blueprint, assignment.device, shares_device)
        roles.append(Encoding(encoders, exchange, recipe.model.negative_prompt))
    if "generate" in duties or "learn" in duties:
        model = load_model(blueprint, assignment.device)
        trainer = _build_trainer(blueprint, model, assignment, rendezvous) if "learn" in duties else None
        generating = Generating(blueprint, model, exchange, scoring, trainer, assignment.slowdown)
        roles.append(generating)
        if trainer is not None:
            saving = Saving(model, trainer)
            if assignment.checkpoint is not None:
                saving.resume(assignment.checkpoint)
            publishes = recipe.mode != "colocated"
            roles += [Learning(blueprint, model, exchange, trainer, generating, publishes), saving]
    return Worker(roles)


def _build_trainer(
    blueprint: Blueprint, model: DiffusionModel, assignment: Assignment, rendezvous: str
) -> Trainer:
    place = assignment.ranks
    ranks = None if place is None else join_ranks(rendezvous, Rank(place.index, place.count), model.device)
    if ranks is not None and blueprint.recipe.sharded:
        shard_model(model, ranks)
    return make_trainer(blueprint, model, helps="generate" in assignment.duties, ranks=ranks)


def _check_run_is_here(assignment: Assignment) -> None:
    """Files of a run are written where they are made: all machines have to see its folder."""
    run = assignment.run
    if run is not None and not run.is_dir():
        raise ConfigError(
            f"{assignment.name} on {gethostname()} does not see the run's folder {run}; give one that all "
            "machines share with --out, or run on this machine alone"
        )
