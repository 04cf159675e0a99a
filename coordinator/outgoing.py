"""Open tasks: sent, sent again while unclaimed, withdrawn; and which blobs a device may fetch. No decisions, no log."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final, get_args

from fedquilt import wire
from fedquilt.core import Task
from fedquilt.transport.link import Link

KINDS: Final[tuple[wire.Kind, ...]] = get_args(wire.Kind)
REISSUE_S = 5.0  # an unclaimed task is sent again after this time, then ever more rarely
REISSUE_MOST_S = 60.0


@dataclass
class Issue:
    """One open task: when it was last sent, how long to wait for a claim, and which blobs its device may fetch."""

    sent_s: float  # or when it was last to be sent
    patience_s: float
    blobs: set[str]

    @property
    def due_s(self) -> float:
        """Time at which the task is to be sent again."""
        return self.sent_s + self.patience_s


class Issues:
    """Open tasks by device. A task is a retained message, so that it survives restarts of either side."""

    def __init__(self, link: Link, topics: wire.Topics) -> None:
        self._link, self._topics = link, topics
        self._open: dict[str, Issue] = {}
        self._agenda: list[tuple[float, str]] = []  # heap of (time, device): when an open task may be due, or earlier
        self._listed: dict[str, float] = {}  # device -> time of its entry; any other entry of it is outdated
        self._released: dict[tuple[str, wire.Kind], wire.Release] = {}  # by device

    def __contains__(self, device: str) -> bool:
        return device in self._open

    def devices(self) -> list[str]:
        """Devices with an open task."""
        return list(self._open)

    def send(self, device: str, task: Task, payload: bytes, now_s: float) -> None:
        """Send a device its task, encoded, for the first time or again."""
        patience_s = self._open[device].patience_s if device in self._open else REISSUE_S / 2
        blobs = {ref.sha256 for ref in task.bundles.values()}
        self._open[device] = issue = Issue(now_s, min(patience_s * 2, REISSUE_MOST_S), blobs)
        self._list(device, issue.due_s)
        self._link.publish(self._topics.device(device, "dn", "task"), payload, retain=True)

    def withdraw(self, device: str) -> None:
        """Withdraw a device's task, if any."""
        self._open.pop(device, None)
        self._link.publish(self._topics.device(device, "dn", "task"), b"", retain=True)

    def be_patient(self, device: str) -> None:
        """Repeat the task rarely: its device is working on it."""
        if device in self._open:
            self._open[device].patience_s = REISSUE_MOST_S

    def due(self, now_s: float) -> list[str]:
        """Devices whose task is to be sent again.

        One that nobody sends, as its device is not wanted for the moment, is due again after as long.
        """
        found = []
        while self.next_s() <= now_s:
            found.append(heapq.heappop(self._agenda)[1])
            del self._listed[found[-1]]
        for device in found:
            self._open[device].sent_s = now_s
            self._list(device, self._open[device].due_s)
        return found

    def next_s(self) -> float:
        """Time of the next repetition; infinite without open tasks."""
        while self._agenda:
            due_s, device = self._agenda[0]
            current, issue = self._listed.get(device) == due_s, self._open.get(device)
            if current and issue is not None and issue.due_s <= due_s:
                return due_s
            heapq.heappop(self._agenda)
            if current:
                del self._listed[device]
                if issue is not None:
                    self._list(device, issue.due_s)
        return math.inf

    def _list(self, device: str, due_s: float) -> None:
        if due_s < self._listed.get(device, math.inf):
            self._listed[device] = due_s
            heapq.heappush(self._agenda, (due_s, device))

    def release(self, device: str, release: wire.Release) -> bool:
        """Note what a device shall run, and may fetch; whether it is another release than the one before."""
        before = self._released.get((device, release.kind))
        self._released[device, release.kind] = release
        return before != release

    def recall(self, device: str, kind: wire.Kind) -> None:
        """Note that a device is not sent a release of this kind any more."""
        self._released.pop((device, kind), None)

    def may_have(self, device: str, sha256: str) -> bool:
        """Whether a blob is part of the device's open task, or of a release that it was sent."""
        if device in self._open and sha256 in self._open[device].blobs:
            return True
        released = (self._released.get((device, kind)) for kind in KINDS)
        return any(each is not None and each.blob is not None and each.blob.sha256 == sha256 for each in released)
