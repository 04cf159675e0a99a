"""What a dashboard holds of a home: one look at it for all who watch, made anew when somebody has written there.

Databases are read in two threads, one for boards and one for runs, so that a long log holds up no page of the fleet.
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

from fedquilt.coordinator import boards_store, store_reader
from fedquilt.coordinator.housekeeping import ENDED
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.rollout_log import RolloutLog
from fedquilt.coordinator.store import Row
from fedquilt.coordinator.store_reader import Mark, Reader
from fedquilt.coordinator.store_rows import Identity, Unreadable
from fedquilt.coordinator.views import devices, why
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.tools.dash.follow import CELLS, Follower, part_of

T = TypeVar("T")

POLL_S: Final = 0.2  # between two looks at whether anybody has written
PAUSE: Final = 1.5  # between two readings of all boards, in times of what the last one took
PIECE: Final = 1000  # facts that are read at once
HELD: Final = 4  # runs that have ended and are held with their details: those asked for last
KNOWN_LABELS: Final = 100  # that a filter offers
OLD_S: Final = 15.0  # after which boards are read again without a change: readings grow too old
DOUBT_S: Final = 30.0  # until a log that could not be read is tried again
ALIVE_S: Final = 15.0  # after which such a connection gets a word, so that both ends see that it holds


class Runs(NamedTuple):
    """The list of runs at one moment."""

    rows: list[Row | Unreadable]
    standing: Mapping[str, str]  # run -> its status, and whether somebody works on it
    served: bool
    holds: Mapping[str, str]  # run that the coordinator holds -> what it waits for, as a sentence's end


class Fleet(NamedTuple):
    """All boards at one moment."""

    boards: list[devices.Device]
    counts: Mapping[str, int]  # by state, and "all"
    labels: list[str]  # the first of them that there are
    change: int  # number of changes by then
    at: float  # on this process's clock
    took_s: float


class Watch:
    """One home, watched for all pages at once.

    Args:
        home: folder of the coordinator.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.changes = {"boards": 0, "runs": 0}
        self._news = asyncio.Event()
        self._closing = False
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("boards", "runs")}
        self._marks: dict[str, Mark] = {}
        self._seen: dict[str, object] = {}
        self._reader: Reader | None = None
        self._reader_of: Identity | None = None
        self._fleet: Fleet | None = None
        self._runs: tuple[int, Runs] | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._followers: dict[str, Follower] = {}  # the one asked for last at the end
        self._problems: dict[str, tuple[float, str]] = {}  # run -> until when it is not read again, why it cannot be
        self._summaries: dict[str, tuple[object, dict[str, Any]]] = {}  # run -> status and epoch it is of, values
        self._served = False
        self._wanted: dict[str, None] = {}  # runs whose logs somebody waits for
        self._wish = asyncio.Event()  # there may be a log to read

    # -- changes --

    async def poll(self) -> None:
        """Look for changes until it is closed."""
        files = {"boards": boards_store.NAME, "runs": store_reader.NAME}
        while not self._closing:
            changed = False
            for name, file in files.items():
                now = await self._in(name, lambda name=name, file=file: self._mark(name, file))  # type: ignore[misc]
                if now != self._seen.get(name, self) and not (name == "boards" and self._pausing()):
                    self._seen[name] = now
                    self.changes[name] += 1
                    changed = True
            if changed:
                self._wish.set()
                self._tell()
            await asyncio.sleep(POLL_S)

    def _pausing(self) -> bool:
        """Whether all boards have been read so lately that they are not read again yet."""
        return self._fleet is not None and time.monotonic() < self._fleet.at + PAUSE * self._fleet.took_s

    def _mark(self, name: str, file: str) -> object:
        found = self._marks.setdefault(name, Mark(self.home / file)).now()
        return (found, self._is_served()) if name == "runs" else found

    def _is_served(self) -> bool:
        try:
            self._served = self._read().served()
        except StoreError:
            self._served = False
        return self._served

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self) -> AsyncGenerator[dict[str, int] | None, None]:
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
        """Let everything come to its end."""
        self._closing = True
        self._wish.set()
        self._tell()

    def shut(self) -> None:
        """Close the databases, once nothing is asked any more."""
        for name, thread in self._threads.items():
            if name in self._marks:
                thread.submit(self._marks[name].close)
            if name == "runs":
                thread.submit(self._drop)
            thread.shutdown()

    # -- boards --

    @property
    def served(self) -> bool:
        """Whether a coordinator serves the home."""
        return self._served

    async def fleet(self) -> Fleet:
        """Every board, by name.

        Raises:
            StoreError: what is kept of boards cannot be read.
        """
        async with self._lock("fleet"):
            change, now = self.changes["boards"], time.monotonic()
            if self._fleet is None or self._fleet.change != change or now > self._fleet.at + OLD_S:
                found = await self._in("boards", self._all_boards)
                ended = time.monotonic()
                self._fleet = Fleet(*found, change, ended, ended - now)
            return self._fleet

    def _all_boards(self) -> tuple[list[devices.Device], dict[str, int], list[str]]:
        found = devices.look(self.home)
        counts = Counter(name for each in found for name in devices.states_of(each))
        labels = sorted({label for each in found for label in each.board.labels})[:KNOWN_LABELS]
        return found, {name: counts[name] for name in devices.STATES} | {"all": len(found)}, labels

    async def readings(self, device: str, begin: float, end: float) -> list[Any]:
        """Readings of a board, as of `BoardStore.readings`."""

        def read() -> list[Any]:
            with boards_store.BoardStore(self.home) as store:
                return store.readings(device, begin, end)

        return await self._in("boards", read)

    # -- runs --

    async def runs(self) -> Runs:
        """The list of runs as of now.

        Raises:
            StoreError: it cannot be read.
        """
        async with self._lock("runs"):
            change = self.changes["runs"]
            if self._runs is None or self._runs[0] != change:
                self._runs = (change, await self._in("runs", self._list))
            return self._runs[1]

    def _list(self) -> Runs:
        reader = self._read()
        rows = reader.all_jobs()
        standing = {row.id: reader.standing(row) if isinstance(row, Row) else row.status for row in rows}
        holds = {run: str(reader.holds.of(run)) for run, status in standing.items() if status == "held"}
        return Runs(rows, standing, self._is_served(), holds)

    def rollouts(self) -> RolloutLog:
        """The home's rollouts, to be read `aside`."""
        return self._read().rollouts

    async def row(self, run: str) -> Row:
        """A run by its id or its job's name.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        rows = (await self.runs()).rows
        for row in reversed(rows):
            if isinstance(row, Unreadable) and run == row.id:
                raise StoreError(row.reason)
            if isinstance(row, Row) and run in (row.id, row.job.name):
                return row
        raise MissingRunError(f"there is no run {run[:100]!r} in {self.home} any more, or never was")

    async def follower(self, run: str) -> Follower:
        """A run with its details, all its facts read.

        Raises:
            StoreError: there is no such run.
            JobError: its log is damaged, or of another version.
        """
        row = await self.row(run)
        async with self._lock(row.id):
            until, problem = self._problems.get(row.id, (0.0, ""))
            if time.monotonic() < until:
                raise JobError(problem)
            found = self._followers.pop(row.id, None) or Follower(row)
            found.row, found.cells = row, CELLS // max(len(self._followers), HELD)
            try:
                await self._go_on(found)
            except JobError as error:
                self._problems[row.id] = (time.monotonic() + DOUBT_S, str(error))
                raise
            self._followers[row.id] = found
        self._summaries[row.id] = ((row.status, row.epoch), await self.aside(found.summary))
        self._trim()
        return found

    async def _go_on(self, found: Follower) -> None:
        """Read the facts that a follower has not had, piece by piece, so that others get their turn."""
        while True:
            if await self.aside(lambda: self._piece(found)) < PIECE:
                return

    def _piece(self, found: Follower) -> int:
        count = 0
        for seq, at, fact in self._read().facts(found.row.id, found.seq, PIECE):
            found.add_fact(seq, at, fact)
            count += 1
        return count

    def _trim(self) -> None:
        """Forget runs that are gone, and the details of those that have ended but for the HELD asked for last."""
        rows = {} if self._runs is None else {row.id: row.status for row in self._runs[1].rows}
        ended = [id for id in self._followers if rows.get(id) in ENDED]
        for id in [*ended[:-HELD], *(self._followers.keys() - rows.keys())]:
            del self._followers[id]
        for id in self._summaries.keys() - rows.keys():
            del self._summaries[id]

    async def held(self, run: str) -> Follower | None:
        """A run with its details, if its log has been read before; else it is read, and a change told when it has been.

        Raises:
            StoreError: there is no such run.
            JobError: its log cannot be read.
        """
        if run in self._followers or run in self._problems:
            return await self.follower(run)
        self._wanted[run] = None
        self._wish.set()
        return None

    async def summary(self, row: Row) -> dict[str, Any]:
        """Values of a run for the list of runs; {}: they are not known yet; "problem": why its log cannot be read."""
        known = self._summaries.get(row.id)
        if row.status in ENDED:
            return known[1] if known is not None and known[0] == (row.status, row.epoch) else {}
        try:
            found = await self.held(row.id)
            return {} if found is None else await self.aside(found.summary)
        except JobError as error:
            return {"problem": str(error)}

    async def read_logs(self) -> None:
        """Read the logs that were asked for, then those of ended runs for their summaries, the latest first."""
        while not self._closing:
            self._wish.clear()
            while not self._closing and await self._read_one():
                self.changes["runs"] += 1
                self._tell()
            await self._wish.wait()

    async def _read_one(self) -> bool:
        """Read one log that is wanted or not summed up yet; False: there is none."""
        if self._wanted:
            run = next(iter(self._wanted))
            with contextlib.suppress(FedquiltError):  # whoever asks again is told why
                await self.follower(run)
            self._wanted.pop(run, None)
            return True
        try:
            rows = [row for row in (await self.runs()).rows if isinstance(row, Row) and row.status in ENDED]
        except FedquiltError:
            return False
        unknown = [row for row in rows if self._summaries.get(row.id, (None,))[0] != (row.status, row.epoch)]
        if not unknown:
            return False
        row, told = unknown[-1], {}
        try:
            found = Follower(row, 0)  # no details
            await self._go_on(found)
            told = await self.aside(found.summary)
        except FedquiltError as error:
            told = {"problem": str(error)}
        self._summaries[row.id] = ((row.status, row.epoch), told)
        return True

    async def parts(self, found: Follower, round: int) -> Mapping[str, why.Part] | None:
        """The parts of all devices in a round; None: there has been no such round."""
        if (held := await self.aside(lambda: dict(found.parts.get(round, {})))) or round in found.parts:
            return held
        if found.first is None or not found.first <= round <= found.state.round:
            return None
        id, plan = found.row.id, Plan.of(found.row.job)

        def read() -> Mapping[str, why.Part] | None:
            return part_of((fact for _, _, fact in self._read().facts(id)), plan, round)

        return await self.aside(read)

    async def aside(self, read: Callable[[], T]) -> T:
        """Call a function in the thread that brings followers up to date, so that they stand still meanwhile."""
        return await self._in("runs", read)

    # -- within --

    def _read(self) -> Reader:
        """The reader of this home, opened anew where another database was put there; called in its thread."""
        before = self._reader_of
        try:
            self._reader_of = found = Identity.of(self.home / store_reader.NAME)
        except OSError as error:
            self._drop()
            raise StoreError(f"no runs in {self.home}: {error.strerror}") from None
        if before is not None and before != found:
            self._drop()
            if before[:2] != found[:2]:  # another database: what was followed is not in it
                self._followers.clear()
                self._summaries.clear()
        if self._reader is None:
            self._reader = Reader(self.home)
        return self._reader

    def _drop(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _in(self, name: str, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], read)


class MissingRunError(StoreError):
    """A run that is not there, or not any more."""
