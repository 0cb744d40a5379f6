"""The cost of sharing a gradient: fixed-point sums per Train job, and sending and adding them per update.

    python benchmarks/shared_gradients.py                  # adapters of SD3.5-M, FLUX.1 and Qwen-Image
    python benchmarks/shared_gradients.py --lanes 7        # as many generators as send their sums

The gradients are random tensors with as many values as the published adapters have. "float" adds a job's gradient
as a trainer alone could, in 32-bit floats in the order of arrival; "fixed" converts it to 64-bit integers and adds
those. An update then takes the lanes' sums from the device, leaves them in the exchange (shared memory), and the
trainer reads and adds them, one lane after the other; lanes send at the same time, so sending is counted once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.transfers import synchronize
from digenrl.training.gradients.fixed_point_sums import FixedPointSums
from digenrl.training.gradients.job_sums import JobSums
from digenrl.training.gradients.sums import GradientSums
from digenrl.training.packing.packed_passes import PassResult
from digenrl.training.sample_jobs import SampleJob

ADAPTERS = {"sd3.5-m": 18_800_000, "flux.1": 179_000_000, "qwen-image": 425_000_000}
TENSORS = 300
REPEATS = 7


def timed(act: Callable[[], object], device: torch.device) -> float:
    """The median time, after one call to warm up."""
    act()
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        began = perf_counter()
        act()
        synchronize(device)
        seconds.append(perf_counter() - began)
    return median(seconds)


def measure(values: int, lanes: int, device: torch.device, exchange: TensorExchange) -> dict[str, float]:
    gradient = {str(index): torch.randn(values // TENSORS, device=device) * 1e-3 for index in range(TENSORS)}
    parameters = {name: nn.Parameter(value) for name, value in gradient.items()}
    floats, fixed = PassResult(), FixedPointSums(parameters, over_batch=False)
    jobs = count()

    def result() -> PassResult:
        return PassResult(GradientSums(final={name: value.clone() for name, value in gradient.items()}))

    def add_fixed() -> None:
        fixed.add(0, fixed.of_job(SampleJob(0, next(jobs)), result()))

    def send() -> None:
        taken, _ = fixed.take()
        exchange.put("share", taken.gradient.final)
        fixed.add(0, taken)

    def add_one_lane() -> None:
        shared = {name: value.to(device, copy=True) for name, value in exchange.get("share").items()}
        fixed.add_share(JobSums(GradientSums(final=shared)), bound=0.0)

    float_s = timed(lambda: floats.add(result()), device)
    fixed_s, send_s = timed(add_fixed, device), timed(send, device)
    return {
        "float_ms_per_job": 1e3 * float_s,
        "fixed_ms_per_job": 1e3 * fixed_s,
        "send_s": send_s,
        "update_s": send_s + lanes * timed(add_one_lane, device),
        "megabytes": 8 * values / 1e6,
    }


def main() -> None:
    """Measures and prints one row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=7)
    parser.add_argument("--only", choices=list(ADAPTERS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [options.only] if options.only else list(ADAPTERS)
    folder = ExchangeFolder.create(bytes_wanted=0, places=[Path("/dev/shm"), Path(tempfile.gettempdir())])
    try:
        exchange = TensorExchange(folder)
        rows: dict[str, dict[str, float]] = {}
        for name in chosen:
            rows[name] = measure(ADAPTERS[name], options.lanes, device, exchange)
    finally:
        folder.remove()
    if options.json:
        print(json.dumps(rows))
        return
    table = Table(title=f"{options.lanes} generators and a trainer, on {device.type}")
    for heading in ("adapters of", "sums, MB per lane", "float, ms per job", "fixed", "send, s", "update, s"):
        table.add_column(heading, justify="left" if heading == "adapters of" else "right")
    for name, row in rows.items():
        cells = (f"{row['megabytes']:.0f}", f"{row['float_ms_per_job']:.1f}", f"{row['fixed_ms_per_job']:.1f}")
        table.add_row(name, *cells, f"{row['send_s']:.2f}", f"{row['update_s']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
