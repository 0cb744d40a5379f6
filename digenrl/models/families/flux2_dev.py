"""FLUX.2 dev: Mistral text from three layers, latents of 128 channels, embedded guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import Flux2Pipeline, Flux2Transformer2DModel
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.flux2_klein import FLUX2_KLEIN, SCHEDULER, TEXT_LENGTH, Flux2KleinModel
from digenrl.models.families.parts.helpers import refuse_negatives
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.pipeline_model import at_least_fp32


class Flux2DevModel(Flux2KleinModel):
    """As FLUX.2 klein, with another text encoder and one forward, which takes the guidance."""

    family = "flux2_dev"
    processors = ("tokenizer",)

    def negative_arguments(self, negative_prompts: Sequence[str]) -> dict[str, Any]:
        raise AssertionError("it takes no negative prompts")

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        refuse_negatives(negative_prompts, self.family)
        return Conditioning(self.encode_side(list(prompts)))

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """One forward: guidance, including 1 or less, is an input of the transformer."""
        return at_least_fp32(self._forward(latents_BL, timesteps_B, conditioning.positive, guidance))

    def pipeline_latents(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Packed, as the transformer takes them."""
        return latents_BL.flatten(2).transpose(1, 2)


FLUX2_DEV = Family(
    kind="image",
    pipeline_class=Flux2Pipeline,
    model_class=Flux2DevModel,
    sizes={
        "32b": FullSize(
            billions=32.22,
            transformer=Component(Flux2Transformer2DModel, {}),  # the class's defaults: the published model
            text_shapes={"encoder_hidden_states": (TEXT_LENGTH.default, 15360)},
            hub_id="black-forest-labs/FLUX.2-dev",
        ),
    },
    vae=FLUX2_KLEIN.vae,
    scheduler=SCHEDULER,
    uses_negative_prompts=False,
)
