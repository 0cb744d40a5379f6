"""Writes what a run needs to go on, and what its owner takes home: checkpoints, and exported weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.models.contract import DiffusionModel
from digenrl.models.published import gathered_weights
from digenrl.training.checkpoint.checkpoints import prune_checkpoints, read_checkpoint, save_checkpoint
from digenrl.training.checkpoint.export import export_weights, weights_to_export
from digenrl.training.checkpoint.format import CheckpointError
from digenrl.training.ranks.rank_group import RanksError, all_or_none
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
        assert state.batch == order.step, f"to save step {order.step}, but the trainer is at {state.batch}"
        path = save_checkpoint(run / "checkpoints", order.step, state, order.facts, ranks=ranks)
        values = weights_to_export(state)
        if self._trainer.shard is not None:
            values = gathered_weights(self._model, values)
        try:
            with all_or_none(ranks):
                if ranks is None or ranks.rank.is_first:
                    prune_checkpoints(run / "checkpoints", order.keep, path)
                    export_weights(self._model, run, values)
        except RanksError as error:
            raise CheckpointError(f"{run}: the export was not written: {error}") from error
        return CheckpointSaved(order.step, str(path))

    def resume(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint; whether it is of the same recipe, the driver has looked."""
        trainer = self._trainer
        trainer.load_state(read_checkpoint(checkpoint, shard=trainer.shard, ranks=trainer.ranks).trainer_state)
