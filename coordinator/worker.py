"""Work that would stop the coordinator's loop for too long: done elsewhere, one piece after the other.

A piece is a function without arguments that changes nothing the loop uses at the same time. What follows from its
result is decided in the loop, which calls `finish`.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

STORED_AT: Final = 2.0
LARGE_BYTES: Final = 4 << 20  # of a state or an update: from here on it is read, folded and stored beside the loop

T = TypeVar("T")
Then = Callable[[Callable[[], T], float], None]
"""`then(result, now_s)`: `result()` returns what the piece has returned, or raises what it has raised."""


class Worker(Protocol):
    """Carries out pieces of work in the order in which they were started."""

    large_bytes: float
    """Size of a state or an update from which on it is for the worker."""

    stored_at: float
    """Times an exact sum's own bytes: so many of updates are folded when it is stored, and they are dropped."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and every result has been taken."""
        ...

    @property
    def ended(self) -> bool:
        """Whether `finish` has something to decide."""
        ...

    def fds(self) -> Sequence[int]:
        """File descriptors that are readable when a piece has ended."""
        ...

    def start(self, piece: Callable[[], T], then: Then[T]) -> None:
        """Begin a piece of work."""
        ...

    def finish(self, now_s: float) -> bool:
        """Decide what follows from the pieces that have ended; returns whether there were any."""
        ...

    def close(self) -> None:
        """Start no piece any more; the one under way ends first."""
        ...


class Here:
    """A worker in the loop itself: a piece has ended when `start` returns.

    Args:
        large_bytes: as of `Worker`; by default nothing is large.
    """

    def __init__(self, large_bytes: float = math.inf) -> None:
        self.large_bytes, self.stored_at = large_bytes, STORED_AT
        self._ended: deque[tuple[Then[Any], Callable[[], Any]]] = deque()

    @property
    def idle(self) -> bool:
        """See `Worker`."""
        return not self._ended

    @property
    def ended(self) -> bool:
        """See `Worker`."""
        return bool(self._ended)

    def fds(self) -> Sequence[int]:
        """None: nothing happens elsewhere."""
        return ()

    def start(self, piece: Callable[[], T], then: Then[T]) -> None:
        """See `Worker`."""
        self._ended.append((then, outcome(piece)))

    def finish(self, now_s: float) -> bool:
        """See `Worker`."""
        return _finish(self._ended, now_s) > 0

    def close(self) -> None:
        """Nothing is under way."""


class Thread:
    """A worker in a thread of its own, which begins with the first piece.

    Args:
        large_bytes: as of `Worker`.
    """

    def __init__(self, large_bytes: float = LARGE_BYTES) -> None:
        self.large_bytes, self.stored_at = large_bytes, STORED_AT
        self._begun: queue.SimpleQueue[tuple[Callable[[], Any], Then[Any]] | None] = queue.SimpleQueue()
        self._ended: deque[tuple[Then[Any], Callable[[], Any]]] = deque()
        self._open = 0  # pieces whose results have not been taken
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """See `Worker`."""
        return self._open == 0

    @property
    def ended(self) -> bool:
        """See `Worker`."""
        return bool(self._ended)

    def fds(self) -> Sequence[int]:
        """Return the file descriptor that becomes readable when a work item has ended, or none before the start."""
        return () if self._thread is None else (self._wake,)

    def start(self, piece: Callable[[], T], then: Then[T]) -> None:
        """See `Worker`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
            self._thread.start()
        self._open += 1
        self._begun.put((piece, then))

    def finish(self, now_s: float) -> bool:
        """Call the callbacks of work items that have ended. Return whether there were any."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        count = _finish(self._ended, now_s)
        self._open -= count
        return count > 0

    def close(self) -> None:
        """See `Worker`."""
        self._closed = True
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None and not self._closed:
            piece, then = begun
            self._ended.append((then, outcome(piece)))
            del begun, piece, then  # what they hold may be large
            os.eventfd_write(self._wake, 1)


def outcome(piece: Callable[[], T]) -> Callable[[], T]:
    """Carry out a piece of work; returns a function that returns its result, or raises its error."""
    try:
        found = piece()
    except Exception as error:
        raised = error

        def fail() -> T:
            raise raised

        return fail
    return lambda: found


def _finish(ended: deque[tuple[Then[Any], Callable[[], Any]]], now_s: float) -> int:
    """Decide what follows from the pieces that have ended by now; returns their number."""
    count = len(ended)
    for _ in range(count):
        then, result = ended.popleft()
        then(result, now_s)
    return count
