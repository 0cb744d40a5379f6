"""Which update of a batch trains what: complete, even, and with an equal share of stale groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from digenrl.training.update_split import UpdateSplit, updates_of_places


@given(st.integers(1, 40), st.integers(0, 40), st.data())
def test_updates_have_equally_many_groups_and_equally_many_stale_ones(groups, stale, data):
    updates, stale = data.draw(st.integers(1, groups)), min(stale, groups)
    owners = updates_of_places(groups, updates, stale)
    for places in (owners, owners[:stale]):
        sizes = [places.count(update) for update in range(updates)]
        assert max(sizes) - min(sizes) <= (1 if places is owners else 2)
    assert owners[stale:] == sorted(owners[stale:]), "fresh groups are trained in the order of their places"
    assert len(owners) == groups


def test_without_stale_groups_an_update_has_consecutive_places():
    assert updates_of_places(8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert updates_of_places(8, 4, stale_groups=4) == [0, 1, 2, 3, 0, 1, 2, 3]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 5), st.sampled_from(["groups", "samples"]))
def test_every_unit_is_trained_in_exactly_one_update(groups, units, updates, of):
    updates = min(updates, groups)
    split = UpdateSplit(groups, units, updates, of)
    for place in range(groups):
        trained = [list(split.units(place, update)) for update in range(updates)]
        assert sorted(unit for part in trained for unit in part) == list(range(units))
        assert max(map(len, trained)) <= split.most_units()
        assert [update for update, part in enumerate(trained) if part][-1] == split.last_update(place)
        assert all((place in split.places(update)) == bool(part) for update, part in enumerate(trained))


def test_updates_of_samples_have_part_of_every_group_and_of_every_slice():
    split = UpdateSplit(groups=3, units_per_group=6, updates=2, of="samples")
    assert split.places(0) == split.places(1) == [0, 1, 2]
    assert [list(split.units(place, 0)) for place in range(3)] == [[0, 2, 4], [1, 3, 5], [0, 2, 4]]
    first_slice = {0, 1, 2}
    assert all(first_slice & set(split.units(place, update)) for place in range(3) for update in range(2))
