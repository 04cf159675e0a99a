"""Objectives of each task: targets that fit, a loss, and the metrics of an evaluation. numpy only.

| task | targets `y` | loss of an example | metrics besides "loss" |
|---|---|---|---|
| classes | (n,) int64 | cross-entropy | accuracy |
| regression | (n, k) float32 | mean over outputs of the squared error | rmse, mae, r2 |
| labels | (n, k) uint8, 0 or 1 | mean over outputs of binary cross-entropy | label_accuracy, exact_match, macro_f1 |

The torch engines compute the same losses (`torch_objectives`); the metrics are computed here for every engine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedquilt.core import DataError, DivergedError
from fedquilt.data.readers.base import class_problem

if TYPE_CHECKING:
    from fedquilt.core import Examples
    from fedquilt.metrics import TaskKind

ADVICE = "set `task` in [data] and [model] alike"


def require_targets(examples: Examples, outputs: int, task: TaskKind = "classes") -> None:
    """Check that examples have targets of the task, as many as the network has outputs.

    Raises:
        DataError: they do not fit; names both sides.
    """
    y = examples.y
    if task == "classes":
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise DataError(f"the network predicts classes, and the examples' labels are {_described(y)}: {ADVICE}")
        if problem := class_problem(y, outputs):
            raise DataError(
                f"labels run from {y.min()} to {y.max()}, the network predicts {outputs} classes (0 to {outputs - 1}); "
                f"{problem}"
            )
        return
    kind = "f" if task == "regression" else "iu"
    if y.ndim != 2 or y.dtype.kind not in kind:
        raise DataError(f"the network's task is {task!r}, and the examples' labels are {_described(y)}: {ADVICE}")
    if y.shape[1] != outputs:
        raise DataError(
            f"each example has {y.shape[1]} targets, and the network has {outputs} outputs: make them alike"
        )


def _described(y: np.ndarray) -> str:
    if y.ndim == 1:
        return "one class each" if y.dtype.kind in "iu" else "one number each"
    return f"{y.shape[1]} {'numbers' if y.dtype.kind == 'f' else 'labels of 0 or 1'} each"


def losses(task: TaskKind, scores: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss of each example (n,), and its gradient by the scores (n, outputs)."""
    if task == "regression":
        error = scores - y
        return np.square(error).mean(axis=1), error * np.float32(2 / scores.shape[1])
    if task == "labels":
        # log(1 + exp(-|s|)) + max(s, 0) - s y, which does not overflow
        each = np.log1p(np.exp(-np.abs(scores))) + np.maximum(scores, 0) - scores * y
        share = 0.5 * (1 + np.tanh(0.5 * scores))  # the logistic function
        return each.mean(axis=1), (share - y) / np.float32(scores.shape[1])
    rows = np.arange(len(y))
    shifted = scores - np.ascontiguousarray(scores.T).max(axis=0)[:, None]  # in rows of all examples: many times faster
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    gradient = powers / total
    gradient[rows, y] -= 1
    return np.log(total[:, 0]) - shifted[rows, y], gradient


class Evaluation:
    """Running sums of an evaluation, batch by batch, and its metrics.

    Args:
        task: kind of prediction.
    """

    def __init__(self, task: TaskKind = "classes") -> None:
        self._task = task
        self._examples, self._loss, self._right = 0, 0.0, 0
        self._scores: list[np.ndarray] = []  # of other tasks than classes: macro F1 and R² need all at once
        self._targets: list[np.ndarray] = []

    def add(self, scores: np.ndarray, y: np.ndarray, loss: float) -> None:
        """Add one batch: scores (n, outputs), targets as of the task, and the sum of the examples' losses."""
        self._examples += len(y)
        self._loss += loss
        if self._task == "classes":
            self._right += int((scores.argmax(axis=1) == y).sum())
        else:
            self._scores.append(np.asarray(scores, np.float64))
            self._targets.append(np.asarray(y, np.float64))

    def metrics(self) -> dict[str, float]:
        """Metrics so far: "examples", "loss" (mean) and the task's; without examples only their number, 0.

        Raises:
            DivergedError: the loss is not finite.
        """
        if not self._examples:
            return {"examples": 0.0}
        if not math.isfinite(self._loss):
            raise DivergedError(
                f"the loss of the model on {self._examples} held-out examples is {self._loss}: it is of no use"
            )
        if self._task == "classes":
            own = {"accuracy": self._right / self._examples}
        else:
            scores, y = np.concatenate(self._scores), np.concatenate(self._targets)
            own = _regression(scores, y) if self._task == "regression" else _labels(scores > 0, y > 0)
        return {"examples": float(self._examples), **own, "loss": self._loss / self._examples}


def _regression(found: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """RMSE and MAE over all outputs; R² is the mean over outputs that vary, and left out where none does."""
    error = found - y
    told = {"rmse": float(np.sqrt(np.square(error).mean())), "mae": float(np.abs(error).mean())}
    spread = np.square(y - y.mean(axis=0)).sum(axis=0)
    varying = spread > 0
    if varying.any():
        left = np.square(error).sum(axis=0)[varying] / spread[varying]
        told["r2"] = float(1 - left.mean())
    return told


def _labels(found: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Label metrics. Macro F1 is the mean over labels that occur in targets or predictions; left out without any."""
    same = found == y
    told = {"label_accuracy": float(same.mean()), "exact_match": float(same.all(axis=1).mean())}
    both, either = (found & y).sum(axis=0), found.sum(axis=0) + y.sum(axis=0)
    if either.any():
        told["macro_f1"] = float((2 * both[either > 0] / either[either > 0]).mean())
    return told
