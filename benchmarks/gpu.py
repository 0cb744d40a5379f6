"""How close one GPU comes to its limit, compared with a baseline and with the predictions from its profile.

    python benchmarks/gpu.py                          # all five families at full size, random weights, on a GPU
    python benchmarks/gpu.py qwen_image --whole-step  # one family, and a whole step of the baseline
    python benchmarks/gpu.py --tiny                   # the same code paths with tiny models, on a CPU

Measured for each family, in one process:
- forward passes of a rollout and replayed pairs, compiled and packed, as shares of the GPU's measured rate of bf16
  matrix products;
- the baseline: eager, one time-step at a time, all blocks checkpointed;
- a profile as `digenrl profile` writes it, the step time that it predicts, and a run of the same recipe.
Memory is first predicted from one pair, and then planned from trial packs.

The work is 2 x parameters x tokens for a forward pass, and 4 x for a replay with adapters. In families with two
streams, each token passes through only part of the weights, so a share can exceed 1. "as counted" uses the
operations that torch counts in a forward pass, including attention and adapters.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from measured_runs import StepLog
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from digenrl.commands.device_facts import matrix_tflops
from digenrl.commands.profile import profile_recipe
from digenrl.config.profiles import Profile, write_profile
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import read_recipe
from digenrl.models.compiled import compile_blocks, is_compiled
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.quantized.layers import weight_count
from digenrl.models.registry import FAMILIES
from digenrl.models.trajectory import ScoredGroup, Trajectory
from digenrl.models.transfers import synchronize
from digenrl.records import Slice
from digenrl.rewards.building import build_rewards
from digenrl.run_folder.folder import RunFolder
from digenrl.runs.training import check_recipe, train
from digenrl.simulation.single_device import predict_single_device
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, make_trainer, read_blueprint
from digenrl.worker.rollouts import roll_out

BASES = ("unquantized", "fp8", "int8", "nf4")
PROMPTS = [f'A wooden sign over the door of shop {number} that says "2718"' for number in range(8)]
STEPS_OF_RUN = 3  # the first warms up
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """The settings for a family: groups of `group` samples, generated in slices of the sizes in `slices`."""

    height: int
    width: int
    frames: int = 1
    group: int = 16
    slices: tuple[int, ...] = (1, 8)
    denoising_steps: int = 10
    trained_steps: int = 6
    source: str = "random"


CASES = {
    "flux": Case(512, 512),
    "qwen_image": Case(512, 512),
    "sd3": Case(512, 512),
    "wan": Case(480, 832, 33, group=2, slices=(1,), denoising_steps=4, trained_steps=1, source="random:2.1-14b"),
    "hunyuan_video": Case(480, 640, 33, group=2, slices=(1,), denoising_steps=4, trained_steps=1),
}


@dataclass
class Measured:
    """The measurements of one family. Seconds are per forward pass, pair or step."""

    family: str
    parameters: int = 0
    tokens: int = 0
    forward_flop: float = 0.0  # of one sample, as counted by torch: matrix products and attention
    matrix_tflops: float = 0.0
    forward_s: dict[int, float] = field(default_factory=dict)
    baseline_forward_s: float = 0.0
    pair_s: float = 0.0
    baseline_pair_s: float = 0.0
    pack_size: int = 0
    checkpointed_blocks: int = 0
    peak_gib: float = 0.0
    planned_gib: float = 0.0
    predicted_gib: float = 0.0
    profile_s: float = 0.0
    predicted_s: float | None = None
    step_s: float | None = None
    baseline_step_s: float | None = None
    samples_per_second: float | None = None
    largest_log_ratio: float | None = None
    log_prob_mismatch: float | None = None
    predicted_parts: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def forward_share(self, rows: int) -> float:
        """The share of the GPU's matrix rate that a forward pass reaches."""
        return self._share(2 * rows / self.forward_s[rows])

    def counted_share(self, rows: int) -> float:
        """The same share, by the operations that torch counts."""
        return rows * self.forward_flop / self.forward_s[rows] / (self.matrix_tflops * 1e12)

    @property
    def pair_share(self) -> float:
        return self._share(4 / self.pair_s)

    def _share(self, passes_per_second: float) -> float:
        return passes_per_second * self.parameters * self.tokens / (self.matrix_tflops * 1e12)


def recipe_of(family: str, case: Case, source: str, prompts: Path, tiny: bool) -> Recipe:
    """DanceGRPO with adapters on one device, without a second guidance branch, and with a cheap reward."""
    guidance = ["model.guidance=1"] if FAMILIES[family].uses_negative_prompts else []
    overrides = [
        "mode=colocated",
        f"steps={STEPS_OF_RUN}",
        f"model.source={source}",
        f"model.dtype={'float32' if tiny else 'bfloat16'}",
        f"model.vae_dtype={'float32' if tiny else 'bfloat16'}",
        "model.text_tokens=null",
        *guidance,
        f"prompts.path={prompts}",
        "rewards=jpeg_compressibility",
        f"sample.height={case.height}",
        f"sample.width={case.width}",
        f"sample.frames={case.frames}",
        f"sample.denoising_steps={case.denoising_steps}",
        f"sample.window={json.dumps(window(case.trained_steps, case.denoising_steps))}",
        "batch.prompts=1",
        f"batch.samples_per_prompt={case.group}",
        f"batch.slice={max(case.slices)}",
        "algorithm={name: dance_grpo}",
        "training.lora={rank: 32, alpha: 64, init: uniform, targets: null}",
        "training.learning_rate=1e-4",
        "training.autocast='off'",
        "training.gradient_checkpointing=auto",
        "training.old_log_probs=recomputed",
        "logging.tensorboard=false",
        "checkpoint.every=1000",
    ]
    return read_recipe(f"{family}_dance_grpo", overrides)


def window(trained_steps: int, denoising_steps: int) -> dict[str, Any]:
    """A random subset of `trained_steps` steps. The last denoising step is never stochastic."""
    return {"kind": "random_subset", "fraction": (trained_steps + 0.05) / (denoising_steps - 1)}


@contextmanager
def baseline_mode(model: DiffusionModel) -> Iterator[None]:
    """Inside, compiled blocks run eagerly, and CUDA graphs are not used."""
    model.release_rollout_memory()
    with torch.compiler.set_stance("force_eager"):
        yield


def seconds_of(work: Callable[[], object], device: torch.device, warm_ups: int, times: int) -> float:
    for _ in range(warm_ups):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


def measure_forwards(model: DiffusionModel, blueprint: Blueprint, row: Conditioning, result: Measured) -> None:
    """Times a denoising step for every slice size, and for the largest also in the baseline."""
    case = CASES[result.family]
    schedule = blueprint.schedule(model)
    repeats = 2 if blueprint.size.frames > 1 else 10

    def forward(rows: int, velocity: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        noise = torch.randn(rows, *model.noise_shape(blueprint.size), device=model.device)
        latents = model.initial_latents(noise, blueprint.size)
        timesteps = schedule.timesteps[:1].repeat(rows).to(model.device)
        texts = row.repeated(rows)
        return lambda: velocity(latents, timesteps, texts, blueprint.guidance, blueprint.size)

    with torch.no_grad():
        for rows in case.slices:
            work = forward(rows, model.rollout_velocity)
            assert torch.isfinite(work()).all(), "the random weights overflow"
            result.forward_s[rows] = seconds_of(work, model.device, warm_ups=3, times=repeats)
        with baseline_mode(model):
            with FlopCounterMode(display=False) as counter:
                forward(1, model.velocity)()
            result.forward_flop = counter.get_total_flops()
            work = forward(max(case.slices), model.velocity)
            result.baseline_forward_s = seconds_of(work, model.device, warm_ups=1, times=max(1, repeats // 4))


def measure_baseline_pair(model: DiffusionModel, recipe: Recipe, row: Conditioning) -> float:
    """Seconds of one pair, trained alone: two samples with one trained step each."""
    few = recipe.sample.model_copy(update={"denoising_steps": 3, "window": window(1, 3)})
    blueprint = read_blueprint(sequential(recipe.model_copy(update={"sample": few})))
    with baseline_mode(model):
        generated, _ = roll_out(blueprint, model, row, Slice(0, 0, 0, 2), 0)
        group = ScoredGroup(row, generated.trajectories, (0.0, 1.0))
        trainer = make_trainer(blueprint, model, helps=False)
        return seconds_of(lambda: trainer.calibrate(group), model.device, warm_ups=1, times=1) / 2


def sequential(recipe: Recipe) -> Recipe:
    """The recipe with one pair at a time and all blocks checkpointed."""
    training = recipe.training.model_copy(update={"pack_size": 1, "gradient_checkpointing": True})
    return recipe.model_copy(update={"training": training})


def baseline_step(model: DiffusionModel, recipe: Recipe, row: Conditioning) -> float:
    """Seconds of a whole step of the baseline: generate, score, train and commit in sequence."""
    blueprint = read_blueprint(sequential(recipe))
    scorer, group_size = build_rewards(recipe.rewards), recipe.batch.samples_per_prompt
    size = recipe.batch.slice
    assert isinstance(size, int)
    with baseline_mode(model):
        trainer = make_trainer(blueprint, model, helps=False)
        synchronize(model.device)
        began = time.perf_counter()
        trajectories: list[Trajectory] = []
        rewards: list[float] = []
        for first in range(0, group_size, size):
            generated, pixels_BFCHW = roll_out(blueprint, model, row, Slice(0, 0, first, size), 0)
            scored = scorer.score(pixels_BFCHW, [PROMPTS[0]] * size, [{}] * size)
            trajectories += generated.trajectories
            rewards += scored.values
        trainer.add_group(ScoredGroup(row, tuple(trajectories), tuple(rewards)), place=0)
        trainer.commit()
        synchronize(model.device)
        return time.perf_counter() - began


def measure_model(result: Measured, recipe: Recipe, device: str, whole_step: bool) -> None:
    """The measurements that load the model into this process."""
    blueprint = read_blueprint(recipe)
    row = load_text_encoders(blueprint, device).encode(PROMPTS[:1])
    model = load_model(blueprint, device)
    if not is_compiled(model):
        compile_blocks(model, backend="aot_eager")  # the real compiler takes minutes on a CPU
    row = model.compact(row).to(model.device)
    adapters = sum(p.numel() for name, p in model.transformer.named_parameters() if "lora_" in name)
    result.parameters = weight_count(model.transformer) - adapters
    result.tokens = tokens_of(blueprint, row)
    result.matrix_tflops = matrix_tflops(model.device)
    measure_forwards(model, blueprint, row, result)
    result.baseline_pair_s = measure_baseline_pair(model, recipe, row)
    if whole_step:
        result.baseline_step_s = baseline_step(model, recipe, row)


def tokens_of(blueprint: Blueprint, row: Conditioning) -> int:
    """The length of the sequence in the blocks: patches of 16 x 16 pixels and, except in Wan, the text."""
    size = blueprint.size
    patches = max(1, size.height // 16) * max(1, size.width // 16) * (1 + (size.frames - 1) // 4)
    text = row.positive["encoder_hidden_states"]
    assert text is not None
    return patches + (0 if blueprint.family.name == "wan" else text.shape[1])


def measure_profile(result: Measured, recipe: Recipe, notify: Callable[[str], None]) -> Profile:
    """Runs `digenrl profile`, and predicts a step from the result."""
    began = time.perf_counter()
    profile = profile_recipe(recipe, CASES[result.family].slices, lambda _done, _all, what: notify(what))
    result.profile_s = time.perf_counter() - began
    training = profile.training
    if training is None:
        raise SystemExit(f"{result.family}: training could not be measured: {profile.remarks}")
    result.pair_s = training.seconds_per_sample / profile.work.trained_steps
    result.pack_size, result.checkpointed_blocks = training.pack_size, training.checkpointed_blocks
    result.peak_gib, result.planned_gib = training.peak_bytes / GIB, training.planned_bytes / GIB
    result.predicted_gib = training.foreseen_bytes / GIB
    predicted = predict_single_device(profile, result.family)
    result.predicted_s, result.predicted_parts = predicted.step_seconds, predicted.parts
    return profile


def measure_run(result: Measured, recipe: Recipe, folder: Path) -> None:
    """Runs the recipe with the profile's packing, which is not searched for again. Excludes the first step."""
    packing = {"pack_size": result.pack_size, "gradient_checkpointing": result.checkpointed_blocks}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=packing)})
    backend, log = check_recipe(recipe), StepLog()
    with closing(backend):
        train(RunFolder.create(folder, recipe, datetime.now(UTC)), backend, log)
    steady = log.steps[1:]
    result.step_s = sum(step["step_s"] for step in steady) / len(steady)
    result.samples_per_second = recipe.batch.samples_per_prompt / result.step_s
    result.largest_log_ratio = max(abs(math.log(step["ratio_max"])) for step in steady)
    result.log_prob_mismatch = max(step["log_prob_mismatch"] for step in steady)
    result.parts = parts_of(folder / "spans.jsonl", len(steady))


def parts_of(spans: Path, steps: int) -> dict[str, float]:
    """Seconds per step by kind of work, without the first step."""
    parts: dict[str, float] = {}
    for line in spans.read_text().splitlines():
        span = json.loads(line)
        if span["step"] > 0:
            seconds = (span["end_ns"] - span["start_ns"]) / 1e9 / steps
            parts[span["work"]] = parts.get(span["work"], 0.0) + seconds
    return parts


def measure(family: str, options: argparse.Namespace, folder: Path, notify: Callable[[str], None]) -> Measured:
    case = CASES[family]
    source = case.source
    if options.tiny:
        case = CASES[family] = tiny_case(family)
        source = str(folder / "model")
        make_tiny_pipeline(family, Path(source))
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    recipe = recipe_of(family, case, source, prompts, options.tiny)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": options.base})})
    result = Measured(family)
    notify("model")
    measure_model(result, recipe, "cpu" if options.tiny else "cuda", options.whole_step)
    free()
    profile = measure_profile(result, recipe, notify)
    if options.profiles is not None:
        options.profiles.mkdir(parents=True, exist_ok=True)
        written = write_profile(profile, by=f"benchmarks/gpu.py {family} --profiles FOLDER")
        (options.profiles / f"{options.device_name}_{family}.yaml").write_text(written)
    free()
    if not options.no_runs:
        notify("run")
        measure_run(result, recipe, folder / "run")
        free()
    return result


def tiny_case(family: str) -> Case:
    size = tiny_size(family)
    return Case(size.height, size.width, size.frames, group=2, slices=(1, 2), denoising_steps=4, trained_steps=2)


def free() -> None:
    """Frees GPU memory. Trainers are part of reference cycles, which only the garbage collector removes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shares_table(results: Sequence[Measured]) -> Table:
    table = Table(title="shares of the GPU's matrix rate, and the baseline")
    headings = ("family", "TFLOPS", "forward b=1", "larger b", "as counted", "over baseline")
    for heading in (*headings, "pair", "pack", "checkpointed", "over baseline"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for each in results:
        rows = max(each.forward_s)
        table.add_row(
            each.family,
            f"{each.matrix_tflops:.0f}" if each.matrix_tflops > 10 else f"{each.matrix_tflops:.3f}",
            f"{each.forward_share(1):.2f} ({each.forward_s[1] * 1e3:.1f} ms)",
            f"{each.forward_share(rows):.2f} (b={rows}, {each.forward_s[rows] * 1e3:.1f} ms)",
            f"{each.counted_share(rows):.2f}",
            f"{each.baseline_forward_s / each.forward_s[rows]:.2f}x",
            f"{each.pair_share:.2f} ({each.pair_s * 1e3:.1f} ms)",
            str(each.pack_size),
            str(each.checkpointed_blocks),
            f"{each.baseline_pair_s / each.pair_s:.2f}x",
        )
    return table


def steps_table(results: Sequence[Measured]) -> Table:
    table = Table(title="whole steps and memory: predicted and measured")
    headings = (
        "family",
        "predicted s",
        "measured s",
        "error",
        "samples/s",
        "over baseline",
        "GiB predicted from one pair",
        "error",
        "planned GiB",
        "error",
        "peak GiB",
    )
    for heading in (*headings, "largest |log ratio|", "|rollout - replay|", "profile s"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for each in results:
        table.add_row(
            each.family,
            formatted(each.predicted_s, ".2f"),
            formatted(each.step_s, ".2f"),
            error(each.predicted_s, each.step_s),
            formatted(each.samples_per_second, ".2f"),
            "-" if not each.step_s or not each.baseline_step_s else f"{each.baseline_step_s / each.step_s:.2f}x",
            formatted(each.predicted_gib or None, ".1f"),
            error(each.predicted_gib, each.peak_gib),
            formatted(each.planned_gib or None, ".1f"),
            error(each.planned_gib, each.peak_gib),
            formatted(each.peak_gib or None, ".1f"),
            formatted(each.largest_log_ratio, ".1e"),
            formatted(each.log_prob_mismatch, ".1e"),
            formatted(each.profile_s, ".0f"),
        )
    return table


def parts_table(results: Sequence[Measured]) -> Table:
    table = Table(title="seconds of a step by kind of work")
    for heading in ("family", "predicted", "measured"):
        table.add_column(heading)
    for each in results:
        cells = (
            ", ".join(f"{name} {s:.2f}" for name, s in parts.items())
            for parts in (each.predicted_parts, each.parts)
        )
        table.add_row(each.family, *cells)
    return table


def formatted(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def error(expected: float | None, measured: float | None) -> str:
    return "-" if not expected or not measured else f"{expected / measured - 1:+.1%}"


def as_json(results: Sequence[Measured]) -> list[Mapping[str, Any]]:
    return [asdict(each) for each in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"families to measure, all by default: {', '.join(CASES)}")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--whole-step", action="store_true", help="also measure a whole step of the baseline")
    parser.add_argument("--base", choices=BASES, default=BASES[0], help="format of the frozen weights")
    parser.add_argument("--memory-gib", type=float, help="limit the GPU memory in use")
    parser.add_argument("--no-runs", action="store_true", help="measure profiles only")
    parser.add_argument("--profiles", type=Path, help="folder to write the profiles to")
    parser.add_argument("--device-name", default="h200", help="prefix of the profiles' file names")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    unknown = [family for family in options.families if family not in CASES]
    if unknown:
        sys.exit(f"unknown family '{unknown[0]}'; known: {', '.join(CASES)}")
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no GPU was found; add --tiny to run tiny models on the CPU")
    if options.memory_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gib * GIB / total))
    stderr, results = Console(stderr=True), []
    for family in options.families or list(CASES):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()

            def notify(what: str, family: str = family, began: float = began) -> None:
                stderr.print(f"{time.perf_counter() - began:6.1f} s  {family}: {what}", highlight=False)

            results.append(measure(family, options, Path(folder), notify))
            notify(json.dumps(asdict(results[-1])))
    if options.json:
        print(json.dumps(as_json(results)))
        return
    out = Console(width=200) if not sys.stdout.isatty() else Console()
    out.print(shares_table(results))
    out.print(steps_table(results))
    out.print(parts_table(results))


if __name__ == "__main__":
    main()
