"""Whether all machines of a cluster have the same code: versions of packages, and DigenRL's own source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from digenrl.config.reading import ConfigError
from digenrl.transports.ray.capacity import ClusterFacts, NodeFacts

ADVICE = "install the same on all machines"
SOURCE = "DigenRL's source"


def check_versions(cluster: ClusterFacts, timeout_s: float, here: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for the first machine that has other code than this one, or does not say what it has."""
    expected = dict(here or _probe()())
    ask = ray.remote(num_cpus=0, max_retries=0)(_probe())
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(): node
        for node in cluster.nodes
    }
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    for reference in answered:
        _check(asked[reference], _answer(reference, asked[reference]), expected)
    for reference in silent:
        ray.cancel(reference, force=True)
    if silent:
        node = asked[silent[0]]
        raise ConfigError(
            f"{_called(node)} does not answer, asked for {timeout_s:g} s; see `ray status`, or stop Ray on it"
        )


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first thing that is not the same, in words."""
    for name, expected in here.items():
        found = there.get(name, "none")
        if found != expected:
            return f"{name} {found}, here it is {expected}"
    return None


def _check(node: NodeFacts, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    if SOURCE not in there:
        raise ConfigError(f"{_called(node)} has no DigenRL installed; {ADVICE}")
    differs = difference(there, here)
    if differs is not None:
        raise ConfigError(f"{_called(node)} has {differs}; {ADVICE}")


def _answer(reference: Any, node: NodeFacts) -> dict[str, str]:
    try:
        answer: dict[str, str] = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{_called(node)} cannot run anything: {reason}; {ADVICE}") from error
    return answer


def _called(node: NodeFacts) -> str:
    return f"cluster: the machine {node.address} (node {node.id[:8]})"


def _probe() -> Callable[[], dict[str, str]]:
    """A function that needs nothing of DigenRL where it runs: it is sent as it is, not by its name."""

    def probe() -> dict[str, str]:
        import hashlib
        import platform
        from importlib import metadata, util
        from pathlib import Path

        def version(package: str) -> str:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                return "none"

        packages = ("ray", "torch", "diffusers", "transformers", "peft")
        found = {"Python": ".".join(platform.python_version_tuple()[:2])}
        found |= {package: version(package) for package in packages}
        spec = util.find_spec("digenrl")
        if spec is None or spec.origin is None:
            return found
        source, digest = Path(spec.origin).parent, hashlib.sha256()
        for path in sorted(source.rglob("*.py")):
            digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
        return {"digenrl": version("digenrl"), SOURCE: digest.hexdigest()[:12]} | found

    return probe
