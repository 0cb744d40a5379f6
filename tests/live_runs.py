"""Whole runs of a tiny model, with real worker processes: started, watched, disturbed, inspected."""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from torch import Tensor

from digenrl.commands.train import resume_run, start_run
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import Committed, Trained
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.run_folder.journal import read_journal
from digenrl.run_folder.lines import located_lines
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.training.checkpoint.checkpoints import read_checkpoint

TESTS = Path(__file__).parent
PATIENCE_S = 240.0  # generous, for busy machines
PIDFD_GETFD = 438  # the system call, on all architectures
TINY: dict[str, Any] = {
    "name": "tiny",
    "steps": 3,
    "model": {"family": "sd3", "source": "model", "guidance": 1.0},
    "prompts": {"path": "prompts.txt"},
    "rewards": "live_rewards:redness",
    "sample": {"height": 16, "width": 16, "denoising_steps": 3},
    "batch": {"prompts": 2, "samples_per_prompt": 4, "slice": 2},
    "algorithm": {"name": "flow_grpo", "options": {"updates_per_batch": 1, "kl_weight": 0}},
    "training": {"learning_rate": 1e-3, "pack_size": 6, "lora": {"rank": 2, "alpha": 4}},
    "lanes": {"generators": ["cpu"], "threads": 1},
    "logging": {"tensorboard": False},
}
SPARE_REWARDS = "lanes.rewards=3"  # the two slices of a blocked group block two lanes; the third scores the others
NAIVE = ("techniques.gap=false", "techniques.tag=none")


class LiveRuns:
    """A folder with a tiny model, prompts and a recipe, in which runs are made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_tiny_pipeline("sd3", root / "model")
        (root / "prompts.txt").write_text("a cat\na dog\na red bird\na fish\na boat\n")
        (root / "tiny.yaml").write_text(yaml.safe_dump(TINY))
        self._finished: dict[tuple[str, ...], RunFolder] = {}
        self._count = 0

    def finished(self, *overrides: str) -> RunFolder:
        """An undisturbed run. Later calls with the same overrides return the same run."""
        if overrides not in self._finished:
            status, folder = self.run(*overrides)
            assert status is Status.FINISHED
            self._finished[overrides] = folder
        return self._finished[overrides]

    def new_path(self) -> Path:
        """The folder of the next run."""
        self._count += 1
        return self.root / f"run-{self._count}"

    def run(self, *overrides: str, out: Path | None = None) -> tuple[Status, RunFolder]:
        """Runs with the driver in this process. Its errors are raised here."""
        out = out or self.new_path()
        status = start_run(str(self.root / "tiny.yaml"), overrides, out, Console(file=io.StringIO()), True)
        return status, RunFolder.open(out)

    def resume(self, path: Path, *overrides: str) -> Status:
        """Resumes a run with the driver in this process."""
        return resume_run(path, overrides, Console(file=io.StringIO()), True)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `digenrl train ...` in its own session, as in a separate terminal."""
        search = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-c", "from digenrl.cli import main; main()", "train", *arguments],
            cwd=self.root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


# --- Observing ---------------------------------------------------------------------------------------------------


def wait_for(true: Callable[[], Any], what: str) -> Any:
    """Waits until the condition returns something true, and returns that."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited for {what} in vain"
        time.sleep(0.04)  # polling takes CPU time from the run
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The content of every complete line of a JSON lines file."""
    return [line.content for line in located_lines(path)]


def steps_done(run: Path) -> int:
    """The number of optimizer steps in metrics.jsonl."""
    return len(lines_of(run / "metrics.jsonl"))


def workers_of(run: Path) -> dict[str, int]:
    """The worker processes of a run by name: those whose output goes to its logs."""
    found: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            target = (process / "fd" / "1").readlink()
            ended = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if target.parent == run / "logs" and not ended:
            found[target.stem] = int(process.name)
    return found


def session_of(pid: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == pid and state != "Z":
            found.append(int(process.name))
    return found


def exchange_of(pid: int) -> Path:
    """The exchange folder of a driver: the one that it holds a lock in."""

    def find() -> Path | None:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = descriptor.readlink()
            except OSError:
                continue
            if target.name == "lock" and target.parent.name.startswith("digenrl-"):
                return target.parent
        return None

    found: Path = wait_for(find, "an exchange folder")
    return found


def open_gradient(run: Path) -> int:
    """The number of groups that are trained and not committed, once there is a step."""
    groups = 0
    for decision in read_journal(run / "journal.jsonl") if steps_done(run) else ():
        if isinstance(decision.event, Committed):
            groups = 0
        elif isinstance(decision.event, Trained):
            groups += 1
    return groups


# --- Disturbing --------------------------------------------------------------------------------------------------


class Meanwhile:
    """Acts in a thread while a run is driven here. If that fails, the run is killed and the test fails."""

    def __init__(self, run: Path, act: Callable[[], None]) -> None:
        self._driven, self._act = run, act
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:  # raised in the test once the run is over
            self._error = error
            for pid in workers_of(self._driven).values():
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.join(PATIENCE_S)
        if self._error is not None:
            raise self._error


def ask_to_stop(number: signal.Signals) -> None:
    """Sends a signal to the run in this process, once the run handles it: until then it would end the tests."""
    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    wait_for(lambda: signal.getsignal(number) not in unhandled, f"the run to handle {number.name}")
    os.kill(os.getpid(), number)


class Gates:
    """Prompts whose scoring is blocked; see `live_rewards.gated`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @property
    def rewards(self) -> str:
        """The override that gives a run this reward."""
        settings = {"name": "function", "target": "live_rewards:gated", "arguments": {"gates": str(self.folder)}}
        return f"rewards={json.dumps(settings)}"

    def close(self, *prompts: str) -> None:
        """Blocks the scoring of these prompts."""
        for prompt in prompts:
            (self.folder / prompt).touch()

    def open(self, *prompts: str) -> None:
        """Unblocks these prompts, or all."""
        for gate in [self.folder / prompt for prompt in prompts] or list(self.folder.iterdir()):
            gate.unlink()


def kill(pid: int) -> None:
    """Kills a process."""
    os.kill(pid, signal.SIGKILL)


def cut_connections(pid: int) -> None:
    """Ends all TCP connections of a process, which stays alive. Raises OSError where that is not possible."""
    process, libc = Path(f"/proc/{pid}"), ctypes.CDLL(None, use_errno=True)
    rows = [row.split() for table in process.glob("net/tcp*") for row in table.read_text().splitlines()]
    established = {f"socket:[{row[9]}]" for row in rows if row[3] == "01"}
    sockets = [int(each.name) for each in (process / "fd").iterdir() if str(each.readlink()) in established]
    assert sockets, "nothing to cut"
    handle = os.pidfd_open(pid)
    for descriptor in sockets:
        own = libc.syscall(PIDFD_GETFD, handle, descriptor, 0)
        if own < 0:
            raise OSError(ctypes.get_errno(), "a socket of another process cannot be used")
        with socket.socket(fileno=own) as shared:
            shared.shutdown(socket.SHUT_RDWR)
    os.close(handle)


def harm_with_open_gradient(run: Path, worker: str, gates: Gates, harm: Callable[[int], None] = kill) -> None:
    """Harms the worker when some of the second step is trained. A closed gate keeps the rest from being scored."""
    wait_for(lambda: open_gradient(run), "an open gradient")
    harm(workers_of(run)[worker])
    gates.open()


def prompts_of_step(live: LiveRuns, step: int, prompts: int = 2, file: str = "prompts.txt") -> list[str]:
    """The prompts of a step, for runs with this many per step."""
    texts = (live.root / file).read_text().splitlines()
    sampler = PromptSampler([Prompt(index, text) for index, text in enumerate(texts)], prompts, seed=0)
    return [sampler.prompt_for(step, group).text for group in range(prompts)]


# --- Results -----------------------------------------------------------------------------------------------------


def trained(folder: RunFolder, step: int) -> dict[str, bytes]:
    """Weights, optimizer and all other tensors of the trainer in a checkpoint, byte by byte."""
    files = {path.name: path.read_bytes() for path in folder.checkpoint(step).glob("*.safetensors")}
    files.pop("version_before.safetensors", None)  # for generators, where samples or an evaluation are unfinished
    assert {"weights.safetensors", "optimizer.safetensors"} <= files.keys()
    return files


def weights(folder: RunFolder, step: int) -> Mapping[str, Tensor]:
    """The trained weights in the checkpoint of a step."""
    return read_checkpoint(folder.checkpoint(step)).trainer_state.weights


def assert_nothing_is_left(run: Path, exchange: Path | None = None) -> None:
    """Asserts that no worker process and no exchange folder are left."""
    wait_for(lambda: not workers_of(run), f"the end of {workers_of(run)}")
    if exchange is not None:
        wait_for(lambda: not exchange.exists(), f"the end of {exchange}")


def metric(folder: RunFolder, name: str) -> Sequence[Any]:
    """One metric of every step."""
    return [line[name] for line in lines_of(folder.metrics)]
