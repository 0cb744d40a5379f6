"""Jobs of stages in real processes: small chains, and links that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from digenrl.stages import channels
from digenrl.stages.chain import ChainStage
from digenrl.stages.channels import LinkError
from digenrl.stages.codec_choice import Codec, LinkCodecs
from digenrl.stages.links import LinkSettings, connect_stages
from digenrl.stages.pacing import PacedLink
from digenrl.training.ranks.rank_group import RankGroup

WIDTH = 16


def small_chain() -> list[nn.Module]:
    """Six layers with the same weights in every process."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]


def small_batches(count: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [1 + i % 3 for i in range(count)]  # micro-batches may differ
    pairs = [torch.randn(2, size, WIDTH, generator=generator).unbind() for size in sizes]
    return [each[0] for each in pairs], [each[1] for each in pairs]


def gradients(modules: Sequence[nn.Module], first: int = 0) -> dict[str, Tensor]:
    """By module of the whole chain and name."""
    return {
        f"{first + i}.{name}": p.grad
        for i, module in enumerate(modules)
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def train_small_chain(
    ranks: RankGroup,
    bounds: Sequence[int],
    in_flight: int | None,
    settings: LinkSettings,
    steps: int,
    pause_s: float = 0.0,
    queued_s: float = 0.0,
) -> dict[str, Any]:
    """Losses, gradients and bytes of a stage after some steps.

    The last stage pauses in some forwards. The first stage's device takes a while before its first message.
    """
    first, end = bounds[ranks.rank.index], bounds[ranks.rank.index + 1]
    modules = small_chain()[first:end]
    if end == len(small_chain()) and pause_s:
        modules[0].register_forward_pre_hook(
            lambda module, given: time.sleep(pause_s if len(given[0]) == 3 else 0)
        )
    if queued_s and first == 0:
        end_s = time.monotonic() + queued_s
        channels.when_computed = lambda device: lambda: time.monotonic() > end_s
    inputs, targets = small_batches(7)
    with connect_stages(settings) as links:
        stage = ChainStage(modules, links, functional.mse_loss, in_flight=in_flight)
        losses = [stage.step(inputs, targets) for _ in range(steps)]
    return {"losses": losses, "gradients": gradients(modules, first), "sent": links.sent_bytes}


def fail_in_the_middle(ranks: RankGroup, how: str, deadline_s: float) -> str | None:
    """Stage 1 stops in the third micro-batch; what the others see of it."""
    inputs, targets = small_batches(8)
    modules = small_chain()[2 * ranks.rank.index : 2 * ranks.rank.index + 2]

    class Failing(nn.Module):
        calls = 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            if self.calls < 3:
                return value
            if how == "error":
                raise ValueError("this stage is broken")
            if how == "stalls":  # as a machine that does not answer; killed later, to end the test
                subprocess.Popen(["sh", "-c", f"sleep {3 * deadline_s}; kill -9 {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
            return value

    if ranks.rank.index == 1:
        modules = [Failing(), *modules]
    try:
        with connect_stages(LinkSettings(deadline_s=deadline_s)) as links:
            ChainStage(modules, links, functional.mse_loss).step(inputs, targets)
    except (LinkError, ValueError) as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Worsening(LinkSettings):
    """Links that become slow, or silent, in the middle of a message."""

    bytes_per_s: float | None = 1e6
    slower: float = 10.0  # times, after the first bytes
    silent_s: float = 0.0  # once, after the first bytes

    def pace(self) -> PacedLink:
        return WorseningLink(self)


class WorseningLink(PacedLink):
    """Worsens after some messages, between the header of one and its values."""

    def __init__(self, settings: Worsening) -> None:
        assert settings.bytes_per_s is not None
        super().__init__(settings.bytes_per_s)
        self._settings, self._pieces = settings, 0

    def pass_through(self, count: int) -> None:
        self._pieces += 1
        if self._pieces == 8:  # header, description and values of two messages, and the header of the third
            self.bytes_per_s /= self._settings.slower
            time.sleep(self._settings.silent_s)
        super().pass_through(count)


def over_worsening_links(ranks: RankGroup, settings: Worsening) -> list[float] | str:
    """The losses of the last stage, or the error."""
    inputs, targets = small_batches(7)
    modules = small_chain()[3 * ranks.rank.index : 3 * ranks.rank.index + 3]
    try:
        with connect_stages(settings) as links:
            return [float(loss) for loss in ChainStage(modules, links, functional.mse_loss).step(inputs, targets)]
    except LinkError as error:
        return str(error)


INT8 = LinkSettings(LinkCodecs(Codec("int8"), Codec("top_k", 4)))
