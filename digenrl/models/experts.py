"""Two transformers of one model, each for a part of the noise levels (Wan2.2 A14B)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from digenrl.config.recipes.recipe import Expert

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
EXPERTS: dict[Expert, tuple[str, ...]] = {
    "high": (HIGH_NOISE,),
    "low": (LOW_NOISE,),
    "both": (HIGH_NOISE, LOW_NOISE),
}
"""The components of the diffusers pipeline by the value of `model.train_expert`."""

Value = TypeVar("Value")


class Experts(nn.Module):
    """Computes a row with `transformer` if its timestep is at least `boundary`, else with `transformer_2`.

    Names of parameters begin with that of their component. A forward reads the timesteps on the host.
    """

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary

    def forward(self, hidden_states: Tensor, timestep: Tensor, **arguments: Any) -> tuple[Tensor]:
        """As of one transformer with `return_dict=False`."""
        if timestep.is_meta:  # only shapes are wanted, and they are the same for both
            return (self.transformer(hidden_states, timestep, **arguments)[0],)
        high = [time >= self.boundary for time in timestep.tolist()]
        if all(high) or not any(high):
            expert = self.transformer if high[0] else self.transformer_2
            return (expert(hidden_states, timestep, **arguments)[0],)
        order = sorted(range(len(high)), key=lambda row: not high[row])
        count, rows = sum(high), torch.tensor(order, device=hidden_states.device)

        def part(expert: nn.Module, rows: Tensor) -> Tensor:
            own = {name: value[rows] if isinstance(value, Tensor) else value for name, value in arguments.items()}
            output: Tensor = expert(hidden_states[rows], timestep[rows], **own)[0]
            return output

        outputs = torch.cat([part(self.transformer, rows[:count]), part(self.transformer_2, rows[count:])])
        return (outputs[rows.argsort()],)

    def enable_gradient_checkpointing(self, function: Any = None) -> None:
        for part in parts_of(self).values():
            part.enable_gradient_checkpointing(function)

    def disable_gradient_checkpointing(self) -> None:
        for part in parts_of(self).values():
            part.disable_gradient_checkpointing()


def parts_of(transformer: nn.Module) -> dict[str, Any]:
    """The transformers by the name of their component, or a single one under an empty name."""
    if isinstance(transformer, Experts):
        return {name: getattr(transformer, name) for name in EXPERTS["both"]}
    return {"": transformer}


def path_in(part: str, path: str) -> str:
    """The path of a layer in the whole, from its path in a part."""
    return f"{part}.{path}" if part else path


def of_part(part: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values of one part, by their names in it."""
    prefix = path_in(part, "")
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
