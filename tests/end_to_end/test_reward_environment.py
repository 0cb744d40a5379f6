"""`digenrl reward serve --env`: a reward in a virtual environment of its own, built from wheels made here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from reward_serving import TOKEN

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import HttpSettings, parse_rewards
from digenrl.rewards.http import HttpReward
from digenrl.rewards.serving.environment import RewardEnvironment, prepare

# The trainer's environment has another version of `six`.
VERSION = "99.5"
REWARD = """
import six

def version(pixels, prompts, metadata):
    return [float(six.__version__)] * len(pixels)
"""
NEEDS_SIX = {"name": "versions:version", "requirements": [f"six=={VERSION}"]}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, from which alone pip installs."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    about = f"six-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"six-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("six.py", f'__version__ = "{VERSION}"\n')
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: six\nVersion: {VERSION}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", f"six.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(name, value)
    return folder


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """The command in a process of its own, from its start until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from digenrl.cli import main; main()", "reward", "serve"]
    command += [json.dumps(NEEDS_SIX), "--port", str(port), *options]
    environment = {**os.environ, "DIGENRL_REWARD_TOKEN": TOKEN}
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process)
            yield url
        finally:
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            httpx.get(f"{url}/health")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server does not answer")


def test_one_of_two_builds_the_environment_serves_the_reward_and_other_packages_need_a_rebuild(
    tmp_path: Path,
) -> None:
    (tmp_path / "versions.py").write_text(REWARD)
    folder, pixels, told = tmp_path / "env", torch.rand(2, 1, 3, 8, 8), list[str]()
    wanted = RewardEnvironment.of(parse_rewards([NEEDS_SIX]), inherit=True)
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda _: prepare(folder, wanted, False, told.append), range(2)))
    assert len(set(paths)) == len(told) == 1
    built = (folder / "pyvenv.cfg").stat().st_mtime_ns
    with served(tmp_path, "--env", str(folder), "--inherit") as url:
        batch = HttpReward(HttpSettings(url=url), TOKEN).score(pixels, ["a", "b"], [{}, {}])
    assert batch.values == (float(VERSION),) * 2
    assert (folder / "pyvenv.cfg").stat().st_mtime_ns == built, "built once"
    absent = RewardEnvironment(("six==98",), inherit=True)
    with pytest.raises(ConfigError, match=r"six==98.*--rebuild"):
        prepare(folder, absent, rebuild=False)
    assert paths[0].exists()
    with pytest.raises(ConfigError, match="six==98") as caught:
        prepare(folder, absent, rebuild=True)
    assert "\n" not in str(caught.value)
    assert not folder.exists(), "what is incomplete is removed"


def test_the_server_must_run_with_the_packages(tmp_path: Path, wheels: Path) -> None:
    broken = wheels / "fastapi-1-py3-none-any.whl"
    with zipfile.ZipFile(broken, "w") as wheel:
        wheel.writestr("fastapi/__init__.py", "raise ImportError('an incompatible release')\n")
        wheel.writestr("fastapi-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: fastapi\nVersion: 1\n")
        wheel.writestr(
            "fastapi-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("fastapi-1.dist-info/RECORD", "")
    with pytest.raises(ConfigError, match="an incompatible release"):
        prepare(tmp_path / "env", RewardEnvironment(("fastapi==1",), inherit=True), rebuild=False)
    assert not (tmp_path / "env").exists()


def test_a_folder_with_other_content_is_kept(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not empty"):
        prepare(tmp_path, RewardEnvironment(()), rebuild=True)
    assert (tmp_path / "letter.txt").exists()


def test_without_inheriting_the_server_and_the_rewards_packages_are_installed() -> None:
    environment = RewardEnvironment.of(parse_rewards(["ocr", "clip_score"]), inherit=False)
    names = {package.split(">=")[0].split("==")[0] for package in environment.packages}
    assert {"torch", "pillow", "numpy", "fastapi", "uvicorn", "pydantic", "rapidocr", "transformers"} <= names
    assert "ray" not in names and "diffusers" not in names
