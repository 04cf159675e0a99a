"""Checks of a coordinator's folder: whether it can be used, is whole, and what waits in it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from fedquilt.coordinator.facts import Asked, Surveyed
from fedquilt.coordinator.store import UNDER_WAY, Row, Store
from fedquilt.coordinator.store_rows import Unreadable
from fedquilt.coordinator.views.log import sentences
from fedquilt.core import FedquiltError, JobError
from fedquilt.disk import REAL
from fedquilt.tools.doctor.findings import Finding, error, ok, warning
from fedquilt.tools.doctor.folders import Free, existing, free_bytes

LOW_BYTES: Final = 10**9
LEAST_BYTES: Final = 100 * 10**6
CHECK_S: Final = 4.0  # for the database; a larger one is looked at in part
SHOWN: Final = 3
OTHER_VERSION: Final = "use the fedquilt that made it, or another --home"


def check(home: Path, free: Free = free_bytes) -> list[Finding]:
    """All findings about the folder. Nothing in it is made or changed."""
    database = home / "fedquilt.db"
    place = existing(home)
    if not os.access(place, os.W_OK | os.X_OK):
        said = f"the coordinator's folder {home} cannot be written by this user"
        return [error("FQ501", said, f"sudo chown -R $USER {place}")]
    told = [room(place, free)]
    if not database.is_file():
        said = f"no runs in {home}" if home.is_dir() else f"there is no folder {home}"
        return [warning("FQ502", f"{said}: this coordinator has never run", f"fedquilt serve --home {home}"), *told]
    if not _lockable(home / "lock"):
        said = f"{home / 'lock'} cannot be opened by this user: a coordinator cannot be started here"
        told.append(error("FQ503", said, f"sudo chown $USER {home / 'lock'}"))
    if finding := open_to_others(home):
        told.append(finding)
    broken = integrity(database)
    if broken.severity != "ok":
        return [*told, broken]
    told.append(broken)
    try:
        with Store(home) as store:
            return [*told, *unreadable(store), *waiting(home, store), *_whole(store)]
    except FedquiltError as problem:
        return [*told, error("FQ504", str(problem), OTHER_VERSION)]


def open_to_others(home: Path) -> Finding | None:
    """Check that only the owner, and whoever the owner's group is, can look into a folder; None: it is so."""
    mode = home.stat().st_mode & 0o777
    if not mode & 0o005:
        return None
    said = f"every user of this machine can read the models and updates in {home} (mode {mode:04o})"
    return warning("FQ512", said, f"chmod o-rwx {home}")


def unreadable(store: Store) -> list[Finding]:
    """Runs that this version cannot read."""
    said = [row.reason for row in store.all_jobs() if isinstance(row, Unreadable)]
    for row in store.jobs():
        try:
            for _ in store.facts(row.id):
                pass
        except JobError as problem:
            said.append(str(problem))
    return [error("FQ504", reason, OTHER_VERSION) for reason in said]


def room(place: Path, free: Free) -> Finding:
    """Check the free space where the home is."""
    left = free(place)
    said = f"{left / 1e6:.0f} MB are free where {place} is"
    mend = f"sudo du -xh {place} | sort -h | tail"
    if left < LEAST_BYTES:
        return error("FQ505", f"{said}: updates cannot be stored", mend)
    if left < LOW_BYTES:
        return warning("FQ505", f"{said}: each round keeps its updates until it is closed", mend)
    return ok("FQ505", said)


def integrity(database: Path) -> Finding:
    """SQLite's own quick check, for some seconds at most."""
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


def waiting(home: Path, store: Store) -> list[Finding]:
    """Jobs that ought to be going on and are not, and why."""
    open_ = [row for row in store.jobs() if row.status in (*UNDER_WAY, "stopping")]
    names = ", ".join(row.id for row in open_[:SHOWN]) + (" ..." if len(open_) > SHOWN else "")
    if not store.served():
        if open_:
            said = f"{len(open_)} unfinished in {home} ({names}), and no coordinator serves it"
            return [warning("FQ507", said, f"fedquilt serve --home {home}")]
        return [ok("FQ507", f"nothing waits in {home}; no coordinator serves it now")]
    told = [ok("FQ507", f"a coordinator serves {home}")]
    running = [row for row in open_ if row.status != "queued"]
    told += [finding for row in running[:SHOWN] if (finding := _stuck(row, store)) is not None]
    if running and (queued := [row.id for row in open_ if row not in running]):
        behind, limit = ", ".join(queued[:SHOWN]), "limits.toml of the home says how many run at once"
        told.append(ok("FQ508", f"{len(queued)} wait for a place behind {len(running)} that run ({behind}): {limit}"))
    return told


def _stuck(row: Row, store: Store) -> Finding | None:
    """A job that runs, and has not asked anybody since it last looked who can be asked."""
    last = None
    asked = 0
    with contextlib.suppress(JobError):  # of a log that cannot be read, which is a finding of its own
        for _, _, fact in store.facts(row.id):
            if isinstance(fact, Surveyed):
                last = fact
            elif isinstance(fact, Asked):
                asked, last = asked + 1, None
    cohort = row.job.cohort
    need = max(cohort.min_devices, 1 if asked else cohort.start_devices, 1)
    why = "; ".join(sentences(last)) if last is not None else "no device has come online"
    if asked and last is None:
        return None
    if last is not None and len(last.eligible) >= need:
        return None
    said = f"{row.id} waits for {need} device{'s' if need > 1 else ''} that can take part: {why}"
    return warning("FQ509", said, "on a board that is missing: fedquilt doctor /etc/fedquilt/agent.toml")


def _whole(store: Store) -> list[Finding]:
    """Check that the blobs of unfinished jobs and of results exist, and are what was stored."""
    told = []
    for row in store.jobs():
        if row.status in UNDER_WAY and not (row.bundle / "bundle.json").is_file():
            said = f"the bundle of {row.id} is gone: {row.bundle}"
            told.append(error("FQ510", said, f"fedquilt prepare JOB.toml --out {row.bundle}"))
    lost = sorted(one for one in store.states() if not _sound(store.depot.folder / one, one))
    if lost:
        said = (
            f"{len(lost)} states of runs are missing or damaged in {store.depot.folder} ({lost[0][:12]} ...): "
            "these cannot go on"
        )
        told.append(error("FQ511", said, "put back a copy of the whole folder, or run these jobs anew with --new"))
    return told


def _sound(path: Path, sha256: str) -> bool:
    """Whether a blob is what its name says; unlike the depot, this leaves a damaged one where it is."""
    try:
        return REAL.digest(path) == sha256
    except OSError:
        return False


def _lockable(lock: Path) -> bool:
    return not lock.exists() or os.access(lock, os.W_OK)
