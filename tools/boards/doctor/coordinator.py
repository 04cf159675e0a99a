"""Checks of a coordinator's folder: access, database, blobs and unfinished jobs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fedquilt.console import units
from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded
from fedquilt.coordinator.storage.rows import DamagedRunError, UnreadableRow
from fedquilt.coordinator.storage.store import UNDER_WAY, Store, StoredJob, open_store
from fedquilt.coordinator.views.devices import describe_outage
from fedquilt.coordinator.views.event_messages import format_single_event
from fedquilt.core import FedquiltError, JobError
from fedquilt.host.disk import REAL
from fedquilt.tools.boards.doctor.findings import Numbered, Problem, error
from fedquilt.tools.boards.doctor.machine_facts import FreeBytes, free_bytes, nearest_existing

LOW_BYTES: Final = 10**9
MIN_FREE_BYTES: Final = 100 * 10**6
DATABASE_CHECK_S: Final = 4.0  # large databases are checked in part
MAX_NAMES: Final = 3
VERSION_FIX: Final = "use the version of fedquilt that wrote the folder, or another --home"
DAMAGE_FIX: Final = "restore a backup of the whole folder, or begin with an empty one"


def check_coordinator(home: Path, free: FreeBytes = free_bytes) -> Iterator[Numbered]:
    """Yield findings on a coordinator's home, up to damage that prevents further checks. Only read files."""
    database, existing = home / "fedquilt.db", nearest_existing(home)
    if not os.access(existing, os.W_OK | os.X_OK):
        sentence = f"coordinator's home {home} is not writable by this user"
        yield "FQ501", error(sentence, f"sudo chown -R $USER {existing}")
        return
    yield "FQ505", _check_free_space(existing, free)
    if not database.is_file():
        sentence = f"home {home} is {'empty' if home.is_dir() else 'missing'}: this coordinator has never run"
        yield "FQ502", Problem(sentence, f"fedquilt serve --home {home}")
        return
    lock = home / "lock"
    if lock.exists() and not os.access(lock, os.W_OK):
        sentence = f"{lock} is not writable by this user: no coordinator can start"
        yield "FQ503", error(sentence, f"sudo chown $USER {lock}")
    if (mode := home.stat().st_mode & 0o777) & 0o005:
        sentence = f"all users of this machine can read the models and updates in {home} (mode {mode:04o})"
        yield "FQ512", Problem(sentence, f"chmod o-rwx {home}")
    yield "FQ506", (database_verdict := _check_database(database))
    if isinstance(database_verdict, Problem):
        return
    try:
        with open_store(home) as store:
            yield from _check_event_logs(store)
            yield from _check_waiting_jobs(home, store)
            yield from _check_blobs(store)
    except FedquiltError as problem:
        yield "FQ504", error(str(problem), VERSION_FIX)


def _check_event_logs(store: Store) -> Iterator[Numbered]:
    def unreadable(reason: str, is_damaged: bool) -> Numbered:
        return "FQ504", error(reason, DAMAGE_FIX if is_damaged else VERSION_FIX)

    for row in store.all_jobs():
        if isinstance(row, UnreadableRow):
            yield unreadable(row.reason, row.damaged)
            continue
        try:
            for _ in store.read_events(row.id):
                pass
        except JobError as problem:
            yield unreadable(str(problem), isinstance(problem, DamagedRunError))
    for damage in store.rollouts.read_errors().values():
        yield unreadable(str(damage), isinstance(damage, DamagedRunError))


def _check_free_space(folder: Path, free: FreeBytes) -> str | Problem:
    free_space = free(folder)
    sentence = f"the disk of {folder} has {free_space / 1e6:.0f} MB free"
    fix = f"sudo du -xh {folder} | sort -h | tail"
    if free_space < MIN_FREE_BYTES:
        return error(f"{sentence}: updates cannot be stored", fix)
    if free_space < LOW_BYTES:
        return Problem(f"{sentence}: a round stores its updates until it is closed", fix)
    return sentence


def _check_database(database: Path) -> str | Problem:
    deadline_s = time.monotonic() + DATABASE_CHECK_S
    fix = f"restore a backup of the whole folder, or mv {database} {database}.damaged"
    try:
        uri = f"{database.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=2.0)) as connection:
            connection.set_progress_handler(lambda: int(time.monotonic() > deadline_s), 10_000)
            results = [str(row[0]) for row in connection.execute("pragma quick_check(3)")]
    except sqlite3.OperationalError as problem:
        if "interrupted" in str(problem):
            return f"{database} is too large to be checked completely; the checked part is intact"
        return error(f"{database} cannot be read: {problem}", fix)
    except sqlite3.DatabaseError as problem:
        return error(f"{database} is damaged: {problem}", fix)
    return f"{database} is intact" if results == ["ok"] else error(f"{database} is damaged: {'; '.join(results)}", fix)


def _check_waiting_jobs(home: Path, store: Store) -> Iterator[Numbered]:
    unfinished = [row for row in store.readable_jobs() if row.status in (*UNDER_WAY, "stopping")]
    names = ", ".join(row.id for row in unfinished[:MAX_NAMES]) + (" ..." if len(unfinished) > MAX_NAMES else "")
    last_write = f"the last write was {units.format_duration(time.time() - _last_write_s(home))} ago"
    if not store.is_served():
        sentence = f"no coordinator serves {home} ({last_write}), but runs are unfinished: {names}"
        problem = Problem(sentence, f"fedquilt serve --home {home}")
        yield "FQ507", problem if unfinished else f"no run waits in {home}, and no coordinator is running"
        return
    yield "FQ507", f"a coordinator serves {home}; {last_write}"
    if outage := describe_outage(home, time.time()):
        sentence = f"the coordinator waits for {outage}"
        yield "FQ513", error(sentence, f"fedquilt doctor --home {home} --broker URL; and see the coordinator's log")
    running = [row for row in unfinished if row.status != "queued"]
    for row in running[:MAX_NAMES]:
        if (stuck := _check_stuck_job(row, store)) is not None:
            yield "FQ509", stuck
    if running and (queued := [row.id for row in unfinished if row not in running]):
        names, hint = ", ".join(queued[:MAX_NAMES]), "limits.toml of the home sets how many run at once"
        yield "FQ508", f"queued behind {len(running)} running: {names} ({hint})"


def _last_write_s(home: Path) -> float:
    """Return the latest modification of the databases, in wall-clock seconds."""
    files = [home / f"{name}{suffix}" for name in ("fedquilt.db", "boards.db") for suffix in ("", "-wal")]
    return max(file.stat().st_mtime for file in files if file.exists())


def _check_stuck_job(row: StoredJob, store: Store) -> Problem | None:
    latest, attempts = None, 0
    with contextlib.suppress(JobError):  # unreadable logs are reported as FQ504
        for _, _, event in store.read_events(row.id):
            if isinstance(event, EligibilityRecorded):
                latest = event
            elif isinstance(event, CohortSelected):
                attempts, latest = attempts + 1, None
    cohort = row.job.cohort
    min_devices = max(cohort.min_devices, 1 if attempts else cohort.start_devices, 1)
    if (attempts and latest is None) or (latest is not None and len(latest.eligible) >= min_devices):
        return None
    reason = "; ".join(format_single_event(latest)) if latest is not None else "no device has come online"
    sentence = f"{row.id} waits for {min_devices} eligible device{'s' if min_devices > 1 else ''}: {reason}"
    return Problem(sentence, "on a missing board: fedquilt doctor /etc/fedquilt/agent.toml")


def _check_blobs(store: Store) -> Iterator[Numbered]:
    for row in store.readable_jobs():
        if row.status in UNDER_WAY and not (row.bundle / "bundle.json").is_file():
            sentence = f"bundle {row.bundle} of run {row.id} is missing"
            yield "FQ510", error(sentence, f"restore {row.bundle}, or fedquilt prune {row.id} and run its job again")
    missing = sorted(
        digest
        for digest in store.latest_state_hashes()
        if not _is_blob_intact(store.blob_store.folder / digest, digest)
    )
    if missing:
        sentence = (
            f"{len(missing)} states of runs are missing or damaged in {store.blob_store.folder} ({missing[0][:12]} "
            "...): these runs cannot continue"
        )
        yield "FQ511", error(sentence, "restore a backup of the whole folder, or `fedquilt prune` these runs")


def _is_blob_intact(path: Path, sha256: str) -> bool:
    # unlike the blob store, this does not move a damaged blob
    try:
        return REAL.hash_file(path) == sha256
    except OSError:
        return False
