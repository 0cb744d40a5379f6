"""Forward and backward of packs through the stages of a model: packs are the micro-batches of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from digenrl.config.recipes.training import StageLinkSettings
from digenrl.models.parallel.own_blocks import OwnBlocks
from digenrl.stages.channels import LinkError
from digenrl.stages.messages import States
from digenrl.training.gradients.sums import GradientSums, take_gradients
from digenrl.training.metrics import Tally
from digenrl.training.ranks.rank_group import PeersLostError, RankGroup
from digenrl.training.ranks.stage_links import LinkControl


@dataclass(frozen=True, slots=True)
class PackLoss:
    """The loss of a pack in two parts, of which one may be missing (see `GradientSums`), and its metrics."""

    unscaled: Tensor | None
    final: Tensor | None
    tally: Tally = field(default_factory=Tally)


class StagedPasses:
    """Computes the gradients of packs together with the other stages, which all run the same packs.

    Every stage computes everything but the blocks of others, also the loss. Only that of the last stage counts.
    """

    def __init__(
        self, ranks: RankGroup, own: OwnBlocks, parameters: Mapping[str, nn.Parameter], settings: StageLinkSettings
    ) -> None:
        self._ranks, self._own, self._parameters = ranks, own, parameters
        self.links = LinkControl(ranks, settings)

    @property
    def in_flight(self) -> int:
        """How many packs are computed at the same time, at most."""
        return self._ranks.pipeline().in_flight

    def run(self, packs: Sequence[Callable[[], PackLoss]], both: bool) -> tuple[list[Tally], GradientSums]:
        """The metrics of the packs, and this stage's part of their gradient.

        A pack is given by the function that computes its loss. If `both` parts of a loss may have a gradient, each
        has a forward of its own.
        """
        parts = 2 if both else 1
        tallies, sums, is_unscaled = list[Tally](), GradientSums(), list[bool]()

        def forward(index: int, received: States) -> States:
            loss, handed = self._own.run(received, packs[index // parts])
            present = [each for each in (loss.unscaled, loss.final) if each is not None]
            assert both or len(present) == 1, "a loss with two parts"
            takes_unscaled = index % parts == 0 if both else loss.unscaled is not None
            is_unscaled.append(takes_unscaled)
            if index % parts == 0:
                tallies.append(loss.tally)
            if not self._own.is_last:
                return handed
            chosen = loss.unscaled if takes_unscaled else loss.final
            return (torch.zeros(()) if chosen is None else chosen,)

        def take(index: int) -> None:
            gradients = take_gradients(self._parameters)
            sums.add(GradientSums(unscaled=gradients) if is_unscaled[index] else GradientSums(final=gradients))

        try:
            self._ranks.pipeline().train(parts * len(packs), forward, take)
        except LinkError as error:
            raise PeersLostError(f"{self._ranks.rank} lost another stage: {error}") from error
        return tallies, sums
