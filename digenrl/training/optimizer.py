"""The optimizer of a trainer: creation, one step, and its state by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from digenrl.config.recipes.training import TrainerSettings
from digenrl.training.gradients.sums import Gradients
from digenrl.training.offload.host_copies import CopyTensor, copy_all, cpu_copy
from digenrl.training.trainer_state import OptimizerState

DEVICE_OPTIONS = ("foreach", "fused")  # choose the kernels of a step; not restored from a state

Parameters = Mapping[str, nn.Parameter]


def make_optimizer(parameters: Parameters, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW over the trained parameters, fused: on a CPU, too, the other kernels take several times as long."""
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def take_step(
    parameters: Parameters, optimizer: torch.optim.Optimizer, gradient: Gradients, norm: float, largest_norm: float
) -> None:
    """One optimizer step with this gradient, clipped to the largest norm.

    The gradient is clipped in place and then cleared; parameters are left without gradients.
    """
    factor = min(1.0, largest_norm / (norm + 1e-6))
    if gradient:
        torch._foreach_mul_(list(gradient.values()), factor)
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].to(parameter.dtype) if name in gradient else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gradient.clear()


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Parameters, copy_tensor: CopyTensor = cpu_copy
) -> OptimizerState:
    """A copy of the optimizer's state."""
    names, state = list(parameters), optimizer.state_dict()
    (group,) = state["param_groups"]
    return OptimizerState(
        scalars={key: copy.copy(value) for key, value in group.items() if key != "params"},
        moments={names[index]: copy_all(moments, copy_tensor) for index, moments in state["state"].items()},
    )


def check_moments(state: OptimizerState, parameters: Parameters) -> None:
    """Raises ValueError unless every moment belongs to a trained parameter and has its shape."""
    for name, moments in state.moments.items():
        if name not in parameters:
            raise ValueError(f"optimizer state does not fit: {name} is not trained here")
        for kind, value in moments.items():
            if kind != "step" and value.shape != parameters[name].shape:
                raise ValueError(
                    f"optimizer state does not fit: {kind} of {name} is {tuple(value.shape)}, "
                    f"expected {tuple(parameters[name].shape)}"
                )


def load_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters, state: OptimizerState) -> None:
    """Loads a copy of a state that `check_moments` accepts."""
    index_of = {name: index for index, name in enumerate(parameters)}
    scalars = {key: tuple(value) if isinstance(value, list) else value for key, value in state.scalars.items()}
    scalars |= {key: optimizer.param_groups[0][key] for key in DEVICE_OPTIONS}
    # Cloned: torch's optimizers keep the tensors they are given, and would change the state in place.
    moments = {index_of[name]: copy_all(each, torch.clone) for name, each in state.moments.items()}
    groups = [scalars | {"params": list(index_of.values())}]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
