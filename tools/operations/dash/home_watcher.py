"""Watcher of a coordinator's home, shared by all viewers of a dashboard.

Databases are read in two threads, one for devices and one for runs, so that a long log does not delay the fleet page.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from fedquilt.coordinator.fleet import device_status
from fedquilt.coordinator.rounds.events import ENDED_PHASES, JobConstants
from fedquilt.coordinator.storage.rollout_log import RolloutLog
from fedquilt.coordinator.storage.rows import DatabaseIdentity, UnreadableRow
from fedquilt.coordinator.storage.store import NAME, ChangeDetector, StoredJob, StoreReader
from fedquilt.coordinator.views import devices, round_outcomes
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.tools.operations.dash.run_follower import CELLS, RunFollower, find_round_outcomes

T = TypeVar("T")

POLL_S: Final = 0.2  # interval of checking for writes
PAUSE: Final = 1.5  # between two readings of all boards, in times of what the last one took
PIECE: Final = 1000  # facts that are read at once
HELD: Final = 4  # runs that have ended and are held with their details: those asked for last
KNOWN_LABELS: Final = 100  # that a filter offers
OLD_S: Final = 15.0  # after which boards are read again without a change: readings grow too old
DOUBT_S: Final = 30.0  # until a log that could not be read is tried again
ALIVE_S: Final = 15.0  # after which such a connection gets a word, so that both ends see that it holds


class RunList(NamedTuple):
    rows: list[StoredJob | UnreadableRow]
    standing: Mapping[str, str]  # run -> its status, and whether somebody works on it
    served: bool
    holds: Mapping[str, str]  # run that the coordinator holds -> what it waits for, as a sentence's end


class FleetView(NamedTuple):
    boards: list[devices.DeviceRow]
    counts: Mapping[str, int]  # by state, and "all"
    labels: list[str]  # the first of them that there are
    change: int  # number of changes by then
    at: float  # on this process's clock
    took_s: float


class HomeWatcher:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.changes = {"boards": 0, "runs": 0}
        self._news = asyncio.Event()
        self._closing = False
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("boards", "runs")}
        self._marks: dict[str, ChangeDetector] = {}
        self._seen: dict[str, object] = {}
        self._reader: StoreReader | None = None
        self._reader_of: DatabaseIdentity | None = None
        self._fleet: FleetView | None = None
        self._runs: tuple[int, RunList] | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._followers: dict[str, RunFollower] = {}  # the one asked for last at the end
        self._problems: dict[str, tuple[float, str]] = {}  # run -> until when it is not read again, why it cannot be
        self._summaries: dict[str, tuple[object, dict[str, Any]]] = {}  # run -> status and epoch it is of, values
        self._served = False
        self._wanted: dict[str, None] = {}  # runs whose logs a viewer waits for
        self._wish = asyncio.Event()  # there may be a log to read

    # -- changes --

    async def poll_databases(self) -> None:
        """Check the databases for changes until the watcher is closed."""
        files = {"boards": device_status.NAME, "runs": NAME}
        while not self._closing:
            changed = False
            for name, file in files.items():
                now = await self._run_in_thread(name, lambda name=name, file=file: self._read_mark(name, file))  # type: ignore[misc]
                if now != self._seen.get(name, self) and not (name == "boards" and self._is_pausing()):
                    self._seen[name] = now
                    self.changes[name] += 1
                    changed = True
            if changed:
                self._wish.set()
                self._notify()
            await asyncio.sleep(POLL_S)

    def _is_pausing(self) -> bool:
        # reading all devices takes a while, so reads are spaced in proportion
        return self._fleet is not None and time.monotonic() < self._fleet.at + PAUSE * self._fleet.took_s

    def _read_mark(self, name: str, file: str) -> object:
        found = self._marks.setdefault(name, ChangeDetector(self.home / file)).read_version()
        return (found, self._update_served()) if name == "runs" else found

    def _update_served(self) -> bool:
        try:
            self._served = self._get_current_reader().is_served()
        except StoreError:
            self._served = False
        return self._served

    def _notify(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def iterate_changes(self) -> AsyncGenerator[dict[str, int] | None, None]:
        """Yield the numbers of changes now and after each change, and None after ALIVE_S without a change."""
        while not self._closing:
            news = self._news
            yield dict(self.changes)
            while not self._closing:
                try:
                    await asyncio.wait_for(news.wait(), ALIVE_S)
                    break
                except asyncio.TimeoutError:
                    yield None

    def close(self) -> None:
        self._closing = True
        self._wish.set()
        self._notify()

    def close_databases(self) -> None:
        """Close the databases and stop the threads. Call after all reads have ended."""
        for name, thread in self._threads.items():
            if name in self._marks:
                thread.submit(self._marks[name].close)
            if name == "runs":
                thread.submit(self._close_reader)
            thread.shutdown()

    # -- boards --

    @property
    def is_served(self) -> bool:
        return self._served

    async def load_fleet(self) -> FleetView:
        async with self._get_lock("fleet"):
            change, now = self.changes["boards"], time.monotonic()
            if self._fleet is None or self._fleet.change != change or now > self._fleet.at + OLD_S:
                found = await self._run_in_thread("boards", self._read_all_devices)
                ended = time.monotonic()
                self._fleet = FleetView(*found, change, ended, ended - now)
            return self._fleet

    def _read_all_devices(self) -> tuple[list[devices.DeviceRow], dict[str, int], list[str]]:
        found = devices.load_devices(self.home)
        counts = Counter(name for each in found for name in devices.matching_states(each))
        labels = sorted({label for each in found for label in each.board.labels})[:KNOWN_LABELS]
        return found, {name: counts[name] for name in devices.STATES} | {"all": len(found)}, labels

    async def load_readings(self, device: str, begin: float, end: float) -> list[Any]:
        def read() -> list[Any]:
            with device_status.TelemetryStore(self.home) as store:
                return store.load_readings(device, begin, end)

        return await self._run_in_thread("boards", read)

    # -- runs --

    async def load_runs(self) -> RunList:
        async with self._get_lock("runs"):
            change = self.changes["runs"]
            if self._runs is None or self._runs[0] != change:
                self._runs = (change, await self._run_in_thread("runs", self._read_runs))
            return self._runs[1]

    def _read_runs(self) -> RunList:
        store = self._get_current_reader()
        rows = store.all_jobs()
        standing = {row.id: store.current_status(row) if isinstance(row, StoredJob) else row.status for row in rows}
        suspended = store.suspensions.current_suspensions()
        holds = {run: str(hold) for run, hold in suspended.items() if standing.get(run) == "held"}
        return RunList(rows, standing, self._update_served(), holds)

    def open_rollout_log(self) -> RolloutLog:
        """Return the rollouts of the home. Use only in the thread of `run_in_reader_thread`."""
        return self._get_current_reader().rollouts

    async def find_run(self, run: str) -> StoredJob:
        rows = (await self.load_runs()).rows
        for row in reversed(rows):
            if isinstance(row, UnreadableRow) and run == row.id:
                raise StoreError(row.reason)
            if isinstance(row, StoredJob) and run in (row.id, row.job.name):
                return row
        raise MissingRunError(f"there is no run {run[:100]!r} in {self.home} any more, or never was")

    async def load_follower(self, run: str) -> RunFollower:
        """Return the follower of a run after reading all its events."""
        row = await self.find_run(run)
        async with self._get_lock(row.id):
            until, problem = self._problems.get(row.id, (0.0, ""))
            if time.monotonic() < until:
                raise JobError(problem)
            found = self._followers.pop(row.id, None) or RunFollower(row)
            found.row, found.cells = row, CELLS // max(len(self._followers), HELD)
            try:
                await self._read_new_events(found)
            except JobError as error:
                self._problems[row.id] = (time.monotonic() + DOUBT_S, str(error))
                raise
            self._followers[row.id] = found
        self._summaries[row.id] = ((row.status, row.epoch), await self.run_in_reader_thread(found.make_summary))
        self._forget_old_followers()
        return found

    async def _read_new_events(self, found: RunFollower) -> None:
        # in pieces, so that other reads get their turn
        while True:
            if await self.run_in_reader_thread(lambda: self._read_event_piece(found)) < PIECE:
                return

    def _read_event_piece(self, found: RunFollower) -> int:
        count = 0
        for seq, at, fact in self._get_current_reader().read_events(found.row.id, found.seq, PIECE):
            found.add_event(seq, at, fact)
            count += 1
        return count

    def _forget_old_followers(self) -> None:
        rows = {} if self._runs is None else {row.id: row.status for row in self._runs[1].rows}
        ended = [id for id in self._followers if rows.get(id) in ENDED_PHASES]
        for id in [*ended[:-HELD], *(self._followers.keys() - rows.keys())]:
            del self._followers[id]
        for id in self._summaries.keys() - rows.keys():
            del self._summaries[id]

    async def get_loaded_follower(self, run: str) -> RunFollower | None:
        """Return the follower of a run if its log has been read, or None and schedule the read.

        A change is announced when the log has been read.
        """
        if run in self._followers or run in self._problems:
            return await self.load_follower(run)
        self._wanted[run] = None
        self._wish.set()
        return None

    async def load_summary(self, row: StoredJob) -> dict[str, Any]:
        """Return a run's values for the list of runs, or {} if unknown so far.

        The key "problem" states why the log cannot be read.
        """
        known = self._summaries.get(row.id)
        if row.status in ENDED_PHASES:
            return known[1] if known is not None and known[0] == (row.status, row.epoch) else {}
        try:
            found = await self.get_loaded_follower(row.id)
            return {} if found is None else await self.run_in_reader_thread(found.make_summary)
        except JobError as error:
            return {"problem": str(error)}

    async def read_logs(self) -> None:
        """Read requested logs, then those of ended runs, until the watcher is closed."""
        while not self._closing:
            self._wish.clear()
            while not self._closing and await self._read_next_log():
                self.changes["runs"] += 1
                self._notify()
            await self._wish.wait()

    async def _read_next_log(self) -> bool:
        if self._wanted:
            run = next(iter(self._wanted))
            with contextlib.suppress(FedquiltError):  # the next request for the log reports the error
                await self.load_follower(run)
            self._wanted.pop(run, None)
            return True
        try:
            rows = [
                row
                for row in (await self.load_runs()).rows
                if isinstance(row, StoredJob) and row.status in ENDED_PHASES
            ]
        except FedquiltError:
            return False
        unknown = [row for row in rows if self._summaries.get(row.id, (None,))[0] != (row.status, row.epoch)]
        if not unknown:
            return False
        row, told = unknown[-1], {}
        try:
            found = RunFollower(row, 0)  # no details
            await self._read_new_events(found)
            told = await self.run_in_reader_thread(found.make_summary)
        except FedquiltError as error:
            told = {"problem": str(error)}
        self._summaries[row.id] = ((row.status, row.epoch), told)
        return True

    async def load_round_outcomes(
        self, found: RunFollower, round: int
    ) -> Mapping[str, round_outcomes.DeviceOutcome] | None:
        """Return the outcomes of all devices in a round, or None if the round does not exist."""
        if (held := await self.run_in_reader_thread(lambda: dict(found.parts.get(round, {})))) or round in found.parts:
            return held
        if found.first is None or not found.first <= round <= found.state.round:
            return None
        id, plan = found.row.id, JobConstants.from_job(found.row.job)

        def find_outcomes() -> Mapping[str, round_outcomes.DeviceOutcome] | None:
            return find_round_outcomes((fact for _, _, fact in self._get_current_reader().read_events(id)), plan, round)

        return await self.run_in_reader_thread(find_outcomes)

    async def run_in_reader_thread(self, read: Callable[[], T]) -> T:
        """Call a function in the thread that updates followers, which do not change during the call."""
        return await self._run_in_thread("runs", read)

    # -- within --

    def _get_current_reader(self) -> StoreReader:
        # opened again if the database file was replaced. Called in the reader thread
        before = self._reader_of
        try:
            self._reader_of = found = DatabaseIdentity.from_path(self.home / NAME)
        except OSError as error:
            self._close_reader()
            raise StoreError(f"no runs in {self.home}: {error.strerror}") from None
        if before is not None and before != found:
            self._close_reader()
            if before[:2] != found[:2]:  # another database: what was followed is not in it
                self._followers.clear()
                self._summaries.clear()
        if self._reader is None:
            self._reader = StoreReader(self.home)
        return self._reader

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _get_lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _run_in_thread(self, name: str, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], read)


class MissingRunError(StoreError): ...
