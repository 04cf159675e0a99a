"""Processes of a simulated federation: a coordinator and agents that end and are restarted."""

from __future__ import annotations

import errno
import math
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from fedquilt import wire
from fedquilt.coordinator.background_worker import BackgroundWorker, Callback
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.snapshots import Snapshot
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError, StoreError, Task, Update
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.agent_state import UPDATE_FILE, JobRecords
from fedquilt.edge_agent.devices import create_device as make_board
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.protocol import DataLoaded, Event, WorkRequest, WorkResult
from fedquilt.host.disk import StrPath
from tests.faults import schedule
from tests.faults.broker import SimBroker, SimLink, with_unknown_field
from tests.faults.database import LOG
from tests.faults.disk import SimDisk, SimulatedCrash, SimulatedFileSystem
from tests.faults.promises import DurableDisk, JobPromises, blobs_in_event, lost_blobs
from tests.faults.reference import BOARD, BUDGET, PrivateStateModel, ReferenceRun

T = TypeVar("T")

FLEET: Final = "sim"
WORK_S: Final = 1.0  # of a task
FEW: Final = CoordinatorLimits(waiting_mb=0)  # large updates: two at a time, so that boards wait for their turn
AGAIN_S: Final = 5.0  # until a process that ended by an error is started again
AT_ONCE_MOST: Final = 20  # steps within a moment that ask for another one; working processes have made three
MOMENT_S: Final = 0.001  # shorter than a message's way
ERRORS: Final = {"full": errno.ENOSPC, "readonly": errno.EROFS, "io": errno.EIO}


class InvariantError(BaseException):
    """Violated invariant. Not caught by `except Exception`."""


class SimulatedProcess(ABC):
    """Computer with one process.

    Args:
        name: "coordinator" or the name of a device.
        broker: The broker of the federation.
        platter: The file system of the computer.
        plan: The schedule with the faults.
        happened: Counts of all events.
    """

    def __init__(
        self,
        name: str,
        broker: SimBroker,
        platter: SimulatedFileSystem,
        plan: schedule.FaultSchedule,
        happened: Counter[str],
    ) -> None:
        self.name, self.broker, self.platter = name, broker, platter
        self.due_s, self.up_s = 0.0, 0.0
        self.inner: Any = None
        self.lives = 0
        self.ended = False  # whether the process has ended since the world looked last
        self.dead = False  # whether the computer is gone for good
        self._calls, self._offset_s = 0, 0.0
        self._happened = happened
        self._roll = random.Random(f"{plan.seed} {name}")
        mine = [fault for fault in plan.faults if isinstance(fault, schedule.ParticipantFault) and fault.who == name]
        self._crashes: dict[tuple[str, int], schedule.ProcessCrash] = {
            (fault.at, fault.call): fault for fault in mine if isinstance(fault, schedule.ProcessCrash)
        }
        self._calls_at = Counter[str]()  # by kind
        self._refusals = [fault for fault in mine if isinstance(fault, schedule.DiskFault)]
        self.newer = any(isinstance(fault, schedule.NewerParticipant) for fault in mine)
        self._slow = math.prod(fault.factor for fault in mine if isinstance(fault, schedule.SlowTask))
        self._work = {fault.start: fault.how for fault in mine if isinstance(fault, schedule.WorkerFault)}
        self._until = max((fault.call + fault.calls for fault in self._refusals), default=0)
        self._fell: schedule.ProcessCrash | None = None
        self.trouble = 0  # faults so far
        self._disk = SimDisk(platter)
        self._durable = DurableDisk(platter)
        self._starts = 0  # of tasks
        self._beside_s, self._is_buffered = plan.beside_s, plan.concurrency > 0
        self._began_s, self._at_once = -1.0, 0  # steps in a row, each of which was due at once, and since when

    def step(self, now_s: float) -> None:
        if now_s < self.up_s:
            self.due_s = self.up_s
            return
        try:
            if self.inner is None:
                self._start_process()
            self.due_s = max(self.inner.step(now_s + self._offset_s) - self._offset_s, now_s)
            self._require_no_busy_loop(now_s)
            if self._link.inbox:
                self.due_s = now_s
        except SimulatedCrash:
            assert self._fell is not None
            self._end_process(power=self._fell.power)
            self.up_s = self.due_s = now_s + self._fell.down_s
            self._fell = None
        except StoreError:
            if not self._refusals and not self._happened["rot"]:
                raise
            self._happened["ended by its disk"] += 1
            self._end_process(power=False)
            self.up_s = self.due_s = now_s + AGAIN_S

    def end_process(self) -> None:
        self._end_process(power=False)
        self.up_s = self.due_s = self.broker.now_s + AGAIN_S

    def kill_process(self, power: bool, down_s: float) -> None:
        if self.inner is not None:
            self._end_process(power=power)
            self.up_s = self.due_s = self.broker.now_s + down_s

    def destroy(self) -> None:
        self._end_process(power=False)
        self.dead, self.up_s, self.due_s = True, math.inf, math.inf

    def shift_clock(self, seconds: float) -> None:
        self._offset_s += seconds

    def close(self) -> None:
        self.inner = None
        self.platter.close()

    def _require_no_busy_loop(self, now_s: float) -> None:
        if self.due_s > now_s + MOMENT_S or now_s > self._began_s + MOMENT_S:
            self._began_s, self._at_once = now_s, 0
        self._at_once += self.due_s <= now_s + MOMENT_S
        if self._at_once > AT_ONCE_MOST:
            raise InvariantError(
                f"{self.name} spins: {self._at_once} steps at virtual second {now_s:g}, each due at once"
            )

    def _start_process(self) -> None:
        self.lives += 1
        self._disk = SimDisk(self.platter, self._inject_fault)
        self._link: SimLink = self.broker.connect(self.name, self._last_will())
        self._link.gate = self._inject_fault
        self._link.rewrite = self._check_sent
        self._happened["newer"] += self.newer
        self.inner = self._create_process(self._link)

    @abstractmethod
    def _create_process(self, link: SimLink) -> Any: ...

    def _last_will(self) -> tuple[str, bytes] | None:
        return None

    def _check_sent(self, topic: str, payload: bytes) -> bytes:
        if payload and not (self._happened["rot"] or self._happened["restore"]):
            self._require_promises_durable(wire.parse_topic(topic), payload)
        return with_unknown_field(topic, payload) if self.newer else payload

    @abstractmethod
    def _require_promises_durable(self, route: wire.Route, payload: bytes) -> None:
        """Raise InvariantError if a message promises what a power failure could take."""

    def _end_process(self, *, power: bool) -> None:
        self.inner, self.ended = None, True
        self._disk.release_locks()
        self.broker.lose_client(self.name)
        if power:
            self.platter.fail_power(self._roll)
        else:
            self.platter.end_processes()

    def _inject_fault(self, what: str, where: StrPath) -> OSError | None:
        if self._fell is not None:
            raise SimulatedCrash  # whatever runs while a dead process's stack unwinds has not happened
        self._calls += 1
        self._calls_at[what] += 1
        crash = self._crashes.pop(("", self._calls), None) or self._crashes.pop((what, self._calls_at[what]), None)
        if crash is not None:
            self._fell = crash
            self.trouble += 1
            self._happened["crash"] += 1
            self._happened[f"crash at {what}"] += 1
            self._happened["power"] += crash.power
            raise SimulatedCrash
        if self._calls < self._until and what in ("read", "write", "sync", "name", "commit"):
            for fault in self._refusals:
                if fault.call <= self._calls < fault.call + fault.calls and _is_refused(fault.how, what):
                    self._happened["refuse"] += 1
                    self.trouble += 1
                    return OSError(ERRORS[fault.how], os.strerror(ERRORS[fault.how]))
        return None


def _is_refused(how: str, what: str) -> bool:
    return {"full": what in ("write", "commit"), "readonly": what != "read", "io": True}[how]


class WatchedStore(Store):
    report: Callable[[str, AnyEvent], None] = staticmethod(lambda id, fact: None)
    written: Sequence[tuple[str, AnyEvent]] = ()  # events of the transaction that is under way

    def append_event(self, id: str, fact: AnyEvent) -> None:
        self._unreported = [*getattr(self, "_unreported", ()), (id, fact)]
        super().append_event(id, fact)

    def _write_events(self, rows: Sequence[tuple[str, float, str]]) -> None:
        self.written, self._unreported = getattr(self, "_unreported", []), []
        super()._write_events(rows)
        written, self.written = self.written, []
        for id, fact in written:
            self.report(id, fact)


class VirtualBackgroundWorker(BackgroundWorker):
    """Worker of a coordinator on virtual time, whose results are delayed.

    Args:
        delay_s: The delay of a result. If negative, nothing is run in the worker.
        now_s: A function that returns the time.
    """

    def __init__(self, delay_s: float, now_s: Callable[[], float]) -> None:
        super().__init__(math.inf if delay_s < 0 else 0)
        self.min_unsaved_ratio = 0
        self._delay_s, self._now_s, self.due_s = delay_s, now_s, math.inf

    @property
    def has_results(self) -> bool:
        return super().has_results and self._now_s() >= self.due_s

    def submit(self, piece: Callable[[], T], then: Callback[T]) -> None:
        super().submit(piece, then)
        self.due_s = min(self.due_s, self._now_s() + self._delay_s)

    def run_callbacks(self, now_s: float) -> int:
        if not self.has_results:
            return 0
        self.due_s = math.inf
        return super().run_callbacks(now_s)


class CoordinatorProcess(SimulatedProcess):
    observe: Callable[[Any, Any], None]
    load: Callable[[str], Any]
    acknowledge: Callable[[str], None]  # called with the device of each acknowledgement
    begin: Callable[[], None]  # called when it starts
    ahead = False  # whether it is of the next version now

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.promises: dict[str, JobPromises] = {}  # by job
        self._acknowledged: set[tuple[str, int, str]] = set()  # job, round and device
        self._sent: set[tuple[str, int, str]] = set()  # job, round and device of each task that this life has sent
        self._epochs = (0, 0)  # the latest one that an earlier life has used, and this life

    def _create_process(self, link: SimLink) -> Server:
        self.store = WatchedStore(Path(self.platter.root), disk=self._disk, every=1)
        if not self.store.acquire_lock():
            raise JobError("another coordinator runs in its home")
        self._rebuild_promises()
        self._sent = set()
        self.store.report = self._check_recorded
        self._epochs = (max(self._epochs), 0)
        self.begin()
        executor = LinkExecutor(link, FLEET, self.store.blob_store, self.store.begin_epoch())
        self._worker = VirtualBackgroundWorker(self._beside_s, lambda: self.broker.now_s)
        given = executor, self.store, self.observe, None, self.load, 30.0, FEW
        return Server(*given, worker=self._worker, uses_wall_clock=True)

    def step(self, now_s: float) -> None:
        super().step(now_s)
        if self.inner is not None:
            self.due_s = min(self.due_s, max(self._worker.due_s, now_s))
            self._require_tasks_sent()

    def _check_sent(self, topic: str, payload: bytes) -> bytes:
        sent = super()._check_sent(topic, payload)
        route = wire.parse_topic(topic)
        if route.message_type is Task and payload:
            task = wire.decode(payload, Task)
            self._sent.add((task.job, task.round, route.device))
        if self.ahead:
            return with_unknown_field(topic, sent)
        if route.message_type is wire.Ack and wire.decode(payload, wire.Ack).accepted:
            self.acknowledge(route.device)
        return sent

    def _require_promises_durable(self, route: wire.Route, payload: bytes) -> None:
        if route.message_type is wire.Ack:
            ack = wire.decode(payload, wire.Ack)
            counted = (ack.round, route.device) in self._promises_of(ack.job).counted
            if ack.accepted != counted:
                said, log = ("", "not ") if ack.accepted else ("not ", "")
                of = f"the update of {route.device} in round {ack.round} of {ack.job}"
                raise InvariantError(f"{of} is acknowledged as {said}counted, and is {log}in the log")
            if ack.accepted:
                self._acknowledged.add((ack.job, ack.round, route.device))
                self._require_blobs_synced(ack.job)
        elif route.message_type is Task:
            task = wire.decode(payload, Task)
            promised = self._promises_of(task.job)
            if promised.asked.get(route.device) != task.round:
                raise InvariantError(
                    f"{route.device} is sent round {task.round} of {task.job}, which the log does not say"
                )
            gone = [
                ref.sha256[:12] for ref in task.bundles.values() if self.store.blob_store.find_ref(ref.sha256) is None
            ]
            if gone:
                raise InvariantError(
                    f"the task of {route.device} in round {task.round} names blobs that are gone: {gone}"
                )
            self._require_blobs_synced(task.job)
        elif route.message_type is wire.CoordState:
            earlier, own = self._epochs
            state = wire.decode(payload, wire.CoordState)
            if state.epoch <= earlier:
                raise InvariantError(
                    f"the coordinator starts with epoch {state.epoch}, and an earlier start had {earlier}"
                )
            self._epochs = (earlier, max(own, state.epoch))

    def _inject_fault(self, what: str, where: StrPath) -> OSError | None:
        if where == LOG and not (self._happened["rot"] or self._happened["restore"]):  # a transaction is committed
            wanted = set[str]().union(*(blobs_in_event(fact) for _, fact in self.store.written))
            if lost := lost_blobs(self._durable, f"{self.platter.root}/blobs", wanted):
                raise InvariantError(f"the log names {lost[0][:12]} before it is synced")
        return super()._inject_fault(what, where)

    def _require_tasks_sent(self) -> None:
        for job in self.inner.active_jobs():
            if job.job_state.phase == "open":
                for device in job.job_state.pending_devices - self.inner.devices_of_other_jobs(job.id):
                    known = self.inner.registry.latest_profile(device) is not None
                    round = job.job_state.task_version(device).round
                    if known and (job.id, round, device) not in self._sent:
                        raise InvariantError(f"{device} is asked for round {round} of {job.id}, and has no task")

    def _promises_of(self, job: str) -> JobPromises:
        return self.promises.setdefault(job, JobPromises(buffered=self._is_buffered))

    def _check_recorded(self, job: str, fact: AnyEvent) -> None:
        self._promises_of(job).add_event(fact)
        if not (self._happened["rot"] or self._happened["restore"]):
            self._require_blobs_synced(job)
            if not self.platter.open_database(f"{self.platter.root}/fedquilt.db").is_synced:
                raise InvariantError(f"{job}: {type(fact).__name__} is followed before it is synced")

    def _require_blobs_synced(self, job: str) -> None:
        wanted = self._promises_of(job).blobs
        lost = lost_blobs(self._durable, f"{self.platter.root}/blobs", wanted)
        lost += [sha256 for sha256 in wanted if self.store.blob_store.find_ref(sha256) is None]
        if lost:
            raise InvariantError(f"{job}: the log needs {lost[0][:12]}, which is not stored, or not synced")

    def _rebuild_promises(self) -> None:
        """Rebuild the promises from the logs, and check that no acknowledged update is missing.

        Raises:
            InvariantError: If a log lacks an acknowledged update, or a snapshot does not fit its log.
        """
        self.promises = {}
        for row in self.store.readable_jobs():
            promised, plan = self._promises_of(row.id), JobConstants.from_job(row.job)
            whole, (standing, upto) = Snapshot(JobState(plan)), self.store.snapshots.load_state(row.id, plan, 0.0)
            self._happened["snapshot"] += upto > 0
            for seq, _, fact in self.store.read_events(row.id):
                promised.add_event(fact)
                whole.apply_event(fact, apply_event(whole.job_state, fact, 0.0))
                if seq > upto:
                    standing.apply_event(fact, apply_event(standing.job_state, fact, 0.0))
            if standing != whole and not self._happened["rot"]:
                raise InvariantError(
                    f"{row.id}: the snapshot up to fact {upto} does not fit the log: {standing}, {whole}"
                )
        lost = {each for each in self._acknowledged if each[1:] not in self._promises_of(each[0]).counted}
        if lost and not (self._happened["rot"] or self._happened["restore"]):
            raise InvariantError(f"acknowledged, and not in the log after a restart: {sorted(lost)}")

    def restore_home(self, copied: Any) -> None:
        self.end_process()
        self.platter.restore(copied)

    def can_start_second(self) -> bool:
        with Store(Path(self.platter.root), disk=SimDisk(self.platter)) as store:
            return store.acquire_lock()


def last_counted_rounds(root: str, disk: SimDisk) -> dict[str, int]:
    return {job: counted.round for job, counted in JobRecords(Path(root), disk, durable=True).load_counted().items()}


class AgentProcess(SimulatedProcess):
    truths: dict[str, ReferenceRun]
    failures = 0  # tasks that ended otherwise than well
    counts: Callable[[str, int], bool]  # whether the log has the device's update of a job's round

    def _inject_fault(self, what: str, where: StrPath) -> OSError | None:
        if (
            what == "name" and "/outbox/" in str(where) and str(where).endswith(UPDATE_FILE)
        ):  # an update leaves the outbox
            job, _, round = Path(where).parent.name.rpartition("@")
            known = last_counted_rounds(self.platter.root, self._durable).get(job, -1)
            altered = self._happened["rot"] or self._happened["restore"]
            if not altered and self.counts(job, int(round)) and int(round) > known:
                raise InvariantError(f"{self.name} drops its update of round {round} of {job}, which counts, too early")
        return super()._inject_fault(what, where)

    def _last_will(self) -> tuple[str, bytes]:
        topic = wire.Topics(FLEET).device_topic(self.name, "up", "presence")
        return topic, wire.encode(wire.Presence(online=False, boot=f"{self.name}-{self.lives}"))

    def _create_process(self, link: SimLink) -> Agent:
        options = AgentSettings(
            device=self.name,
            fleet=FLEET,
            home=self.platter.root,
            budget=BUDGET,
            plugins=(),
            telemetry_s=1e9,
            data={"share": self.name},
        )
        board = make_board(BOARD)
        boot = f"{self.name}-{self.lives}"
        return Agent(link, options, board, SimWorker(self), boot, disk=self._disk, clock=lambda: None)

    def _require_promises_durable(self, route: wire.Route, payload: bytes) -> None:
        if route.message_type is Update:
            self._require_synced_update(wire.decode(payload, Update))
        elif (
            route.message_type is wire.Claim
            and (claim := wire.decode(payload, wire.Claim)).last_counted_round is not None
        ):
            known = last_counted_rounds(self.platter.root, self._durable).get(claim.job, -1)
            if claim.last_counted_round > known:
                raise InvariantError(
                    f"{self.name} reports round {claim.last_counted_round} of {claim.job} as counted before the sync"
                )

    def _require_synced_update(self, update: Update) -> None:
        if update.round <= last_counted_rounds(self.platter.root, self._durable).get(update.job, -1):
            return
        root, name = self.platter.root, f"{update.job}@{update.round}"
        wanted = {ref.sha256 for ref in update.bundles.values()}
        lost = lost_blobs(self._durable, f"{root}/blobs", wanted)
        entry = f"{root}/outbox/{name}"
        files = [each.name for each in SimDisk(self.platter).entries(entry)]
        lost += [file for file in files if not self._durable.is_file(f"{entry}/{file}")]
        if lost or UPDATE_FILE not in files:
            raise InvariantError(f"{self.name} offers {name} before it is synced: {lost or UPDATE_FILE}")

    def run_task(self, order: WorkRequest) -> WorkResult:
        disk, truth = SimDisk(self.platter), self.truths[order.task.method]
        private = None if order.private_state is None else disk.read(order.private_state)
        known = PrivateStateModel(private, order.private_sha256, order.lost_reason, order.unknown_reason)
        try:
            done = truth.shop.run_task(
                order.task, self.name, known, lambda sha256: disk.read(f"{self.platter.root}/blobs/{sha256}")
            )
        except FileNotFoundError:
            return WorkResult(code="disk", reason="a bundle is gone")
        for name, payload in done.files.items():
            disk.write(f"{order.output_folder}/{name}", payload)
        return done.outcome

    def next_start_failure(self) -> str | None:
        self._starts += 1
        how = self._work.get(self._starts)
        if how is not None:
            self._happened["worker"] += 1
            self.failures += 1
            self.trouble += 1
        if self._slow > 1:
            self._happened["slow"] += 1
        return how

    @property
    def work_s(self) -> float:
        return WORK_S * self._slow


class SimWorker:
    resident_bytes = 0

    def __init__(self, side: AgentProcess) -> None:
        self._side = side
        self._events: list[tuple[float, Event]] = []

    def start(self, order: WorkRequest, now_s: float) -> None:
        how = self._side.next_start_failure()
        if how == "killed":
            outcome = WorkResult(code="failed", reason="the task's process was killed", killed_externally=True)
        elif how is not None:
            outcome = WorkResult(code=how, reason="by the schedule", ran_out_of_memory=how == "memory")  # type: ignore[arg-type]
        else:
            outcome = self._side.run_task(order)
        self._events = [(now_s + self._side.work_s, outcome)]
        if outcome.code == "ok":
            self._events.insert(0, (now_s, DataLoaded(outcome.examples)))

    def poll_events(self, now_s: float) -> list[Event]:
        due = [event for at_s, event in self._events if at_s <= now_s]
        if due:
            self._events = [each for each in self._events if each[0] > now_s]
        return due

    def next_poll_s(self, now_s: float) -> float:
        return self._events[0][0] if self._events else math.inf

    def kill(self) -> None:
        self._events = []

    def fds(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self._events = []
