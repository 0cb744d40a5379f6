"""Who works where: from a recipe's lanes to assignments, or a complaint about what is lacking. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.workers.assignment import Assignment, Duty

TRAINER, ENCODER = "trainer", "encoder"


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to work on."""

    cores: tuple[int, ...]
    cuda_devices: int = 0


@dataclass(frozen=True, slots=True)
class Crew:
    """All workers of a run. In mode colocated the trainer does everything and there is nobody else."""

    trainer: Assignment
    generators: tuple[Assignment, ...] = ()
    rewards: tuple[Assignment, ...] = ()
    encoder: Assignment | None = None

    def everybody(self) -> tuple[Assignment, ...]:
        """The slowest to load first."""
        encoder = () if self.encoder is None else (self.encoder,)
        return (self.trainer, *self.generators, *self.rewards, *encoder)


def threads_per_worker(recipe: Recipe, machine: Machine) -> int:
    """Threads of each worker on a CPU: its share of the cores."""
    if isinstance(recipe.lanes.threads, int):
        return recipe.lanes.threads
    return max(1, len(machine.cores) // _lanes_of(recipe)) if _on_cpu(recipe, machine) else 4


def place(recipe: Recipe, machine: Machine, exchange: Path, checkpoint: Path | None = None) -> Crew:
    """Everybody's assignment; raises ConfigError where there are more lanes than devices."""
    if recipe.lanes.device == "cuda" and machine.cuda_devices == 0:
        raise ConfigError("lanes.device: cuda, but no CUDA device is here; set it to cpu or auto")

    def assign(name: str, duties: set[Duty], device: str, cores: tuple[int, ...] | None = None) -> Assignment:
        _check_device(name, device, machine)
        from_here = checkpoint if "learn" in duties else None
        return Assignment(name, frozenset(duties), device, recipe, exchange, cores, from_here)

    if recipe.mode == "colocated":
        device = _trainer_device(recipe, machine)
        return Crew(assign(TRAINER, {"encode", "generate", "score", "learn"}, device))
    devices, blocks = _generator_devices(recipe, machine), _core_blocks(recipe, machine)
    scores: set[Duty] = {"score"} if recipe.lanes.rewards == 0 else set()
    makes: set[Duty] = {"generate", *scores}
    helps: set[Duty] = makes if recipe.techniques.tag != "none" else set()
    trainer_device = _trainer_device(recipe, machine)
    encoder_device = trainer_device if recipe.lanes.encoder == "auto" else recipe.lanes.encoder
    reward_devices = _reward_devices(recipe, machine, len(devices))
    return Crew(
        trainer=assign(TRAINER, {"learn", *helps}, trainer_device, blocks[0]),
        generators=tuple(
            assign(f"generator-{index}", makes, device, blocks[1 + index]) for index, device in enumerate(devices)
        ),
        rewards=tuple(assign(f"reward-{index}", {"score"}, device) for index, device in enumerate(reward_devices)),
        encoder=assign(ENCODER, {"encode"}, encoder_device),
    )


def _check_device(name: str, device: str, machine: Machine) -> None:
    known = ["cpu", *(f"cuda:{index}" for index in range(machine.cuda_devices))]
    if device not in known and not (device == "cuda" and machine.cuda_devices):
        raise ConfigError(f"lanes: {name} is to be on '{device}', this machine has {', '.join(known)}; use these")


def _on_cpu(recipe: Recipe, machine: Machine) -> bool:
    return recipe.lanes.device == "cpu" or (recipe.lanes.device == "auto" and machine.cuda_devices == 0)


def _lanes_of(recipe: Recipe) -> int:
    """Generators and the trainer: those who compute all the time."""
    if recipe.mode == "colocated":
        return 1
    generators = recipe.lanes.generators
    return 1 + (generators if isinstance(generators, int) else len(generators))


def _trainer_device(recipe: Recipe, machine: Machine) -> str:
    if recipe.lanes.trainer != "auto":
        return recipe.lanes.trainer
    return "cpu" if _on_cpu(recipe, machine) else "cuda:0"


def _generator_devices(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    generators = recipe.lanes.generators
    if not isinstance(generators, int):
        return generators
    lanes = f"lanes.generators: {generators} generators and the trainer"
    if _on_cpu(recipe, machine):
        threads = threads_per_worker(recipe, machine)
        if (1 + generators) * threads > len(machine.cores):
            raise ConfigError(
                f"{lanes} with {threads} thread{'s' if threads > 1 else ''} each need "
                f"{(1 + generators) * threads} cores, this machine has {len(machine.cores)}; use fewer, or "
                "mode: colocated, or name the devices (lanes.generators=[cpu,cpu]) to share cores"
            )
        return ("cpu",) * generators
    if 1 + generators > machine.cuda_devices:
        raise ConfigError(
            f"{lanes} need {1 + generators} CUDA devices, this machine has {machine.cuda_devices}; use fewer, or "
            "mode: colocated, or name the devices (lanes.generators=[cuda:0]) to share one"
        )
    return tuple(f"cuda:{1 + index}" for index in range(generators))


def _reward_devices(recipe: Recipe, machine: Machine, generators: int) -> tuple[str, ...]:
    """On cards that nobody else has, then on the last of them."""
    rewards = recipe.lanes.rewards
    if not isinstance(rewards, int):
        return rewards
    if _on_cpu(recipe, machine):
        return ("cpu",) * rewards
    last = machine.cuda_devices - 1
    return tuple(f"cuda:{min(1 + generators + index, last)}" for index in range(rewards))


def _core_blocks(recipe: Recipe, machine: Machine) -> Sequence[tuple[int, ...] | None]:
    """Cores for the trainer and for each generator, none where they have to share; reward lanes roam."""
    threads, lanes = threads_per_worker(recipe, machine), _lanes_of(recipe)
    if not _on_cpu(recipe, machine) or threads * lanes > len(machine.cores):
        return [None] * lanes
    return [machine.cores[index * threads : (index + 1) * threads] for index in range(lanes)]
