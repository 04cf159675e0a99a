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
from typing import Any, Final, TypeVar

LARGE_BYTES: Final = 4 << 20  # of a state or an update: from here on it is read, folded and stored beside the loop

T = TypeVar("T")
Then = Callable[[Callable[[], T], float], None]
"""`then(result, now_s)`: `result()` returns what the piece has returned, or raises what it has raised."""


class BackgroundWorker:
    """Worker that runs each work item inside `submit`.

    Args:
        large_bytes: The size from which on a state or an update is left to the worker, by default infinite.
    """

    stored_at = 2.0  # times an exact sum's own bytes: so many of updates are folded when it is stored, and then dropped

    def __init__(self, large_bytes: float = math.inf) -> None:
        self.large_bytes = large_bytes
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
        """Queue a work item. `run_callbacks` calls `then` once the item has ended."""
        self._ended.append((then, run_and_capture(piece)))

    def run_callbacks(self, now_s: float) -> int:
        """Call the callbacks of work items that have ended, and return their number."""
        count = len(self._ended)
        for _ in range(count):
            then, result = self._ended.popleft()
            then(result, now_s)
        return count

    def close(self) -> None:
        """Start no further work items, and wait for the running one."""


class ThreadWorker(BackgroundWorker):
    """Worker in a thread, which starts with the first work item."""

    def __init__(self, large_bytes: float = LARGE_BYTES) -> None:
        super().__init__(large_bytes)
        self._begun: queue.SimpleQueue[tuple[Callable[[], Any], Then[Any]] | None] = queue.SimpleQueue()
        self._open = 0  # pieces whose results have not been taken
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        return self._open == 0

    def fds(self) -> Sequence[int]:
        return () if self._thread is None else (self._wake,)

    def submit(self, piece: Callable[[], T], then: Then[T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_work_items, name="worker", daemon=True)
            self._thread.start()
        self._open += 1
        self._begun.put((piece, then))

    def run_callbacks(self, now_s: float) -> int:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        count = super().run_callbacks(now_s)
        self._open -= count
        return count

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
