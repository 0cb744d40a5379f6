"""Stable Diffusion 1.5 and the models fine-tuned from it: CLIP text, a UNet, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from digenrl.models.contract import Conditioning
from digenrl.models.families.parts.image_vae import VAE_SHAPE
from digenrl.models.families.parts.unets import UNetModel
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.pipeline_model import paired_negatives

TEXT_TOKENS = 77  # of CLIP


class SD15Model(UNetModel):
    """The text has a fixed length and no mask. The safety checker is not loaded."""

    family = "sd15"
    default_guidance = 7.5
    text_encoders = ("text_encoder",)
    unused_components = ("safety_checker", "feature_extractor", "image_encoder")

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        positive, negative = self.pipeline.encode_prompt(
            list(prompts),
            self.text_device(),
            num_images_per_prompt=1,
            do_classifier_free_guidance=True,
            negative_prompt=paired_negatives(prompts, negative_prompts),
        )
        return Conditioning({"encoder_hidden_states": positive}, {"encoder_hidden_states": negative})


# Loaded pipelines usually name another scheduler, of which only the noise levels are used.
SCHEDULER = Component(
    DDIMScheduler,
    {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
    },
)

SD15 = Family(
    kind="image",
    pipeline_class=StableDiffusionPipeline,
    model_class=SD15Model,
    sizes={
        "1.5": FullSize(
            billions=0.86,
            transformer=Component(UNet2DConditionModel, {"sample_size": 64, "cross_attention_dim": 768}),
            text_shapes={"encoder_hidden_states": (TEXT_TOKENS, 768)},
            hub_id="stable-diffusion-v1-5/stable-diffusion-v1-5",
        ),
    },
    vae=Component(AutoencoderKL, {**VAE_SHAPE, "sample_size": 512, "scaling_factor": 0.18215}),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
)
