"""A model sharded over several ranks: each holds some rows of every weight.

FSDP2 gathers a block's weights for its forward and backward. In full fine-tuning, it also gives each rank its rows
of the summed gradient. LoRA adapters stay whole on every rank, and so do their gradients and moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from digenrl.models.adapters.lora import adapter_parameters
from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_group import RankGroup


def shard_model(model: DiffusionModel, ranks: RankGroup) -> None:
    """Shards the transformer over ranks that all hold the same weights; to be called before a trainer is made.

    The weights may be in host memory: blocks move to the rank's device one after the other, and only the rank's
    shards stay there. On the meta device they get no values. Ranks may do this at different times. Adapters are
    not sharded; they can be added before or after.
    """
    mesh, adapters = ranks.mesh(ranks.device.type), set(adapter_parameters(model).values())
    # Everything is freed after a forward, the root too: the next one may use another policy's weights.
    for module in (*repeated_blocks(model.transformer), model.transformer):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    for adapter in adapters:
        adapter.data = adapter.data.to(ranks.device)
    for module in model.transformer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, not means: the denominator counts terms of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def sum_gradients_in_next_backward(transformer: nn.Module, enabled: bool) -> None:
    """Whether the next backward sums gradients over ranks, or accumulates them locally for a later one."""
    assert isinstance(transformer, FSDPModule)
    transformer.set_requires_gradient_sync(enabled)


def unsharded_class(transformer: nn.Module) -> type[Any]:
    """The transformer's own class; FSDP2 puts a subclass in front of it."""
    return next(kind for kind in type(transformer).__mro__ if not issubclass(kind, FSDPModule))


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Which rows of each parameter a rank holds: equally many on all ranks, except for the last ones.

    Or, if they are `whole`, a rank holds all rows of these parameters and nothing of others, as a stage does.
    """

    rank: Rank
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  # of the whole parameters, by name
    whole: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], ranks: RankGroup, *, whole: bool = False) -> ShardSpec:
        return cls(ranks.rank, {name: tuple(value.shape) for name, value in parameters.items()}, whole)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ShardSpec:
        shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
        return cls(Rank(content["index"], content["count"]), shapes, content["whole"])

    def as_json(self) -> dict[str, Any]:
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"index": self.rank.index, "count": self.rank.count, "shapes": shapes, "whole": self.whole}

    def rows(self, parameter: str) -> slice:
        """This rank's rows, as FSDP2 assigns them."""
        if self.whole:
            return slice(None)
        total = self.shapes[parameter][0]
        per_rank = -(-total // self.rank.count)
        return slice(min(total, self.rank.index * per_rank), min(total, (self.rank.index + 1) * per_rank))

    def shard(self, parameter: str, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor that belongs to a parameter; step counters are not sharded."""
        return whole[self.rows(parameter)].clone() if whole.dim() else whole

    def holds(self, path: str) -> bool:
        """Whether this rank holds anything of a stored tensor."""
        return not self.whole or any(key in self.shapes for key in path.split("/"))

    def parameter_of(self, path: str, dimensions: int) -> str | None:
        """The parameter by whose rows a stored tensor is sharded; None for a step counter."""
        return next((key for key in path.split("/") if key in self.shapes), None) if dimensions else None
