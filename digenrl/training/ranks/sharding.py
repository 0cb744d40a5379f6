"""Full fine-tuning by several ranks: every rank holds some rows of each parameter, and of all that belongs to it.

FSDP2 gathers a block's weights for its forward and backward, and hands every rank its rows of the summed gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.models.lora import has_lora
from digenrl.models.model_weights import check_fits
from digenrl.training.checkpoint.state_trees import put_tensors, tensors_in, without_tensors
from digenrl.training.ranks.rank_group import RankGroup


def shard_model(model: DiffusionModel, ranks: RankGroup) -> None:
    """Spreads the transformer over the ranks, which all hold the same weights; before a trainer is made of it."""
    if has_lora(model):
        raise ValueError(f"{model.family} has LoRA adapters, which every rank holds whole; it is not sharded")
    mesh = ranks.mesh(ranks.device.type)
    # Everything is freed after a forward, the root too: the next one may be under another policy's weights.
    for block in repeated_blocks(model.transformer):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model.transformer, mesh=mesh, reshard_after_forward=True)
    for module in _sharded_modules(model.transformer):
        module.set_gradient_divide_factor(1.0)  # sums, not means: the denominator counts the terms of all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction


def add_up_in_next_backward(transformer: nn.Module, on: bool) -> None:
    """Whether the next backward ends with gradients added up over ranks, or keeps its own for one that does."""
    assert isinstance(transformer, FSDPModule)
    transformer.set_requires_gradient_sync(on)


def plain_class(transformer: nn.Module) -> type[Any]:
    """The class that a sharded transformer had before; FSDP2 puts one of its own in front."""
    return next(kind for kind in type(transformer).__mro__ if not issubclass(kind, FSDPModule))


def _sharded_modules(transformer: nn.Module) -> list[FSDPModule]:
    return [module for module in transformer.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Which rows of each parameter a rank holds: all ranks equally many, the last ones fewer or none."""

    index: int
    count: int
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  # of whole parameters, by name

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], ranks: RankGroup) -> ShardSpec:
        """That of sharded parameters."""
        return cls(ranks.index, ranks.count, {name: tuple(value.shape) for name, value in parameters.items()})

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> ShardSpec:
        """That of a state which holds a rank's parts."""
        shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
        return cls(facts["index"], facts["count"], shapes)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"index": self.index, "count": self.count, "shapes": shapes}

    def rows(self, parameter: str) -> slice:
        """This rank's rows, as FSDP2 chooses them."""
        total = self.shapes[parameter][0]
        most = -(-total // self.count)
        return slice(min(total, self.index * most), min(total, (self.index + 1) * most))

    def parameter_at(self, path: str, dimensions: int) -> str | None:
        """Whose rows the tensor at this path of a state is cut by; None where every rank holds all: a counter."""
        return next((key for key in path.split("/") if key in self.shapes), None) if dimensions else None

    def parts_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's parts of a whole state."""
        cut = without_tensors(state) | {"shard": self.facts()}
        put_tensors(cut, {path: self._part(path, value) for path, value in tensors_in(state).items()})
        return cut

    def _part(self, path: str, whole: Tensor) -> Tensor:
        parameter = self.parameter_at(path, whole.dim())
        return whole if parameter is None else whole[self.rows(parameter)].clone()


def as_held_by(
    cut: ShardSpec | None, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A state as a rank with this cut of the whole parameters holds it; without a cut it holds all."""
    shard = state.get("shard")
    if shard is None and cut is not None:
        check_fits("state of the trained weights", state["policies"]["current"], parameters)
        return cut.parts_of(state)
    if shard is not None and (cut is None or ShardSpec.of_facts(shard) != cut):
        here = "holds whole weights" if cut is None else f"is rank {cut.index} of {cut.count}"
        raise ValueError(
            f"state does not fit: it has the parts of rank {shard['index']} of {shard['count']}, and this "
            f"trainer {here}; save a checkpoint with those ranks, and read it with these"
        )
    return state
