"""What worker processes share, on one machine and on a cluster: environment variables and log files. No torch."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Read when torch is imported. Libraries ask at import whether CUDA is available; with the NVML check that does not
# initialize CUDA, which a forked process could not use afterwards. On Intel CPUs, the strict mode of MKL rounds a
# row in the same way whatever the batch that it is in, at the same speed. On AMD CPUs without AVX-512, batches of
# up to three rows are rounded differently in every mode.
TORCH_ENVIRONMENT = {
    "MKL_CBWR": "AUTO,STRICT",
    "ONEDNN_JIT_PROFILE": "0",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@contextmanager
def loading_modules() -> Iterator[None]:
    """Inside, no garbage is collected: modules leave little, and looking for it takes an eighth of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def log_file(logs: Path, worker: str) -> Path:
    """The file for the output of a worker."""
    return logs / f"{worker.replace('/', '-')}.log"


def redirect_output(log: Path) -> None:
    """Appends all further output of this process, also that of C libraries, to a file."""
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
