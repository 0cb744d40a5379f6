"""Measures the bandwidth between the machines of a Ray cluster, one pair after the other. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

from digenrl.config.reading import ConfigError
from digenrl.transports.ray.capacity import NodeResources

SMALL_BYTES, LARGE_BYTES = 4 << 20, 16 << 20
FAST_S = 0.5  # what arrives within this time is measured again with more bytes
TIMEOUT_S = 120.0  # for 4 MiB: 0.3 Mbit/s
BITS, GIGA = 8, 1e9


def measure_links(
    nodes: tuple[NodeResources, ...], notify: Callable[[str], None] = lambda message: None
) -> dict[frozenset[str], float]:
    """The gbit/s between every two machines, by their names; this process has joined the cluster.

    A link is as fast as the slower of its two directions: many have a slow uplink. Raises ConfigError if a machine
    does not answer.
    """
    links: dict[frozenset[str], float] = {}
    for first, second in combinations(nodes, 2):
        notify(f"measuring {machine_name(first)} - {machine_name(second)}")
        gbit_s = min(_gbit_s(first, second), _gbit_s(second, first))
        links[frozenset((machine_name(first), machine_name(second)))] = gbit_s
    return links


def _gbit_s(sender: NodeResources, receiver: NodeResources) -> float:
    seconds = _transfer_s(sender, receiver, SMALL_BYTES)
    gbit_s = SMALL_BYTES * BITS / GIGA / seconds
    if seconds >= FAST_S:
        return gbit_s
    return max(gbit_s, LARGE_BYTES * BITS / GIGA / _transfer_s(sender, receiver, LARGE_BYTES))


def machine_name(node: NodeResources) -> str:
    """A name that also tells machines with the same address apart."""
    return f"{node.address} ({node.id[:6]})"


def _transfer_s(sender: NodeResources, receiver: NodeResources, size: int) -> float:
    """The seconds in which bytes that are on one machine reach another."""
    import ray

    data = _on(sender, _random_bytes).remote(size)
    try:
        ray.wait([data], timeout=TIMEOUT_S, fetch_local=False)
        seconds: float = ray.get(_on(receiver, _fetch).remote([data]), timeout=TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise ConfigError(
            f"no transfer from {machine_name(sender)} to {machine_name(receiver)} within {TIMEOUT_S:g} s "
            f"({type(error).__name__}); look at both machines with `ray status`, or remove one of them"
        ) from None
    return seconds


def _on(node: NodeResources, function: Callable[..., Any]) -> Any:
    """A remote function that runs on this machine, beside other work."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))


def _random_bytes(size: int) -> bytes:
    return os.urandom(size)


def _fetch(references: list[Any]) -> float:
    import ray

    began = time.perf_counter()
    ray.get(references)
    return max(1e-9, time.perf_counter() - began)
