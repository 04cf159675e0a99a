"""Simulated job with the coordinator's own rounds and store and devices on virtual time.

`coordinator.server` opens and commits the rounds with an event log, so deadlines, quorums, budgets, governors, codecs
and limits are those of a real run, and an interrupted run resumes. `run` runs the work requests of the devices.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    JobResumed,
    JobStarted,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobView
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import FleetSettings, JobSettings, required_packages
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import job_blobs
from fedquilt.core import Device, DeviceUpdate, EvaluationSums, JobError, Method, Task, Tensors, derive_seed
from fedquilt.edge_agent import devices as boards
from fedquilt.edge_agent import engines, state_machine
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.settings import parse_size
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.tools.simulation import adversaries, draw_devices
from fedquilt.tools.simulation.fleet import DeviceSpec, SimulatedFleet

if TYPE_CHECKING:
    from fedquilt.tools.simulation.pool import WorkerPool

NEWCOMER = "newcomer"  # a device without private state and memory limit, for evaluations
UNLIMITED_BYTES = 1 << 40
UNLIMITED_FLEET = FleetSettings(budgets=("1TiB",))  # for runs in which no device may be short of memory
MAX_IDLE_S = 3600.0  # virtual seconds without activity after which a run fails, as no further device will come online
POLL_S = 1e18  # nothing else writes the store of a simulated run, so it is never polled


@dataclass(frozen=True)
class SimulatedRound:
    """Metrics and costs of a committed round. Evaluations outside of the rounds are not included."""

    number: int  # round number from 0
    devices: tuple[str, ...]  # whose updates were folded, sorted
    metrics: Mapping[str, float]  # means of the devices' training metrics
    down_bytes: int
    up_bytes: int
    wall_s: float  # on this machine; for rounds before a resume also with the evaluations before the round
    duration_s: float  # virtual time from the round's opening to its end
    energy_j: float | None  # of the devices' tasks, None if a device reports none
    devices_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cpu_s: float = 0.0  # of the devices' work on this machine
    evaluation: EvaluationSums | None = None


class Simulation:
    """One job on one simulated fleet.

    `held_out_counts` has the number of held-out examples of each device. Boards and budgets are assigned in the order
    of its keys. An interrupted run resumes in `home`, and `rounds` starts with its earlier rounds. Devices in `offline`
    are offline at first (`SimulatedFleet.bring_online`).
    """

    def __init__(
        self,
        job: JobSettings,
        folder: Path,
        held_out_counts: Mapping[str, int],
        home: Path,
        *,
        load_method: Callable[[str], Method] = methods.load,
        engine: str | None = None,
        on_event: Callable[[RunningJob, AnyEvent], None] = lambda running, fact: None,
        create_board: Callable[[str], Device] = boards.create_device,
        offline: Collection[str] = (),
    ) -> None:
        self.job, self.held_out_counts, self._on_event = job, held_out_counts, on_event
        self.now_s = 0.0
        self.rounds: list[SimulatedRound] = []
        self.status, self.reason = "running", ""
        self.running: RunningJob | None = None
        self.decline_reasons: dict[str, str] = {}  # last reason by device
        self._accepted_updates: list[UpdateAccepted] = []
        self._prefetch_pool: WorkerPool | None = None
        self._last_activity_s = 0.0  # virtual time
        self.adversaries = adversaries.choose_adversaries(job, held_out_counts)
        self._honest_updates = adversaries.HonestUpdates()
        self._store = Store(home, durable=False)
        if not self._store.acquire_lock():
            raise JobError(f"another coordinator serves {home} already: use another home")
        self._store.begin_epoch()
        bundle_folder = folder.resolve()
        self.run = self._store.find_unfinished(job, bundle_folder, "simulation") or self._store.add_job(
            job, bundle_folder, "simulation"
        )
        self._replay_log()
        self._store.set_status(self.run, "running")
        self.engine = engine or choose_job_engine(job, load_method(job.method))
        self._plugins = {
            f"plugin {module}": digest
            for module, digest in required_packages(job, job_bundle.load_bundle(folder)).items()
        }
        newcomer_capabilities = self._make_capabilities(UNLIMITED_BYTES)
        self.devices_folder = home / "agents" / self.run  # stored state of another run would affect this run
        newcomer = DeviceSpec(NEWCOMER, lambda: boards.create_device("x86-host"), newcomer_capabilities)
        self.fleet = SimulatedFleet(
            self._make_specs(create_board),
            self._store.blob_store,
            self.devices_folder,
            {NEWCOMER: newcomer},
            offline,
            draw_failure_times(job, held_out_counts, sum(round.duration_s for round in self.rounds)),
        )
        self._server = Server(self.fleet, self._store, self._observe_event, self.run, load_method, poll_s=POLL_S)
        self._wall_start_s, self._virtual_start_s = time.perf_counter(), 0.0

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()

    @property
    def state(self) -> Any:
        assert self.running is not None
        return self.running.state

    @property
    def state_digest(self) -> str:
        assert self.running is not None
        assert self.running.job_state.state is not None
        return self.running.job_state.state.sha256

    @property
    def final_status(self) -> str:
        """Status at the end: "done" or "failed", or "stopped" if the run can never continue."""
        return "stopped" if self.status == "running" else self.status

    @property
    def has_ended(self) -> bool:
        return self._server.finished

    @property
    def completed_rounds(self) -> int:
        """Number of completed rounds, without evaluation-only rounds."""
        return 0 if self.running is None else self.running.job_state.completed_rounds

    @property
    def can_evaluate(self) -> bool:
        """Whether the state can be evaluated. It cannot while an evaluation-only round is running."""
        return self.running is not None and not self.running.job_state.is_evaluation_round

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are completed and the state can be evaluated."""
        return self.running is not None and self.running.job_state.is_work_done and self.can_evaluate

    def advance(self) -> list[WorkRequest]:
        """Advance virtual time until there are work requests, and return them.

        The list is empty if the run has ended or no device can continue the run (see `reason`).
        """
        while not self.has_ended:
            due_s = self._server.step(self.now_s)
            if self.fleet.waiting_requests:
                self._server.step(self.now_s)  # handles the messages that the tasks have started
            if requests := self._select_requests(self.fleet.waiting_requests):
                return requests
            job = self._server.find_job(self.run)
            if job is None and not self.has_ended:
                # a run that could not be loaded has no observed events, only its log
                self.status = self._store.stored_status(self.run)
                end_events = [event for _, _, event in self._store.read_events(self.run) if isinstance(event, JobEnded)]
                self.reason = end_events[-1].reason if end_events else ""
                break
            has_open_attempt = job is not None and job.job_state.pending_devices
            if due_s >= (POLL_S if has_open_attempt else self._last_activity_s + MAX_IDLE_S):
                self.reason = "no device can continue the run"
                break
            self.now_s = max(self.now_s, due_s)
        return []

    def set_prefetcher(self, prefetch_pool: WorkerPool | None) -> None:
        """Announce work requests to `prefetch_pool` as soon as devices start tasks.

        Nothing is announced if adversaries observe honest updates.
        """
        if prefetch_pool is not None and not self._adversaries_observe:
            self._prefetch_pool, self.fleet.on_work_started = prefetch_pool, prefetch_pool.prefetch
            prefetch_pool.set_sum_receiver(self)

    def exclude_time(self, seconds: float) -> None:
        self._wall_start_s += seconds

    def deliver_outcome(self, device: str, result: WorkResult) -> None:
        """Pass a result to its device. Fold a small update now, and keep an honest one for adversaries."""
        task, job = self.fleet.find_running_task(device), self._server.find_job(self.run)
        if job is not None and task is not None and task.job == job.id and result.bundles:
            is_small = all(ref.sha256 in result.blobs for ref in result.bundles.values())
            if is_small and job.aggregator.can_fold_early(job.job_state, task.round, device):
                job.aggregator.fold_early(self._read_update(device, task, result), result.bundles)
            if self._adversaries_observe and device not in self.adversaries:
                self._honest_updates.add_update(self._read_update(device, task, result))
        self.fleet.deliver_outcome(device, result)

    def find_state_file(self, requests: Sequence[WorkRequest]) -> str:
        """Return the file of the method state with which workers may sum these updates, or "" if they may not."""
        job = self._server.find_job(self.run)
        if job is None or any(
            (request.task.job, request.task.round) != (job.id, job.job_state.round) for request in requests
        ):
            return ""
        return job.aggregator.state_path_for_folding(job.job_state) or ""

    def receive_sum(
        self, requests: Sequence[WorkRequest], results: Sequence[WorkResult], pack_sum: Callable[[], bytes]
    ) -> None:
        """Fold the sum of these updates, which `pack_sum` returns, if all their tasks are still running."""
        job, pairs = self._server.find_job(self.run), zip(requests, results, strict=True)
        if job is not None and all(
            self.fleet.find_running_task(request.device) is request.task for request in requests
        ):
            results_by_device = {
                request.device: (result.weight, result.metrics, result.bundles)
                for request, result in pairs
                if result.code == "ok"
            }
            job.aggregator.fold_aggregate_early(job.job_state, requests[0].task.round, results_by_device, pack_sum)

    def _read_update(self, device: str, task: Task, result: WorkResult) -> DeviceUpdate:
        bundles: dict[str, Tensors] = {}
        for name, ref in result.bundles.items():
            if (payload := result.blobs.get(ref.sha256)) is not None:
                bundles[name] = tensors.decode_tensors(payload)
            else:
                bundles[name] = tensors.read_tensors(Path(f"{self.fleet.output_folder}/{device}.{ref.sha256}"))
        return DeviceUpdate(device, task.round, result.weight, result.metrics, bundles)

    @property
    def _adversaries_observe(self) -> bool:
        lying = self.job.fleet.adversaries
        return lying is not None and lying.attack == "inner_product"

    def _select_requests(self, requests: list[WorkRequest]) -> list[WorkRequest]:
        """Return the requests to run now. Adversaries that use the honest updates' mean run last."""
        if not self._adversaries_observe:
            return requests
        honest_requests = [request for request in requests if request.device not in self.adversaries]
        if honest_requests or not requests:
            return honest_requests
        job = self._server.find_job(self.run)
        assert job is not None
        for device, update in job.job_state.accepted_updates.items():  # also those before an interruption
            if device not in self.adversaries and device not in self._honest_updates.list_devices(job.job_state.round):
                self._honest_updates.add_update(job_blobs.load_update(self._store.blob_store, update))
        if not self._honest_updates.list_devices(job.job_state.round):
            return requests
        honest_path = self._honest_updates.write_mean(self.devices_folder / "honest.safetensors")
        return [adversaries.add_honest_mean(request, honest_path) for request in requests]

    def make_evaluation_request(self, device: str) -> WorkRequest | None:
        """Return a work request that evaluates the device's current model, or None if it has none.

        Raise JobError if the method cannot evaluate.
        """
        job = self.running
        assert job is not None
        if job.method.check is None:
            raise JobError(f"method {self.job.method} cannot evaluate: leave out evaluations, or use another method")
        task = job.build_task(device, self.engine, self.fleet.profile(device), self.now_s, ("check",))
        return None if task is None else self.fleet.make_extra_request(device, task)

    def _make_specs(self, create_board: Callable[[str], Device]) -> Iterator[DeviceSpec]:
        fleet = self.job.fleet
        governor, no_data = GovernorPolicy(fleet.policy), dict[str, object]()
        attack_data = adversaries.make_attack_data(fleet.adversaries) if fleet.adversaries else no_data
        board_factories = [partial(create_board, board) for board in fleet.boards]
        budgets = [parse_size(budget) for budget in fleet.budgets]

        @cache  # devices of one kind share these objects
        def make_kind(board: int, budget: int, labels: int, link: int) -> tuple[Any, ...]:
            capabilities = self._make_capabilities(budgets[budget], fleet.device_labels(labels))
            return board_factories[board], capabilities, governor, fleet.device_link(link)

        periods = [max(len(each), 1) for each in (board_factories, budgets, fleet.labels, fleet.links)]
        for index, name in enumerate(self.held_out_counts):
            board, means, governor, link = make_kind(*(index % period for period in periods))
            yield DeviceSpec(name, board, means, attack_data if name in self.adversaries else no_data, governor, link)

    def _make_capabilities(self, budget_bytes: int, labels: tuple[str, ...] = ()) -> state_machine.Capabilities:
        # simulated devices have the plug-ins of this process, because they share its code
        return state_machine.Capabilities(
            budget_bytes, (self.engine,), (self.job.method,), plugins=self._plugins, labels=labels
        )

    def _observe_event(self, job: JobView, event: AnyEvent) -> None:
        if isinstance(job, RunningJob):  # not for a job that failed before its start
            self.running = job
            self._on_event(job, event)
        if isinstance(event, CohortSelected) and self._prefetch_pool is not None:
            self._prefetch_pool.expect_requests(len(event.devices))
        if isinstance(event, CohortSelected | UpdateAccepted | RoundCommitted):
            self._last_activity_s = self.now_s
        if isinstance(event, RoundCommitted):
            now_s = time.perf_counter()
            self._add_round(event, now_s - self._wall_start_s, self.now_s - self._virtual_start_s)
            self._wall_start_s, self._virtual_start_s = now_s, self.now_s
        else:
            self._record_event(event)

    def _replay_log(self) -> None:
        started_s = 0.0  # wall clock of the log, so times between rounds include evaluations
        for _, at_s, event in self._store.read_events(self.run):
            if isinstance(event, RoundCommitted):
                self._add_round(event, at_s - started_s, event.took_s)
            elif isinstance(event, JobEnded):
                continue  # the run resumes
            self._record_event(event)
            if isinstance(event, JobStarted | RoundCommitted | JobResumed):
                started_s = at_s

    def _add_round(self, event: RoundCommitted, wall_s: float, duration_s: float) -> None:
        self.rounds.append(_make_round(event, self._accepted_updates, wall_s, duration_s))
        self._accepted_updates = []

    def _record_event(self, event: AnyEvent) -> None:
        if isinstance(event, UpdateAccepted):
            self._accepted_updates.append(event)
        elif isinstance(event, TaskDeclined | UpdateRejected) and getattr(event, "code", "") != "none":
            self.decline_reasons[event.device] = event.reason
        elif isinstance(event, JobEnded):
            self.status, self.reason = event.status, event.reason


def _make_round(
    event: RoundCommitted, accepted_updates: Sequence[UpdateAccepted], wall_s: float, duration_s: float
) -> SimulatedRound:
    updates = sorted((accepted.update for accepted in accepted_updates), key=lambda update: update.device)
    joules = [update.usage.energy_j for update in updates]
    return SimulatedRound(
        number=event.round,
        devices=tuple(update.device for update in updates),
        metrics=event.metrics,
        evaluation=event.evaluation,
        down_bytes=sum(update.usage.down_bytes for update in updates),
        up_bytes=sum(update.usage.up_bytes for update in updates),
        wall_s=wall_s,
        duration_s=duration_s,
        energy_j=sum(energy_j for energy_j in joules if energy_j is not None) if None not in joules else None,
        devices_metrics={update.device: update.metrics for update in updates},
        cpu_s=sum(update.usage.cpu_s for update in updates),
    )


def draw_failure_times(job: JobSettings, devices: Collection[str], elapsed_s: float = 0.0) -> dict[str, float]:
    """Return the virtual seconds from now until each device of [fleet] failures goes offline permanently."""
    if (settings := job.fleet.failures) is None:
        return {}
    failing_devices = draw_devices(job.seed, "failure", settings.share, devices)
    rng = random.Random(derive_seed(job.seed, "failure times"))
    return {device: settings.within_s * rng.random() - elapsed_s for device in failing_devices}


def choose_job_engine(job: JobSettings, method: Method) -> str:
    """Return the job's engine, or the method's first engine that is installed, or raise JobError."""
    installed, usable = engines.available_engines(), [job.engine] if job.engine else method.engines
    for name in usable:
        if name in installed:
            return name
    raise JobError(f"the job needs the engine {' or '.join(usable)}: install it (installed: {', '.join(installed)})")
