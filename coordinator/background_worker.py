"""Background work, for operations that would block the coordinator's loop for too long.

A work item is a function without arguments that modifies nothing used by the loop at the same time. The callback runs
in the loop, by `run_callbacks`.
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


class BackgroundWorker(Protocol):
    large_bytes: float
    """Size of a state or an update from which on it is for the worker."""

    stored_at: float
    """Times an exact sum's own bytes: so many of updates are folded when it is stored, and they are dropped."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def has_results(self) -> bool: ...

    def fds(self) -> Sequence[int]: ...

    def submit(self, piece: Callable[[], T], then: Then[T]) -> None:
        """Queue a work item. `run_callbacks` calls `then` once the item has ended."""
        ...

    def run_callbacks(self, now_s: float) -> bool:
        """Call the callbacks of work items that have ended. Return whether there were any."""
        ...

    def close(self) -> None:
        """Start no further work items, and wait for the running one."""
        ...


class SynchronousWorker:
    """Worker that runs each work item inside `submit`."""

    def __init__(self, large_bytes: float = math.inf) -> None:
        self.large_bytes, self.stored_at = large_bytes, STORED_AT
        self._ended: deque[tuple[Then[Any], Callable[[], Any]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._ended

    @property
    def has_results(self) -> bool:
        return bool(self._ended)

    def fds(self) -> Sequence[int]:
        return ()

    def submit(self, piece: Callable[[], T], then: Then[T]) -> None:
        self._ended.append((then, run_and_capture(piece)))

    def run_callbacks(self, now_s: float) -> bool:
        return _run_callbacks(self._ended, now_s) > 0

    def close(self) -> None: ...


class ThreadWorker:
    """Worker in a thread, which starts with the first work item."""

    def __init__(self, large_bytes: float = LARGE_BYTES) -> None:
        self.large_bytes, self.stored_at = large_bytes, STORED_AT
        self._begun: queue.SimpleQueue[tuple[Callable[[], Any], Then[Any]] | None] = queue.SimpleQueue()
        self._ended: deque[tuple[Then[Any], Callable[[], Any]]] = deque()
        self._open = 0  # pieces whose results have not been taken
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        return self._open == 0

    @property
    def has_results(self) -> bool:
        return bool(self._ended)

    def fds(self) -> Sequence[int]:
        return () if self._thread is None else (self._wake,)

    def submit(self, piece: Callable[[], T], then: Then[T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_work_items, name="worker", daemon=True)
            self._thread.start()
        self._open += 1
        self._begun.put((piece, then))

    def run_callbacks(self, now_s: float) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        count = _run_callbacks(self._ended, now_s)
        self._open -= count
        return count > 0

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join()

    def _run_work_items(self) -> None:
        while (begun := self._begun.get()) is not None and not self._closed:
            piece, then = begun
            self._ended.append((then, run_and_capture(piece)))
            del begun, piece, then  # what they hold may be large
            os.eventfd_write(self._wake, 1)


def run_and_capture(piece: Callable[[], T]) -> Callable[[], T]:
    """Run a work item. Return a function that returns its result or raises its error."""
    try:
        found = piece()
    except Exception as error:
        raised = error

        def fail() -> T:
            raise raised

        return fail
    return lambda: found


def _run_callbacks(ended: deque[tuple[Then[Any], Callable[[], Any]]], now_s: float) -> int:
    count = len(ended)
    for _ in range(count):
        then, result = ended.popleft()
        then(result, now_s)
    return count
