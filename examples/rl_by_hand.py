"""An RL run assembled by hand from DigenRL's packages: prompt, generate, score, train.

    python examples/rl_by_hand.py            # a tiny SD3 pipeline with random weights, on the CPU, half a minute

The model is created on the spot, the reward is a custom function (bright images are good), and the algorithm is
Flow-GRPO. Everything runs in one process, one stage after the other. `digenrl train` runs the same stages on many
GPUs, where the scheduler overlaps them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.config.rewards.table import parse_rewards
from digenrl.generation.noise import normal_noise
from digenrl.generation.rollout import RolloutSettings, decode_slice, generate_slice
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import DiffusionModel
from digenrl.models.objective import Objective
from digenrl.models.registry import find_family
from digenrl.models.trajectory import ScoredGroup, StepNoise
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import Slice
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import Reward
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.training.open_batch import BatchShape
from digenrl.training.trainer import Trainer

FAMILY = find_family("sd3")
SIZE = tiny_size("sd3")
RUN_SEED, DENOISING_STEPS = 7, 4
SHAPE = BatchShape(groups=3, group_size=8)
TEXTS = ["a red door", "a lake at dawn", "three green apples", "snow on a roof"]
PROMPTS = [Prompt(index, text, {}) for index, text in enumerate(TEXTS)]


def brightness(pixels_BFCHW: Tensor, prompts: list[str], metadata: list[dict[str, object]]) -> list[float]:
    """A custom reward: takes the pixels of a batch and returns one number per sample."""
    return [float(value) for value in pixels_BFCHW.mean(dim=(1, 2, 3, 4))]


def score_group(
    model: DiffusionModel, algorithm: Objective, reward: Reward, prompt: Prompt, step: int, group: int
) -> ScoredGroup:
    """Generates and scores all samples of one prompt."""
    samples = Slice(step, group, first=0, size=SHAPE.group_size)
    conditioning = model.encode([prompt.text])
    plans = plan_rollouts(
        algorithm.settings.window,
        samples.samples(),
        schedule=model.schedule(DENOISING_STEPS, SIZE),
        size=SIZE,
        noise=StepNoise("flow", level=0.7),
        guidance=1.0,
        run_seed=RUN_SEED,
    )
    settings = RolloutSettings(RUN_SEED, algorithm.needs)
    generated = generate_slice(model, conditioning, plans, samples, settings, version=step)
    pixels_BFCHW = decode_slice(model, generated)
    scores = reward.score(pixels_BFCHW, [prompt.text] * samples.size, [prompt.metadata] * samples.size)
    return ScoredGroup(conditioning, generated.trajectories, tuple(scores.values))


def run(steps: int) -> list[float]:
    """Trains for `steps` optimizer steps; returns the mean reward of each step's samples."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_pipeline(FAMILY.name, Path(folder) / "tiny")
        model = FAMILY.load(Path(folder) / "tiny")
    algorithm = build_algorithm("flow_grpo", {"clip": 1e-2, "kl_weight": 0, "updates_per_batch": 1})
    reward = build_rewards(parse_rewards(f"{__name__}:brightness"))
    sampler = PromptSampler(PROMPTS, prompts_per_step=SHAPE.groups, seed=RUN_SEED)
    settings = TrainerSettings(learning_rate=3e-3, pack_size=8)
    trainer = Trainer(model, algorithm, settings, SHAPE, draw_noise=partial(normal_noise, RUN_SEED))

    table = Table(title="Flow-GRPO on a tiny SD3", title_justify="left", box=None)
    for heading in ("step", "reward", "gradient norm", "largest ratio"):
        table.add_column(heading, justify="right")
    rewards = []
    for step in range(steps):
        for group in range(SHAPE.groups):
            prompt = sampler.prompt_for(step, group)
            trainer.add_group(score_group(model, algorithm, reward, prompt, step, group))
        metrics = trainer.commit()
        rewards.append(metrics.reward_mean)
        cells = (f"{metrics.reward_mean:.4f}", f"{metrics.gradient_norm:.3g}", f"{metrics.ratio_max:.6f}")
        table.add_row(str(step), *cells)
    Console().print(table)
    return rewards


def main() -> None:
    """Trains, and prints the mean reward at the beginning and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    rewards = run(parser.parse_args().steps)
    few = max(1, len(rewards) // 5)
    first, last = statistics.mean(rewards[:few]), statistics.mean(rewards[-few:])
    print(f"mean reward of the first {few} steps: {first:.4f}, of the last {few}: {last:.4f}")


if __name__ == "__main__":
    main()
