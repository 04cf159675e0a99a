"""Retention of runs and blobs: garbage collection, and removal of runs from a home.

A blob is named by its content, so runs share blobs, and no run may delete its own. `GarbageCollector` alone decides
which blobs a coordinator deletes. Invariant: while any of these roots holds a blob, the blob is not deleted.

- Events of all runs and rollouts of the home (`Store.referenced_blobs`).
- Data of active jobs (`JobController.blobs_in_use`): the bundle, the state, the partial aggregate, blobs sent with
  tasks, updates in transfer, and accepted updates that no stored partial aggregate contains.
- Blobs of unacknowledged updates that simulated devices have stored here (`Executor.unacknowledged_update_blobs`).
- Blobs that a work item has stored or found, until its result is recorded (`BlobStore.pin_during`).

The roots are read, and garbage is deleted, in one write transaction of the database, after all events of a step are
written. Another process that adds a root checks in the transaction of this root that the blob exists.

A run is first removed from the database, in one transaction, and its files afterwards. So after a kill at any moment
every run in the database is complete. Files that remain belong to no run, and the next removal deletes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.coordinator.rounds.events import ENDED_PHASES
from fedquilt.coordinator.settings import RetentionSettings
from fedquilt.coordinator.storage.rows import IndexedLog, UnreadableRow
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.host.disk import REAL, disk_errors

# accepted updates per candidate: fewer candidates wait, because each collection reads all roots
UPDATES_PER_CANDIDATE: Final = 64

log = logging.getLogger("fedquilt.coordinator")


class GarbageCollector:
    """Deletion of blobs that no root needs. `in_use` returns the sha256 of blobs that active jobs need."""

    def __init__(self, store: Store, in_use: Callable[[], AbstractSet[str]] = frozenset) -> None:
        self._store, self._in_use = store, in_use
        self._candidates: set[str] = set()
        self._is_urgent = self._includes_all = False

    def add_candidates(self, blobs: AbstractSet[str], *, urgent: bool = False) -> None:
        """Mark blobs that `collect` deletes if no root needs them. With `urgent`, `collect` is due at once."""
        self._candidates |= blobs
        self._is_urgent = self._is_urgent or urgent

    def add_all_blobs(self) -> None:
        """Make every blob of the store a candidate for the next `collect`."""
        self._includes_all = True

    def is_due(self, updates: int) -> bool:
        """Return whether enough blobs are candidates to justify reading all roots.

        Reading takes time in proportion to `updates`, the number of accepted updates.
        """
        return (
            self._includes_all
            or self._is_urgent
            or (bool(self._candidates) and len(self._candidates) * UPDATES_PER_CANDIDATE >= updates)
        )

    def collect(self) -> bool:
        """Delete the candidates that no root needs. Return False if a damaged log may hide roots."""
        blob_store = self._store.blob_store
        with self._store.open_transaction():
            if damaged_ids := self._store.find_damaged_ids():
                if self._includes_all:
                    log.error(
                        "unreferenced blobs are kept because the event log of %s is damaged", ", ".join(damaged_ids)
                    )
            else:
                roots = self._store.referenced_blobs() | self._in_use()
                if self._includes_all:
                    blob_store.remove_all_but(roots)
                for sha256 in self._candidates - roots:
                    blob_store.remove_blob(sha256)
        self._candidates &= blob_store.pinned_blobs()  # work items that use these blobs may end without an event
        self._is_urgent = self._includes_all = False
        return not damaged_ids


# folders with files named after runs, and their endings
_RUN_FILES: Final = (("agents", ""), ("sites", ""), ("evaluations", ".json"), ("machines", ".json"))
_RUN: Final = re.compile(r".+-\d{8}-\d{6}(-[0-9a-f]{6})?")  # id of a run


class RemovedFiles(NamedTuple):
    files: int
    bytes: int
    blobs_left: bool  # whether unreferenced blobs remain, because a coordinator runs or a log is damaged


def find_run(store: Store, id_or_name: str) -> StoredJob | UnreadableRow:
    """Return a run by its id, readable or not, or the latest run of a job by name, or raise StoreError."""
    for row in reversed(store.all_jobs()):
        if id_or_name == row.id or (isinstance(row, StoredJob) and id_or_name == row.job.name):
            return row
    return store.find_job(id_or_name)  # raises a StoreError that lists the runs


def select_expired_runs(store: Store, now: float, keep: int | None, older_s: float | None) -> list[str]:
    """Return the ids of ended runs to delete, oldest first.

    The `keep` latest ended runs are not returned, nor those that ended less than `older_s` seconds before `now`.
    """
    ended_runs = [row for row in store.all_jobs() if row.status in ENDED_PHASES]
    if keep is not None:
        ended_runs = ended_runs[: max(0, len(ended_runs) - keep)]
    logs = {} if older_s is None else store.read_logs()
    return [
        row.id
        for row in ended_runs
        if older_s is None or now - _last_event_or_creation_time(row, logs.get(row.id)) > older_s
    ]


def exclusive_bytes(store: Store) -> dict[str, int]:
    """Return the bytes of each run on disk: its log, files and blobs, without shared blobs."""
    logs = store.read_logs()
    reference_counts = Counter(sha256 for log in logs.values() for sha256 in log.needed_blobs)
    bytes_by_run = {}
    for run, log in logs.items():
        refs = (store.blob_store.find_ref(sha256) for sha256 in log.needed_blobs if reference_counts[sha256] == 1)
        size = log.size + sum(ref.size for ref in refs if ref is not None)
        bytes_by_run[run] = size + sum(
            _measure_files(store.home / folder / f"{run}{ending}")[1] for folder, ending in _RUN_FILES
        )
    return bytes_by_run


def remove_expired_runs(store: Store, retention: RetentionSettings, now: float) -> list[str]:
    """Remove ended runs that the settings do not protect, but not their blobs. Return the runs' ids."""
    if retention.keep is None and retention.older_than_s is None:
        return []
    ids = select_expired_runs(store, now, retention.keep, retention.older_than_s)
    if deleted := store.delete_runs(ids, only_ended=True) if ids else []:
        _remove_files_of_deleted_runs(store)
    return deleted


def _last_event_or_creation_time(row: StoredJob | UnreadableRow, log: IndexedLog | None) -> float:
    return row.created if log is None or not log.is_intact or log.last_event_time is None else log.last_event_time


def remove_runs(store: Store, ids: Collection[str]) -> RemovedFiles:
    """Remove runs, then unneeded files and blobs. Raise JobError if a coordinator may work on a run.

    Without a coordinator, the home stays locked until `store.close`.
    """
    store.require_inactive(ids)
    is_only_user = store.acquire_lock()
    # on a full disk, the database needs free space to delete runs
    before = _remove_unneeded_files(store, is_only_user)
    store.delete_runs(ids)
    after = _remove_unneeded_files(store, is_only_user)
    return RemovedFiles(before.files + after.files, before.bytes + after.bytes, after.blobs_left)


def _remove_unneeded_files(store: Store, is_only_user: bool) -> RemovedFiles:
    """Remove files of deleted runs. If no coordinator uses the home, also remove unreferenced blobs."""
    files, total = _remove_files_of_deleted_runs(store)
    if not is_only_user:
        return RemovedFiles(files, total, blobs_left=True)
    collector, previous_size = GarbageCollector(store), _measure_files(store.blob_store.folder)
    collector.add_all_blobs()
    collected = collector.collect()
    after = _measure_files(store.blob_store.folder)
    return RemovedFiles(
        files + previous_size[0] - after[0], total + previous_size[1] - after[1], blobs_left=not collected
    )


def _remove_files_of_deleted_runs(store: Store) -> tuple[int, int]:
    files = total = 0
    with disk_errors(f"remove files of deleted runs from {store.home}"):
        run_files = list(_files_named_after_runs(store.home))
        run_ids = {row.id for row in store.all_jobs()}  # a run is stored before its files are created
        for path in [path for path, run in run_files if run not in run_ids]:
            count, size = _measure_files(path)
            files, total = files + count, total + size
            if path.is_dir() and not path.is_symlink():
                REAL.remove(path)
            else:
                REAL.unlink(path)
    return files, total


def _files_named_after_runs(home: Path) -> Iterator[tuple[Path, str]]:
    for folder, ending in _RUN_FILES:
        if (home / folder).is_dir():
            yield from (
                (path, run_id)
                for path in (home / folder).iterdir()
                if path.name.endswith(ending) and _RUN.fullmatch(run_id := path.name.removesuffix(ending))
            )


def _measure_files(root: Path) -> tuple[int, int]:
    sizes = []
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    for path in files or [str(root)]:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                sizes.append(status.st_size)
    return len(sizes), sum(sizes)
