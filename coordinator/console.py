"""A coordinator in a terminal: it runs until its job ends or it is told to stop, and says what happens."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from fedquilt import link as links
from fedquilt.coordinator import ledger, story
from fedquilt.coordinator.rounds import Answered, AnyFact, Asked, Closed, Surveyed
from fedquilt.coordinator.running import Running
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.store import Store
from fedquilt.core import JobError
from fedquilt.link import Link

WAIT_SAID_S = 5.0


class Console:
    """Prints facts as sentences; on a terminal the running round is a line that is overwritten."""

    def __init__(self, wordy: bool = False, named: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """`wordy`: every fact; `named`: with the run it belongs to, where there may be several."""
        self._out, self._named = sys.stdout, named
        self._wordy, self._live = wordy, self._out.isatty()
        self._clock, self._began_s = clock, clock()
        self._idle_s: float | None = None  # since when nobody can be asked; inf: said

    def observe(self, job: Running, fact: AnyFact) -> None:
        if isinstance(fact, Surveyed | Asked | Answered | Closed) and not self._wordy:
            self._status(job)
        else:
            first, *more = story.sentences(fact)
            self.say(f"{job.id}: {first}" if self._named else first, *more)

    def say(self, first: str, *more: str) -> None:
        clear = "\r\x1b[K" if self._live else ""
        print(f"{clear}[{self._clock() - self._began_s:6.1f} s] {first}", file=self._out)
        for line in more:
            print(f"{'':11}{line}", file=self._out)
        self._out.flush()

    def wait(self, server: Server) -> None:
        """Say once for whom a round waits, when nobody has come for a while."""
        whom = self._awaited(server)
        if whom is None:
            self._idle_s = None
        elif self._idle_s is None:
            self._idle_s = self._clock()
        elif self._idle_s + WAIT_SAID_S < self._clock():
            self._idle_s = math.inf
            self.say(f"waiting for {whom}")

    def _awaited(self, server: Server) -> str | None:
        """Whom the running round cannot go on without; None: somebody is at work."""
        job = server.active
        if job is None or job.rounds.phase not in ("selecting", "open"):
            return None
        able, asked = server.registry.able(job.engines, self._clock()), job.rounds.asked
        if asked & able.keys():
            return None
        if asked:
            return f"{', '.join(sorted(asked))}: offline"
        least = job.rounds.plan.cohort.min_devices if job.rounds.round == 0 else 1
        declined = f", {len(job.rounds.declined)} of them declined" if job.rounds.declined else ""
        barred = [code for device, code in job.rounds.passed.items() if device in able]
        alone = "".join(f", {barred.count(code)} left alone ({code})" for code in sorted(set(barred)))
        engines = " or ".join(job.engines)
        return f"devices that run {engines}: {len(able)} online{alone}{declined}, at least {least} needed"

    def _status(self, job: Running) -> None:
        if self._live:
            state = job.rounds
            asked = len(state.asked) + len(state.answered)
            line = f"{job.id}: round {state.round}, at most {job.job.rounds}: {len(state.answered)} of {asked} answered"
            print(f"\r\x1b[K{line}", end="", file=self._out, flush=True)


def coordinate(
    store: Store,
    link: Link,
    fleet: str,
    console: Console,
    only: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a coordinator until the job `only` has ended (or for ever), or SIGINT or SIGTERM comes.

    `watch` is called once a turn; what it raises ends the coordinator in good order.
    """
    server = Server(link, fleet, store, console.observe, only)
    with stopping() as stop:

        def ask() -> bool:
            watch()
            console.wait(server)
            return stop()

        try:
            links.run(server, link, ask)
        finally:
            server.goodbye()


def tell(store: Store, id: str, *, follow: bool = False, json: bool = False) -> None:
    """Print a run's facts with their wall-clock times, and with `follow` those to come until it has ended."""
    seen = 0
    while True:
        ended = store.status(id) in ("done", "failed", "stopped")  # asked first, so that no last fact is missed
        for number, at_s, fact in store.facts(id, after=seen):
            seen = number
            if json:
                print(msgspec.json.encode({"at": at_s, "fact": fact}).decode())
                continue
            first, *more = story.sentences(fact)
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
            print("\n".join([f"{stamp}  {first}", *(f"{'':21}{line}" for line in more)]))
        sys.stdout.flush()
        if not ended and follow and not store.served():
            raise JobError(
                f"no coordinator serves {store.home} any more: `fedquilt serve --home {store.home}` goes on with {id}"
            )
        if ended or not follow:
            if not json:
                print("\n".join(ledger.lines(ledger.account(fact for _, _, fact in store.facts(id)))))
            return
        time.sleep(0.5)


class Stop:
    """Becomes true when the process is told to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked


@contextmanager
def stopping() -> Iterator[Stop]:
    """SIGINT, SIGTERM and SIGHUP ask for an orderly end, once; the handlers before are restored."""
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
