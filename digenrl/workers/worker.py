"""A worker: the roles of its assignment, and one report for every order."""

from __future__ import annotations

import traceback

from digenrl.config.reading import ConfigError
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import RewardError
from digenrl.stages import make_trainer
from digenrl.workers.assignment import Assignment
from digenrl.workers.blueprint import load_model, load_text_encoders, read_blueprint
from digenrl.workers.orders import Order, OrderFailed, Ready, Report
from digenrl.workers.roles import Encoding, Generating, Learning, Role, Scoring
from digenrl.workers.saving import Saving


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
        except Exception as error:  # a worker outlives its order: whoever gave it decides what follows
            return failure(order, error)


def failure(order: Order, error: Exception) -> OrderFailed:
    """A report of something that nobody expected."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return OrderFailed(order, reason, details=traceback.format_exc())


def start_worker(assignment: Assignment) -> tuple[Worker | None, Report]:
    """A worker and its first report: that it is ready or, without one, why it could not be built."""
    try:
        return build_worker(assignment), Ready()
    except ConfigError as error:
        return None, OrderFailed(Order(), str(error), mistake=True)
    except Exception as error:  # whoever starts it tells it, and ends the run
        return None, failure(Order(), error)


def build_worker(assignment: Assignment) -> Worker:
    """Loads what the duties need, each once; raises ConfigError for what a user got wrong."""
    duties, recipe = assignment.duties, assignment.recipe
    blueprint = read_blueprint(recipe)
    exchange = TensorExchange(ExchangeFolder(assignment.exchange))
    roles: list[Role] = []
    scoring = Scoring(blueprint, build_rewards(recipe.rewards), exchange) if "score" in duties else None
    if scoring is not None:
        roles.append(scoring)
    if "encode" in duties:
        encoders = load_text_encoders(blueprint, assignment.device)
        roles.append(Encoding(encoders, exchange, recipe.model.negative_prompt))
    if "generate" in duties or "learn" in duties:
        model = load_model(blueprint, assignment.device)
        trainer = make_trainer(blueprint, model, helps="generate" in duties) if "learn" in duties else None
        generating = Generating(blueprint, model, exchange, scoring, trainer)
        roles.append(generating)
        if trainer is not None:
            saving = Saving(model, trainer)
            if assignment.checkpoint is not None:
                saving.resume(assignment.checkpoint)
            roles += [Learning(blueprint, model, exchange, trainer, generating), saving]
    return Worker(roles)
