"""Writes what a run needs to go on, and what its owner takes home: checkpoints, and exported weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.models.contract import DiffusionModel
from digenrl.models.model_weights import gathered_weights
from digenrl.training.checkpoint.checkpoints import (
    CheckpointError,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
)
from digenrl.training.checkpoint.export import export_weights, weights_to_export
from digenrl.training.ranks.rank_group import RanksError, together
from digenrl.training.trainer import Trainer
from digenrl.worker.orders import CheckpointSaved, SaveCheckpoint
from digenrl.worker.roles import Handlers


class Saving:
    """The state of the last version, whatever is open: a batch that was begun is done again by who resumes.

    All ranks of a trainer save and resume together, and it works for all of them or for none.
    """

    def __init__(self, model: DiffusionModel, trainer: Trainer) -> None:
        self._model, self._trainer = model, trainer
        self.handlers: Handlers = {SaveCheckpoint: self.save}

    def save(self, order: SaveCheckpoint) -> CheckpointSaved:
        """A checkpoint, the newest export beside it, and none too many."""
        with suppress(ConfigError):  # without the room it is copied at once, which takes longer
            self._trainer.keep_version()
        run, state, ranks = Path(order.run), self._trainer.state_at_last_version(), self._trainer.ranks
        assert state["batch"] == order.step, f"to save step {order.step}, but the trainer is at {state['batch']}"
        path = save_checkpoint(run / "checkpoints", order.step, state, order.facts, ranks=ranks)
        values = weights_to_export(state)
        if self._trainer.cut is not None:
            values = gathered_weights(self._model, values)
        try:
            with together(ranks):
                if ranks is None or ranks.first:
                    prune_checkpoints(run / "checkpoints", order.keep, path)
                    export_weights(self._model, run, values)
        except RanksError as error:
            raise CheckpointError(f"{run}: the export was not written: {error}") from error
        return CheckpointSaved(order.step, str(path))

    def resume(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint; whether it is of the same recipe, the driver has looked."""
        trainer = self._trainer
        trainer.load_state(read_checkpoint(checkpoint, cut=trainer.cut, ranks=trainer.ranks).trainer_state)
