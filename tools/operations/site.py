"""Site: an agent whose worker runs tasks as rounds of the site's coordinator.

The worker stores each work request as a round of a job, with the method state of the parent. The outcome is a partial
sum, or the updates of the devices. The event log contains everything, so a restarted site resumes its round and submits
a lost update again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np

from fedquilt import methods, wire
from fedquilt.arrays import disk_arrays, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import events, failed_rounds
from fedquilt.coordinator.rounds.events import AnyEvent, JobView
from fedquilt.coordinator.rounds.selection import NO_WORK
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import job_blobs, sites
from fedquilt.core import (
    BlobRef,
    Cost,
    DeviceUpdate,
    FedquiltError,
    JobError,
    OperatingPoint,
    Reading,
    Tensors,
    Update,
    Usage,
    WorkEstimate,
    shorten_error,
)
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.settings import AgentSettings, load_settings
from fedquilt.edge_agent.state_machine import Capabilities
from fedquilt.edge_agent.task import protocol
from fedquilt.edge_agent.task.protocol import Event, WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink, load_identity
from fedquilt.transport.link import Endpoint, Link
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink
from fedquilt.wire import RefusalCode

log = logging.getLogger("fedquilt.agent")

WITHIN: Final = 0.9  # share of the task's deadline that the boards get: the rest is for the way up
POLL_S: Final = 0.5
LONG: Final = 1_000_000  # rounds of a site's job: the coordinator above ends it
HALTED: Final = "stopped at the site by request: it takes no part until it is resumed there (`fedquilt resume`)"


class SiteDevice:
    board = "site"
    points: tuple[OperatingPoint, ...] = ()
    idle_w: float | None = None
    provenance = "its boards'"
    adjustable = holds = False

    def __init__(self) -> None:
        self.memory_bytes = 1 << 40  # until its boards are seen
        self.energy_j: float | None = None  # of the last round's boards; None: one of them has no meter

    def read_sensors(self, now_s: float) -> Reading:
        return Reading()

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        # each device of the site pins its own operating point
        return point

    def unpin_clocks(self) -> None: ...

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        source = None if self.energy_j is None else "its boards' meters"
        return msgspec.structs.replace(measured, energy_j=self.energy_j, energy_source=source)


class _SiteJobLog:
    def __init__(self) -> None:
        self.last: events.JobStarted | events.RoundCommitted | None = None
        self.halted = False  # whether it was stopped here by request, and not resumed since
        self.updates: dict[str, Update] = {}  # of the round that began last: updates that count, by board
        self.refusals: dict[str, str] = {}  # board -> reason of its refusal, or of its update's
        self._seq = 0

    @property
    def current_round(self) -> int:
        return (
            self.last.first_round if isinstance(self.last, events.JobStarted) else self.last.round if self.last else 0
        )

    def apply_new_events(self, store: Store, id: str) -> _SiteJobLog:
        for seq, _, fact in store.read_events(id, self._seq):
            self._seq = seq
            match fact:
                case events.JobStarted():
                    self.last, self.halted = fact, False
                    self.updates, self.refusals = {}, {}
                case events.RoundCommitted():
                    self.last = fact
                case events.UpdateAccepted():
                    self.updates[fact.update.device] = fact.update
                case events.UpdateLost():
                    self.updates.pop(fact.device, None)
                case events.TaskDeclined(code=code) if code == NO_WORK:
                    continue
                case events.TaskDeclined() | events.UpdateRejected():
                    self.refusals[fact.device] = fact.reason
                case events.NoteRecorded(said):
                    self.halted = self.halted or said == HALTED
                case events.JobResumed():
                    self.halted = False
        return self


class SiteWorker:
    resident_bytes: int = 0
    server: Server  # set once it is made, with this worker's `observe`

    def __init__(self, store: Store, board: SiteDevice, quorum: float = 0.5) -> None:
        self._store, self._board, self._quorum = store, board, quorum
        self._order: WorkRequest | None = None
        self._begun_s = 0.0
        self._asked = False  # whether the store has the round of the order
        self._left: WorkRequest | None = None  # given up just now, while its round goes on
        self._outcome: WorkResult | None = None
        self._logs: dict[str, _SiteJobLog] = {}  # by job
        self._stopping: set[str] = set()  # jobs that this worker has stopped
        self._halting: set[str] = set()  # jobs that somebody else has

    def start(self, order: WorkRequest, now_s: float) -> None:
        # a task of the round that was just cancelled keeps that round and its deadline
        self._asked = self._left is not None and _get_round_identity(self._left) == _get_round_identity(order)
        self._left = None if self._asked else self._left
        self._order, self._begun_s, self._outcome = order, now_s, None

    def poll_events(self, now_s: float) -> list[Event]:
        """Return the outcome when the round has been committed or has failed, and stop cancelled runs."""
        self._record_stopped_jobs()
        if self._left is not None:
            self._request_stop_if_active(self._left.task.job)
            self._left = None
        order = self._order
        if order is None:
            return []
        runs = self.server.find_job(order.task.job) is not None
        if not self._asked and self._outcome is None and not runs:
            self._asked = True
            try:
                self._outcome = self._begin_round(order)
            except FedquiltError as error:
                self._outcome = WorkResult(code="failed", reason=shorten_error(str(error)))
        elif not self._asked and self._outcome is None and not self._adopt_running_round(order):
            self._request_stop_if_active(order.task.job)
        if self._outcome is None or self.server.find_job(order.task.job) is not None:
            return []
        outcome, self._outcome, self._order = self._outcome, None, None
        return [msgspec.structs.replace(outcome, wall_s=now_s - self._begun_s)]

    def next_poll_s(self, now_s: float) -> float:
        return math.inf if self._order is self._left is None else now_s + POLL_S

    def kill(self) -> None:
        # the next `poll_events` stops the round
        if self._order is not None and self._asked and self._outcome is None:
            self._left = self._order
        self._order = self._outcome = None

    def fds(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        # the round stays in the log and resumes at the next start
        ...

    def observe(self, job: JobView, fact: events.AnyEvent) -> None:
        """Record the commit or failure of the requested round.

        A committed run is stopped until the next task.
        """
        if isinstance(fact, events.RoundCommitted):
            self._request_stop_if_active(job.id)
            if self._is_ordered(job.id) and self._order is not None and fact.round == self._order.task.round:
                self._outcome = self._write_bundles_and_make_outcome(job.id, fact)
        elif isinstance(fact, events.JobEnded) and fact.status == "stopped":
            self._halting |= {job.id} - self._stopping
            self._stopping.discard(job.id)
        elif isinstance(fact, events.JobEnded) and fact.status == "failed" and self._is_ordered(job.id):
            code: Any = fact.code if fact.code in get_args(RefusalCode) else "failed"
            self._outcome = WorkResult(code=code, reason=shorten_error(f"the site's round failed: {fact.reason}"))

    def read_capabilities(self, before: Capabilities, now_s: float) -> Capabilities:
        """Return the site's capabilities, and update the memory of the site.

        Engines and codecs are those of any device, the budget is the largest.
        """
        known = [each for each in self.server.registry.device_views(now_s).values() if each.profile]
        seen = [each.profile for each in known if each.online and each.profile]
        self._board.memory_bytes = sum(each.memory_bytes for each in seen)
        return msgspec.structs.replace(
            before,
            budget_bytes=max((each.budget_bytes for each in seen), default=0),
            engines=tuple(sorted({engine for each in seen for engine in each.engines})),
            codecs=tuple(sorted({"raw"}.union(*(each.codecs for each in seen)))),
            boards=max(len(known), 1),  # a site without boards is no board
        )

    # -- rounds --

    def _is_ordered(self, id: str) -> bool:
        return self._order is not None and id == self._order.task.job

    def _request_stop_if_active(self, id: str) -> None:
        if self._store.stored_status(id) in ("queued", "running"):
            self._stopping.add(id)
            self._store.set_status(id, "stopping")
            self.server.request_poll()

    def _record_stopped_jobs(self) -> None:
        # runs that a user stopped at the site
        for id in [id for id in self._halting if self.server.find_job(id) is None]:
            self._halting.discard(id)
            self._store.append_event(id, events.NoteRecorded(HALTED))
            if self._is_ordered(id) and self._outcome is None:
                self._asked, self._outcome = True, WorkResult(code="failed", reason=HALTED)

    def _adopt_running_round(self, order: WorkRequest) -> bool:
        job = self.server.find_job(order.task.job)
        if job is None or job.id in self._stopping or job.job_state.state is None or sites.STATE not in order.bundles:
            return False
        with contextlib.suppress(FedquiltError):  # who begins with the order tells it
            here = job.job_state.parent_order is not None and job.job_state.round == order.task.round
            self._asked = here and self._has_parent_state(
                job.job_state.state, sites.site_state_from_task(tensors.read_tensors(Path(order.bundles[sites.STATE])))
            )
        return self._asked

    def _begin_round(self, order: WorkRequest) -> WorkResult | None:
        task, store, id = order.task, self._store, order.task.job
        if sites.STATE not in order.bundles or "job" not in task.params:
            raise JobError(
                "the task is none for a site: the coordinator above does not know this device as a site (`fedquilt "
                "identity issue NAME --role site`, or [sites.NAME] in its limits.toml without certificates)"
            )
        given = sites.site_state_from_task(tensors.read_tensors(Path(order.bundles[sites.STATE])))
        tensors.unpack_state(given.parent_state.tobytes(), methods.load(task.method).state)  # before it is in the log
        if not store.stored_status(id):
            job = self._make_site_job(task.params["job"])
            folder = (store.home / "sites" / id).resolve()
            store.add_job(job, folder, id=id)  # first: files of a run that is not in the list are removed
            _write_bundle_if_changed(folder, order)
        else:
            _write_bundle_if_changed(
                store.find_job(id).bundle, order
            )  # other files than before, or a restored home has the log alone
        known = self._read_log(id)
        if known.halted:
            return WorkResult(code="failed", reason=HALTED)
        if known.last is not None and self._has_parent_state(known.last.state, given):
            if isinstance(known.last, events.RoundCommitted) and known.last.round == task.round:
                return self._write_bundles_and_make_outcome(id, known.last)
            if isinstance(known.last, events.JobStarted) and known.last.first_round == task.round:
                self._resume_job(id)
                return None
        if known.last is not None and known.current_round > task.round:
            log.warning(
                "the coordinator above asks for round %d of %s, and round %d was worked for here: its home is an older "
                "copy, or has lost its end; the boards work for these rounds again",
                *(task.round + 1, id, known.current_round + 1),
            )
        started = events.JobStarted(
            store.blob_store.store_bytes(tensors.pack_state(given)),
            first_round=task.round,
            actions=task.actions,
            is_evaluation_round=bool(task.params.get("settling")),
            deadline_s=max(WITHIN * task.deadline_s, 1.0),
            class_shares=task.class_shares or (),
        )
        store.append_event(id, started)
        self._resume_job(id)
        return None

    def _read_log(self, id: str) -> _SiteJobLog:
        return self._logs.setdefault(id, _SiteJobLog()).apply_new_events(self._store, id)

    def _resume_job(self, id: str) -> None:
        self._stopping.discard(id)
        self._store.set_status(id, "running")
        self.server.request_poll()

    def _has_parent_state(self, ref: BlobRef, given: sites.SiteJobState) -> bool:
        found = self._read_state(ref)
        return found is not None and np.array_equal(found.parent_state, given.parent_state)

    def _read_state(self, ref: BlobRef) -> sites.SiteJobState | None:
        # a large sum stays on disk. None if the blob is missing or damaged
        path, disk = self._store.blob_store.verified_path(ref.sha256), self._store.blob_store.disk
        return None if path is None else disk_arrays.read_state(path, sites.SiteJobState, disk, job_blobs.WHOLE_BYTES)

    def _make_site_job(self, table: Mapping[str, Any]) -> JobSettings:
        told = settings.parse_job(table)
        spared = {name: getattr(told.cohort, name) for name in ("min_battery", "max_temperature_c", "max_examples")}
        return msgspec.structs.replace(
            told,
            rounds=LONG,
            cohort=settings.CohortSettings(quorum=self._quorum, attempts=1, select=told.cohort.select, **spared),
            check=settings.EvaluationSettings(),
            stop=settings.JobLimits(),
            trigger=None,
            model={},
            input={},
            donors=(),
        )

    def _write_bundles_and_make_outcome(self, id: str, fact: events.RoundCommitted) -> WorkResult:
        order, brought, known = self._order, self._read_state(fact.state), self._read_log(id)
        assert order is not None
        if brought is None:
            return WorkResult(code="failed", reason="what the site's round has brought is gone from its disk")
        used = [update.usage for update in known.updates.values()]
        joules = [usage.energy_j for usage in used if usage.energy_j is not None]
        self._board.energy_j = math.fsum(joules) if len(joules) == len(used) else None
        refs = {}
        if "work" in order.task.actions:
            out = Path(order.out)
            out.mkdir(parents=True, exist_ok=True)
            for name, sent in self._yield_update_bundles(brought, sorted(known.updates)):
                refs[name] = ref = protocol.write_tensors(out / f"{order.prefix}bundle", sent)
                os.replace(out / f"{order.prefix}bundle", out / f"{order.prefix}{ref.sha256}")
        return WorkResult(
            weight=math.fsum(update.weight for update in known.updates.values()),
            metrics=fact.metrics,
            evaluation=fact.evaluation,
            bundles=refs,
            examples=sum(usage.examples or 0 for usage in used),
            cpu_s=math.fsum(usage.cpu_s for usage in used),
            note=_describe_missing_devices(known.updates, known.refusals),
            below=Usage(
                down_bytes=sum(usage.down_bytes for usage in used), up_bytes=sum(usage.up_bytes for usage in used)
            ),
        )

    def _yield_update_bundles(self, state: sites.SiteJobState, boards: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        # the partial sum of the devices, or their updates
        if state.form:
            yield sites.AGGREGATE_BUNDLE, sites.bundle_from_aggregate(state.total, state.form, boards)
            return
        yield from sites.bundle_updates(
            [DeviceUpdate(each.device, each.round, each.weight, each.metrics, each.bundles) for each in state.sent]
        )


def _get_round_identity(order: WorkRequest) -> tuple[str, int, str, tuple[str, ...]]:
    # two requests with the same identity are served by one round
    task = order.task
    return task.job, task.round, task.state, task.actions


def _write_bundle_if_changed(folder: Path, order: WorkRequest) -> None:
    files = {name.removeprefix(sites.FILE): name for name in order.bundles if name.startswith(sites.FILE)}
    with contextlib.suppress(JobError):  # the file is missing or incomplete
        known = job_bundle.load_bundle(folder).files
        if all(known.get(name) == order.task.bundles[given] for name, given in files.items()):
            return
    given = {name: Path(order.bundles[each]).read_bytes() for name, each in files.items()}
    job_bundle.write_bundle(folder, {"network": {}}, given)


def _describe_missing_devices(updates: Mapping[str, Update], refusals: Mapping[str, str]) -> str:
    refused = {device: reason for device, reason in refusals.items() if device not in updates}
    return f"refused there: {failed_rounds.format_by_reason(refused)}"[:1000] if refused else ""


MEANS_S: Final = 5.0  # between two looks at which boards there are
BUSY_S: Final = 0.02  # between two looks at the link above while something is on its way
IDLE_S: Final = 0.25


class SiteAgent:
    finished = False
    server: Server

    def __init__(
        self, link: Link, options: AgentSettings, store: Store, boot: str | None = None, *, durable: bool = True
    ) -> None:
        board, self.link = SiteDevice(), link
        self._worker = SiteWorker(store, board)
        self.agent = Agent(link, options, board, self._worker, boot, durable=durable, clock=lambda: None)
        self._lock = self.agent.local.lock_home()
        self._means_s, self._there = -math.inf, False  # whether a board has been seen: without any, it is no device yet

    def attach_server(self, server: Server) -> None:
        self.server = self._worker.server = server

    def observe(self, job: JobView, fact: AnyEvent) -> None:
        self._worker.observe(job, fact)

    def step(self, now_s: float) -> float:
        """Handle messages of the parent coordinator, and publish changed capabilities.

        Nothing is published before the site has a device.
        """
        if now_s >= self._means_s + (MEANS_S if self._there else IDLE_S):
            self._means_s = now_s
            means = self._worker.read_capabilities(self.agent.duty.state.means, now_s)
            self._there = self._there or bool(means.engines)
            if means != self.agent.duty.state.means:
                self.agent.apply_capabilities(means)
        if not self._there:
            return now_s + IDLE_S
        return min(self.agent.step(now_s), self._means_s + MEANS_S)

    def make_endpoint(self, server: Server) -> Endpoint:
        self.attach_server(server)
        return _SiteEndpoint(server, self)

    def fds(self) -> Sequence[int]:
        return self.agent.fds()

    @property
    def has_pending_transfer(self) -> bool:
        """Whether a task is being received or an update awaits its acknowledgement."""
        state = self.agent.duty.state
        return bool(state.outbox) or (state.open is not None and not state.open.working)

    def announce_end(self) -> None:
        self.agent.shut_down()
        self._lock.release()


class _SiteEndpoint:
    def __init__(self, server: Server, site: SiteAgent) -> None:
        self._server, self._site = server, site

    @property
    def finished(self) -> bool:
        return self._server.finished

    def step(self, now_s: float) -> float:
        # the caller waits for the coordinator's link alone, so the agent's link is polled
        server_s = self._server.step(now_s)
        self._site.link.wait(0.0)
        return min(server_s, self._site.step(now_s), now_s + (BUSY_S if self._site.has_pending_transfer else IDLE_S))

    def fds(self) -> Sequence[int]:
        return [*self._server.fds(), *self._site.fds()]


def connect_site_agent(path: Path, store: Store) -> SiteAgent:
    options = load_settings(path)
    broker, boot = Broker.from_url(**msgspec.structs.asdict(options.broker)), os.urandom(8).hex()
    presence = wire.Topics(options.fleet).device_topic(options.device, "up", "presence")
    will = presence, wire.encode(wire.Presence(online=False, boot=boot))
    plain = MqttLink(broker, f"fedquilt-{options.fleet}-{options.device}", will)
    own = load_identity(broker)
    return SiteAgent(
        plain if own is None else AuthenticatedDeviceLink(plain, own, options.fleet, options.device),
        options,
        store,
        boot,
    )
