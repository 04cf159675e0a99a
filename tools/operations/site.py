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

from fedquilt import methods
from fedquilt.arrays import disk_arrays, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import events, selection
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.rounds.job_state import JobView
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
from fedquilt.edge_agent.device_link import open_device_link
from fedquilt.edge_agent.settings import AgentSettings, load_settings
from fedquilt.edge_agent.state_machine import Capabilities
from fedquilt.edge_agent.task import protocol
from fedquilt.edge_agent.task.protocol import Event, WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.transport.link import Endpoint, Link
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.wire import RefusalCode

log = logging.getLogger("fedquilt.agent")

DEVICE_TIME_SHARE: Final = 0.9  # the rest of the task's deadline is for the upload to the parent
POLL_S: Final = 0.5
MAX_ROUNDS: Final = 1_000_000  # the parent coordinator ends the job of a site
STOP_NOTE: Final = "run was stopped at the site: resume it there with `fedquilt resume`"


class SiteDevice:
    board = "site"
    points: tuple[OperatingPoint, ...] = ()
    idle_w: float | None = None
    provenance = "its boards'"
    adjustable = clocks_unchanged = False

    def __init__(self) -> None:
        self.memory_bytes = 1 << 40  # until a device has sent its profile
        self.energy_j: float | None = None  # energy of the last round, or None if a device has no meter

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
        self.last_event: events.JobStarted | events.RoundCommitted | None = None
        self.is_stopped = False
        self.updates: dict[str, Update] = {}  # accepted updates of the latest round, by device
        self.refusals: dict[str, str] = {}  # device -> reason of its declined task or rejected update
        self._seq = 0

    @property
    def current_round(self) -> int:
        if isinstance(self.last_event, events.JobStarted):
            return self.last_event.first_round
        return self.last_event.round if self.last_event else 0

    def apply_new_events(self, store: Store, job_id: str) -> _SiteJobLog:
        for seq, _, event in store.read_events(job_id, self._seq):
            self._seq = seq
            match event:
                case events.JobStarted():
                    self.last_event, self.is_stopped = event, False
                    self.updates, self.refusals = {}, {}
                case events.RoundCommitted():
                    self.last_event = event
                case events.UpdateAccepted():
                    self.updates[event.update.device] = event.update
                case events.UpdateLost():
                    self.updates.pop(event.device, None)
                case events.TaskDeclined(code=code) if code == NO_WORK:
                    continue
                case events.TaskDeclined() | events.UpdateRejected():
                    self.refusals[event.device] = event.reason
                case events.NoteRecorded(note):
                    self.is_stopped = self.is_stopped or note == STOP_NOTE
                case events.JobResumed():
                    self.is_stopped = False
        return self


class SiteWorker:
    resident_bytes: int = 0
    server: Server  # set by `SiteAgent.attach_server`

    def __init__(self, store: Store, device: SiteDevice, quorum: float = 0.5) -> None:
        self._store, self._device, self._quorum = store, device, quorum
        self._request: WorkRequest | None = None
        self._started_s = 0.0
        self._round_stored = False  # whether the event log has the round of the request
        self._cancelled_request: WorkRequest | None = None  # request whose round still runs
        self._outcome: WorkResult | None = None
        self._logs: dict[str, _SiteJobLog] = {}  # by job
        self._stopping: set[str] = set()  # jobs that this worker has stopped
        self._stopped_by_user: set[str] = set()  # jobs that a user has stopped at the site

    def start(self, request: WorkRequest, now_s: float) -> None:
        # a task of the round that was just cancelled keeps that round and its deadline
        self._round_stored = self._cancelled_request is not None and _get_round_identity(
            self._cancelled_request
        ) == _get_round_identity(request)
        self._cancelled_request = None if self._round_stored else self._cancelled_request
        self._request, self._started_s, self._outcome = request, now_s, None

    def poll_events(self, now_s: float) -> list[Event]:
        """Return the outcome once the round is committed or has failed, else []. Stop cancelled runs."""
        self._record_stopped_jobs()
        if self._cancelled_request is not None:
            self._request_stop_if_active(self._cancelled_request.task.job)
            self._cancelled_request = None
        request = self._request
        if request is None:
            return []
        is_running = self.server.find_job(request.task.job) is not None
        if not self._round_stored and self._outcome is None and not is_running:
            self._round_stored = True
            try:
                self._outcome = self._begin_or_resume_round(request)
            except FedquiltError as error:
                self._outcome = WorkResult(code="failed", reason=shorten_error(str(error)))
        elif not self._round_stored and self._outcome is None and not self._adopt_running_round(request):
            self._request_stop_if_active(request.task.job)
        if self._outcome is None or self.server.find_job(request.task.job) is not None:
            return []
        outcome, self._outcome, self._request = self._outcome, None, None
        return [msgspec.structs.replace(outcome, wall_s=now_s - self._started_s)]

    def next_poll_s(self, now_s: float) -> float:
        return math.inf if self._request is self._cancelled_request is None else now_s + POLL_S

    def kill(self) -> None:
        # the next `poll_events` stops the round
        if self._request is not None and self._round_stored and self._outcome is None:
            self._cancelled_request = self._request
        self._request = self._outcome = None

    def fds(self) -> Sequence[int]:
        return ()

    def close(self) -> None: ...  # the round stays in the log and resumes at the next start

    def observe(self, job: JobView, event: events.AnyEvent) -> None:
        """Record the commit or failure of the requested round.

        After a commit, the run is stopped until the parent sends the next task.
        """
        if isinstance(event, events.RoundCommitted):
            self._request_stop_if_active(job.id)
            if self._is_requested(job.id) and self._request is not None and event.round == self._request.task.round:
                self._outcome = self._write_bundles_and_make_outcome(job.id, event)
        elif isinstance(event, events.JobEnded) and event.status == "stopped":
            self._stopped_by_user |= {job.id} - self._stopping
            self._stopping.discard(job.id)
        elif isinstance(event, events.JobEnded) and event.status == "failed" and self._is_requested(job.id):
            code: Any = event.code if event.code in get_args(RefusalCode) else "failed"
            self._outcome = WorkResult(code=code, reason=shorten_error(f"the site's round failed: {event.reason}"))

    def read_capabilities(self, capabilities: Capabilities, now_s: float) -> Capabilities:
        """Return the site's capabilities, and set its memory to the sum over all online devices.

        Engines and codecs are those that some online device has. The memory budget is that of the largest device.
        """
        registered = [device for device in self.server.registry.device_views(now_s).values() if device.profile]
        online_profiles = [device.profile for device in registered if device.online and device.profile]
        self._device.memory_bytes = sum(device.memory_bytes for device in online_profiles)
        return msgspec.structs.replace(
            capabilities,
            budget_bytes=max((device.budget_bytes for device in online_profiles), default=0),
            engines=tuple(sorted({engine for device in online_profiles for engine in device.engines})),
            codecs=tuple(sorted({"raw"}.union(*(device.codecs for device in online_profiles)))),
            site_device_count=max(len(registered), 1),  # a site counts as at least one device
        )

    # -- rounds --

    def _is_requested(self, job_id: str) -> bool:
        return self._request is not None and job_id == self._request.task.job

    def _request_stop_if_active(self, id: str) -> None:
        if self._store.stored_status(id) in ("queued", "running"):
            self._stopping.add(id)
            self._store.set_status(id, "stopping")
            self.server.request_poll()

    def _record_stopped_jobs(self) -> None:
        # runs that a user stopped at the site
        for id in [id for id in self._stopped_by_user if self.server.find_job(id) is None]:
            self._stopped_by_user.discard(id)
            self._store.append_event(id, events.NoteRecorded(STOP_NOTE))
            if self._is_requested(id) and self._outcome is None:
                self._round_stored, self._outcome = True, WorkResult(code="failed", reason=STOP_NOTE)

    def _adopt_running_round(self, request: WorkRequest) -> bool:
        job = self.server.find_job(request.task.job)
        if job is None or job.id in self._stopping or job.job_state.state is None or sites.STATE not in request.bundles:
            return False
        with contextlib.suppress(FedquiltError):  # `_begin_or_resume_round` reports the error
            is_same_round = job.job_state.parent_order is not None and job.job_state.round == request.task.round
            self._round_stored = is_same_round and self._has_parent_state(
                job.job_state.state,
                sites.site_state_from_task(tensors.read_tensors(Path(request.bundles[sites.STATE]))),
            )
        return self._round_stored

    def _begin_or_resume_round(self, request: WorkRequest) -> WorkResult | None:
        # None while the round runs, or the outcome of a committed round or stopped job
        task, store, id = request.task, self._store, request.task.job
        if sites.STATE not in request.bundles or "job" not in task.params:
            raise JobError(
                "task is for a device, not for a site: the parent coordinator has not registered this device as a site "
                "(`fedquilt identity issue NAME --role site`, or [sites.NAME] in its limits.toml without "
                "certificates)"
            )
        parent_state = sites.site_state_from_task(tensors.read_tensors(Path(request.bundles[sites.STATE])))
        # the state must be valid before the event log refers to the state
        tensors.unpack_state(parent_state.parent_state.tobytes(), methods.load(task.method).state)
        if not store.stored_status(id):
            job = self._make_site_job(task.params["job"])
            folder = (store.home / "sites" / id).resolve()
            store.add_job(job, folder, id=id)  # files of unlisted runs are garbage
            _write_bundle_if_changed(folder, request)
        else:
            # the files have changed, or a restored home has none
            _write_bundle_if_changed(store.find_job(id).bundle, request)
        job_log = self._read_log(id)
        if job_log.is_stopped:
            return WorkResult(code="failed", reason=STOP_NOTE)
        if job_log.last_event is not None and self._has_parent_state(job_log.last_event.state, parent_state):
            if isinstance(job_log.last_event, events.RoundCommitted) and job_log.last_event.round == task.round:
                return self._write_bundles_and_make_outcome(id, job_log.last_event)
            if isinstance(job_log.last_event, events.JobStarted) and job_log.last_event.first_round == task.round:
                self._resume_job(id)
                return None
        if job_log.last_event is not None and job_log.current_round > task.round:
            log.warning(
                (
                    "parent coordinator requests round %d of %s after round %d was completed here: its home is "
                    "an older or truncated copy, repeating these rounds"
                ),
                *(task.round + 1, id, job_log.current_round + 1),
            )
        started = events.JobStarted(
            store.blob_store.store_bytes(tensors.pack_state(parent_state)),
            first_round=task.round,
            actions=task.actions,
            is_evaluation_round=bool(task.params.get("settling")),
            deadline_s=max(DEVICE_TIME_SHARE * task.deadline_s, 1.0),
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

    def _has_parent_state(self, ref: BlobRef, parent_state: sites.SiteJobState) -> bool:
        stored_state = self._read_state(ref)
        return stored_state is not None and np.array_equal(stored_state.parent_state, parent_state.parent_state)

    def _read_state(self, ref: BlobRef) -> sites.SiteJobState | None:
        # a large sum stays on disk. None if the blob is missing or damaged
        path, disk = self._store.blob_store.verified_path(ref.sha256), self._store.blob_store.disk
        return None if path is None else disk_arrays.read_state(path, sites.SiteJobState, disk, job_blobs.WHOLE_BYTES)

    def _make_site_job(self, table: Mapping[str, Any]) -> JobSettings:
        parent_job = settings.parse_job(table)
        device_limits = {
            name: getattr(parent_job.cohort, name) for name in ("min_battery", "max_temperature_c", "max_examples")
        }
        return msgspec.structs.replace(
            parent_job,
            rounds=MAX_ROUNDS,
            cohort=settings.CohortSettings(
                quorum=self._quorum, attempts=1, select=parent_job.cohort.select, **device_limits
            ),
            check=settings.EvaluationSettings(),
            stop=settings.JobLimits(),
            trigger=None,
            model={},
            input={},
            donors=(),
        )

    def _write_bundles_and_make_outcome(self, id: str, event: events.RoundCommitted) -> WorkResult:
        request, state, job_log = self._request, self._read_state(event.state), self._read_log(id)
        assert request is not None
        if state is None:
            return WorkResult(code="failed", reason="state of the site's round is missing or damaged on its disk")
        usages = [update.usage for update in job_log.updates.values()]
        joules = [usage.energy_j for usage in usages if usage.energy_j is not None]
        self._device.energy_j = math.fsum(joules) if len(joules) == len(usages) else None
        refs = {}
        if "work" in request.task.actions:
            out = Path(request.output_folder)
            out.mkdir(parents=True, exist_ok=True)
            for name, bundle in self._yield_update_bundles(state, sorted(job_log.updates)):
                refs[name] = ref = protocol.write_tensors(out / f"{request.file_prefix}bundle", bundle)
                os.replace(out / f"{request.file_prefix}bundle", out / f"{request.file_prefix}{ref.sha256}")
        return WorkResult(
            weight=math.fsum(update.weight for update in job_log.updates.values()),
            metrics=event.metrics,
            evaluation=event.evaluation,
            bundles=refs,
            examples=sum(usage.examples or 0 for usage in usages),
            cpu_s=math.fsum(usage.cpu_s for usage in usages),
            note=_describe_missing_devices(job_log.updates, job_log.refusals),
            site_usage=Usage(
                down_bytes=sum(usage.down_bytes for usage in usages), up_bytes=sum(usage.up_bytes for usage in usages)
            ),
        )

    def _yield_update_bundles(self, state: sites.SiteJobState, devices: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        # the partial sum of the devices, or their updates
        if state.form:
            yield sites.AGGREGATE_BUNDLE, sites.bundle_from_aggregate(state.total, state.form, devices)
            return
        yield from sites.bundle_updates(
            [
                DeviceUpdate(update.device, update.round, update.weight, update.metrics, update.bundles)
                for update in state.sent
            ]
        )


def _get_round_identity(request: WorkRequest) -> tuple[str, int, str, tuple[str, ...]]:
    # two requests with the same identity are served by one round
    task = request.task
    return task.job, task.round, task.state, task.actions


def _write_bundle_if_changed(folder: Path, request: WorkRequest) -> None:
    files = {name.removeprefix(sites.FILE): name for name in request.bundles if name.startswith(sites.FILE)}
    with contextlib.suppress(JobError):  # the file is missing or incomplete
        stored_files = job_bundle.load_bundle(folder).files
        if all(stored_files.get(name) == request.task.bundles[contents] for name, contents in files.items()):
            return
    contents = {name: Path(request.bundles[bundle]).read_bytes() for name, bundle in files.items()}
    job_bundle.write_bundle(folder, {"network": {}}, contents)


def _describe_missing_devices(updates: Mapping[str, Update], refusals: Mapping[str, str]) -> str:
    refused = {device: reason for device, reason in refusals.items() if device not in updates}
    return f"without an update at the site: {selection.format_by_reason(refused)}"[:1000] if refused else ""


CAPABILITIES_POLL_S: Final = 5.0
BUSY_POLL_S: Final = 0.02  # while a transfer to or from the parent is pending
IDLE_POLL_S: Final = 0.25


class SiteAgent:
    finished = False
    server: Server

    def __init__(
        self, link: Link, options: AgentSettings, store: Store, boot_id: str | None = None, *, durable: bool = True
    ) -> None:
        device, self.link = SiteDevice(), link
        self._worker = SiteWorker(store, device)
        self.agent = Agent(link, options, device, self._worker, boot_id, durable=durable, clock=lambda: None)
        self._lock = self.agent.storage.lock_home()
        self._capabilities_s, self._has_devices = -math.inf, False  # a site without devices does not register

    def attach_server(self, server: Server) -> None:
        self.server = self._worker.server = server

    def observe(self, job: JobView, event: AnyEvent) -> None:
        self._worker.observe(job, event)

    def step(self, now_s: float) -> float:
        """Handle messages of the parent coordinator, and publish changed capabilities.

        Nothing is published before the site has a device.
        """
        if now_s >= self._capabilities_s + (CAPABILITIES_POLL_S if self._has_devices else IDLE_POLL_S):
            self._capabilities_s = now_s
            capabilities = self._worker.read_capabilities(self.agent.task_runner.state.capabilities, now_s)
            self._has_devices = self._has_devices or bool(capabilities.engines)
            if capabilities != self.agent.task_runner.state.capabilities:
                self.agent.apply_capabilities(capabilities)
        if not self._has_devices:
            return now_s + IDLE_POLL_S
        return min(self.agent.step(now_s), self._capabilities_s + CAPABILITIES_POLL_S)

    def make_endpoint(self, server: Server) -> Endpoint:
        self.attach_server(server)
        return _SiteEndpoint(server, self)

    def fds(self) -> Sequence[int]:
        return self.agent.fds()

    @property
    def has_pending_transfer(self) -> bool:
        state = self.agent.task_runner.state
        return bool(state.outbox) or (state.open_task is not None and not state.open_task.is_running)

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
        return min(
            server_s, self._site.step(now_s), now_s + (BUSY_POLL_S if self._site.has_pending_transfer else IDLE_POLL_S)
        )

    def fds(self) -> Sequence[int]:
        return [*self._server.fds(), *self._site.fds()]


def connect_site_agent(settings_path: Path, store: Store) -> SiteAgent:
    """Return the agent of a site, with a link to the parent's broker. Lock the agent's home."""
    options = load_settings(settings_path)
    broker, boot_id = Broker.from_url(**msgspec.structs.asdict(options.broker)), os.urandom(8).hex()
    link, _ = open_device_link(options, broker, boot_id)
    return SiteAgent(link, options, store, boot_id)
