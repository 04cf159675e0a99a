"""Garbage collection of blobs: the one place that decides which blobs a coordinator deletes.

A blob is named by its content, so runs share blobs, and no run may delete its own. Invariant: while any of these roots
holds a blob, the blob is not deleted.

- Events of all runs and rollouts of the home, served or not (`Store.referenced_blobs`).
- What active jobs use beside their events (`JobController.blobs_in_use`): the bundle, the state, the partial aggregate,
  blobs sent with tasks, updates in transfer, and accepted updates that no stored partial aggregate contains.
- Blobs of unacknowledged updates that simulated devices have stored here (`Executor.unacknowledged_update_blobs`).
- Blobs that a work item has stored or found, until its result is recorded (`BlobStore.pin_during`).

The roots are read, and garbage is deleted, in one write transaction of the database, at the end of a step, when every
event of the step is written. A process that adds a root from outside checks the blob in the transaction that adds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from fedquilt.coordinator.storage.store import Store

TOGETHER: Final = 64  # accepted updates per candidate: fewer candidates wait, because each collection reads all roots

log = logging.getLogger("fedquilt.coordinator")


class GarbageCollector:
    """Garbage collector of one home.

    Args:
        store: Store of the home.
        in_use: Returns the roots of active jobs.

    Raises, from every method:
        StoreError: If the home cannot be read or written.
    """

    def __init__(self, store: Store, in_use: Callable[[], AbstractSet[str]] = frozenset) -> None:
        self._store, self._in_use = store, in_use
        self._candidates: set[str] = set()
        self._soon = self._all = False

    def add_candidates(self, blobs: AbstractSet[str], *, soon: bool = False) -> None:
        """Mark released blobs for deletion by the next `collect`, if no root needs them then.

        Args:
            blobs: SHA-256 of the released blobs.
            soon: Whether the blobs are large, so that they do not wait for further candidates.
        """
        self._candidates |= blobs
        self._soon = self._soon or soon

    def add_all_blobs(self) -> None:
        self._all = True

    def is_due(self, updates: int) -> bool:
        """Return whether there are enough candidates to read all roots, given the accepted updates."""
        return self._all or self._soon or (bool(self._candidates) and len(self._candidates) * TOGETHER >= updates)

    def collect(self) -> bool:
        """Delete the candidates that no root needs. Return False if a damaged log may hide roots."""
        depot = self._store.depot
        with self._store.open_transaction():
            if unsound := self._store.find_damaged_ids():
                if self._all:
                    log.error("unreferenced blobs are kept: the log of %s is damaged", ", ".join(unsound))
            else:
                roots = self._store.referenced_blobs() | self._in_use()
                if self._all:
                    depot.remove_all_but(roots)
                for sha256 in self._candidates - roots:
                    depot.remove_blob(sha256)
        self._candidates &= depot.pinned_blobs()  # their work items may end without an event
        self._soon = self._all = False
        return not unsound
