"""Runs of a tiny model whose drivers start in a fraction of a second, to be killed again and again.

Drivers are forked from a process that has torch loaded, and their workers from one fork server that outlives them.
Ray's drivers are separate programs, because a process with Ray's threads cannot be forked.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import yaml
from rich.console import Console

from digenrl.commands.train import resume_run, start_run
from digenrl.config.reading import ConfigError
from digenrl.records import Action, Committed, Event, SampleId, Trained, WorkerLost
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.run_folder.journal import Journal, read_journal
from digenrl.runs import training
from digenrl.scheduling import SchedulerState

Transport = Literal["local", "colocated", "ray"]
TRANSPORTS: tuple[Transport, ...] = ("local", "colocated", "ray")
FINISHED, FAILED, RESTARTED = 0, 1, 3  # exit codes of drivers
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "steps": 3,
    "model": {"family": "sd3", "source": "model", "guidance": 1.0},
    "prompts": {"path": "prompts.txt"},
    "rewards": "jpeg_compressibility",
    "sample": {"height": 16, "width": 16, "denoising_steps": 2},
    "batch": {"prompts": 2, "samples_per_prompt": 2, "slice": 1},
    "algorithm": {"name": "flow_grpo", "options": {"updates_per_batch": 1, "kl_weight": 0}},
    "training": {"learning_rate": 1e-3, "pack_size": 4, "lora": {"rank": 2, "alpha": 4}},
    "lanes": {"generators": ["cpu"], "threads": 1, "rewards": 1, "restarts": 1000},
    "logging": {"tensorboard": False},
    "checkpoint": {"every": 1, "keep": 2},
}
ON_RAY: dict[str, Any] = {
    "cluster": {
        "start_timeout_s": 300,  # a busy machine starts workers slowly
        "trainer": {"cpus": 0, "resources": {"home": 1}},
        "rewards": {"cpus": 0, "resources": {"home": 1}},
        "encoder": {"cpus": 0, "resources": {"home": 1}},
        "generators": [{"name": "lanes", "cpus": 0, "resources": {"home": 1}}],
    },
    "lanes": {"device": "cpu", "generators": 1, "threads": 1, "rewards": 0, "restarts": 1000},
}


@dataclass(frozen=True, slots=True)
class DriverTask:
    """What a driver does: starts or resumes a run, and kills itself after it has written some journal records."""

    run: str
    recipe: str
    resumes: bool = False
    records: int | None = None


class TinyRuns:
    """A folder with a tiny model and a recipe, and drivers of its runs."""

    def __init__(self, root: Path, transport: Transport, address: str = "", **changes: Any) -> None:
        from digenrl.testing.tiny_models import make_tiny_pipeline

        self.root, self.transport = root, transport
        make_tiny_pipeline("sd3", root / "model")
        (root / "prompts.txt").write_text("a cat\na dog\na red bird\na fish\na boat\n")
        content = {**RECIPE, "mode": transport}
        if transport == "ray":
            content |= {**ON_RAY, "cluster": {**ON_RAY["cluster"], "address": address}}
        for key, value in changes.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) else value
        self.recipe = root / "tiny.yaml"
        self.recipe.write_text(yaml.safe_dump(content))
        if transport == "local":
            _start_fork_server()

    def begin(self, name: str, *, resumes: bool = False, records: int | None = None) -> int:
        """Starts a driver; returns its process id."""
        task = DriverTask(str(self.root / name), str(self.recipe), resumes, records)
        if self.transport == "ray":
            program = [sys.executable, __file__, json.dumps(asdict(task))]
            return subprocess.Popen(program, start_new_session=True).pid
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os._exit(drive(task))
        return pid

    def drive(self, name: str, *, resumes: bool = False, records: int | None = None) -> int:
        """Runs a driver to its end; returns its exit code, or minus the signal that killed it."""
        _, status = os.waitpid(self.begin(name, resumes=resumes, records=records), 0)
        return os.waitstatus_to_exitcode(status)

    def folder(self, name: str) -> RunFolder:
        """The folder of a run."""
        return RunFolder.open(self.root / name)

    def workers(self, name: str) -> dict[str, int]:
        """Process ids of a run's workers by name: their output goes to its logs."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                target = (process / "fd" / "1").readlink()
                ended = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if target.parent == self.root / name / "logs" and not ended:
                    found[target.stem] = int(process.name)
        return found

    def left_workers(self, name: str, within_s: float) -> list[str]:
        """Workers that still run after some time."""
        until_s = time.monotonic() + within_s
        while (found := self.workers(name)) and time.monotonic() < until_s:
            time.sleep(0.05)
        return sorted(found)


@contextmanager
def opened_runs(transport: Transport, **changes: Any) -> Iterator[TinyRuns]:
    """A folder for runs with a transport; Ray's have a cluster of this machine."""
    with tempfile.TemporaryDirectory(prefix="digenrl-tiny-") as root:
        if transport != "ray":
            yield TinyRuns(Path(root), transport, **changes)
            return
        from ray_nodes import ray_cluster

        with ray_cluster(num_cpus=1, resources={"home": 16}) as cluster:
            yield TinyRuns(Path(root), transport, cluster.address, **changes)


def count_samples(folder: RunFolder) -> Counter[SampleId]:
    """How often each sample is in the weights, according to the journal. A lost trainer's open gradient is not."""
    committed: Counter[SampleId] = Counter()
    trained: list[SampleId] = []
    for event in (decision.event for decision in read_journal(folder.journal)):
        if isinstance(event, Trained):
            trained += event.job.slice.samples()
        elif isinstance(event, Committed):
            committed.update(trained)
            trained = []
        elif isinstance(event, WorkerLost) and event.pool == "trainer":
            trained = []
    return committed


def trained_files(folder: RunFolder, step: int) -> dict[str, bytes]:
    """Weights, optimizer and all other tensors of a checkpoint, byte by byte."""
    return {path.name: path.read_bytes() for path in folder.checkpoint(step).glob("*.safetensors")}


def drive(task: DriverTask) -> int:
    """The program of a driver; returns its exit code. Its errors go to a file beside the run."""
    if forkserver._forkserver._forkserver_address is not None:  # type: ignore[attr-defined]
        _keep_fork_server()
    if task.records is not None:
        records = task.records
        training.Journal = lambda lines: _LastWords(lines, records)  # type: ignore[assignment, attr-defined]
    try:
        return _train(task)
    except BaseException:
        Path(f"{task.run}.error").write_text(traceback.format_exc())
        return FAILED


def _train(task: DriverTask) -> int:
    run, console = Path(task.run), Console(file=io.StringIO())
    if not task.resumes:
        status, code = start_run(task.recipe, (), run, console, False), FINISHED
    else:
        try:
            status, code = resume_run(run, (), console, False), FINISHED
        except ConfigError as error:
            if "to continue, set more" in str(error):
                return FINISHED  # it was killed after its last checkpoint
            if "--restart" not in str(error):
                raise
            status, code = resume_run(run, (), console, False, restart=True), RESTARTED
    return code if status is Status.FINISHED else FAILED


class _LastWords(Journal):
    """Kills the driver when it has written some records, before it acts on the last one."""

    def __init__(self, lines: Any, records: int) -> None:
        super().__init__(lines)
        self._file, self._left = lines, records

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        before = self._file.position()
        super().observe(event, actions, state)
        self._left -= self._file.position() > before
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _start_fork_server() -> None:
    from digenrl.transports.processes import prepare_fork_server

    prepare_fork_server(threads=1)


def _keep_fork_server() -> None:
    """A forked driver uses the fork server of its parent, which it cannot wait for as a child of its own."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    forkserver.ensure_running = lambda: None


if __name__ == "__main__":
    sys.exit(drive(DriverTask(**json.loads(sys.argv[1]))))
