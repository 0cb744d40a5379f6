"""Random SPECs as hypothesis strategies, small enough for an exhaustive oracle."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# With coarse steps events coincide, so the order of events at one instant matters.
STEPS_MS = (1000, 500, 100, 7)


@st.composite
def seconds(draw: st.DrawFn, least_ms: int = 1, most_ms: int = 3000) -> float:
    """A multiple of one of the steps, as it would be typed."""
    step = draw(st.sampled_from(STEPS_MS))
    return draw(st.integers(max(1, least_ms // step), max(1, most_ms // step))) * step / 1000


@st.composite
def slice_tables(draw: st.DrawFn) -> dict[int, float]:
    """Slice sizes and their seconds, which grow with the size."""
    table, total = {}, 0.0
    for size in sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))):
        total = round(total + draw(seconds()), 3)
        table[size] = total
    return table


@st.composite
def evaluation_and_checkpoint(draw: st.DrawFn) -> dict[str, Any]:
    """The keys `evaluation` and `checkpoint` of a SPEC, one of them or both."""
    evaluation = {
        "every": draw(st.integers(1, 3)),
        "chunks": draw(st.integers(1, 4)),
        "chunk": draw(seconds(most_ms=6000)),
        "score": draw(st.one_of(st.just(0.0), seconds(most_ms=1000))),
    }
    checkpoint = {"every": draw(st.integers(1, 3)), "seconds": draw(st.one_of(st.just(0.0), seconds()))}
    both = {"evaluation": evaluation, "checkpoint": checkpoint}
    return {key: both[key] for key in draw(st.sampled_from([("evaluation",), ("checkpoint",), tuple(both)]))}


def _given(key: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {key: value}


@st.composite
def spec_contents(
    draw: st.DrawFn,
    helps: tuple[str, ...] = ("none", "greedy", "search"),
    dispatches: tuple[str, ...] = ("eager",),
    most_samples: int = 16,
    colocated: bool | None = None,
) -> dict[str, Any]:
    """A complete SPEC as it would be read from a file."""
    group = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    divisors = [size for size in range(1, group + 1) if group % size == 0]
    maybe = st.one_of(st.just(0.0), seconds(most_ms=1000))
    pools = draw(st.lists(st.tuples(st.integers(1, 3), slice_tables()), min_size=1, max_size=2))
    own_publish = st.one_of(st.none(), st.just(0.0), seconds(most_ms=6000))
    return {
        "steps": draw(st.integers(1, 3)),
        "prompts": draw(st.integers(1, max(1, most_samples // group))),
        "samples_per_prompt": group,
        "slice": draw(st.sampled_from(divisors)),
        "generators": [
            {"name": f"pool{index}", "count": count, "seconds": table, **_given("publish", draw(own_publish))}
            for index, (count, table) in enumerate(pools)
        ],
        "reward": {"lanes": draw(st.integers(0, 3)), "seconds": draw(maybe)},
        "trainer": {
            "seconds_per_sample": draw(seconds(most_ms=2000)),
            "commit": draw(maybe),
            "helper": {
                "lanes": draw(st.integers(1, 3)),
                "seconds": draw(slice_tables()),
                "switch_in": draw(maybe),
                "switch_out": draw(maybe),
            },
        },
        "publish": draw(maybe),
        "policy": {
            "order": draw(st.sampled_from(["generation", "batch"])),
            "stream": draw(st.sampled_from(["group", "batch", "sample"])),
            "help": draw(st.sampled_from(helps)),
            "dispatch": draw(st.sampled_from(dispatches)),
            "stale_fraction": draw(st.sampled_from([0, 0.25, 0.3, 0.5, 1])),
            "colocated": draw(st.booleans()) if colocated is None else colocated,
        },
        "colocate": {"switch": draw(maybe)},
    }


def publish_to_all_at_once(content: dict[str, Any], seconds: float) -> None:
    """Gives a SPEC one time of publishing."""
    content["publish"] = seconds
    for pool in content["generators"]:
        pool.pop("publish", None)


@st.composite
def both_contents(draw: st.DrawFn, helps: tuple[str, ...] = ("greedy", "search", "auto")) -> dict[str, Any]:
    """A complete SPEC with `assist: both`. Some generators cannot train."""
    content = draw(spec_contents(helps=helps, colocated=False))
    group, maybe = content["samples_per_prompt"], st.one_of(st.just(0.0), seconds(most_ms=500))
    for pool in content["generators"]:
        if draw(st.integers(0, 3)):
            pool |= {"train_seconds": draw(seconds(most_ms=2000)), "switch": draw(maybe)}
    divisors = [size for size in range(1, group + 1) if group % size == 0]
    content["trainer"] |= {"job": draw(st.sampled_from(divisors)), "reduce": draw(maybe)}
    content["policy"] |= {"assist": "both", "stream": "group"}
    return content
