"""Weights that several stages hold, as an embedding that is also the output layer: their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from digenrl.stages.messages import gathered


class SharedWeights:
    """Sums tensors over the stages that hold them, and moves nothing else. Creating it is a collective.

    `names` are those of this stage's weights that other stages may hold too.
    """

    def __init__(self, names: Mapping[str, object] | list[str]) -> None:
        held = [set(each) for each in gathered(sorted(names))]
        holders = {
            name: tuple(rank for rank, own in enumerate(held) if name in own)
            for name in sorted(set().union(*held))
        }
        several = sorted({ranks for ranks in holders.values() if len(ranks) > 1})
        groups = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in several}
        own = dist.get_rank()
        self._group_of = {
            name: groups[ranks] for name, ranks in holders.items() if own in ranks and len(ranks) > 1
        }

    def sum(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces tensors, in place, by their sums over the stages that hold them. Others are left alone.

        All stages must pass the tensors of all names that they hold.
        """
        for name, group in self._group_of.items():
            value = tensors[name]
            whole = value.detach().to("cpu", copy=True).contiguous()
            dist.all_reduce(whole, group=group)
            value.copy_(whole)
