"""Broadcasts weights to receivers behind a slow link: bytes that cross it, and seconds against the link's rate.

    python benchmarks/shaped_links.py --mbit 100 --receivers 1 3 7

Receivers are processes in a network namespace of their own. A virtual link with a token bucket (`tc tbf`) leads
there. Needs Linux, root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from rich.console import Console
from rich.table import Table

from digenrl.exchange.broadcast import WeightsSender, receive_version
from digenrl.exchange.deliveries import BroadcastLimits
from digenrl.records import WeightsReference

NAMESPACE, NEAR, FAR = "digenrl-far", "digenrl-near", "digenrl-away"  # a namespace and the ends of the link
NEAR_HOST, FAR_HOST = "10.213.77.1", "10.213.77.2"
LIMITS = BroadcastLimits(timeout_s=600.0, join_timeout_s=600.0)


@dataclass(frozen=True, slots=True)
class ShapedBroadcast:
    """One broadcast: the size of the weights, bytes on the link, and seconds from joining to the confirmation."""

    receivers: int
    weight_bytes: int
    link_bytes: int
    seconds: float
    bound_s: float  # of one transfer at the link's rate


def run_commands(*commands: str) -> None:
    """Runs commands; raises CalledProcessError for the first that fails."""
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextmanager
def shaped_link(mbit: float) -> Iterator[None]:
    """A link of this rate to a namespace. Both are removed at the end."""
    run_commands(f"ip netns add {NAMESPACE}")
    try:
        inside = f"ip netns exec {NAMESPACE}"
        run_commands(
            f"ip link add {NEAR} type veth peer name {FAR} netns {NAMESPACE}",
            f"ip address add {NEAR_HOST}/24 dev {NEAR}",
            f"ip link set {NEAR} up",
            f"{inside} ip address add {FAR_HOST}/24 dev {FAR}",
            f"{inside} ip link set {FAR} up",
            f"{inside} ip link set lo up",
            f"tc qdisc add dev {NEAR} root tbf rate {mbit}mbit burst 64kb latency 100ms",
        )
        yield
    finally:
        run_commands(f"ip netns del {NAMESPACE}")  # removes its end of the link, and so both


@contextmanager
def shaped_site(mbit: float, machines: int) -> Iterator[dict[str, str]]:
    """A link of this rate to several machines: namespaces on a bridge. Yields their addresses, by namespace."""
    hosts = {f"{NAMESPACE}-{index}": f"10.213.77.{10 + index}" for index in range(machines)}
    inside = f"ip netns exec {NAMESPACE}"
    with shaped_link(mbit), ExitStack() as added:
        run_commands(
            f"{inside} ip address flush dev {FAR}",
            f"{inside} ip link add site type bridge",
            f"{inside} ip link set {FAR} master site",
            f"{inside} ip link set site up",
        )
        for index, (namespace, host) in enumerate(hosts.items()):
            run_commands(f"ip netns add {namespace}")
            added.callback(run_commands, f"ip netns del {namespace}")
            run_commands(
                f"{inside} ip link add port{index} type veth peer name lan netns {namespace}",
                f"{inside} ip link set port{index} master site",
                f"{inside} ip link set port{index} up",
                f"ip netns exec {namespace} ip address add {host}/24 dev lan",
                f"ip netns exec {namespace} ip link set lan up",
                f"ip netns exec {namespace} ip link set lo up",
            )
        yield hosts


def bytes_sent() -> int:
    """Bytes that were sent over the link, with all headers."""
    return int(Path(f"/sys/class/net/{NEAR}/statistics/tx_bytes").read_text())


def measure(receivers: int, mib: int, mbit: float) -> ShapedBroadcast:
    """Broadcasts random weights of this size to processes in the namespace."""
    sender = WeightsSender(NEAR_HOST)
    reference = sender.stage("weights-1", {"weights": torch.randn(mib << 18)})
    given = pickle.dumps((sender.address, receivers + 1, reference)).hex()
    program = ["ip", "netns", "exec", NAMESPACE, sys.executable, __file__, "--receive", given, "--rank"]
    started = [subprocess.Popen([*program, str(rank)]) for rank in range(1, receivers + 1)]
    before = bytes_sent()
    delivery = sender.send(reference.name, 1, receivers, LIMITS)
    crossed = bytes_sent() - before
    if any(process.wait() for process in started):
        raise SystemExit("a receiver failed")
    bound_s = reference.bytes * 8 / (mbit * 1e6)
    return ShapedBroadcast(receivers, reference.bytes, crossed, delivery.sending_s, bound_s)


def receive(given: str, rank: int) -> None:
    """What a receiver does in the namespace."""
    address, size, reference = pickle.loads(bytes.fromhex(given))
    assert isinstance(reference, WeightsReference)
    receive_version(address, 1, rank, size, reference, LIMITS)


def show(found: list[ShapedBroadcast]) -> None:
    """Prints a row per number of receivers."""
    table = Table("receivers", "weights", "bytes on the link", "seconds", "over one transfer at the link's rate")
    for each in found:
        crossed, over = each.link_bytes / each.weight_bytes, each.seconds / each.bound_s
        size = f"{each.weight_bytes / 2**20:.0f} MiB"
        table.add_row(str(each.receivers), size, f"{crossed:.2f}x", f"{each.seconds:.2f}", f"{over:.2f}x")
    Console(width=110).print(table)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the link")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--mib", type=int, default=16, help="size of the weights")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options.receive, options.rank)
        return
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("needs root, and the commands ip and tc (package iproute2)")
    with shaped_link(options.mbit):
        found = [measure(count, options.mib, options.mbit) for count in options.receivers]
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        show(found)


if __name__ == "__main__":
    main()
