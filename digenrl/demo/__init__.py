"""Models with about a million parameters, and prompts for them: RL on a laptop.

`model/` is a diffusers StableDiffusion3Pipeline that writes four-digit numbers, trained by tools/demo/pretrain.py
and stopped early on purpose: the OCR reward reads slightly less than half of its numbers. `edit_model/` is a
FluxKontextPipeline that paints shapes in other colors, by tools/demo/pretrain_edits.py. `prompts/` has numbers and
edits for training and evaluation.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def model_folder(name: str = "model") -> Path:
    """The directory of a pre-trained pipeline."""
    return _HERE / name


def train_prompts() -> Path:
    """Prompts for RL, one per line."""
    return _HERE / "prompts" / "train.txt"


def held_out_prompts() -> Path:
    """Prompts used by neither pre-training nor RL, one per line."""
    return _HERE / "prompts" / "held_out.txt"
