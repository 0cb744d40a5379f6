"""How close one GPU comes to its limit, compared with eager mode and with the predictions from its profile.

    python benchmarks/gpu.py                          # all five families at full size, random weights, on a GPU
    python benchmarks/gpu.py qwen_image --whole-step  # one family, and a whole step of the baseline
    python benchmarks/gpu.py flux --only forward,replay,eager --against cudnn,flash
    python benchmarks/gpu.py --tiny                   # the same code paths with tiny models, on a CPU

Parts, in one process per family:
- forward: forward passes of a rollout, compiled;
- eager: the same in eager mode, and replayed pairs in eager mode: one at a time with all blocks checkpointed,
  four at a time, and four at a time without checkpointing;
- replay: replayed pairs, compiled and packed;
- profile: a profile as `digenrl profile` writes it, and the step time that it predicts;
- run: a run of the same recipe.
Memory is first predicted from one pair, and then planned from trial packs. Attention kernels are tried first, as
in the calibration of a run; `--against` measures forwards and replays again with other kernels.

Shares are relative to the GPU's measured rate of bf16 matrix products. A forward has the operations that torch
counts in it, including attention and adapters; a replay with a frozen base has twice as many, without what
checkpointing computes again. "2 x parameters x tokens" counts a forward without attention; in families with two
streams each token passes through only part of the weights, so that this share can exceed 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CASES, PROMPTS, Loaded, case_of, loaded, prepared_recipe, tokens_of
from gpu_measured import Measured
from gpu_passes import (
    eager_forward_seconds,
    eager_mode,
    eager_replay_seconds,
    forward_seconds,
    packed,
    replay_seconds,
    use_tried_kernels,
)
from gpu_tables import parts_table, passes_table, steps_table
from measured_runs import StepLog
from rich.console import Console

from digenrl.commands.profile import profile_recipe
from digenrl.config.profiles import Profile, write_profile
from digenrl.config.recipes.attention import fixed_kernels
from digenrl.config.recipes.recipe import Recipe
from digenrl.generation.rollout import decode_slice
from digenrl.models.passes.matrix_rate import matrix_tflops
from digenrl.models.quantized.layers import weight_count
from digenrl.models.trajectory import ScoredGroup, Trajectory
from digenrl.models.transfers import synchronize
from digenrl.records import Slice
from digenrl.rewards.building import build_rewards
from digenrl.run_folder.folder import RunFolder
from digenrl.runs.training import check_recipe, train
from digenrl.simulation.single_device import predict_single_device
from digenrl.worker.blueprint import make_trainer, read_blueprint
from digenrl.worker.forward_trial import sample_forward
from digenrl.worker.rollouts import roll_out

PARTS = ("forward", "eager", "replay", "profile", "run")
GIB = 2**30


def measure_passes(result: Measured, recipe: Recipe, options: argparse.Namespace) -> None:
    """The measurements that load the model into this process."""
    model = loaded(recipe, "cpu" if options.tiny else "cuda")
    case, device = case_of(result.family, options.tiny), model.model.device
    adapters = sum(p.numel() for name, p in model.model.transformer.named_parameters() if "lora_" in name)
    result.parameters = weight_count(model.model.transformer) - adapters
    result.tokens = tokens_of(model.blueprint, model.row)
    result.matrix_tflops = matrix_tflops(device)
    result.forward_flop = sample_forward(model.blueprint, model.model, model.row).flop
    if "eager" in options.only:  # before other attention kernels are used
        result.eager_forward_s = eager_forward_seconds(model, max(case.slices))
        result.eager_pair_s = eager_replay_seconds(model)
        if options.whole_step:
            result.baseline_step_s = baseline_step(model)
    result.kernels, result.attention_s = use_tried_kernels(model)
    result.kernels = result.kernels or recipe.model.kernels
    if "forward" in options.only:
        result.forward_s = {rows: forward_seconds(model, rows) for rows in case.slices}
    if "replay" in options.only:
        result.pair_s, result.pack_size, result.checkpointed_blocks, retries = replay_seconds(model, case)
        result.allocation_retries = retries
    if options.against is not None:
        model.model.use_attention(options.against)
        if "forward" in options.only:
            result.forward_against_s = {rows: forward_seconds(model, rows) for rows in case.slices}
        if "replay" in options.only:
            result.pair_against_s = replay_seconds(model, case)[0]


def baseline_step(model: Loaded) -> float:
    """Seconds of a whole step in eager mode, one pair at a time: generate, score, train and commit in sequence."""
    recipe = packed(model.recipe, 1, checkpointed=True)
    blueprint = read_blueprint(recipe)
    scorer, group_size = build_rewards(recipe.rewards), recipe.batch.samples_per_prompt
    size = recipe.batch.slice
    assert isinstance(size, int)
    with eager_mode(model.model):
        trainer = make_trainer(blueprint, model.model, helps=False)
        synchronize(model.model.device)
        began = time.perf_counter()
        trajectories: list[Trajectory] = []
        rewards: list[float] = []
        for first in range(0, group_size, size):
            generated = roll_out(blueprint, model.model, model.row, Slice(0, 0, first, size), 0)
            pixels_BFCHW = decode_slice(model.model, generated)
            scored = scorer.score(pixels_BFCHW, [PROMPTS[0]] * size, [{}] * size)
            trajectories += generated.trajectories
            rewards += scored.values
        trainer.add_group(ScoredGroup(model.row, tuple(trajectories), tuple(rewards)), place=0)
        trainer.commit()
        synchronize(model.model.device)
        return time.perf_counter() - began


def measure_profile(
    result: Measured, recipe: Recipe, slices: tuple[int, ...], notify: Callable[[str], None]
) -> Profile:
    """Runs `digenrl profile`, and predicts a step from the result."""
    began = time.perf_counter()
    profile = profile_recipe(recipe, slices, lambda _done, _all, what: notify(what))
    result.profile_s = time.perf_counter() - began
    training = profile.training
    if training is None:
        raise SystemExit(f"{result.family}: training could not be measured: {profile.remarks}")
    result.pair_s = training.seconds_per_sample / profile.work.trained_steps
    result.pack_size, result.checkpointed_blocks = training.pack_size, training.checkpointed_blocks
    result.peak_gib, result.planned_gib = training.peak_bytes / GIB, training.planned_bytes / GIB
    result.predicted_gib = training.predicted_bytes / GIB
    predicted = predict_single_device(profile, result.family)
    result.predicted_s, result.predicted_parts = predicted.step_seconds, predicted.parts
    return profile


def measure_run(result: Measured, recipe: Recipe, folder: Path) -> None:
    """Runs the recipe with the profile's packing, which is not searched for again. Excludes the first step."""
    packing = {"pack_size": result.pack_size or "auto", "gradient_checkpointing": result.checkpointed_blocks}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=packing)})
    backend, log = check_recipe(recipe), StepLog()
    with closing(backend):
        train(RunFolder.create(folder, recipe, datetime.now(UTC)), backend, log)
    steady = log.steps[1:]
    if not steady:
        raise SystemExit(f"{result.family}: the run was stopped before its second step")
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
    recipe = prepared_recipe(family, options.tiny, folder, options.overrides)
    result = Measured(family)
    if {"forward", "eager", "replay"} & set(options.only):
        notify("passes")
        measure_passes(result, recipe, options)
        free()
    if "profile" in options.only:
        profile = measure_profile(result, recipe, case_of(family, options.tiny).slices, notify)
        if options.profiles is not None:
            options.profiles.mkdir(parents=True, exist_ok=True)
            written = write_profile(profile, by=f"benchmarks/gpu.py {family} --profiles FOLDER")
            (options.profiles / f"{options.device_name}_{family}.yaml").write_text(written)
        free()
    if "run" in options.only:
        notify("run")
        measure_run(result, recipe, folder / "run")
        free()
    return result


def free() -> None:
    """Frees GPU memory. Trainers are part of reference cycles, which only the garbage collector removes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def as_json(results: Sequence[Measured]) -> list[Mapping[str, Any]]:
    return [asdict(each) for each in results]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"families to measure, all by default: {', '.join(CASES)}")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--only", help=f"parts, all but replay by default: {', '.join(PARTS)}")
    parser.add_argument("--whole-step", action="store_true", help="also measure a whole step of the baseline")
    parser.add_argument("--base", help="precision of the frozen base, as model.base")
    parser.add_argument("--attention", help="fix the attention kernel, as model.attention")
    parser.add_argument("--deterministic", action="store_true", help="as model.deterministic")
    parser.add_argument("--against", help="attention kernels to compare with: of rollouts, and of replays")
    parser.add_argument("--pack", type=int, help="pairs of a pack, instead of the memory plan's")
    parser.add_argument("--checkpointed", type=int, help="checkpointed blocks, instead of the memory plan's")
    parser.add_argument("--memory-gib", type=float, help="limit the GPU memory in use")
    parser.add_argument("--profiles", type=Path, help="folder to write the profiles to")
    parser.add_argument("--device-name", default="h200", help="prefix of the profiles' file names")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",") if options.only else [part for part in PARTS if part != "replay"]
    for kind, given, known in (("family", options.families, CASES), ("part", options.only, PARTS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            sys.exit(f"unknown {kind} '{unknown[0]}'; known: {', '.join(known)}")
    if options.against is not None:
        rollout, _, replay = options.against.partition(",")
        options.against = fixed_kernels({"rollout": rollout, "replay": replay or rollout})
    chosen = {
        "model.base": options.base,
        "model.attention": options.attention,
        "model.deterministic": options.deterministic or None,
        "training.pack_size": options.pack,
        "training.gradient_checkpointing": options.checkpointed,
    }
    options.overrides = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no GPU was found; add --tiny to run tiny models on the CPU")
    return options


def main() -> None:
    options = options_of(sys.argv[1:])
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
    for table in (passes_table(results), steps_table(results), parts_table(results)):
        if table.row_count:
            out.print(table)


if __name__ == "__main__":
    main()
