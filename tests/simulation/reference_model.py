"""A deliberately naive reading of the cost model, kept as an oracle for the simulator's tests.

"Rule n" cites the numbered rules of the model's page and "exactly n" its list of exact readings. Times are
whole nanoseconds inside and float seconds in the answer (exactly 1). Nothing here is shared with the package.

`reward.batch` is read as: a free reward lane takes the oldest sample and, up to `batch` in all, those behind it
that came with the same slice, `seconds` for each.

`evaluation` is read as: version 0, every `every`-th version and the last one are evaluated. Idle generator lanes
that have the version take its chunks before slices, `chunk` seconds each. Sampled chunks queue for the reward
lanes like slices, and before slices that end with them; each keeps a lane for `score` seconds. A version is
published once the chunks of all earlier versions are sampled, and a version to be evaluated is sent out before
the next commit. `checkpoint` is read as: after every `every`-th commit and the last one the trainer is busy for
`seconds`. The run ends when the last version is evaluated and saved.

Not covered: `help: auto`, `dispatch: earliest_finish`, evaluations with `help: search`, and the validation of a
SPEC.
"""

import copy
import heapq
from fractions import Fraction
from itertools import pairwise
from math import floor, inf

NANOSECONDS = 10**9
CHUNK = -1  # in the place of a sample's slice


def reference_answer(spec: dict) -> dict:
    """The Answer for one SPEC; `slice: auto` takes the least makespan, ties the largest (exactly 16)."""
    if spec["slice"] != "auto":
        return answer_for_slice(spec, int(spec["slice"]))
    sizes = reversed(divisors(int(spec["samples_per_prompt"])))
    return min((answer_for_slice(spec, size) for size in sizes), key=lambda answer: answer["makespan"])


def answer_for_slice(spec: dict, slice_size: int) -> dict:
    """Run the schedule and turn its tallies into the Answer (idle shares: exactly 14)."""
    costs = Costs(spec, slice_size)
    tally = run_colocated(costs) if costs.colocated else run_disaggregated(costs)
    makespan = tally.end
    lanes = len(costs.lane_ns) + (costs.helper_lanes if costs.colocated else 0)
    bound = least_makespan(costs)
    return {
        "makespan": makespan / NANOSECONDS,
        "step_end": [end / NANOSECONDS for end in tally.step_end],
        "throughput": float(Fraction(costs.samples * NANOSECONDS, makespan)),
        "bound": float(bound),
        "efficiency": float(bound * NANOSECONDS / makespan),
        "generator_idle": float(1 - Fraction(tally.generating_ns, lanes * makespan)),
        "trainer_idle": float(1 - Fraction(tally.trainer_busy_ns, makespan)),
        "stale_samples": tally.stale_samples,
        "helped_samples": tally.helped_samples,
        "help_decisions": [[time / NANOSECONDS, word] for time, word in tally.help_decisions],
        "assisted_samples": 0,  # no SPEC of the oracle has lanes that do both
    }


# ---- numbers -----------------------------------------------------------------------------------------------


def exact(number) -> Fraction:
    """The decimal that was written, not the binary float nearest to it (exactly 1)."""
    return Fraction(str(number))


def nanoseconds(seconds: Fraction) -> int:
    """Rounded half-even (exactly 1); `round` of a Fraction is."""
    return round(seconds * NANOSECONDS)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def table_seconds(table: dict, size: int) -> Fraction:
    """Linear interpolation from the implied point 0 -> 0; the last slope continues (exactly 4)."""
    points = [(Fraction(0), Fraction(0)), *sorted((exact(key), exact(value)) for key, value in table.items())]
    segments = list(pairwise(points))
    (x0, y0), (x1, y1) = next((segment for segment in segments if size <= segment[1][0]), segments[-1])
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def best_rate(table: dict, samples_per_prompt: int) -> Fraction:
    """Most samples per second of one lane over the divisors of G (exactly 16)."""
    return max(size / table_seconds(table, size) for size in divisors(samples_per_prompt))


class Costs:
    """The constants of a run: sizes, durations and rules, with defaults filled in (exactly 5)."""

    def __init__(self, spec: dict, slice_size: int):
        trainer, policy, reward = spec["trainer"], spec.get("policy") or {}, spec.get("reward") or {}
        self.read_rules(policy)
        self.steps, self.prompts = int(spec["steps"]), int(spec["prompts"])
        self.group_size, self.slice_size = int(spec["samples_per_prompt"]), slice_size
        self.step_size = self.prompts * self.group_size
        self.samples = self.steps * self.step_size
        self.slices_per_group = self.group_size // slice_size
        self.slices_per_step = self.prompts * self.slices_per_group
        self.stale_budget = floor(exact(policy.get("stale_fraction", 0)) * self.step_size)  # exactly 13

        pools = [pool for pool in spec["generators"] for _ in range(int(pool.get("count", 1)))]
        tables = [pool["seconds"] for pool in pools]
        common = spec.get("publish", 0)
        self.lane_publish_ns = [nanoseconds(exact(pool.get("publish", common))) for pool in pools]
        self.lane_ns = [nanoseconds(table_seconds(table, slice_size)) for table in tables]
        self.generator_rate = sum(best_rate(table, self.group_size) for table in tables)
        self.read_helper(trainer.get("helper"))

        self.reward_ns = nanoseconds(exact(reward.get("seconds", 0)))
        self.reward_lanes = int(reward.get("lanes", 0)) if self.reward_ns else 0  # exactly 3
        self.reward_batch = int(reward.get("batch", 1))
        self.sample_seconds = exact(trainer["seconds_per_sample"])
        self.unit_size = {"sample": 1, "group": self.group_size, "batch": self.step_size}[self.stream]
        self.units_per_step = self.step_size // self.unit_size
        self.train_ns = nanoseconds(self.unit_size * self.sample_seconds)
        self.commit_seconds = exact(trainer.get("commit", 0))
        self.commit_ns = nanoseconds(self.commit_seconds)
        self.role_change_ns = nanoseconds(exact((spec.get("colocate") or {}).get("switch", 0)))
        evaluation, checkpoint = spec.get("evaluation") or {}, spec.get("checkpoint") or {}
        self.evaluate_every, self.chunks = int(evaluation.get("every", 0)), int(evaluation.get("chunks", 0))
        self.chunk_ns = nanoseconds(exact(evaluation.get("chunk", 0)))
        self.chunk_score_ns = nanoseconds(exact(evaluation.get("score", 0)))
        self.save_every = int(checkpoint.get("every", 0))
        self.save_ns = nanoseconds(exact(checkpoint.get("seconds", 0)))

    def read_rules(self, policy: dict) -> None:
        self.order, self.stream = policy.get("order", "generation"), policy.get("stream", "group")
        self.help, self.colocated = policy.get("help", "none"), policy.get("colocated", False)
        if policy.get("dispatch", "eager") != "eager":
            raise NotImplementedError("the reference model does not know `dispatch: earliest_finish`")

    def read_helper(self, helper: dict | None) -> None:
        """`help` without a helper is `none` (exactly 5); a helper without lanes counts as none."""
        self.helper_lanes = int(helper.get("lanes", 1)) if helper else 0
        if not self.helper_lanes:
            self.help, self.helper_rate = "none", Fraction(0)
            return
        if self.help == "auto" and not self.colocated:
            raise NotImplementedError("the reference model does not know `help: auto`")
        self.helper_ns = nanoseconds(table_seconds(helper["seconds"], self.slice_size))
        self.switch_in_ns = nanoseconds(exact(helper.get("switch_in", 0)))
        self.switch_out_ns = nanoseconds(exact(helper.get("switch_out", 0)))
        self.helper_rate = self.helper_lanes * best_rate(helper["seconds"], self.group_size)

    def is_due(self, version: int, every: int) -> bool:
        """Whether a version is evaluated or saved. The last one always is."""
        return every > 0 and (version % every == 0 or version == self.steps)

    def step_of(self, slice_index: int) -> int:
        """Slices are numbered through all the steps' lists, which one cursor walks (exactly 8)."""
        return slice_index // self.slices_per_step

    def group_of(self, slice_index: int) -> int:
        """Rule 2: `generation` lists group by group, `batch` one slice of every group in turn."""
        place = slice_index % self.slices_per_step
        return place % self.prompts if self.order == "batch" else place // self.slices_per_group


def colocated_sample_seconds(costs: Costs) -> Fraction:
    """Rule 7: training time shrinks as the generators' cards join."""
    return costs.sample_seconds * costs.helper_lanes / (costs.helper_lanes + len(costs.lane_ns))


def least_makespan(costs: Costs) -> Fraction:
    """`bound` of the Answer; the colocated one is exactly 15."""
    commits = costs.steps * costs.commit_seconds
    if costs.colocated:
        generation = costs.samples / (costs.generator_rate + costs.helper_rate)
        return generation + costs.samples * colocated_sample_seconds(costs) + commits
    training = costs.samples * costs.sample_seconds + commits
    helping = costs.helper_rate if costs.help != "none" else Fraction(0)
    return max(training, (costs.samples + helping * training) / (costs.generator_rate + helping))


class Tally:
    """What the Answer reports; nothing here is ever read back by a decision."""

    def __init__(self):
        self.step_end: list[int] = []
        self.end = 0
        self.generating_ns = self.trainer_busy_ns = self.stale_samples = self.helped_samples = 0
        self.help_decisions: list[tuple[int, str]] = []


# ---- colocated (rule 7) ------------------------------------------------------------------------------------


def run_colocated(costs: Costs) -> Tally:
    """Generate, score, switch, train, commit, switch; there is no switch after the last job."""
    tally, clock, switches, reward_lanes = Tally(), 0, 0, [0] * costs.reward_lanes
    train_ns = nanoseconds(costs.step_size * colocated_sample_seconds(costs))
    for version in range(costs.steps + 1):
        chunks = costs.chunks if costs.is_due(version, costs.evaluate_every) else 0
        slices = costs.slices_per_step if version < costs.steps else 0
        if version and (chunks or slices):
            clock += costs.role_change_ns
            switches += 1
        deliveries = generate_on_all_lanes(costs, clock, chunks, slices)
        tally.generating_ns += sum(duration for _end, _is_slice, duration in deliveries)
        scored = score_in_order(costs, deliveries, reward_lanes)
        if version == costs.steps:
            tally.end = max([clock, *scored, *reward_lanes])
            break
        sampled = [end for end, is_slice, _duration in deliveries if not is_slice]
        clock = max([clock, *scored, *sampled]) + costs.role_change_ns + train_ns + costs.commit_ns
        switches += 1
        tally.step_end.append(clock)
        if costs.is_due(version + 1, costs.save_every):
            clock += costs.save_ns
            tally.trainer_busy_ns += costs.save_ns
    tally.trainer_busy_ns += costs.steps * (train_ns + costs.commit_ns) + switches * costs.role_change_ns
    return tally


def generate_on_all_lanes(costs: Costs, start: int, chunks: int, slices: int) -> list[tuple[int, bool, int]]:
    """(end, whether a slice, duration), each taken by the lane idle first, then fastest, then lowest."""
    durations = costs.lane_ns + [costs.helper_ns] * costs.helper_lanes
    lanes = [(start, duration, index) for index, duration in enumerate(durations)]
    heapq.heapify(lanes)
    deliveries = []
    for is_slice in [False] * chunks + [True] * slices:
        idle_at, slice_ns, index = heapq.heappop(lanes)
        duration = slice_ns if is_slice else costs.chunk_ns
        deliveries.append((idle_at + duration, is_slice, duration))
        heapq.heappush(lanes, (idle_at + duration, slice_ns, index))
    return deliveries


def score_in_order(costs: Costs, deliveries: list[tuple[int, bool, int]], free_at: list[int]) -> list[int]:
    """Rule 3: when slices, or without any chunks, are scored. `free_at` of each reward lane is updated."""
    any_slice = any(is_slice for _end, is_slice, _duration in deliveries)
    scored = []
    for end, is_slice, _duration in sorted(deliveries):
        samples = costs.slice_size if is_slice else 1
        each_ns = costs.reward_ns if is_slice else costs.chunk_score_ns
        scored_at = end
        for first in range(0, samples if costs.reward_lanes else 0, costs.reward_batch):
            together = min(costs.reward_batch, samples - first)
            done = max(end, heapq.heappop(free_at)) + together * each_ns
            heapq.heappush(free_at, done)
            scored_at = max(scored_at, done)
        if is_slice or not any_slice:
            scored.append(scored_at)
    return scored


# ---- disaggregated (rules 1-6) -----------------------------------------------------------------------------


def run_disaggregated(costs: Costs) -> Tally:
    """Run one world to its end; the help rule decides each bubble (rule 5)."""
    world, plan = World(costs), []
    while not world.finished():
        if not world.advance():
            continue
        if costs.help == "greedy":
            rounds = inf
        else:
            plan = plan or list(fewest_rounds_to_earliest_commit(world, inf, {})[1])
            rounds = plan.pop(0)
        world.tally.help_decisions.append((world.clock, "help" if rounds else "wait"))
        world.settle_bubble(rounds)
    world.tally.end = world.clock
    return world.tally


class World:
    """The state at one instant. Work of one kind costs the same for every group, so order among ready groups
    (rule 4, exactly 6) can change no time: what is ready is counted, per step, in units of the stream."""

    def __init__(self, costs: Costs):
        self.costs, self.tally, self.clock = costs, Tally(), 0
        self.cursor = 0  # the next slice that any lane may take
        self.running: list[tuple[int, int, int]] = []  # (end, slice, lane); helper lanes are below 0
        self.stale_started = [0] * costs.steps  # samples per step, against one budget each
        self.to_score: list[int] = []  # the FIFO of rule 3; a sample is known by its slice
        self.scoring: list[tuple[int, list[int]]] = []  # (end, samples) of each busy reward lane
        self.scored: dict[tuple[int, int], int] = {}
        self.ready = [0] * costs.steps
        self.trained = 0  # units of the lowest uncommitted step
        self.committed = 0  # also the newest version on the trainer's own lanes
        self.sent, self.published = 0, [-1] * len(costs.lane_ns)  # to generators and on each of them
        # (when, version, lane); version 0 arrives at t=0 (rule 1)
        self.publications = [(0, 0, lane) for lane in range(len(costs.lane_ns))]
        self.to_sample: list[int] = []  # chunks that no lane has taken, as their versions, oldest first
        self.sampling: list[tuple[int, int, int]] = []  # (end, version, lane)
        self.unscored_chunks = 0
        self.queue_evaluation(0)
        self.activity, self.activity_end = "free", 0
        self.in_bubble = False
        self.rounds_wanted = self.rounds_run = 0

    def fork(self) -> "World":
        """An independent copy with its own tally, which is not reported."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict):
                setattr(twin, name, value.copy())
        twin.tally = Tally()
        return twin

    def key(self) -> str:
        """Worlds at a bubble with equal keys have equal futures."""
        past = ("costs", "tally", "rounds_wanted", "rounds_run", "activity_end")
        return repr([value for name, value in vars(self).items() if name not in past])

    def finished(self) -> bool:
        evaluating = self.to_sample or self.sampling or self.unscored_chunks
        return self.committed == self.costs.steps and not evaluating and self.activity == "free"

    # One instant (exactly 2) ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Let the next instant happen, which is this one again after a zero-length start; True when a bubble
        opened that asks for a decision."""
        self.clock = min(self.pending_ends())
        while self.clock in self.pending_ends():
            self.end_slices()
            self.score()
            self.complete_trainer_activity()
            self.publish()
        self.start_slices()
        return self.trainer_decides()

    def pending_ends(self) -> list[int]:
        trainer = [] if self.activity in ("free", "helping") else [self.activity_end]
        ends = [end for end, *_ in self.running + self.sampling + self.publications]
        return ends + [end for end, _samples in self.scoring] + trainer

    def end_slices(self) -> None:
        """Slices that end together enter the FIFO in list order (exactly 3), after chunks."""
        sampled = [entry for entry in self.sampling if entry[0] == self.clock]
        for entry in sampled:
            self.sampling.remove(entry)
            self.to_score += [CHUNK] if self.costs.reward_lanes else []
            self.unscored_chunks += 1 if self.costs.reward_lanes else 0
        if sampled:
            self.send_newest_version()
        ended = sorted(index for end, index, _lane in self.running if end == self.clock)
        self.running = [entry for entry in self.running if entry[0] != self.clock]
        for index in ended:
            self.to_score += [index] * self.costs.slice_size

    def score(self) -> None:
        """Rule 3; without reward lanes a sample is scored as it is delivered."""
        for end, samples in self.scoring.copy():
            if end == self.clock:
                self.scoring.remove((end, samples))
                for sample in samples:
                    self.mark_scored(sample)
        if not self.costs.reward_lanes:
            while self.to_score:
                self.mark_scored(self.to_score.pop(0))
        while self.to_score and len(self.scoring) < self.costs.reward_lanes:
            ahead = self.to_score[: self.costs.reward_batch]
            samples = [sample for sample in ahead if sample == ahead[0]]
            if ahead[0] == CHUNK:
                samples = [CHUNK]
            each_ns = self.costs.chunk_score_ns if ahead[0] == CHUNK else self.costs.reward_ns
            self.scoring.append((self.clock + len(samples) * each_ns, samples))
            del self.to_score[: len(samples)]

    def mark_scored(self, sample: int) -> None:
        """Rule 4: a sample, a whole group or a whole step becomes ready, by stream."""
        if sample == CHUNK:
            self.unscored_chunks -= 1
            return
        step, group = self.costs.step_of(sample), self.costs.group_of(sample)
        unit = (step, 0 if self.costs.stream == "batch" else group)
        self.scored[unit] = self.scored.get(unit, 0) + 1
        if self.scored[unit] % self.costs.unit_size == 0:
            self.ready[step] += 1

    def complete_trainer_activity(self) -> None:
        if self.activity in ("free", "helping") or self.activity_end != self.clock:
            return
        ended, self.activity = self.activity, "free"
        if ended in ("switch_in", "round"):
            self.activity = "helping"
        elif ended == "train":
            self.trained += 1
        elif ended == "commit":
            self.committed, self.trained = self.committed + 1, 0
            self.tally.step_end.append(self.clock)
            self.queue_evaluation(self.committed)
            self.send_newest_version()
            if self.costs.is_due(self.committed, self.costs.save_every):
                self.begin("save", self.costs.save_ns)

    def queue_evaluation(self, version: int) -> None:
        if self.costs.is_due(version, self.costs.evaluate_every):
            self.to_sample += [version] * self.costs.chunks

    def send_newest_version(self) -> None:
        """Rule 1, unless an older version is still needed for its evaluation."""
        needed = self.to_sample + [version for _end, version, _lane in self.sampling]
        if self.sent < self.committed and min(needed, default=self.committed) == self.committed:
            self.sent = self.committed
            for lane, publish_ns in enumerate(self.costs.lane_publish_ns):
                self.publications.append((self.clock + publish_ns, self.sent, lane))

    def publish(self) -> None:
        for when, version, lane in self.publications:
            if when == self.clock:
                self.published[lane] = version
        self.publications = [entry for entry in self.publications if entry[0] != self.clock]

    # Slices -----------------------------------------------------------------------------------------------

    def may_start(self, version: int) -> bool:
        """May the next slice start on this version: its own (rule 1) or one behind, in budget (rule 6)?"""
        step, costs = self.costs.step_of(self.cursor), self.costs
        if step >= costs.steps or step > version + 1:
            return False
        return step <= version or self.stale_started[step] + costs.slice_size <= costs.stale_budget

    def start_slice(self, lane: int, duration: int, version: int) -> None:
        step, size = self.costs.step_of(self.cursor), self.costs.slice_size
        if step > version:
            self.stale_started[step] += size
            self.tally.stale_samples += size
        self.running.append((self.clock + duration, self.cursor, lane))
        self.cursor += 1

    def start_slices(self) -> None:
        """Rule 2: each slice goes to the idle lane that would finish it first, then to the one that gets new
        versions first, then to the lower index."""
        busy = {lane for _end, _slice, lane in self.running + self.sampling}
        times = zip(self.costs.lane_ns, self.costs.lane_publish_ns, range(len(self.published)), strict=True)
        for duration, _publish_ns, lane in sorted(times):
            version = self.published[lane]
            if lane in busy:
                continue
            if version in self.to_sample:
                self.to_sample.remove(version)
                self.sampling.append((self.clock + self.costs.chunk_ns, version, lane))
                self.tally.generating_ns += self.costs.chunk_ns
            elif self.may_start(version):
                self.start_slice(lane, duration, version)
                self.tally.generating_ns += duration

    # The trainer ------------------------------------------------------------------------------------------

    def begin(self, activity: str, duration: int) -> None:
        self.activity, self.activity_end, self.in_bubble = activity, self.clock + duration, False
        self.tally.trainer_busy_ns += duration

    def trainer_decides(self) -> bool:
        """Rules 4 and 5. A bubble opens once (exactly 10) and asks only if a slice may start (exactly 12)."""
        costs = self.costs
        if self.committed == costs.steps:
            return False  # the run is over
        if self.activity == "helping" and self.wants_round():
            self.run_round()
        elif self.activity == "helping":
            self.begin("switch_out", costs.switch_out_ns)
        elif self.activity == "free" and self.trained == costs.units_per_step:
            if self.committed in self.to_sample and self.sent < self.committed:
                return False  # its evaluation would never take place
            self.begin("commit", costs.commit_ns)
        elif self.activity == "free" and self.ready[self.committed]:
            self.ready[self.committed] -= 1
            self.begin("train", costs.train_ns)
        elif self.activity == "free" and not self.in_bubble:
            self.in_bubble = True
            return costs.help != "none" and self.may_start(self.committed)
        return False

    def settle_bubble(self, rounds: float) -> None:
        """Wait (0) or help; `greedy` wants rounds without end and stops by its own rule."""
        self.rounds_wanted, self.rounds_run = rounds, 0
        if rounds:
            self.begin("switch_in", self.costs.switch_in_ns)

    def wants_round(self) -> bool:
        """Greedy: the first round whatever is ready (exactly 7). Search: the count it chose, while a slice of
        the current step is unstarted (exactly 11)."""
        if self.costs.help == "greedy":
            something_to_train = self.rounds_run > 0 and self.ready[self.committed] > 0
            return not something_to_train and self.may_start(self.committed)
        return self.rounds_run < self.rounds_wanted and self.current_slice_unstarted()

    def current_slice_unstarted(self) -> bool:
        return self.costs.step_of(self.cursor) == self.committed

    def run_round(self) -> None:
        """Slices are taken at round start; with too few the lower lanes take them (exactly 9)."""
        for lane in range(self.costs.helper_lanes):
            if self.may_start(self.committed):
                self.start_slice(-1 - lane, self.costs.helper_ns, self.committed)
                self.tally.helped_samples += self.costs.slice_size
        self.rounds_run += 1
        self.begin("round", self.costs.helper_ns)


# ---- search (rule 5, exactly 11) ---------------------------------------------------------------------------


def fewest_rounds_to_earliest_commit(bubble: World, limit: float, known: dict) -> tuple[float, tuple]:
    """(commit end, round counts of this and the step's later bubbles), or (inf, ()) if none beats `limit`.

    Counts are tried from the fewest and must beat what came before, so ties fall to the lexicographically
    fewest. `known` maps a world to the limit it was searched under and what was found.
    """
    key = bubble.key()
    searched_under, best = known.get(key, (-inf, (inf, ())))
    if best[0] == inf and searched_under < limit:
        best, rounds = (inf, ()), 0
        while earliest_conceivable_commit(bubble, rounds) < min(limit, best[0]):
            commit_end, counts, rounds_run = try_rounds(bubble, rounds, min(limit, best[0]), known)
            if commit_end < min(limit, best[0]):
                best = (commit_end, (rounds, *counts))
            if rounds_run < rounds or not bubble.current_slice_unstarted():
                break  # this many rounds cannot be run, so neither can more
            rounds += 1
        known[key] = (limit, best)
    return best if best[0] < limit else (inf, ())


def try_rounds(bubble: World, rounds: int, limit: float, known: dict) -> tuple[float, tuple, int]:
    """Simulate this choice to the step's commit, branching at every further bubble."""
    world, step = bubble.fork(), bubble.committed
    world.settle_bubble(rounds)
    while True:
        asks = world.advance()
        if world.committed > step:  # what opens at this very instant is the next step's bubble
            return world.clock, (), world.rounds_run
        if asks:
            return *fewest_rounds_to_earliest_commit(world, limit, known), world.rounds_run


def earliest_conceivable_commit(bubble: World, rounds: int) -> int:
    """If nothing but the trainer's own remaining work took time; for pruning only."""
    costs = bubble.costs
    helping = costs.switch_in_ns + rounds * costs.helper_ns + costs.switch_out_ns if rounds else 0
    training = (costs.units_per_step - bubble.trained) * costs.train_ns
    return bubble.clock + helping + training + costs.commit_ns
