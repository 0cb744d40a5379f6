"""A model cut into stages: each process computes some of the blocks, with the family's unmodified forward.

The forward runs on every stage. Blocks of other stages return the states that they are given, except for the one
before this stage's first block: it returns what the stage before has computed. Everything around the blocks, such
as embeddings of time and text, is cheap and computed on every stage. So only the states of blocks travel, and only
the velocity of the last stage is meaningful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import BlockElsewhere, block_places
from digenrl.models.contract import DiffusionModel
from digenrl.stages.messages import States

Result = TypeVar("Result")


class OwnBlocks:
    """The blocks `first` to `end` - 1 of a model's chain, which this process computes.

    The model is changed: it loses all other blocks, and forwards must be run by `run`. Names of weights stay the
    same.
    """

    def __init__(self, model: DiffusionModel, first: int, end: int) -> None:
        check_chain(model)
        places = [each for each in block_places(model.transformer) if each[0] not in model.blocks_before_chain]
        if not 0 <= first < end <= len(places):
            raise ValueError(f"no blocks {first} to {end - 1}: {model.family} has a chain of {len(places)}")
        self.first, self.end, self.blocks = first, end, len(places)
        self._received: Iterator[Tensor] | None = None
        self._handed: list[Tensor] | None = None
        if end < len(places):
            _block(places[end - 1]).register_forward_hook(self._hand_over)
        if first > 0:
            _replace(model, [each for each in block_places(model.transformer) if each not in places])
        stand_ins = _replace(model, [*places[:first], *places[end:]])
        if first > 0:
            stand_ins[first - 1].replace = self._take

    @property
    def is_last(self) -> bool:
        """Whether no block follows, so that forwards return a velocity."""
        return self.end == self.blocks

    def run(self, received: States, forward: Callable[[], Result]) -> tuple[Result, States]:
        """Runs a function with any number of forwards of the model.

        `received` are the states from the stage before, of all these forwards. Returns the function's result,
        which is meaningless unless this is the last stage, and the states for the stage after.
        """
        self._received, self._handed = (value for value in received if value is not None), []
        try:
            result = forward()
            if next(self._received, None) is not None:
                raise RuntimeError(f"{len(received)} states were received, more than the forwards have taken")
            return result, tuple(self._handed)
        finally:
            self._received = self._handed = None

    def _take(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._received is not None, "forwards of a model in stages are run by OwnBlocks.run"
        received = tuple(next(self._received) for _ in states)
        if [each.shape for each in received] != [each.shape for each in states]:
            raise RuntimeError(
                f"received states of shapes {[tuple(each.shape) for each in received]}, expected "
                f"{[tuple(each.shape) for each in states]}; all stages must run the same forwards"
            )
        return received

    def _hand_over(self, block: nn.Module, arguments: Any, output: Any) -> None:
        if self._handed is None:
            return  # a backward computes a checkpointed block again
        self._handed += [output] if isinstance(output, Tensor) else [each for each in output if each is not None]


def check_chain(model: DiffusionModel) -> None:
    """Raises ConfigError if a model's blocks are not a chain, or if its forwards are divided already."""
    if isinstance(model.transformer, UNet2DConditionModel):
        raise ConfigError(
            f"{model.family} cannot be trained in stages: the blocks of a UNet are no chain; "
            "leave out training.stages, or use a family with a transformer"
        )
    if model.exchange is not None:
        raise ConfigError(
            "a model in stages cannot divide the tokens of a forward too; "
            "leave out training.stages or lanes.cards_per_replica"
        )


def chain_length(model: DiffusionModel) -> int:
    """The number of blocks that can be divided over stages."""
    return sum(name not in model.blocks_before_chain for name, _, _ in block_places(model.transformer))


def _block(place: tuple[str, nn.ModuleList, int]) -> nn.Module:
    return place[1][place[2]]


def _replace(model: DiffusionModel, places: list[tuple[str, nn.ModuleList, int]]) -> list[BlockElsewhere]:
    stand_ins = []
    for _, blocks, index in places:
        blocks[index] = stand_in = BlockElsewhere(blocks[index], model.block_state_arguments)
        stand_ins.append(stand_in)
    return stand_ins
