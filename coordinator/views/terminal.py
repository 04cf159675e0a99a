"""Coordinator in a terminal: runs until its job ends or it is stopped, and prints its facts."""

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

from fedquilt import columns, connections, heap, open_metrics, progress
from fedquilt.coordinator import rollouts, sites
from fedquilt.coordinator.boards import Board
from fedquilt.coordinator.boards_link import Boards, NotedLink
from fedquilt.coordinator.exposed import Exposed
from fedquilt.coordinator.facts import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Declined,
    Ended,
    Rejected,
    Rounds,
    Surveyed,
    apply,
)
from fedquilt.coordinator.limits import Limits
from fedquilt.coordinator.places import Where
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.rollouts import Rollout
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import costs, log, waits, why
from fedquilt.coordinator.views import rollouts as rollout_view
from fedquilt.coordinator.worker import Thread
from fedquilt.core import JobError
from fedquilt.transport import link as links
from fedquilt.transport.handshake import Identity
from fedquilt.transport.link import Link

WAIT_SAID_S = 5.0  # until a wait is reported, and between reports of waits that change
WORK_SAID_S = 30.0  # likewise for devices that are at work
WAIT_LOOK_S = 1.0
WAIT_AGAIN_S = 600.0  # between reports of an unchanged wait

SINGLY = 3  # declines of a round for one reason that are printed one by one; further ones are counted

MORE = (
    "start more: `fedquilt agent agent.toml` on a board, or simulated ones with `fedquilt fleet JOB --link broker "
    "--agents-only`"
)
AWAY_S = 20.0  # longest time without a coordinator while a run is followed; systemd starts ours again after 10
AWAY = waits.Wait("its broker, which cannot be reached", "broker", "lost")
BROKER = "`fedquilt doctor --home HOME --broker URL` says why"


class Waiting:
    """Times at which a wait is reported: soon after it begins or changes, then rarely."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # start of the present wait
        self._said: object = None
        self._said_s = -math.inf

    def line_due(self, wait: waits.Wait | None, now_s: float) -> str | None:
        """Return the line to print now about a round's wait, or None if there is none or it is too early."""
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


class UnservedError(JobError):
    """A run is followed that no coordinator works on any more: it is interrupted, and nothing is wrong with its job."""

    exit_code = 130


class Contact:
    """Times at which loss and return of the broker are reported."""

    def __init__(self) -> None:
        self._connected: bool | None = None  # None: not tested yet
        self._session = 0

    @property
    def away(self) -> bool:
        """Whether the broker was away when the link was last looked at."""
        return self._connected is False

    def line(self, connected: bool, session: int) -> str | None:
        """Line to print now; None: nothing has changed. A link that is up at the first test is not reported.

        Args:
            connected: whether the link is up.
            session: number of sessions so far, so that a loss too short to be seen is reported too.
        """
        before, self._connected = self._connected, connected
        former, self._session = self._session, session
        if connected and (before is False or former not in (0, session)):
            return "reconnected to the broker" if former else "connected to the broker"
        if before and not connected:
            return "lost the connection to the broker; trying to connect until it is back"
        return None


class Console:
    """Prints facts as sentences; on a terminal the running round is one line, rewritten in place."""

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
            wordy: print every fact; else a line for each round.
            named: print the run of each fact, where there may be several.
            clock: seconds, for the times printed.
            mend: how to start devices that a round waits for.
            real_clock: seconds, for how often progress is shown.
        """
        self._line, self._named, self._wordy = progress.Line(sys.stdout, clock=real_clock), named, wordy
        self._clock, self._began_s = clock, clock()
        self._contact, self._mend = Contact(), mend
        self._waiting: dict[str, Waiting] = {}  # by run
        self._wait_s = -math.inf  # when it was last looked at
        self._tellers: dict[str, log.Teller] = {}  # run -> its teller
        self._declines = defaultdict[tuple[str, int, str], list[str]](list)  # (run, round, code) -> unprinted lines

    def observe(self, job: Shown, fact: AnyFact) -> None:
        """Print an event, or show the progress of its round on a terminal."""
        first, *more = self._tellers.setdefault(job.id, log.Teller()).tell(fact, job.rounds)
        if isinstance(fact, Ended):
            del self._tellers[job.id]
        if isinstance(fact, Declined | Rejected) and not self._wordy:
            said = f"{job.id}: {first}" if self._named else first
            self._declines[job.id, fact.round, fact.code].append(said)
        elif isinstance(fact, Ended) and fact.code:
            for key in [key for key in self._declines if key[0] == job.id]:
                del self._declines[key]  # the end names the cause
        elif not isinstance(fact, Surveyed | Asked | Answered):
            self._print_declines()
        if isinstance(fact, Surveyed | Asked | Answered | Declined | Rejected | Closed) and not self._wordy:
            self._status(job)
        else:
            self.say(f"{job.id}: {first}" if self._named else first, *more)

    def rolled(self, rollout: Rollout, fact: rollouts.AnyFact) -> None:
        """Print an event of a rollout. Print a device's report only if it failed or all events are printed."""
        if self._wordy or not isinstance(fact, rollouts.Heard) or fact.phase in rollouts.FAILED:
            self.say(f"{rollout.id}: {rollout_view.sentence(rollout, fact)}")

    def _print_declines(self) -> None:
        """Print the collected refusals of each round: a few of each code, and the number of the others."""
        for (run, round, code), lines in self._declines.items():
            for line in lines[:SINGLY]:
                self.say(line)
            if len(lines) > SINGLY:
                more = (
                    f"round {round}: {len(lines) - SINGLY} more declined ({code}): `fedquilt logs {run}` has them all"
                )
                self.say(f"{run}: {more}" if self._named else more)
        self._declines.clear()

    def say(self, first: str, *more: str) -> None:
        """Print a sentence with the seconds since the start, and further ones below it."""
        told = (f"{self._stamp()} {first}", *(f"{'':11}{line}" for line in more))
        self._line.say(*(part for line in told for part in columns.fold(line, 11)))

    def contact(self, link: Link) -> None:
        """Report that the broker is lost, or back."""
        if (line := self._contact.line(link.connected, link.session)) is not None:
            self.say(line)

    def report_waits(self, server: Server, board: Callable[[str], Board | None] = lambda device: None) -> None:
        """Print what each job's round waits for, once the wait has lasted a while."""
        now_s, now = self._clock(), time.time()
        if now_s < self._wait_s + WAIT_LOOK_S:
            return
        self._wait_s = now_s
        jobs = server.jobs()
        self._waiting = {job.id: self._waiting.get(job.id, Waiting()) for job in jobs}
        for job in jobs:
            able = server.registry.able(job.engines, now_s)
            state, until = server.wall_clock_state(job.id, now_s, now)
            wait = waits.find_wait(state, job.engines, able.keys(), server.elsewhere(job.id), board, now, until)
            if away := wait is not None and self._contact.away:  # who is online is not known then
                wait = AWAY
            line = self._waiting[job.id].line_due(wait, now_s)
            if line is not None and wait is not None:
                taken = None if away else waits.taken(job.rounds, able.keys(), server.holders(job.id))
                mend = BROKER if away else taken or (self._mend if wait.kind == "boards" else None)
                self.say(f"{job.id}: {line}" if self._named else line, *([mend] if mend else []))

    def _status(self, job: Shown) -> None:
        self.status(lambda: f"{job.id}: {log.status(job.rounds)}")

    def status(self, line: Callable[[], str]) -> None:
        """Show progress if it is time to: on a terminal in a line that the next one replaces."""
        self._line.at(lambda: f"{self._stamp()} {line()}")

    def _stamp(self) -> str:
        return f"[{self._clock() - self._began_s:6.1f} s]"


class Above(Protocol):
    """What ties a site's coordinator to the one above it."""

    def observe(self, job: Shown, fact: AnyFact) -> None:
        """Take note of a fact of this coordinator."""
        ...

    def beside(self, server: Server) -> links.Endpoint:
        """Endpoint that drives this coordinator and what ties it to the one above."""
        ...

    def goodbye(self) -> None:
        """Announce that the site goes."""
        ...


def run_coordinator(
    store: Store,
    link: Link,
    fleet: str,
    console: Console,
    only: str | None = None,
    watch: Callable[[], None] = lambda: None,
    identity: Identity | None = None,
    metrics: str | None = None,
    limits: Limits = Limits(),
    where: Where = Where(),
    site: Above | None = None,
) -> None:
    """Run a coordinator until the job `only` has ended, or until SIGINT or SIGTERM arrives.

    `watch` is called once a turn; an exception it raises ends the coordinator in good order. With an `identity` it is
    signed: it takes messages of boards alone that have proved to be who they say. `metrics` is HOST:PORT, where they
    are served; `where` are places of blobs beside the broker; `site` makes this the coordinator of a site.

    Raises:
        JobError: boards would not take the identity for the coordinator's, metrics or blobs cannot be served, or
            [sites] of limits.toml has no place here.
    """
    if limits.sites and identity is not None:
        raise JobError(
            "limits.toml [sites]: in a fleet with certificates these grant the rights of sites (`fedquilt ca issue "
            "NAME --role site`): remove the table"
        )
    if limits.sites and site is not None:
        raise JobError("limits.toml [sites]: a site has no sites of its own: remove the table")
    heap.keep_pieces()
    connections.raise_descriptor_limit()
    noted = Boards(store.home)
    executor = NotedLink(
        link, fleet, store.depot, store.next_epoch(), noted, identity, dataclasses.replace(where, limits=limits.http)
    )
    store.note_signed(identity is not None)
    counts = Exposed(noted.boards_with_readings)

    def observe(job: Shown, fact: AnyFact) -> None:
        console.observe(job, fact)
        if isinstance(fact, Closed) and not fact.round:
            warning = why.warn_of_weights(store, job.job, (each for _, _, each in store.facts(job.id)))
            if warning is not None:
                console.say(f"{job.id}: {warning}")
        counts.observe(job, fact)
        if site is not None:
            site.observe(job, fact)

    around = sites.above if site is None else sites.below
    server = Server(
        executor, store, observe, only, limits=limits, tell=console.rolled, worker=Thread(), around=around, by_wall=True
    )
    endpoint = server if site is None else site.beside(server)
    with open_metrics.serve_metrics(metrics, counts.families) as place, stopping() as stop:
        if place:
            console.say(f"metrics at {place}")
        if executor.places.served:
            console.say(f"blobs at {executor.places.served}")

        def ask() -> bool:
            watch()
            console.contact(link)
            console.report_waits(server, noted.current_board)
            return stop()

        try:
            links.run(endpoint, link, ask)
        finally:
            if site is not None:
                site.goodbye()
            server.goodbye()


def print_log(
    store: Store,
    id: str,
    *,
    follow: bool = False,
    json: bool = False,
    watch: Callable[[bool], None] = lambda last: None,
) -> None:
    """Print a run's events with their wall-clock times, and with `follow` later ones until the run has ended.

    Args:
        store: holds the run.
        id: of the run.
        follow: whether to wait for later facts.
        json: whether each fact is printed as a line of JSON.
        watch: called after the present facts are printed; True: this is the last call.

    Raises:
        UnservedError: with `follow`, nobody serves the store, or nobody has for AWAY_S, so that nothing will follow.
    """
    row, served_s, away = store.job(id), -math.inf, False  # when a coordinator was last seen to serve it
    seen, state, waiting, teller = 0, Rounds(Plan.of(row.job)), Waiting(), log.Teller()
    while True:
        status = store.status(id)  # read first, so that no last fact is missed
        ended = status in ("done", "failed", "stopped")
        if not status:
            raise JobError(f"{id} has been deleted meanwhile")
        for number, at_s, fact in store.facts(id, after=seen):
            seen, state = number, apply(state, fact, at_s)
            if json:
                print(msgspec.json.encode({"at": at_s, "fact": fact}).decode())
            else:
                _tell(at_s, *teller.tell(fact, state))
        sys.stdout.flush()
        served, now_s = store.served(), time.monotonic()
        served_s = now_s if served else served_s
        gone = not served and now_s >= served_s + AWAY_S
        if not (served or gone or away or ended) and follow:
            print(f"no coordinator serves {store.home}: another one is waited for {AWAY_S:g} s", file=sys.stderr)
        away = not served
        watch(ended or not follow or gone)
        if not ended and follow and gone:
            raise UnservedError(
                f"no coordinator serves {store.home} any more: `fedquilt serve --home {store.home}` goes on with {id}"
            )
        if ended or not follow:
            for told in [] if json else costs.lines(costs.account(fact for _, _, fact in store.facts(id))):
                print(told)
            return
        hold = store.holds.of(id)
        wait = (
            waits.Wait(str(hold), hold, "lost")
            if hold
            else waits.describe_round_wait(row, state, waits.load_boards(store.home))
        )
        if waiting.line_due(wait, time.monotonic()) is not None and wait is not None and not json:
            busy = {} if hold else waits.devices_of_other_runs(store, id)
            if not hold:
                wait = waits.describe_round_wait(row, state, waits.load_boards(store.home), busy.keys()) or wait
            taken = None if hold else waits.taken(state, waits.surveyed_devices(state), busy)
            mend = taken or (MORE if wait.kind == "boards" else None)
            _tell(time.time(), f"waiting for {wait.text}", *([mend] if mend else []))
        time.sleep(0.5)


def _tell(at_s: float, first: str, *more: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    told = (f"{stamp}  {first}", *(f"{'':21}{line}" for line in more))
    print("\n".join(part for line in told for part in columns.fold(line, 21)), flush=True)


class Stop:
    """Becomes true when the process is told to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Whether a signal has asked for the end."""
        return self.asked


@contextmanager
def stopping() -> Iterator[Stop]:
    """Let SIGINT, SIGTERM and SIGHUP ask for an orderly end, once; the previous handlers are restored."""
    stop = Stop()

    def ask(signum: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
