"""Full weights by broadcast: they arrive to the last bit or not at all, whoever dies on the way."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from broadcasts import LOOPBACK, TIMEOUT_S, arrive, bits, distribute, same, weights
from torch import Tensor

from digenrl.exchange import flat_weights
from digenrl.exchange.broadcast import BroadcastError, WeightsReceiver, WeightsSender
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


# --- What arrives ------------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_arrives_to_the_last_bit(
    sender: WeightsSender, threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    tensors: dict[str, Tensor] = {"flag": torch.tensor(True), "odd": torch.tensor([float("nan"), -0.0, 1e-45])}
    for name, dtype in DTYPES.items():
        values = torch.randn(37, 11, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
        tensors |= {f"{name}.plain": values, f"{name}.turned": values.T, f"{name}.none": values[:0]}
        tensors |= {f"{name}.one": values[3, 3], f"{name}.part": values[1:, ::3]}
    tensors["trained"] = torch.randn(3, requires_grad=True)
    receivers = [WeightsReceiver(), WeightsReceiver(), WeightsReceiver()]
    reference = arrive(sender, "weights-1", tensors, 1, receivers, threads)
    assert reference.bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    for receiver in receivers:
        found = receiver.wait_for("weights-1", 0)
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert bits(found[name]) == bits(tensor), name
        assert not found["trained"].requires_grad


@pytest.mark.parametrize("tensors", [{}, {"none": torch.zeros(0, 3)}], ids=["no tensors", "no values"])
def test_weights_without_a_byte_arrive_too(
    tensors: dict[str, Tensor], sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    receiver = WeightsReceiver()
    arrive(sender, "weights-1", tensors, 1, [receiver], threads)
    assert same(receiver.wait_for("weights-1", 0), tensors)


def test_training_on_does_not_change_what_was_staged(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    model, receiver = weights(), WeightsReceiver()
    reference = sender.stage("weights-1", model)
    for tensor in model.values():
        tensor.zero_()
    distribute(sender, reference, 1, [receiver], threads)
    found = receiver.wait_for("weights-1", 0)
    assert same(found, weights())
    found["layer.0"].zero_()
    second = WeightsReceiver()
    distribute(sender, reference, 2, [second], threads)
    assert same(second.wait_for("weights-1", 0), weights())


def test_what_arrives_lies_in_one_copy(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    receiver = WeightsReceiver()
    reference = arrive(sender, "weights-1", weights(), 1, [receiver], threads)
    storages = {tensor.untyped_storage().data_ptr() for tensor in receiver.wait_for("weights-1", 0).values()}
    assert len(storages) == 1
    assert receiver.wait_for("weights-1", 0)["layer.0"].untyped_storage().nbytes() == reference.bytes


def test_what_cannot_travel_is_refused_and_drops_nothing(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    reference = sender.stage("weights-1", weights())
    with pytest.raises(ValueError, match="weights-2: cannot send 'wave', complex64"):
        sender.stage("weights-2", {"wave": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"cannot send 'holes', float32 and torch.sparse_coo"):
        sender.stage("weights-2", {"holes": torch.zeros(2).to_sparse()})
    receiver = WeightsReceiver()
    distribute(sender, reference, 1, [receiver], threads)
    assert receiver.has("weights-1")


# --- What is refused ---------------------------------------------------------------------------------------------


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


def test_a_damaged_bit_is_found_and_the_next_attempt_is_served(
    sender: WeightsSender, threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    receiver, reference = WeightsReceiver(), sender.stage("weights-1", weights())
    assert sender._staged is not None
    flat = sender._staged.flat
    for epoch, place in enumerate((0, 5000, -1), start=1):
        flat[place] ^= 1
        received, sent = distribute(sender, reference, epoch, [receiver], threads)
        flat[place] ^= 1
        with pytest.raises(BroadcastError, match=f"did not arrive in epoch {epoch}: weights-1: arrived damaged"):
            received.result()
        with pytest.raises(BroadcastError, match="receiver 1: weights-1: arrived damaged") as error:
            sent.result()
        assert error.value.unconfirmed == (1,)
        assert not receiver.has("weights-1")
        with pytest.raises(BroadcastError, match="arrived damaged"):
            receiver.wait_for("weights-1", TIMEOUT_S)
    for outcome in distribute(sender, reference, 9, [receiver], threads):
        outcome.result()
    assert same(receiver.wait_for("weights-1", 0), weights())


@pytest.mark.parametrize(
    "promise",
    [
        lambda reference: replace(reference, name="weights-2"),
        lambda reference: replace(reference, bytes=reference.bytes + 4),
        lambda reference: replace(reference, bytes=reference.bytes - 4),
        lambda reference: replace(reference, checksum=reference.checksum ^ 1),
    ],
    ids=["another name", "more bytes", "fewer bytes", "another checksum"],
)
def test_what_was_not_promised_is_not_served(
    promise: Callable[[WeightsReference], WeightsReference], threads: ThreadPoolExecutor
) -> None:
    sender, receiver = WeightsSender(LOOPBACK, stall_s=1.0), WeightsReceiver()
    promised = promise(sender.stage("weights-1", weights()))
    receiving = threads.submit(receiver.receive, sender.address, 1, 1, 2, promised, TIMEOUT_S)
    with pytest.raises(BroadcastError):
        sender.send("weights-1", 1, 1, TIMEOUT_S)
    with pytest.raises(BroadcastError, match="expected WeightsReference"):
        receiving.result()
    assert not receiver.has("weights-1") and not receiver.has("weights-2")


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"name": "weights-1", "bucket_bytes": 8, "tensors": [["w", "qint8", [4]]]}', b""]
)
def test_a_header_that_is_none_is_refused(header: bytes, threads: ThreadPoolExecutor) -> None:
    sender, receiver = WeightsSender(LOOPBACK, stall_s=1.0), WeightsReceiver(stall_s=1.0)
    reference = sender.stage("weights-1", weights())
    assert sender._staged is not None
    sender._staged = replace(sender._staged, header=header)
    receiving = threads.submit(receiver.receive, sender.address, 1, 1, 2, reference, TIMEOUT_S)
    with pytest.raises((BroadcastError, ValueError)):
        sender.send("weights-1", 1, 1, TIMEOUT_S)
    with pytest.raises(BroadcastError):
        receiving.result()
    assert not receiver.has("weights-1")


# --- Versions come and go ----------------------------------------------------------------------------------------


def test_a_newer_version_takes_the_place_of_an_older_one(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    receiver = WeightsReceiver()
    for version in (1, 2, 3):
        arrive(sender, f"weights-{version}", weights(version), version, [receiver], threads)
    assert [receiver.has(f"weights-{version}") for version in (1, 2, 3)] == [False, False, True]
    with pytest.raises(BroadcastError, match="weights-2 was dropped: weights-3 has arrived since"):
        receiver.wait_for("weights-2", TIMEOUT_S)
    assert same(receiver.wait_for("weights-3", 0), weights(3))
    with pytest.raises(BroadcastError, match="weights-2 is not staged; staged: weights-3"):
        sender.send("weights-2", 4, 1, TIMEOUT_S)


def test_what_is_being_sent_still_arrives_and_is_too_late_where_something_newer_is(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    quick, slow = WeightsReceiver(), WeightsReceiver()
    old = sender.stage("weights-1", weights(1))
    sending = threads.submit(sender.send, "weights-1", 1, 2, TIMEOUT_S)
    receiving = threads.submit(quick.receive, sender.address, 1, 1, 3, old, TIMEOUT_S)
    sender._store.wait(["weights-1/here/0", "weights-1/here/1"])
    arrive(sender, "weights-2", weights(2), 2, [quick], threads)
    slow.receive(sender.address, 1, 2, 3, old, TIMEOUT_S)
    sending.result()
    receiving.result()
    assert same(slow.wait_for("weights-1", 0), weights(1))
    assert same(quick.wait_for("weights-2", 0), weights(2))
    with pytest.raises(BroadcastError, match="weights-1 came too late"):
        quick.wait_for("weights-1", TIMEOUT_S)
    with pytest.raises(BroadcastError, match="weights-1 is not staged; staged: weights-2"):
        sender.send("weights-1", 3, 1, TIMEOUT_S)


def test_a_thread_that_waits_gets_weights_that_come_later(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    receiver = WeightsReceiver()
    waiting = threads.submit(receiver.wait_for, "weights-1", 2 * TIMEOUT_S)
    arrive(sender, "weights-1", weights(), 1, [receiver], threads)
    assert same(waiting.result(TIMEOUT_S), weights())


def test_waiting_ends_with_its_time(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    receiver = WeightsReceiver()
    with pytest.raises(BroadcastError, match=r"weights-1 did not arrive within 0.01 s; nobody has begun"):
        receiver.wait_for("weights-1", 0.01)
    reference = sender.stage("weights-1", weights())
    receiving = threads.submit(receiver.receive, sender.address, 1, 1, 2, reference, 0.5)
    sender._store.wait(["weights-1/here/1"])
    with pytest.raises(BroadcastError, match="epoch 1 is under way"):
        receiver.wait_for("weights-1", 0.01)
    receiving.exception()
    with pytest.raises(BroadcastError, match="did not arrive in epoch 1: the sender did not come in time"):
        receiver.wait_for("weights-1", TIMEOUT_S)


def test_who_has_them_takes_part_again_and_keeps_what_it_has(
    sender: WeightsSender, threads: ThreadPoolExecutor, small_buckets: None
) -> None:
    first, second = WeightsReceiver(), WeightsReceiver()
    reference = arrive(sender, "weights-1", weights(), 1, [first], threads)
    loaded = first.wait_for("weights-1", 0)
    for outcome in distribute(sender, reference, 2, [first, second], threads):
        outcome.result()
    assert first.wait_for("weights-1", 0)["layer.0"].data_ptr() == loaded["layer.0"].data_ptr()
    assert same(loaded, weights()) and same(second.wait_for("weights-1", 0), weights())


def test_a_name_that_means_something_else_now_is_received_again(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    receiver = WeightsReceiver()
    for epoch in (1, 2):
        arrive(sender, "weights-1", weights(epoch), epoch, [receiver], threads)
        assert same(receiver.wait_for("weights-1", 0), weights(epoch))


def test_dropped_weights_are_gone_and_stay_with_who_has_them(
    sender: WeightsSender, threads: ThreadPoolExecutor
) -> None:
    receiver = WeightsReceiver()
    arrive(sender, "weights-1", weights(), 1, [receiver], threads)
    loaded = receiver.wait_for("weights-1", 0)
    receiver.drop("weights-1")
    receiver.drop("weights-1")
    assert not receiver.has("weights-1")
    assert same(loaded, weights())


def test_a_distribution_leaves_nothing_in_the_store(sender: WeightsSender, threads: ThreadPoolExecutor) -> None:
    arrive(sender, "weights-1", weights(), 1, [WeightsReceiver(), WeightsReceiver()], threads)
    assert sender._store.list_keys() == []
    assert not torch.distributed.is_initialized()


# --- Who does not come -------------------------------------------------------------------------------------------


def test_who_did_not_come_is_named_and_who_comes_too_late_is_told(sender: WeightsSender) -> None:
    reference = sender.stage("weights-1", weights())
    with pytest.raises(BroadcastError, match="not sent in epoch 1: receiver 1, receiver 2 did not come") as error:
        sender.send("weights-1", 1, 2, timeout_s=0.1)
    assert error.value.unconfirmed == (1, 2)
    receiver = WeightsReceiver()
    with pytest.raises(BroadcastError, match="epoch 1: the sender gave up: receiver 1, receiver 2 did not come"):
        receiver.receive(sender.address, 1, 2, 3, reference, TIMEOUT_S)
    with pytest.raises(BroadcastError, match="the sender gave up"):
        receiver.wait_for("weights-1", TIMEOUT_S)


def test_a_sender_that_is_gone_is_noticed_at_once() -> None:
    with socket.create_server((LOOPBACK, 0)) as gone:
        address = f"{LOOPBACK}:{gone.getsockname()[1]}"
    with pytest.raises(BroadcastError, match="weights-1 did not arrive in epoch 3: Connection refused"):
        WeightsReceiver().receive(address, 3, 1, 2, WeightsReference("weights-1", 0, 0), TIMEOUT_S)


def test_an_epoch_is_one_attempt(sender: WeightsSender) -> None:
    sender.stage("weights-1", weights())
    with pytest.raises(BroadcastError):
        sender.send("weights-1", 1, 1, timeout_s=0.01)
    with pytest.raises(AssertionError, match="epoch 1 was used before"):
        sender.send("weights-1", 1, 1, timeout_s=0.01)
