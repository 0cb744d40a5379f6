"""Workers as actors of a Ray cluster, one each. The driver sends jobs and gets reports, never tensors.

Tensors that a job reads are passed as references: Ray brings them to the worker's machine while the worker still
runs earlier jobs. Tensors that it leaves stay in the object store of its machine until another worker reads them.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from digenrl.config.recipes.recipe import Recipe
from digenrl.records import Job, JobFailed, Publish, Published, Result, patch_name
from digenrl.transports.active_clock import ActiveClock
from digenrl.transports.contract import Gone, InputsLost, Message, Report
from digenrl.transports.process_setup import TORCH_ENVIRONMENT, log_file
from digenrl.transports.ray.actors import (
    BROADCAST,
    BROADCAST_THREADS,
    HEARTBEAT,
    Builder,
    ProcessEnvironment,
    WorkerActor,
    build_worker,
)
from digenrl.transports.ray.adapter_patches import AdapterPatches, made_patches, patch_outputs
from digenrl.transports.ray.artifact_store import RayArtifactStore
from digenrl.transports.ray.capacity import FreeResources, NodeResources, ResourceRequest
from digenrl.transports.ray.joining import RayCluster
from digenrl.transports.ray.package_versions import versions_here
from digenrl.transports.ray.placing import resource_request, torch_threads
from digenrl.transports.ray.sites import Sites
from digenrl.transports.ray.weight_broadcast import WeightBroadcaster, WeightTransfer
from digenrl.transports.ray.worker_handles import ACTOR_DIED, PendingCall, WorkerHandle
from digenrl.worker.assignment import Assignment

CHECK_INTERVAL_S = 0.5  # of heartbeats, start timeouts and free resources


class RayTransport:
    """Actors by worker name. Their output goes to `logs`, on machines that share this folder.

    `on_transfer` is called for weights that reached workers.
    """

    def __init__(
        self,
        cluster: RayCluster,
        recipe: Recipe,
        logs: Path | None = None,
        on_transfer: Callable[[WeightTransfer], None] = lambda transfer: None,
        build: Builder = build_worker,
    ) -> None:
        self._cluster, self._logs, self._on_transfer, self._build = cluster, logs, on_transfer, build
        self._heartbeat_timeout_s = recipe.lanes.patience_s
        self._clock = ActiveClock(recipe.lanes.patience_s / 4)
        self._start_timeout_s = recipe.cluster.start_timeout_s
        self._workers: dict[str, WorkerHandle] = {}
        self._rendezvous: dict[int, Any] = {}  # by the ranks' epoch
        broadcasts, sites = recipe.training.lora is None, Sites(cluster.resources)
        self._broadcaster = WeightBroadcaster(self._workers, sites, on_transfer) if broadcasts else None
        self.artifacts = RayArtifactStore(sites, holds_weights=not broadcasts)
        setting = "never" if broadcasts else recipe.cluster.weight_patches
        self._patches = AdapterPatches(setting, self._workers, self.artifacts)
        self._checked_s = 0.0  # when the heartbeats of all workers were last checked
        self._nodes: tuple[NodeResources, ...] = ()
        self._nodes_seen_s = 0.0
        self._without_capacity: list[ResourceRequest] = []  # of workers that did not fit
        self._checked_nodes = {node.id for node in cluster.resources().nodes}  # the others have joined since

    # --- Starting and ending ------------------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        """Requests an actor, and does not wait. One without a process after `cluster.start_timeout_s` is gone."""
        assert assignment.name not in self._workers, f"{assignment.name} is already running"
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        request = resource_request(assignment)
        node_id = self._free_resources().reserve(request)
        log = None if self._logs is None else log_file(self._logs, assignment.name)
        environment = _environment(assignment, {} if node_id in {None, *self._checked_nodes} else versions_here())
        actor = _actor_class(request, node_id).remote(assignment, environment, log, self._build)
        worker = WorkerHandle(assignment, actor, request, node_id, self._clock(), actor.locate.remote())
        worker.pending[None] = PendingCall(None, actor.build.remote(self._rendezvous_of(assignment, actor)))
        self._workers[assignment.name] = worker

    def has_capacity(self, assignment: Assignment) -> bool:
        request, free = resource_request(assignment), self._free_resources()
        if request in self._without_capacity:
            return False
        fits = all(free.reserve(request) is not None for _ in range(request.count))
        if not fits:
            self._without_capacity.append(request)
        return fits

    def end(self, worker: str) -> None:
        if worker in self._workers:
            if self._broadcaster is not None:
                self._broadcaster.forget(worker)
            self._patches.forget(worker)
            self._workers.pop(worker).kill()
            self._without_capacity.clear()

    def stop(self) -> None:
        for worker in list(self._workers):
            self.end(worker)
        self.artifacts.clear()

    def _free_resources(self) -> FreeResources:
        """Free resources of all machines: the lower of Ray's figures, which lag behind, and our own."""
        nodes = self._seen_nodes()
        free = {node.id: dict(node.total) for node in nodes}
        for worker in self._workers.values():
            on_node = free.get(worker.node_id or "", {})
            for kind, amount in worker.request.resources.items():
                on_node[kind] = on_node.get(kind, 0) - amount
        for node in nodes:
            free[node.id] = {kind: min(left, node.free.get(kind, 0)) for kind, left in free[node.id].items()}
        return FreeResources(nodes, free)

    def _seen_nodes(self) -> tuple[NodeResources, ...]:
        """The machines. Hundreds of workers that wait for room ask for them together: they are seen once."""
        now_s = time.monotonic()
        if not self._nodes or now_s - self._nodes_seen_s >= CHECK_INTERVAL_S:
            self._nodes, self._nodes_seen_s = self._cluster.resources().nodes, now_s
            self._without_capacity.clear()
        return self._nodes

    def _rendezvous_of(self, assignment: Assignment, actor: Any) -> Any:
        """A reference to the address where ranks meet, which the actor of rank 0 chooses."""
        if assignment.rank is None:
            return ""
        if assignment.rank.is_first:
            self._rendezvous = {assignment.epoch: actor.choose_rendezvous.remote()}
        return self._rendezvous[assignment.epoch]

    # --- Jobs and reports ---------------------------------------------------------------------------------------

    def send(self, worker: str, job: Job) -> None:
        if worker not in self._workers:
            return
        inputs = {name: self._reference(worker, job, name) for name in self._inputs(worker, job)}
        missing = [name for name, reference in inputs.items() if reference is None]
        assert not missing, f"{job} reads {', '.join(missing)}, which were dropped or never left"
        patches = self._patches.wanted(worker, job)
        writes = (*job.writes(), *(patch_outputs(job) if patches else ()))
        run_job = self._workers[worker].actor.run_job.options(num_returns=1 + len(writes))
        references = run_job.remote(pickle.dumps((job, tuple(inputs), writes, patches)), *inputs.values())
        report, *outputs = references if writes else [references]
        call = PendingCall(job, report, dict(zip(writes, outputs, strict=True)), tuple(inputs))
        self._workers[worker].pending[job.id] = call
        if self._broadcaster is not None:
            self._broadcaster.job_sent(worker, job)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            messages = list(self._poll(max(0.0, min(CHECK_INTERVAL_S, left_s))))
            if messages or left_s <= 0:
                return messages

    def _inputs(self, worker: str, job: Job) -> tuple[str, ...]:
        """Names of the inputs that are passed to the actor: all except for weights that are broadcast."""
        weights = None if self._broadcaster is None else getattr(job, "weights", None)
        names = self._patches.inputs(worker, job)
        return tuple(name for name in names if weights is None or name != weights.name)

    def _reference(self, worker: str, job: Job, name: str) -> Any | None:
        """The input of a job; for weights, a copy in the worker's site."""
        if isinstance(job, Publish):
            return self.artifacts.get_in_site(name, self._workers[worker].node_id)
        return self.artifacts.get(name)

    def _poll(self, timeout_s: float) -> Iterator[Message]:
        owners = {each: worker.name for worker in self._workers.values() for each in worker.awaited()}
        awaited = list(owners)
        if self._broadcaster is not None:
            self._broadcaster.advance()
            awaited += self._broadcaster.awaited()
        arrived = _wait(awaited, timeout_s)
        heard, now_s = {owners.get(each) for each in arrived}, self._clock()
        checks_all = not heard or now_s - self._checked_s >= CHECK_INTERVAL_S
        if checks_all:
            self._checked_s = now_s
        for worker in list(self._workers.values()):
            if checks_all or worker.name in heard:
                yield from self._messages_of(worker, arrived, now_s)

    def _messages_of(self, worker: WorkerHandle, arrived: set[Any], now_s: float) -> Iterator[Message]:
        gone = None
        for job_id, call in [each for each in worker.pending.items() if each[1].report in arrived]:
            report = self._report_of(worker, call)
            if isinstance(report, Gone):
                gone = report
                break
            del worker.pending[job_id]
            yield Message(worker.name, job_id, report)
        gone = gone or self._check_alive(worker, arrived, now_s)
        if gone is not None:
            self.end(worker.name)
            yield Message(worker.name, None, gone)

    def _report_of(self, worker: WorkerHandle, call: PendingCall) -> Report:
        try:
            pickled: bytes = ray.get(call.report)
        except ACTOR_DIED as error:
            return worker.explain_death(error)
        except ray.exceptions.ObjectLostError as error:
            return self._explain_lost_inputs(call, error)
        report: Report = pickle.loads(pickled)
        worker.ready = True
        if call.job is not None and isinstance(report, Result) and not isinstance(report, JobFailed):
            for name in (*call.job.writes(), *made_patches(report)):
                self.artifacts.put(name, call.outputs[name], worker.node_id)
        if call.job is not None:
            self._patches.report_received(worker.name, call.job, report)
        if self._broadcaster is not None:
            self._broadcaster.report_received(worker.name, report)
        elif isinstance(report, Published) and isinstance(call.job, Publish):
            weights, patched = call.job.weights, patch_name(call.job.weights.name) in call.inputs
            sent = weights.patch_bytes if patched else weights.bytes
            self._on_transfer(WeightTransfer(weights.name, (worker.name,), sent, report.seconds, weights.bytes))
        return report

    def _explain_lost_inputs(self, call: PendingCall, error: Exception) -> Report:
        if call.job is None:
            return Gone("lost rank 0 before the ranks met", fault=False)
        names = self.artifacts.lost(call.inputs, error)
        if not names:
            raise error  # the lost object is none of the job's inputs
        lost_patches = {patch_name(name): name for name in call.job.reads()}  # weights are exported again, whole
        return InputsLost(tuple(lost_patches.get(name, name) for name in names))

    def _check_alive(self, worker: WorkerHandle, arrived: set[Any], now_s: float) -> Gone | None:
        """Why a worker is gone: it is dead, does not respond, or found no room. None if it is not gone."""
        try:
            worker.update(arrived, now_s)
        except ACTOR_DIED as error:
            return worker.explain_death(error)
        start_expired = now_s - worker.requested_s > self._start_timeout_s
        if worker.location is None and start_expired and not worker.has_process(now_s):
            wanted, timeout = worker.request.describe(), f"{self._start_timeout_s:g} s"
            return Gone(f"found no room: no machine had {wanted} free within {timeout}", fault=False)
        if worker.is_unresponsive(now_s, self._heartbeat_timeout_s):
            return Gone(f"sent no heartbeat for {self._heartbeat_timeout_s:g} s")
        return None


def _wait(references: Sequence[Any], timeout_s: float) -> set[Any]:
    """The references that have arrived; waits for the first one up to the timeout."""
    if not references:
        time.sleep(timeout_s)
        return set()
    ray.wait(references, num_returns=1, timeout=timeout_s)
    return set(ray.wait(references, num_returns=len(references), timeout=0)[0])


def _actor_class(request: ResourceRequest, node_id: str | None) -> Any:
    """An actor class with these resources, on this machine or, if it is full by then, on another that matches."""
    custom = {kind: amount for kind, amount in request.resources.items() if kind not in ("CPU", "GPU")}
    affinity = (
        {} if node_id is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}
    )
    return ray.remote(
        num_cpus=request.resources.get("CPU", 0),
        num_gpus=request.resources.get("GPU", 0),
        resources=custom,
        accelerator_type=request.accelerator,
        label_selector=dict(request.labels) or None,
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups={HEARTBEAT: 1, BROADCAST: BROADCAST_THREADS},
        **affinity,
    )(WorkerActor)


def _environment(assignment: Assignment, versions: Mapping[str, str]) -> ProcessEnvironment:
    """Variables that torch reads at import, tokens that are set here, and the module search path.

    A worker on the CPU sees no GPU.
    """
    gpus = {"CUDA_VISIBLE_DEVICES": ""} if assignment.device == "cpu" else {}
    tokens = {name: os.environ[name] for name in assignment.recipe.token_variables if name in os.environ}
    variables = TORCH_ENVIRONMENT | {"OMP_NUM_THREADS": str(torch_threads(assignment))} | gpus | tokens
    return ProcessEnvironment(variables, tuple(place or str(Path.cwd()) for place in sys.path), versions)
