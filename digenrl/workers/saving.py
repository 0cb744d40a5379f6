"""Writes what a run needs to go on, and what its owner takes home: checkpoints, and exported weights."""

from __future__ import annotations

from pathlib import Path

from digenrl.models.contract import DiffusionModel
from digenrl.training.checkpoints import prune_checkpoints, read_checkpoint, save_checkpoint
from digenrl.training.export import export_weights, weights_to_export
from digenrl.training.trainer import Trainer
from digenrl.workers.orders import CheckpointSaved, SaveCheckpoint
from digenrl.workers.roles import Handlers


class Saving:
    """The state of the last version, whatever is open: a batch that was begun is done again by who resumes."""

    def __init__(self, model: DiffusionModel, trainer: Trainer) -> None:
        self._model, self._trainer = model, trainer
        self.handlers: Handlers = {SaveCheckpoint: self.save}

    def save(self, order: SaveCheckpoint) -> CheckpointSaved:
        """A checkpoint, the newest export beside it, and none too many."""
        run, state = Path(order.run), self._trainer.state_at_last_version()
        assert state["batch"] == order.step, f"to save step {order.step}, but the trainer is at {state['batch']}"
        path = save_checkpoint(run / "checkpoints", order.step, state, order.facts)
        prune_checkpoints(run / "checkpoints", order.keep, path)
        export_weights(self._model, run, weights_to_export(state))
        return CheckpointSaved(order.step, str(path))

    def resume(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint; whether it is of the same recipe, the driver has looked."""
        self._trainer.load_state(read_checkpoint(checkpoint).trainer_state)
