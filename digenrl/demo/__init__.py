"""A model of 1.4 million parameters that writes four-digit numbers, and prompts for it: RL that fits a laptop.

`model/` is a diffusers StableDiffusion3Pipeline, trained by pretrain.py and stopped early on purpose: the OCR
reward reads somewhat under half of its numbers. `prompts/` holds numbers to train on, and others to judge by.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def model_folder() -> Path:
    """The pre-trained pipeline's directory."""
    return _HERE / "model"


def train_prompts() -> Path:
    """Prompts for RL, one per line."""
    return _HERE / "prompts" / "train.txt"


def held_out_prompts() -> Path:
    """Prompts that neither pre-training nor RL has seen, one per line."""
    return _HERE / "prompts" / "held_out.txt"
