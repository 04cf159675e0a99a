"""An executor over a link that also notes what every board does, for those who watch the fleet."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.coordinator import boards
from fedquilt.coordinator.admission import FLOODED, Flooded, Removed, Returned, Silent
from fedquilt.coordinator.boards import Board, Reading, Refusal
from fedquilt.coordinator.boards_store import FORGOTTEN_S, STEPS, BoardStore
from fedquilt.coordinator.executors import Heard, OverLink
from fedquilt.coordinator.places import Where
from fedquilt.core import StoreError, Task
from fedquilt.transport.handshake import Identity
from fedquilt.transport.link import Link
from fedquilt.wire import Telemetry

log = logging.getLogger("fedquilt.coordinator")

SOON_S: Final = 0.5  # until a change of what a board does is stored
LATER_S: Final = 5.0  # until its progress and readings are
TIDY_S: Final = 300.0
DOUBT_S: Final = 30.0  # after a start: who was online before, and has not been heard of, is not
MOST: Final = 20_000  # boards that are noted
_OFTEN: Final = (Telemetry, wire.Progress)
REMOVED_S: Final = 0.5  # between two looks for boards that are to be removed
RETRY_S: Final = 10.0  # after an error of the disk


class Boards:
    """What is known of every board, stored now and then.

    An error of the disk is logged once; rounds go on, and so does this when the disk takes what is written again.

    Args:
        home: folder of the coordinator.
        clock: wall-clock seconds.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._store: BoardStore | None = None
        self._boards: dict[str, Board] = {}
        self._changed: set[str] = set()  # devices that are not stored as they are
        self._sums: dict[str, tuple[int, Reading]] = {}  # device -> number of messages of the running step, their sum
        self._readings: dict[tuple[str, int], Reading] = {}  # by device and time: not stored yet
        self._seen: dict[str, float] = {}  # device -> when its last message came, where that is not in `_boards` yet
        self._doubted: set[str] = set()  # devices that were online when the last coordinator ended
        self._now_s, self._due_s = 0.0, -math.inf  # on the server's clock, as the two that follow
        self._doubt_s = self._tidy_s = self._remove_s = math.inf
        self._removed: list[str] = []  # by request, and not taken yet
        self._begun = self._failed = False
        self._away: float | None = clock()  # since when the broker is not reached; None: it is
        self._told_away = True  # whether that is to be stored
        try:
            self._store = BoardStore(home, writes=True)
            before = self._store.boards()
            self._boards = {each.device: replace(each, doing=None, silent=False, quiet=False) for each in before}
            self._changed = {each.device for each in before if each != self._boards[each.device]}
        except StoreError as error:
            log.warning("%s; nothing is noted of boards meanwhile", error)
        self._doubted = {each.device for each in self._boards.values() if each.online}

    def record_message(self, heard: Heard, now_s: float) -> None:
        """Update the status of a board after a message from it, or after its flooding, silence or return."""
        self._now_s, at = now_s, self._clock()
        if isinstance(heard, Flooded):
            refusal = Refusal(at, "flooding", FLOODED)
            return self._put(replace(self._status_with_last_seen(heard.device), refusal=refusal), SOON_S)
        if isinstance(heard, Silent):
            return self._put(boards.board_after_silence(self._status_with_last_seen(heard.device), at), SOON_S)
        if isinstance(heard, Returned):
            return self._put(boards.board_after_return(self._status_with_last_seen(heard.device), at), SOON_S)
        if type(heard) is not tuple:
            return None
        device, message = heard
        if isinstance(message, wire.Presence):
            self._doubted.discard(device)
        self._put(
            boards.board_after_message(self._status_with_last_seen(device), message, at),
            LATER_S if isinstance(message, _OFTEN) else SOON_S,
        )
        if isinstance(message, Telemetry) and device in self._boards:
            self._read(device, message, int(at))
        return None

    def record_contact(self, device: str) -> None:
        """Store the time at which a message of a board arrived, which is now."""
        if device in self._boards or len(self._seen) < MOST:
            self._seen[device] = self._clock()
        if device in self._boards and self._boards[device].quiet:
            self._put(replace(self._status_with_last_seen(device), quiet=False), SOON_S)

    def mark_quiet(self, device: str) -> None:
        """Mark a known board as quiet: silent for long, its presence has been requested."""
        if device in self._boards:
            self._put(replace(self._status_with_last_seen(device), quiet=True), SOON_S)

    def contact(self, connected: bool) -> None:
        """Note whether the broker is connected now. While it is not, nothing new is heard of any board."""
        if connected != (self._away is None):
            self._away, self._told_away = None if connected else self._clock(), True
            self._wake(0.0)

    def current_board(self, device: str) -> Board | None:
        """Return a board's present status, or None if the board is not known."""
        return self._status_with_last_seen(device) if device in self._boards else None

    def boards_with_readings(self) -> list[tuple[Board, Reading | None]]:
        """Return every board with its latest reading, or None for it. Another thread may call this."""
        sums = self._sums
        return [
            (self._status_with_last_seen(device), sums[device][1] if device in sums else None)
            for device in self._boards.copy()
        ]

    def asked(self, device: str, task: Task) -> None:
        """Note that a board was sent a task."""
        self._put(boards.asked(self._status_with_last_seen(device), task, self._clock()), SOON_S)

    def turned(self, device: str, waits: bool) -> None:
        """Note that a board's update has to wait for its turn, or need not any more."""
        self._put(boards.turned(self._status_with_last_seen(device), waits), SOON_S)

    def answered(self, device: str, ack: wire.Ack) -> None:
        """Note that a board was told what became of its update."""
        self._put(boards.answered(self._status_with_last_seen(device), ack, self._clock()), SOON_S)

    def mark_idle(self, device: str) -> None:
        """Record that a board has no task any more."""
        if device in self._boards:
            self._put(replace(self._status_with_last_seen(device), doing=None), SOON_S)

    def step(self, now_s: float) -> float:
        """Write what is due, take removal requests and delete old entries. Return when the next call is due."""
        if self._store is None:
            return math.inf
        if not self._begun:
            self._begun, self._doubt_s, self._tidy_s = True, now_s + DOUBT_S, now_s
            self._remove_s = now_s
        self._now_s = now_s
        if now_s >= self._doubt_s:
            self._doubt_s = math.inf
            for device in self._doubted:
                self._put(replace(self._boards[device], online=False, since=self._clock()), 0.0)
        try:
            if now_s >= self._due_s:
                self._write_changes(self._store)
            if now_s >= self._remove_s:
                self._remove_s = now_s + REMOVED_S
                self._removed += (removed := self._store.take_removals())
                self._forget_boards(self._store, removed)
            if now_s >= self._tidy_s:
                self._tidy_s = now_s + TIDY_S
                self._remove_expired(self._store, self._clock())
        except StoreError as error:
            self._due_s = now_s + RETRY_S
            self._readings.clear()  # they would pile up
            if not self._failed:
                log.warning("%s; `fedquilt devices` shows what was known before", error)
            self._failed = True
        return min(self._due_s, self._tidy_s, self._doubt_s, self._remove_s)

    def take_removed(self) -> list[str]:
        """Return the boards removed by request since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def close(self) -> None:
        """Store what is not stored yet."""
        if self._store is not None:
            with contextlib.suppress(StoreError):
                self._write_changes(self._store)
            self._store.close()
            self._store = None

    # -- within --

    def _status_with_last_seen(self, device: str) -> Board:
        board = self._boards.get(device) or Board(device)
        seen = self._seen.get(device)
        return board if seen is None else replace(board, seen=seen)

    def _put(self, board: Board, within_s: float) -> None:
        before = self._boards.get(board.device)
        if self._store is None or board == before or (before is None and len(self._boards) >= MOST):
            return
        self._boards[board.device] = board
        if before is None or replace(board, seen=None) != replace(before, seen=None):
            self._changed.add(board.device)
            self._wake(within_s)

    def _read(self, device: str, told: Telemetry, at: int) -> None:
        begin = at // STEPS[0][0] * STEPS[0][0]
        count, before = self._sums.get(device, (0, None))
        count, before = (count, before) if before is not None and before.at == begin else (0, None)
        reading = boards.joined(before, count + 1, told, begin)
        self._sums[device] = (count + 1, reading)
        self._readings[device, begin] = reading
        self._wake(LATER_S)

    def _wake(self, within_s: float) -> None:
        if not self._failed:  # else it is tried again in its own time
            self._due_s = min(self._due_s, self._now_s + within_s)

    def _write_changes(self, store: BoardStore) -> None:
        """Write changed boards, new readings and whether the broker is away."""
        readings = [(device, reading) for (device, _), reading in self._readings.items()]
        if self._told_away:
            store.note_away(self._away)
            self._told_away = False
        store.write([self._status_with_last_seen(device) for device in self._changed], readings)
        self._changed.clear()
        self._readings.clear()
        self._due_s, self._failed = math.inf, False

    def _remove_expired(self, store: BoardStore, now: float) -> None:
        """Delete old readings, and boards without a message for long."""
        store.tidy(now)
        gone = {device for device in self._boards if _forgotten(self._status_with_last_seen(device), now)}
        self._forget_boards(store, gone)

    def _forget_boards(self, store: BoardStore, devices: Collection[str]) -> None:
        """Remove boards and their readings, in the store and in memory."""
        store.forget(devices)
        for device in devices:
            for place in (self._boards, self._sums, self._seen):
                place.pop(device, None)
            self._changed.discard(device)
            self._doubted.discard(device)
        self._readings = {key: each for key, each in self._readings.items() if key[0] not in devices}


def _forgotten(board: Board, now: float) -> bool:
    return not board.online and now > max(board.seen or 0.0, board.since or 0.0) + FORGOTTEN_S


class NotedLink(OverLink):
    """`OverLink` that tells `Boards` what passes through it."""

    def __init__(
        self,
        link: Link,
        fleet: str,
        depot: Depot,
        epoch: int,
        noted: Boards,
        identity: Identity | None = None,
        where: Where = Where(),
    ) -> None:
        super().__init__(link, fleet, depot, epoch, identity, where)
        self._noted = noted

    def hear(self, now_s: float) -> Iterator[Heard]:
        """Yield what `OverLink` yields after noting it in `Boards`, then each device removed by request."""
        for heard in super().hear(now_s):
            self._noted.record_message(heard, now_s)
            yield heard
        for device in self._noted.take_removed():
            self._remove_device(device)
            yield Removed(device)

    def _record_contact(self, device: str) -> None:
        super()._record_contact(device)
        self._noted.record_contact(device)

    def _request_presence(self, device: str) -> None:
        super()._request_presence(device)
        self._noted.mark_quiet(device)

    def due_s(self, now_s: float) -> float:
        """Store due changes of devices, and return the next time at which something is due."""
        self._noted.contact(self._link.connected)
        due_s = super().due_s(now_s)
        for device, waits in self._transfers.queue.take_news().items():
            self._noted.turned(device, waits)
        return min(due_s, self._noted.step(now_s))

    def send(self, device: str, task: Task, now_s: float) -> None:
        """See `OverLink`."""
        super().send(device, task, now_s)
        self._noted.asked(device, task)

    def withdraw(self, device: str) -> None:
        """See `OverLink`."""
        super().withdraw(device)
        self._noted.mark_idle(device)

    def answer(self, device: str, ack: wire.Ack) -> None:
        """See `OverLink`."""
        super().answer(device, ack)
        self._noted.answered(device, ack)

    def close(self) -> None:
        """See `OverLink`."""
        self._noted.close()
        super().close()
