"""One RL run, put together by hand from DigenRL's rooms: prompt, generate, reward, advantage, train.

    python examples/rl_by_hand.py            # a tiny SD3 pipeline with random weights, on the CPU, half a minute

The model is made on the spot, the reward is a function of our own (bright pictures are good), the algorithm is
Flow-GRPO. Nothing runs in parallel here: this is the story that the scheduler will tell on many cards.
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

from digenrl.algorithms.contract import Algorithm
from digenrl.algorithms.registry import build_algorithm
from digenrl.config.rewards import parse_rewards
from digenrl.config.training import TrainerSettings
from digenrl.generation.noise import normal_noise
from digenrl.generation.rollout import decode_slice, generate_slice
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import DiffusionModel
from digenrl.models.pairs import ScoredGroup
from digenrl.models.registry import find_family, make_tiny_pipeline
from digenrl.models.trajectory import StepNoise
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import Slice
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import Reward
from digenrl.training.open_batch import BatchShape
from digenrl.training.trainer import Trainer

FAMILY = find_family("sd3")
RUN_SEED, DENOISING_STEPS = 7, 4
SHAPE = BatchShape(groups=3, group_size=8)
TEXTS = ["a red door", "a lake at dawn", "three green apples", "snow on a roof"]
PROMPTS = [Prompt(index, text, {}) for index, text in enumerate(TEXTS)]


def brightness(pixels_BFCHW: Tensor, prompts: list[str], metadata: list[dict[str, object]]) -> list[float]:
    """A reward of one's own: pixels of a batch in, one number per sample out."""
    return [float(value) for value in pixels_BFCHW.mean(dim=(1, 2, 3, 4))]


def make_group(
    model: DiffusionModel, algorithm: Algorithm, reward: Reward, prompt: Prompt, step: int, group: int
) -> ScoredGroup:
    """All samples of one prompt: denoised with noise, decoded, scored."""
    samples = Slice(step, group, first=0, size=SHAPE.group_size)
    conditioning = model.encode([prompt.text])
    plans = plan_rollouts(
        algorithm.settings.window,
        samples.samples(),
        schedule=model.schedule(DENOISING_STEPS, FAMILY.tiny_size),
        size=FAMILY.tiny_size,
        noise=StepNoise("flow", level=0.7),
        guidance=1.0,
        run_seed=RUN_SEED,
    )
    made = generate_slice(
        model, conditioning, plans, samples, run_seed=RUN_SEED, version=step, needs=algorithm.needs
    )
    pixels_BFCHW = decode_slice(model, made)
    scores = reward.score(pixels_BFCHW, [prompt.text] * samples.size, [prompt.metadata] * samples.size)
    return ScoredGroup(conditioning, made.trajectories, tuple(scores.values))


def run(steps: int) -> list[float]:
    """Trains for so many optimizer steps; returns the mean reward of each step's samples."""
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
            trainer.add_group(make_group(model, algorithm, reward, prompt, step, group))
        metrics = trainer.commit()
        rewards.append(metrics.reward_mean)
        cells = (f"{metrics.reward_mean:.4f}", f"{metrics.gradient_norm:.3g}", f"{metrics.ratio_max:.6f}")
        table.add_row(str(step), *cells)
    Console().print(table)
    return rewards


def main() -> None:
    """Runs, and says what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    rewards = run(parser.parse_args().steps)
    few = max(1, len(rewards) // 5)
    first, last = statistics.mean(rewards[:few]), statistics.mean(rewards[-few:])
    print(f"mean reward of the first {few} steps: {first:.4f}, of the last {few}: {last:.4f}")


if __name__ == "__main__":
    main()
