"""Common parts of the training engines: order of examples, inputs, checks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fedquilt.core import DataError, DivergedError, JobError, ModelError
from fedquilt.data.inputs import prepare_inputs as network_input

if TYPE_CHECKING:
    from fedquilt.core import Examples, Fit, Tensors

# Training has diverged if an epoch's mean loss exceeds the first step's loss, or 1 nat if that is smaller, by this
# factor. A loss of 10 nats is worse than a guess among 22,000 classes.
MAX_LOSS_FACTOR = 10.0
MIN_JUDGED_STEPS = 10  # steps of an epoch before its mean loss is judged, because one mini-batch may be unusual


def draw_orders(count: int, epochs: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw an order of the examples for each epoch, all at once before any other random draw."""
    return [rng.permutation(count) for _ in range(epochs)]


def mini_batches(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def micro_batches(batch: np.ndarray, max_examples: int) -> list[np.ndarray]:
    """Split a mini-batch into the fewest parts of at most `max_examples` examples, about equal in size."""
    return [batch] if len(batch) <= max_examples else np.array_split(batch, math.ceil(len(batch) / max_examples))


def fitting_batch_size(room_bytes: float, example_bytes: float, max_size: int) -> int:
    """Return the number of examples to run at once: `max_size`, halved until the examples fit, at least 1.

    The room must follow from the budget and constants, never from the present size of the process. The size of
    micro-batches decides the last bits of a result, which must be the same in every run.
    """
    size = max(1, max_size)
    while size > 1 and size * example_bytes > room_bytes:
        size = (size + 1) // 2
    return size


def network_inputs(
    x: np.ndarray, network: Mapping[str, Any], inputs: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Return examples as float32 network inputs, or raise DataError if their type is not supported."""
    if inputs is not None:
        return inputs(x)
    if "input" in network:
        return network_input(x, network["input"])
    if network.get("name") == "transformer":
        return _tokens_to_float32(x, network["vocabulary"])
    if x.dtype.kind == "u":
        return np.divide(x, np.float32(np.iinfo(x.dtype).max), dtype=np.float32)  # in one pass over the numbers
    if x.dtype.kind not in "fib":
        raise DataError(f"examples have type {x.dtype}: store them as numbers")
    return x.astype(np.float32)


def _tokens_to_float32(x: np.ndarray, vocabulary_size: int) -> np.ndarray:
    if x.dtype.kind not in "ui":
        raise DataError(f"examples have type {x.dtype}, a transformer requires integer tokens: see [data.text]")
    low, high = int(x.min(initial=0)), int(x.max(initial=0))
    if low < 0 or high >= vocabulary_size:
        raise DataError(
            f"tokens are {low} to {high}, and the network's vocabulary has 0 to {vocabulary_size - 1}: copy the job's "
            "vocabulary file to this device"
        )
    return x.astype(np.float32)


def require_examples(examples: Examples, examples_per_gradient: int) -> None:
    if not len(examples):
        raise DataError("no examples for gradients: add data under [data], or exclude this device")
    if examples_per_gradient < 1:
        raise JobError(f"{examples_per_gradient} examples per gradient: use at least 1")


def require_shapes(start: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if odd := sorted(start.keys() ^ shapes.keys()):
        problem = "is missing" if odd[0] in shapes else "is not in the network"
        more = f" ({len(odd)} names differ)" if len(odd) > 1 else ""
        raise ModelError(f"tensors do not fit the network: {odd[0]!r} {problem}{more}")
    for name, shape in shapes.items():
        if start[name].shape != shape:
            raise ModelError(f"tensor {name!r} has shape {start[name].shape}, the network expects {shape}")


def require_anchors(anchors: Mapping[str, Tensors], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for anchor, tensors in anchors.items():
        for name, shape in shapes.items():
            if name not in tensors or tensors[name].shape != shape:
                problem = f"has shape {tensors[name].shape}" if name in tensors else "is missing"
                raise ModelError(f"tensor {name!r} of anchor {anchor!r} {problem}, the network expects {shape}")


class TrainingProgress:
    """Progress and metrics of one training run, which detects divergence.

    A diverged update would spoil the aggregate of all devices. `add_step` raises DivergedError if a loss is not finite,
    or if the epoch's mean loss so far is far above the first step's (`MAX_LOSS_FACTOR`).
    """

    def __init__(self, count: int, fit: Fit, progress: Callable[[float], None]) -> None:
        if not count:
            raise DataError("no examples to train on: add data under [data], or exclude this device")
        if fit.batch < 1 or fit.epochs < 0:
            raise JobError(f"[params] batch = {fit.batch}, epochs = {fit.epochs}: use at least 1 and 0")
        self._steps_per_epoch = math.ceil(count / fit.batch)
        self._fit, self._progress = fit, progress
        self._step_count = 0
        self._loss_sum, self._example_count, self._first_loss = 0.0, 0, 0.0

    def add_step(self, loss: float, examples: int) -> None:
        """Count one step with its mean loss and number of examples. Report progress, or raise DivergedError."""
        if self._step_count % self._steps_per_epoch == 0:
            self._loss_sum, self._example_count = 0.0, 0  # the last epoch's loss is reported
        self._step_count += 1
        total = self._steps_per_epoch * self._fit.epochs
        if not math.isfinite(loss):
            self._raise_diverged(
                f"the loss became {'NaN' if math.isnan(loss) else 'infinite'} at step {self._step_count} of {total}"
            )
        if self._step_count == 1:
            self._first_loss = loss
        self._loss_sum += loss * examples
        self._example_count += examples
        mean, steps = self._loss_sum / self._example_count, (self._step_count - 1) % self._steps_per_epoch + 1
        if mean > MAX_LOSS_FACTOR * max(self._first_loss, 1.0) and (
            steps >= MIN_JUDGED_STEPS or steps == self._steps_per_epoch
        ):
            self._raise_diverged(
                f"the loss rose from {self._first_loss:.3g} to {mean:.3g} by step {self._step_count} of {total}"
            )
        self._progress(self._step_count / total)

    def _raise_diverged(self, problem: str) -> NoReturn:
        raise DivergedError(f"{problem}, learning rate {self._fit.lr:g}")

    def metrics(self) -> dict[str, float]:
        """Return the number of steps and, after a step, the last epoch's mean loss."""
        if not self._example_count:
            return {"steps": 0.0}
        return {"loss": self._loss_sum / self._example_count, "steps": float(self._step_count)}
