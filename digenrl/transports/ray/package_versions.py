"""Checks that all machines of a cluster have the same packages, and the same source of DigenRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from digenrl.config.reading import ConfigError, one_line
from digenrl.transports.ray.capacity import ClusterResources, NodeResources

ADVICE = "install the same on all machines"
SOURCE = "DigenRL's source"


def check_versions(cluster: ClusterResources, timeout_s: float, expected: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for the first machine whose code differs from `expected`, or that does not answer.

    Versions of this machine are expected by default.
    """
    expected = expected or versions_here()
    read = ray.remote(num_cpus=0, max_retries=0)(_version_reader())
    nodes = {
        read.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(): node
        for node in cluster.nodes
    }
    answered, silent = ray.wait(list(nodes), num_returns=len(nodes), timeout=timeout_s)
    for reference in answered:
        _check_node(nodes[reference], _get_versions(reference, nodes[reference]), expected)
    for reference in silent:
        ray.cancel(reference, force=True)
    if silent:
        raise ConfigError(
            f"{_describe(nodes[silent[0]])} does not answer within {timeout_s:g} s; raise cluster.start_timeout_s "
            "if it is slow, see `ray status`, or stop Ray on it"
        )


def versions_here() -> dict[str, str]:
    """The versions of the packages on this machine, and a checksum of DigenRL's source."""
    return _version_reader()()


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """What another machine has in another version, for a message of this one; empty if there is nothing."""
    for name, version in expected.items():
        if found.get(name, "none") != version:
            return f"has {name} {found.get(name, 'none')}, this machine has {version}; {ADVICE}"
    return ""


def _check_node(node: NodeResources, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    if SOURCE not in found:
        raise ConfigError(f"{_describe(node)} has no DigenRL installed; {ADVICE}")
    if other := difference(found, expected):
        raise ConfigError(f"{_describe(node)} {other}")


def _get_versions(reference: Any, node: NodeResources) -> dict[str, str]:
    try:
        versions: dict[str, str] = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise ConfigError(f"{_describe(node)} cannot run anything: {one_line(error)[:200]}; {ADVICE}") from error
    return versions


def _describe(node: NodeResources) -> str:
    return f"cluster: the machine {node.address} (node {node.id[:8]})"


def _version_reader() -> Callable[[], dict[str, str]]:
    """A function that runs on machines without DigenRL: a nested function is sent by value, not by name."""

    def read_versions() -> dict[str, str]:
        import hashlib
        import platform
        from importlib import metadata, util
        from pathlib import Path

        def version(package: str) -> str:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                return "none"

        packages = ("ray", "torch", "diffusers", "transformers", "peft", "zstandard")
        versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
        versions |= {package: version(package) for package in packages}
        spec = util.find_spec("digenrl")
        if spec is None or spec.origin is None:
            return versions
        source, digest = Path(spec.origin).parent, hashlib.sha256()
        for path in sorted(source.rglob("*.py")):
            digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
        return {"digenrl": version("digenrl"), SOURCE: digest.hexdigest()[:12]} | versions

    return read_versions
