"""What commands print does not depend on who reads it, and never ends them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.support.examples import EXAMPLES
from digenrl.commands.support.output import print_written
from digenrl.commands.support.output_folders import new_folder
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.config.spec import Spec
from digenrl.simulation import ladder
from digenrl.simulation.simulator import SimulatedRun, simulate
from digenrl.worker.checks.preflight import inspect

PRINTS = """
import sys
from pathlib import Path
from typing import Any
from digenrl import __main__
from digenrl.commands.support.output import out
import digenrl.cli

def run():
    for number in range(6_000):  # more than a pipe holds
        out.print("a line of text")
    print("survived", file=sys.stderr)

digenrl.cli.main = run
__main__.main()
"""


def test_a_reader_that_leaves_does_not_end_a_command() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr.read() == "survived\n"
    command.stderr.close()
    assert command.wait() == 0


def test_what_the_encoding_of_the_output_lacks_is_escaped() -> None:
    code = "import digenrl.cli, digenrl.__main__ as it; digenrl.cli.main = lambda: print('röt'); it.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "r\\xf6t\n"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("sys.modules['PIL'] = None", r"digenrl: .*'PIL', which is not installed; install digenrl\[train\]"),
        ("sys.modules['fcntl'] = None; sys.platform = 'win32'", "digenrl: .*WSL"),
    ],
)
def test_what_an_installation_lacks_is_one_line(before: str, words: str) -> None:
    code = f"import sys; {before}; sys.argv[1:] = ['train', 'demo']; import digenrl.__main__ as it; it.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(f"{words}.*\n", done.stderr)


def test_packages_that_cannot_be_imported_are_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: ForkServerProcess) -> None:
        raise EOFError  # the fork server, which imports them, has ended

    monkeypatch.setattr(ForkServerProcess, "start", start)
    with pytest.raises(ConfigError, match=r"cannot be imported.*digenrl\[train\]"):
        inspect(read_recipe("demo", []))


def test_libraries_send_no_usage_data_unless_asked_to() -> None:
    code = "import os, digenrl; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    unset = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    for environment, expected in ((unset, "1\n"), ({**unset, "ORT_DISABLE_TELEMETRY": "0"}, "0\n")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == expected


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("simulate --chaos 1 --trace run.json", "--chaos: .*--trace"),
        ("simulate --chaos 1 --unpacked 2", "--chaos: .*--unpacked"),
        ("simulate docs/specs/gap.yaml --trace both.svg --gantt ./both.svg", "--trace and --gantt: .*both.svg"),
        ("simulate docs/specs/gap.yaml --gantt docs/../docs/specs/gap.yaml", "--gantt: .*gap.yaml is a file that"),
        (
            "plan demo --cluster examples/cluster_measured.yaml --out examples/cluster_measured.yaml --force",
            "--out",
        ),
        ("simulate --chaos 3 --budget 1", "--chaos: .*--budget"),
        ("simulate --profile h200_sd3 --budget 1", "--budget: .*SPEC"),
        ("simulate docs/specs/gap.yaml --force", "--force: .*--gantt"),
        ("prompts --count 3", "--count: .*prompt set"),
        ("prompts --split foo", "--split: .*prompt set"),
        ("prompts --seed 0", "--seed: .*prompt set"),
        ("prompts ocr_signs --force", "--force: .*--out"),
        ("simulate --chaos 1 --only 99", "--only: seed 0 has no fault 99; known: 0, 1"),
        ("profile demo --out cpu.json", "--out: .*cpu.json.*.yaml"),
        ("profile demo --out cpu", "--out: .*cpu.*.yaml"),
        ("probe --out cluster.json", "--out: .*cluster.json.*.yaml"),
        ("plan demo --cluster examples/cluster_small.yaml --spec spec.json", "--spec: .*spec.json.*.yaml"),
    ],
)
def test_output_that_could_not_be_written_or_read_again_is_refused_before_any_work(
    command: str, words: str
) -> None:
    error = CliRunner().invoke(app, command.split()).exception
    assert isinstance(error, ConfigError)
    assert re.match(words, str(error))


@pytest.mark.parametrize(
    ("command", "noun"),
    [
        ("plan demo --cluster absent.yaml", "absent.yaml"),
        ("plan demo --cluster {cluster} --objective speed", "--objective"),
        ("plan demo --cluster {cluster} --objective cost", "price"),
        ("plan demo --cluster {cluster} --stale-share 2", "--stale-share"),
        ("plan demo --cluster {cluster} --ranks 99", "--ranks"),
        ("plan demo --cluster {cluster}", "plan.yaml: exists"),
        ("probe --address nonsense", "nonsense"),
        ("probe", "cluster.yaml: exists"),
    ],
)
def test_a_file_that_exists_is_reported_after_mistakes_in_what_is_read(
    command: str, noun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Path("examples/cluster_measured.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    for name in ("plan.yaml", "cluster.yaml"):
        (tmp_path / name).write_text("mine")
    error = CliRunner().invoke(app, command.format(cluster=cluster).split()).exception
    assert isinstance(error, ConfigError) and noun in str(error)


@pytest.mark.parametrize(
    "command",
    [
        "profile demo.yaml --out demo.yaml --force",
        "simulate spec.yaml --gantt profile.yaml --force",
        "simulate --profile profile.yaml --trace profile.yaml --force",
        "plan demo --cluster cluster.yaml --out profile.yaml --force",
        "plan demo --cluster cluster.yaml --spec cluster.yaml --force",
        "simulate spec.yaml --trace kept.json",
        "simulate spec.yaml --gantt kept.svg",
        "check demo --out kept.png",
    ],
)
def test_commands_replace_no_input_and_without_force_no_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = b"profile: profile.yaml\n" + Path("docs/specs/gap.yaml").read_bytes()
    contents = {
        "profile.yaml": Path("digenrl/profiles/h200_sd3.yaml").read_bytes(),
        "demo.yaml": Path("digenrl/recipes/demo.yaml").read_bytes(),
        "spec.yaml": spec,
        "cluster.yaml": b"pools: [{profile: profile.yaml, nodes: 1, per_node: 2}]",
        **dict.fromkeys(("kept.json", "kept.svg", "kept.png"), b"kept"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, command.split()).exception
    assert isinstance(error, ConfigError)
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents


def test_a_missing_argument_or_option_is_answered_with_an_example() -> None:
    for name, example in EXAMPLES.items():
        words = example.removeprefix("digenrl ").split()
        given = words[: words.index(name) + 1]
        refused = CliRunner().invoke(app, given)
        assert refused.exit_code == 2 and example in refused.stderr
    assert EXAMPLES["export"] in CliRunner().invoke(app, ["export", "runs/demo-1"]).stderr
    assert EXAMPLES["plan"] in CliRunner().invoke(app, ["plan", "demo"]).stderr


def test_every_command_with_required_arguments_has_an_example() -> None:
    root: Any = get_command(app)
    commands = root.commands | root.commands["reward"].commands
    assert {name for name, each in commands.items() if any(p.required for p in each.params)} == set(EXAMPLES)


def test_the_ladder_has_the_search_budget_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = set()

    def simulated(spec: Spec, budget: int) -> SimulatedRun:
        budgets.add(budget)
        return simulate(spec.with_rules(help="none"), budget)

    monkeypatch.setattr(ladder, "simulate", simulated)
    assert CliRunner().invoke(app, ["simulate", "docs/specs/gap.yaml", "--ladder", "--budget", "7"]).exit_code == 0
    assert budgets == {7}


def test_a_name_in_brackets_is_printed(tmp_path: Path) -> None:
    spec = Path("docs/specs/gap.yaml").read_text(encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(spec.replace("name: gen", "name: '[lab]'"), encoding="utf-8")
    assert "4 [lab]: 4 prompts" in CliRunner().invoke(app, ["simulate", str(tmp_path / "spec.yaml")]).stdout


def test_brackets_in_a_path_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("runs", "[red]cats", "[/x] :cat:")
    print_written(path)
    assert capsys.readouterr().out == f"wrote {path}\n"


def test_a_file_is_not_a_folder_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ConfigError, match="notes: is a file"), new_folder(tmp_path / "notes", tmp_path, "name"):
        pass
