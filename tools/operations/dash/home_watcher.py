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
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from fedquilt.coordinator.fleet import device_status
from fedquilt.coordinator.rounds.events import ENDED_PHASES
from fedquilt.coordinator.rounds.job_state import JobConstants
from fedquilt.coordinator.storage.rollout_log import RolloutLog
from fedquilt.coordinator.storage.rows import DatabaseIdentity, UnreadableRow
from fedquilt.coordinator.storage.store import NAME, ChangeDetector, StoredJob, StoreReader
from fedquilt.coordinator.views import devices, job_changes, round_outcomes, scores
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.tools.operations.dash.run_follower import MAX_CELLS, RunFollower, find_round_outcomes

T = TypeVar("T")

POLL_S: Final = 0.2  # interval of checking for writes
FLEET_PAUSE_RATIO: Final = 1.5  # pause between reads of all devices, relative to their duration
MAX_EVENTS: Final = 1000  # events read at once
MAX_ENDED_FOLLOWERS: Final = 4  # ended runs with details, most recently requested
MAX_LABELS: Final = 100
FLEET_MAX_AGE_S: Final = 15.0  # readings become outdated without a change
RETRY_S: Final = 30.0  # pause after an unreadable log
KEEPALIVE_S: Final = 15.0  # idle event streams get a comment, so that both ends detect a lost connection


class RunList(NamedTuple):
    rows: list[StoredJob | UnreadableRow]
    statuses: Mapping[str, str]  # run -> status
    is_served: bool
    wait_reasons: Mapping[str, str]  # suspended or interrupted run -> reason
    changes: Mapping[str, str]  # run -> what differs from the previous run of the job


class FleetView(NamedTuple):
    device_rows: list[devices.DeviceRow]
    counts: Mapping[str, int]  # state or "all" -> number
    labels: list[str]  # at most MAX_LABELS
    change_number: int
    read_s: float  # monotonic time
    took_s: float


class HomeWatcher:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.changes = {"boards": 0, "runs": 0}
        self._change_event = asyncio.Event()
        self._closing = False
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("boards", "runs")}
        self._change_detectors: dict[str, ChangeDetector] = {}
        self._versions: dict[str, object] = {}
        self._reader: StoreReader | None = None
        self._reader_identity: DatabaseIdentity | None = None
        self._fleet: FleetView | None = None
        self._runs: tuple[int, RunList] | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._followers: dict[str, RunFollower] = {}  # least recently requested first
        self._problems: dict[str, tuple[float, str]] = {}  # run -> time of the next attempt, and error
        self._summaries: dict[
            str, tuple[object, dict[str, Any]]
        ] = {}  # run -> (status, epoch), and values of the list of runs
        self._is_served = False
        self._requested_runs: dict[str, None] = {}  # runs whose logs a viewer waits for
        self._read_requested = asyncio.Event()

    # -- changes --

    async def poll_databases(self) -> None:
        files = {"boards": device_status.NAME, "runs": NAME}
        while not self._closing:
            changed = False
            for name, file in files.items():
                version = await self._run_in_thread(name, lambda name=name, file=file: self._read_mark(name, file))  # type: ignore[misc]
                if version != self._versions.get(name, self) and not (name == "boards" and self._is_pausing()):
                    self._versions[name] = version
                    self.changes[name] += 1
                    changed = True
            if changed:
                self._read_requested.set()
                self._notify()
            await asyncio.sleep(POLL_S)

    def _is_pausing(self) -> bool:
        # reading all devices takes a while, so reads are spaced in proportion
        return (
            self._fleet is not None and time.monotonic() < self._fleet.read_s + FLEET_PAUSE_RATIO * self._fleet.took_s
        )

    def _read_mark(self, name: str, file: str) -> object:
        version = self._change_detectors.setdefault(name, ChangeDetector(self.home / file)).read_version()
        return (version, self._update_served()) if name == "runs" else version

    def _update_served(self) -> bool:
        try:
            self._is_served = self._get_current_reader().is_served()
        except StoreError:
            self._is_served = False
        return self._is_served

    def _notify(self) -> None:
        change_event, self._change_event = self._change_event, asyncio.Event()
        change_event.set()

    async def iterate_changes(self) -> AsyncGenerator[dict[str, int] | None, None]:
        """Yield the numbers of changes now and after each change, and None after KEEPALIVE_S without a change."""
        while not self._closing:
            change_event = self._change_event
            yield dict(self.changes)
            while not self._closing:
                try:
                    await asyncio.wait_for(change_event.wait(), KEEPALIVE_S)
                    break
                except asyncio.TimeoutError:
                    yield None

    def close(self) -> None:
        self._closing = True
        self._read_requested.set()
        self._notify()

    def close_databases(self) -> None:
        """Close the databases and stop the threads. Call after all reads have ended."""
        for name, thread in self._threads.items():
            if name in self._change_detectors:
                thread.submit(self._change_detectors[name].close)
            if name == "runs":
                thread.submit(self._close_reader)
            thread.shutdown()

    # -- boards --

    @property
    def is_served(self) -> bool:
        return self._is_served

    async def load_fleet(self) -> FleetView:
        async with self._get_lock("fleet"):
            change_number, started_s = self.changes["boards"], time.monotonic()
            if (
                self._fleet is None
                or self._fleet.change_number != change_number
                or started_s > self._fleet.read_s + FLEET_MAX_AGE_S
            ):
                fleet = await self._run_in_thread("boards", self._read_all_devices)
                ended_s = time.monotonic()
                self._fleet = FleetView(*fleet, change_number, ended_s, ended_s - started_s)
            return self._fleet

    def _read_all_devices(self) -> tuple[list[devices.DeviceRow], dict[str, int], list[str]]:
        device_rows = devices.load_devices(self.home)
        counts = Counter(name for row in device_rows for name in devices.matching_states(row))
        labels = sorted({label for row in device_rows for label in row.board.labels})[:MAX_LABELS]
        return device_rows, {name: counts[name] for name in devices.STATES} | {"all": len(device_rows)}, labels

    async def load_readings(self, device: str, begin_s: float, end_s: float) -> list[Any]:
        def read() -> list[Any]:
            with device_status.TelemetryStore(self.home) as store:
                return store.load_readings(device, begin_s, end_s)

        return await self._run_in_thread("boards", read)

    # -- runs --

    async def load_runs(self) -> RunList:
        async with self._get_lock("runs"):
            change_number = self.changes["runs"]
            if self._runs is None or self._runs[0] != change_number:
                self._runs = (change_number, await self._run_in_thread("runs", self._read_runs))
            return self._runs[1]

    def _read_runs(self) -> RunList:
        store = self._get_current_reader()
        rows = store.all_jobs()
        statuses = {row.id: store.current_status(row) if isinstance(row, StoredJob) else row.status for row in rows}
        suspended = store.suspensions.current_suspensions()
        wait_reasons = {run: str(hold) for run, hold in suspended.items() if statuses.get(run) == "held"}
        wait_reasons |= {
            row.id: f"its interrupted coordinator: {store.describe_resume(row)}"
            for row in rows
            if isinstance(row, StoredJob) and statuses[row.id] == "interrupted"
        }
        return RunList(rows, statuses, self._update_served(), wait_reasons, job_changes.describe_changes(rows))

    def open_rollout_log(self) -> RolloutLog:
        """Return the rollouts of the home. Use only in the thread of `run_in_reader_thread`."""
        return self._get_current_reader().rollouts

    async def find_run(self, run: str) -> StoredJob:
        """Return the latest run with this id or name. Raise StoreError if it is missing or its row is damaged."""
        rows = (await self.load_runs()).rows
        for row in reversed(rows):
            if isinstance(row, UnreadableRow) and run == row.id:
                raise StoreError(row.reason)
            if isinstance(row, StoredJob) and run in (row.id, row.job.name):
                return row
        raise NotFoundError(f"no run {run[:100]!r} in {self.home}")

    async def load_follower(self, run: str) -> RunFollower:
        """Return the follower of a run, by id or name, after reading all its events.

        Raise StoreError if there is no such run, or JobError if its log cannot be read. For RETRY_S after a JobError,
        the log is not read again.
        """
        row = await self.find_run(run)
        async with self._get_lock(row.id):
            retry_s, problem = self._problems.get(row.id, (0.0, ""))
            if time.monotonic() < retry_s:
                raise JobError(problem)
            follower = self._followers.pop(row.id, None) or RunFollower(row)
            follower.row, follower.max_cells = row, MAX_CELLS // max(len(self._followers), MAX_ENDED_FOLLOWERS)
            try:
                await self._read_new_events(follower)
            except JobError as error:
                self._problems[row.id] = (time.monotonic() + RETRY_S, str(error))
                raise
            self._followers[row.id] = follower
        self._summaries[row.id] = ((row.status, row.epoch), await self.run_in_reader_thread(follower.make_summary))
        self._forget_old_followers()
        return follower

    async def _read_new_events(self, follower: RunFollower) -> None:
        # in pieces, so that other reads get their turn
        while True:
            if await self.run_in_reader_thread(lambda: self._read_event_piece(follower)) < MAX_EVENTS:
                return

    def _read_event_piece(self, follower: RunFollower) -> int:
        count = 0
        for seq, time_s, event in self._get_current_reader().read_events(follower.row.id, follower.seq, MAX_EVENTS):
            follower.add_event(seq, time_s, event)
            count += 1
        return count

    def _forget_old_followers(self) -> None:
        rows = {} if self._runs is None else {row.id: row.status for row in self._runs[1].rows}
        ended_ids = [id for id in self._followers if rows.get(id) in ENDED_PHASES]
        for id in [*ended_ids[:-MAX_ENDED_FOLLOWERS], *(self._followers.keys() - rows.keys())]:
            del self._followers[id]
        for id in self._summaries.keys() - rows.keys():
            del self._summaries[id]

    async def get_loaded_follower(self, run: str) -> RunFollower | None:
        """Return the follower of a run if its log has been read, or None and schedule the read.

        After the read, "runs" in `changes` increases. Raise JobError if the log cannot be read.
        """
        if run in self._followers or run in self._problems:
            return await self.load_follower(run)
        self._requested_runs[run] = None
        self._read_requested.set()
        return None

    async def load_summary(self, row: StoredJob) -> dict[str, Any]:
        """Return a run's values for the list of runs, or {} if unknown so far.

        The key "problem" states why the log cannot be read.
        """
        cached_summary = self._summaries.get(row.id)
        if row.status in ENDED_PHASES:
            return (
                cached_summary[1] if cached_summary is not None and cached_summary[0] == (row.status, row.epoch) else {}
            )
        try:
            follower = await self.get_loaded_follower(row.id)
            return {} if follower is None else await self.run_in_reader_thread(follower.make_summary)
        except JobError as error:
            return {"problem": str(error)}

    async def add_stored_results(self, row: StoredJob, summary: dict[str, Any]) -> dict[str, Any]:
        stored = await self.run_in_reader_thread(partial(scores.read_scores, self.home, row))
        results = {"held_out": stored.held[-1].weighted} if stored.held else {}
        results |= {"test": stored.scores[-1].value} if stored.scores else {}
        return {**summary, "metric": {**summary["metric"], **results}} if "metric" in summary else summary

    async def read_logs(self) -> None:
        """Read requested logs, then those of ended runs, until the watcher is closed."""
        while not self._closing:
            self._read_requested.clear()
            while not self._closing and await self._read_next_log():
                self.changes["runs"] += 1
                self._notify()
            await self._read_requested.wait()

    async def _read_next_log(self) -> bool:
        # False if no run waits for its log to be read
        if self._requested_runs:
            run = next(iter(self._requested_runs))
            with contextlib.suppress(FedquiltError):  # the next request for the log reports the error
                await self.load_follower(run)
            self._requested_runs.pop(run, None)
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
        row, summary = unknown[-1], {}
        try:
            follower = RunFollower(row, 0)  # no details
            await self._read_new_events(follower)
            summary = await self.run_in_reader_thread(follower.make_summary)
        except FedquiltError as error:
            summary = {"problem": str(error)}
        self._summaries[row.id] = ((row.status, row.epoch), summary)
        return True

    async def load_round_outcomes(
        self, follower: RunFollower, round: int
    ) -> Mapping[str, round_outcomes.DeviceOutcome] | None:
        """Return the outcomes by device of a round (from 0), or None if the round does not exist."""
        if (
            stored_outcomes := await self.run_in_reader_thread(lambda: dict(follower.parts.get(round, {})))
        ) or round in follower.parts:
            return stored_outcomes
        if follower.first_round is None or not follower.first_round <= round <= follower.state.round:
            return None
        id, constants = follower.row.id, JobConstants.from_job(follower.row.job)

        def find_outcomes() -> Mapping[str, round_outcomes.DeviceOutcome] | None:
            return find_round_outcomes(
                (event for _, _, event in self._get_current_reader().read_events(id)), constants, round
            )

        return await self.run_in_reader_thread(find_outcomes)

    async def run_in_reader_thread(self, read: Callable[[], T]) -> T:
        """Call a function in the thread that updates followers, which do not change during the call."""
        return await self._run_in_thread("runs", read)

    # -- databases --

    def _get_current_reader(self) -> StoreReader:
        # opened again if the database file was replaced. Called in the reader thread
        old_identity = self._reader_identity
        try:
            self._reader_identity = identity = DatabaseIdentity.from_path(self.home / NAME)
        except OSError as error:
            self._close_reader()
            raise StoreError(f"no runs in {self.home}: {error.strerror}") from None
        if old_identity is not None and old_identity != identity:
            self._close_reader()
            if old_identity[:2] != identity[:2]:  # the database was replaced, so cached runs may not exist
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


class NotFoundError(StoreError): ...
