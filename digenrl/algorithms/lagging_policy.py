"""A base for algorithms whose samples come from a policy that follows the trained one slowly."""

from __future__ import annotations

from digenrl.algorithms.contract import GroupRelative
from digenrl.config.algorithms import LaggingPolicySettings


class LaggingPolicy(GroupRelative):
    """Rollouts are deterministic (Euler), and only the final latents are kept."""

    settings: LaggingPolicySettings

    def old_policy_decay(self, batch: int) -> float:
        updates_done = (batch + 1) * self.updates_per_batch
        counted = max(0, updates_done - self.settings.old_decay_start)
        return min(self.settings.old_decay_growth * counted, self.settings.old_decay_max)
