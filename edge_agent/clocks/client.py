"""The agent's side of the clock helper: one JSON line asks, one answers, on a Unix socket. Root is needed only there.

The helper (`fedquilt.edge_agent.clocks.helper`) puts the board's own settings back when this side lets go, ends or
falls silent: whoever holds calls `keepalive` more often than the helper's watchdog.
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

from fedquilt.core import Amount, ClockError, Label, OperatingPoint, Sentence, Wired

log = logging.getLogger("fedquilt.clocks")

SOCKET: Final = Path("/run/fedquilt/clocks.sock")
REQUEST_MOST_BYTES: Final = 4096
ANSWER_MOST_BYTES: Final = 1 << 18
ANSWER_S: Final = 2.0
KEEPALIVE_S: Final = 2.0  # no more often than this


class Hold(Wired, frozen=True, tag="hold"):
    """Hold the clocks there, until let go."""

    point: OperatingPoint


class Keepalive(Wired, frozen=True, tag="keepalive"):
    """Still here; refused, with the reason, if the helper has let go meanwhile."""


class Release(Wired, frozen=True, tag="release"):
    """Give the clocks back to the board."""


class Ask(Wired, frozen=True, tag="status"):
    """How things are; anybody who may speak to the helper may ask, whoever holds."""


class Clock(Wired, frozen=True):
    """One clock of the board, as it is now."""

    name: Label
    kind: Label  # cpu | gpu | emc
    listed_hz: tuple[Amount, ...]  # (): none listed, so it cannot be held
    low_hz: Amount | None
    high_hz: Amount | None
    now_hz: Amount | None
    governor: Label | None
    hidden: bool = False  # nothing is listed because whoever says this may not read the list


class Status(Wired, frozen=True):
    """What the helper knows: as root it also reads the lists that are in debugfs, which an agent's user may not."""

    clocks: tuple[Clock, ...]
    mode: Label | None = None  # nvpmodel's
    modes: tuple[Label, ...] = ()
    temperature_c: float | None = None  # the hottest zone
    hottest_c: float | None = None  # above it nothing is held
    holder: Sentence | None = None  # who holds, in words
    point: OperatingPoint | None = None
    owes: tuple[Sentence, ...] = ()  # what of the board's own could not be put back; it is tried again


class Answer(Wired, frozen=True):
    """To any request. A request that is refused has `error` alone."""

    error: Annotated[str, Meta(max_length=10_000)] | None = None
    point: OperatingPoint | None = None  # to Hold: what the board says
    status: Status | None = None  # to Ask


Request = Hold | Keepalive | Release | Ask


class Clocks:
    """A connection to the helper. Every call is answered within 2 s or raises ClockError."""

    def __init__(self, line: socket.socket, path: Path) -> None:
        self.point: OperatingPoint | None = None  # held now, as far as this side knows
        self._line: socket.socket | None = line
        self._path = path
        self._told_s: float | None = None  # when the helper last heard of this side
        self._decoder = msgspec.json.Decoder(Answer)

    @classmethod
    def connect(cls, path: Path = SOCKET) -> Clocks | None:
        """None: no helper there, or one that this user may not speak to (that is logged)."""
        line = _dial(path)
        return None if line is None else cls(line, path)

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at a point; what the board then says. A helper that was started anew is found again.

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
        """Give the clocks back; nothing happens if none are held.

        Raises:
            ClockError: something could not be put back, or the helper does not answer; it restores by itself then.
        """
        if self.point is not None:
            self.point = None
            self._ask(Release())

    def keepalive(self, now_s: float) -> None:
        """Tell the helper that this side lives; call it often, it speaks every 2 s and only while it holds.

        Raises:
            ClockError: the helper has let go, and why.
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
        """Raises ClockError where the helper does not answer."""
        answer = self._ask(Ask())
        return answer.status or Status(clocks=())

    def close(self) -> None:
        """Hang up: the helper gives the clocks back."""
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
        except (OSError, msgspec.DecodeError) as error:
            self.close()
            raise ClockError(f"the clock helper at {self._path} does not answer: {error}") from None
        if answer.error is not None:
            raise ClockError(answer.error)
        return answer

    def _read(self) -> bytes:
        """One line; by its own deadline, or a helper that drips bytes would keep this side for ever."""
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
    """Whether the other side has gone: nothing is to come between questions but the end of the connection."""
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
