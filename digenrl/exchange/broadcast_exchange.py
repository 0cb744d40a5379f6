"""A worker's exchange where tensors travel with jobs, and full weights by broadcast."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor

from digenrl.exchange.broadcast import WeightsSender, receive_version
from digenrl.exchange.broadcast_group import BroadcastError
from digenrl.exchange.deliveries import BroadcastLimits, Delivery
from digenrl.exchange.flat_weights import FlatWeights
from digenrl.exchange.payloads import PayloadExchange
from digenrl.records import WeightsReference

# The sender may have died, and may have to load its model again on another machine.
ARRIVAL_TIMEOUT_S = 1800.0


class BroadcastExchange(PayloadExchange):
    """Only the trainer's first rank stages and sends weights. Other workers can forward those that they received.

    Weights are received in another thread than the one that runs jobs, possibly before the job that loads them,
    and even before a job that loads the previous version. A version is kept until a later one is loaded.
    """

    def __init__(self, sender: WeightsSender | None, host: str = "") -> None:
        """`host` is the address of this machine on which versions are forwarded."""
        super().__init__()
        self._sender, self._host = sender, host
        self._forwarder: WeightsSender | None = None
        self._changed = threading.Condition()
        self._received: dict[str, FlatWeights] = {}
        self._given_up: set[str] = set()

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        assert self._sender is not None, "only the trainer's first rank sends weights"
        return self._sender.stage(name, tensors)

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        name = reference.name
        with self._changed:
            self._changed.wait_for(lambda: name in self._received or name in self._given_up, ARRIVAL_TIMEOUT_S)
            if name not in self._received:
                self._given_up.discard(name)  # a later job may wait for it to be sent again
                self.lost = (name,)
                raise ValueError(f"{name} did not arrive")
            for older in list(self._received):
                if older == name:
                    break
                del self._received[older]
            return self._received[name].tensors()

    def receive(
        self, address: str, epoch: int, rank: int, size: int, reference: WeightsReference, limits: BroadcastLimits
    ) -> None:
        """Receives one version. Raises BroadcastError on failure; can be called again in a new epoch."""
        with self._changed:
            held = next(reversed(self._received.values()), None)
        weights = receive_version(address, epoch, rank, size, reference, limits, held)
        with self._changed:
            self._received.pop(reference.name, None)
            self._received[reference.name] = weights
            self._given_up.discard(reference.name)
            self._changed.notify_all()

    def give_up(self, name: str) -> None:
        """Fails the job that waits for these weights: no worker has them any more."""
        with self._changed:
            self._given_up.add(name)
            self._changed.notify_all()

    @property
    def address(self) -> str:
        """Where receivers find this worker. One that forwards begins to listen at the first call."""
        return self._sender.address if self._sender is not None else self._open_forwarder().address

    def send(
        self,
        name: str,
        epoch: int,
        receivers: int,
        limits: BroadcastLimits,
        held: str = "",
        link_bytes_per_s: float | None = None,
    ) -> Delivery:
        """Sends the staged weights, or forwards received ones. See `WeightsSender.send`."""
        if self._sender is not None:
            return self._sender.send(name, epoch, receivers, limits, held, link_bytes_per_s)
        with self._changed:
            weights = self._received.get(name)
        if weights is None:
            raise BroadcastError(f"{name} cannot be forwarded: this worker does not have it any more")
        return self._open_forwarder().forward(weights, epoch, receivers, limits)

    def _open_forwarder(self) -> WeightsSender:
        with self._changed:
            if self._forwarder is None:
                self._forwarder = WeightsSender(self._host)
            return self._forwarder
