"""Coordinator in a terminal. Events of its jobs are printed, or logged."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from fedquilt import metrics_endpoint
from fedquilt.console import progress, table
from fedquilt.coordinator.background_worker import ThreadWorker
from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker, MonitoringExecutor
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.metrics_exporter import CoordinatorMetrics
from fedquilt.coordinator.rounds import events, selection
from fedquilt.coordinator.rounds import rollout as rounds_rollout
from fedquilt.coordinator.rounds.job_state import EndedJob, JobConstants, JobState, JobView, apply_event
from fedquilt.coordinator.rounds.rollout import Rollout
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.rows import find_database_inode
from fedquilt.coordinator.storage.store import (
    MAX_COORDINATOR_GAP_S,
    InactiveRunError,
    Store,
    StoredJob,
)
from fedquilt.coordinator.updates import sites
from fedquilt.coordinator.views import event_messages, round_outcomes, run_summary, wait_reasons
from fedquilt.coordinator.views import rollouts as rollout_view
from fedquilt.coordinator.views.run_summary import RoundSummary, RunSummary, is_of_final_evaluation
from fedquilt.core import JobError, StoreError
from fedquilt.host import http_server, process_resources
from fedquilt.host.logs import log_ids
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport import link as links
from fedquilt.transport.link import Link

WAIT_REPORT_S = 5.0  # delay before the report of a wait, and between reports of changing waits
WORK_REPORT_S = 30.0  # the same while devices are at work
WAIT_CHECK_S = 1.0
UNCHANGED_WAIT_REPORT_S = 600.0  # between reports of an unchanged wait

WITHIN_ROUND_EVENTS: Final = (
    events.EligibilityRecorded,
    events.CohortSelected,
    events.UpdateAccepted,
    events.TaskDeclined,
    events.UpdateRejected,
    events.RoundClosed,
)
"""Events within a round, shown only in the status line."""

PROGRESS_INTERVAL_S: Final = 30.0  # longest interval of progress lines within a round
ELAPSED_FORMAT: Final = "[{:6.1f} s] "
VIRTUAL_FORMAT: Final = "[{:6.1f} s virtual] "
START_AGENT_HINT = "start more: `fedquilt agent agent.toml` on a board"
BROKER_WAIT = wait_reasons.WaitReason("its broker, which is unreachable", "broker", "lost")
BROKER_HINT = "find the reason with `fedquilt doctor --home HOME --broker URL`"


class WaitReporter:
    def __init__(self) -> None:
        self._start_s: float | None = None  # start of the present wait
        self._reported_key: object = None
        self._reported_s = -math.inf

    def line_due(self, wait: wait_reasons.WaitReason | None, now_s: float) -> str | None:
        """Return the line on a wait if one is due now, or None. Without a wait, the schedule is reset."""
        if wait is None:
            self._start_s = self._reported_key = None
            return None
        self._start_s = now_s if self._start_s is None else self._start_s
        first_report_s = WORK_REPORT_S if wait.kind == "working" else WAIT_REPORT_S
        due_s = self._reported_s + (UNCHANGED_WAIT_REPORT_S if wait.key == self._reported_key else first_report_s)
        if now_s < max(due_s, self._start_s + first_report_s):
            return None
        self._reported_key, self._reported_s = wait.key, now_s
        return f"waiting for {wait.text}"


class ConnectionReporter:
    def __init__(self) -> None:
        self._connected: bool | None = None  # None before the first test
        self._session = 0

    @property
    def is_disconnected(self) -> bool:
        return self._connected is False

    def line_due(self, connected: bool, session: int) -> str | None:
        was_connected, self._connected = self._connected, connected
        previous_session, self._session = self._session, session
        if connected and (was_connected is False or previous_session not in (0, session)):
            return "reconnected to the broker" if previous_session else "connected to the broker"
        if was_connected and not connected:
            return "lost the connection to the broker: trying to reconnect"
        return None


@dataclass
class _WatchedRun:
    job: JobView
    summary: RunSummary
    waiting: WaitReporter = field(default_factory=WaitReporter)
    wait: wait_reasons.WaitReason | None = None
    committed: RoundSummary | None = None  # latest committed round whose line is not printed yet
    score: str = ""  # latest score
    warnings: set[str] = field(default_factory=set)  # printed warnings


class Console:
    """Console output of runs: a line for each round and, on a terminal, a block on the running round.

    The line of an evaluated round is printed after the next round, which contains the evaluation.
    """

    def __init__(
        self,
        verbose: bool = False,
        run_names: bool = False,
        clock: Callable[[], float] = time.monotonic,
        stamp: Callable[[float], str] | None = None,
        start_hint: str = START_AGENT_HINT,
        live: bool | None = None,
    ) -> None:
        self._block = progress.ProgressLine(sys.stdout, live=live, max_interval_s=PROGRESS_INTERVAL_S)
        self._shows_run_names = run_names
        self._is_verbose = verbose
        start_s = clock()
        self._clock, self._stamp = clock, stamp or (lambda now_s: ELAPSED_FORMAT.format(now_s - start_s))
        self._connection_reporter, self._start_hint = ConnectionReporter(), start_hint
        self._last_wait_check_s = -math.inf
        self._runs: dict[str, _WatchedRun] = {}
        self._shown_run: str | None = None  # run whose block is displayed
        self._declines = defaultdict[tuple[str, int], dict[str, str]](dict)  # (run, round) -> device -> reason

    def observe(self, job: JobView, event: events.AnyEvent) -> None:
        """Print an event. Unless verbose, declines are collected, and events within a round are not printed."""
        run = self._watch_run(job)
        previous_summary, run.summary = run.summary, run.summary.with_event(event, state=job.job_state)
        self._shown_run, run.wait = job.id, None
        if isinstance(event, events.JobEnded) and event.code:  # the text of the end contains the cause
            self._declines.pop((job.id, job.job_state.round), None)
        if not isinstance(event, WITHIN_ROUND_EVENTS):
            self._print_declines()
        if self._is_verbose or not isinstance(
            event, (events.RoundCommitted, events.UpdatesAggregated, *WITHIN_ROUND_EVENTS)
        ):
            if isinstance(event, events.JobEnded):
                self._print_pending_round(run, "")
            self._report_for(job.id, *event_messages.format_event(previous_summary, event, run.summary))
        elif isinstance(event, events.TaskDeclined | events.UpdateRejected):
            description = f"declined ({event.code})" if isinstance(event, events.TaskDeclined) else "update refused"
            self._declines[job.id, event.round][event.device] = f"{description}: {event.reason}"
        elif isinstance(event, events.RoundCommitted) and not event.is_evaluation_round:
            self._print_pending_round(run, event_messages.format_score(run.summary.running.scores))
            if not job.job_state.is_final_evaluation_done:
                # the summary lacks events of earlier processes
                run.committed = msgspec.structs.replace(
                    run.summary.running,
                    rounds_before=job.job_state.completed_rounds - 1,
                    cost=run_summary.sum_costs(previous_summary.state.accepted_updates.values()),
                )
            if not event_messages.is_evaluation_due(job.job_state):
                self._print_pending_round(run, "")
        if isinstance(event, events.RoundCommitted) and not self._is_verbose:
            for warning in event.warnings:
                if warning not in run.warnings:
                    self._report_for(job.id, warning)
            run.warnings.update(event.warnings)
        if isinstance(event, events.JobEnded):
            del self._runs[job.id]
            self.close()
        self.refresh()

    def observe_rollout(self, rollout: Rollout, event: rounds_rollout.AnyRolloutEvent) -> None:
        is_routine = isinstance(event, rounds_rollout.StatusReported) and event.phase not in rounds_rollout.FAILED
        if self._is_verbose or not is_routine:
            self.report(f"{rollout.id}: {rollout_view.format_event(rollout, event)}")

    def _watch_run(self, job: JobView) -> _WatchedRun:
        if job.id not in self._runs:
            self._runs[job.id] = _WatchedRun(job, RunSummary(JobState(job.job_state.constants)))
        self._runs[job.id].job = job
        return self._runs[job.id]

    def _print_pending_round(self, run: _WatchedRun, score: str) -> None:
        job, committed = run.job, run.committed
        run.score, run.committed = score or run.score, None
        if committed is not None:
            width = table.MIN_COLUMNS - len(self._format_head(job.id))
            self._report_for(
                job.id, event_messages.format_round(committed, job.job_state.constants.rounds, score, width)
            )

    def _print_declines(self) -> None:
        for (run, round), reasons in self._declines.items():
            self._report_for(run, f"round {round + 1}: {selection.format_by_reason(reasons)}")
        self._declines.clear()

    def _report_for(self, run: str, first_line: str, *other_lines: str) -> None:
        self.report(f"{run}: {first_line}" if self._shows_run_names else first_line, *other_lines)

    def report(self, first_line: str, *other_lines: str) -> None:
        head = self._format_time()
        lines = (f"{head}{first_line}", *(f"{'':{len(head)}}{line}" for line in other_lines))
        self._block.print_lines(*(part for line in lines for part in table.fold_line(line, len(head))))

    def report_connection(self, link: Link) -> None:
        if (line := self._connection_reporter.line_due(link.connected, link.session)) is not None:
            self.report(line)

    def report_waits(
        self, server: Server, status_of: Callable[[str], DeviceStatus | None] = lambda device: None
    ) -> None:
        """Print what active jobs wait for, at most once per WAIT_CHECK_S, and refresh the status block."""
        now_s, now = self._clock(), time.time()
        if now_s < self._last_wait_check_s + WAIT_CHECK_S:
            return self.refresh()
        self._last_wait_check_s = now_s
        for job in server.active_jobs():
            usable_devices = server.registry.usable_engines(job.engines, now_s)
            state, deadline = server.wall_clock_state(job.id, now_s, now)
            busy_devices = server.devices_of_other_jobs(job.id)
            wait = wait_reasons.find_wait(
                state, job.engines, usable_devices.keys(), busy_devices, status_of, now, deadline
            )
            # the online devices are unknown
            if is_disconnected := wait is not None and self._connection_reporter.is_disconnected:
                wait = BROKER_WAIT

            def find_fix(
                job: RunningJob = job, usable: Collection[str] = usable_devices.keys(), offline: bool = is_disconnected
            ) -> str | None:
                if offline:
                    return BROKER_HINT
                return wait_reasons.describe_busy_devices(job.job_state, usable, server.jobs_by_leased_device(job.id))

            self.report_wait(job, wait, now_s, find_fix)
        self._runs = {id: run for id, run in self._runs.items() if run.job.job_state.phase not in events.ENDED_PHASES}
        active = [job.id for job in server.active_jobs()]
        if self._shown_run not in active:
            self._shown_run = next(iter(active), None)
            self._block.clear()
        self.refresh()

    def report_wait(
        self,
        job: JobView,
        wait: wait_reasons.WaitReason | None,
        now_s: float,
        find_fix: Callable[[], str | None] = lambda: None,
    ) -> None:
        run = self._watch_run(job)
        run.wait, line = wait, run.waiting.line_due(wait, now_s)
        if self._shown_run not in self._runs:
            self._shown_run = job.id
        if wait is not None and line is not None and not (wait.kind == "working" and self._block.is_live):
            fix = find_fix() or (self._start_hint if wait.kind == "boards" else None)
            self._report_for(job.id, line, *([fix] if fix else []))

    def refresh(self) -> None:
        if self._shown_run in self._runs and self._block.is_live:
            run = self._runs[self._shown_run]
            state = run.job.job_state
            cohort = len(state.pending_devices) + len(state.accepted_updates)
            done = min(
                state.completed_rounds + (len(state.accepted_updates) / cohort if cohort else 0.0),
                state.constants.rounds,
            )
            self._block.show_status(lambda: self._format_block(run), done, state.constants.rounds)

    def show_status(self, line: Callable[[], str]) -> None:
        if self._block.is_live:
            self._block.show_status(lambda: f"{self._format_time()}{line()}")

    def report_progress(self, line: str, done: float, total: float) -> None:
        """Print progress within a round, unless a terminal shows the block."""
        if not self._block.is_live:
            self._block.show_status(lambda: f"{self._format_time()}{line}", done, total)

    def close(self) -> None:
        self._block.end_operation()

    def _format_block(self, run: _WatchedRun) -> str:
        lines = event_messages.format_status(run.summary, run.job.job_state)
        lines[0] = self._format_head(run.job.id) + lines[0]
        lines[1] = ", ".join(part for part in (run.score, lines[1]) if part)
        return "\n".join([*lines, *([f"waiting for {run.wait.text}"] if run.wait is not None else [])])

    def _format_head(self, run: str) -> str:
        return f"{self._format_time()}{run}: " if self._shows_run_names else self._format_time()

    def _format_time(self) -> str:
        return self._stamp(self._clock())


class ParentCoordinator(Protocol):
    def observe(self, job: JobView, event: events.AnyEvent) -> None: ...

    def make_endpoint(self, server: Server) -> links.Endpoint: ...

    def announce_end(self) -> None: ...


def run_coordinator(
    store: Store,
    link: Link,
    fleet: str,
    console: Console,
    only: str | None = None,
    watch: Callable[[], None] = lambda: None,
    identity: LinkIdentity | None = None,
    metrics: str | None = None,
    limits: CoordinatorLimits = CoordinatorLimits(),
    location_settings: BlobLocationSettings = BlobLocationSettings(),
    site: ParentCoordinator | None = None,
) -> None:
    """Run a coordinator until the job `only` has ended, or until a stop signal arrives.

    `watch` is called in each iteration of the loop. Its exceptions end the coordinator after a clean shutdown.
    """
    if limits.sites and identity is not None:
        raise JobError(
            "limits.toml [sites] has no effect with certificates, which grant site rights (`fedquilt identity issue "
            "NAME --role site`): remove the table"
        )
    if limits.sites and site is not None:
        raise JobError("limits.toml [sites] is set on a site, which cannot have sites of its own: remove the table")
    process_resources.keep_freed_memory()
    http_server.raise_descriptor_limit()
    tracker = DeviceStatusTracker(store.home)
    executor = MonitoringExecutor(
        link,
        fleet,
        store.blob_store,
        store.begin_epoch(),
        tracker,
        identity,
        dataclasses.replace(location_settings, limits=limits.http),
    )
    store.record_authentication(identity is not None)
    exporter = CoordinatorMetrics(tracker.statuses_with_readings)

    def observe(job: JobView, event: events.AnyEvent) -> None:
        console.observe(job, event)
        if isinstance(event, events.RoundClosed) and not event.round:
            warning = round_outcomes.warn_of_weights(store, job.job, (each for _, _, each in store.read_events(job.id)))
            if warning is not None:
                console.report(f"{job.id}: {warning}")
        exporter.record_event(job, event)
        if site is not None:
            site.observe(job, event)

    adapt_method = sites.adapt_for_sites if site is None else sites.adapt_for_parent
    server = Server(
        executor,
        store,
        observe,
        only,
        limits=limits,
        observe_rollout=console.observe_rollout,
        worker=ThreadWorker(),
        adapt_method=adapt_method,
        uses_wall_clock=True,
    )
    endpoint = server if site is None else site.make_endpoint(server)
    with metrics_endpoint.serve_metrics(metrics, exporter.metric_families) as address, catch_stop_signals() as stop:
        if address:
            console.report(f"metrics at {address}")
        if executor.blob_locations.server_address:
            console.report(f"blobs at {executor.blob_locations.server_address}")

        def should_stop() -> bool:
            watch()
            console.report_connection(link)
            console.report_waits(server, tracker.find_status)
            return stop()

        try:
            links.run_endpoint(endpoint, link, should_stop)
        finally:
            console.close()
            if site is not None:
                site.announce_end()
            server.shut_down()


def format_date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S  ", time.localtime(at_s))


def print_log(store: Store, id: str, *, follow: bool = False, json: bool = False, verbose: bool = False) -> None:
    """Print a run's events with dates, or as JSON. With `follow`, continue until the run has ended.

    Of a followed run only rounds are printed, unless `verbose`.
    """
    # time at which a coordinator was last running
    row, last_served_s, is_disconnected = (store.find_job(id), -math.inf, False)
    last_number, inode = 0, find_database_inode(store.home / "fedquilt.db")
    state = JobState(JobConstants.from_job(row.job))
    time_s = row.created
    summary = RunSummary.from_job(row.job)
    console = Console(
        verbose or not follow,
        clock=lambda: time_s,
        stamp=(lambda now_s: ELAPSED_FORMAT.format(now_s - row.created)) if follow else format_date,
        live=None if follow else False,
    )
    with contextlib.closing(console):
        while True:
            if follow and find_database_inode(store.home / "fedquilt.db") != inode:
                raise StoreError(
                    f"{store.home} was replaced, as by a restored backup: repeat the command to follow a run"
                )
            status = store.stored_status(id)  # read before the events, so that the last event is printed
            has_ended = status in events.ENDED_PHASES
            if not status:
                raise JobError(f"{id} was deleted while its log was read")
            for number, time_s, event in store.read_events(id, after=last_number):
                last_number, state = number, apply_event(state, event, time_s)
                summary = summary.with_event(event, time_s, state)
                if json:
                    print(msgspec.json.encode({"at": time_s, "fact": event}).decode())
                else:
                    console.observe(EndedJob(id, row.job, state), event)
            sys.stdout.flush()
            is_served, now_s = store.is_served(), time.monotonic()
            last_served_s = now_s if is_served else last_served_s
            is_coordinator_gone = not is_served and now_s >= last_served_s + MAX_COORDINATOR_GAP_S
            if not (is_served or is_coordinator_gone or is_disconnected or has_ended) and follow:
                progress.LINE.print_lines(
                    f"no coordinator is running for {store.home}: waiting {MAX_COORDINATOR_GAP_S:g} s for one"
                )
            is_disconnected = not is_served
            if has_ended or not follow or is_coordinator_gone:
                console.close()
            if not has_ended and follow and is_coordinator_gone:
                raise InactiveRunError(f"no coordinator is running for {store.home}: {store.describe_resume(row)}")
            if has_ended or not follow:
                for lines in [] if json else event_messages.format_energy_summary(summary):
                    print("\n".join(table.fold_line(lines)))
                return
            if not json:
                time_s = time.time()
                _report_stored_wait(console, store, EndedJob(id, row.job, state), row, now_s)
                console.refresh()
            time.sleep(0.5)


def _report_stored_wait(console: Console, store: Store, job: JobView, row: StoredJob, now_s: float) -> None:
    state, suspension = job.job_state, store.suspensions.current_suspension(row.id)
    if suspension:
        return console.report_wait(job, wait_reasons.WaitReason(str(suspension), suspension, "lost"), now_s)

    def find_fix() -> str | None:
        able = wait_reasons.eligible_online_devices(state)
        return wait_reasons.describe_busy_devices(state, able, wait_reasons.other_runs_by_device(store, row.id))

    busy_devices = {device for device, code in state.ineligibility_reasons.items() if code == selection.BUSY}
    wait = wait_reasons.find_round_wait(row, state, wait_reasons.load_device_statuses(store.home), busy_devices)
    console.report_wait(job, wait, now_s, find_fix)


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT, SIGTERM and SIGHUP. Yield a function that returns whether one has arrived."""
    # not a `threading.Event`: a second signal within the handler would wait for its lock forever
    is_stop_requested = False

    def request_stop(signum: int, frame: object) -> None:
        nonlocal is_stop_requested
        if is_stop_requested:
            raise KeyboardInterrupt
        is_stop_requested = True

    previous_handlers = {
        number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield lambda: is_stop_requested
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


log = logging.getLogger("fedquilt.rounds")


class JsonConsole(Console):
    def __init__(self) -> None:
        super().__init__(verbose=True, run_names=True, live=False)
        log.setLevel(min(logging.INFO, logging.getLogger().level))

    def observe(self, job: JobView, event: events.AnyEvent) -> None:
        update = getattr(event, "update", None)
        device = getattr(event, "device", None) or getattr(update, "device", None)
        ids = log_ids(run=job.id, round=getattr(event, "round", None), device=device, fact=type(event).__name__)
        level = logging.ERROR if getattr(event, "status", "") == "failed" else logging.INFO
        is_final = is_of_final_evaluation(job.job_state, event)
        log.log(level, "%s", "; ".join(event_messages.format_single_event(event, is_final)), extra=ids)

    def report(self, first: str, *more: str) -> None:
        log.info("%s", "; ".join((first, *more)))
