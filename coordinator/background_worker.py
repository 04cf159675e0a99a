"""Background work, for operations that would block the coordinator's loop for too long.

A work item is a function without arguments. While the item runs, it modifies nothing that the loop uses. Afterwards
`run_callbacks` calls the item's callback in the loop.
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

LARGE_BYTES: Final = 4 << 20  # size from which states and updates are processed by the worker

T = TypeVar("T")
Callback = Callable[[Callable[[], T], float], None]
"""`callback(result, now_s)`: `result()` returns the result of the work item, or raises its error."""


class BackgroundWorker:
    """Worker without a thread: `submit` runs each work item at once, in the loop.

    Args:
        large_bytes: The size from which the loop passes states and updates to the worker.
    """

    # an exact aggregate is stored when newly folded updates have this multiple of its bytes (`Aggregator.fold_next`)
    min_unsaved_ratio = 2.0

    def __init__(self, large_bytes: float = math.inf) -> None:
        self.large_bytes = large_bytes
        self._finished: deque[tuple[Callback[Any], Callable[[], Any]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._finished

    @property
    def has_results(self) -> bool:
        return bool(self._finished)

    def fds(self) -> Sequence[int]:
        return ()

    def submit(self, work_item: Callable[[], T], callback: Callback[T]) -> None:
        """Queue a work item. `run_callbacks` calls `callback` once the item has ended."""
        self._finished.append((callback, run_and_capture(work_item)))

    def run_callbacks(self, now_s: float) -> int:
        """Call the callbacks of work items that have ended, and return their number."""
        count = len(self._finished)
        for _ in range(count):  # a callback may submit further items
            callback, result = self._finished.popleft()
            callback(result, now_s)
        return count

    def close(self) -> None:
        """Start no further work items, and wait for the running one."""


class ThreadWorker(BackgroundWorker):
    """Worker in a thread. `fds` becomes readable when a work item has ended."""

    def __init__(self, large_bytes: float = LARGE_BYTES) -> None:
        super().__init__(large_bytes)
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Callback[Any]] | None] = queue.SimpleQueue()
        self._pending_count = 0  # work items whose callback has not run
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        return self._pending_count == 0

    def fds(self) -> Sequence[int]:
        return () if self._thread is None else (self._wake,)

    def submit(self, work_item: Callable[[], T], callback: Callback[T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_work_items, name="worker", daemon=True)
            self._thread.start()
        self._pending_count += 1
        self._queue.put((work_item, callback))

    def run_callbacks(self, now_s: float) -> int:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        count = super().run_callbacks(now_s)
        self._pending_count -= count
        return count

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run_work_items(self) -> None:
        while (entry := self._queue.get()) is not None and not self._closed:
            work_item, callback = entry
            self._finished.append((callback, run_and_capture(work_item)))
            del entry, work_item, callback  # free their memory
            os.eventfd_write(self._wake, 1)


def run_and_capture(work_item: Callable[[], T]) -> Callable[[], T]:
    """Run a work item. Return a function that returns its result or raises its error."""
    try:
        result = work_item()
    except Exception as error:
        raised = error

        def fail() -> T:
            raise raised

        return fail
    return lambda: result
