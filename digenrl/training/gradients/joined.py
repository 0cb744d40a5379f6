"""Gradients of several parameters in one flat tensor each: many small tensors are slow to convert, add and send.

Joined gradients are `Gradients` as well. A name is then the names of all its parameters, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from digenrl.training.gradients.sums import Gradients, add_into

MOST_VALUES = 1 << 20  # of several parameters in one tensor
SEPARATOR = " "  # no name of a parameter contains it


def join(gradients: Gradients) -> Iterator[tuple[str, Tensor]]:
    """Joins the gradients, as copies. Empties the mapping, so that memory is freed on the way."""
    for names in _chunks(gradients):
        yield SEPARATOR.join(names), torch.cat([gradients.pop(name).reshape(-1) for name in names])


def split(joined: Gradients, parameters: Mapping[str, Tensor]) -> Gradients:
    """The gradients by parameter: views, unless parameters are in several tensors, which are added up."""
    gradients: Gradients = {}
    for names, values in joined.items():
        shapes = {name: parameters[name].shape for name in parameters_of(names)}
        parts = torch.split_with_sizes(values.reshape(-1), [shape.numel() for shape in shapes.values()])
        views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        gradients |= {name: gradients[name].clone() for name in views if name in gradients}
        add_into(gradients, views)
    return gradients


def alike(parts: Sequence[Gradients], parameters: Mapping[str, Tensor]) -> list[Gradients]:
    """The parts with every parameter under one name: as they are, or split if they were joined differently."""
    joined_names = {name for part in parts for name in part}
    names = [name for joined_name in joined_names for name in parameters_of(joined_name)]
    if len(set(names)) == len(names):
        return list(parts)
    return [split(part, parameters) for part in parts]


def parameters_of(joined_name: str) -> Sequence[str]:
    """The names of the parameters that are joined under a name."""
    return joined_name.split(SEPARATOR)


def _chunks(gradients: Gradients) -> list[list[str]]:
    """The names of parameters that are joined."""
    chunks: list[list[str]] = []
    room = 0
    for name, value in gradients.items():
        if value.numel() > room:
            chunks.append([])
            room = MOST_VALUES
        chunks[-1].append(name)
        room -= value.numel()
    return chunks
