"""A user's reward in a separate process: it can hang, crash or use up its memory without harm to the worker.

The process gets pixels and prompts through a pipe and returns numbers; nothing is pickled. It does not inherit
environment variables that look like secrets. The child's side is `isolated_child`.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import FunctionSettings
from digenrl.rewards.contract import SOURCE_IMAGES, Metadata, Reward, RewardBatch, RewardError

START_TIMEOUT_S = 600.0  # imports and loads models
EXIT_TIMEOUT_S = 10.0  # of a process that has closed its pipe
SECRET = re.compile(
    r"TOKENS?(_|$)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|(^|_)KEYS?(_|$)", re.IGNORECASE
)
_LENGTH = struct.Struct("<Q")


class IsolatedReward(Reward):
    """Starts the process when it is built, and again after it had to be killed."""

    def __init__(self, settings: FunctionSettings) -> None:
        super().__init__(settings.shown_as)
        self._settings = settings
        self._starter = ThreadPoolExecutor(1)  # Linux ends the process with the thread that has started it
        self._process = self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        if self._process.poll() is not None:
            self._process = self._start()
        pixels = [pixels_BFCHW, *(image for one in metadata for image in one.get(SOURCE_IMAGES, ()))]
        header = {
            "shape": list(pixels_BFCHW.shape),
            "prompts": list(prompts),
            "metadata": [{key: value for key, value in one.items() if key != SOURCE_IMAGES} for one in metadata],
            "sources": [[list(image.shape) for image in one.get(SOURCE_IMAGES, ())] for one in metadata],
        }
        content = b"".join(each.detach().cpu().float().contiguous().numpy().tobytes() for each in pixels)
        with self._limited(self._settings.timeout_s):
            reply = _exchange(self._process, header, content)
        if "error" in reply:
            raise RewardError(self.label, reply["error"], tuple(reply.get("samples", ())))
        return RewardBatch(tuple(reply["values"]), {name: tuple(part) for name, part in reply["parts"].items()})

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._starter.submit(
            subprocess.Popen,
            [sys.executable, "-m", "digenrl.rewards.serving.isolated_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=without_secrets(os.environ),
        ).result()
        self._process = process
        content = {"settings": self._settings.model_dump(mode="json"), "path": sys.path}
        with self._limited(START_TIMEOUT_S):
            reply = _exchange(process, content, b"")
        if "error" in reply:
            self.close()
            raise ConfigError(reply["error"])
        return process

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """Kills the process if the block takes longer; a process that ended is a RewardError."""
        process, expired = self._process, threading.Event()

        def kill() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            yield
        except (OSError, EOFError, ValueError):
            try:  # it may be ending with a code of its own
                why = f"its process ended with code {process.wait(timeout=EXIT_TIMEOUT_S)}"
            except subprocess.TimeoutExpired:
                why = "its process closed its output and did not end"
                process.kill()
                process.wait()
            if expired.is_set():
                why = f"took longer than {seconds:g} s"
            raise RewardError(self.label, f"{why}; a new process is started for the next batch") from None
        finally:
            timer.cancel()


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names do not suggest that they are secret."""
    return {name: value for name, value in environment.items() if SECRET.search(name) is None}


def send(pipe: IO[bytes], header: Mapping[str, Any], content: bytes = b"") -> None:
    """Writes a JSON object and bytes, each after its length."""
    text = json.dumps(header).encode()
    for part in (_LENGTH.pack(len(text)), text, _LENGTH.pack(len(content)), content):
        pipe.write(part)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Reads what `send` wrote; raises EOFError at the end of the pipe."""
    header = json.loads(_read(pipe))
    return header, _read(pipe)


def _read(pipe: IO[bytes]) -> bytes:
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(length)
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _exchange(process: subprocess.Popen[bytes], header: Mapping[str, Any], content: bytes) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    send(process.stdin, header, content)
    return receive(process.stdout)[0]
