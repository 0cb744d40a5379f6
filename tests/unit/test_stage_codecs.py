"""Codecs of links between stages: sizes, errors, and which one a link needs."""

from __future__ import annotations

import pytest
import torch

from digenrl.stages.codec_choice import (
    ACTIVATION_CODECS,
    CODEC_NAMES,
    GRADIENT_CODECS,
    Codec,
    kept_ratio,
    mildest_codec,
)
from digenrl.stages.codecs import decode, encode
from digenrl.stages.messages import pack, unpack
from digenrl.stages.pacing import PacedLink
from digenrl.stages.sampling_codec import PROBABILITY_BITS, probabilities

VALUES = 32_768
CPU = torch.device("cpu")


def coded(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    return decode(encode(values, codec), tuple(values.shape), values.dtype, codec)


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (Codec("none"), 131_072),
        (Codec("bf16"), 65_536),
        (Codec("int8"), 34_816),
        (Codec("int4"), 18_432),
        (Codec("top_k", 100), 2_616),
        (Codec("sampled", 100), 2_616),
    ],
)
def test_payloads_have_the_announced_size(codec: Codec, size: int) -> None:
    assert codec.payload_bytes(VALUES, 4) == size
    assert encode(torch.randn(VALUES), codec).numel() == size


@pytest.mark.parametrize("shape", [(), (1,), (63,), (5, 13), (64, 3), (0, 4)])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_any_shape_can_be_coded(name: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codec = Codec(name, 2)
    payload = encode(values, codec)
    assert payload.numel() == codec.payload_bytes(values.numel(), 4)
    assert coded(values, codec).shape == values.shape


@pytest.mark.parametrize(
    ("name", "largest_error"), [("none", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127), ("int4", 0.5 / 7)]
)
def test_rounding_errors_are_bounded_by_the_largest_value_of_a_block(name: str, largest_error: float) -> None:
    values = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 100)[:, None]
    errors = (coded(values, Codec(name)) - values).abs().amax(dim=1) / values.abs().amax(dim=1)
    assert float(errors.max()) <= largest_error * (1 + 1e-5)


def test_top_k_keeps_the_largest_values_and_drops_the_others() -> None:
    values = torch.tensor([0.1, -5.0, 0.2, 3.0])
    assert coded(values, Codec("top_k", 2)).tolist() == [0.0, -5.0, 0.0, 3.0]


def test_a_sample_is_right_on_average_and_has_the_largest_values() -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(40, 25, generator=generator) ** 3
    total = torch.zeros_like(tensor)
    orders = 400
    for _ in range(orders):  # the running sum of probabilities takes other values in each order
        order = torch.randperm(tensor.numel(), generator=generator)
        shuffled = coded(tensor.flatten()[order], Codec("sampled", 10))
        assert int((shuffled != 0).sum()) == Codec("sampled", 10).sampled(tensor.numel()) == 199
        total.view(-1)[order] += shuffled / orders
    assert float((total.sum() - tensor.sum()).abs()) < 0.02 * float(tensor.abs().sum())
    correlation = torch.corrcoef(torch.stack([total.flatten(), tensor.flatten()]))[0, 1]
    assert float(correlation) > 0.999
    largest = tensor.abs().flatten().topk(20).indices
    ours = coded(tensor, Codec("sampled", 10)).flatten()
    assert torch.allclose(ours[largest], tensor.flatten()[largest], rtol=2**-8)


def test_probabilities_are_numbers_where_fewer_values_than_wanted_are_not_zero() -> None:
    relative = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0])
    assert (probabilities(relative, 4) / 2**PROBABILITY_BITS).tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert (probabilities(relative, 1) / 2**PROBABILITY_BITS).tolist() == pytest.approx([0, 2 / 3, 0, 1 / 3, 0])


def test_samples_of_many_blocks_keep_their_places() -> None:
    values = torch.zeros(3 * 65_536 + 5)
    places = [0, 65_535, 65_536, 3 * 65_536 + 4]
    values[places] = torch.tensor([1.0, -2.0, 4.0, -8.0])
    assert torch.equal(coded(values, Codec("sampled", 1_000)), values)
    assert coded(torch.zeros(7), Codec("sampled", 2)).tolist() == [0.0] * 7


@pytest.mark.parametrize("name", ["top_k", "sampled"])
def test_an_index_that_does_not_exist_is_refused(name: str) -> None:
    codec = Codec(name, 2)
    payload = encode(torch.ones(8), codec)
    payload[-(4 if name == "top_k" else 2 * 7) :] = 127
    with pytest.raises(ValueError, match="outside of 8 values"):
        decode(payload, (8,), torch.float32, codec)


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int4", "sampled"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_visible(name: str, bad: float) -> None:
    values = torch.ones(128)
    values[3] = bad
    result = coded(values, Codec(name, 2))
    assert not bool(result[:64].isfinite().all())
    if name != "sampled":
        assert result[64:].tolist() == [1.0] * 64


def test_a_payload_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="damaged"):
        decode(torch.zeros(7, dtype=torch.uint8), (2,), torch.float32, Codec())


@pytest.mark.parametrize(("name", "ratio", "noun"), [("int5", 1, "int8"), ("top_k", 0.5, "ratio")])
def test_unknown_codecs_are_refused(name: str, ratio: float, noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        Codec(name, ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize(("link_s", "ratio"), [(8, 32), (0.8, 3.2), (0.3, 1)])
def test_the_ratio_makes_a_link_as_fast_as_the_slowest_stage(link_s: float, ratio: float) -> None:
    assert kept_ratio(link_s, 0.5) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("bytes_per_s", "activations", "gradients"),
    [
        (4 * VALUES, "none", "none"),
        (2 * VALUES, "bf16", "bf16"),
        (1.1 * VALUES, "int8", "int8"),
        (0.6 * VALUES, "int4", "int4"),
        (0.01 * VALUES, "int4", "sampled"),
    ],
)
def test_a_link_gets_the_mildest_codec_that_keeps_up(bytes_per_s: float, activations: str, gradients: str) -> None:
    forward = mildest_codec(ACTIVATION_CODECS, VALUES, 4, bytes_per_s, slowest_stage_s=1.0)
    backward = mildest_codec(GRADIENT_CODECS, VALUES, 4, bytes_per_s, slowest_stage_s=1.0)
    assert (forward.name, backward.name) == (activations, gradients)
    if gradients == "sampled":
        assert backward.payload_bytes(VALUES, 4) <= bytes_per_s


def test_messages_keep_missing_tensors_integers_and_who_needs_a_gradient() -> None:
    states = (None, torch.arange(3), torch.randn(2, 3).t().requires_grad_(), torch.randn(4, dtype=torch.float64))
    received = unpack(pack(states, Codec()), CPU)
    assert received[0] is None
    for ours, sent in zip(received[1:], states[1:], strict=True):
        assert ours is not None and sent is not None
        assert torch.equal(ours, sent)
        assert (ours.dtype, ours.requires_grad) == (sent.dtype, sent.requires_grad)
    rounded = unpack(pack(states, Codec("int8")), CPU)
    assert rounded[1] is not None and rounded[1].tolist() == [0, 1, 2], "only floating-point values are rounded"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_paced_link_passes_its_rate_and_a_burst_after_a_pause() -> None:
    clock = Clock()
    link = PacedLink(1000.0, burst_bytes=50, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        link.pass_through(100)
    assert clock.now == pytest.approx(1.0)
    clock.now += 5.0
    link.pass_through(50)
    assert clock.now == pytest.approx(6.0), "a burst"
    link.pass_through(100)
    assert clock.now == pytest.approx(6.1)


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="rate"):
        PacedLink(0)
