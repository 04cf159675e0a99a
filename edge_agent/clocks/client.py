"""Client of the clock helper: one JSON line asks, one answers, on a Unix socket. Root is needed only in the helper.

The helper (`fedquilt.edge_agent.clocks.helper`) restores the board's own settings when this side releases, ends or
falls silent: a holder calls `keepalive` more often than the helper's watchdog.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fedquilt.core import UNDECODABLE, Amount, ClockError, Label, OperatingPoint, Sentence, Wired

log = logging.getLogger("fedquilt.clocks")

SOCKET: Final = Path("/run/fedquilt/clocks.sock")
REQUEST_MOST_BYTES: Final = 4096
ANSWER_MOST_BYTES: Final = 1 << 18
ANSWER_S: Final = 2.0
KEEPALIVE_S: Final = 2.0  # shortest interval between messages


class Hold(Wired, frozen=True, tag="hold"):
    """Request to hold the clocks at a point until release."""

    point: OperatingPoint


class Keepalive(Wired, frozen=True, tag="keepalive"):
    """Request to keep holding; refused, with the reason, if the helper has released meanwhile."""


class Release(Wired, frozen=True, tag="release"):
    """Request to return the clocks to the board."""


class Ask(Wired, frozen=True, tag="status"):
    """Request for the status; any permitted client may send it, whoever holds."""


class Clock(Wired, frozen=True):
    """One clock of the board, in its present state."""

    name: Label
    kind: Label  # cpu | gpu | emc
    listed_hz: tuple[Amount, ...]  # (): none listed, so it cannot be held
    low_hz: Amount | None
    high_hz: Amount | None
    now_hz: Amount | None
    governor: Label | None
    hidden: bool = False  # nothing is listed because the sender may not read the list
    ceiling_hz: Amount | None = None  # highest that the owner's bounds permit; None: no bound


class Status(Wired, frozen=True):
    """Status of the helper: as root it also reads the lists in debugfs, which an agent's user may not."""

    clocks: tuple[Clock, ...]
    mode: Label | None = None  # nvpmodel's, as the owner has set it
    modes: tuple[Label, ...] = ()
    temperature_c: float | None = None  # hottest zone
    hottest_c: float | None = None  # limit above which nothing is held
    max_w: float | None = None  # watts above which no point is held
    holder: Sentence | None = None  # description of the holder
    point: OperatingPoint | None = None
    owes: tuple[Sentence, ...] = ()  # settings of the board that could not be restored; the helper tries again


class Answer(Wired, frozen=True):
    """Answer to any request. A refusal has `error` alone."""

    error: Annotated[str, Meta(max_length=10_000)] | None = None
    point: OperatingPoint | None = None  # to Hold: as the board reports it
    status: Status | None = None  # to Ask


Request = Hold | Keepalive | Release | Ask


class Clocks:
    """A connection to the helper. Every call is answered within 2 s or raises ClockError."""

    def __init__(self, line: socket.socket, path: Path) -> None:
        self.point: OperatingPoint | None = None  # held now, as far as this side knows
        self._line: socket.socket | None = line
        self._path = path
        self._told_s: float | None = None  # time of the last message to the helper
        self._decoder = msgspec.json.Decoder(Answer)

    @classmethod
    def connect(cls, path: Path = SOCKET) -> Clocks | None:
        """Connect to the helper; None: there is none, or this user may not use it (that is logged)."""
        line = _dial(path)
        return None if line is None else cls(line, path)

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at a point; returns the point the board reports. Reconnects to a restarted helper.

        Raises:
            ClockError: the helper's reason; nothing is held then.
        """
        self.point = None
        if self._line is not None and _left(self._line):
            self.close()
        self._line = self._line or _dial(self._path)
        answer = self._ask(Hold(point=point))
        if answer.point is None:
            self.close()
            raise ClockError(f"the clock helper at {self._path} answered beside the question")
        self.point = answer.point
        return answer.point

    def release(self) -> None:
        """Return the clocks to the board; nothing happens if none are held.

        Raises:
            ClockError: something could not be restored, or the helper does not answer; it then restores by itself.
        """
        if self.point is not None:
            self.point = None
            self._ask(Release())

    def keepalive(self, now_s: float) -> None:
        """Signal that this side is alive; call it often, it sends every 2 s and only while it holds.

        Raises:
            ClockError: the helper has released; gives the reason.
        """
        if self.point is None:
            return
        if self._told_s is not None and 0 <= now_s - self._told_s < KEEPALIVE_S:
            return
        self._told_s = now_s
        try:
            self._ask(Keepalive())
        except ClockError:
            self.point = None
            raise

    def status(self) -> Status:
        """Status of the helper; raises ClockError if it does not answer."""
        answer = self._ask(Ask())
        return answer.status or Status(clocks=())

    def close(self) -> None:
        """Close the connection: the helper returns the clocks."""
        self.point = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _ask(self, request: Request) -> Answer:
        if self._line is None:
            raise ClockError(f"the clock helper at {self._path} is gone: see `systemctl status fedquilt-clocks`")
        try:
            self._line.settimeout(ANSWER_S)
            self._line.sendall(msgspec.json.encode(request) + b"\n")
            answer = self._decoder.decode(self._read())
        except (OSError, *UNDECODABLE) as error:
            self.close()
            raise ClockError(f"the clock helper at {self._path} does not answer: {error}") from None
        if answer.error is not None:
            raise ClockError(answer.error)
        return answer

    def _read(self) -> bytes:
        """Read one line within a deadline: a helper that sends byte by byte must not block this side."""
        assert self._line is not None
        read, end_s = b"", time.monotonic() + ANSWER_S
        while not read.endswith(b"\n"):
            self._line.settimeout(max(0.001, end_s - time.monotonic()))
            some = self._line.recv(65536)
            if not some:
                raise ConnectionResetError("it hung up")
            read += some
            if len(read) > ANSWER_MOST_BYTES or time.monotonic() > end_s:
                raise TimeoutError("no whole answer in time")
        return read


def _left(line: socket.socket) -> bool:
    """Whether the other side has closed: between requests nothing else is to arrive."""
    return bool(select.select([line], [], [], 0)[0])


def _dial(path: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(ANSWER_S)
    try:
        line.connect(str(path))
    except PermissionError:
        log.warning("no right to speak to the clock helper at %s: add this user to its --group", path)
    except OSError as error:
        log.debug("no clock helper at %s: %s", path, error)
    else:
        return line
    line.close()
    return None
