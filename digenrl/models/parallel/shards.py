"""Parameters sharded over ranks by FSDP2: each rank holds some rows of every parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters are sharded: a forward is then a collective of all ranks."""
    return any_sharded(module.parameters())


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether this process holds only a shard of some tensor."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def local_shard(value: Tensor) -> Tensor:
    """This rank's rows, sharing FSDP2's memory; a tensor that is not sharded is returned as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def with_local_rows(parameter: DTensor, rows: Tensor) -> DTensor:
    """A tensor that is sharded like the parameter, of which this rank holds `rows`; their memory is shared."""
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gather_to_first_rank(parameters: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole values from the shards of all ranks, on the CPU of rank 0; other ranks get an empty dictionary.

    `shards` are cut like the sharded `parameters` of the same names. A collective: all ranks must call it. One
    parameter at a time is gathered on the devices.
    """
    whole: dict[str, Tensor] = {}
    for name, shard in shards.items():
        parameter = parameters[name]
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        value = with_local_rows(parameter, shard.detach().to(parameter.device)).full_tensor()
        if parameter.device_mesh.get_rank() == 0:
            whole[name] = value.to("cpu", copy=True)
    return whole
