"""Coordinator in a terminal, with the events of its jobs as output."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from fedquilt import open_metrics
from fedquilt.console import progress, table
from fedquilt.coordinator import sites
from fedquilt.coordinator.background_worker import ThreadWorker
from fedquilt.coordinator.delivery.blobs.locations import BlobLocationSettings
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker, MonitoringExecutor
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.job_view import JobView
from fedquilt.coordinator.limits import CoordinatorLimits
from fedquilt.coordinator.metrics_exporter import CoordinatorMetrics
from fedquilt.coordinator.rounds import rollout as rounds_rollout
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    RoundClosed,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.rollout import Rollout
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import event_messages, round_outcomes, wait_reasons
from fedquilt.coordinator.views import rollouts as rollout_view
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.core import JobError
from fedquilt.host import connection_limits, process_memory
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport import link as links
from fedquilt.transport.link import Link

WAIT_SAID_S = 5.0  # until a wait is reported, and between reports of waits that change
WORK_SAID_S = 30.0  # likewise for devices that are at work
WAIT_LOOK_S = 1.0
WAIT_AGAIN_S = 600.0  # between reports of an unchanged wait

SINGLY = 3  # declines of a round for one reason that are printed one by one; further ones are counted

MORE = "start more: `fedquilt agent agent.toml` on a board"
AWAY_S = 20.0  # longest time without a coordinator while a run is followed; systemd starts ours again after 10
AWAY = wait_reasons.WaitReason("its broker, which cannot be reached", "broker", "lost")
BROKER = "`fedquilt doctor --home HOME --broker URL` says why"


class WaitReporter:
    """Schedule of messages on a wait: soon after a change, then rarely."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # start of the present wait
        self._said: object = None
        self._said_s = -math.inf

    def line_due(self, wait: wait_reasons.WaitReason | None, now_s: float) -> str | None:
        if wait is None:
            self._since_s = self._said = None
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        soon_s = WORK_SAID_S if wait.kind == "working" else WAIT_SAID_S
        due_s = self._said_s + (WAIT_AGAIN_S if wait.key == self._said else soon_s)
        if now_s < max(due_s, self._since_s + soon_s):
            return None
        self._said, self._said_s = wait.key, now_s
        return f"waiting for {wait.text}"


class InactiveRunError(JobError):
    exit_code = 130


class ConnectionReporter:
    def __init__(self) -> None:
        self._connected: bool | None = None  # None before the first test
        self._session = 0

    @property
    def is_disconnected(self) -> bool:
        return self._connected is False

    def line_due(self, connected: bool, session: int) -> str | None:
        """Return the line to print now, or None without a change.

        A link that is connected at the first call is not reported.

        Args:
            connected: Whether the link is connected.
            session: The number of sessions so far, which reveals interruptions too short to be observed.
        """
        before, self._connected = self._connected, connected
        former, self._session = self._session, session
        if connected and (before is False or former not in (0, session)):
            return "reconnected to the broker" if former else "connected to the broker"
        if before and not connected:
            return "lost the connection to the broker; trying to connect until it is back"
        return None


class Console:
    """Console output of events. On a terminal, the running round is one line, rewritten in place.

    Args:
        wordy: Whether to print every event instead of one line per round.
        named: Whether to print the run of each event, as there may be several runs.
        clock: The clock for the printed times, in seconds.
        mend: The advice on how to start devices that a round waits for.
        real_clock: The clock for the frequency of status lines, in seconds.
    """

    def __init__(
        self,
        wordy: bool = False,
        named: bool = False,
        clock: Callable[[], float] = time.monotonic,
        mend: str = MORE,
        real_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print to standard output.

        Args:
            wordy: Whether to print every event, instead of a line for each round.
            named: Whether to print the run of each event, for several runs.
            clock: The clock in seconds for printed times.
            mend: The hint on how to start missing devices.
            real_clock: The clock in seconds for the interval of progress lines.
        """
        self._line, self._named, self._wordy = progress.ProgressLine(sys.stdout, clock=real_clock), named, wordy
        self._clock, self._began_s = clock, clock()
        self._contact, self._mend = ConnectionReporter(), mend
        self._waiting: dict[str, WaitReporter] = {}  # by run
        self._wait_s = -math.inf  # when it was last looked at
        self._summaries: dict[str, RunSummary] = {}  # by run, since its first event of this process
        self._declines = defaultdict[tuple[str, int, str], list[str]](list)  # (run, round, code) -> unprinted lines

    def observe(self, job: JobView, fact: AnyEvent) -> None:
        before = self._summaries.get(job.id) or RunSummary.from_job(job.job)
        self._summaries[job.id] = after = before.after(fact, state=job.rounds)
        first, *more = event_messages.format_event(before, fact, after)
        if isinstance(fact, JobEnded):
            del self._summaries[job.id]
        if isinstance(fact, TaskDeclined | UpdateRejected) and not self._wordy:
            said = f"{job.id}: {first}" if self._named else first
            self._declines[job.id, fact.round, fact.code].append(said)
        elif isinstance(fact, JobEnded) and fact.code:
            for key in [key for key in self._declines if key[0] == job.id]:
                del self._declines[key]  # the end names the cause
        elif not isinstance(fact, EligibilityRecorded | CohortSelected | UpdateAccepted):
            self._print_declines()
        if (
            isinstance(
                fact,
                EligibilityRecorded | CohortSelected | UpdateAccepted | TaskDeclined | UpdateRejected | RoundClosed,
            )
            and not self._wordy
        ):
            self._show_job_status(job)
        else:
            self.report(f"{job.id}: {first}" if self._named else first, *more)

    def observe_rollout(self, rollout: Rollout, fact: rounds_rollout.AnyRolloutEvent) -> None:
        """Print an event of a rollout, but a device's report only if it failed or all events are printed."""
        if self._wordy or not isinstance(fact, rounds_rollout.StatusReported) or fact.phase in rounds_rollout.FAILED:
            self.report(f"{rollout.id}: {rollout_view.format_event(rollout, fact)}")

    def _print_declines(self) -> None:
        for (run, round, code), lines in self._declines.items():
            for line in lines[:SINGLY]:
                self.report(line)
            if len(lines) > SINGLY:
                more = (
                    f"round {round}: {len(lines) - SINGLY} more declined ({code}): `fedquilt logs {run}` has them all"
                )
                self.report(f"{run}: {more}" if self._named else more)
        self._declines.clear()

    def report(self, first: str, *more: str) -> None:
        told = (f"{self._format_elapsed()} {first}", *(f"{'':11}{line}" for line in more))
        self._line.print_lines(*(part for line in told for part in table.fold_line(line, 11)))

    def report_connection(self, link: Link) -> None:
        if (line := self._contact.line_due(link.connected, link.session)) is not None:
            self.report(line)

    def report_waits(self, server: Server, board: Callable[[str], DeviceStatus | None] = lambda device: None) -> None:
        now_s, now = self._clock(), time.time()
        if now_s < self._wait_s + WAIT_LOOK_S:
            return
        self._wait_s = now_s
        jobs = server.active_jobs()
        self._waiting = {job.id: self._waiting.get(job.id, WaitReporter()) for job in jobs}
        for job in jobs:
            able = server.registry.usable_engines(job.engines, now_s)
            state, until = server.wall_clock_state(job.id, now_s, now)
            wait = wait_reasons.find_wait(
                state, job.engines, able.keys(), server.devices_of_other_jobs(job.id), board, now, until
            )
            if away := wait is not None and self._contact.is_disconnected:  # who is online is not known then
                wait = AWAY
            line = self._waiting[job.id].line_due(wait, now_s)
            if line is not None and wait is not None:
                taken = (
                    None
                    if away
                    else wait_reasons.describe_busy_devices(
                        job.rounds, able.keys(), server.jobs_by_leased_device(job.id)
                    )
                )
                mend = BROKER if away else taken or (self._mend if wait.kind == "boards" else None)
                self.report(f"{job.id}: {line}" if self._named else line, *([mend] if mend else []))

    def _show_job_status(self, job: JobView) -> None:
        self.show_status(lambda: f"{job.id}: {event_messages.format_status(job.rounds)}")

    def show_status(self, line: Callable[[], str]) -> None:
        """Show a status line on a terminal, if one is due. The next line replaces it."""
        self._line.show_status(lambda: f"{self._format_elapsed()} {line()}")

    def _format_elapsed(self) -> str:
        return f"[{self._clock() - self._began_s:6.1f} s]"


class ParentCoordinator(Protocol):
    """Connection of a site's coordinator to its parent."""

    def observe(self, job: JobView, fact: AnyEvent) -> None: ...

    def make_endpoint(self, server: Server) -> links.Endpoint:
        """Return an endpoint that runs the site's coordinator and the connection to the parent."""
        ...

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
    where: BlobLocationSettings = BlobLocationSettings(),
    site: ParentCoordinator | None = None,
) -> None:
    """Run a coordinator until the job `only` has ended, or until a stop signal arrives.

    Args:
        store: The home of the coordinator.
        link: The connection to the broker.
        fleet: The name of the fleet.
        console: The output.
        only: The id of the single job to run, or None for all jobs.
        watch: The function called once per turn. An exception in it ends the coordinator in an orderly way.
        identity: The certificates of a signed fleet, or None. With an identity, only authenticated messages are
            accepted.
        metrics: The address of the metrics exporter, HOST:PORT, or None.
        limits: The limits of the coordinator.
        where: The locations of blobs besides the broker.
        site: The connection to the parent, if the coordinator is a site, or None.

    Raises:
        JobError: If devices would not accept the identity, metrics or blobs cannot be served, or [sites] of limits.toml
            is not permitted here.
    """
    if limits.sites and identity is not None:
        raise JobError(
            "limits.toml [sites]: in a fleet with certificates these grant the rights of sites (`fedquilt identity "
            "issue NAME --role site`): remove the table"
        )
    if limits.sites and site is not None:
        raise JobError("limits.toml [sites]: a site has no sites of its own: remove the table")
    process_memory.keep_freed_memory()
    connection_limits.raise_descriptor_limit()
    noted = DeviceStatusTracker(store.home)
    executor = MonitoringExecutor(
        link, fleet, store.depot, store.begin_epoch(), noted, identity, dataclasses.replace(where, limits=limits.http)
    )
    store.record_authentication(identity is not None)
    counts = CoordinatorMetrics(noted.statuses_with_readings)

    def observe(job: JobView, fact: AnyEvent) -> None:
        console.observe(job, fact)
        if isinstance(fact, RoundClosed) and not fact.round:
            warning = round_outcomes.warn_of_weights(store, job.job, (each for _, _, each in store.read_events(job.id)))
            if warning is not None:
                console.report(f"{job.id}: {warning}")
        counts.record_event(job, fact)
        if site is not None:
            site.observe(job, fact)

    around = sites.adapt_for_sites if site is None else sites.adapt_for_parent
    server = Server(
        executor,
        store,
        observe,
        only,
        limits=limits,
        tell=console.observe_rollout,
        worker=ThreadWorker(),
        around=around,
        by_wall=True,
    )
    endpoint = server if site is None else site.make_endpoint(server)
    with open_metrics.serve_metrics(metrics, counts.metric_families) as place, catch_stop_signals() as stop:
        if place:
            console.report(f"metrics at {place}")
        if executor.places.server_address:
            console.report(f"blobs at {executor.places.server_address}")

        def should_stop() -> bool:
            watch()
            console.report_connection(link)
            console.report_waits(server, noted.find_status)
            return stop()

        try:
            links.run_endpoint(endpoint, link, should_stop)
        finally:
            if site is not None:
                site.announce_end()
            server.shut_down()


def print_log(store: Store, id: str, *, follow: bool = False, json: bool = False) -> None:
    """Print a run's events with their wall-clock times. With `follow`, print until the run has ended.

    Args:
        store: The home of the run.
        id: The id of the run.
        follow: Whether to wait for later events.
        json: Whether to print each event as a line of JSON.

    Raises:
        JobError: If the run is deleted meanwhile.
        InactiveRunError: If `follow` is set and no coordinator has run for AWAY_S.
    """
    row, served_s, away = store.find_job(id), -math.inf, False  # when a coordinator was last seen to serve it
    seen, summary, waiting = 0, RunSummary.from_job(row.job), WaitReporter()
    while True:
        status = store.stored_status(id)  # read first, so that no last fact is missed
        ended = status in ("done", "failed", "stopped")
        if not status:
            raise JobError(f"{id} has been deleted meanwhile")
        for number, at_s, fact in store.read_events(id, after=seen):
            seen, before, summary = number, summary, summary.after(fact, at_s)
            if json:
                print(msgspec.json.encode({"at": at_s, "fact": fact}).decode())
            else:
                _print_lines(at_s, *event_messages.format_event(before, fact, summary))
        sys.stdout.flush()
        served, now_s = store.is_served(), time.monotonic()
        served_s = now_s if served else served_s
        gone = not served and now_s >= served_s + AWAY_S
        if not (served or gone or away or ended) and follow:
            print(f"no coordinator serves {store.home}: another one is waited for {AWAY_S:g} s", file=sys.stderr)
        away = not served
        if not ended and follow and gone:
            raise InactiveRunError(
                f"no coordinator serves {store.home} any more: `fedquilt serve --home {store.home}` goes on with {id}"
            )
        if ended or not follow:
            for told in [] if json else event_messages.format_energy_summary(summary):
                print(told)
            return
        state, hold = summary.state, store.holds.current_suspension(id)
        wait = (
            wait_reasons.WaitReason(str(hold), hold, "lost")
            if hold
            else wait_reasons.find_round_wait(row, state, wait_reasons.load_device_statuses(store.home))
        )
        if waiting.line_due(wait, time.monotonic()) is not None and wait is not None and not json:
            busy = {} if hold else wait_reasons.devices_of_other_runs(store, id)
            if not hold:
                wait = (
                    wait_reasons.find_round_wait(row, state, wait_reasons.load_device_statuses(store.home), busy.keys())
                    or wait
                )
            taken = (
                None
                if hold
                else wait_reasons.describe_busy_devices(state, wait_reasons.eligible_online_devices(state), busy)
            )
            mend = taken or (MORE if wait.kind == "boards" else None)
            _print_lines(time.time(), f"waiting for {wait.text}", *([mend] if mend else []))
        time.sleep(0.5)


def _print_lines(at_s: float, first: str, *more: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    told = (f"{stamp}  {first}", *(f"{'':21}{line}" for line in more))
    print("\n".join(part for line in told for part in table.fold_line(line, 21)), flush=True)


class StopSignal:
    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Return whether a signal has requested the end."""
        return self.asked


@contextmanager
def catch_stop_signals() -> Iterator[StopSignal]:
    """Catch SIGINT, SIGTERM and SIGHUP in the body as requests to stop. A second one interrupts."""
    stop = StopSignal()

    def request_stop(signum: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
