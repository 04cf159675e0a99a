"""Checks of a coordinator's folder: access, database, blobs and unfinished jobs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded
from fedquilt.coordinator.storage.rows import DamagedRunError, UnreadableRow
from fedquilt.coordinator.storage.store import UNDER_WAY, Store, StoredJob, open_store
from fedquilt.coordinator.views.event_messages import format_single_event
from fedquilt.core import FedquiltError, JobError
from fedquilt.host.disk import REAL
from fedquilt.tools.boards.doctor.findings import Numbered, Problem, error
from fedquilt.tools.boards.doctor.machine_facts import Free, free_bytes, nearest_existing

LOW_BYTES: Final = 10**9
LEAST_BYTES: Final = 100 * 10**6
CHECK_S: Final = 4.0  # for the database; a larger one is looked at in part
SHOWN: Final = 3
OTHER_VERSION: Final = "use the fedquilt that made it, or another --home"
DAMAGED: Final = "put back a copy of the whole folder, or begin it anew"


def check_coordinator(home: Path, free: Free = free_bytes) -> Iterator[Numbered]:
    """Check a coordinator's folder without creating or changing files, up to a damage that hides the rest."""
    database, place = home / "fedquilt.db", nearest_existing(home)
    if not os.access(place, os.W_OK | os.X_OK):
        said = f"the coordinator's folder {home} cannot be written by this user"
        yield "FQ501", error(said, f"sudo chown -R $USER {place}")
        return
    yield "FQ505", _check_free_space(place, free)
    if not database.is_file():
        said = f"no runs in {home}" if home.is_dir() else f"there is no folder {home}"
        yield "FQ502", Problem(f"{said}: this coordinator has never run", f"fedquilt serve --home {home}")
        return
    lock = home / "lock"
    if lock.exists() and not os.access(lock, os.W_OK):
        said = f"{lock} cannot be opened by this user: a coordinator cannot be started here"
        yield "FQ503", error(said, f"sudo chown $USER {lock}")
    if (mode := home.stat().st_mode & 0o777) & 0o005:
        said = f"every user of this machine can read the models and updates in {home} (mode {mode:04o})"
        yield "FQ512", Problem(said, f"chmod o-rwx {home}")
    yield "FQ506", (found := _check_database(database))
    if isinstance(found, Problem):
        return
    try:
        with open_store(home) as store:
            for reason, damaged in _unreadable_logs(store):
                yield "FQ504", error(reason, DAMAGED if damaged else OTHER_VERSION)
            yield from _check_waiting_jobs(home, store)
            yield from _check_blobs(store)
    except FedquiltError as problem:
        yield "FQ504", error(str(problem), OTHER_VERSION)


def _unreadable_logs(store: Store) -> Iterator[tuple[str, bool]]:
    for row in store.all_jobs():
        if isinstance(row, UnreadableRow):
            yield row.reason, row.damaged
            continue
        try:
            for _ in store.read_events(row.id):
                pass
        except JobError as problem:
            yield str(problem), isinstance(problem, DamagedRunError)
    for why in store.rollouts.read_errors().values():
        yield str(why), isinstance(why, DamagedRunError)


def _check_free_space(place: Path, free: Free) -> str | Problem:
    left = free(place)
    said, fix = f"{left / 1e6:.0f} MB are free where {place} is", f"sudo du -xh {place} | sort -h | tail"
    if left < LEAST_BYTES:
        return error(f"{said}: updates cannot be stored", fix)
    if left < LOW_BYTES:
        return Problem(f"{said}: each round keeps its updates until it is closed", fix)
    return said


def _check_database(database: Path) -> str | Problem:
    until_s = time.monotonic() + CHECK_S
    fix = f"mv {database} {database}.damaged, or put back a copy of the whole folder"
    try:
        uri = f"{database.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=2.0)) as line:
            line.set_progress_handler(lambda: int(time.monotonic() > until_s), 10_000)
            said = [str(row[0]) for row in line.execute("pragma quick_check(3)")]
    except sqlite3.OperationalError as problem:
        if "interrupted" in str(problem):
            return f"{database} is too large to be looked at in whole; no damage in what was seen"
        return error(f"{database} cannot be read: {problem}", fix)
    except sqlite3.DatabaseError as problem:
        return error(f"{database} is damaged: {problem}", fix)
    return f"{database} is whole" if said == ["ok"] else error(f"{database} is damaged: {'; '.join(said)}", fix)


def _check_waiting_jobs(home: Path, store: Store) -> Iterator[Numbered]:
    open_ = [row for row in store.readable_jobs() if row.status in (*UNDER_WAY, "stopping")]
    names = ", ".join(row.id for row in open_[:SHOWN]) + (" ..." if len(open_) > SHOWN else "")
    if not store.is_served():
        said = f"{len(open_)} unfinished in {home} ({names}), and no coordinator serves it"
        waits = Problem(said, f"fedquilt serve --home {home}")
        yield "FQ507", waits if open_ else f"nothing waits in {home}; no coordinator serves it now"
        return
    yield "FQ507", f"a coordinator serves {home}"
    running = [row for row in open_ if row.status != "queued"]
    for row in running[:SHOWN]:
        if (stuck := _check_stuck_job(row, store)) is not None:
            yield "FQ509", stuck
    if running and (queued := [row.id for row in open_ if row not in running]):
        behind, limit = ", ".join(queued[:SHOWN]), "limits.toml of the home says how many run at once"
        yield "FQ508", f"{len(queued)} wait for a place behind {len(running)} that run ({behind}): {limit}"


def _check_stuck_job(row: StoredJob, store: Store) -> Problem | None:
    last, asked = None, 0
    with contextlib.suppress(JobError):  # of a log that cannot be read, which is a finding of its own
        for _, _, fact in store.read_events(row.id):
            if isinstance(fact, EligibilityRecorded):
                last = fact
            elif isinstance(fact, CohortSelected):
                asked, last = asked + 1, None
    cohort = row.job.cohort
    need = max(cohort.min_devices, 1 if asked else cohort.start_devices, 1)
    if (asked and last is None) or (last is not None and len(last.eligible) >= need):
        return None
    why = "; ".join(format_single_event(last)) if last is not None else "no device has come online"
    said = f"{row.id} waits for {need} device{'s' if need > 1 else ''} that can take part: {why}"
    return Problem(said, "on a board that is missing: fedquilt doctor /etc/fedquilt/agent.toml")


def _check_blobs(store: Store) -> Iterator[Numbered]:
    for row in store.readable_jobs():
        if row.status in UNDER_WAY and not (row.bundle / "bundle.json").is_file():
            said = f"the bundle of {row.id} is gone: {row.bundle}"
            yield "FQ510", error(said, f"put {row.bundle} back, or fedquilt prune {row.id} and run its job again")
    lost = sorted(one for one in store.latest_state_hashes() if not _is_blob_intact(store.blob_store.folder / one, one))
    if lost:
        said = (
            f"{len(lost)} states of runs are missing or damaged in {store.blob_store.folder} ({lost[0][:12]} ...): "
            "these cannot go on"
        )
        yield "FQ511", error(said, "put back a copy of the whole folder, or `fedquilt prune` these runs")


def _is_blob_intact(path: Path, sha256: str) -> bool:
    # unlike the blob store, this does not move a damaged blob
    try:
        return REAL.hash_file(path) == sha256
    except OSError:
        return False
