"""Training of several devices in one pass, for simulated fleets with small training steps.

Calls of `train` are grouped by what can be trained together. Calls that do not fit are trained one by one, so that each
raises the same error as alone.
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


class TrainCall(NamedTuple):
    network: Mapping[str, Any]
    start: Tensors
    examples: Examples
    fit: Fit
    rng: np.random.Generator
    hooks: Hooks
    progress: Callable[[float], None]
    table: bytes  # network table as one key
    kind: Hashable = None

    def run_alone(self, engine: Any) -> Trained | Exception:
        """Return the result of `engine.train`, or the exception that `train` raised."""
        try:
            found: Trained = engine.train(*self[:5], hooks=self.hooks, progress=self.progress)
        except Exception as error:
            return error
        return found


class BatchTrainer(ABC):
    def batchable_call(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> TrainCall | None:
        """Return a call for `train_together`, or None if the arguments must be trained alone."""
        if hooks.prepare or hooks.inputs or hooks.steps != (Step(),) or not len(examples) or fit.batch < 1:
            return None
        waiting = TrainCall(network, start, examples, fit, rng, hooks, progress, msgspec.json.encode(network))
        kind = self._batch_key(waiting)
        return None if kind is None else waiting._replace(kind=kind)

    def train_together(self, calls: Sequence[TrainCall]) -> list[Trained | Exception]:
        """Return the result of `train` for each call, or the exception of that call."""
        found: dict[int, Trained | Exception] = {}
        kinds: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            kinds.setdefault(call.kind, []).append(index)
        for members in kinds.values():
            found.update(zip(members, self._train_same_kind([calls[index] for index in members]), strict=True))
        return [found[index] for index in range(len(calls))]

    def _train_same_kind(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        """Train calls in one pass or, after any exception, one by one from the same random state."""
        before = [call.rng.bit_generator.state for call in calls]
        try:
            return self._train_batch(calls)
        except Exception as error:  # if the call is at fault, the loop raises the same
            log.info("%d devices are trained one by one, not together: %s", len(calls), error)
            for call, state in zip(calls, before, strict=True):
                call.rng.bit_generator.state = state
            return [call.run_alone(self) for call in calls]

    @abstractmethod
    def _batch_key(self, call: TrainCall) -> Hashable | None:
        """Return a key shared by calls that can be trained in one pass, or None to train alone."""

    @abstractmethod
    def _train_batch(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        """Train calls of one kind in one pass. After any exception they are trained one by one."""
