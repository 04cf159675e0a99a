"""Batched training of several devices' networks in numpy, bit-identical to `numpy.engine`.

Parameters are stacked, (devices, ...), and numpy multiplies the matrices of each device separately, as the loop does.
The result of a device does not depend on the other devices in the batch. Devices with equal numbers of examples form a
batch.

`Hooks.correct` and clipping need the loop, because they work device by device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from fedquilt import metrics
from fedquilt.core import ModelError, UpdateError
from fedquilt.edge_agent.engines import objectives, training
from fedquilt.edge_agent.engines.batch_training import BatchTrainer, TrainCall, Trained
from fedquilt.edge_agent.engines.numpy import engine
from fedquilt.edge_agent.engines.numpy.engine import NumpyEngine, NumpyOptimizer
from fedquilt.formats import training_choices


class BatchedNumpyEngine(BatchTrainer, NumpyEngine):
    def _batch_key(self, call: TrainCall) -> Hashable | None:
        x, y = call.examples.x, call.examples.y
        if call.hooks.correct or call.fit.clip > 0 or training_choices.describe_torch_choices(vars(call.fit)):
            return None
        return call.table, call.fit, x.shape, x.dtype.str, y.shape[1:], y.dtype.str

    @np.errstate(invalid="ignore", over="ignore")  # values that are not finite are refused through the loss
    def _train_batch(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        first, count = calls[0], len(calls[0].examples)
        mlp, fit = engine.parse_network(first.network), first.fit
        for call in calls:
            training.require_shapes(call.start, mlp.shapes)
            objectives.require_targets(call.examples, mlp.classes, mlp.task)
        accounts = [training.TrainingProgress(count, fit, call.progress) for call in calls]
        model = {name: np.array([call.start[name] for call in calls], np.float32) for name in mlp.shapes}
        descent, failed = NumpyOptimizer(mlp, model, fit, first.hooks), dict[int, Exception]()
        at_once = self._micro_batch_size(mlp, fit.batch, copies=4)
        orders = [training.draw_orders(count, fit.epochs, call.rng) for call in calls]
        for epoch in range(fit.epochs):
            for batch in training.mini_batches(np.arange(count), fit.batch):
                losses, gradient = np.zeros(len(calls)), dict[str, np.ndarray]()
                for places in training.micro_batches(batch, at_once):
                    rows = [order[epoch][places] for order in orders]
                    losses += _losses_and_gradient(model, calls, rows, len(batch), gradient)
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


def _losses_and_gradient(
    model: dict[str, np.ndarray],
    calls: Sequence[TrainCall],
    rows: Sequence[np.ndarray],
    count: int,
    gradient: dict[str, np.ndarray],
) -> np.ndarray:
    """Add each device's gradient to `gradient`. Return the mean losses of the rows, (devices,).

    Raises:
        ModelError: If the examples do not fit the network.
    """
    network = calls[0].network
    x = _gather_rows([call.examples.x for call in calls], rows)
    y = _gather_rows([call.examples.y for call in calls], rows)
    ready = training.network_inputs(x, network).reshape(len(calls), len(rows[0]), -1)
    if ready.shape[2] != network["inputs"]:
        raise ModelError(f"examples hold {ready.shape[2]} values each")
    values = engine.forward(model, ready)
    scores = values.pop()
    each, back = objectives.losses_and_gradients(metrics.task_from_network(network), scores.reshape(len(x), -1), y)
    engine.backward(model, values, back.reshape(scores.shape), count, gradient)
    return np.asarray(each.reshape(len(calls), -1).sum(axis=1).astype(np.float64) / count)


def _gather_rows(arrays: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> np.ndarray:
    found = np.empty((len(arrays), len(rows[0]), *arrays[0].shape[1:]), arrays[0].dtype)
    for place, array, some in zip(found, arrays, rows, strict=True):
        array.take(some, axis=0, out=place, mode="clip")  # of rows that there are; numpy is slower if it checks
    return found.reshape(-1, *arrays[0].shape[1:])
