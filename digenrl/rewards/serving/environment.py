"""Virtual environments for rewards whose packages conflict with the trainer's. Needs no torch.

An environment is complete or counts as absent: its description is written last, and building it holds a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import requires
from pathlib import Path
from platform import python_version

import digenrl
from digenrl.config.reading import ConfigError
from digenrl.config.rewards.base import RewardSettings

DESCRIPTION = "digenrl.json"
SERVER_PACKAGES = ("torch", "numpy", "pillow")  # without ranges: a reward may need old versions
SERVER_EXTRA = 'extra == "serve"'


@dataclass(frozen=True, slots=True)
class RewardEnvironment:
    """What is installed. With `inherit`, packages of the running environment stay visible beneath the own ones."""

    packages: tuple[str, ...]
    inherit: bool = False
    python: str = python_version()

    @classmethod
    def of(cls, rewards: Sequence[RewardSettings], inherit: bool) -> RewardEnvironment:
        """The environment in which these rewards can be served."""
        own = [package for reward in rewards for package in reward.packages]
        base = [] if inherit else [*SERVER_PACKAGES, *_requirements_of_the_server()]
        return cls(tuple(dict.fromkeys([*own, *base])), inherit)


def prepare(
    folder: Path, wanted: RewardEnvironment, rebuild: bool, notify: Callable[[str], None] = lambda message: None
) -> Path:
    """Builds the environment in `folder` unless it is there; returns its Python. Raises ConfigError if it cannot.

    Processes that prepare the same folder wait for each other.
    """
    folder = folder.expanduser().absolute()
    with _locked(folder):
        if rebuild and _is_ours(folder):
            shutil.rmtree(folder)
        found = _read_description(folder)
        if found is None:
            _build(folder, wanted, notify)
        elif found != wanted:
            raise ConfigError(
                f"--env: {folder} was built for {_words(found)}, not for {_words(wanted)}; "
                "name another folder, or replace it with --rebuild"
            )
    return _python(folder)


def variables() -> dict[str, str]:
    """The variables for a process in an environment: without those that add packages from elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "PYTHONNOUSERSITE": "1"}


def _build(folder: Path, wanted: RewardEnvironment, notify: Callable[[str], None]) -> None:
    if folder.exists() and not _is_ours(folder) and any(folder.iterdir()):
        raise ConfigError(f"--env: {folder} is not empty and is not a DigenRL environment; name a new folder")
    notify(f"building {folder}: {', '.join(wanted.packages) or 'no additional packages'}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, symlinks=True)
        (folder / DESCRIPTION).touch()  # empty until the environment is complete
        _fill(folder, wanted)
        (folder / DESCRIPTION).write_text(json.dumps(asdict(wanted), indent=1) + "\n", encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--env: {folder} cannot be written: {error.strerror or error}") from None
        raise


def _fill(folder: Path, wanted: RewardEnvironment) -> None:
    """The running DigenRL, the packages, and in the end a trial: the server's modules must import."""
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (own / "digenrl").symlink_to(Path(digenrl.__file__).parent)
    if wanted.inherit:
        ours = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (own / "inherited.pth").write_text("".join(f"{path}\n" for path in ours), encoding="utf-8")
    if wanted.packages:
        # The running pip: one less to install.
        pip = [sys.executable, "-m", "pip", "--python", str(_python(folder)), "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", *wanted.packages], "the packages cannot be installed")
    _run(
        [str(_python(folder)), "-c", "import digenrl.rewards.serving.server"],
        "the server cannot run with these packages",
    )


def _run(command: Sequence[str], failure: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    if ended.returncode == 0:
        return
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or [f"status {ended.returncode}"]
    raise ConfigError(f"--env: {failure}: {' '.join(reasons).replace('ERROR: ', '')}")


def _requirements_of_the_server() -> Iterator[str]:
    """DigenRL's own requirements and those of its extra `serve`."""
    for requirement in requires("digenrl") or ():
        package, _, condition = requirement.partition(";")
        if not condition or condition.strip() == SERVER_EXTRA:
            yield package.strip()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError(f"--env: {folder} cannot be written: {error.strerror or error}") from None


def _is_ours(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def _read_description(folder: Path) -> RewardEnvironment | None:
    """The environment in this folder; None if there is none that is complete."""
    try:
        content = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return RewardEnvironment(tuple(content["packages"]), bool(content["inherit"]), str(content["python"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _words(environment: RewardEnvironment) -> str:
    inherited = " over this environment" if environment.inherit else ""
    return f"{', '.join(environment.packages) or 'no packages'}{inherited} (Python {environment.python})"
