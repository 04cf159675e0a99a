"""Blobs of a job that nothing needs any more, dropped: few at a time as answers come, all at once after a round."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from fedquilt.coordinator.folding import blobs
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.store import Store
from fedquilt.core import Update

TOGETHER: Final = 64  # answers of a round for each blob that waits to be dropped: what is in use is looked up as often

InUse = Callable[[], AbstractSet[str]]


class Leftovers:
    """Leftovers of one job.

    Args:
        job: at work.
        store: holds its blobs.
        own: what the job needs beside what its log names.
        others: what the other jobs at work need, likewise.

    Raises, from every method but `__init__`:
        StoreError: a blob cannot be removed.
    """

    def __init__(self, job: Running, store: Store, own: InUse, others: InUse) -> None:
        self._job, self._store, self._own, self._others = job, store, own, others
        self.begun: dict[str, Update] = {}  # device -> the last update of it that began to be fetched
        self._discarded: set[str] = set()  # sha256 of blobs that are dropped next, unless they are in use then

    def let_go(self, device: str, instead: Update | None = None) -> None:
        """Drop what has come of the last update that a device began to send, unless it sends the same again.

        So a device has one unfinished update of a job on the disk, no larger than one may be, whatever it offers.
        """
        begun = self.begun.pop(device, None)
        if begun is not None and (instead is None or begun.bundles != instead.bundles):
            self.discard(begun)

    def discard(self, update: Update) -> None:
        """Drop the blobs of an update that have no other use; in a large round those of several updates at once."""
        self._discarded |= blobs([update])
        self.tidy()

    def spent(self, found: AbstractSet[str]) -> None:
        """Note blobs that a finished round used; they are deleted after the next round's tasks have been sent."""
        self._discarded |= found

    def tidy(self) -> None:
        """Drop what was discarded, unless it is little beside the answers that have to be looked through for it."""
        if self._discarded and len(self._discarded) * TOGETHER >= len(self._job.rounds.answered):
            self.drop()

    def drop(self, spent: AbstractSet[str] = frozenset()) -> None:
        """Drop blobs that the job does not need, as far as no other job does: those discarded, and these."""
        superfluous = spent | (self._discarded - self._own())
        if found := superfluous - self._job.pinned() - self._others():  # other jobs may have the same content
            for sha256 in found - self._store.held(but=self._job.id):  # the store is asked for few
                self._store.depot.drop(sha256)
        self._discarded.clear()
