"""Converts a trainer's state to named tensors plus JSON, for files and for messages, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from digenrl.training.ranks.sharding import ShardSpec
from digenrl.training.trainer_state import OptimizerState, Tensors, TrainerState

WEIGHTS, OLD_POLICY, REFERENCE, AVERAGE, OPTIMIZER = "weights", "old_policy", "reference", "average", "optimizer"
KINDS = (WEIGHTS, OLD_POLICY, REFERENCE, AVERAGE, OPTIMIZER)
MOMENTS = "moments/"  # moments are named moments/<parameter>/<kind of moment>
JSON_TENSOR = "json"  # the bytes of everything that is not a tensor

TensorsByKind = dict[str, dict[str, Tensor]]


def tensors_by_kind(state: TrainerState) -> TensorsByKind:
    """All tensors of a state; kinds that it does not have are absent."""
    moments = {
        f"{MOMENTS}{name}/{key}": value
        for name, of_parameter in state.optimizer.moments.items()
        for key, value in of_parameter.items()
    }
    kinds = (state.weights, state.old_policy, state.reference, state.average, moments)
    return {
        kind: {name: value.contiguous() for name, value in tensors.items()}
        for kind, tensors in zip(KINDS, kinds, strict=True)
        if tensors
    }


def without_tensors(state: TrainerState) -> dict[str, Any]:
    """Everything of a state that is not a tensor, except for its shard, as content that JSON can represent."""
    return {
        "batch": state.batch,
        "updates_done": state.updates_done,
        "pack_size": state.pack_size,
        "optimizer": {"scalars": dict(state.optimizer.scalars)},
        **({} if state.links is None else {"links": state.links}),
    }


def state_from(content: Mapping[str, Any], tensors: TensorsByKind, shard: ShardSpec | None) -> TrainerState:
    """The inverse of `without_tensors` and `tensors_by_kind`; tuples have become lists, as in JSON."""
    moments: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.get(OPTIMIZER, {}).items():
        name, _, key = path.removeprefix(MOMENTS).rpartition("/")
        moments.setdefault(name, {})[key] = value
    return TrainerState(
        batch=content["batch"],
        updates_done=content["updates_done"],
        pack_size=content["pack_size"],
        weights=tensors[WEIGHTS],
        optimizer=OptimizerState(content["optimizer"]["scalars"], moments),
        old_policy=tensors.get(OLD_POLICY),
        reference=tensors.get(REFERENCE),
        average=tensors.get(AVERAGE),
        shard=shard,
        links=content.get("links"),
    )


def json_tensor(content: Any) -> Tensor:
    """The bytes of content that JSON can represent."""
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def json_of(tensor: Tensor) -> Any:
    """The inverse of `json_tensor`."""
    return json.loads(tensor.cpu().numpy().tobytes())


def state_as_tensors(state: TrainerState) -> dict[str, Tensor]:
    """The whole state as tensors, named kind/name, and one tensor with the bytes of everything else."""
    shard = None if state.shard is None else state.shard.as_json()
    tensors = {
        f"{kind}/{name}": value for kind, named in tensors_by_kind(state).items() for name, value in named.items()
    }
    return tensors | {JSON_TENSOR: json_tensor(without_tensors(state) | {"shard": shard})}


def state_of_tensors(tensors: Tensors) -> TrainerState:
    """The inverse of `state_as_tensors`; every bit is the same."""
    content = json_of(tensors[JSON_TENSOR])
    by_kind: TensorsByKind = {}
    for path, value in tensors.items():
        kind, slash, name = path.partition("/")
        if slash:
            by_kind.setdefault(kind, {})[name] = value
    shard = content["shard"]
    return state_from(content, by_kind, None if shard is None else ShardSpec.from_json(shard))
