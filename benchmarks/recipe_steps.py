"""Runs steps of recipes at full size with random weights, and compares planned with used memory.

    python benchmarks/recipe_steps.py flux_24gb qwen_image_24gb --memory-gib 23
    python benchmarks/recipe_steps.py z_image_one_gpu ltx2_one_gpu --at-once 2 --memory-gib 65 model.compile=false
    python benchmarks/recipe_steps.py sd3_24gb z_image_one_gpu --tiny     # tiny models, on a CPU

Every recipe is run in a process of its own, unchanged except for random weights, random text embeddings, a cheap
reward and one group per step; KEY=VALUE overrides more. Memory is that of torch's allocator, weights included:
"planned" and "used" are of the trial replay, "steps" is the peak of all steps, "reserved" what the process held.
Times of recipes that run at once are not comparable.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

STEPS = 2
PLAN = re.compile(r"packs of (\d+) .*?, (\d+) checkpointed .*?: ([\d.]+) GiB planned, ([\d.]+) GiB used")


@dataclass
class Measured:
    """A recipe's steps. GiB are 0 on a CPU, seconds are of the last step."""

    recipe: str
    error: str = ""
    samples: int = 0
    pack_size: int = 0
    checkpointed_blocks: int = 0
    planned_gib: float = 0.0
    used_gib: float = 0.0
    steps_gib: float = 0.0
    reserved_gib: float = 0.0
    step_s: float = 0.0
    whole_s: float = 0.0
    messages: list[str] = field(default_factory=list)


def measure(name: str, tiny: bool, overrides: Sequence[str]) -> Measured:
    """Runs the recipe in this process."""
    import torch  # here, because the parent process needs neither torch nor the package
    from measured_runs import StepLog

    from digenrl.config.recipes.files import read_recipe
    from digenrl.models.registry import find_family
    from digenrl.run_folder.folder import RunFolder
    from digenrl.runs.training import check_recipe, train
    from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size

    result, began = Measured(name), time.perf_counter()

    class Log(StepLog):
        def notify(self, message: str) -> None:
            result.messages.append(message)
            print(f"{time.perf_counter() - began:6.1f} s  {name}: {message}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        published = read_recipe(name).model
        settings = [
            "mode=colocated",
            f"steps={STEPS}",
            "rewards=jpeg_compressibility",
            "evaluation=null",
            "batch.prompts=1",
            "algorithm.options.updates_per_batch=1",
            "checkpoint.every=1000",
            "logging.tensorboard=false",
        ]
        if tiny:
            make_tiny_pipeline(published.family, Path(scratch) / "model")
            size = tiny_size(published.family)
            settings += [
                f"model.source={Path(scratch) / 'model'}",
                "model.dtype=float32",
                "model.text_tokens=null",
                "model.train_expert=null",
                f"sample.height={size.height}",
                f"sample.width={size.width}",
                f"sample.frames={size.frames}",
            ]
        else:
            sizes = find_family(published.family).sizes
            settings.append(
                f"model.source=random:{next(key for key in sizes if sizes[key].hub_id == published.source)}"
            )
        given = {each.partition("=")[0] for each in overrides}
        recipe = read_recipe(name, [*(s for s in settings if s.partition("=")[0] not in given), *overrides])
        backend, log = check_recipe(recipe), Log()
        with closing(backend):
            train(RunFolder.create(Path(scratch) / "run", recipe, datetime.now(UTC)), backend, log)
    result.samples = recipe.batch.prompts * recipe.batch.samples_per_prompt
    result.step_s, result.whole_s = log.steps[-1]["step_s"], time.perf_counter() - began
    if torch.cuda.is_available():
        result.steps_gib = torch.cuda.max_memory_allocated() / 2**30
        result.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    plan = next((match for message in result.messages if (match := PLAN.search(message))), None)
    if plan is not None:
        result.pack_size, result.checkpointed_blocks = int(plan[1]), int(plan[2])
        result.planned_gib, result.used_gib = float(plan[3]), float(plan[4])
    return result


def measured_apart(name: str, options: argparse.Namespace) -> Measured:
    """The same in a process of its own; an error is part of the result."""
    command = [sys.executable, __file__, name, *options.overrides, "--child", *["--tiny"] * options.tiny]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None and child.stdout is not None
        last = ""
        for line in child.stderr:
            last = line.strip() or last
            if f" s  {name}: " in line:
                sys.stderr.write(line)
        printed = child.stdout.read()
    if child.returncode:
        return Measured(name, error=f"exit {child.returncode}: {last}")
    sys.stderr.write(printed)
    return Measured(**json.loads(printed.splitlines()[-1]))


def table(results: Sequence[Measured]) -> Table:
    result = Table(title="One step per recipe, random weights")
    for heading in (
        "recipe",
        "samples",
        "pack",
        "checkpointed",
        "planned",
        "used",
        "planned/used",
        "steps",
        "reserved",
    ):
        result.add_column(heading)
    result.add_column("step")
    for each in results:
        if each.error:
            result.add_row(each.recipe, each.error)
            continue
        ratio = f"{each.planned_gib / each.used_gib - 1:+.1%}" if each.used_gib else ""
        memory = (f"{gib:.1f} GiB" for gib in (each.planned_gib, each.used_gib))
        result.add_row(
            each.recipe,
            str(each.samples),
            str(each.pack_size or ""),
            str(each.checkpointed_blocks),
            *memory,
            ratio,
            f"{each.steps_gib:.1f} GiB",
            f"{each.reserved_gib:.1f} GiB",
            f"{each.step_s:.1f} s",
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "given", nargs="+", metavar="RECIPE | KEY=VALUE", help="recipes, and overrides for all of them"
    )
    parser.add_argument("--memory-gib", type=float, help="limit of each process, as lanes.memory_gib")
    parser.add_argument("--at-once", type=int, default=1, help="recipes that run at the same time")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    recipes = [each for each in options.given if "=" not in each]
    if not recipes:
        parser.error("name at least one recipe")
    options.overrides = [each for each in options.given if "=" in each]
    if options.memory_gib is not None:
        options.overrides.append(f"lanes.memory_gib={options.memory_gib}")
    if options.child:
        print(json.dumps(asdict(measure(recipes[0], options.tiny, options.overrides))))
        return
    with ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(lambda name: measured_apart(name, options), recipes))
    if options.json:
        print(json.dumps([asdict(each) for each in results]))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(results))
    sys.exit(1 if any(each.error for each in results) else 0)


if __name__ == "__main__":
    main()
