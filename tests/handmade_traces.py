"""Handmade traces, small enough to check by eye, and a large synthetic one."""

from __future__ import annotations

from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work

SECOND = 1_000_000_000


def span(lane: str, work: Work, start_s: float, end_s: float, **ids: int) -> Span:
    """A span with its times in seconds, of step 0 by default."""
    return Span(lane, work, round(start_s * SECOND), round(end_s * SECOND), **{"step": 0, **ids})


def on_policy_trace() -> Trace:
    """The two-step worked example of the cost model: lanes of 2 s and 3 s, commits at 9 s and 19 s."""
    lanes = (
        LaneInfo("fast", "generator"),
        LaneInfo("slow", "generator"),
        LaneInfo("reward-0", "reward"),
        LaneInfo("trainer", "trainer"),
    )
    spans: list[Span] = []
    for step, at in ((0, 0.0), (1, 10.0)):
        fresh = {"step": step, "size": 1, "version": step}
        spans += [
            span("fast", Work.GENERATE, at, at + 2, group=0, first=0, **fresh),
            span("slow", Work.GENERATE, at, at + 3, group=0, first=1, **fresh),
            span("reward-0", Work.SCORE, at + 2, at + 2.5, group=0, first=0, **fresh),
            span("fast", Work.GENERATE, at + 2, at + 4, group=1, first=0, **fresh),
            span("reward-0", Work.SCORE, at + 3, at + 3.5, group=0, first=1, **fresh),
            span("slow", Work.GENERATE, at + 3, at + 6, group=1, first=1, **fresh),
            span("trainer", Work.TRAIN, at + 3.5, at + 5.5, step=step, group=0, size=2, version=step),
            span("reward-0", Work.SCORE, at + 4, at + 4.5, group=1, first=0, **fresh),
            span("reward-0", Work.SCORE, at + 6, at + 6.5, group=1, first=1, **fresh),
            span("trainer", Work.TRAIN, at + 6.5, at + 8.5, step=step, group=1, size=2, version=step),
            span("trainer", Work.COMMIT, at + 8.5, at + 9, step=step, version=step + 1),
        ]
        if step == 0:
            spans.append(span("trainer", Work.PUBLISH, at + 9, at + 10, step=step, version=step + 1))
    return Trace(lanes, tuple(sorted(spans, key=lambda s: s.start_ns)), 19 * SECOND)


def helped_trace() -> Trace:
    """The one-step worked example with help: one generator of 4 s, a helper of 5 s that generates one sample."""
    lanes = (LaneInfo("gen", "generator"), LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"))
    spans = (
        span("gen", Work.GENERATE, 0, 4, group=0, first=0, size=1),
        span("trainer", Work.SWITCH, 0, 0.5),
        span("helper-0", Work.HELP, 0.5, 5.5, group=0, first=1, size=1),
        span("gen", Work.GENERATE, 4, 8, group=1, first=0, size=1),
        span("trainer", Work.SWITCH, 5.5, 6),
        span("trainer", Work.TRAIN, 6, 8, group=0, size=2),
        span("gen", Work.GENERATE, 8, 12, group=1, first=1, size=1),
        span("trainer", Work.TRAIN, 12, 14, group=1, size=2),
        span("trainer", Work.COMMIT, 14, 14, version=1),
    )
    return Trace(lanes, spans, 14 * SECOND)


def both_trace() -> Trace:
    """Two steps in which a generator and the trainer's card both generate and train; commits at 8 s and 17 s."""
    lanes = (LaneInfo("gen", "generator"), LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"))
    spans: list[Span] = []
    for step, at in ((0, 0.0), (1, 9.0)):
        one = {"step": step, "size": 1, "version": step}
        spans += [
            span("gen", Work.GENERATE, at, at + 2, group=0, first=0, **one),
            span("helper-0", Work.HELP, at, at + 2, group=0, first=1, **one),
            span("gen", Work.GENERATE, at + 2, at + 4, group=1, first=0, **one),
            span("helper-0", Work.HELP, at + 2, at + 4, group=1, first=1, **one),
            span("gen", Work.TRAIN, at + 4, at + 6, group=0, first=1, **one),
            span("helper-0", Work.TRAIN, at + 4, at + 5, group=0, first=0, **one),
            span("helper-0", Work.TRAIN, at + 5, at + 7, group=1, step=step, size=2, version=step),
            span("gen", Work.SEND, at + 6, at + 6.5, step=step),
            span("trainer", Work.COMMIT, at + 7, at + 8, step=step, version=step + 1),
        ]
    spans.append(span("trainer", Work.PUBLISH, 8, 9, version=1))
    return Trace(lanes, tuple(sorted(spans, key=lambda s: s.start_ns)), 17 * SECOND, shares_work=True)


def large_trace(generators: int = 24, steps: int = 3) -> Trace:
    """Many generator lanes of two kinds of card, with stale starts and help; synthetic, not simulated."""
    names = [f"a100-{i}" for i in range(generators * 2 // 3)]
    names += [f"l40s-{i}" for i in range(generators - len(names))]
    lanes = [LaneInfo(name, "generator") for name in names]
    lanes += [LaneInfo(f"reward-{i}", "reward") for i in range(2)]
    lanes += [
        LaneInfo("trainer", "trainer"),
        LaneInfo("helper-0", "trainer"),
        LaneInfo("helper-1", "trainer"),
    ]
    spans: list[Span] = []
    for step in range(steps):
        spans += _large_step(names, step, at=step * 20.0, last=step == steps - 1)
    spans.sort(key=lambda s: s.start_ns)
    return Trace(tuple(lanes), tuple(spans), max(s.end_ns for s in spans))


def _large_step(names: list[str], step: int, at: float, last: bool) -> list[Span]:
    """One step of 20 s: three slices per lane; from the second step on, each lane's first slice is stale."""
    groups = 8
    spans: list[Span] = []
    ends: list[float] = []
    for slot in range(3):
        for index, name in enumerate(names):
            seconds = (4.2 if name.startswith("a100") else 5.5) + 0.1 * (index % 4)
            start = at + slot * seconds - (2.4 if step else 0.0) + (1.2 if step and slot else 0.0)
            number = slot * len(names) + index
            ids = {
                "step": step,
                "group": number * groups // (3 * len(names)),
                "first": 2 * (number % 9),
                "size": 2,
            }
            stale = step > 0 and slot == 0
            spans.append(
                span(name, Work.GENERATE, start, start + seconds, version=step - stale, **ids),
            )
            ends.append(start + seconds)
    for helper in range(2):
        ids = {"step": step, "group": 3, "first": 14 + 2 * helper, "size": 2}
        spans.append(span(f"helper-{helper}", Work.HELP, at + 1.5, at + 5.5 - helper, version=step, **ids))
    spans += [span("trainer", Work.SWITCH, at + 1, at + 1.5, step=step)]
    spans += [span("trainer", Work.SWITCH, at + 5.5, at + 6, step=step)]
    score_s = 6.0 / len(ends) * 2
    free_s = [at, at]
    for number, end in enumerate(sorted(ends)):
        lane = number % 2
        start = max(free_s[lane], end)
        free_s[lane] = start + score_s
        spans.append(
            span(f"reward-{lane}", Work.SCORE, start, start + score_s, step=step, group=0, first=number, size=1)
        )
    for group in range(groups):
        start = at + 6 + 1.4 * group + (0.4 if group > 3 else 0)
        spans.append(
            span("trainer", Work.TRAIN, start, start + 1.4, step=step, group=group, size=18, version=step)
        )
    spans.append(span("trainer", Work.COMMIT, at + 17.6, at + 18.2, step=step, version=step + 1))
    if not last:
        spans.append(span("trainer", Work.PUBLISH, at + 18.2, at + 19.4, step=step, version=step + 1))
    return spans
