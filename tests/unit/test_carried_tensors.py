"""Tensors that travel with orders: they come out as they went in, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.exchange.carried import LENGTH_BYTES, SMALLEST_PARCEL, CarriedTensors

TENSORS = {
    "half": torch.randn(3, 5, dtype=torch.float32).to(torch.bfloat16),
    "single": torch.randn(7, 2),
    "whole": torch.arange(4),
    "turned": torch.randn(4, 6).T,
    "empty": torch.zeros(0, 3),
}


def sent(name: str = "slice-3") -> CarriedTensors:
    """The exchange of a worker that got what another left."""
    maker, reader = CarriedTensors(), CarriedTensors()
    maker.open({})
    maker.put(name, TENSORS)
    reader.open(maker.close())
    return reader


def test_tensors_come_out_as_they_went_in() -> None:
    found = sent().get("slice-3")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_what_came_may_be_changed_without_changing_what_others_get() -> None:
    reader = sent()
    reader.get("slice-3")["single"].zero_()
    assert torch.equal(reader.get("slice-3")["single"], TENSORS["single"])


def test_even_a_small_parcel_is_large_enough_for_an_object_store() -> None:
    maker = CarriedTensors()
    maker.open({})
    maker.put("row", {"one": torch.ones(1)})
    assert maker.close()["row"].nbytes == SMALLEST_PARCEL


def test_weights_are_compared_with_their_reference() -> None:
    maker, reader = CarriedTensors(), CarriedTensors()
    maker.open({})
    reference = maker.put_weights("weights-4", {"a": TENSORS["single"]})
    parcels = maker.close()
    reader.open(parcels)
    assert torch.equal(reader.get_weights(reference)["a"], TENSORS["single"])
    with pytest.raises(ValueError, match="weights-4: arrived damaged"):
        reader.get_weights(replace(reference, checksum=reference.checksum ^ 1))
    parcels["weights-4"][LENGTH_BYTES + reference.bytes - 1] ^= 1
    reader.open(parcels)
    with pytest.raises(ValueError, match="weights-4: arrived damaged"):
        reader.get_weights(reference)


def test_an_order_ends_with_all_that_it_left_and_nothing_that_came() -> None:
    reader = sent()
    reader.put("made", TENSORS)
    reader.put("forgotten", TENSORS)
    reader.drop("forgotten")
    assert set(reader.close()) == {"made"}
    with pytest.raises(KeyError):
        reader.get("slice-3")
