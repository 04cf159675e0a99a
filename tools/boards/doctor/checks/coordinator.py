"""Checks of a coordinator's folder: access, database, blobs and unfinished jobs."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded
from fedquilt.coordinator.storage.rows import UnreadableRow
from fedquilt.coordinator.storage.store import UNDER_WAY, Store, StoredJob
from fedquilt.coordinator.views.event_messages import format_single_event
from fedquilt.core import FedquiltError, JobError
from fedquilt.host.disk import REAL
from fedquilt.tools.boards.doctor.findings import Finding, error, ok, warning
from fedquilt.tools.boards.doctor.folders import Free, free_bytes, nearest_existing

LOW_BYTES: Final = 10**9
LEAST_BYTES: Final = 100 * 10**6
CHECK_S: Final = 4.0  # for the database; a larger one is looked at in part
SHOWN: Final = 3
OTHER_VERSION: Final = "use the fedquilt that made it, or another --home"


def check_coordinator(home: Path, free: Free = free_bytes) -> list[Finding]:
    """Check a coordinator's folder without creating or changing files."""
    database = home / "fedquilt.db"
    place = nearest_existing(home)
    if not os.access(place, os.W_OK | os.X_OK):
        said = f"the coordinator's folder {home} cannot be written by this user"
        return [error("FQ501", said, f"sudo chown -R $USER {place}")]
    told = [check_free_space(place, free)]
    if not database.is_file():
        said = f"no runs in {home}" if home.is_dir() else f"there is no folder {home}"
        return [warning("FQ502", f"{said}: this coordinator has never run", f"fedquilt serve --home {home}"), *told]
    if not _can_lock(home / "lock"):
        said = f"{home / 'lock'} cannot be opened by this user: a coordinator cannot be started here"
        told.append(error("FQ503", said, f"sudo chown $USER {home / 'lock'}"))
    if finding := check_folder_mode(home):
        told.append(finding)
    broken = check_database(database)
    if broken.severity != "ok":
        return [*told, broken]
    told.append(broken)
    try:
        with Store(home) as store:
            return [*told, *find_unreadable_jobs(store), *check_waiting_jobs(home, store), *_check_blobs(store)]
    except FedquiltError as problem:
        return [*told, error("FQ504", str(problem), OTHER_VERSION)]


def check_folder_mode(home: Path) -> Finding | None:
    """Check that users outside the folder's group have no access."""
    mode = home.stat().st_mode & 0o777
    if not mode & 0o005:
        return None
    said = f"every user of this machine can read the models and updates in {home} (mode {mode:04o})"
    return warning("FQ512", said, f"chmod o-rwx {home}")


def find_unreadable_jobs(store: Store) -> list[Finding]:
    """Return an error for each job that this version cannot read."""
    said = [row.reason for row in store.all_jobs() if isinstance(row, UnreadableRow)]
    for row in store.readable_jobs():
        try:
            for _ in store.read_events(row.id):
                pass
        except JobError as problem:
            said.append(str(problem))
    return [error("FQ504", reason, OTHER_VERSION) for reason in said]


def check_free_space(place: Path, free: Free) -> Finding:
    left = free(place)
    said = f"{left / 1e6:.0f} MB are free where {place} is"
    mend = f"sudo du -xh {place} | sort -h | tail"
    if left < LEAST_BYTES:
        return error("FQ505", f"{said}: updates cannot be stored", mend)
    if left < LOW_BYTES:
        return warning("FQ505", f"{said}: each round keeps its updates until it is closed", mend)
    return ok("FQ505", said)


def check_database(database: Path) -> Finding:
    """Run SQLite's quick check, for at most `CHECK_S` seconds."""
    until_s = time.monotonic() + CHECK_S
    mend = f"mv {database} {database}.damaged, or put back a copy of the whole folder"
    try:
        line = sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, timeout=2.0)
    except sqlite3.Error as problem:
        return error("FQ506", f"{database} cannot be opened: {problem}", mend)
    try:
        line.set_progress_handler(lambda: int(time.monotonic() > until_s), 10_000)
        said = [str(row[0]) for row in line.execute("pragma quick_check(3)")]
    except sqlite3.OperationalError as problem:
        if "interrupted" in str(problem):
            return ok("FQ506", f"{database} is too large to be looked at in whole; no damage in what was seen")
        return error("FQ506", f"{database} cannot be read: {problem}", mend)
    except sqlite3.DatabaseError as problem:
        return error("FQ506", f"{database} is damaged: {problem}", mend)
    finally:
        line.close()
    if said != ["ok"]:
        return error("FQ506", f"{database} is damaged: {'; '.join(said)}", mend)
    return ok("FQ506", f"{database} is whole")


def check_waiting_jobs(home: Path, store: Store) -> list[Finding]:
    """Return findings on unfinished jobs that make no progress, and on the coordinator process."""
    open_ = [row for row in store.readable_jobs() if row.status in (*UNDER_WAY, "stopping")]
    names = ", ".join(row.id for row in open_[:SHOWN]) + (" ..." if len(open_) > SHOWN else "")
    if not store.is_served():
        if open_:
            said = f"{len(open_)} unfinished in {home} ({names}), and no coordinator serves it"
            return [warning("FQ507", said, f"fedquilt serve --home {home}")]
        return [ok("FQ507", f"nothing waits in {home}; no coordinator serves it now")]
    told = [ok("FQ507", f"a coordinator serves {home}")]
    running = [row for row in open_ if row.status != "queued"]
    told += [finding for row in running[:SHOWN] if (finding := _check_stuck_job(row, store)) is not None]
    if running and (queued := [row.id for row in open_ if row not in running]):
        behind, limit = ", ".join(queued[:SHOWN]), "limits.toml of the home says how many run at once"
        told.append(ok("FQ508", f"{len(queued)} wait for a place behind {len(running)} that run ({behind}): {limit}"))
    return told


def _check_stuck_job(row: StoredJob, store: Store) -> Finding | None:
    last = None
    asked = 0
    with contextlib.suppress(JobError):  # of a log that cannot be read, which is a finding of its own
        for _, _, fact in store.read_events(row.id):
            if isinstance(fact, EligibilityRecorded):
                last = fact
            elif isinstance(fact, CohortSelected):
                asked, last = asked + 1, None
    cohort = row.job.cohort
    need = max(cohort.min_devices, 1 if asked else cohort.start_devices, 1)
    why = "; ".join(format_single_event(last)) if last is not None else "no device has come online"
    if asked and last is None:
        return None
    if last is not None and len(last.eligible) >= need:
        return None
    said = f"{row.id} waits for {need} device{'s' if need > 1 else ''} that can take part: {why}"
    return warning("FQ509", said, "on a board that is missing: fedquilt doctor /etc/fedquilt/agent.toml")


def _check_blobs(store: Store) -> list[Finding]:
    told = []
    for row in store.readable_jobs():
        if row.status in UNDER_WAY and not (row.bundle / "bundle.json").is_file():
            said = f"the bundle of {row.id} is gone: {row.bundle}"
            told.append(error("FQ510", said, f"fedquilt prepare JOB.toml --out {row.bundle}"))
    lost = sorted(one for one in store.latest_state_hashes() if not _is_blob_intact(store.depot.folder / one, one))
    if lost:
        said = (
            f"{len(lost)} states of runs are missing or damaged in {store.depot.folder} ({lost[0][:12]} ...): "
            "these cannot go on"
        )
        told.append(error("FQ511", said, "put back a copy of the whole folder, or run these jobs anew with --new"))
    return told


def _is_blob_intact(path: Path, sha256: str) -> bool:
    # unlike the blob store, this does not move a damaged blob
    try:
        return REAL.hash_file(path) == sha256
    except OSError:
        return False


def _can_lock(lock: Path) -> bool:
    return not lock.exists() or os.access(lock, os.W_OK)
