"""Simulated job with the coordinator's own rounds and store and devices on virtual time.

`coordinator.server` opens and commits the rounds with an event log, so deadlines, quorums, budgets, governors, codecs
and limits are those of a real run, and an interrupted run resumes. `run` runs the work of the devices.
"""

from __future__ import annotations

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
    JobView,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import FleetSettings, JobSettings, required_packages
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import job_blobs
from fedquilt.core import Device, DeviceUpdate, EvaluationSums, JobError, Method, Task, Tensors
from fedquilt.edge_agent import devices as boards
from fedquilt.edge_agent import engines, state_machine
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.settings import parse_size
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.tools.simulation import adversaries
from fedquilt.tools.simulation.fleet import DeviceSpec, SimulatedFleet

if TYPE_CHECKING:
    from fedquilt.tools.simulation.pool import WorkerPool

NEWCOMER = "newcomer"  # a device that has taken part in nothing, and has room for everything
ROOM_BYTES = 1 << 40
ROOM = FleetSettings(budgets=("1TiB",))  # for runs in which no device may be short of memory
WAITS_S = 3600.0  # virtual seconds without activity after which a run fails, as no further device will come online
POLL_S = 1e18  # nothing else writes the store of a simulated run, so it is never polled


@dataclass(frozen=True)
class SimulatedRound:
    """Metrics and costs of a committed round. Evaluations outside of the rounds are not included."""

    number: int  # from 0
    devices: tuple[str, ...]  # whose updates were folded, sorted
    metrics: Mapping[str, float]  # devices' means, of training
    down_bytes: int
    up_bytes: int
    wall_s: float  # on this machine; of a round that an interrupted process made, with evaluations after the one before
    duration_s: float  # on virtual time, from the round's opening to its end
    energy_j: float | None  # of the boards' tasks; None: one does not tell
    devices_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cpu_s: float = 0.0  # of the devices' work, on this machine
    evaluation: EvaluationSums | None = None


class Simulation:
    """One job on one simulated fleet.

    `members` has the number of held-out examples of each device. Boards and budgets are assigned in this order. An
    interrupted run resumes in `home`, and `rounds` starts with its earlier rounds. Devices in `away` are offline at
    first (`SimulatedFleet.bring_online`).
    """

    def __init__(
        self,
        job: JobSettings,
        folder: Path,
        members: Mapping[str, int],
        home: Path,
        *,
        load: Callable[[str], Method] = methods.load,
        engine: str | None = None,
        heard: Callable[[RunningJob, AnyEvent], None] = lambda running, fact: None,
        make: Callable[[str], Device] = boards.create_device,
        away: Collection[str] = (),
    ) -> None:
        self.job, self.members, self._heard = job, members, heard
        self.now_s = 0.0
        self.rounds: list[SimulatedRound] = []
        self.status, self.reason = "running", ""
        self.running: RunningJob | None = None
        self.refusals: dict[str, str] = {}  # device -> the last reason for which it did not take part
        self._answers: list[UpdateAccepted] = []
        self._ahead: WorkerPool | None = None
        self._busy_s = 0.0  # when somebody was last at the run, on virtual time
        self.adversaries = adversaries.choose_adversaries(job, members)
        self._overheard = adversaries.HonestUpdates()
        self._store = Store(home, durable=False)
        if not self._store.acquire_lock():
            raise JobError(f"another coordinator serves {home} already: give another home")
        self._store.begin_epoch()
        place = folder.resolve()
        self.run = self._store.find_unfinished(job, place, "simulation") or self._store.add_job(
            job, place, "simulation"
        )
        self._replay_log()
        self._store.set_status(self.run, "running")
        self.engine = engine or choose_job_engine(job, load(job.method))
        self._plugins = {
            f"plugin {module}": proof
            for module, proof in required_packages(job, job_bundle.load_bundle(folder)).items()
        }
        spare = self._make_capabilities(ROOM_BYTES)
        self.devices = home / "agents" / self.run  # of this run alone: what a board keeps of another would count here
        newcomer = DeviceSpec(NEWCOMER, lambda: boards.create_device("x86-host"), spare)
        self.fleet = SimulatedFleet(
            self._make_specs(make), self._store.blob_store, self.devices, {NEWCOMER: newcomer}, away
        )
        self._server = Server(self.fleet, self._store, self._observe_event, self.run, load, poll_s=POLL_S)
        self._began_s, self._opened_s = time.perf_counter(), 0.0

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
        """Whether the state can be evaluated, so that no preparatory evaluation round is due."""
        return self.running is not None and not self.running.job_state.is_evaluation_round

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are completed and the state can be evaluated."""
        return self.running is not None and self.running.job_state.is_work_done and self.can_evaluate

    def advance(self) -> list[WorkRequest]:
        """Advance virtual time until work requests wait, and return them.

        The list is empty if the run has ended or no device can continue it (see `reason`).
        """
        while not self.has_ended:
            due_s = self._server.step(self.now_s)
            if self.fleet.waiting_requests:
                self._server.step(self.now_s)  # devices have said that they begin: it is heard while they are at work
            if orders := self._select_requests(self.fleet.waiting_requests):
                return orders
            job = self._server.find_job(self.run)
            if job is None and not self.has_ended:
                # a run that could not be loaded has no observed events, only its log
                self.status = self._store.stored_status(self.run)
                ends = [fact for _, _, fact in self._store.read_events(self.run) if isinstance(fact, JobEnded)]
                self.reason = ends[-1].reason if ends else ""
                break
            at_work = job is not None and job.job_state.pending_devices
            if due_s >= (POLL_S if at_work else self._busy_s + WAITS_S):
                self.reason = "no device is left that could go on with it"
                break
            self.now_s = max(self.now_s, due_s)
        return []

    def set_prefetcher(self, ahead: WorkerPool | None) -> None:
        """Announce work requests to `ahead` as soon as devices start them.

        This is disabled with adversaries that observe honest updates.
        """
        if ahead is not None and not self._adversaries_observe:
            self._ahead, self.fleet.begun = ahead, ahead.prefetch
            ahead.set_sum_receiver(self)

    def exclude_time(self, seconds: float) -> None:
        self._began_s += seconds

    def deliver_outcome(self, device: str, outcome: WorkResult) -> None:
        """Pass a result to its device, after folding a small update early and recording what adversaries observe."""
        task, job = self.fleet.find_running_task(device), self._server.find_job(self.run)
        if job is not None and task is not None and task.job == job.id and outcome.bundles:
            small = all(ref.sha256 in outcome.blobs for ref in outcome.bundles.values())
            if small and job.aggregator.can_fold_early(job.job_state, task.round, device):
                job.aggregator.fold_early(
                    self._read_update(device, task, outcome), outcome.bundles
                )  # while others are at work
            if self._adversaries_observe and device not in self.adversaries:
                self._overheard.add_update(self._read_update(device, task, outcome))
        self.fleet.deliver_outcome(device, outcome)

    def find_state_file(self, orders: Sequence[WorkRequest]) -> str:
        """Return the file of the method state with which workers may sum these updates, or "" if they may not."""
        job = self._server.find_job(self.run)
        if job is None or any((each.task.job, each.task.round) != (job.id, job.job_state.round) for each in orders):
            return ""
        return job.aggregator.state_path_for_folding(job.job_state) or ""

    def receive_sum(
        self, orders: Sequence[WorkRequest], outcomes: Sequence[WorkResult], packed: Callable[[], bytes]
    ) -> None:
        job, done = self._server.find_job(self.run), zip(orders, outcomes, strict=True)
        if job is not None and all(self.fleet.find_running_task(each.device) is each.task for each in orders):
            given = {each.device: (it.weight, it.metrics, it.bundles) for each, it in done if it.code == "ok"}
            job.aggregator.fold_aggregate_early(job.job_state, orders[0].task.round, given, packed)

    def _read_update(self, device: str, task: Task, outcome: WorkResult) -> DeviceUpdate:
        bundles: dict[str, Tensors] = {}
        for name, ref in outcome.bundles.items():
            if (payload := outcome.blobs.get(ref.sha256)) is not None:
                bundles[name] = tensors.decode_tensors(payload)
            else:
                bundles[name] = tensors.read_tensors(Path(f"{self.fleet.out}/{device}.{ref.sha256}"))
        return DeviceUpdate(device, task.round, outcome.weight, outcome.metrics, bundles)

    @property
    def _adversaries_observe(self) -> bool:
        lying = self.job.fleet.adversaries
        return lying is not None and lying.attack == "inner_product"

    def _select_requests(self, orders: list[WorkRequest]) -> list[WorkRequest]:
        """Return the requests to run now. Adversaries that observe run after honest devices and receive their mean."""
        if not self._adversaries_observe:
            return orders
        first = [order for order in orders if order.device not in self.adversaries]
        if first or not orders:
            return first
        job = self._server.find_job(self.run)
        assert job is not None
        for (
            device,
            update,
        ) in job.job_state.accepted_updates.items():  # those that an interrupted process has carried out
            if device not in self.adversaries and device not in self._overheard.list_devices(job.job_state.round):
                self._overheard.add_update(job_blobs.load_update(self._store.blob_store, update))
        if not self._overheard.list_devices(job.job_state.round):
            return orders
        honest = self._overheard.write_mean(self.devices / "honest.safetensors")
        return [adversaries.add_honest_mean(order, honest) for order in orders]

    def make_evaluation_request(self, device: str) -> WorkRequest | None:
        """Return a work request that evaluates the next model, or None if there is nothing to evaluate."""
        job = self.running
        assert job is not None
        if job.method.check is None:
            raise JobError(f"{self.job.method} has no evaluation of its own")
        task = job.build_task(device, self.engine, self.fleet.profile(device), self.now_s, ("check",))
        return None if task is None else self.fleet.make_extra_request(device, task)

    def _make_specs(self, make: Callable[[str], Device]) -> Iterator[DeviceSpec]:
        fleet = self.job.fleet
        rule, honest = GovernorPolicy(fleet.policy), dict[str, object]()
        lies = adversaries.make_attack_data(fleet.adversaries) if fleet.adversaries else honest
        factories = [partial(make, board) for board in fleet.boards]
        budgets = [parse_size(budget) for budget in fleet.budgets]

        @cache  # devices of a kind share all that is not their own
        def make_kind(board: int, budget: int, labels: int, link: int) -> tuple[Any, ...]:
            means = self._make_capabilities(budgets[budget], fleet.device_labels(labels))
            return factories[board], means, rule, fleet.device_link(link)

        periods = [max(len(each), 1) for each in (factories, budgets, fleet.labels, fleet.links)]
        for index, name in enumerate(self.members):
            board, means, rule, link = make_kind(*(index % period for period in periods))
            yield DeviceSpec(name, board, means, lies if name in self.adversaries else honest, rule, link)

    def _make_capabilities(self, budget_bytes: int, labels: tuple[str, ...] = ()) -> state_machine.Capabilities:
        # simulated devices have the plug-ins of this process, because they share its code
        return state_machine.Capabilities(
            budget_bytes, (self.engine,), (self.job.method,), plugins=self._plugins, labels=labels
        )

    def _observe_event(self, job: JobView, fact: AnyEvent) -> None:
        if isinstance(job, RunningJob):  # it has not failed before it was taken up
            self.running = job
            self._heard(job, fact)
        if isinstance(fact, CohortSelected) and self._ahead is not None:
            self._ahead.expect_requests(len(fact.devices))
        if isinstance(fact, CohortSelected | UpdateAccepted | RoundCommitted):
            self._busy_s = self.now_s
        if isinstance(fact, RoundCommitted):
            now_s = time.perf_counter()
            self._add_round(fact, now_s - self._began_s, self.now_s - self._opened_s)
            self._began_s, self._opened_s = now_s, self.now_s
        else:
            self._record_event(fact)

    def _replay_log(self) -> None:
        began_s = 0.0  # by the clock of the day: rounds follow one another, with evaluations between them
        for _, at_s, fact in self._store.read_events(self.run):
            if isinstance(fact, RoundCommitted):
                self._add_round(fact, at_s - began_s, fact.took_s)
            elif isinstance(fact, JobEnded):
                continue  # it goes on
            self._record_event(fact)
            if isinstance(fact, JobStarted | RoundCommitted | JobResumed):
                began_s = at_s

    def _add_round(self, fact: RoundCommitted, wall_s: float, duration_s: float) -> None:
        self.rounds.append(_make_round(fact, self._answers, wall_s, duration_s))
        self._answers = []

    def _record_event(self, fact: AnyEvent) -> None:
        if isinstance(fact, UpdateAccepted):
            self._answers.append(fact)
        elif isinstance(fact, TaskDeclined | UpdateRejected) and getattr(fact, "code", "") != "none":
            self.refusals[fact.device] = fact.reason
        elif isinstance(fact, JobEnded):
            self.status, self.reason = fact.status, fact.reason


def _make_round(
    fact: RoundCommitted, answers: Sequence[UpdateAccepted], wall_s: float, duration_s: float
) -> SimulatedRound:
    updates = sorted((answer.update for answer in answers), key=lambda update: update.device)
    joules = [update.usage.energy_j for update in updates]
    return SimulatedRound(
        number=fact.round,
        devices=tuple(update.device for update in updates),
        metrics=fact.metrics,
        evaluation=fact.evaluation,
        down_bytes=sum(update.usage.down_bytes for update in updates),
        up_bytes=sum(update.usage.up_bytes for update in updates),
        wall_s=wall_s,
        duration_s=duration_s,
        energy_j=sum(each for each in joules if each is not None) if None not in joules else None,
        devices_metrics={update.device: update.metrics for update in updates},
        cpu_s=sum(update.usage.cpu_s for update in updates),
    )


def choose_job_engine(job: JobSettings, method: Method) -> str:
    there = engines.available_engines()
    for name in [job.engine] if job.engine else method.engines:
        if name in there:
            return name
    raise JobError(f"{job.method} runs on {' or '.join(method.engines)}; installed here: {', '.join(there)}")
