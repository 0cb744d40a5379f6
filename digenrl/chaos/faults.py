"""The faults of a simulated world: what they are, and which of them a seed draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from digenrl.units import NS_PER_SECOND

Target = Literal["generator", "reward", "trainer", "any", "all", "reserve", "driver"]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault: what happens, whom it hits, and the range of its amount."""

    what: str
    target: Target
    least: float = 0.0
    most: float = 0.0


KINDS: dict[str, FaultKind] = {
    "crash": FaultKind("a worker dies with its jobs", "any"),
    "trainer_crash": FaultKind("the trainer dies while it trains or saves, or soon after", "trainer", 0, 2.5),
    "hang": FaultKind("a worker stops responding, and is killed after `lanes.patience_s`", "any"),
    "slow": FaultKind("a worker needs several times as long", "any", 3, 10),
    "late": FaultKind("a result arrives seconds after it was sent", "any", 1, 40),
    "doubled": FaultKind("a result arrives twice", "any", 0, 20),
    "lost": FaultKind("a result never arrives", "any"),
    "stall": FaultKind("a job never ends, though its worker is alive", "any"),
    "reordered": FaultKind("messages of all workers overtake each other", "all", 1, 10),
    "join": FaultKind("there is room for one more generator", "reserve"),
    "leave": FaultKind("a generator's machine is taken away for a while", "generator", 1, 60),
    "flap": FaultKind("a worker dies again each time it is back", "any", 2, 3),
    "node_loss": FaultKind("a machine is lost with its workers and what they left in the exchange", "all", 1, 30),
    "artifact_loss": FaultKind("some artifacts are lost", "all", 0.1, 0.9),
    "slice_loss": FaultKind("a slice is lost while it is being scored", "all"),
    "chunk_loss": FaultKind("held-out pictures are lost, and new weights that only some workers have", "all"),
    "weights_loss": FaultKind("a new version is lost before it is published", "all"),
    "late_export": FaultKind("weights that are exported again are reported late", "trainer", 1, 40),
    "reward_timeout": FaultKind("a reward takes long and then fails", "reward", 5, 25),
    "reward_error": FaultKind("a reward fails", "reward"),
    "reward_nan": FaultKind("a reward is not a number", "reward"),
    "reward_garbage": FaultKind("a reward lane returns too few numbers", "reward"),
    "nan_loss": FaultKind("the metrics of an update are not numbers", "all"),
    "out_of_memory": FaultKind("a slice or a held-out chunk runs out of memory", "generator", 1, 4),
    "stuck_start": FaultKind("a worker dies, and its replacement never finishes loading", "any"),
    "broken": FaultKind("a generator fails every job at once, until it is replaced", "generator"),
    "partition": FaultKind(
        "a worker loses its connection while it loads new weights, and keeps working", "generator"
    ),
    "clock_jump": FaultKind("the driver's clock jumps", "all", -20, 90),
    "driver_kill": FaultKind("the driver is killed after one of its decisions", "driver"),
    "stop": FaultKind("the user stops the run and resumes it", "all"),
}


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One fault. `amount` is in the unit of its kind; for `driver_kill` it is the number of the decision."""

    at_ns: int
    kind: str
    worker: str = ""
    amount: float = 0.0

    def describe(self) -> str:
        if self.kind == "driver_kill":
            return f"{self.kind} after decision {self.amount:.0f}"
        words = [
            f"{self.at_ns / NS_PER_SECOND:.3f} s",
            self.kind,
            self.worker,
            f"{self.amount:g}" if self.amount else "",
        ]
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Targets:
    """The possible targets of faults in a world, and the time range."""

    generators: Sequence[str]
    rewards: Sequence[str]
    trainer: str
    encoders: Sequence[str]
    reserve: Sequence[str]
    nominal_ns: int  # the time of the run without faults
    decisions: int  # roughly, of the run without faults
    most_faults: int

    def of(self, kind: FaultKind) -> Sequence[str]:
        """The workers that a fault of this kind can hit; [""] if it hits no single one."""
        everyone = (*self.generators, *self.rewards, self.trainer, *self.encoders)
        named: dict[Target, Sequence[str]] = {
            "generator": self.generators,
            "reward": self.rewards or self.generators,
            "trainer": (self.trainer,),
            "any": everyone,
            "reserve": self.reserve,
        }
        return named.get(kind.target, ("",))


def draw_faults(dice: Random, targets: Targets, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """A few faults of these kinds at random times. Some strike at the same time."""
    known = [name for name in kinds if targets.of(KINDS[name])]
    faults: list[Fault] = []
    if not known:
        return ()
    for _ in range(dice.randint(1, targets.most_faults)):
        at_ns = dice.randrange(int(1.3 * targets.nominal_ns))
        for _ in range(2 if dice.random() < 0.25 else 1):
            name = dice.choice(known)
            kind = KINDS[name]
            amount = round(dice.uniform(kind.least, kind.most), 3)
            if name == "driver_kill":
                at_ns, amount = 0, dice.randrange(targets.decisions)
            faults.append(Fault(at_ns, name, dice.choice(targets.of(kind)), amount))
    return tuple(sorted(faults))
