"""Fully connected networks in numpy, for boards without torch and as a check of the torch engine.

The network table is `{"name": "mlp", "inputs": d, "hidden": [h, ...], "classes": k}`, with an optional "input" table
for images. Tensors are named as in torch's `Sequential(Flatten, Linear, ReLU, ..., Linear)`: "1.weight" (h, d),
"1.bias" (h,), "3.weight" and so on. Losses are in `evaluation_sums`. Steps equal those of `torch.optim.SGD` and `Adam`.
Equal input and an equal generator give bit-identical results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from fedquilt import extras, metrics
from fedquilt.arrays import tensors
from fedquilt.core import DataError, EvaluationSums, Examples, Fit, Hooks, JobError, ModelError, TaskKind, Tensors
from fedquilt.edge_agent.engines import evaluation_sums, training
from fedquilt.formats import toml, training_choices

BASE_BYTES = 44_000_000  # resident size with numpy, this package and a split (x86-64, numpy 2.4)
EVALUATION_BATCH = 1024
BETAS, EPSILON = (0.9, 0.999), 1e-8  # defaults of torch.optim.Adam


class MlpTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    inputs: int
    classes: int
    hidden: tuple[int, ...] = (64,)
    task: TaskKind = "classes"
    input: dict[str, Any] | None = None
    calls: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (inputs, outputs) in enumerate(pairwise((self.inputs, *self.hidden, self.classes))):
            shapes[f"{2 * layer + 1}.weight"] = (outputs, inputs)  # every other module is a ReLU
            shapes[f"{2 * layer + 1}.bias"] = (outputs,)
        return shapes


def init_tensors(network: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return random initial tensors, drawn like torch's for linear layers: U(-1/sqrt(d), 1/sqrt(d))."""
    rng = tensors.seeded_rng("mlp", seed)
    arrays, shapes = {}, iter(parse_network(network).shapes.items())
    for (weight, shape), (bias, size) in zip(shapes, shapes, strict=True):
        bound = 1 / math.sqrt(shape[1])
        arrays[weight] = rng.uniform(-bound, bound, shape).astype(np.float32)
        arrays[bias] = rng.uniform(-bound, bound, size).astype(np.float32)
    return arrays


class NumpyEngine:
    """Trainer for fully connected networks, as in `fedquilt.core.Trainer`."""

    name = "numpy"

    def __init__(self, budget_bytes: int, *, base_bytes: int = BASE_BYTES) -> None:
        self._room_bytes = budget_bytes - base_bytes

    def close(self) -> None: ...

    @np.errstate(invalid="ignore", over="ignore")  # values that are not finite are refused through the loss
    def train(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> tuple[Tensors, dict[str, float]]:
        _require_supported_hooks(hooks)
        if unsupported := training_choices.describe_torch_choices(vars(fit)):
            raise JobError(f"the numpy engine cannot train with {unsupported}: {extras.installation_command('train')}")
        mlp, model = _load_network(network, start)
        evaluation_sums.require_targets(examples, mlp.classes, mlp.task)
        steps = training.TrainingProgress(len(examples), fit, progress)
        optimizer = NumpyOptimizer(mlp, model, fit, hooks)
        micro_batch_size = self._micro_batch_size(mlp, fit.batch, copies=4 + len(hooks.anchors))
        for epoch_order in training.draw_orders(len(examples), fit.epochs, rng):
            for batch in training.mini_batches(epoch_order, fit.batch):
                loss, gradient = _loss_and_gradient(network, model, examples, batch, micro_batch_size, hooks)
                steps.add_step(loss, len(batch))
                optimizer.step(gradient)
        return model, steps.metrics()

    @np.errstate(invalid="ignore", over="ignore")
    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        _require_supported_hooks(hooks)
        mlp, model = _load_network(network, model)
        evaluation_sums.require_targets(examples, mlp.classes, mlp.task)
        parts = training.mini_batches(np.arange(len(examples)), self._micro_batch_size(mlp, EVALUATION_BATCH, copies=1))
        batches = (
            (forward(model, _prepare_inputs(network, examples.x[rows], hooks))[-1], examples.y[rows]) for rows in parts
        )
        return evaluation_sums.evaluate_scores(mlp.task, batches, examples.prior).sums()

    @np.errstate(invalid="ignore", over="ignore")
    def fisher(
        self,
        network: Mapping[str, Any],
        model: Tensors,
        examples: Examples,
        *,
        examples_per_gradient: int = 1,
        hooks: Hooks = Hooks(),
    ) -> Tensors:
        _require_supported_hooks(hooks)
        training.require_examples(examples, examples_per_gradient)
        mlp, arrays = _load_network(network, model)
        evaluation_sums.require_targets(examples, mlp.classes, mlp.task)
        micro_batch_size = self._micro_batch_size(mlp, examples_per_gradient, copies=4)
        total = {name: np.zeros_like(array) for name, array in arrays.items()}
        groups = list(training.mini_batches(np.arange(len(examples)), examples_per_gradient))
        for rows in groups:
            _, gradient = _loss_and_gradient(network, arrays, examples, rows, micro_batch_size, hooks)
            for name, array in gradient.items():
                total[name] += np.square(array)
        return {name: array / np.float32(len(groups)) for name, array in total.items()}

    def _micro_batch_size(self, mlp: MlpTable, max_size: int, copies: int) -> int:
        weights = 4 * sum(math.prod(shape) for shape in mlp.shapes.values())
        example = 4 * 3 * (mlp.inputs + sum(mlp.hidden) + mlp.classes)  # values, their gradients, scratch
        return training.fitting_batch_size(self._room_bytes - copies * weights, example, max_size)


class NumpyOptimizer:
    """Optimizer that corrects and clips gradients, adds weight decay and updates the model in place."""

    def __init__(self, mlp: MlpTable, model: dict[str, np.ndarray], fit: Fit, hooks: Hooks) -> None:
        self._model, self._fit, self._correct = model, fit, hooks.correct_gradient
        self._rates = {name: np.float32(fit.lr * hooks.steps[0].rate(name)) for name in model}
        is_adam = fit.optimizer == "adam"
        self._first_moments = _zeros_like(model) if is_adam or fit.momentum else {}  # momentum, or Adam's first moment
        self._second_moments = _zeros_like(model) if is_adam else {}
        self._steps = 0
        training.require_anchors(hooks.anchors, mlp.shapes)
        anchors: dict[str, Tensors] = {}
        if hooks.correct_gradient:
            anchors = {"start": {name: array.copy() for name, array in model.items()}, **hooks.anchors}
        self._anchors_by_tensor = {
            name: {key: np.asarray(anchor[name], np.float32) for key, anchor in anchors.items()} for name in model
        }

    def step(self, gradient: dict[str, np.ndarray]) -> None:
        gradients = {name: array for name, array in gradient.items() if self._rates[name] > 0}
        if self._correct:
            gradients = {
                name: self._correct(g, self._model[name], self._anchors_by_tensor[name])
                for name, g in gradients.items()
            }
        scale = 1.0
        if self._fit.clip > 0:
            norm = math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in gradients.values()))
            scale = min(1.0, self._fit.clip / (norm + 1e-6))
        self._steps += 1
        for name, array in gradients.items():
            value = self._model[name]
            change = array if scale == 1.0 else array * np.float32(scale)
            if self._fit.weight_decay:
                change = change + np.float32(self._fit.weight_decay) * value
            value -= self._rates[name] * (self._adam_direction if self._second_moments else self._sgd_direction)(
                name, change
            )

    def _sgd_direction(self, name: str, change: np.ndarray) -> np.ndarray:
        if not self._fit.momentum:
            return change
        momentum = np.float32(self._fit.momentum)
        self._first_moments[name] = momentum * self._first_moments[name] + change
        return change + momentum * self._first_moments[name] if self._fit.nesterov else self._first_moments[name]

    def _adam_direction(self, name: str, change: np.ndarray) -> np.ndarray:
        beta1, beta2 = BETAS
        self._first_moments[name] += np.float32(1 - beta1) * (change - self._first_moments[name])
        self._second_moments[name] += np.float32(1 - beta2) * (np.square(change) - self._second_moments[name])
        mean = self._first_moments[name] / np.float32(1 - beta1**self._steps)
        root = np.sqrt(self._second_moments[name]) / np.float32(math.sqrt(1 - beta2**self._steps))
        return mean / (root + np.float32(EPSILON))


def _zeros_like(model: Tensors) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in model.items()}


def _require_supported_hooks(hooks: Hooks) -> None:
    hook_values = {
        "prepare": hooks.prepare,
        "a second step": hooks.steps[1:],
        "penalty": hooks.steps[0].penalty,
        "before_step": hooks.steps[0].before_step,
        "exits": hooks.steps[0].exits,
    }
    if unsupported := [name for name, value in hook_values.items() if value]:
        raise ModelError(
            f"the numpy engine lacks {' and '.join(unsupported)}, which this method requires: "
            f"{extras.installation_command('train')}"
        )


# -- the network ----------------------------------------------------------------------------------


def parse_network(network: Mapping[str, Any]) -> MlpTable:
    """Return an "mlp" table. Raise ModelError for other networks, unknown keys and widths below 1."""
    if network.get("name") != "mlp":
        raise ModelError(
            f"the numpy engine cannot train network {network.get('name')!r}, only 'mlp': "
            f"{extras.installation_command('train')}"
        )
    try:
        mlp = toml.convert_table(network, MlpTable, "a network")
    except JobError as error:
        raise ModelError(f"network 'mlp': {error}") from None
    if min(mlp.inputs, mlp.classes, *mlp.hidden) < 1:
        raise ModelError(f"network 'mlp': widths {(mlp.inputs, *mlp.hidden, mlp.classes)} must be 1 or more")
    return mlp


def _load_network(network: Mapping[str, Any], start: Tensors) -> tuple[MlpTable, dict[str, np.ndarray]]:
    mlp = parse_network(network)
    training.require_shapes(start, mlp.shapes)
    return mlp, {name: start[name].astype(np.float32) for name in mlp.shapes}


def _prepare_inputs(network: Mapping[str, Any], x: np.ndarray, hooks: Hooks) -> np.ndarray:
    flat = training.network_inputs(x, network, hooks.inputs).reshape(len(x), -1)
    if flat.shape[1] != network["inputs"]:
        raise DataError(f"examples have {flat.shape[1]} values each, the network has {network['inputs']} inputs")
    return flat


def forward(model: Tensors, x: np.ndarray) -> list[np.ndarray]:
    """Return the input, each hidden layer after its ReLU, and the scores, each of shape (n, width).

    With stacked tensors, (devices, ...), each device's part is bit-identical to a call with its tensors alone.
    """
    values = [x]
    last_layer = len(model) // 2 - 1
    for layer in range(last_layer + 1):
        x = x @ model[f"{2 * layer + 1}.weight"].swapaxes(-1, -2) + model[f"{2 * layer + 1}.bias"][..., None, :]
        if layer < last_layer:
            x = np.maximum(x, 0)
        values.append(x)
    return values


def _loss_and_gradient(
    network: Mapping[str, Any],
    model: Tensors,
    examples: Examples,
    batch: np.ndarray,
    micro_batch_size: int,
    hooks: Hooks,
) -> tuple[float, dict[str, np.ndarray]]:
    loss, gradient = 0.0, dict[str, np.ndarray]()
    for rows in training.micro_batches(batch, micro_batch_size):
        values = forward(model, _prepare_inputs(network, examples.x[rows], hooks))
        losses, score_gradients = evaluation_sums.losses_and_gradients(
            metrics.task_from_network(network), values.pop(), examples.y[rows]
        )
        loss += float(losses.sum()) / len(batch)
        backward(model, values, score_gradients, len(batch), gradient)
    return loss, gradient


def backward(
    model: Tensors,
    values: Sequence[np.ndarray],
    value_gradients: np.ndarray,
    count: int,
    gradient: dict[str, np.ndarray],
) -> None:
    """Add the gradient of the mean loss of a mini-batch to `gradient`, for one device or several."""
    value_gradients /= np.float32(count)
    for layer in reversed(range(len(values))):
        weight, bias = value_gradients.swapaxes(-1, -2) @ values[layer], value_gradients.sum(axis=-2)
        for name, tensor_gradient in ((f"{2 * layer + 1}.weight", weight), (f"{2 * layer + 1}.bias", bias)):
            gradient[name] = tensor_gradient if name not in gradient else gradient[name] + tensor_gradient
        if layer:
            value_gradients = (value_gradients @ model[f"{2 * layer + 1}.weight"]) * (values[layer] > 0)
