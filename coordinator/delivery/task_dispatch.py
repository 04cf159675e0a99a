"""Dispatch of tasks to devices: repetition until acceptance, and permission to fetch blobs."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final, get_args

from fedquilt import wire
from fedquilt.core import ATTEMPTS_MOST, RESEND, Task
from fedquilt.transport.link import Link

KINDS: Final[tuple[wire.Kind, ...]] = get_args(wire.Kind)


@dataclass
class DispatchedTask:
    sent_s: float  # or when it was last to be sent
    sends: int  # to this device, in a row
    blobs: set[str]

    @property
    def due_s(self) -> float:
        return self.sent_s + RESEND.delay_s(self.sends - 1)


class TaskDispatcher:
    """Open tasks by device, sent as retained messages that survive restarts of either side."""

    def __init__(self, link: Link, topics: wire.Topics) -> None:
        self._link, self._topics = link, topics
        self._open: dict[str, DispatchedTask] = {}
        self._agenda: list[tuple[float, str]] = []  # heap of (time, device): when an open task may be due, or earlier
        self._listed: dict[str, float] = {}  # device -> time of its valid entry
        self._released: dict[tuple[str, wire.Kind], wire.DesiredRelease] = {}  # by device

    def __contains__(self, device: str) -> bool:
        return device in self._open

    def send_task(self, device: str, task: Task, payload: bytes, now_s: float) -> None:
        sends = self._open[device].sends if device in self._open else 0
        blobs = {ref.sha256 for ref in task.bundles.values()}
        self._open[device] = issue = DispatchedTask(now_s, sends + 1, blobs)
        self._schedule_repetition(device, issue.due_s)
        self._link.publish(self._topics.device_topic(device, "dn", "task"), payload, retain=True)

    def cancel_task(self, device: str) -> None:
        self._open.pop(device, None)
        self._link.publish(self._topics.device_topic(device, "dn", "task"), b"", retain=True)

    def slow_resends(self, device: str) -> None:
        """Resend a device's task at the longest interval, because the device is working on the task."""
        if device in self._open:
            self._open[device].sends = ATTEMPTS_MOST

    def take_due_devices(self, now_s: float) -> list[str]:
        """Return the devices whose task must be sent again, and schedule the next repetition.

        A task that the caller does not send becomes due again after the same interval.
        """
        found = []
        while self.next_repetition_s() <= now_s:
            found.append(heapq.heappop(self._agenda)[1])
            del self._listed[found[-1]]
        for device in found:
            self._open[device].sent_s = now_s
            self._schedule_repetition(device, self._open[device].due_s)
        return found

    def next_repetition_s(self) -> float:
        """Return the time of the next repetition, or infinity without open tasks."""
        while self._agenda:
            due_s, device = self._agenda[0]
            current, issue = self._listed.get(device) == due_s, self._open.get(device)
            if current and issue is not None and issue.due_s <= due_s:
                return due_s
            heapq.heappop(self._agenda)
            if current:
                del self._listed[device]
                if issue is not None:
                    self._schedule_repetition(device, issue.due_s)
        return math.inf

    def _schedule_repetition(self, device: str, due_s: float) -> None:
        if due_s < self._listed.get(device, math.inf):
            self._listed[device] = due_s
            heapq.heappush(self._agenda, (due_s, device))

    def record_release(self, device: str, release: wire.DesiredRelease) -> bool:
        """Record a device's release and permit its blob. Return whether the release has changed."""
        before = self._released.get((device, release.kind))
        self._released[device, release.kind] = release
        return before != release

    def forget_release(self, device: str, kind: wire.Kind) -> None:
        self._released.pop((device, kind), None)

    def may_fetch_blob(self, device: str, sha256: str) -> bool:
        if device in self._open and sha256 in self._open[device].blobs:
            return True
        released = (self._released.get((device, kind)) for kind in KINDS)
        return any(each is not None and each.blob is not None and each.blob.sha256 == sha256 for each in released)
