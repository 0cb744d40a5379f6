"""The measurements of `gpu.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from digenrl.config.recipes.attention import Kernels
from digenrl.records import Kernel, PassKind


@dataclass
class Measured:
    """The measurements of one family. Seconds are per forward pass, pair or step; 0 if they were left out."""

    family: str
    parameters: int = 0
    tokens: int = 0
    forward_flop: float = 0.0  # of one sample, as counted by torch: matrix products and attention
    matrix_tflops: float = 0.0
    kernels: Kernels | None = None
    attention_s: Mapping[PassKind, Mapping[Kernel, float]] = field(default_factory=dict)
    forward_s: dict[int, float] = field(default_factory=dict)
    forward_against_s: dict[int, float] = field(default_factory=dict)
    eager_forward_s: float = 0.0
    pair_s: float = 0.0
    pair_against_s: float = 0.0
    eager_pair_s: dict[str, float | None] = field(default_factory=dict)
    allocation_retries: int = 0
    pack_size: int = 0
    checkpointed_blocks: int = 0
    peak_gib: float = 0.0
    planned_gib: float = 0.0
    predicted_gib: float = 0.0
    profile_s: float = 0.0
    predicted_s: float | None = None
    step_s: float | None = None
    baseline_step_s: float | None = None
    samples_per_second: float | None = None
    largest_log_ratio: float | None = None
    log_prob_mismatch: float | None = None
    predicted_parts: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def forward_share(self, rows: int) -> float:
        """The share of the GPU's matrix rate that a forward pass reaches, by counted operations."""
        return self._share(rows * self.forward_flop / self.forward_s[rows])

    @property
    def pair_share(self) -> float:
        """The same for a replayed pair, which has the operations of two forwards."""
        return self._share(2 * self.forward_flop / self.pair_s)

    def parameter_share(self, rows: int) -> float:
        """The share of a forward pass by 2 x parameters x tokens."""
        return self._share(2 * rows * self.parameters * self.tokens / self.forward_s[rows])

    @property
    def best_eager_pair_s(self) -> float | None:
        return min((seconds for seconds in self.eager_pair_s.values() if seconds is not None), default=None)

    def _share(self, flop_per_second: float) -> float:
        return flop_per_second / (self.matrix_tflops * 1e12)
