"""From a recipe's lanes to assignments on this machine, or a ConfigError naming what is missing. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.worker.assignment import (
    ENCODER,
    TRAINER,
    Assignment,
    Duty,
    Machine,
    Workers,
    lane_count,
    rank_device,
    runs_on_cpu,
    threads_per_worker,
)


def place(
    recipe: Recipe, machine: Machine, exchange: Path, checkpoint: Path | None = None, run: Path | None = None
) -> Workers:
    """The assignments of all workers; raises ConfigError if there are more lanes than devices."""
    if recipe.lanes.device == "cuda" and machine.cuda_devices == 0:
        raise ConfigError("lanes.device: cuda, but no CUDA device is here; set it to cpu or auto")

    def assign(name: str, duties: set[Duty], device: str, cores: tuple[int, ...] | None = None) -> Assignment:
        _check_device(name, device, machine)
        from_here = checkpoint if name == TRAINER else None
        return Assignment(name, frozenset(duties), device, recipe, exchange, cores, from_here, run=run)

    if recipe.topology.one_process:
        device, lanes = _trainer_device(recipe, machine), recipe.lanes.rewards
        count = lanes if isinstance(lanes, int) else len(lanes)
        alone: set[Duty] = {"score"} if count == 0 else set()
        return Workers(
            trainer=assign(TRAINER, {"encode", "generate", "train", *alone}, device),
            rewards=tuple(assign(f"reward-{index}", {"score"}, device) for index in range(count)),
        )
    devices, blocks = _generator_devices(recipe, machine), _core_blocks(recipe, machine)
    scores: set[Duty] = {"score"} if recipe.lanes.rewards == 0 else set()
    makes: set[Duty] = {"generate", *scores}
    helps: set[Duty] = makes if recipe.trainer_helps else set()
    trains: set[Duty] = {"train"} if recipe.shares_work else set()
    trainer_device = _trainer_device(recipe, machine)
    for rank in range(recipe.lanes.ranks):
        _check_device(f"rank {rank} of the trainer", rank_device(trainer_device, rank), machine)
    for index, device in enumerate(devices):
        for card in range(1, recipe.lanes.cards_per_generator):
            _check_device(f"card {card} of generator {index}", rank_device(device, card), machine)
    encoder_device = trainer_device if recipe.lanes.encoder == "auto" else recipe.lanes.encoder
    reward_devices = _reward_devices(recipe, machine, lane_count(recipe))
    return Workers(
        trainer=assign(TRAINER, {"train", *helps}, trainer_device, blocks[0]),
        generators=tuple(
            assign(f"generator-{index}", makes | trains, device, blocks[1 + index])
            for index, device in enumerate(devices)
        ),
        rewards=tuple(assign(f"reward-{index}", {"score"}, device) for index, device in enumerate(reward_devices)),
        encoder=assign(ENCODER, {"encode"}, encoder_device),
    )


def _check_device(name: str, device: str, machine: Machine) -> None:
    known = ["cpu", *(f"cuda:{index}" for index in range(machine.cuda_devices))]
    if device not in known and not (device == "cuda" and machine.cuda_devices):
        has = f"this machine has only: {', '.join(known)}"
        raise ConfigError(f"lanes: {name} is assigned to '{device}', but {has}; choose one of these")


def _trainer_device(recipe: Recipe, machine: Machine) -> str:
    if recipe.lanes.trainer != "auto":
        return recipe.lanes.trainer
    return "cpu" if runs_on_cpu(recipe, machine) else "cuda:0"


def _generator_devices(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    generators = recipe.lanes.generators
    if not isinstance(generators, int):
        return generators
    ranks, each, needed = recipe.lanes.ranks, recipe.lanes.cards_per_generator, lane_count(recipe)
    trainer = "the trainer" if ranks == 1 else f"{ranks} trainer ranks"
    several = "" if each == 1 else f" of {each} cards each"
    lanes = f"lanes.generators: {generators} generators{several} and {trainer}"
    if runs_on_cpu(recipe, machine):
        threads = threads_per_worker(recipe, machine)
        if needed * threads > len(machine.cores):
            raise ConfigError(
                f"{lanes} with {threads} thread{'s' if threads > 1 else ''} each need "
                f"{needed * threads} cores, this machine has {len(machine.cores)}; use fewer, or "
                "mode: colocated, or name the devices (lanes.generators=[cpu,cpu]) to share cores"
            )
        return ("cpu",) * generators
    if needed > machine.cuda_devices:
        raise ConfigError(
            f"{lanes} need {needed} CUDA devices, this machine has {machine.cuda_devices}; use fewer, "
            "or mode: colocated, or name the devices (lanes.generators=[cuda:0]) to share one"
        )
    return tuple(f"cuda:{ranks + index * each}" for index in range(generators))


def _reward_devices(recipe: Recipe, machine: Machine, taken: int) -> tuple[str, ...]:
    """Unused GPUs first, then the last GPU."""
    rewards = recipe.lanes.rewards
    if not isinstance(rewards, int):
        return rewards
    if runs_on_cpu(recipe, machine):
        return ("cpu",) * rewards
    last = machine.cuda_devices - 1
    return tuple(f"cuda:{min(taken + index, last)}" for index in range(rewards))


def _core_blocks(recipe: Recipe, machine: Machine) -> Sequence[tuple[int, ...] | None]:
    """Cores for the trainer and each generator; none if they have to share. Reward lanes are not pinned."""
    threads, lanes = threads_per_worker(recipe, machine), lane_count(recipe)
    if not runs_on_cpu(recipe, machine) or threads * lanes > len(machine.cores):
        return [None] * lanes
    per_generator = recipe.lanes.cards_per_generator * threads
    firsts = [0, *range(recipe.lanes.ranks * threads, lanes * threads, per_generator)]
    ends = [*firsts[1:], lanes * threads]
    return [machine.cores[first:end] for first, end in zip(firsts, ends, strict=True)]
