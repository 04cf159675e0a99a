"""Training of several devices in one pass, for simulated fleets, where steps are small and calls dominate.

What engines that can do it have in common: calls of `train` that wait for others, sorted by what goes together. Those
that do not fit are trained one by one, so that each raises what it would raise alone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fedquilt.core import Examples, Fit, Hooks, Step, Tensors

log = logging.getLogger("fedquilt.engines")

Trained = tuple[Tensors, dict[str, float]]


class Call(NamedTuple):
    """Call of `Trainer.train` that waits for others. Those of one `kind` are trained in one pass."""

    network: Mapping[str, Any]
    start: Tensors
    examples: Examples
    fit: Fit
    rng: np.random.Generator
    hooks: Hooks
    progress: Callable[[float], None]
    table: bytes  # network table as one key
    kind: Hashable = None

    def alone(self, engine: Any) -> Trained | Exception:
        """Run this call by itself; returns its result or its exception."""
        try:
            found: Trained = engine.train(
                self.network,
                self.start,
                self.examples,
                self.fit,
                self.rng,
                hooks=self.hooks,
                progress=self.progress,
            )
        except Exception as error:
            return error
        return found


class Together(ABC):
    """Part of an engine that also trains several devices at once."""

    def call(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> Call | None:
        """The arguments of `train` as a call for `train_together`; None: this one needs the loop."""
        if hooks.prepare or hooks.inputs or hooks.steps != (Step(),) or not len(examples) or fit.batch < 1:
            return None
        waiting = Call(network, start, examples, fit, rng, hooks, progress, msgspec.json.encode(network))
        kind = self._kind(waiting)
        return None if kind is None else waiting._replace(kind=kind)

    def train_together(self, calls: Sequence[Call]) -> list[Trained | Exception]:
        """Results of `train` for each call, or the exceptions it would raise."""
        found: list[Trained | Exception | None] = [None] * len(calls)
        kinds: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            kinds.setdefault(call.kind, []).append(index)
        for members in kinds.values():
            some = [calls[index] for index in members]
            for index, value in zip(members, self._batch_of(some), strict=True):
                found[index] = value
        return [value for value in found if value is not None]

    def _batch_of(self, calls: Sequence[Call]) -> Sequence[Trained | Exception]:
        """Train calls of one kind. If they do not fit the network, the loop raises for each."""
        before = [call.rng.bit_generator.state for call in calls]
        try:
            return self._trained(calls)
        except Exception as error:  # if the call is at fault, the loop raises the same
            log.info("%d devices are trained one by one, not together: %s", len(calls), error)
            for call, state in zip(calls, before, strict=True):
                call.rng.bit_generator.state = state
            return [call.alone(self) for call in calls]

    @abstractmethod
    def _kind(self, call: Call) -> Hashable | None:
        """What calls have in common that are trained in one pass; None: this one needs the loop."""

    @abstractmethod
    def _trained(self, calls: Sequence[Call]) -> Sequence[Trained | Exception]:
        """Train calls of one kind; whatever it raises, they are trained one by one instead."""
