"""Where the time of one compiled pass goes, kernel by kernel.

    python benchmarks/kernel_profile.py flux                     # a forward pass of 8 samples on a GPU
    python benchmarks/kernel_profile.py qwen_image --pass replay # a replay, forward and backward
    python benchmarks/kernel_profile.py wan --rows 1 --inductor combo_kernels=true
    python benchmarks/kernel_profile.py sd3 --tiny               # a tiny model on the CPU, not really compiled

The model has its full size and random weights. Kernels are grouped: matrix products, attention, norms and
pointwise work that the compiler has fused, copies, and what it has left unfused.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.config
import yaml
from gpu_cases import CASES, case_of, loaded, prepared_recipe
from gpu_passes import forward_of, replay_of, seconds_of, use_tried_kernels
from rich.console import Console
from rich.table import Table
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The first pattern that a kernel's name matches decides. On a CPU the names are those of operators.
GROUPS = {
    "attention": r"flash|fmha|sdpa|attention|mem_eff",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|wgmma|aten::(add)?mm|aten::bmm|mkldnn_linear",
    "copies": r"memcpy|memset|copy_kernel|catarray|^aten::(copy_|cat|clone|contiguous|_to_copy)",
    "fused norms": r"^triton_.*(norm|rsqrt|mean|var)",
    "fused pointwise": r"^triton_",
}
UNFUSED = "unfused"


@dataclass(frozen=True)
class KernelTime:
    """All calls of one kernel in a pass."""

    name: str
    calls: int
    seconds: float

    @property
    def group(self) -> str:
        found = (group for group, pattern in GROUPS.items() if re.search(pattern, self.name, re.IGNORECASE))
        return next(found, UNFUSED)


def kernel_times(work: Callable[[], object], device: torch.device) -> list[KernelTime]:
    """The kernels of one call, the longest first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times = [
        KernelTime(
            event.key, event.count, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        )
        for event in profiler.key_averages()
        if event.device_type == kind and (on_gpu or event.key.startswith("aten::"))
    ]
    return sorted((each for each in times if each.seconds > 0), key=lambda each: -each.seconds)


def groups_table(times: Iterable[KernelTime], title: str) -> Table:
    times = list(times)
    total = sum(each.seconds for each in times)
    table = _table(title, ("group", "ms", "share", "calls", "kernels"))
    for group in (*GROUPS, UNFUSED):
        of_group = [each for each in times if each.group == group]
        seconds, calls = sum(each.seconds for each in of_group), sum(each.calls for each in of_group)
        table.add_row(group, f"{seconds * 1e3:.2f}", f"{seconds / total:.1%}", str(calls), str(len(of_group)))
    table.add_row("all", f"{total * 1e3:.2f}", "", str(sum(each.calls for each in times)), str(len(times)))
    return table


def kernels_table(times: Iterable[KernelTime], title: str, top: int) -> Table:
    table = _table(title, ("kernel", "group", "ms", "calls", "us each"))
    for each in list(times)[:top]:
        mean_us = each.seconds / each.calls * 1e6
        table.add_row(each.name[:110], each.group, f"{each.seconds * 1e3:.3f}", str(each.calls), f"{mean_us:.1f}")
    return table


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("group", "kernel") else "right")
    return table


def set_inductor_options(settings: Iterable[str]) -> None:
    """Sets options of torch._inductor.config, each `key=value`."""
    for setting in settings:
        key, _, value = setting.partition("=")
        if not hasattr(torch._inductor.config, key):
            sys.exit(f"unknown option '{key}' of torch._inductor.config")
        setattr(torch._inductor.config, key, yaml.safe_load(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(CASES))
    parser.add_argument("--pass", dest="kind", choices=("forward", "replay"), default="forward")
    parser.add_argument("--rows", type=int, help="samples of a forward; the largest slice of the benchmark")
    parser.add_argument("--pack", type=int, help="pairs of a replay; chosen by the memory plan")
    parser.add_argument("--checkpointed", type=int, help="checkpointed blocks; chosen by the memory plan")
    parser.add_argument("--base", help="precision of the frozen base, as model.base")
    parser.add_argument("--attention", help="attention kernel, as model.attention; tried by default")
    parser.add_argument("--inductor", nargs="*", default=[], help="options of torch._inductor.config, key=value")
    parser.add_argument("--top", type=int, default=25, help="kernels to list")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    set_inductor_options(options.inductor)
    chosen = {
        "model.base": options.base,
        "model.attention": options.attention,
        "training.pack_size": options.pack,
        "training.gradient_checkpointing": options.checkpointed,
    }
    overrides = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    with tempfile.TemporaryDirectory() as folder:
        recipe = prepared_recipe(options.family, options.tiny, Path(folder), overrides)
        model = loaded(recipe, "cpu" if options.tiny else "cuda")
        kernels, _ = use_tried_kernels(model)
        case, device = case_of(options.family, options.tiny), model.model.device
        rows = options.rows or max(case.slices)
        what = f"forward of {rows}"
        work: Callable[[], object] = forward_of(model, rows)
        if options.kind == "replay":
            trainer, work = replay_of(model, case)
            work()
            what = f"replay, pack {trainer.plan.pack_size if trainer.plan else '?'}"
        seconds = seconds_of(work, device, warm_ups=3, times=3)
        times = kernel_times(work, device)
    out = Console(width=200) if not sys.stdout.isatty() else Console()
    used = kernels or recipe.model.kernels or "native"
    out.print(f"{options.family}, {what}: {seconds * 1e3:.1f} ms; attention {used}", highlight=False)
    out.print(groups_table(times, "groups"))
    out.print(kernels_table(times, "longest kernels", options.top))
    unfused = [each for each in times if each.group in (UNFUSED, "copies")]
    out.print(kernels_table(unfused, "unfused kernels and copies", options.top))


if __name__ == "__main__":
    main()
