"""Targets, losses and evaluation sums of each kind of task, and class priors. Imports numpy only.

| task | targets `y` | loss of an example |
|---|---|---|
| classes | (n,) int64 | cross-entropy |
| regression | (n, k) float32 | mean over outputs of the squared error |
| labels | (n, k) uint8, 0 or 1 | mean over outputs of binary cross-entropy |

The torch engines compute the same losses (`torch.training_step`). All engines use the evaluation sums of this module.
`fedquilt.core.evaluation` computes metrics from the sums.

Class priors correct the scores by the device's own class frequencies (Saerens et al., Adjusting the Outputs of a
Classifier to New a Priori Probabilities, Neural Computation 2002, equation 2.4). To the score of each class is added
`strength` times the log of its share among the device's examples over its share among the model's. A strength of 1 is
the equation. For scores that are not calibrated log-probabilities the best strength is the inverse of their
temperature. The strength is chosen on the held-out examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from fedquilt.core import MAX_DETAILED_OUTPUTS, ClassPrior, DataError, DivergedError, EvaluationSums, evaluation
from fedquilt.data.readers.base import describe_class_problem

if TYPE_CHECKING:
    from fedquilt.core import ClassPrior, Examples, TaskKind

STRENGTHS: Final = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
FOLDS: Final = 5  # folds of the held-out examples: each is evaluated with the strength chosen on the others
MIN_DEVIATIONS: Final = 3.0  # standard deviations by which the G statistic must exceed its mean
MIN_GAIN: Final = 1.0  # standard errors by which the correction must improve the accuracy


def compute_log_ratios(prior: ClassPrior, outputs: int) -> np.ndarray:
    """Return log(device share / model share) of each class, (outputs,), from the class frequencies.

    First, `outputs` examples distributed by the model's shares are added to the device's counts. All logs are 0 if the
    counts deviate from these shares only by chance (G-test).
    """
    shares = np.asarray(prior.shares or np.full(outputs, 1 / outputs), np.float64)
    counts = np.bincount(prior.labels.astype(np.int64), minlength=outputs)[:outputs]
    total, has_examples, freedom = counts.sum(), counts > 0, outputs - 1
    g = 2 * (counts[has_examples] * np.log(counts[has_examples] / total / shares[has_examples])).sum()
    log_ratios: np.ndarray = np.log((counts / shares + outputs) / (total + outputs))
    return log_ratios if g > freedom + MIN_DEVIATIONS * np.sqrt(2 * freedom) else np.zeros(outputs)


class StrengthChoice:
    """Correct predictions on held-out examples at each strength of the class-prior correction."""

    def __init__(self, log_ratios: np.ndarray) -> None:
        self.log_ratios, self._examples = log_ratios, 0
        self._correct = np.zeros((FOLDS, len(STRENGTHS)), np.int64)
        # Examples whose prediction becomes right or wrong with this strength.
        self._changed = np.zeros((FOLDS, len(STRENGTHS)), np.int64)

    def add_batch(self, scores: np.ndarray, y: np.ndarray) -> None:
        folds = (self._examples + np.arange(len(y))) % FOLDS
        self._examples += len(y)
        correct_without = scores.argmax(axis=1) == y
        for index, strength in enumerate(STRENGTHS):
            correct = (scores + strength * self.log_ratios).argmax(axis=1) == y
            self._correct[:, index] += np.bincount(folds[correct], minlength=FOLDS)
            self._changed[:, index] += np.bincount(folds[correct != correct_without], minlength=FOLDS)

    def choose_strength(self) -> float:
        """Return the strength with the most correct predictions, or 0 if none is significantly better than 0."""
        return STRENGTHS[_find_best_index(self._correct.sum(axis=0), self._changed.sum(axis=0))]

    def count_right(self) -> int:
        """Return the number of correct predictions, with each fold's strength chosen on the other folds."""
        correct, changed = self._correct.sum(axis=0) - self._correct, self._changed.sum(axis=0) - self._changed
        return sum(int(self._correct[fold, _find_best_index(correct[fold], changed[fold])]) for fold in range(FOLDS))


def _find_best_index(correct: np.ndarray, changed: np.ndarray) -> int:
    gains = correct - correct[0]
    gains[gains <= MIN_GAIN * np.sqrt(changed)] = 0  # of n changed examples by chance half win: deviation root of n
    return int(gains.argmax())


ADVICE = "set the same `task` in [data] and [model]"


def require_targets(examples: Examples, outputs: int, task: TaskKind = "classes") -> None:
    """Raise DataError if shape, type or values of the targets do not fit the task and the outputs."""
    y = examples.y
    if task == "classes":
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise DataError(
                f"the network predicts classes, and the labels of the examples are {_describe_targets(y)}: {ADVICE}"
            )
        if problem := describe_class_problem(y, outputs):
            raise DataError(
                f"labels run from {y.min()} to {y.max()}, the network predicts {outputs} classes (0 to {outputs - 1}); "
                f"{problem}"
            )
        return
    kind = "f" if task == "regression" else "iu"
    if y.ndim != 2 or y.dtype.kind not in kind:
        raise DataError(
            f"the network's task is {task!r}, and the labels of the examples are {_describe_targets(y)}: {ADVICE}"
        )
    if y.shape[1] != outputs:
        raise DataError(
            f"each example has {y.shape[1]} targets, the network has {outputs} outputs: use the same number of both"
        )


def _describe_targets(y: np.ndarray) -> str:
    if y.ndim == 1:
        return "one class each" if y.dtype.kind in "iu" else "one number each"
    return f"{y.shape[1]} {'numbers' if y.dtype.kind == 'f' else 'labels of 0 or 1'} each"


def losses_and_gradients(task: TaskKind, scores: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each example, (n,), and its gradient by the scores, (n, outputs)."""
    if task == "regression":
        error = scores - y
        return np.square(error).mean(axis=1), error * np.float32(2 / scores.shape[1])
    if task == "labels":
        # log(1 + exp(-|s|)) + max(s, 0) - s y, which does not overflow
        losses = np.log1p(np.exp(-np.abs(scores))) + np.maximum(scores, 0) - scores * y
        probabilities = 0.5 * (1 + np.tanh(0.5 * scores))  # the logistic function
        return losses.mean(axis=1), (probabilities - y) / np.float32(scores.shape[1])
    rows = np.arange(len(y))
    shifted = scores - np.ascontiguousarray(scores.T).max(axis=0)[:, None]  # in rows of all examples: many times faster
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    gradient = powers / total
    gradient[rows, y] -= 1
    return np.log(total[:, 0]) - shifted[rows, y], gradient


class EvaluationAccumulator:
    def __init__(self, task: TaskKind, prior: ClassPrior | None = None) -> None:
        self._task, self._examples, self._all_correct, self._prior = task, 0, 0, prior
        self.strengths: StrengthChoice | None = None  # set when examples are added with a prior
        self._losses: list[float] = []

    def _allocate_sums(self, outputs: int) -> None:
        task, detailed = self._task, outputs if outputs <= MAX_DETAILED_OUTPUTS else 0
        self._outputs, self._bins = outputs, evaluation.histogram_bins(outputs)
        self._counts = np.zeros(evaluation.counts_length(task, outputs), np.int64)
        self._scores = np.zeros(evaluation.scores_length(task, outputs), np.int64)
        self._absolute: Parts = ()
        self._squares: list[Parts] = [()] * (detailed or 1)
        self._targets: list[Parts] = [()] * detailed
        self._target_squares: list[Parts] = [()] * detailed
        if self._prior is not None:
            self.strengths = StrengthChoice(compute_log_ratios(self._prior, outputs))

    def add_batch(self, scores: np.ndarray, y: np.ndarray, loss: float) -> None:
        """Add a batch: scores (n, outputs), targets of the task, and the sum of the examples' losses."""
        if not self._examples:
            self._allocate_sums(scores.shape[1])
        self._examples += len(y)
        self._losses.append(float(loss))
        if not math.isfinite(loss):  # `sums` raises an error for such a loss
            return
        if self._task == "regression":
            self._add_errors(np.asarray(scores, np.float64), np.asarray(y, np.float64))
        elif self._task == "labels":
            self._add_labels(scores, y > 0)
        else:
            self._add_classification(scores, y.astype(np.int64))
            if self.strengths is not None:
                self.strengths.add_batch(scores, y)

    def _add_classification(self, scores: np.ndarray, y: np.ndarray) -> None:
        predicted, outputs = scores.argmax(axis=1), self._outputs
        if outputs > MAX_DETAILED_OUTPUTS:
            is_correct = predicted == y
            for index, classes in enumerate((y[is_correct], predicted[~is_correct], y[~is_correct])):
                self._counts[index::3] += np.bincount(classes, minlength=outputs)
            return
        self._counts += np.bincount(y * outputs + predicted, minlength=outputs**2)
        shifted = np.asarray(scores, np.float64) - scores.max(axis=1, keepdims=True)
        powers = np.exp(shifted)
        other_powers = powers.sum(axis=1, keepdims=True) - powers
        with np.errstate(divide="ignore"):
            logits = shifted - np.log(np.maximum(other_powers, 0))
        self._add_score_histograms(logits, np.arange(outputs) == y[:, None])

    def _add_labels(self, scores: np.ndarray, y: np.ndarray) -> None:
        predicted = scores > 0
        self._all_correct += int((predicted == y).all(axis=1).sum())
        for index, outcomes in enumerate((predicted & y, predicted & ~y, ~predicted & y)):
            self._counts[index::3] += outcomes.sum(axis=0)
        if self._bins:
            self._add_score_histograms(np.asarray(scores, np.float64), y)

    def _add_score_histograms(self, logits: np.ndarray, y: np.ndarray) -> None:
        max_logit = evaluation.MAX_LOGIT
        bins = (np.clip(logits, -max_logit, max_logit) + max_logit) * (self._bins / (2 * max_logit))
        bins = np.minimum(bins.astype(np.int64), self._bins - 1)
        flat = (2 * np.arange(self._outputs) + ~y) * self._bins + bins
        self._scores += np.bincount(flat.ravel(), minlength=self._scores.size)

    def _add_errors(self, predicted: np.ndarray, y: np.ndarray) -> None:
        error = predicted - y
        self._absolute = _add_exactly(self._absolute, np.abs(error))
        squares = np.square(error)
        if not self._targets:
            self._squares = [_add_exactly(self._squares[0], squares)]
            return
        for sums, terms in ((self._squares, squares), (self._targets, y), (self._target_squares, np.square(y))):
            sums[:] = [_add_exactly(sum, column) for sum, column in zip(sums, terms.T, strict=True)]

    def sums(self) -> EvaluationSums:
        """Return the sums of all batches. Raise DivergedError if the loss is not finite."""
        if not self._examples:
            return EvaluationSums(examples=0, task=self._task)
        if not math.isfinite(loss := sum(self._losses)):
            raise DivergedError(
                f"the loss of the model on {self._examples} held-out examples is {loss}: lower the learning rate"
            )
        regression = self._task == "regression"
        return EvaluationSums(
            examples=self._examples,
            task=self._task,
            outputs=self._outputs,
            loss=evaluation.exact_summands(self._losses),
            counts=evaluation.pack_counts(self._counts.tolist()),
            exact_matches=self._all_correct,
            scores=evaluation.pack_counts(self._scores.tolist()),
            absolute_errors=self._absolute,
            squared_errors=tuple(self._squares) if regression else (),
            targets=tuple(self._targets) if regression else (),
            target_squares=tuple(self._target_squares) if regression else (),
            correct_with_priors=None if self.strengths is None else self.strengths.count_right(),
        )


def evaluate_scores(
    task: TaskKind, batches: Iterable[tuple[np.ndarray, np.ndarray]], prior: ClassPrior | None = None
) -> EvaluationAccumulator:
    accumulator = EvaluationAccumulator(task, prior)
    for scores, y in batches:
        accumulator.add_batch(scores, y, float(losses_and_gradients(task, scores, y)[0].sum()))
    return accumulator


Parts = tuple[float, ...]  # parts of an exact sum (`fedquilt.core.evaluation.exact_sum`)


def _add_exactly(parts: Parts, terms: np.ndarray) -> Parts:
    return evaluation.exact_summands([*parts, *terms.ravel().tolist()])
