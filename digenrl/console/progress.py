"""How far a run is and how it goes, in the few numbers that a view shows, however long the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from digenrl.metrics.step_metrics import BUSY_PREFIX, Evaluation

SHOWN_REWARDS = 40
_STEPS_OF_A_MEAN = 20  # enough to smooth out evaluations and checkpoints
_STEPS_OF_A_BUSY_SHARE = 10


class Progress:
    """Takes in steps and evaluations as they come, or from the files of a run that goes on."""

    def __init__(self, steps: int, steps_done: int = 0) -> None:
        self.steps = steps
        self.steps_done = steps_done
        self.newest: Mapping[str, float] = {}  # the last step's numbers
        self.rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self.best_reward: tuple[float, int] | None = None  # and the step that had it
        self.first_evaluation: Evaluation | None = None
        self.last_evaluation: Evaluation | None = None
        self.best_evaluation: Evaluation | None = None
        self._step_s: deque[float] = deque(maxlen=_STEPS_OF_A_MEAN)
        self._busy: dict[str, deque[float]] = {}

    def step(self, numbers: Mapping[str, float | None]) -> None:
        """One optimizer step; a number that is missing or null is not known."""
        known = {name: number for name, number in numbers.items() if number is not None}
        self.newest = known
        self.steps_done = int(known["version"])
        if "step_s" in known:
            self._step_s.append(known["step_s"])
        if "reward_mean" in known:
            self._add_reward(known["reward_mean"], int(known["step"]))
        self._add_busy(known)

    def evaluation(self, evaluation: Evaluation) -> None:
        """One evaluation."""
        self.first_evaluation = self.first_evaluation or evaluation
        self.last_evaluation = evaluation
        if self.best_evaluation is None or _reward(evaluation) > _reward(self.best_evaluation):
            self.best_evaluation = evaluation

    def mean_step_s(self) -> float | None:
        """The time per step lately; None before the first."""
        return sum(self._step_s) / len(self._step_s) if self._step_s else None

    def left_s(self, since_last_step_s: float) -> float | None:
        """How long the remaining steps will take at the pace of late; None before the first step."""
        mean_s = self.mean_step_s()
        if mean_s is None:
            return None
        remaining = self.steps - self.steps_done
        # A step that takes longer than usual is not expected to have ended yet.
        return max(0.0, remaining * mean_s - min(since_last_step_s, mean_s)) if remaining else 0.0

    def busy_share(self, lane: str) -> float | None:
        """Over the last few steps; None for a lane that was in none of them."""
        shares = self._busy.get(lane)
        return sum(shares) / len(shares) if shares else None

    def _add_reward(self, reward: float, step: int) -> None:
        self.rewards.append(reward)
        if math.isfinite(reward) and (self.best_reward is None or reward > self.best_reward[0]):
            self.best_reward = (reward, step)

    def _add_busy(self, numbers: Mapping[str, float]) -> None:
        shares = {name[len(BUSY_PREFIX) :]: s for name, s in numbers.items() if name.startswith(BUSY_PREFIX)}
        # Lanes that are gone are forgotten.
        before = {lane: self._busy.get(lane, deque(maxlen=_STEPS_OF_A_BUSY_SHARE)) for lane in shares}
        for lane, share in shares.items():
            before[lane].append(share)
        self._busy = before


def _reward(evaluation: Evaluation) -> float:
    reward = evaluation.numbers.get("reward_mean", -math.inf)
    return reward if math.isfinite(reward) else -math.inf
