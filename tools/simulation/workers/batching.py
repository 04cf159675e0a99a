"""Training of many simulated devices in one batch.

A client function calls `site.engine.train`. Where the engine can train several devices at once, the call raises
`BatchWait`. When all client functions wait or have ended, the waiting calls are trained together. Then each client
function is called again from its beginning, and its earlier calls return their stored results. This is correct
because a client function depends on its Task and Site alone and draws from a keyed generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fedquilt.core import ClientContext

T = TypeVar("T")
Given = tuple[Any, Any]  # what a call gave, or raises, and where its generator was after it


class RestartableClient(Generic[T]):
    """Client function that can be restarted with the same random state."""

    def __init__(self, site: Callable[[Any], ClientContext], work: Callable[[ClientContext], T]) -> None:
        self._make, self._work = site, work
        self._site: ClientContext | None = None
        self._begun: Any = None  # where its generator begins

    def __call__(self, engine: Any) -> T:
        if self._site is None:
            self._site = self._make(engine)
            self._begun = self._site.rng.bit_generator.state
        else:
            self._site.rng.bit_generator.state = self._begun
        return self._work(self._site)


class BatchWait(BaseException):
    """Signal that a client function waits for a call that is trained in a batch."""

    def __init__(self, call: Any) -> None:
        self.call = call


class ReplayEngine:
    """Engine of one client function that replays the results of earlier training calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.given: list[Given | None] = []  # calls of `train` so far, None for a call that must run alone
        self.next_call = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, network: Any, start: Any, examples: Any, fit: Any, rng: Any, **options: Any) -> Any:
        """Return the stored result of this call, or train alone if the call cannot be batched."""
        if self.next_call == len(self.given):
            call = self._engine.batchable_call(network, start, examples, fit, rng, **options)
            if call is not None:
                raise BatchWait(call)
            self.given.append(None)
        before = self.given[self.next_call]
        self.next_call += 1
        if before is None:
            return self._engine.train(network, start, examples, fit, rng, **options)
        reply, rng.bit_generator.state = before
        if isinstance(reply, Exception):
            raise reply
        return reply


def run_together(functions: Sequence[Callable[[Any], T]], engine: Any) -> list[tuple[T | Exception, bool]]:
    """Call all functions with an engine, training in batches where possible.

    Returns:
        For each function its result or exception, and whether its training could be batched.
    """
    found: list[Any] = [None] * len(functions)
    left = list(range(len(functions)))
    joints = [ReplayEngine(engine) for _ in functions] if hasattr(engine, "train_together") else []
    while left:
        calls: dict[int, Any] = {}
        for index in left:
            try:
                if joints:
                    joints[index].next_call = 0
                found[index] = functions[index](joints[index] if joints else engine)
            except BatchWait as wait:
                calls[index] = wait.call
            except Exception as error:
                found[index] = error
        left = list(calls)
        replies = engine.train_together(list(calls.values())) if calls else []
        for (index, call), reply in zip(calls.items(), replies, strict=True):
            joints[index].given.append((reply, call.rng.bit_generator.state))
    return [(value, bool(joints) and any(joints[index].given)) for index, value in enumerate(found)]
