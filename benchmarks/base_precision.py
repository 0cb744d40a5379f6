"""Does a model learn as well with a quantized base? Adapters on each base, several seeds each.

    python benchmarks/base_precision.py runs/base                # 4 bases, 3 seeds: over an hour on two cores
    python benchmarks/base_precision.py runs/base --json         # the curves
    python benchmarks/base_precision.py runs/base --bases nf4 unquantized --seeds 0 --steps 10
    python benchmarks/base_precision.py runs/dark --darkness --at-once 3 --dtype bfloat16   # on a GPU, without OCR
    python benchmarks/base_precision.py runs/fp8 --darkness --bases unquantized weighted per_element
    python benchmarks/base_precision.py runs/large --darkness --dtype bfloat16 --layers 38 batch.prompts=4

Runs that the folder already contains are not repeated. On a CPU, fp8 products are computed in fp32 with the same
values. Accuracy is the share of 200 held-out numbers that the OCR model reads exactly; the reward of training is
the mean of the last tenth of the steps. With `--darkness` dark images are rewarded, and nothing is held out.
`--layers` trains a larger transformer with random weights instead of the demo's. KEY=VALUE overrides the recipe.

With the "bases" `weighted` and `per_element`, generators sample with an fp8 base and the trainer has an
unquantized one. Terms are weighted with the importance weight of a whole denoising step, or with that of one
element, which is close to 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

METRIC = "reward/ocr/exact"
BASES = ("unquantized", "fp8", "int8", "nf4")
FP8_ROLLOUTS = {"weighted": "step", "per_element": "element"}  # by what the importance weight is of


@dataclass(frozen=True)
class Curve:
    """One run: rewards by training step, and held-out accuracy by the steps at which it was evaluated."""

    base: str
    seed: int
    rewards: tuple[float, ...]
    accuracy: tuple[tuple[int, float], ...]
    largest_mismatch: float
    seconds: float

    @property
    def last_reward(self) -> float:
        return fmean(self.rewards[-max(1, len(self.rewards) // 10) :])


def darkness(pixels_BFCHW: Any, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """The reward of `--darkness`: 1 for black, 0 for white."""
    return [1 - float(pixels.mean()) for pixels in pixels_BFCHW.float()]


def overrides(base: str, seed: int, options: argparse.Namespace) -> list[str]:
    training = f"learning_rate: {options.learning_rate}, lora: {{rank: 32, alpha: 64}}"
    if options.dtype != "float32" or base in FP8_ROLLOUTS:
        training += ", old_log_probs: recomputed"  # it rounds differently in packs of other shapes
    given = [f"seed={seed}", f"steps={options.steps}", f"training={{{training}}}"]
    given += [f"model.dtype={options.dtype}", "model.compile=false"]
    if options.darkness:
        given += [f"rewards={Path(__file__).stem}:{darkness.__name__}", "evaluation=null"]
    if base in FP8_ROLLOUTS:  # with a lane for each precision
        weights = ("stale=decoupled", "weighted=all", f"stale_weight_of={FP8_ROLLOUTS[base]}")
        given += [f"algorithm.options.{each}" for each in weights]
        return [
            *given,
            "sample.precision=fp8",
            "techniques.tag=none",
            f"lanes.generators={options.generators}",
            "lanes.rewards=0",
            *options.overrides,
        ]
    return [*given, f"model.base={base}", *["mode=colocated"] * options.darkness, *options.overrides]


def save_larger_model(folder: Path, layers: int, dtype: str) -> None:
    """The demo's pipeline with a transformer that is as wide as SD3.5 large's, of random weights."""
    import torch
    from diffusers import SD3Transformer2DModel

    from digenrl.demo import model_folder

    shutil.copytree(model_folder(), folder)
    config = SD3Transformer2DModel.load_config(folder, subfolder="transformer")
    config |= {"num_layers": layers, "num_attention_heads": 38, "attention_head_dim": 64}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformer = SD3Transformer2DModel.from_config({**config, "caption_projection_dim": 38 * 64})
    shutil.rmtree(folder / "transformer")
    transformer.to(getattr(torch, dtype)).save_pretrained(folder / "transformer")


def run(base: str, seed: int, folder: Path, options: argparse.Namespace) -> None:
    command = [sys.executable, "-c", "from digenrl.cli import main; main()", "train", "demo"]
    given = overrides(base, seed, options)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run(
        [*command, *given, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def finished(folder: Path) -> bool:
    info = folder / "run.json"
    return info.is_file() and json.loads(info.read_text())["status"] == "finished"


def read(base: str, seed: int, folder: Path) -> Curve:
    file = folder / "evaluations.jsonl"
    evaluations = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Curve(
        base,
        seed,
        rewards=tuple(step["reward_mean"] for step in steps),
        accuracy=tuple((each["step"], each[METRIC]) for each in evaluations),
        largest_mismatch=max(step["log_prob_mismatch"] for step in steps),
        seconds=steps[-1]["at_s"],
    )


def table(curves: list[Curve]) -> Table:
    """One row per base: mean and spread over seeds."""
    result = Table(title="Adapters on a frozen base")
    for heading in ("base", "seeds", "reward at first", "reward at last"):
        result.add_column(heading)
    evaluated = all(curve.accuracy for curve in curves)
    for heading in ("accuracy before", "accuracy after") if evaluated else ():
        result.add_column(heading)
    result.add_column("largest log-prob mismatch")
    result.add_column("s per run")
    for base in dict.fromkeys(curve.base for curve in curves):
        own = [curve for curve in curves if curve.base == base]
        result.add_row(
            base,
            str(len(own)),
            spread([curve.rewards[0] for curve in own]),
            spread([curve.last_reward for curve in own]),
            *(spread([curve.accuracy[place][1] for curve in own]) for place in ((0, -1) if evaluated else ())),
            f"{max(curve.largest_mismatch for curve in own):.1e}",
            f"{fmean(curve.seconds for curve in own):.0f}",
        )
    return result


def spread(values: list[float]) -> str:
    """The mean, and the standard deviation over seeds."""
    return f"{fmean(values):.3f}" + (f" +- {stdev(values):.3f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs are")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for all runs")
    parser.add_argument(
        "--layers", type=int, help="of a transformer with random weights, as wide as SD3.5 large's"
    )
    parser.add_argument("--bases", nargs="+", choices=(*BASES, *FP8_ROLLOUTS), default=BASES)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--darkness", action="store_true", help="reward dark images instead of legible numbers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--generators", default="1", help="of fp8 rollouts; [cuda:0] shares a GPU with the trainer"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--json", action="store_true", help="print the curves as JSON")
    options = parser.parse_intermixed_args()
    stderr = Console(stderr=True)
    if options.layers is not None:
        model = options.folder / f"layers_{options.layers}"
        if not model.exists():
            save_larger_model(model, options.layers, options.dtype)
        options.overrides.append(f"model.source={model}")
    wanted = {(base, seed): options.folder / f"{base}_{seed}" for seed in options.seeds for base in options.bases}
    missing = {key: folder for key, folder in wanted.items() if not finished(folder)}
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = pool.map(lambda key: run(key[0], key[1], missing[key], options), missing)
        for _ in track(runs, "training", len(missing), console=stderr, disable=not stderr.is_terminal):
            pass
    curves = [read(base, seed, wanted[base, seed]) for base in options.bases for seed in options.seeds]
    if options.json:
        print(json.dumps([asdict(curve) for curve in curves]))
        return
    Console(width=None if sys.stdout.isatty() else 160).print(table(curves))


if __name__ == "__main__":
    main()
