"""The constants of one run's schedule: how much work, under which policy, at which expected costs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from digenrl.config.spec import DispatchRule, HelpRule, OrderRule, StreamRule


@dataclass(frozen=True, slots=True)
class Terms:
    """What has to be done and which techniques are on. `slice_size` divides `samples_per_prompt`.

    Slices are what a step's list is made of. A lane takes one or, if its offer says so, several at once.
    """

    steps: int
    prompts: int
    samples_per_prompt: int
    slice_size: int
    order: OrderRule = "generation"
    stream: StreamRule = "group"
    help: HelpRule = "none"
    dispatch: DispatchRule = "eager"
    stale_budget: int = 0  # samples of a step that may come from the version one behind
    colocated: bool = False
    scorers: int = 0  # reward lanes; 0 means that scoring takes no lane
    score_batch: int = 1  # so many waiting samples of one slice, at most, go to a reward lane together
    search_budget: int = 500  # nodes of one help decision: instants of possible futures that it plays
    slice_failures_per_group: int = 3  # so many failed slices take a group into quarantine
    replacements_per_step: int = 64  # more quarantined groups than this in one step end the run

    @property
    def slices_per_group(self) -> int:
        """How many slices a group is cut into."""
        return self.samples_per_prompt // self.slice_size

    @property
    def slices_per_step(self) -> int:
        """How many slices a step's list holds."""
        return self.prompts * self.slices_per_group

    def slices_in(self, samples: int) -> int:
        """How many slices so many samples are: what a lane takes at once is one or more of them."""
        return samples // self.slice_size

    @property
    def score_unit(self) -> int:
        """Samples that always travel through scoring together: every batch is a whole number of these."""
        return gcd(min(self.score_batch, self.slice_size), self.slice_size)

    @property
    def samples_per_step(self) -> int:
        """P x G."""
        return self.prompts * self.samples_per_prompt


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected times, exact in a simulation and measured in a live run. Slice times belong to the lanes."""

    train_sample_ns: Fraction
    commit_ns: int = 0
    publish_ns: int = 0
    switch_in_ns: int = 0
    switch_out_ns: int = 0
    score_ns: int = 0

    def train_ns(self, samples: int) -> int:
        """The time to train `samples` in one go, rounded half-even to whole nanoseconds."""
        return round(samples * self.train_sample_ns)

    def score_batch_ns(self, samples: int) -> int:
        """The time that a reward lane takes for `samples` at once."""
        return samples * self.score_ns
