"""Correction of class scores by a device's own class frequencies, chosen on its held-out examples.

Source: Saerens et al., Adjusting the Outputs of a Classifier to New a Priori Probabilities, Neural Computation 2002,
equation 2.4. To the score of each class is added `strength` times the log of its share among the device's examples over
its share among the model's. A strength of 1 is the equation. Scores that are no calibrated log-probabilities need
another one, which is the inverse of their temperature.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fedquilt.core import ClassPrior

STRENGTHS: Final = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
FOLDS: Final = 5  # of the held-out examples: those of one are counted with the strength that the others choose
LEAST_DEVIATIONS: Final = 3.0  # by which the G statistic has to exceed its mean without a difference
LEAST_GAIN: Final = 1.0  # standard errors by which the correction has to win


def compute_log_ratios(prior: ClassPrior, outputs: int) -> np.ndarray:
    """Return the log of each class's share on the device over its share among the model's examples, (outputs,).

    The device's counts are smoothed by as many examples as there are classes, in the model's shares. All logs are 0 if
    chance explains the device's counts (G-test), as on IID shares.
    """
    shares = np.asarray(prior.shares or np.full(outputs, 1 / outputs), np.float64)
    counts = np.bincount(prior.labels.astype(np.int64), minlength=outputs)[:outputs]
    total, known, freedom = counts.sum(), counts > 0, outputs - 1
    g = 2 * (counts[known] * np.log(counts[known] / total / shares[known])).sum()
    found: np.ndarray = np.log((counts / shares + outputs) / (total + outputs))
    return found if g > freedom + LEAST_DEVIATIONS * np.sqrt(2 * freedom) else np.zeros(outputs)


class StrengthChoice:
    """Counts of held-out examples from which the strength of a device's correction follows, added batch by batch."""

    def __init__(self, log_ratios: np.ndarray) -> None:
        self.log_ratios, self._examples = log_ratios, 0
        self._right = np.zeros((FOLDS, len(STRENGTHS)), np.int64)
        self._changed = np.zeros((FOLDS, len(STRENGTHS)), np.int64)  # examples right or wrong with this strength alone

    def add_batch(self, scores: np.ndarray, y: np.ndarray) -> None:
        """Add the scores, (n, outputs), and classes, (n,), of the next held-out examples."""
        folds = (self._examples + np.arange(len(y))) % FOLDS
        self._examples += len(y)
        plain = scores.argmax(axis=1) == y
        for place, strength in enumerate(STRENGTHS):
            right = (scores + strength * self.log_ratios).argmax(axis=1) == y
            self._right[:, place] += np.bincount(folds[right], minlength=FOLDS)
            self._changed[:, place] += np.bincount(folds[right != plain], minlength=FOLDS)

    def choose_strength(self) -> float:
        """Return the strength that helps most on all examples, or 0 if none helps."""
        return STRENGTHS[_find_best_place(self._right.sum(axis=0), self._changed.sum(axis=0))]

    def count_right(self) -> int:
        """Return the correct predictions, each fold's with the best strength on the other folds."""
        right, changed = self._right.sum(axis=0) - self._right, self._changed.sum(axis=0) - self._changed
        return sum(int(self._right[fold, _find_best_place(right[fold], changed[fold])]) for fold in range(FOLDS))


def _find_best_place(right: np.ndarray, changed: np.ndarray) -> int:
    gains = right - right[0]
    gains[gains <= LEAST_GAIN * np.sqrt(changed)] = 0  # of n changed examples by chance half win: deviation root of n
    return int(gains.argmax())
