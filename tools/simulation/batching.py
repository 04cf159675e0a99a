"""Many client halves at once: each stops where it trains, and those that can are trained in one graph.

A half is a plain function that calls `site.engine.train` as ever. One that can be trained together with
others is broken off there; when all have come so far they are trained, and each half is called again, with
what its calls gave at hand, up to its next call or its end. So what a half does before a call it does twice,
with the same outcome: a half is a function of its Task and Site, its generator keyed, and a cache is a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fedquilt.core import Site

T = TypeVar("T")
Given = tuple[Any, Any]  # what a call gave, or raises, and where its generator was after it


class Half(Generic[T]):
    """A client half, to be called with one engine, once or again: its Site is made once, its generator is set back.

    Args:
        site: what the device has, with this engine.
        work: what it does with it.
    """

    def __init__(self, site: Callable[[Any], Site], work: Callable[[Site], T]) -> None:
        self._make, self._work = site, work
        self._site: Site | None = None
        self._begun: Any = None  # where its generator begins

    def __call__(self, engine: Any) -> T:
        """Run the client half again from its beginning, with the same random draws."""
        if self._site is None:
            self._site = self._make(engine)
            self._begun = self._site.rng.bit_generator.state
        else:
            self._site.rng.bit_generator.state = self._begun
        return self._work(self._site)


class Wait(BaseException):
    """A half has come to a call that waits for others."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call


class Joint:
    """An engine as one client half sees it, from one of its calls to the next."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._given: list[Given | None] = []  # of each call of `train` so far; None: it cannot be done with others'
        self._at = 0  # which call comes next

    @property
    def joint(self) -> bool:
        """Whether a call was done together with others', or could have been."""
        return any(given is not None for given in self._given)

    def begin(self) -> None:
        """The half is about to be called from its beginning."""
        self._at = 0

    def give(self, reply: Any, generator: Any) -> None:
        """Result of the call that the half waits for, and the state of its generator."""
        self._given.append((reply, generator))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, network: Any, start: Any, examples: Any, fit: Any, rng: Any, **options: Any) -> Any:
        """See `fedquilt.core.Trainer`.

        Raises:
            Wait: it can be done together with others'.
        """
        if self._at == len(self._given):
            call = self._engine.call(network, start, examples, fit, rng, **options)
            if call is not None:
                raise Wait(call)
            self._given.append(None)
        before = self._given[self._at]
        self._at += 1
        if before is None:
            return self._engine.train(network, start, examples, fit, rng, **options)
        reply, rng.bit_generator.state = before
        if isinstance(reply, Exception):
            raise reply
        return reply


def together(functions: Sequence[Callable[[Any], T]], engine: Any) -> list[tuple[T | Exception, bool]]:
    """Call each function with an engine; returns its result or exception, and whether it could train with others.

    Args:
        functions: each takes the engine.
        engine: one with `call` and `train_together` (`edge_agent.engines.torch_batched`), or any other,
            with which each is called once, one after the other.
    """
    found: list[Any] = [None] * len(functions)
    left = list(range(len(functions)))
    joints = [Joint(engine) for _ in functions] if hasattr(engine, "train_together") else []
    while left:
        calls: dict[int, Any] = {}
        for index in left:
            try:
                if joints:
                    joints[index].begin()
                found[index] = functions[index](joints[index] if joints else engine)
            except Wait as wait:
                calls[index] = wait.call
            except Exception as error:
                found[index] = error
        left = list(calls)
        replies = engine.train_together(list(calls.values())) if calls else []
        for (index, call), reply in zip(calls.items(), replies, strict=True):
            joints[index].give(reply, call.rng.bit_generator.state)
    return [(value, bool(joints) and joints[index].joint) for index, value in enumerate(found)]
