"""Index arithmetic of packs, ranks and updates; the largest pack from measured memory; tallies of metrics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from digenrl.training import metrics
from digenrl.training.metrics import MaskedValues, Tally
from digenrl.training.packing import pack_size
from digenrl.training.packing.pack_size import MemoryLine, measure_largest_pack
from digenrl.training.packing.packs import halves, share_of
from digenrl.training.ranks.rank import Rank


@given(st.lists(st.integers(), min_size=2))
def test_halves_are_both_smaller_and_keep_all_items(items):
    first, second = halves(items)
    assert first + second == items
    assert len(items) > len(first) >= len(second) >= 1


@given(st.integers(0, 50), st.integers(1, 8), st.integers(0, 20))
def test_ranks_share_evenly_and_completely(count, ranks, offset):
    shares = [share_of(range(count), Rank(index, ranks), offset) for index in range(ranks)]
    assert sorted(item for share in shares for item in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_the_offset_decides_which_rank_gets_one_term_more():
    larger = [len(share_of(range(5), Rank(0, 2), offset)) for offset in range(4)]
    assert larger == [3, 2, 3, 2]


def test_two_measured_points_give_the_line():
    line = MemoryLine.through((1, 1300), (4, 2200))
    assert (line.base, line.per_term) == (1000, 300)
    assert line.largest(budget=10_000, limit=64) == 30
    assert line.largest(budget=10_000, limit=8) == 8
    assert line.largest(budget=900, limit=8) == 1, "one term is tried even if it should not fit"
    assert MemoryLine.through((1, 500), (4, 500)).largest(budget=1, limit=8) == 8


def test_on_a_cpu_the_largest_pack_follows_from_what_autograd_saves():
    weight = torch.randn(64, 64, requires_grad=True)
    sizes = []

    def run_pack(size: int) -> None:
        sizes.append(size)
        (torch.tanh(torch.randn(size * 1000, 64) @ weight)).sum().backward()

    cpu = torch.device("cpu")
    roomy = measure_largest_pack(run_pack, 10, device=cpu, memory_share=0.5, limit=64)
    assert sizes == [1, 4]
    assert roomy == 64
    tight = measure_largest_pack(run_pack, 10, device=cpu, memory_share=1e-12, limit=64)
    assert tight == 1


@pytest.mark.parametrize(
    ("free", "reserved", "others", "measured", "expected"),
    [
        (8_000, 0, 64, [1, 4], 8),
        (8_000, 5_000, 64, [1, 2], 3),
        (8_000, 0, 2, [1, 2], 8),  # another rank has less room
        (1_500, 0, 64, [1], 1),
    ],
)
def test_the_second_pack_is_one_that_fits_on_all_ranks(free, reserved, others, measured, expected, monkeypatch):
    monkeypatch.setattr(pack_size, "free_bytes", lambda device: free)
    monkeypatch.setattr(pack_size, "measured_bytes", lambda run, device: run())
    sizes = []

    def run_pack(size: int) -> int:
        sizes.append(size)
        return 1_000 * size

    found = measure_largest_pack(
        run_pack,  # type: ignore[arg-type]
        10,
        device=torch.device("cpu"),
        memory_share=1.0,
        limit=64,
        reserved_bytes=reserved,
        smallest=lambda size: min(size, others),
    )
    assert (sizes, found) == (measured, expected)


def test_a_tally_reads_tensors_once_and_only_when_a_result_is_requested(monkeypatch):
    reads = []
    monkeypatch.setattr(metrics, "to_host", lambda values: reads.append(len(values)) or list(values))
    whole, group, pack = Tally(), Tally(), Tally()
    masked = MaskedValues(torch.tensor([5.0, 7.0]), torch.tensor([False, True]))
    pack.add({"ratio": torch.tensor([1.0, 3.0]), "off": masked})
    pack.add({"none": MaskedValues(torch.tensor([5.0]), torch.tensor([False]))})
    group.merge(pack)
    whole.merge(group)
    whole.add({"ratio": torch.tensor([5.0])})
    assert reads == []
    assert (whole.mean("ratio"), whole.largest("ratio"), whole.means()) == (3, 5, {"off": 7, "ratio": 3})
    assert reads == [6]


def test_a_tally_of_parts_is_the_tally_of_the_whole():
    whole, parts = Tally(), [Tally(), Tally()]
    whole.add({"ratio": torch.tensor([1.0, 2.0, 6.0])})
    parts[0].add({"ratio": torch.tensor([6.0])})
    parts[1].add({"ratio": torch.tensor([2.0, 1.0])})
    parts[0].merge(parts[1])
    assert parts[0].mean("ratio") == whole.mean("ratio") == 3
    assert parts[0].largest("ratio") == whole.largest("ratio") == 6
    assert whole.mean("kl") is None
