"""A worker's exchange on a cluster: tensors travel with orders, full weights by broadcast."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor

from digenrl.exchange.broadcast import WeightsReceiver, WeightsSender
from digenrl.exchange.carried import CarriedTensors, Parcel
from digenrl.records import WeightsReference
from digenrl.worker.assignment import Assignment

# Whoever sends may have died and be loading its model again elsewhere.
LONGEST_WAIT_S = 1800.0


def make_exchange(assignment: Assignment, host: str) -> CarriedTensors:
    """The exchange of a worker on the machine of this address."""
    if assignment.recipe.training.lora is not None:
        return CarriedTensors()
    is_first_rank = assignment.ranks is None or assignment.ranks.index == 0
    sends = "train" in assignment.duties and is_first_rank
    return WiredTensors(WeightsSender(host) if sends else None)


class WiredTensors(CarriedTensors):
    """Weights are too large to travel with orders: the trainer sends a version once, to all who lack it.

    They arrive in a thread of their own, maybe before the order that loads them, and even before one that loads
    the version before: each is kept until a later one was got. `lost` are those that an order waited for in vain.
    """

    def __init__(self, sender: WeightsSender | None) -> None:
        super().__init__()
        self._sender, self._receiver = sender, WeightsReceiver()
        self._news = threading.Condition()
        self._arrived: dict[str, dict[str, Tensor]] = {}
        self._given_up: set[str] = set()
        self.lost: tuple[str, ...] = ()

    def open(self, parcels: Mapping[str, Parcel]) -> None:
        """An order begins, and these came with it."""
        super().open(parcels)
        self.lost = ()

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Copies them, to be sent when somebody lacks them."""
        return self._sends().stage(name, tensors)

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        """What has arrived under a name, verified; waits for it if need be, and forgets what came before it."""
        name = reference.name
        with self._news:
            self._news.wait_for(lambda: name in self._arrived or name in self._given_up, LONGEST_WAIT_S)
            if name not in self._arrived:
                self.lost = (name,)
                raise ValueError(f"{name} did not arrive")
            for older in list(self._arrived):
                if older == name:
                    break
                del self._arrived[older]
            return self._arrived[name]

    def sender_address(self) -> str:
        """Where its receivers meet it."""
        return self._sends().address

    def send(self, name: str, epoch: int, receivers: int, timeout_s: float) -> tuple[int, float]:
        """To all receivers of this epoch: bytes and seconds."""
        sent = self._sends().send(name, epoch, receivers, timeout_s)
        return sent.bytes, sent.seconds

    def receive(
        self, address: str, epoch: int, rank: int, size: int, reference: WeightsReference, timeout_s: float
    ) -> None:
        """One version; raises BroadcastError if it did not arrive whole. It may be tried again."""
        self._receiver.receive(address, epoch, rank, size, reference, timeout_s)
        tensors = self._receiver.wait_for(reference.name, 0)
        self._receiver.drop(reference.name)
        with self._news:
            self._arrived[reference.name] = tensors
            self._given_up.discard(reference.name)
            self._news.notify_all()

    def give_up(self, name: str) -> None:
        """Nobody has these weights any more: who waits for them need not."""
        with self._news:
            self._given_up.add(name)
            self._news.notify_all()

    def _sends(self) -> WeightsSender:
        assert self._sender is not None, "only the trainer's first rank has weights to send"
        return self._sender
