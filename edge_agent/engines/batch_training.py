"""Training of several devices in one pass, for simulated fleets with small training steps.

Calls of `train` that can be trained together form a group. If training a group fails, its calls are trained one by one,
so that each call raises the same error as alone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fedquilt import metrics
from fedquilt.core import Examples, Fit, Hooks, ModelError, Step, Tensors, UpdateError
from fedquilt.edge_agent.engines import evaluation_sums, numpy_engine, training
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine, NumpyOptimizer
from fedquilt.formats import training_choices

log = logging.getLogger("fedquilt.engines")

Trained = tuple[Tensors, dict[str, float]]  # tensors and metrics


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
        try:
            result: Trained = engine.train(*self[:5], hooks=self.hooks, progress=self.progress)
        except Exception as error:
            return error
        return result


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
        """Return a call for `train_together`, or None if this training cannot share a pass with others."""
        if hooks.prepare or hooks.inputs or hooks.steps != (Step(),) or not len(examples) or fit.batch < 1:
            return None
        call = TrainCall(network, start, examples, fit, rng, hooks, progress, msgspec.json.encode(network))
        key = self._batch_key(call)
        return None if key is None else call._replace(kind=key)

    def train_together(self, calls: Sequence[TrainCall]) -> list[Trained | Exception]:
        """Return the result or the exception of each call, in the order of the calls."""
        results: dict[int, Trained | Exception] = {}
        calls_by_kind: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            calls_by_kind.setdefault(call.kind, []).append(index)
        for indices in calls_by_kind.values():
            results.update(zip(indices, self._train_same_kind([calls[index] for index in indices]), strict=True))
        return [results[index] for index in range(len(calls))]

    def _train_same_kind(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        random_states = [call.rng.bit_generator.state for call in calls]
        try:
            return self._train_batch(calls)
        except Exception as error:  # the loop raises the same error if a call is wrong
            log.info("batched training of %d devices failed, training one by one: %s", len(calls), error)
            for call, state in zip(calls, random_states, strict=True):
                call.rng.bit_generator.state = state
            return [call.run_alone(self) for call in calls]

    @abstractmethod
    def _batch_key(self, call: TrainCall) -> Hashable | None:
        """Return a key shared by calls that can be trained in one pass, or None to train alone."""

    @abstractmethod
    def _train_batch(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        """Train calls of one kind in one pass. If this raises, the caller trains them one by one."""


class BatchedNumpyEngine(BatchTrainer, NumpyEngine):
    def _batch_key(self, call: TrainCall) -> Hashable | None:
        x, y = call.examples.x, call.examples.y
        if call.hooks.correct_gradient or call.fit.clip > 0 or training_choices.describe_torch_choices(vars(call.fit)):
            return None
        return call.table, call.fit, x.shape, x.dtype.str, y.shape[1:], y.dtype.str

    @np.errstate(invalid="ignore", over="ignore")  # values that are not finite are refused through the loss
    def _train_batch(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        first_call, count = calls[0], len(calls[0].examples)
        mlp, fit = numpy_engine.parse_network(first_call.network), first_call.fit
        for call in calls:
            training.require_shapes(call.start, mlp.shapes)
            evaluation_sums.require_targets(call.examples, mlp.classes, mlp.task)
        accounts = [training.TrainingProgress(count, fit, call.progress) for call in calls]
        model = {name: np.array([call.start[name] for call in calls], np.float32) for name in mlp.shapes}
        optimizer, failed = NumpyOptimizer(mlp, model, fit, first_call.hooks), dict[int, Exception]()
        micro_batch_size = self._micro_batch_size(mlp, fit.batch, copies=4)
        device_orders = [training.draw_orders(count, fit.epochs, call.rng) for call in calls]
        for epoch in range(fit.epochs):
            for batch in training.mini_batches(np.arange(count), fit.batch):
                losses, gradient = np.zeros(len(calls)), dict[str, np.ndarray]()
                for positions in training.micro_batches(batch, micro_batch_size):
                    rows = [device_order[epoch][positions] for device_order in device_orders]
                    losses += _losses_and_gradient(model, calls, rows, len(batch), gradient)
                for index, loss in enumerate(losses.tolist()):
                    if index not in failed:
                        try:
                            accounts[index].add_step(loss, len(batch))
                        except UpdateError as error:  # the other devices continue
                            failed[index] = error
                optimizer.step(gradient)
        return [
            failed.get(index) or ({name: array[index] for name, array in model.items()}, account.metrics())
            for index, account in enumerate(accounts)
        ]


def _losses_and_gradient(
    model: dict[str, np.ndarray],
    calls: Sequence[TrainCall],
    rows: Sequence[np.ndarray],
    count: int,
    gradient: dict[str, np.ndarray],
) -> np.ndarray:
    """Return the devices' losses (devices,), divided by `count`, and add their gradients to `gradient`."""
    network = calls[0].network
    x = _gather_rows([call.examples.x for call in calls], rows)
    y = _gather_rows([call.examples.y for call in calls], rows)
    ready = training.network_inputs(x, network).reshape(len(calls), len(rows[0]), -1)
    if ready.shape[2] != network["inputs"]:
        raise ModelError(f"examples have {ready.shape[2]} values each, the network has {network['inputs']} inputs")
    values = numpy_engine.forward(model, ready)
    scores = values.pop()
    losses, score_gradients = evaluation_sums.losses_and_gradients(
        metrics.task_from_network(network), scores.reshape(len(x), -1), y
    )
    numpy_engine.backward(model, values, score_gradients.reshape(scores.shape), count, gradient)
    return np.asarray(losses.reshape(len(calls), -1).sum(axis=1).astype(np.float64) / count)


def _gather_rows(arrays: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> np.ndarray:
    gathered = np.empty((len(arrays), len(rows[0]), *arrays[0].shape[1:]), arrays[0].dtype)
    for target, array, device_rows in zip(gathered, arrays, rows, strict=True):
        # The indices are valid, and numpy is slower with a check.
        array.take(device_rows, axis=0, out=target, mode="clip")
    return gathered.reshape(-1, *arrays[0].shape[1:])
