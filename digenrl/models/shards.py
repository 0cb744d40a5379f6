"""Weights that are spread over ranks by FSDP2: each rank holds some rows of every parameter, its part."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_sharded(module: nn.Module) -> bool:
    """Whether this process holds parts of the parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def local_shard(value: Tensor) -> Tensor:
    """This rank's rows, in the very memory that FSDP2 gathers them from; what is not sharded is its own part."""
    return value.to_local() if isinstance(value, DTensor) else value


def gathered(parameters: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole values from every rank's parts, on the CPU of the first rank; other ranks get none of them.

    `parts` are cut as the sharded `parameters` of the same names. All ranks call it. One parameter at a time is
    whole on their devices.
    """
    whole: dict[str, Tensor] = {}
    for name, part in parts.items():
        parameter = parameters[name]
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        value = DTensor.from_local(
            part.detach().to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()
        if parameter.device_mesh.get_rank() == 0:
            whole[name] = value.to("cpu", copy=True)
    return whole
