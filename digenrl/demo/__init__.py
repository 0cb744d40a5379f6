"""A model with 1.4 million parameters that writes four-digit numbers, and prompts for it: RL on a laptop.

`model/` is a diffusers StableDiffusion3Pipeline, trained by tools/demo/pretrain.py and stopped early on purpose:
the OCR reward reads slightly less than half of its numbers. `prompts/` has numbers for training and evaluation.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def model_folder() -> Path:
    """The directory of the pre-trained pipeline."""
    return _HERE / "model"


def train_prompts() -> Path:
    """Prompts for RL, one per line."""
    return _HERE / "prompts" / "train.txt"


def held_out_prompts() -> Path:
    """Prompts used by neither pre-training nor RL, one per line."""
    return _HERE / "prompts" / "held_out.txt"
