"""Full weights by broadcast: receivers get every bit, or an error."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from broadcasts import LOOPBACK, TIMEOUT_S, attempt, bits, broadcast, receive_weights, same, weights, within
from live_runs import wait_for
from torch import Tensor

from digenrl.config.recipes.cluster import WeightPatches
from digenrl.exchange import broadcast as broadcast_module
from digenrl.exchange import broadcast_group, flat_weights
from digenrl.exchange.broadcast import WeightsSender
from digenrl.exchange.broadcast_exchange import BroadcastExchange
from digenrl.exchange.broadcast_group import BroadcastError
from digenrl.exchange.deliveries import BroadcastLimits, Delivery
from digenrl.exchange.flat_weights import DTYPES
from digenrl.records import WeightsReference


@pytest.fixture
def sender() -> WeightsSender:
    return WeightsSender(LOOPBACK)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_weights, "BUCKET_BYTES", 1 << 10)


# --- Complete weights --------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_arrives_bit_for_bit(
    sender: WeightsSender, threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    tensors: dict[str, Tensor] = {"flag": torch.tensor(True), "odd": torch.tensor([float("nan"), -0.0, 1e-45])}
    for name, dtype in DTYPES.items():
        values = torch.randn(37, 11, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
        tensors |= {f"{name}.plain": values, f"{name}.transposed": values.T, f"{name}.empty": values[:0]}
        tensors |= {f"{name}.scalar": values[3, 3], f"{name}.strided": values[1:, ::3]}
    tensors["trained"] = torch.randn(3, requires_grad=True)
    reference = sender.stage("weights-1", tensors)
    assert reference.bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    for found in broadcast(sender, reference, 1, 3, threads):
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert bits(found[name]) == bits(tensor), name
        assert not found["trained"].requires_grad


@pytest.mark.parametrize("tensors", [{}, {"empty": torch.zeros(0, 3)}], ids=["no tensors", "no values"])
def test_weights_of_no_bytes_arrive(
    tensors: dict[str, Tensor], sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    (found,) = broadcast(sender, sender.stage("weights-1", tensors), 1, 1, threads)
    assert same(found, tensors)


def test_staged_weights_are_a_copy(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    model = weights()
    reference = sender.stage("weights-1", model)
    for tensor in model.values():
        tensor.zero_()
    (found,) = broadcast(sender, reference, 1, 1, threads)
    assert same(found, weights())
    found["layer.0"].zero_()
    (found,) = broadcast(sender, reference, 2, 1, threads)
    assert same(found, weights())


def test_received_weights_share_one_buffer(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    reference = sender.stage("weights-1", weights())
    (found,) = broadcast(sender, reference, 1, 1, threads)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    assert found["layer.0"].untyped_storage().nbytes() == reference.bytes


def test_tensors_that_cannot_be_sent_are_rejected_and_the_staged_version_stays(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    reference = sender.stage("weights-1", weights())
    with pytest.raises(ValueError, match="'wave', complex64"):
        sender.stage("weights-2", {"wave": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"'holes', float32 torch.sparse_coo"):
        sender.stage("weights-2", {"holes": torch.zeros(2).to_sparse()})
    (found,) = broadcast(sender, reference, 1, 1, threads)
    assert same(found, weights())


# --- Damaged weights ---------------------------------------------------------------------------------------------


def test_the_checksum_covers_names_shapes_and_dtypes(sender: WeightsSender) -> None:
    zeros = torch.zeros(4)
    references = [
        sender.stage("weights-1", {"w": zeros}),
        sender.stage("weights-1", {"v": zeros}),
        sender.stage("weights-1", {"w": zeros.reshape(2, 2)}),
        sender.stage("weights-1", {"w": zeros.to(torch.int32)}),
        sender.stage("weights-2", {"w": zeros}),
        sender.stage("weights-1", {"w": torch.tensor([0, 0, 0, 1.0])}),
    ]
    assert len({reference.checksum for reference in references}) == len(references)
    assert sender.stage("weights-1", {"w": zeros}) == references[0]


def test_a_flipped_bit_fails_both_sides_and_the_next_epoch_succeeds(
    sender: WeightsSender, threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    reference = sender.stage("weights-1", weights())
    assert sender._staged is not None
    flat = sender._staged.flat
    for epoch, place in enumerate((0, 5000, -1), start=1):
        flat[place] ^= 1
        (received,), sent = attempt(sender, reference, epoch, 1, threads)
        flat[place] ^= 1
        with pytest.raises(BroadcastError, match=f"epoch {epoch}: .*damaged"):
            received.result()
        with pytest.raises(BroadcastError, match=r"receiver 1: .*damaged"):
            sent.result()
    (found,) = broadcast(sender, reference, 9, 1, threads)
    assert same(found, weights())


@pytest.mark.parametrize(
    "change",
    [
        lambda reference: replace(reference, name="weights-2"),
        lambda reference: replace(reference, bytes=reference.bytes + 4),
        lambda reference: replace(reference, bytes=reference.bytes - 4),
        lambda reference: replace(reference, checksum=reference.checksum ^ 1),
    ],
    ids=["another name", "more bytes", "fewer bytes", "another checksum"],
)
def test_weights_that_differ_from_the_reference_are_rejected(
    change: Callable[[WeightsReference], WeightsReference], threads: ThreadPoolExecutor
) -> None:
    sender = WeightsSender(LOOPBACK)
    expected = change(sender.stage("weights-1", weights()))
    receiving = threads.submit(receive_weights, sender.address, 1, 1, 2, expected, TIMEOUT_S)
    with pytest.raises(BroadcastError):
        sender.send("weights-1", 1, 1, within(TIMEOUT_S, 1.0))
    with pytest.raises(BroadcastError, match="expected WeightsReference"):
        receiving.result()


def test_a_receiver_that_fails_ends_the_attempt_for_those_behind_it_and_the_next_one_succeeds(
    sender: WeightsSender, threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    reference = sender.stage("weights-1", weights())
    expected = [reference, replace(reference, bytes=reference.bytes + 4), reference]
    receiving = [
        threads.submit(receive_weights, sender.address, 1, rank, 4, each, TIMEOUT_S)
        for rank, each in enumerate(expected, start=1)
    ]
    with pytest.raises(BroadcastError):
        sender.send("weights-1", 1, 3, within(TIMEOUT_S))
    for received in receiving[1:]:
        with pytest.raises(BroadcastError):
            received.result()
    assert all(same(found, weights()) for found in broadcast(sender, reference, 2, 3, threads))


def test_a_receiver_of_large_weights_has_time_to_check_them(
    sender: WeightsSender, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_crc32(flat: Tensor, previous: int) -> int:
        time.sleep(0.5)
        return flat_weights.crc32(flat, previous)

    reference = sender.stage("weights-1", weights())
    monkeypatch.setattr(broadcast_module, "crc32", slow_crc32)
    monkeypatch.setattr(broadcast_group, "CHECK_BYTES_PER_S", reference.bytes / TIMEOUT_S)
    receiving = threads.submit(receive_weights, sender.address, 1, 1, 2, reference, TIMEOUT_S)
    sender.send("weights-1", 1, 1, within(TIMEOUT_S, 0.2))
    assert same(receiving.result(), weights())


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"name": "weights-1", "bucket_bytes": 8, "tensors": [["w", "qint8", [4]]]}', b""]
)
def test_a_malformed_header_is_rejected(header: bytes, threads: ThreadPoolExecutor) -> None:
    sender = WeightsSender(LOOPBACK)
    reference = sender.stage("weights-1", weights())
    assert sender._staged is not None
    sender._staged = replace(sender._staged, header=header)
    receiving = threads.submit(receive_weights, sender.address, 1, 1, 2, reference, TIMEOUT_S, 1.0)
    with pytest.raises((BroadcastError, ValueError)):
        sender.send("weights-1", 1, 1, within(TIMEOUT_S, 1.0))
    with pytest.raises(BroadcastError):
        receiving.result()


# --- Versions and epochs -----------------------------------------------------------------------------------------


def test_only_the_version_staged_last_can_be_sent(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    for version in (1, 2, 3):
        (found,) = broadcast(sender, sender.stage(f"weights-{version}", weights(version)), version, 1, threads)
        assert same(found, weights(version))
    with pytest.raises(BroadcastError, match="weights-2 is not staged; staged: weights-3"):
        sender.send("weights-2", 4, 1, within(TIMEOUT_S))


def test_a_version_that_is_being_sent_arrives_although_a_newer_one_is_staged(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    old = sender.stage("weights-1", weights(1))
    sending = threads.submit(sender.send, "weights-1", 1, 2, within(TIMEOUT_S))
    receiving = threads.submit(receive_weights, sender.address, 1, 1, 3, old, TIMEOUT_S)
    sender._store.wait(["weights-1/joined/0", "weights-1/joined/1"])
    (found,) = broadcast(sender, sender.stage("weights-2", weights(2)), 2, 1, threads)
    assert same(found, weights(2))
    assert same(receive_weights(sender.address, 1, 2, 3, old, TIMEOUT_S), weights(1))
    assert same(receiving.result(), weights(1))
    sending.result()


def test_a_broadcast_that_waits_for_a_receiver_to_connect_delays_no_other(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    reference = sender.stage("weights-1", weights())
    sending = threads.submit(sender.send, "weights-1", 1, 1, within(TIMEOUT_S))
    sender._store.set("weights-1/joined/1", "")
    wait_for(lambda: len(sender._store.list_keys()) > 2, "the sender's address")
    (found,) = broadcast(sender, reference, 2, 1, threads)
    assert same(found, weights()) and not sending.done()
    assert same(receive_weights(sender.address, 1, 1, 2, reference, TIMEOUT_S), weights())
    sending.result()


def test_an_epoch_can_be_used_once(sender: WeightsSender) -> None:
    sender.stage("weights-1", weights())
    with pytest.raises(BroadcastError):
        sender.send("weights-1", 1, 1, within(0.01))
    with pytest.raises(AssertionError, match="epoch 1"):
        sender.send("weights-1", 1, 1, within(0.01))


def test_a_broadcast_leaves_nothing_in_the_store(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    broadcast(sender, sender.stage("weights-1", weights()), 1, 2, threads)
    assert sender._store.list_keys() == []
    assert not torch.distributed.is_initialized()


def test_missing_receivers_are_named_and_a_late_one_learns_that_the_sender_gave_up(sender: WeightsSender) -> None:
    reference = sender.stage("weights-1", weights())
    with pytest.raises(BroadcastError, match="epoch 1: receiver 1, receiver 2 did not join"):
        sender.send("weights-1", 1, 2, within(1.0))
    with pytest.raises(BroadcastError, match="epoch 1: the sender gave up: receiver 1, receiver 2"):
        receive_weights(sender.address, 1, 2, 3, reference, TIMEOUT_S)


def test_a_receiver_does_not_wait_for_a_sender_that_is_gone() -> None:
    with socket.create_server((LOOPBACK, 0)) as gone:
        address = f"{LOOPBACK}:{gone.getsockname()[1]}"
    with pytest.raises(BroadcastError, match="weights-1 did not arrive in epoch 3: Connection refused"):
        receive_weights(address, 3, 1, 2, WeightsReference("weights-1", 0, 0), TIMEOUT_S)


# --- A worker's exchange -----------------------------------------------------------------------------------------


class Exchanges:
    """The exchanges of a trainer and of a generator, which receives in another thread."""

    def __init__(self, threads: ThreadPoolExecutor, patches: WeightPatches = "never") -> None:
        self.trainer = BroadcastExchange(WeightsSender(LOOPBACK, patches=patches))
        self.generator = BroadcastExchange(None)
        self.deliveries: list[Delivery] = []
        self._threads, self._epoch = threads, 0

    def broadcast(
        self, reference: WeightsReference, held: str = "", link_bytes_per_s: float | None = None
    ) -> None:
        self._epoch += 1
        sending = self._threads.submit(
            self.trainer.send, reference.name, self._epoch, 1, within(TIMEOUT_S), held, link_bytes_per_s
        )
        limits = BroadcastLimits(TIMEOUT_S, TIMEOUT_S)
        self.generator.receive(self.trainer.address, self._epoch, 1, 2, reference, limits)
        self.deliveries.append(sending.result())


def test_a_job_that_waits_for_weights_gets_them_when_they_arrive(threads: ThreadPoolExecutor) -> None:
    exchanges = Exchanges(threads)
    reference = exchanges.trainer.put_weights("weights-1", weights())
    waiting = threads.submit(exchanges.generator.get_weights, reference)
    exchanges.broadcast(reference)
    assert same(waiting.result(TIMEOUT_S), weights())
    assert same(exchanges.generator.get_weights(reference), weights()), "a version can be loaded again"


def test_a_version_is_kept_until_a_later_one_is_loaded(threads: ThreadPoolExecutor) -> None:
    exchanges = Exchanges(threads)
    references = []
    for version in (1, 2):
        references.append(exchanges.trainer.put_weights(f"weights-{version}", weights(version)))
        exchanges.broadcast(references[-1])
    for version, reference in enumerate(references, start=1):
        assert same(exchanges.generator.get_weights(reference), weights(version))
    exchanges.generator.give_up("weights-1")
    with pytest.raises(ValueError, match="weights-1"):
        exchanges.generator.get_weights(references[0])


def test_weights_that_are_given_up_are_lost_until_they_arrive_after_all(threads: ThreadPoolExecutor) -> None:
    exchanges = Exchanges(threads)
    reference = exchanges.trainer.put_weights("weights-1", weights())
    waiting = threads.submit(exchanges.generator.get_weights, reference)
    exchanges.generator.give_up("weights-1")
    with pytest.raises(ValueError, match="weights-1"):
        waiting.result(TIMEOUT_S)
    assert exchanges.generator.lost == ("weights-1",)
    exchanges.generator.begin_job({})
    assert exchanges.generator.lost == ()
    again = threads.submit(exchanges.generator.get_weights, reference)  # of the next job, which waits
    exchanges.broadcast(reference)
    assert same(again.result(TIMEOUT_S), weights())
    assert same(exchanges.generator.get_weights(reference), weights())


def test_received_weights_are_forwarded_bit_for_bit_until_a_later_version_is_loaded(
    threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    exchanges, limits = Exchanges(threads), BroadcastLimits(TIMEOUT_S, TIMEOUT_S)
    forwarder = exchanges.generator = BroadcastExchange(None, LOOPBACK)
    first = exchanges.trainer.put_weights("weights-1", weights(1))
    with pytest.raises(BroadcastError, match="weights-1"):
        forwarder.send("weights-1", 1, 1, limits)
    exchanges.broadcast(first)
    forwarded = threads.submit(forwarder.send, "weights-1", 2, 2, limits)
    received = [
        threads.submit(receive_weights, forwarder.address, 2, rank, 3, first, TIMEOUT_S) for rank in (1, 2)
    ]
    assert all(same(each.result(), weights(1)) for each in received)
    assert forwarded.result().bytes == first.bytes
    second = exchanges.trainer.put_weights("weights-2", weights(2))
    exchanges.broadcast(second)
    forwarder.get_weights(second)
    with pytest.raises(BroadcastError, match="weights-1"):
        forwarder.send("weights-1", 3, 1, limits)


# --- Patches -----------------------------------------------------------------------------------------------------


def test_a_receiver_that_holds_the_version_before_gets_a_patch_and_a_joiner_the_whole_version(
    threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    exchanges = Exchanges(threads, "always")

    def deliver(version: int, held: str) -> int:
        values = {name: tensor + version * 1e-6 for name, tensor in weights().items()}
        reference = exchanges.trainer.put_weights(f"weights-{version}", values)
        exchanges.broadcast(reference, held)
        assert same(exchanges.generator.get_weights(reference), values)
        return exchanges.deliveries[-1].bytes

    whole = deliver(1, held="")
    assert deliver(2, held="weights-1") < whole
    assert deliver(3, held="weights-2") < whole
    assert deliver(4, held="weights-2") == whole, "the sender keeps one version"
    exchanges.generator = BroadcastExchange(None)
    assert deliver(5, held="weights-4") == whole, "the receiver was replaced"


@pytest.mark.parametrize(("link_bytes_per_s", "patched"), [(1e3, True), (1e15, False), (None, False)])
def test_a_patch_is_made_only_for_a_link_that_is_slower_than_making_it(
    link_bytes_per_s: float | None, patched: bool, threads: ThreadPoolExecutor
) -> None:
    exchanges = Exchanges(threads, "auto")
    for version in (1, 2):
        reference = exchanges.trainer.put_weights(f"weights-{version}", weights(0))
        exchanges.broadcast(reference, "weights-1", link_bytes_per_s)
        assert same(exchanges.generator.get_weights(reference), weights(0))
    assert (exchanges.deliveries[1].bytes < exchanges.deliveries[0].bytes) == patched
