"""Removal of runs from a home: which are old, which files go with them, and leftovers of a killed removal.

A run leaves the list first, in one transaction; its files go afterwards. So at any moment of a kill
every listed run is whole, and leftover files belong to no run: the next removal sweeps them away.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.coordinator.garbage import GarbageCollector
from fedquilt.coordinator.job_logs import Log
from fedquilt.coordinator.limits import Retention
from fedquilt.coordinator.store import Row, Store
from fedquilt.coordinator.store_rows import Unreadable
from fedquilt.disk import REAL, doing

ENDED: Final = ("done", "failed", "stopped")
# folders with files named after runs, and their endings
_NAMED: Final = (("agents", ""), ("sites", ""), ("evaluations", ".json"), ("machines", ".json"))
_RUN: Final = re.compile(r".+-\d{8}-\d{6}(-[0-9a-f]{6})?")  # an id: agents without a coordinator use others


class Swept(NamedTuple):
    """Amount removed besides runs."""

    files: int
    bytes: int
    blobs_left: bool  # another coordinator serves the home: it drops the blobs with its next job


def find(store: Store, run: str) -> Row | Unreadable:
    """Find a run by its id, even if this version cannot read it; a job's name stands for its latest run.

    Raises:
        StoreError: there is none.
    """
    for row in reversed(store.all_jobs()):
        if run == row.id or (isinstance(row, Row) and run == row.job.name):
            return row
    return store.job(run)  # raises, listing those there are


def old(store: Store, now: float, keep: int | None, older_s: float | None) -> list[str]:
    """Ids of ended runs, oldest first, except the `keep` latest and those that ended within `older_s` seconds.

    Args:
        store: of the home.
        now: Wall-clock seconds.
        keep: None: being among the latest protects no run.
        older_s: None: age protects no run.

    Raises:
        StoreError: the home cannot be read.
    """
    ended = [row for row in store.all_jobs() if row.status in ENDED]
    if keep is not None:
        ended = ended[: max(0, len(ended) - keep)]
    logs = {} if older_s is None else store.logs()
    return [row.id for row in ended if older_s is None or now - _ended(row, logs.get(row.id)) > older_s]


def own(store: Store) -> dict[str, int]:
    """Run -> bytes on the disk that are its alone: its log, blobs that no other run needs, files named after it."""
    logs = store.logs()
    shared = Counter(sha256 for each in logs.values() for sha256 in each.blobs)
    found = {}
    for run, each in logs.items():
        refs = (store.depot.ref(sha256) for sha256 in each.blobs if shared[sha256] == 1)
        size = each.size + sum(ref.size for ref in refs if ref is not None)
        found[run] = size + sum(_weigh(store.home / folder / f"{run}{ending}")[1] for folder, ending in _NAMED)
    return found


def remove_expired_runs(store: Store, retention: Retention, now: float) -> list[str]:
    """Remove ended runs that the retention rules do not keep, and return their ids.

    Their blobs are left to the garbage collector.

    A run that somebody resumes at this moment is kept.

    Args:
        store: of the home.
        retention: what is kept.
        now: Wall-clock seconds.

    Raises:
        StoreError: the home cannot be read or written.
    """
    if retention.keep is None and retention.older_s is None:
        return []
    ids = old(store, now, retention.keep, retention.older_s)
    if gone := store.delete_runs(ids, only_ended=True) if ids else []:
        _remove_files_of_deleted_runs(store)
    return gone


def _ended(row: Row | Unreadable, log: Log | None) -> float:
    """Return the wall-clock time of a run's last event, or of its queueing if the log is empty or damaged."""
    return row.created if log is None or not log.whole or log.at is None else log.at


def remove_runs(store: Store, ids: Collection[str]) -> Swept:
    """Remove runs, then every file of the home that no run needs, and return what was removed.

    Nothing else runs here meanwhile: if nobody serves the home, this process holds its lock until it ends.

    Raises:
        JobError: a coordinator serves the home and may be working on one of the runs; nothing has been removed.
        StoreError: the home cannot be read or written.
    """
    store.require_idle(ids)
    alone = store.lock()
    before = _collect_garbage(store, alone)  # on a full disk, this makes the room without which no run can be removed
    store.delete_runs(ids)
    after = _collect_garbage(store, alone)
    return Swept(before.files + after.files, before.bytes + after.bytes, after.blobs_left)


def _collect_garbage(store: Store, alone: bool) -> Swept:
    """Remove agents' folders and evaluations of runs that no longer exist and, if `alone`, blobs that no run needs."""
    files, total = _remove_files_of_deleted_runs(store)
    if not alone:
        return Swept(files, total, blobs_left=True)
    collector, before = GarbageCollector(store), _weigh(store.depot.folder)
    collector.add_all_blobs()
    collected = collector.collect()
    after = _weigh(store.depot.folder)
    return Swept(files + before[0] - after[0], total + before[1] - after[1], blobs_left=not collected)


def _remove_files_of_deleted_runs(store: Store) -> tuple[int, int]:
    """Remove files and folders of deleted runs. Return the number of files and their bytes."""
    files = total = 0
    with doing(f"clear {store.home}"):
        found = list(_files_named_after_runs(store.home))
        known = {row.id for row in store.all_jobs()}  # a run is in the list before it has files
        for place in [place for place, run in found if run not in known]:
            count, size = _weigh(place)
            files, total = files + count, total + size
            if place.is_dir() and not place.is_symlink():
                REAL.remove(place)
            else:
                REAL.unlink(place)
    return files, total


def _files_named_after_runs(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield files and folders that are named after a run, with the id of the run."""
    for folder, ending in _NAMED:
        if (home / folder).is_dir():
            yield from (
                (each, run)
                for each in (home / folder).iterdir()
                if each.name.endswith(ending) and _RUN.fullmatch(run := each.name.removesuffix(ending))
            )


def _weigh(place: Path) -> tuple[int, int]:
    """(files, bytes) of a file, or of all files in a folder."""
    inside = [each for each in place.rglob("*") if each.is_file() and not each.is_symlink()] if place.is_dir() else []
    counted = inside or ([place] if place.is_file() else [])
    return len(counted), sum(each.stat().st_size for each in counted)
