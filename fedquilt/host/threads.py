"""Thread settings of numeric libraries, and periodic calls in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

QUIET: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ORT_DISABLE_TELEMETRY": "1"}
"""Idle threads that spin slow down the working ones, ten times where agents share a host; numpy's products are small
here. ONNX Runtime (from 1.32 on) starts a thread that reports to its makers, unless it is told not to. Libraries read
these variables as they load, so they are set before, or for a new process."""


@contextmanager
def call_in_background(call: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `call` periodically in a thread until it returns False or the body ends.

    The body must not use the same objects as `call`. It must release the interpreter lock regularly, as numpy and
    Python code do.

    Args:
        call: Function that returns False to end the repetition.
        every_s: Seconds before the first call and between calls.
        name: Name of the thread.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s) and call() is not False:
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
