"""Fully connected networks in numpy: for boards without torch, and to check the other engine against.

Takes `{"name": "mlp", "inputs": d, "hidden": [h, ...], "classes": k}`, with an optional "input" table
for images. Its tensors are those of the same network in torch, `Sequential(Flatten, Linear, ReLU, ...,
Linear)`: "1.weight" (h, d), "1.bias" (h,), "3.weight" and so on. Loss is cross-entropy; steps are those
of `torch.optim.SGD`. Equal input and equal generator give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.core import DataError, Examples, Fit, ModelError, Tensors
from fedquilt.edge_agent.engines import training

BASE_BYTES = 44_000_000  # resident with numpy and this package, and a share read (x86-64, numpy 2.4)
EVALUATED_AT_ONCE = 1024


class Mlp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network table this engine understands."""

    name: str
    inputs: int
    classes: int
    hidden: tuple[int, ...] = (64,)
    input: dict[str, Any] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter names and shapes, from the input on."""
        found: dict[str, tuple[int, ...]] = {}
        for layer, (before, after) in enumerate(pairwise((self.inputs, *self.hidden, self.classes))):
            found[f"{2 * layer + 1}.weight"] = (after, before)  # every other module is a ReLU
            found[f"{2 * layer + 1}.bias"] = (after,)
        return found


def init(network: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random tensors to start from, as torch draws them for linear layers: U(-1/sqrt(d), 1/sqrt(d)).

    Raises:
        ModelError: not a network of this engine.
    """
    rng = tensors.rng("mlp", seed)
    made, bound = {}, 0.0
    for name, shape in _mlp(network).shapes.items():
        if name.endswith("weight"):
            bound = 1 / math.sqrt(shape[1])
        made[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
    return made


class NumpyEngine:
    """A `fedquilt.core.Trainer` for fully connected networks.

    Args:
        budget_bytes: the most this process may hold resident.
        base_bytes: what it holds before any training.
    """

    name = "numpy"

    def __init__(self, budget_bytes: int, *, base_bytes: int = BASE_BYTES) -> None:
        self._room_bytes = budget_bytes - base_bytes

    def close(self) -> None:
        """Nothing is held between calls."""

    @np.errstate(invalid="ignore", over="ignore")  # what is not finite is refused by its loss
    def train(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        correct: Callable[[Any, Any, Any], Any] | None = None,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> tuple[Tensors, dict[str, float]]:
        """See `fedquilt.core.Trainer`."""
        mlp, model = _load(network, start)
        training.require_labels(examples, mlp.classes)
        steps = training.Steps(len(examples), fit, progress)
        begun = {name: array.copy() for name, array in model.items()} if correct else {}
        momentum = {name: np.zeros_like(array) for name, array in model.items()}
        at_once = self._at_once(mlp, fit.batch)
        for order in training.orders(len(examples), fit.epochs, rng):
            for batch in training.batches(order, fit.batch):
                loss, gradient = _gradient(network, model, examples, batch, at_once)
                steps.took(loss, len(batch))
                if correct:
                    gradient = {name: correct(g, model[name], begun[name]) for name, g in gradient.items()}
                _step(model, gradient, momentum, fit)
        return model, steps.metrics()

    @np.errstate(invalid="ignore", over="ignore")
    def evaluate(self, network: Mapping[str, Any], model: Tensors, examples: Examples) -> dict[str, float]:
        """See `fedquilt.core.Trainer`."""
        mlp, model = _load(network, model)
        training.require_labels(examples, mlp.classes)
        right, loss = 0, 0.0
        for rows in training.batches(np.arange(len(examples)), self._at_once(mlp, EVALUATED_AT_ONCE)):
            scores = _forward(model, _inputs(network, examples.x[rows]))[-1]
            right += int((scores.argmax(axis=1) == examples.y[rows]).sum())
            loss += float(_loss(scores, examples.y[rows])[0].sum())
        return training.measured(len(examples), right, loss)

    def _at_once(self, mlp: Mlp, wanted: int) -> int:
        """Examples whose activations fit beside the weights, gradients, momentum and the received copy."""
        weights = 4 * sum(math.prod(shape) for shape in mlp.shapes.values())
        example = 4 * 3 * (mlp.inputs + sum(mlp.hidden) + mlp.classes)  # values, their gradients, scratch
        return training.fitting(self._room_bytes - 4 * weights, example, wanted)


# -- the network ----------------------------------------------------------------------------------


def _mlp(network: Mapping[str, Any]) -> Mlp:
    if network.get("name") != "mlp":
        raise ModelError(
            f"the numpy engine trains 'mlp' networks, not {network.get('name')!r}: install fedquilt[train]"
        )
    try:
        mlp = msgspec.convert(network, Mlp)
    except msgspec.ValidationError as error:
        raise ModelError(f"network 'mlp': {error}") from None
    if min(mlp.inputs, mlp.classes, *mlp.hidden) < 1:
        raise ModelError(f"network 'mlp': widths {(mlp.inputs, *mlp.hidden, mlp.classes)} must be 1 or more")
    return mlp


def _load(network: Mapping[str, Any], start: Tensors) -> tuple[Mlp, dict[str, np.ndarray]]:
    """The network and its own float32 copy of the tensors."""
    mlp = _mlp(network)
    training.require_fit(start, mlp.shapes)
    return mlp, {name: start[name].astype(np.float32) for name in mlp.shapes}


def _inputs(network: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    flat = training.features(x, network).reshape(len(x), -1)
    if flat.shape[1] != network["inputs"]:
        raise DataError(f"examples hold {flat.shape[1]} values each, the network takes {network['inputs']}")
    return flat


def _forward(model: Tensors, x: np.ndarray) -> list[np.ndarray]:
    """Input, every hidden layer after its ReLU, and the scores: each (n, width)."""
    values = [x]
    last = len(model) // 2 - 1
    for layer in range(last + 1):
        x = x @ model[f"{2 * layer + 1}.weight"].T + model[f"{2 * layer + 1}.bias"]
        if layer < last:
            x = np.maximum(x, 0)
        values.append(x)
    return values


def _loss(scores: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy of each example (n,), and its gradient by the scores (n, classes)."""
    rows = np.arange(len(y))
    shifted = scores - scores.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    gradient = powers / total
    gradient[rows, y] -= 1
    return np.log(total[:, 0]) - shifted[rows, y], gradient


def _gradient(
    network: Mapping[str, Any], model: Tensors, examples: Examples, batch: np.ndarray, at_once: int
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss over the mini-batch and its gradient, by micro-batches and back through the layers."""
    loss, gradient = 0.0, {name: np.zeros_like(array) for name, array in model.items()}
    for rows in training.micro_batches(batch, at_once):
        values = _forward(model, _inputs(network, examples.x[rows]))
        losses, back = _loss(values.pop(), examples.y[rows])
        loss += float(losses.sum()) / len(batch)
        back /= np.float32(len(batch))
        for layer in reversed(range(len(values))):
            gradient[f"{2 * layer + 1}.weight"] += back.T @ values[layer]
            gradient[f"{2 * layer + 1}.bias"] += back.sum(axis=0)
            if layer:
                back = (back @ model[f"{2 * layer + 1}.weight"]) * (values[layer] > 0)
    return loss, gradient


def _step(model: dict[str, np.ndarray], gradient: Tensors, momentum: dict[str, np.ndarray], fit: Fit) -> None:
    """One step of SGD in place: clip by the norm over all tensors, then weight decay, then momentum."""
    scale = 1.0
    if fit.clip > 0:
        norm = math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in gradient.values()))
        scale = min(1.0, fit.clip / (norm + 1e-6))
    for name, array in model.items():
        change = gradient[name] * np.float32(scale) + np.float32(fit.weight_decay) * array
        momentum[name] = np.float32(fit.momentum) * momentum[name] + change
        array -= np.float32(fit.lr) * momentum[name]
