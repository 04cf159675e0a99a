"""Many client halves at once: each stops where it trains, and those that can are trained in one graph.

A half is a plain function that calls `site.engine.train` as ever. Here it runs on a thread of its own, of
which one at a time is awake, in order: they are coroutines, not parallel, so that a method needs no locks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Joint:
    """An engine as one client half sees it: `train` waits for the others' where it can be done with theirs."""

    def __init__(self, engine: Any, half: _Half[Any]) -> None:
        self._engine, self._half = engine, half
        self.joint = False  # whether anything was, or could have been, trained together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, *args: Any, **options: Any) -> Any:
        """See `fedquilt.core.Trainer`."""
        call = self._engine.call(*args, **options)
        if call is None:
            return self._engine.train(*args, **options)
        self.joint = True
        return self._half.wait_for(call)


class _Half(Generic[T]):
    """One half on its thread. `on` and `off` are the baton."""

    def __init__(self, function: Callable[[Joint], T], engine: Any) -> None:
        self.joint = Joint(engine, self)
        self.call: Any = None  # what it waits for
        self.value: T | Exception | None = None
        self.over = False
        self._function, self._reply = function, None
        self._on, self._off = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self._thread.start()
        self._off.acquire()

    def resume(self, reply: Any) -> None:
        """Go on with what the call gave, to the next call or the end."""
        self.call, self._reply = None, reply
        self._on.release()
        self._off.acquire()

    def wait_for(self, call: Any) -> Any:
        self.call = call
        self._off.release()
        self._on.acquire()
        reply, self._reply = self._reply, None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _run(self) -> None:
        try:
            self.value = self._function(self.joint)
        except Exception as error:
            self.value = error
        finally:
            self.over = True
            self._off.release()


def together(functions: Sequence[Callable[[Any], T]], engine: Any) -> list[tuple[T | Exception, bool]]:
    """Each function called with an engine; what it returned or raised, and whether it trained together.

    Args:
        engine: one with `call` and `train_together` (`edge_agent.engines.torch_batched`), or any other,
            with which they are called one after the other.
    """
    if not hasattr(engine, "train_together"):
        return [(_tried(function, engine), False) for function in functions]
    halves = [_Half(function, engine) for function in functions]
    for half in halves:
        half.begin()
    while waiting := [half for half in halves if not half.over]:
        replies = engine.train_together([half.call for half in waiting])
        for half, reply in zip(waiting, replies, strict=True):
            half.resume(reply)
    return [(half.value, half.joint.joint) for half in halves]  # type: ignore[misc]


def _tried(function: Callable[[Any], T], engine: Any) -> T | Exception:
    try:
        return function(engine)
    except Exception as error:
        return error
