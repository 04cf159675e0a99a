"""Keep a connection alive while the thread that owns it computes for long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def tended(look: Callable[[], bool], every_s: float) -> Iterator[None]:
    """Call `look` in a thread of its own until it returns False or the body ends.

    The body must not use what `look` uses. It has to release the interpreter's lock now and then, as numpy does and
    as any Python code does.

    Args:
        look: answers the other side; False: the connection is gone.
        every_s: seconds between two calls.
    """
    done = threading.Event()

    def tend() -> None:
        while not done.wait(every_s) and look():
            pass

    thread = threading.Thread(target=tend, name="keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
