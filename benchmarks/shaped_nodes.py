"""Ray nodes on both sides of a shaped link, for benchmarks. Those on the far side are in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PORT = 6399


@dataclass(frozen=True, slots=True)
class Node:
    """A node of Ray. Without a namespace, it is on the near side."""

    name: str
    host: str
    namespace: str | None = None
    resources: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 1

    def command(self, head: str | None) -> list[str]:
        """The command that starts it, as the head or as a node of this head."""
        inside = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        joined = [f"--address={head}"] if head else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        common = ["--disable-usage-stats", f"--num-cpus={self.cpus}", "--object-store-memory=200000000", "--block"]
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        ray = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", *joined, *common]
        return [
            *ray,
            f"--node-ip-address={self.host}",
            *("--resources", json.dumps(dict(self.resources))),
            *(("--labels", labels) if labels else ()),
        ]


@contextmanager
def ray_environment() -> Iterator[str]:
    """Sets environment variables for Ray; yields a scratch folder."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(16).hex(),
            "RAY_TMPDIR": scratch,
            "RAY_BACKEND_LOG_LEVEL": "error",
            "PYTHONUNBUFFERED": "1",
            "RAY_worker_niceness": "0",
        }
        yield scratch


@contextmanager
def ray_nodes(nodes: Sequence[Node], scratch: str) -> Iterator[str]:
    """Starts nodes, the first of which is the head. Yields its address."""
    address, started = f"{nodes[0].host}:{PORT}", list[subprocess.Popen[str]]()
    try:
        for node in nodes:
            started.append(
                subprocess.Popen(
                    node.command(address if started else None),
                    env={**os.environ, "RAY_TMPDIR": f"{scratch}/{node.name}"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            _wait_for_start(started[-1])
        os.environ["RAY_TMPDIR"] = f"{scratch}/{nodes[0].name}"
        yield address
    finally:
        os.environ["RAY_TMPDIR"] = scratch
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)


def _wait_for_start(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    printed = []
    while "Ray runtime started" not in (line := process.stdout.readline()):
        printed.append(line)
        if not line:
            raise SystemExit("".join(printed))
