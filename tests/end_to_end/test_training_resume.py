"""Interrupted runs resume as if they had never stopped. Uses the command line and real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from live_runs import (
    PATIENCE_S,
    Gates,
    LiveRuns,
    Meanwhile,
    ask_to_stop,
    assert_nothing_is_left,
    exchange_of,
    lines_of,
    metric,
    session_of,
    steps_done,
    trained,
    wait_for,
)

from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import FORMAT, RunFolder, Status
from digenrl.runs.stopping import RunFailedError
from digenrl.transports import processes


def evaluation(live: LiveRuns, every: int) -> str:
    """The override that evaluates a run every `every` steps."""
    (live.root / "held_out.txt").write_text("a moon\na lamp\n")
    path = live.root / "held_out.txt"
    return f"evaluation={{prompts: {{path: {path}}}, every: {every}, denoising_steps: 2, batch: 2}}"


def is_open(run: Path, kind: str, after_step: int) -> bool:
    """Whether the journal shows a running job of this kind after some steps."""
    if steps_done(run) < after_step:
        return False
    issued: set[int] = set()
    for line in lines_of(run / "journal.jsonl"):
        issued -= {line["event"].get("job", {}).get("id", -1)}
        issued |= {action["id"] for action in line["actions"] if action["type"] == kind}
    return bool(issued)


def pause(command: subprocess.Popen[str], run: Path, seconds: float) -> None:
    """Stops all processes of a run and lets them continue, as Ctrl-Z and `fg` do."""
    wait_for(lambda: steps_done(run) >= 1 or command.poll() is not None, "a step")
    os.killpg(command.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.killpg(command.pid, signal.SIGCONT)


def terminate_all(command: subprocess.Popen[str], run: Path) -> None:
    """Signals the whole session of a run during a step, as a terminal does that is closed."""
    exchange = exchange_of(command.pid)
    steps = steps_done(run) + 1
    wait_for(lambda: steps_done(run) >= steps or command.poll() is not None, "a step")
    assert command.poll() is None, command.communicate()
    os.killpg(command.pid, signal.SIGHUP)
    out, err = command.communicate(timeout=PATIENCE_S)
    wait_for(lambda: not session_of(command.pid), "the end of all processes")
    assert_nothing_is_left(run, exchange)
    assert command.returncode == 130, out + err
    assert f"interrupted; resume with: digenrl train --resume {run}" in out + err
    folder = RunFolder.open(run)
    assert folder.info.status is Status.INTERRUPTED
    assert folder.checkpoint(steps_done(run)).is_dir(), "the last step that was taken is the one that was saved"


def kill_the_driver_in_an_evaluation(command: subprocess.Popen[str], run: Path) -> None:
    """Kills the driver alone: the workers have to notice."""
    exchange, later = exchange_of(command.pid), steps_done(run) + 1
    wait_for(lambda: is_open(run, "Evaluate", later) or command.poll() is not None, "an open Evaluate job")
    assert command.poll() is None, command.communicate()
    command.kill()
    command.communicate()
    wait_for(lambda: not session_of(command.pid), "the end of all processes")
    assert_nothing_is_left(run, exchange)
    assert RunFolder.open(run).actual_status() is Status.INTERRUPTED
    assert RunFolder.open(run).info.status is Status.RUNNING, "it had no time to say so"


def kill_all_in_a_checkpoint(command: subprocess.Popen[str], run: Path) -> Path:
    """Kills all processes of a run. Returns its exchange folder, which no process was left to remove."""
    exchange, later = exchange_of(command.pid), steps_done(run) + 1
    wait_for(lambda: is_open(run, "Save", later) or command.poll() is not None, "an open Save job")
    assert command.poll() is None, command.communicate()
    os.killpg(command.pid, signal.SIGKILL)
    command.communicate()
    wait_for(lambda: not session_of(command.pid), "the end of all processes")
    return exchange


def test_a_run_that_is_paused_stopped_and_killed_twice_ends_as_if_it_had_not_been(live: LiveRuns) -> None:
    run, common = live.new_path(), ("checkpoint.every=2", evaluation(live, every=2))
    many = "steps=60"  # it does not end before it is killed
    impatient = ("lanes.patience_s=8", "lanes.restarts=0")  # it would end if it took paused workers for lost
    command = live.command("tiny.yaml", many, *common, *impatient, "--out", str(run))
    pause(command, run, seconds=11)
    terminate_all(command, run)
    kill_the_driver_in_an_evaluation(live.command("--resume", str(run), "lanes.patience_s=60"), run)
    left_over = kill_all_in_a_checkpoint(live.command("--resume", str(run)), run)
    steps = steps_done(run) + 1
    assert live.resume(run, f"steps={steps}") is Status.FINISHED
    assert not left_over.exists(), "the next run removes what a killed one left"

    folder, quiet = RunFolder.open(run), live.finished("mode=colocated", f"steps={steps}", *common)
    assert trained(folder, steps) == trained(quiet, steps)
    assert metric(folder, "step") == list(range(steps))
    assert metric(folder, "reward_mean") == metric(quiet, "reward_mean")
    evaluations = [(line["step"], line["reward_mean"]) for line in lines_of(folder.evaluations)]
    expected = [(line["step"], line["reward_mean"]) for line in lines_of(quiet.evaluations)]
    assert evaluations == expected


def test_an_evaluation_that_the_next_checkpoint_overtook_is_repeated(live: LiveRuns, tmp_path: Path) -> None:
    """The scores of the initial policy are missing when the first checkpoint is saved and the run is stopped."""
    gates, run = Gates(tmp_path / "gates"), live.new_path()
    gates.close("a moon")
    common = ("checkpoint.every=1", "training.ema={decay: 0.5}", evaluation(live, every=1), gates.rewards)

    def stop() -> None:
        wait_for(lambda: steps_done(run) == 1, "a step")
        ask_to_stop(signal.SIGINT)
        wait_for(lambda: RunFolder.open(run).checkpoint(1).is_dir(), "its checkpoint")
        gates.open()

    with Meanwhile(run, stop):
        status, folder = live.run(*common, "lanes.rewards=2", out=run)
    assert status is Status.INTERRUPTED and not lines_of(folder.evaluations)
    assert live.resume(run) is Status.FINISHED
    whole = live.finished(*common, "mode=colocated")
    assert [line["step"] for line in lines_of(folder.evaluations)] == [0, 1, 2, 3]
    for name in ("evaluations", "metrics"):
        rewards = [[line["reward_mean"] for line in lines_of(getattr(each, name))] for each in (folder, whole)]
        assert rewards[0] == rewards[1]


def test_stale_samples_are_generated_with_the_same_versions_again(live: LiveRuns, tmp_path: Path) -> None:
    """The run has lost all checkpoints but the first. Its journal says which version made which samples."""
    options = ("techniques.tcss=1", "lanes.generators=[cpu,cpu]", "steps=4")
    whole = live.finished(*options, "checkpoint.every=1", "checkpoint.keep=4")
    shares = metric(whole, "stale_share")
    assert shares[1] and any(shares[2:]), "nothing was stale: the run shows nothing"
    run = Path(shutil.copytree(whole.path, tmp_path / "run"))
    for step in (2, 3, 4):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    assert live.resume(run) is Status.FINISHED
    again = RunFolder.open(run)
    assert metric(again, "stale_share") == shares
    assert metric(again, "reward_mean") == metric(whole, "reward_mean")
    assert trained(again, 4) == trained(whole, 4)


@pytest.mark.parametrize("mode", ["local", "colocated"])
def test_a_run_stopped_before_its_first_step_begins_again(mode: str, live: LiveRuns) -> None:
    run = live.new_path()

    def stop() -> None:
        wait_for(lambda: (run / "spans.jsonl").exists(), "the run to open")
        ask_to_stop(signal.SIGINT)

    with Meanwhile(run, stop):
        status, folder = live.run(f"mode={mode}", evaluation(live, every=2), out=run)
    assert status is Status.INTERRUPTED
    assert steps_done(run) <= 1
    assert live.resume(run) is Status.FINISHED
    assert trained(folder, 3) == trained(live.finished("mode=colocated"), 3)
    assert [line["step"] for line in lines_of(folder.evaluations)] == [0, 2, 3]


def test_a_colocated_run_saves_itself_when_it_is_asked_to_stop(live: LiveRuns) -> None:
    run = live.new_path()

    def stop() -> None:
        wait_for(lambda: steps_done(run) >= 2, "two steps")
        ask_to_stop(signal.SIGTERM)

    with Meanwhile(run, stop):
        status, folder = live.run("mode=colocated", "steps=200", out=run)
    assert status is Status.INTERRUPTED
    done = steps_done(run)
    assert [path.name for path in folder.checkpoints.iterdir()] == [f"step_{done:06d}"]
    assert live.resume(run, f"steps={done + 1}") is Status.FINISHED
    assert metric(folder, "step") == list(range(done + 1))


def test_a_run_that_lacks_its_last_evaluation_makes_up_for_it_and_a_finished_one_goes_on(live: LiveRuns) -> None:
    status, folder = live.run("mode=colocated", "steps=2", evaluation(live, every=2))
    assert status is Status.FINISHED
    rewards = [line["reward_mean"] for line in lines_of(folder.evaluations)]
    first, _ = folder.evaluations.read_text().splitlines()
    folder.evaluations.write_text(first + "\ngarbage\n")  # as if it had been killed before the second
    with folder.metrics.open("a") as metrics:
        metrics.write("garbage\n")
    assert live.resume(folder.path) is Status.FINISHED
    assert [line["reward_mean"] for line in lines_of(folder.evaluations)] == rewards
    with pytest.raises(ConfigError, match=r"steps is 2, and 2 are done.* steps=4"):
        live.resume(folder.path)
    assert live.resume(folder.path, "steps=3", "mode=local") is Status.FINISHED
    assert trained(folder, 3) == trained(live.finished("mode=colocated"), 3)


def test_a_run_whose_prompts_have_moved_goes_on_with_the_same_ones_only(live: LiveRuns, tmp_path: Path) -> None:
    prompts = Path(shutil.copy(live.root / "prompts.txt", tmp_path / "prompts.txt"))
    status, folder = live.run("mode=colocated", "steps=1", f"prompts.path={prompts}")
    assert status is Status.FINISHED
    moved = prompts.rename(tmp_path / "moved.txt")
    with pytest.raises(ConfigError, match=rf"^prompts.path: {prompts} does not exist.* prompts.path=FILE"):
        live.resume(folder.path, "steps=2")
    (tmp_path / "others.txt").write_text("another\none\n")
    with pytest.raises(ConfigError, match="prompts"):
        live.resume(folder.path, "steps=2", f"prompts.path={tmp_path / 'others.txt'}")
    assert live.resume(folder.path, "steps=2", f"prompts.path={moved}") is Status.FINISHED


# --- What cannot resume ------------------------------------------------------------------------------------------


def test_foreign_and_incomplete_folders_are_refused_in_one_line(live: LiveRuns, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        live.resume(tmp_path / "nowhere")
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ConfigError, match=r"run.json and config.yaml missing"):
        live.resume(tmp_path)
    (tmp_path / "config.yaml").write_text("steps: 3")
    with pytest.raises(ConfigError, match=r"run.json missing"):
        live.resume(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format": FORMAT - 1, "digenrl": "0.0.7"}))
    with pytest.raises(ConfigError, match=rf"format {FORMAT - 1}, .*use digenrl 0.0.7"):
        live.resume(tmp_path)


def test_a_resumed_run_may_not_change_what_it_computes(live: LiveRuns) -> None:
    folder = live.finished("mode=colocated")
    before = folder.config.read_text()
    with pytest.raises(
        ConfigError, match=r"^training.learning_rate=0.5: would change what .*start a new run with"
    ):
        live.resume(folder.path, "steps=9", "training.learning_rate=0.5")
    assert folder.config.read_text() == before


def test_a_run_resumes_from_its_newest_whole_checkpoint_and_only_on_its_own_base_weights(
    live: LiveRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(live.root / "model", tmp_path / "model"))
    status, folder = live.run("mode=colocated", "steps=2", "checkpoint.every=1", f"model.source={model}")
    assert status is Status.FINISHED
    weights = folder.checkpoint(2) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    (base,) = (model / "transformer").glob("*.safetensors")
    whole = base.read_bytes()
    base.write_bytes(whole[: len(whole) // 2] + bytes(byte ^ 1 for byte in whole[len(whole) // 2 :]))
    with pytest.raises(ConfigError, match="other weights than this checkpoint was trained on") as caught:
        live.resume(folder.path, "steps=3")
    assert "checkpoint.other_base_weights=true" in str(caught.value) and "\n" not in str(caught.value)
    base.write_bytes(whole)
    capsys.readouterr()
    assert live.resume(folder.path, "steps=3") is Status.FINISHED
    told = capsys.readouterr().err.splitlines()
    assert "step_000002: is damaged: weights.safetensors has" in told[0]
    assert told[1] == f"resuming from {folder.checkpoint(1)}"
    assert trained(folder, 3) == trained(live.finished("mode=colocated"), 3)
    assert metric(folder, "step") == [0, 1, 2]


def test_two_processes_do_not_train_in_one_folder(live: LiveRuns) -> None:
    folder = live.finished("mode=colocated")
    before = folder.config.read_text(), folder.run.read_text()
    with folder.locked(), pytest.raises(ConfigError, match=f"process {os.getpid()} is training in this folder"):
        live.resume(folder.path, "steps=7")
    assert (folder.config.read_text(), folder.run.read_text()) == before


@pytest.mark.parametrize("mode", ["local", "colocated"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_last_good_one_stays(
    mode: str, live: LiveRuns
) -> None:
    run = live.new_path()

    def fill_the_disk() -> None:
        """A file lies where the next checkpoint would be written."""
        wait_for(lambda: (run / "checkpoints" / "step_000002").is_dir(), "a checkpoint")
        for step in range(3, 60):
            (run / "checkpoints" / f".saving-step_{step:06d}").touch()

    with Meanwhile(run, fill_the_disk), pytest.raises(RunFailedError) as caught:
        live.run(f"mode={mode}", "steps=60", "checkpoint.every=1", "checkpoint.keep=60", out=run)
    message, advice = str(caught.value).splitlines()
    assert "could not be saved: Not a directory; the last good checkpoint is" in message
    assert "resume with: digenrl train --resume" in advice
    good = Path(message.rpartition(" is ")[2])
    assert good.is_dir()
    assert RunFolder.open(run).info.status is Status.FAILED
    assert_nothing_is_left(run)
    for left in (run / "checkpoints").glob(".saving-*"):
        left.unlink() if left.is_file() else None
    steps = int(good.name.removeprefix("step_")) + 1
    assert live.resume(run, f"steps={steps}", "mode=colocated") is Status.FINISHED


def test_help_needs_no_settings_and_the_driver_no_torch() -> None:
    look = (
        "import sys, digenrl.cli;"
        "heavy = {'omegaconf', 'digenrl.config.profiles', 'digenrl.config.recipes', 'digenrl.config.rewards',"
        " 'digenrl.config.spec', 'digenrl.records', 'digenrl.scheduling'} & sys.modules.keys();"
        "import digenrl.commands.train;"
        "heavy |= {'torch', 'diffusers', 'transformers', 'safetensors'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_the_fork_server_finds_the_modules_that_it_loads() -> None:
    modules = [*processes.PRELOADED_MODULES, processes.LAST_PRELOADED_MODULE]
    own = [name for name in modules if name.startswith("digenrl.")]
    assert len(own) == 3 and all(map(find_spec, own)), "it would go on without them"
