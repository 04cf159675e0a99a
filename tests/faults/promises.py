"""Files that survive a power failure, and promises of a process to its peers.

A process that acknowledges, offers or requests something must keep its promise after any power failure. So all data
behind a promise must be synced before the promise is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

from fedquilt.blobs import pack_file
from fedquilt.blobs.store import PACK_FILE_NAME
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    TasksCancelled,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
    UpdatesAggregated,
)
from fedquilt.core import BlobRef
from tests.faults.disk import Node, SimDisk, StoredFile, StoredFolder, StoredSymlink


class DurableDisk(SimDisk):
    def _node_at(self, parts: list[str]) -> Node | None:
        node: Node | None = self.platter.top
        for name in parts:
            if type(node) is not StoredFolder:
                return None
            folder, node = node, node.safe.get(name)
            while type(node) is StoredSymlink:
                node = folder.safe.get(node.target)
        if type(node) is StoredFile and node.safe is not node.data:
            return None if node.safe is None else StoredFile(node.safe, node.inode, node.mtime_ns, node.safe)
        return node


def lost_blobs(disk: DurableDisk, folder: str, wanted: Collection[str]) -> list[str]:
    missing = {sha256 for sha256 in wanted if not disk.is_file(f"{folder}/{sha256}")}
    path = f"{folder}/{PACK_FILE_NAME}"
    if missing and disk.is_file(path):
        file = disk.open(path)
        for slot in pack_file.iterate_entries(file):
            if slot.sha256 in missing and _sha256(file.read(slot.offset, slot.size)) == slot.sha256:
                missing.remove(slot.sha256)
    return sorted(missing)


def _sha256(payload: Any) -> str:
    return hashlib.sha256(payload).hexdigest()


def blobs_in_event(event: AnyEvent) -> set[str]:
    match event:
        case JobStarted() | RoundCommitted():
            return {event.state.sha256}
        case UpdatesAggregated():
            return {event.sum.sha256}
        case UpdateAccepted():
            return {ref.sha256 for ref in event.update.bundles.values()}
        case _:
            return set()


class JobPromises:
    """Promises that the event log of one job makes.

    Attributes:
        round: Number of the running round.
        asked: Device with a task -> round of the task.
        counted: Round and device of each update that counts.
    """

    def __init__(self, *, buffered: bool = False) -> None:
        self.round = 0
        self.asked: dict[str, int] = {}
        self._buffered = buffered
        self._earlier: tuple[BlobRef, ...] = ()  # states on which devices still work
        self._bases: dict[str, int] = {}  # device -> round of its update that the running round has counted
        self.counted: set[tuple[int, str]] = set()
        self._state: BlobRef | None = None
        self._best: BlobRef | None = None
        self._sum: UpdatesAggregated | None = None
        self._updates: dict[str, set[str]] = {}  # device -> digests of its update's blobs

    @property
    def blobs(self) -> set[str]:
        folded = self._sum.devices if self._sum else ()
        updates = [blobs for device, blobs in self._updates.items() if device not in folded]
        refs = (self._state, self._best, self._sum.sum if self._sum else None, *self._earlier)
        return {ref.sha256 for ref in refs if ref is not None}.union(*updates)

    def add_event(self, event: AnyEvent) -> None:
        match event:
            case JobStarted():
                self._state = event.state
            case CohortSelected():
                self.asked.update(dict.fromkeys(event.devices, event.round))
            case UpdateAccepted(update=update):
                self.counted.add((update.round, update.device))
                self._updates[update.device] = blobs_in_event(event)
                self._bases[update.device] = update.round
                self.asked.pop(update.device, None)
            case TaskDeclined() | UpdateRejected():
                self.asked.pop(event.device, None)
            case TasksCancelled():
                for device in event.devices:
                    self.asked.pop(device, None)
            case UpdateLost():
                self.counted.discard((self._bases[event.device], event.device))
                self._updates.pop(event.device, None)
                self.asked[event.device] = self._bases.pop(event.device)
                if self._sum and event.device in self._sum.devices:
                    self._sum = None
            case UpdatesAggregated():
                self._sum = event
            case RoundClosed() if self._buffered:
                pass
            case RoundClosed() | RoundRetried():
                self.asked.clear()
            case RoundCommitted():
                self._best = self._state if event.best else self._best
                self._state, self._sum, self.round = event.state, None, event.round + 1
                self._earlier = event.earlier_states
                self._updates.clear()
                self._bases.clear()
            case _:
                pass
