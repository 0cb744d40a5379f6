"""The command line, used correctly and incorrectly; in its own process where that could matter."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "video_mixed.yaml"
SMALL = {
    "steps": 1,
    "prompts": 2,
    "samples_per_prompt": 4,
    "slice": 2,
    "generators": [{"name": "a100", "count": 2, "seconds": {1: 1.0, 2: 1.7}}],
    "trainer": {"seconds_per_sample": 0.5},
}
HELPER = {"seconds_per_sample": 0.5, "helper": {"lanes": 1, "seconds": {2: 2.0}}}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


def digenrl(*arguments: object, cwd: Path | None = None, **environment: str) -> Outcome:
    """Calls the entry point in this process, as starting a process takes a second."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["digenrl", *map(str, arguments)])
        for name, value in environment.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as left:
            main()
    assert isinstance(left.value.code, int)
    return Outcome(left.value.code, out.getvalue(), err.getvalue())


def digenrl_in_a_process(*arguments: object, cwd: Path | None = None) -> Outcome:
    """Calls the entry point in a new process."""
    command = [sys.executable, "-c", "from digenrl.cli import main; main()", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, env=environment)
    return Outcome(done.returncode, done.stdout, done.stderr)


def spec_file(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def complaint(result: Outcome) -> str:
    """The one line on stderr of a command that was refused."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_simulate_prints_a_table_and_a_gantt_chart() -> None:
    result = digenrl_in_a_process("simulate", EXAMPLE)
    assert result.returncode == 0, result.stderr
    for word in ("makespan", "efficiency", "h100-0", "trainer", "helper-0"):
        assert word in result.stdout


def test_simulate_says_who_did_what_where_every_card_generates_and_trains(tmp_path: Path) -> None:
    generators = [{"name": "h100", "count": 2, "seconds": {2: 2.0}, "train_seconds": 0.5}]
    both = spec_file(tmp_path, generators=generators, trainer=HELPER, policy={"help": "auto", "assist": "both"})
    result = digenrl("simulate", both)
    assert result.returncode == 0, result.stderr
    assert "every card generates and trains" in " ".join(result.stdout.split())
    assert "bubbles" not in result.stdout
    table = result.stdout.partition("Who did what")[2].splitlines()
    counts = {
        words[0]: [0 if each == "-" else int(each) for each in words[1:4]] for words in map(str.split, table[2:4])
    }
    samples = SMALL["steps"] * SMALL["prompts"] * SMALL["samples_per_prompt"]
    assert {name: lanes for name, (lanes, _, _) in counts.items()} == {"h100": 2, "trainer": 1}
    assert [sum(count[place] for count in counts.values()) for place in (1, 2)] == [samples, samples]
    assert counts["h100"][2] > 0
    assert "Who did what" not in digenrl("simulate", spec_file(tmp_path)).stdout


def test_simulate_answers_in_json_with_the_documented_keys() -> None:
    answer = json.loads(digenrl("simulate", EXAMPLE, "--json").stdout)
    assert set(answer) == {
        "makespan", "step_end", "throughput", "bound", "efficiency", "generator_idle", "trainer_idle",
        "stale_samples", "helped_samples", "assisted_samples", "help_decisions",
    }  # fmt: skip
    assert answer["efficiency"] == pytest.approx(answer["bound"] / answer["makespan"])
    assert len(answer["step_end"]) == 4


def test_a_json_spec_gives_the_answer_of_the_same_yaml_spec(tmp_path: Path) -> None:
    as_yaml = spec_file(tmp_path)
    as_json = tmp_path / "spec.json"
    as_json.write_text(json.dumps(SMALL))
    answers = [digenrl("simulate", path, "--json").stdout for path in (as_yaml, as_json)]
    assert answers[0] == answers[1] != ""


def test_simulate_writes_a_trace_and_a_gantt_chart(tmp_path: Path) -> None:
    trace, gantt = tmp_path / "trace.json", tmp_path / "lanes.svg"
    assert digenrl("simulate", EXAMPLE, "--trace", trace, "--gantt", gantt).returncode == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert gantt.read_text().startswith("<svg")
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "lanes.svg"}


def test_the_ladder_has_all_rungs_in_order() -> None:
    rows = json.loads(digenrl("simulate", EXAMPLE, "--ladder", "--unpacked", "3", "--json").stdout)
    assert [row["rung"] for row in rows] == ["colocated", "naive", "+GAP", "+TSP", "+TAG", "+TCSS"]
    times = [row["answer"]["makespan"] for row in rows]
    assert times[1:] == sorted(times[1:], reverse=True)


def test_the_ladder_notes_what_a_spec_without_a_helper_cannot_show(tmp_path: Path) -> None:
    result = digenrl("simulate", spec_file(tmp_path), "--ladder")
    assert result.returncode == 0
    assert "colocated: needs trainer.helper" in result.stdout


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"promts": 3}, "promts: "),
        ({"policy": {"stale_faction": 0.5}}, "policy.stale_faction: "),
        ({"slice": 3}, "slice: 3"),
        ({"generators": []}, "generators: "),
        ({"generators": [{"count": 0, "seconds": {1: 1}}]}, "generators[0].count"),
        ({"generators": [{"seconds": {1: 0}}]}, "generators[0].seconds[1]: "),
        ({"generators": [{"seconds": {1: 2.0, 2: 1.0}}], "slice": 4}, "-1000000000 ns"),
        ({"trainer": {"seconds_per_sample": 0}}, "trainer.seconds_per_sample"),
        ({"trainer": {"seconds_per_sample": 1, "commit": -1}}, "trainer.commit"),
        ({"policy": {"help": "greedy"}}, "policy.help: "),
        ({"policy": {"colocated": True}}, "policy.colocated: "),
        ({"policy": {"stale_fraction": 1.5}}, "policy.stale_fraction"),
        ({"steps": None}, "steps"),
    ],
)
def test_an_invalid_spec_is_one_line_that_names_the_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    line = complaint(digenrl("simulate", spec_file(tmp_path, **changes), "--json"))
    assert key in line
    assert "spec.yaml" in line or "ns" in line


def test_help_auto_without_a_helper_is_no_help(tmp_path: Path) -> None:
    answers = [
        digenrl("simulate", spec_file(tmp_path, policy={"help": policy}), "--json").stdout
        for policy in ("auto", "none")
    ]
    assert answers[0] == answers[1] != ""


def test_a_missing_file_or_folder_is_an_error_before_any_work(tmp_path: Path) -> None:
    assert "cannot be read" in complaint(digenrl_in_a_process("simulate", tmp_path / "none.yaml"))
    nowhere = tmp_path / "nowhere" / "x.svg"
    assert "no such folder" in complaint(digenrl("simulate", EXAMPLE, "--gantt", nowhere))


def test_invalid_yaml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("steps: [1, 2\nprompts: }")
    assert "not valid YAML" in complaint(digenrl("simulate", path))
    path.write_text("just words")
    assert "expected a mapping" in complaint(digenrl("simulate", path))


def test_plan_writes_a_spec_that_simulates(tmp_path: Path) -> None:
    result = digenrl(
        "plan", "--model", "wan2.1-1.3b", "--cluster", ROOT / "examples/cluster_small.yaml", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "Plans, best first" in result.stdout
    assert digenrl("simulate", tmp_path / "plan.yaml", "--json").returncode == 0


def test_plan_overwrites_a_file_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("mine")
    arguments = ("plan", "--model", "sd3.5", "--cluster", ROOT / "examples/cluster_small.yaml")
    assert "--force" in complaint(digenrl(*arguments, cwd=tmp_path))
    assert (tmp_path / "plan.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--model", "flux2"), "flux2"),
        (("--model", "flux.1", "promts=3"), "'prompts'"),
        (("--model", "flux.1", "prompts"), "KEY=VALUE"),
        (("--model", "flux.1", "prompts=0"), "prompts"),
        (("--model", "flux.1", "--objective", "speed"), "throughput, cost"),
        (("--model", "flux.1", "--stale-share", "2"), "--stale-share"),
        (("--model", "flux.1", "--stale-share", "0", "--on-policy"), "--on-policy and --stale-share"),
        (("--model", "flux.1", "--out", "x.yaml"), "--out"),
        (("--model", "flux.1", "wan_flow_grpo"), "--model and 'wan_flow_grpo'"),
        ((), "--model"),
        (("batch.prompts=4",), "recipe"),
        (("wan_flow_gpo",), "'wan_flow_grpo'"),
        (("wan_flow_grpo", "batch.promts=4"), "'batch.prompts'"),
        (("wan_flow_grpo", "--ranks", "8"), "8 "),
        (("wan_flow_grpo", "--spec", "plan.yaml"), "--out and --spec"),
    ],
)
def test_invalid_arguments_of_plan_are_one_line(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    cluster = ROOT / "examples" / "cluster_small.yaml"
    assert word in complaint(digenrl("plan", "--cluster", cluster, *arguments, cwd=tmp_path))


def test_the_plan_of_a_recipe_is_written_with_its_spec_and_the_command_that_starts_it(tmp_path: Path) -> None:
    cluster = ROOT / "examples" / "cluster_measured.yaml"
    result = digenrl("plan", "demo", "seed=1", "--cluster", cluster, "--spec", "spec.yaml", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "digenrl train demo seed=1 --plan plan.yaml" in result.stdout
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert (plan["mode"], plan["plan"]["recipe"]) == ("ray", "demo")
    answer = json.loads(digenrl("simulate", tmp_path / "spec.yaml", "--json").stdout)
    assert answer["throughput"] == pytest.approx(plan["plan"]["predicted"]["samples_per_second"], rel=1e-3)


def test_a_plan_for_other_work_and_a_file_that_is_not_a_plan_are_refused_before_training(tmp_path: Path) -> None:
    cluster = ROOT / "examples" / "cluster_measured.yaml"
    planned = json.loads(digenrl("plan", "demo", "--cluster", cluster, "--json", cwd=tmp_path).stdout)
    assert planned["overlay"] == yaml.safe_load((tmp_path / "plan.yaml").read_text())
    train = ("train", "demo", "--plan", "plan.yaml")
    assert "prompts = 8" in complaint(digenrl(*train, "batch.prompts=4", cwd=tmp_path))
    assert "--plan: " in complaint(digenrl("train", "--resume", "run", "--plan", "plan.yaml", cwd=tmp_path))
    assert "demo: a run is resumed with its own" in complaint(
        digenrl("train", "demo", "--resume", "r", cwd=tmp_path)
    )
    planned["overlay"]["lanes"] = {"rank": 2}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(planned["overlay"]))
    line = complaint(digenrl(*train, cwd=tmp_path))
    assert "plan.yaml: lanes.rank=2: " in line and "'lanes.ranks'" in line
    assert EXAMPLE.name in complaint(digenrl("train", "demo", "--plan", EXAMPLE, cwd=tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_cluster_too_small_for_the_model_is_one_line(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("pools: [{card: RTX 4090, nodes: 1, per_node: 2}]")
    line = complaint(digenrl("plan", "--model", "qwen-image", "--cluster", cluster, "tuning=full", cwd=tmp_path))
    assert "Qwen-Image" in line
    assert not (tmp_path / "plan.yaml").exists()


def test_simulating_and_planning_load_neither_torch_nor_ray(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'ray', 'numpy', 'diffusers', 'transformers']))\n"
        "import digenrl.scheduling\n"
        "from digenrl.cli import main\n"
        "main()\n"
    )
    plan = ("plan", "demo", "--cluster", str(ROOT / "examples" / "cluster_measured.yaml"))
    for words, key in ((("simulate", str(EXAMPLE)), "makespan"), (plan, "considered")):
        command = [sys.executable, "-c", script, *words, "--json"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)[key] > 0


def test_the_example_by_hand_trains_and_prints_the_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples" / "rl_by_hand.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps", "2"])
    runpy.run_path(script, run_name="__main__")
    assert "mean reward of the first 1 steps" in capsys.readouterr().out


def test_make_tiny_writes_a_pipeline_and_invalid_arguments_are_one_line(tmp_path: Path) -> None:
    assert digenrl("make-tiny", "sd3", tmp_path / "tiny").returncode == 0
    assert (tmp_path / "tiny" / "model_index.json").exists()
    assert "'sd3'" in complaint(digenrl("make-tiny", "sd4", tmp_path / "other"))
    assert "tiny" in complaint(digenrl("make-tiny", "sd3", tmp_path / "tiny"))


def test_invalid_arguments_of_reward_serve_are_one_line() -> None:
    assert "'ocr'" in complaint(digenrl("reward", "serve", "ocrr"))
    assert "token" in complaint(digenrl("reward", "serve", "ocr", "--host", "0.0.0.0", DIGENRL_REWARD_TOKEN=""))
    pem = ("--certificate", __file__, "--key", "kye.pem", "--env", "never-built")
    assert "--key kye.pem: no such file" in complaint(digenrl("reward", "serve", "ocr", *pem))
    assert "--token-env TOKNE: there is no" in complaint(digenrl("reward", "serve", "ocr", "--token-env", "TOKNE"))
    host_and_port = complaint(digenrl("reward", "serve", "ocr", "--host", "127.0.0.1:8790"))
    assert "--host 127.0.0.1:8790 --port 8790: cannot listen on this address" in host_and_port
