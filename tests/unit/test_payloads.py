"""Tensors as payloads of jobs and results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.exchange.payloads import LENGTH_BYTES, MIN_PAYLOAD_BYTES, PayloadExchange

TENSORS = {
    "half": torch.randn(3, 5, dtype=torch.float32).to(torch.bfloat16),
    "single": torch.randn(7, 2),
    "integer": torch.arange(4),
    "transposed": torch.randn(4, 6).T,
    "empty": torch.zeros(0, 3),
}


def reader_of(name: str = "slice-3") -> PayloadExchange:
    """The exchange of a worker whose job reads what another worker left."""
    writer, reader = PayloadExchange(), PayloadExchange()
    writer.put(name, TENSORS)
    reader.begin_job(writer.end_job())
    return reader


def test_tensors_arrive_unchanged() -> None:
    found = reader_of().get("slice-3")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_reader_that_modifies_tensors_does_not_modify_the_payload() -> None:
    reader = reader_of()
    reader.get("slice-3")["single"].zero_()
    assert torch.equal(reader.get("slice-3")["single"], TENSORS["single"])


def test_small_tensors_are_padded_to_the_size_that_object_stores_keep() -> None:
    writer = PayloadExchange()
    writer.put("row", {"one": torch.ones(1)})
    assert writer.end_job()["row"].nbytes == MIN_PAYLOAD_BYTES


def test_weights_are_verified_against_their_reference() -> None:
    writer, reader = PayloadExchange(), PayloadExchange()
    reference = writer.put_weights("weights-4", {"a": TENSORS["single"]})
    payloads = writer.end_job()
    reader.begin_job(payloads)
    assert torch.equal(reader.get_weights(reference)["a"], TENSORS["single"])
    with pytest.raises(ValueError, match=r"weights-4.*damaged"):
        reader.get_weights(replace(reference, checksum=reference.checksum ^ 1))
    payloads["weights-4"][LENGTH_BYTES + reference.bytes - 1] ^= 1
    reader.begin_job(payloads)
    with pytest.raises(ValueError, match=r"weights-4.*damaged"):
        reader.get_weights(reference)


def test_a_job_leaves_what_it_put_and_did_not_drop_and_none_of_its_inputs() -> None:
    reader = reader_of()
    reader.put("kept", TENSORS)
    reader.put("dropped", TENSORS)
    reader.drop("dropped")
    assert set(reader.end_job()) == {"kept"}
    with pytest.raises(KeyError):
        reader.get("slice-3")
