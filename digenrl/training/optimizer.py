"""The optimizer of a trainer: made, stepped, and its state by the names of parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.config.training import TrainerSettings
from digenrl.training.gradients import Gradients
from digenrl.training.offload.host_copies import Copied, cpu_copy
from digenrl.training.policy_weights import PolicyWeights

MOMENTS_PER_PARAMETER = 2  # of AdamW
OF_THE_DEVICE = ("foreach", "fused")  # how a step is computed is not the state's to say


def make_optimizer(policies: PolicyWeights, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW over the trained parameters; on a card by kernels that take all of them at once."""
    parameters = list(policies.parameters.values())
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=all(parameter.is_cuda for parameter in parameters) or None,
    )


def take_step(
    policies: PolicyWeights,
    optimizer: torch.optim.Optimizer,
    gradient: Gradients,
    norm: float,
    largest_norm: float,
) -> None:
    """One optimizer step with this gradient, clipped to a norm; parameters are left without gradients.

    The gradient is used up: it is clipped in place, and let go of.
    """
    factor = min(1.0, largest_norm / (norm + 1e-6))
    if gradient:
        torch._foreach_mul_(list(gradient.values()), factor)
    for name, parameter in policies.parameters.items():
        parameter.grad = gradient[name].to(parameter.dtype) if name in gradient else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gradient.clear()


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], copied: Copied = cpu_copy
) -> dict[str, Any]:
    """A copy on the CPU: the moments of each parameter by its name, and the scalars of the one group."""
    names, state = list(parameters), optimizer.state_dict()
    (group,) = state["param_groups"]
    return {
        "scalars": {key: copy.copy(value) for key, value in group.items() if key != "params"},
        "moments": {
            names[index]: {key: copied(value) for key, value in moments.items()}
            for index, moments in state["state"].items()
        },
    }


def check_moments(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ValueError unless every moment is of a trained parameter and of its shape."""
    for name, moments in state["moments"].items():
        if name not in parameters:
            raise ValueError(f"optimizer state does not fit: {name} is not trained here")
        for key, value in moments.items():
            if key != "step" and value.shape != parameters[name].shape:
                raise ValueError(
                    f"optimizer state does not fit: {key} of {name} is {tuple(value.shape)}, "
                    f"expected {tuple(parameters[name].shape)}"
                )


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    """Takes over a copy of a state that `check_moments` has passed."""
    index_of = {name: index for index, name in enumerate(parameters)}
    scalars = {key: tuple(value) if isinstance(value, list) else value for key, value in state["scalars"].items()}
    scalars |= {key: optimizer.param_groups[0][key] for key in OF_THE_DEVICE}
    optimizer.load_state_dict(
        {
            "state": {index_of[name]: _copied(moments) for name, moments in state["moments"].items()},
            "param_groups": [scalars | {"params": list(index_of.values())}],
        }
    )


def _copied(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """torch's optimizers go on with the very tensors they are handed, and would change the state in place."""
    return {key: value.clone() for key, value in moments.items()}
