"""Types of settings. Upper bounds are far above any real run: a typing error must not fill the memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_STEPS = 10_000_000  # of the optimizer
LONGEST_RUN_NS = 2**63 - 1

Pixels = Annotated[int, Field(gt=0, le=16_384)]
Frames = Annotated[int, Field(gt=0, le=4_096)]
DenoisingSteps = Annotated[int, Field(ge=1, le=1_000)]
OptimizerSteps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
PromptsPerStep = Annotated[int, Field(ge=1, le=65_536)]
GroupSize = Annotated[int, Field(ge=1, le=16_384)]
Lanes = Annotated[int, Field(gt=0, le=16_384)]
LanesOrNone = Annotated[int, Field(ge=0, le=16_384)]
EvaluationChunks = Annotated[int, Field(ge=1, le=65_536)]
Rank = Annotated[int, Field(ge=1, le=16_384)]
Rows = Annotated[int, Field(gt=0, le=1_000_000)]
Text = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(ge=-1e9, le=1e9)]

SAMPLES_PER_STEP = 1_048_576
DRAWN_PROMPTS = 100_000  # of a prompt set
PROMPT_CHARACTERS = 20_000
NESTED_KEYS = 64
SIMULATED_SEARCH_BUDGET = 200_000  # nodes; a simulation need not decide as quickly as a live run
LONGEST_S = 10_000_000  # seconds of one job: about four months
VALUES_IN_A_FILE = 1_000_000


def check_samples(prompts: int, samples_per_prompt: int) -> None:
    """Raises ValueError if a step has more samples than a scheduler can handle."""
    if prompts * samples_per_prompt > SAMPLES_PER_STEP:
        raise ValueError(
            f"{prompts} prompts of {samples_per_prompt} samples are more than {SAMPLES_PER_STEP} samples in a step"
        )
