"""New weights for a site of several machines and pools behind a slow link: bytes that cross the link per version.

    python benchmarks/remote_site.py --mbit 100 --mib 16 --versions 4 [--json]

The trainer is on Ray's head node. Three generators are on three other nodes, two in one pool and one in another.
Each node is in a network namespace. They are connected by a bridge, to which a virtual link with a token bucket
(`tc tbf`) leads. Weights are random, so that patches would save nothing, and go through the transport of real
runs, first with machines without the label `site`, and then with it. "Seconds" is the time from the jobs to the
last report that a version was loaded. Needs Linux, root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from measured_runs import recipe
from rich.console import Console
from rich.table import Table
from shaped_links import NEAR_HOST, bytes_sent, shaped_site
from shaped_nodes import Node, ray_environment, ray_nodes

from digenrl.config.recipes.recipe import Recipe
from digenrl.records import Export, Exported, Job, Publish, Published, WeightsReference, weights_name
from digenrl.transports.contract import Message
from digenrl.transports.ray.joining import RayCluster, open_cluster
from digenrl.transports.ray.placing import place_on_cluster
from digenrl.worker.assignment import Assignment, Ready

POOLS = ("first", "first", "second")  # of the three machines
CPUS = 4  # of a machine, so that it has room for one generator, and Ray keeps a process for copies
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class SiteTransfers:
    """Versions that were published, all with the same number of bytes. Bytes and seconds are per version."""

    weights: str
    labeled: bool
    version_bytes: int
    link_bytes: float
    seconds: float


class WeightsWorker:
    """A worker without a model: it exports random weights, and loads those of others."""

    def __init__(self, exchange: Any, mib: int) -> None:
        self._exchange, self._mib = exchange, mib

    def handle(self, job: Job) -> Any:
        """Runs a job."""
        import torch

        if isinstance(job, Export):
            weights = {"weights": torch.randn(self._mib << 18)}
            return Exported(0, job, self._exchange.put_weights(weights_name(job.version), weights))
        assert isinstance(job, Publish)
        self._exchange.get_weights(job.weights)  # verifies the checksum
        return Published(0, job, job.lanes, 0.0)


class SiteRun:
    """A trainer, and generators in the site."""

    def __init__(self, cluster: RayCluster, chosen: Recipe, mib: int) -> None:
        from digenrl.transports.ray.transport import RayTransport

        def build(assignment: Assignment, exchange: Any, rendezvous: str) -> Any:
            return WeightsWorker(exchange, mib), Ready()

        workers = place_on_cluster(chosen, cluster.resources())
        self._transport = RayTransport(cluster, chosen, build=build)
        self._trainer, self._generators = workers.trainer, workers.generators
        self._job_ids = count()
        for assignment in (self._trainer, *self._generators):
            self._transport.start(assignment)
        list(self._receive(1 + len(self._generators)))

    def publish(self, version: int) -> WeightsReference:
        """Exports a version, and waits until all generators have loaded it."""
        self._transport.send(self._trainer.name, Export(next(self._job_ids), 0, version))
        (exported,) = (message.report for message in self._receive(1))
        assert isinstance(exported, Exported), exported
        for generator in self._generators:
            self._transport.send(generator.name, Publish(next(self._job_ids), 0, version, (0,), exported.weights))
        for message in self._receive(len(self._generators)):
            assert isinstance(message.report, Published), message
        return exported.weights

    def close(self) -> None:
        """Ends all workers."""
        self._transport.stop()

    def _receive(self, expected: int) -> Iterator[Message]:
        ends_s, found = time.monotonic() + TIMEOUT_S, 0
        while found < expected:
            if time.monotonic() > ends_s:
                raise SystemExit(f"got {found} of {expected} reports within {TIMEOUT_S:g} s")
            for message in self._transport.receive(1.0):
                found += 1
                yield message


def site_recipe(address: str, lora: bool) -> Recipe:
    """The placement of workers; nothing is trained."""
    pools = [
        {"name": name, "count": POOLS.count(name), "labels": {"pool": name}, "cpus": CPUS - 1}
        for name in dict.fromkeys(POOLS)
    ]
    near = {"cpus": 0, "resources": {"near": 1}}
    places = {"trainer": near, "rewards": near, "encoder": near, "generators": pools}
    return recipe(
        mode="ray",
        training={"lora": {"rank": 2, "alpha": 4} if lora else None},
        cluster={"address": address, "start_timeout_s": 120, "weight_patches": "never", **places},
    )


def measure(cluster: RayCluster, lora: bool, labeled: bool, mib: int, versions: int) -> SiteTransfers:
    """Publishes versions. The first one is not counted."""
    with closing(SiteRun(cluster, site_recipe(cluster.address, lora), mib)) as run:
        run.publish(0)
        before, began_s = bytes_sent(), time.monotonic()
        published = [run.publish(version) for version in range(1, versions + 1)]
        link_bytes, seconds = (bytes_sent() - before) / versions, (time.monotonic() - began_s) / versions
    return SiteTransfers("adapters" if lora else "full", labeled, published[0].bytes, link_bytes, seconds)


def show(found: list[SiteTransfers]) -> None:
    """Prints a row per kind of weights, with and without sites."""
    table = Table("weights", "label site", "version", "bytes on the link", "seconds")
    for each in found:
        crossed = f"{each.link_bytes / each.version_bytes:.2f}x"
        size, label = f"{each.version_bytes / 2**20:.0f} MiB", "yes" if each.labeled else "no"
        table.add_row(each.weights, label, size, crossed, f"{each.seconds:.2f}")
    Console(width=110).print(table)


def nodes(hosts: dict[str, str], labeled: bool) -> list[Node]:
    """The head, and a node in each namespace."""
    near, far = ({"site": "near"}, {"site": "far"}) if labeled else ({}, {})
    return [
        Node("near", NEAR_HOST, None, {"near": 8}, near),
        *(
            Node(namespace[-5:], host, namespace, labels={"pool": pool, **far}, cpus=CPUS)
            for (namespace, host), pool in zip(hosts.items(), POOLS, strict=True)
        ),
    ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the link")
    parser.add_argument("--mib", type=int, default=16, help="size of the weights")
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("needs root, and the commands ip and tc (package iproute2)")
    found = []
    with ray_environment() as scratch, shaped_site(options.mbit, len(POOLS)) as hosts:
        for labeled in (False, True):
            with (
                ray_nodes(nodes(hosts, labeled), scratch) as address,
                closing(open_cluster(site_recipe(address, lora=True).cluster)) as cluster,
            ):
                for lora in (False, True):
                    found.append(measure(cluster, lora, labeled, options.mib, options.versions))
                    print(asdict(found[-1]), file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        show(found)


if __name__ == "__main__":
    main()
