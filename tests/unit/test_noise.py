"""Noise depends only on the sample and the seed, and no two draws are alike."""

from __future__ import annotations

import itertools

import torch

from digenrl.generation.noise import draw_key, initial_noise, normal_noise, step_noise
from digenrl.records import SampleId, Slice

SHAPE = (4, 3, 5)


def test_a_key_depends_on_every_part_of_the_name() -> None:
    numbers = range(12)
    keys = {
        draw_key(seed, SampleId(step, group, index), purpose)
        for seed, step, group, index in itertools.product((0, 1, 11), numbers, numbers, numbers)
        for purpose in ("initial", "step 1", "step 11")
    }
    assert len(keys) == 3 * 12**3 * 3


def test_noise_is_the_same_on_every_machine_and_in_every_release() -> None:
    # A change here changes every sample of every run: resumed runs would no longer match.
    assert draw_key(7, SampleId(5, 2, 1), "initial") == 0x84D4066174B83526CF80A1CF2E535559
    values = normal_noise(7, SampleId(5, 2, 1), "initial", (3,))
    torch.testing.assert_close(values, torch.tensor([-1.3370142, -0.34783503, -1.2246542]), rtol=1e-6, atol=0)


def test_noise_does_not_depend_on_the_slice_or_the_global_generators() -> None:
    whole = initial_noise(3, list(Slice(1, 2, 0, 4).samples()), SHAPE)
    torch.manual_seed(0)
    parts = [initial_noise(3, list(Slice(1, 2, first, size).samples()), SHAPE) for first, size in ((3, 1), (0, 3))]
    assert torch.equal(whole, torch.cat([parts[1], parts[0]]))
    assert whole.dtype == torch.float32
    assert whole.device.type == "cpu"


def test_samples_steps_and_purposes_share_no_noise() -> None:
    samples = list(Slice(1, 2, 0, 3).samples())
    draws = [initial_noise(3, samples, SHAPE), *(step_noise(3, samples, index, SHAPE) for index in range(4))]
    draws.append(step_noise(4, samples, 0, SHAPE))
    rows = torch.cat(draws)
    for one, other in itertools.combinations(rows, 2):
        assert not torch.equal(one, other)


def test_a_group_can_share_its_initial_noise_but_not_its_step_noise() -> None:
    samples = list(Slice(1, 2, 0, 3).samples())
    shared = initial_noise(3, samples, SHAPE, same_in_group=True)
    assert torch.equal(shared[0], shared[1])
    assert torch.equal(shared[0], shared[2])
    later_slice = initial_noise(3, [SampleId(1, 2, 7)], SHAPE, same_in_group=True)
    assert torch.equal(later_slice[0], shared[0])
    for other in (SampleId(1, 3, 0), SampleId(2, 2, 0)):
        assert not torch.equal(initial_noise(3, [other], SHAPE, same_in_group=True)[0], shared[0])
    steps = step_noise(3, samples, 0, SHAPE)
    assert not torch.equal(steps[0], steps[1])


def test_noise_is_standard_normal_within_and_across_draws() -> None:
    one_draw = normal_noise(0, SampleId(0, 0, 0), "initial", (200_000,))
    many_draws = torch.cat([normal_noise(0, SampleId(0, 0, index), "step 0", (2,)) for index in range(5_000)])
    for values in (one_draw.double(), many_draws.double()):
        count = len(values)
        assert abs(values.mean()) < 4 / count**0.5
        assert abs(values.var() - 1) < 4 * (2 / count) ** 0.5
        assert abs((values.abs() > 1.959964).double().mean() - 0.05) < 4 * (0.05 * 0.95 / count) ** 0.5


def test_seeds_that_agree_in_their_low_32_bits_give_other_noise() -> None:
    assert not torch.equal(
        normal_noise(5, SampleId(0, 0, 0), "initial", SHAPE),
        normal_noise(5 + 2**40, SampleId(0, 0, 0), "initial", SHAPE),
    )
