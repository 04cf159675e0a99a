"""Batched training of several devices' networks in numpy: the bits of `numpy_engine`'s loop, in fewer calls.

Parameters are stacked, (devices, ...), and numpy multiplies each device's matrices by themselves, as the loop does. So
each device has the bits that it has alone, whoever else is trained with it. Devices with as many examples go together.

The loop is left to what has to be looked at device by device: `Hooks.correct`, and clipping.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from fedquilt import metrics
from fedquilt.core import ModelError, UpdateError
from fedquilt.edge_agent.engines import numpy_engine, objectives, training
from fedquilt.edge_agent.engines.numpy_engine import Descent, NumpyEngine
from fedquilt.edge_agent.engines.together import Call, Together, Trained


class BatchedNumpyEngine(Together, NumpyEngine):
    """A `NumpyEngine` that also trains several devices at once."""

    def _kind(self, call: Call) -> Hashable | None:
        x, y = call.examples.x, call.examples.y
        if call.hooks.correct or call.fit.clip > 0:
            return None
        return call.table, call.fit, x.shape, x.dtype.str, y.shape[1:], y.dtype.str

    @np.errstate(invalid="ignore", over="ignore")  # values that are not finite are refused through the loss
    def _trained(self, calls: Sequence[Call]) -> Sequence[Trained | Exception]:
        first, count = calls[0], len(calls[0].examples)
        mlp, fit = numpy_engine.network_of(first.network), first.fit
        for call in calls:
            training.require_fit(call.start, mlp.shapes)
            objectives.require_targets(call.examples, mlp.classes, mlp.task)
        accounts = [training.Steps(count, fit, call.progress) for call in calls]
        model = {name: np.array([call.start[name] for call in calls], np.float32) for name in mlp.shapes}
        descent, failed = Descent(mlp, model, fit, first.hooks), dict[int, Exception]()
        at_once = self._at_once(mlp, fit.batch, copies=4)
        orders = [training.orders(count, fit.epochs, call.rng) for call in calls]
        for epoch in range(fit.epochs):
            for batch in training.batches(np.arange(count), fit.batch):
                losses, gradient = np.zeros(len(calls)), dict[str, np.ndarray]()
                for places in training.micro_batches(batch, at_once):
                    rows = [order[epoch][places] for order in orders]
                    losses += _gradient(model, calls, rows, len(batch), gradient)
                for index, loss in enumerate(losses.tolist()):
                    if index not in failed:
                        try:
                            accounts[index].add_step(loss, len(batch))
                        except UpdateError as error:  # the others go on
                            failed[index] = error
                descent.step(gradient)
        return [
            failed.get(index) or ({name: array[index] for name, array in model.items()}, account.metrics())
            for index, account in enumerate(accounts)
        ]


def _gradient(
    model: dict[str, np.ndarray],
    calls: Sequence[Call],
    rows: Sequence[np.ndarray],
    count: int,
    gradient: dict[str, np.ndarray],
) -> np.ndarray:
    """Add the gradient of these rows of each device's examples; returns their part of the mean losses, (devices,).

    Raises:
        ModelError: the examples do not fit the network.
    """
    network = calls[0].network
    x = _gathered([call.examples.x for call in calls], rows)
    y = _gathered([call.examples.y for call in calls], rows)
    ready = training.features(x, network).reshape(len(calls), len(rows[0]), -1)
    if ready.shape[2] != network["inputs"]:
        raise ModelError(f"examples hold {ready.shape[2]} values each")
    values = numpy_engine.forward(model, ready)
    scores = values.pop()
    each, back = objectives.losses(metrics.task_of(network), scores.reshape(len(x), -1), y)
    numpy_engine.backward(model, values, back.reshape(scores.shape), count, gradient)
    return np.asarray(each.reshape(len(calls), -1).sum(axis=1).astype(np.float64) / count)


def _gathered(arrays: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> np.ndarray:
    """These rows of each array, one array's behind the other's. The arrays are alike, and so many rows of each."""
    found = np.empty((len(arrays), len(rows[0]), *arrays[0].shape[1:]), arrays[0].dtype)
    for place, array, some in zip(found, arrays, rows, strict=True):
        array.take(some, axis=0, out=place, mode="clip")  # of rows that there are; numpy is slower if it checks
    return found.reshape(-1, *arrays[0].shape[1:])
