"""Qwen-Image-Edit-2509 and later: Qwen-Image that edits one to three source images.

The text encoder reads the sources beside the prompt, and their latents follow the sample's in the token sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import BatchFeature, Qwen2VLImageProcessorPil

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.parts.helpers import source_name, vae_inputs
from digenrl.models.families.qwen_image import QWEN_IMAGE, QwenImageModel
from digenrl.models.family import Component, FullSize, SourceCount
from digenrl.models.pipeline_model import TextLength, paired_negatives

IMAGE_TOKEN = re.escape("<|image_pad|>")
TEXT_LENGTH = TextLength("tokenizer", default=1024, most=4096)  # of sources and prompt together


class ImagesInText:
    """Qwen2.5-VL's processor of texts with images, without its processor of videos, which needs torchvision."""

    def __init__(self, tokenizer: Any, image_processor: Qwen2VLImageProcessorPil) -> None:
        self.tokenizer, self.image_processor = tokenizer, image_processor

    @classmethod
    def beside(cls, tokenizer: Any) -> ImagesInText:
        """The processor of the pipeline that this tokenizer was loaded from."""
        folder = Path(tokenizer.name_or_path).parent / "processor"
        return cls(tokenizer, Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True))

    def __call__(
        self, text: Sequence[str], images: Sequence[Image.Image] | None, padding: bool, return_tensors: str
    ) -> BatchFeature:
        """Token ids, with as many image tokens as each image needs in place of one, and the images' patches."""
        patches = self.image_processor(images=images, return_tensors=return_tensors) if images else {}
        grids = patches["image_grid_thw"] if images else torch.zeros(0, 3)
        counts = iter((grids.prod(dim=1) // self.image_processor.merge_size**2).tolist())
        filled = [re.sub(IMAGE_TOKEN, lambda found: found[0] * next(counts), each) for each in text]
        return BatchFeature({**self.tokenizer(filled, padding=padding, return_tensors=return_tensors), **patches})


def mark_image_tokens(encoder: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Tells Qwen2.5-VL which tokens are of images, before its forward.

    Without this, transformers 5 gives them the positions of text, in one dimension instead of three; the diffusers
    pipeline was written for a transformers that needed only the token ids.
    """
    if named.get("image_grid_thw") is None or named.get("mm_token_type_ids") is not None:
        return None
    is_image_BT = named["input_ids"] == encoder.config.image_token_id
    return arguments, named | {"mm_token_type_ids": is_image_BT.int()}


class QwenImageEditModel(QwenImageModel):
    """L as in Qwen-Image. Sources are kept as latents (C, h, w), and packed in each forward."""

    family = "qwen_image_edit"
    text_length = TEXT_LENGTH
    unused_components = ("processor",)  # replaced by our own
    vision_tokens = 196  # of 384 x 384 pixels
    sources_are_tokens = True

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if pipeline.text_encoder is not None:
            pipeline.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)

    def own_components(self) -> dict[str, Any]:
        tokenizer, encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        return {} if tokenizer is None else {"processor": ImagesInText.beside(tokenizer), "text_encoder": encoder}

    def source_arguments(self, images: Sequence[Image.Image], size: SampleSize) -> dict[str, Any]:
        return {"image": list(images)}

    def pipeline_source_size(self, size: SampleSize) -> SampleSize:
        width, height = edit_plus.calculate_dimensions(edit_plus.VAE_IMAGE_SIZE, size.width / size.height)
        return SampleSize(height, width)

    @torch.no_grad()
    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        negatives = paired_negatives(prompts, negative_prompts)
        rows = [
            Conditioning(self._text(prompt, own), self._text(negative, own), self._latents(own))
            for prompt, own, negative in zip(prompts, images, negatives, strict=True)
        ]
        return Conditioning.joined(rows)

    def _text(self, prompt: str, images: Sequence[Image.Image]) -> dict[str, Tensor | None]:
        """The prompt after its sources, padded; raises ConfigError if it is too long."""
        seen = [self._for_text_encoder(image) for image in images]
        text_1TD, _ = self.whole_pipeline().encode_prompt([prompt], image=seen, device=self.text_device())
        length = text_1TD.shape[1]
        if length > self.text_tokens:
            raise ConfigError(
                f"model.text_tokens: {self.text_tokens}, but a prompt and its {len(images)} source images have "
                f"{length} tokens; raise it to at most {TEXT_LENGTH.most}"
            )
        mask_1T = torch.ones(1, length, dtype=torch.long, device=text_1TD.device)
        padding = self.text_tokens - length
        return {
            "encoder_hidden_states": functional.pad(text_1TD, (0, 0, 0, padding)),
            "encoder_hidden_states_mask": functional.pad(mask_1T, (0, padding)),
        }

    def _for_text_encoder(self, image: Image.Image) -> Image.Image:
        width, height = edit_plus.calculate_dimensions(edit_plus.CONDITION_IMAGE_SIZE, image.width / image.height)
        seen: Image.Image = self.pipeline.image_processor.resize(image, height, width)
        return seen

    def _latents(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        latents: dict[str, Tensor] = {}
        for index, image in enumerate(images):
            pixels_1CFHW = vae_inputs(self.pipeline.image_processor, image).unsqueeze(2)
            encoded = self.pipeline._encode_vae_image(pixels_1CFHW.to(self.vae.device, self.vae.dtype), None)
            latents[source_name(index)] = encoded.squeeze(2)
        return latents

    def image_shapes(self, sources: Sequence[SampleSize], size: SampleSize) -> Mapping[str, tuple[int, ...]]:
        return {source_name(index): self.noise_shape(source) for index, source in enumerate(sources)}


def _full(hub_id: str, **arguments: Any) -> FullSize:
    return FullSize(
        billions=20.43,
        transformer=Component(QwenImageTransformer2DModel, arguments),
        text_shapes={
            "encoder_hidden_states": (TEXT_LENGTH.default, 3584),
            "encoder_hidden_states_mask": (TEXT_LENGTH.default,),
        },
        hub_id=hub_id,
    )


QWEN_IMAGE_EDIT = replace(
    QWEN_IMAGE,
    pipeline_class=QwenImageEditPlusPipeline,
    model_class=QwenImageEditModel,
    sizes={
        "2509": _full("Qwen/Qwen-Image-Edit-2509"),
        "2511": _full("Qwen/Qwen-Image-Edit-2511", zero_cond_t=True),  # sources are at timestep 0
    },
    sources=SourceCount(1, 3),
)
