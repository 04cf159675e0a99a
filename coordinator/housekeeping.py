"""Removal of runs from a home: which are old, which files go with them, and leftovers of a killed removal.

A run leaves the list first, in one transaction; its files go afterwards. So at any moment of a kill
every listed run is whole, and leftover files belong to no run: the next removal sweeps them away.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.coordinator.job_logs import Log
from fedquilt.coordinator.limits import Retention
from fedquilt.coordinator.store import Row, Store
from fedquilt.coordinator.store_rows import Unreadable
from fedquilt.disk import REAL, doing

log = logging.getLogger("fedquilt.coordinator")

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


def retire(store: Store, retention: Retention, now: float, in_use: Collection[str]) -> list[str]:
    """Remove ended runs that need not be kept, by the process that serves the home; returns their ids.

    A run that somebody resumes at this moment is kept.

    Args:
        store: of the home.
        retention: what is kept.
        now: Wall-clock seconds.
        in_use: blobs that jobs at work need, beside those of their logs.

    Raises:
        StoreError: the home cannot be read or written.
    """
    if retention.keep is None and retention.older_s is None:
        return []
    ids = old(store, now, retention.keep, retention.older_s)
    if gone := store.remove(ids, only_ended=True) if ids else []:
        _sweep(store, store.lock(), in_use)
    return gone


def _ended(row: Row | Unreadable, log: Log | None) -> float:
    """Wall-clock seconds of a run's last fact; of one whose log is empty or damaged: when it was queued."""
    return row.created if log is None or not log.whole or log.at is None else log.at


def remove(store: Store, ids: Collection[str], in_use: Collection[str] = ()) -> Swept:
    """Remove runs, then every file of this home that no run needs, `in_use` apart.

    Nothing else runs here meanwhile: if nobody serves the home, this process holds its lock until it ends.

    Raises:
        JobError: a coordinator serves the home and may be working on one of the runs; nothing has been removed.
        StoreError: the home cannot be read or written.
    """
    alone = store.lock()
    store.remove(ids)
    return _sweep(store, alone, in_use)


def _sweep(store: Store, alone: bool, in_use: Collection[str]) -> Swept:
    """Remove blobs that no run needs, and agents' folders and evaluations of runs that no longer exist."""
    known = {row.id for row in store.all_jobs()}
    files = total = 0
    with doing(f"clear {store.home}"):
        for place in list(_strays(store.home, known)):
            found, size = _weigh(place)
            files, total = files + found, total + size
            if place.is_dir() and not place.is_symlink():
                REAL.remove(place)
            else:
                REAL.unlink(place)
    if unsound := store.unsound():
        log.error("blobs that seem to be of no use are kept: the log of %s is damaged", ", ".join(unsound))
    if unsound or not alone:
        return Swept(files, total, blobs_left=True)
    before = _weigh(store.depot.folder)
    store.depot.keep(store.held().union(in_use))
    after = _weigh(store.depot.folder)
    return Swept(files + before[0] - after[0], total + before[1] - after[1], blobs_left=False)


def _strays(home: Path, known: Collection[str]) -> Iterator[Path]:
    """Files and folders named after runs that are no longer in the list."""
    for folder, ending in _NAMED:
        if (home / folder).is_dir():
            yield from (
                each
                for each in (home / folder).iterdir()
                if each.name.endswith(ending)
                and _RUN.fullmatch(each.name.removesuffix(ending))
                and each.name.removesuffix(ending) not in known
            )


def _weigh(place: Path) -> tuple[int, int]:
    """(files, bytes) of a file, or of all files in a folder."""
    inside = [each for each in place.rglob("*") if each.is_file() and not each.is_symlink()] if place.is_dir() else []
    counted = inside or ([place] if place.is_file() else [])
    return len(counted), sum(each.stat().st_size for each in counted)
