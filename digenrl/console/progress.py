"""The progress of a run: the few figures that a view shows, in constant memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from digenrl.metrics.step_metrics import BUSY_PREFIX
from digenrl.run_folder.metric_lines import EvaluationRecord, StepRecord

SHOWN_REWARDS = 40
_STEPS_OF_A_MEAN = 20  # enough to smooth out evaluations and checkpoints
_STEPS_OF_A_BUSY_SHARE = 10


class Progress:
    """Summarizes steps and evaluations, live or from the files of a resumed run."""

    def __init__(self, steps: int, steps_done: int = 0) -> None:
        self.steps = steps
        self.steps_done = steps_done
        self.newest: Mapping[str, float] = {}  # the last step's metrics
        self.rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)
        self.best_reward: tuple[float, int] | None = None  # and its step
        self.first_evaluation: EvaluationRecord | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self.best_evaluation: EvaluationRecord | None = None
        self._step_s: deque[float] = deque(maxlen=_STEPS_OF_A_MEAN)
        self._busy: dict[str, deque[float]] = {}

    def load(self, steps: Iterable[StepRecord], evaluations: Iterable[EvaluationRecord]) -> None:
        """Adds the earlier steps and evaluations of a resumed run."""
        for step in steps:
            self.step({"step": step.step, **step.values})
        for evaluation in evaluations:
            self.evaluation(evaluation)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.newest = metrics
        self.steps_done = int(metrics["version"])
        if "step_s" in metrics:
            self._step_s.append(metrics["step_s"])
        if "reward_mean" in metrics:
            self._add_reward(metrics["reward_mean"], int(metrics["step"]))
        self._add_busy(metrics)

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        if self.last_evaluation is not None and evaluation.settings != self.last_evaluation.settings:
            self.first_evaluation = self.best_evaluation = None  # made in another way: not comparable
        self.first_evaluation = self.first_evaluation or evaluation
        self.last_evaluation = evaluation
        if self.best_evaluation is None or _reward(evaluation) > _reward(self.best_evaluation):
            self.best_evaluation = evaluation

    def mean_step_s(self) -> float | None:
        """The recent mean time per step; None before the first step."""
        return sum(self._step_s) / len(self._step_s) if self._step_s else None

    def left_s(self, since_last_step_s: float) -> float | None:
        """The expected time of the remaining steps at the recent pace; None before the first step."""
        mean_s = self.mean_step_s()
        if mean_s is None:
            return None
        remaining = self.steps - self.steps_done
        # A step that takes longer than the mean is still expected to take some time.
        return max(0.0, remaining * mean_s - min(since_last_step_s, mean_s)) if remaining else 0.0

    def busy_share(self, lane: str) -> float | None:
        """The mean over the last few steps; None for a lane that was present in none of them."""
        shares = self._busy.get(lane)
        return sum(shares) / len(shares) if shares else None

    def _add_reward(self, reward: float, step: int) -> None:
        self.rewards.append(reward)
        if math.isfinite(reward) and (self.best_reward is None or reward > self.best_reward[0]):
            self.best_reward = (reward, step)

    def _add_busy(self, metrics: Mapping[str, float]) -> None:
        shares = {name.removeprefix(BUSY_PREFIX): s for name, s in metrics.items() if name.startswith(BUSY_PREFIX)}
        # Lanes that have left are forgotten.
        before = {lane: self._busy.get(lane, deque(maxlen=_STEPS_OF_A_BUSY_SHARE)) for lane in shares}
        for lane, share in shares.items():
            before[lane].append(share)
        self._busy = before


def _reward(evaluation: EvaluationRecord) -> float:
    reward = evaluation.values.get("reward_mean", -math.inf)
    return reward if math.isfinite(reward) else -math.inf
