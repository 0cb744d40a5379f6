"""Attention kernels: those that a recipe asks for, and which of those that were tried is used. Needs no torch.

`native` is torch's own choice among all kernels but cuDNN's. Passes of kind "rollout" have no gradient, those of
kind "replay" a forward and a backward, and "masked" ones no gradient and a mask that hides the padding of texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from digenrl.records import Kernel, PassKind

Kernels = Mapping[PassKind, Kernel]
Trials = Mapping[PassKind, Mapping[Kernel, float]]
"""The seconds of all attention of a pass, by kernel. Kernels that fail or are wrong are left out."""

CANDIDATES: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
KINDS: tuple[PassKind, ...] = get_args(PassKind)


def fixed_kernels(setting: Kernel | Kernels) -> dict[PassKind, Kernel]:
    """The kernels that a recipe names: one for all passes, or by kind of pass; `native` where it names none.

    Flash takes no mask.
    """
    if isinstance(setting, str):
        return {kind: "native" if (kind, setting) == ("masked", "flash") else setting for kind in KINDS}
    return {kind: setting.get(kind, "native") for kind in KINDS}


def choose_kernels(trials: Sequence[Trials], *, same: bool) -> dict[PassKind, Kernel]:
    """The fastest kernels that work on every device that tried them; `native` for a kind that none can do.

    With `same`, rollouts and replays use one kernel, as log-probs round differently with another.
    """
    seconds = {kind: _sums(each[kind] for each in trials if kind in each) for kind in KINDS}
    if same and seconds["rollout"] and seconds["replay"]:
        both = _sums([seconds["rollout"], seconds["replay"]])
        seconds |= {"rollout": both, "replay": both}
    return {kind: min(sums, key=sums.__getitem__) if sums else "native" for kind, sums in seconds.items()}


def _sums(trials: Iterable[Mapping[Kernel, float]]) -> dict[Kernel, float]:
    """The sum of all trials, for kernels that are in each of them."""
    trials = list(trials)
    return {
        kernel: sum(each[kernel] for each in trials)
        for kernel in CANDIDATES
        if trials and all(kernel in each for each in trials)
    }


def described(kernels: Kernels, trials: Sequence[Trials]) -> str:
    """The choice in one line, with the times of the slowest device."""

    def times(kind: PassKind) -> str:
        slowest: dict[Kernel, float] = {}
        for each in trials:
            for kernel, seconds in each.get(kind, {}).items():
                slowest[kernel] = max(seconds, slowest.get(kernel, 0.0))
        listed = ", ".join(f"{kernel} {seconds * 1e3:.3g} ms" for kernel, seconds in slowest.items())
        return f"{kind} {kernels[kind]} ({listed})"

    tried = [kind for kind in KINDS if any(kind in each for each in trials)]
    return f"attention kernels: {'; '.join(map(times, tried))}"
