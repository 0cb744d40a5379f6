"""Tries attention kernels in a separate process, which may crash without harm.

    python -m digenrl.models.passes.attention_trial CALLS DEVICE KERNEL...

runs the attention calls in a file, and prints one line of JSON per kind of pass and kernel: the seconds, or why
the kernel cannot be used. A kernel's output and gradients are compared with those of an fp32 reference.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from digenrl.config.recipes.attention import CANDIDATES
from digenrl.models.passes.attention import BACKENDS, prepare_attention
from digenrl.models.passes.forward_record import AttentionCall
from digenrl.models.transfers import synchronize
from digenrl.records import Kernel, PassKind

logger = logging.getLogger(__name__)

Calls = Mapping[PassKind, Sequence[AttentionCall]]
COMMAND = (sys.executable, "-m", "digenrl.models.passes.attention_trial")
TIMEOUT_S = 180.0
MOST_CRASHES = 3  # in a row, without a result
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-3}  # of the norm of the difference
MOST_ROWS, MOST_TOKENS = 8, 32_768  # of a trial
MOST_SCORES_BYTES = 2**31  # of the matrix that the math kernel stores
WARM_UPS, AT_ONCE, TIMED_S = 2, 4, 0.1
QUERIES_AT_ONCE = 1024  # in the reference


def try_kernels(
    calls: Calls, device: torch.device, command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S
) -> dict[PassKind, dict[Kernel, float]]:
    """The seconds of all calls of a pass, by kind and kernel, without kernels that fail, crash or are wrong.

    Kinds without calls are left out: any kernel would seem to take no time. A process that crashes or takes too
    long is started again without the kernel that it was trying, unless this keeps happening.
    """
    calls = {kind: each for kind, each in calls.items() if each}
    found: dict[PassKind, dict[Kernel, float]] = {kind: {} for kind in calls}
    left = [(kind, kernel) for kernel in CANDIDATES for kind in calls]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "calls.pt"
        torch.save(
            {
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "calls": {kind: [asdict(call) for call in each] for kind, each in calls.items()},
            },
            path,
        )
        crashes = 0
        while left and crashes < MOST_CRASHES:
            arguments = [str(path), str(device), *(f"{kind}:{kernel}" for kind, kernel in left)]
            lines, failure = _run([*command, *arguments], timeout_s)
            for line in lines:
                kind, kernel = left.pop(0)
                if "seconds" in line:
                    found[kind][kernel] = line["seconds"]
                else:
                    logger.info("attention kernel %s cannot be used in %s passes: %s", kernel, kind, line["why"])
            if left:
                logger.warning("attention kernel %s cannot be used in %s passes: %s", *reversed(left[0]), failure)
                left.pop(0)
            crashes = 0 if lines else crashes + 1
    return found


def _run(command: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """The lines that a process printed, and why it ended."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        output, failure = done.stdout, f"exit code {done.returncode}: {done.stderr[-300:].strip()}"
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        failure = f"no result after {timeout_s:g} s"
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")], failure


def main(path: str, device: str, *trials: str) -> None:
    """Runs trials, each `KIND:KERNEL`."""
    prepare_attention()
    given = torch.load(path, weights_only=True)
    torch.use_deterministic_algorithms(given["deterministic"])
    calls = {kind: [AttentionCall(**call) for call in each] for kind, each in given["calls"].items()}
    for trial in trials:
        kind, kernel = trial.split(":")
        try:
            backward = kind == "replay"
            timed = [_try_call(call, kernel, torch.device(device), backward) for call in calls[kind]]  # type: ignore[arg-type]
            line: dict[str, Any] = {"seconds": sum(timed)}
        except (RuntimeError, ValueError) as error:  # not supported here, out of memory, or wrong
            line = {"why": " ".join(str(error).split())[:300]}
            synchronize(torch.device(device))  # raises after errors that leave the device unusable
        print(json.dumps(line), flush=True)


def _try_call(call: AttentionCall, kernel: Kernel, device: torch.device, backward: bool) -> float:
    """Seconds of one row of all these calls; raises ValueError if the results are wrong."""
    rows = max(call.rows, min(MOST_ROWS, MOST_TOKENS // call.queries))
    if kernel == "math" and 4 * rows * call.heads * call.queries * call.keys > MOST_SCORES_BYTES:
        raise ValueError("it would need too much memory")
    generator = torch.Generator(device).manual_seed(0)

    def draw(tokens: int) -> Tensor:
        shape = (rows, tokens, call.heads, call.width)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=call.dtype)
        return drawn.requires_grad_(backward)

    query, key, value = draw(call.queries), draw(call.keys), draw(call.keys)
    gradient = draw(call.queries).detach()
    other_layout = torch.stack([gradient, gradient], dim=2)[:, :, 0]
    mask = None if call.mask is None else _repeated(call.mask, rows).to(device)

    def run(gradient: Tensor = gradient) -> list[Tensor]:
        output = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=BACKENDS[kernel])
        if not backward:
            return [output]
        return [output, *torch.autograd.grad(output, (query, key, value), gradient)]

    with torch.set_grad_enabled(backward):
        run(other_layout)  # kernels may keep what they learned about the first gradient
        results = [result.detach() for result in run()]
        for row, head in {(0, 0), (rows - 1, call.heads - 1)}:
            expected = _reference([each[row, :, head] for each in (query, key, value, gradient)], _row(mask, row))
            for name, got, wanted in zip(("output", "dq", "dk", "dv"), results, expected, strict=False):
                _check_close(name, got[row, :, head], wanted, TOLERANCE[call.dtype])
        del results
        return _seconds(run, device) * call.count / rows


def _repeated(mask: Tensor, rows: int) -> Tensor:
    return mask if len(mask) == 1 else mask.repeat(-(-rows // len(mask)), *[1] * (mask.ndim - 1))[:rows]


def _row(mask: Tensor | None, row: int) -> Tensor | None:
    return None if mask is None else mask[row if len(mask) > 1 else 0, 0]


def _reference(inputs: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
    """The output and the gradients of query, key and value of one head, in fp32 and a few queries at a time."""
    query, key, value = (each.detach().float().requires_grad_() for each in inputs[:3])
    gradient = inputs[3].float()
    outputs: list[Tensor] = []
    with torch.enable_grad():
        for start in range(0, len(query), QUERIES_AT_ONCE):
            rows = slice(start, start + QUERIES_AT_ONCE)
            scores = query[rows] @ key.T / query.shape[-1] ** 0.5
            if mask is not None:
                seen = mask if len(mask) == 1 else mask[rows]
                scores = scores.masked_fill(~seen, -torch.inf) if mask.dtype == torch.bool else scores + seen
            output = scores.softmax(-1) @ value
            output.backward(gradient[rows])
            outputs.append(output.detach())
    gradients = (each.grad for each in (query, key, value))
    return [torch.cat(outputs), *(each for each in gradients if each is not None)]


def _check_close(name: str, got: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = float((got.float() - wanted).norm() / wanted.norm())
    if not error <= tolerance:
        raise ValueError(f"{name} is off by {error:.1e} of its norm, more than {tolerance:.0e}")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UPS):
        run()
    seconds: list[float] = []
    while sum(seconds) < TIMED_S or len(seconds) < 3:
        synchronize(device)
        began = perf_counter()
        for _ in range(AT_ONCE):
            run()
        synchronize(device)
        seconds.append(perf_counter() - began)
    return median(seconds) / AT_ONCE


if __name__ == "__main__":
    main(*sys.argv[1:])
