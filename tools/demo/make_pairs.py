"""Makes pairs for DPO from samples of the demo model: of one prompt, the most and the least legible one.

    PYTHONPATH=tools/demo python tools/demo/make_pairs.py --out digenrl/demo/prompts/pairs.jsonl

Prompts whose samples are all equally legible are left out.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import torch
from readability import SIZE, number_reader, sample_images
from torch import Tensor

from digenrl import demo
from digenrl.models.registry import find_family
from digenrl.rewards.contract import as_pil, as_uint8

SAMPLES_PER_PROMPT = 8
SEED = 1
QUALITY = 80  # of WebP


def pairs(prompts: list[str], seed: int) -> Iterator[dict[str, str]]:
    """One record per prompt whose samples differ in legibility."""
    model = find_family("sd3").load(demo.model_folder(), torch.float32, "cpu")
    reader = number_reader()
    for index, prompt in enumerate(prompts):
        rows = [prompt] * SAMPLES_PER_PROMPT
        pixels_BFCHW = sample_images(model, rows, seed, first=index * SAMPLES_PER_PROMPT)
        scores = reader.score(pixels_BFCHW, rows, [{}] * len(rows)).values
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        if scores[best] > scores[worst]:
            yield {
                "prompt": prompt,
                "chosen": as_data_url(pixels_BFCHW[best, 0]),
                "rejected": as_data_url(pixels_BFCHW[worst, 0]),
            }


def as_data_url(pixels_CHW: Tensor) -> str:
    """A small file: these images have few colors."""
    (image,), file = as_pil([as_uint8(pixels_CHW)]), BytesIO()
    assert image.size == (SIZE.width, SIZE.height)
    image.save(file, format="WEBP", quality=QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def main() -> None:
    """Writes a file of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="prompts, the first ones of demo/train.txt")
    given = parser.parse_args()
    prompts = demo.train_prompts().read_text(encoding="utf-8").splitlines()[: given.count]
    lines = [json.dumps(pair) for pair in pairs(prompts, SEED)]
    given.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{given.out}: {len(lines)} pairs of {len(prompts)} prompts")


if __name__ == "__main__":
    main()
