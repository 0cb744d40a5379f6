"""A run goes on when workers or machines are lost: others take their place and do what was not done. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from digenrl.config.recipe import Recipe
from digenrl.driver.cost_tracker import CostTracker, timed_offer
from digenrl.driver.lanes import Lanes
from digenrl.driver.pending_jobs import STARTING, Completed, PendingJob, PendingJobs
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.supervisor import Supervisor, TrainerLostError
from digenrl.driver.weight_versions import WeightVersions
from digenrl.records import Event, LaneOffer, Slice, WorkerJoined, WorkerLost
from digenrl.transports.contract import ArtifactStore, Gone
from digenrl.worker.assignment import ENCODER, TRAINER, Workers, own_slice, rank_names
from digenrl.worker.orders import (
    EncodedPrompt,
    EncodePrompts,
    EvaluatePrompts,
    LayOutWeights,
    LearnableGroup,
    LearnGroups,
    LoadWeights,
    MakeSlice,
    MakingRehearsed,
    Order,
    OrderFailed,
    RehearseMaking,
    RestoreState,
    SliceMade,
    WeightsLaidOut,
    pixels_name,
    slice_name,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runtime and its repairs share."""

    recipe: Recipe
    crew: Workers
    post: PendingJobs
    staff: Supervisor
    lanes: Lanes
    versions: WeightVersions
    ledger: SampleStore
    shelf: ArtifactStore


class Repairs:
    """Replaces lost workers, lets new ones join, and has lost tensors made again.

    `tell` hands an event to the scheduler, `fail` takes an order that could not be carried out.
    """

    def __init__(
        self,
        parts: Parts,
        tell: Callable[[Event], None],
        fail: Callable[[str, PendingJob, OrderFailed], None],
        desk: PromptStore,
    ) -> None:
        self._recipe, self._crew, self._post, self._staff = parts.recipe, parts.crew, parts.post, parts.staff
        self._lanes, self._versions, self._ledger, self._shelf = (
            parts.lanes,
            parts.versions,
            parts.ledger,
            parts.shelf,
        )
        self._tell, self._desk = tell, desk
        self.fail = fail
        self.profile: CostTracker | None = None
        self.slice_size = 0
        self.learnt: list[LearnableGroup] = []  # what is in the open gradient
        self._begun = False
        self._trainers = 0  # that took another's place
        self._unmade: list[Callable[[], bool]] = []  # slices to be made again, until a generator can

    def begin(self) -> None:
        """From now on a lost lane is lost for good, and others may join."""
        self._begun = True
        for assignment in self._crew.reserve:
            self._staff.seek(assignment.name, self._newcomer_ready)

    def serves(self, worker: str, version: int) -> None:
        """A generator has a version, and can make again what waits for one that has."""
        self._versions.served[worker] = version
        self._unmade = [make for make in self._unmade if not make()]

    # --- Workers that come and go -----------------------------------------------------------------------------

    def replace(self, worker: str, gone: Gone, at_ns: int) -> None:
        """Somebody else does what a lost worker held, as soon as there is room for them."""
        if worker == TRAINER:
            self._replace_trainer(gone)
        else:
            self._replace(worker, gone, at_ns)

    def _replace(self, worker: str, gone: Gone, at_ns: int) -> None:
        # Before the loop has begun, the new one takes the place of the old. After that, a lane is lost for good
        # and a new one joins, which the scheduler hands slices and weights.
        self._staff.count_loss(worker, gone)
        orders = self._post.lose(worker)
        self._versions.served.pop(worker, None)
        lost = self._lanes.lanes_of(worker) if self._begun else []
        for lane in lost:
            self._lanes.lose(lane)
            self._tell(WorkerLost(at_ns, lane))
        self._staff.seek(worker, self._when_ready(worker, orders, lost))
        newest = self._versions.newest
        if not self._begun and newest is not None and "generate" in self._staff.assignment(worker).duties:
            self._post.send(worker, LoadWeights(*newest))
        for each in orders:
            self._redo(worker, each)
        self._staff.fill()
        if not self._post.is_there(worker):
            self._hand_over(worker)

    def _when_ready(self, worker: str, orders: list[PendingJob], lost: list[int]) -> Callable[[Completed], None]:
        if lost:
            assert self.profile is not None
            offer = self.profile.offer(lost[-1], worker)
            return lambda answered: self._join(offer, answered.at_ns)
        starting = [each.then for each in orders if each.order is STARTING]  # it had not even come up
        return starting[0] if starting else lambda answered: None

    def _redo(self, worker: str, expected: PendingJob) -> None:
        order = expected.order
        if isinstance(order, MakeSlice):
            self._shelf.drop(slice_name(order.lease))
            self._shelf.drop(pixels_name(slice_name(order.lease)))
        if expected.lost is not None:
            expected.lost()
        elif order is STARTING or isinstance(order, MakeSlice) or (self._begun and isinstance(order, LoadWeights)):
            return  # the scheduler sees to it
        else:
            self._post.post(worker, expected)

    def _hand_over(self, worker: str) -> None:
        """There is no room for the worker's successor: what others can do as well, they do."""
        others = [name for name in self._staff.generators() if name != worker]
        for each in self._post.take_held(worker):
            anybody = isinstance(each.order, EvaluatePrompts) and others
            self._post.post(min(others, key=self._post.load) if anybody else worker, each)

    def _replace_trainer(self, gone: Gone) -> None:
        """Another trainer goes on from the last commit: it gets the open gradient's groups once more.

        Nothing of a batch is in the weights before its commit, so nothing is trained twice.
        """
        kept = self._versions.kept_state
        if self._begun and kept is None:
            raise TrainerLostError(f"{TRAINER} {gone.reason}, and its state is not kept in memory")
        self._staff.count_loss(TRAINER, gone)
        self._trainers += 1
        names = tuple(dict.fromkeys((TRAINER, *rank_names(self._crew.trainer))))
        orders = {name: self._post.lose(name) for name in names}
        if kept is None:
            self._staff.seek(TRAINER, self._when_ready(TRAINER, orders[TRAINER], []))
        else:
            self._post.hold_back(names)
            self._staff.seek(TRAINER, lambda answered: self._bring_up_to_date(kept, names))
        for name, under_way in orders.items():
            for each in under_way:
                if each.order is not STARTING and not each.first:
                    self._post.post(name, each)
        self._staff.fill()

    def _bring_up_to_date(self, version: int, names: Sequence[str]) -> None:
        """The new trainer stands where the old one did before it gets anything else."""

        def replay(groups: Sequence[LearnableGroup]) -> None:
            if not groups:
                self._post.let_go(names)
                return
            order = LearnGroups((groups[0],))
            self._post.send(TRAINER, order, lambda answered: replay(groups[1:]), first=self._trainers)

        self._post.send(TRAINER, RestoreState(version, self._recipe.sharded), first=self._trainers)
        self.lay_out_again(lambda answered: replay(tuple(self.learnt)), first=self._trainers)

    def _newcomer_ready(self, answered: Completed) -> None:
        """A lane that nobody has timed makes a slice of its own first."""
        worker, newest = answered.worker, self._versions.newest
        assert newest is not None
        prompt = self._desk.prompt(min(newest[0], self._recipe.steps - 1), 0)

        def timed(answered: Completed) -> None:
            assert isinstance(answered.report, MakingRehearsed)
            self._join(timed_offer(worker, answered.report.seconds, self.slice_size, own), answered.at_ns)

        own = own_slice(self._staff.assignment(worker), self.slice_size)
        sizes = tuple(dict.fromkeys((self.slice_size, own)))
        self._post.send(worker, RehearseMaking(prompt, sizes), timed)

    def _join(self, offer: LaneOffer, at_ns: int) -> None:
        """A lane of the worker that the offer names; the lane's own name tells the how manieth of it this is."""
        lane = self._lanes.join(self._staff.assignment(offer.name))
        offer = replace(offer, name=self._lanes.names[lane])
        if self.profile is not None:
            self.profile.add_lane(lane, offer)
        self._tell(WorkerJoined(at_ns, offer))

    # --- What was lost with a machine, made again: see `digenrl.driver.remaking` ------------------------------

    def post(self, worker: str, expected: PendingJob) -> None:
        """Gives an order once more; a slice goes to whoever can make it now, if anybody still wants it."""
        order = expected.order
        if expected.first not in (0, self._trainers):
            return  # meant for a trainer that is lost, too
        if isinstance(order, MakeSlice) and expected.lost is not None:
            expected.lost()
        elif not isinstance(order, MakeSlice) or self._lanes.worker(order.lease.lane) == worker:
            self._post.post(worker, expected)

    def encode_again(self, prompt: EncodedPrompt, then: Callable[[Completed], None]) -> None:
        """By the encoder."""
        self._post.send(TRAINER if self._crew.encoder is None else ENCODER, EncodePrompts((prompt,)), then)

    def make_again(
        self, order: MakeSlice, then: Callable[[Completed], None], otherwise: Callable[[OrderFailed], None]
    ) -> None:
        """By the least busy generator that has the version, as soon as there is one."""

        def made(answered: Completed) -> None:
            assert isinstance(answered.report, SliceMade)
            self._ledger.replace_made(answered.report.made)
            then(answered)

        def make() -> bool:
            served = self._versions.served
            able = [name for name in self._staff.generators() if served.get(name, -1) >= order.lease.version]
            if able:
                again = lambda: self.make_again(order, then, otherwise)  # noqa: E731
                chosen = min(
                    able, key=lambda name: (not self._takes(name, order.lease.slice), self._post.load(name))
                )
                self._post.send(chosen, order, made, otherwise, lost=again)
            return bool(able)

        if not make():
            self._unmade.append(make)

    def _takes(self, worker: str, piece: Slice) -> bool:
        """Whether a lane of this worker makes as many samples at once."""
        return own_slice(self._staff.assignment(worker), self.slice_size) >= piece.size

    def lay_out_again(self, then: Callable[[Completed], None], first: int = 0) -> None:
        """By the trainer, which still has its last version."""
        assert self._versions.newest is not None
        version = self._versions.newest[0]

        def laid_out(answered: Completed) -> None:
            assert isinstance(answered.report, WeightsLaidOut)
            if answered.report.version == version:
                self._versions.take(version, answered.report.weights)
            then(answered)

        order = LayOutWeights(version, self._versions.keeps_state, self._recipe.sharded)
        self._post.send(TRAINER, order, laid_out, first=first)

    def newest_weights(self, order: Order) -> Order:
        """The order, with the newest version in place of an older one."""
        newest = self._versions.newest
        if newest is None or not isinstance(order, LoadWeights | EvaluatePrompts):
            return order
        return replace(order, version=newest[0], weights=newest[1])
