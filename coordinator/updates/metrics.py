"""Aggregation of a round's evaluations and training metrics."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from fedquilt.core import EvaluationSums, Update, evaluation

UNCHANGED_ROUNDS: Final = 5  # first rounds of a run in which the loss has to change
UNCHANGED_SHARE: Final = 1e-4  # smaller changes of the loss than this share are none
LEARNT_LOSS: Final = 0.01  # a smaller loss may stay as it is
LOW_LR: Final = 1e-4
EXTREME: Final = 1000.0  # times the median of the devices' losses, from which on a device is named


def aggregate_evaluations(updates: Collection[Update]) -> EvaluationSums | None:
    """Return the sum of a round's evaluations, or None if there are none.

    Evaluations with another task or number of outputs than on most devices are left out. See `explain_evaluation`.
    """
    return evaluation.add_evaluations(each for _, each in _select_consistent_evaluations(updates))


def explain_evaluation(updates: Collection[Update]) -> list[str]:
    """Return notes on evaluations that were left out, on extreme losses, or on a missing evaluation."""
    counted = dict(_select_consistent_evaluations(updates))
    given = {update.device: update.evaluation for update in updates if update.evaluation is not None}
    if given and not counted:
        return ["no evaluation: none of the devices holds out an example ([data] held), or there is no model yet"]
    notes = [
        f"the evaluation of {device} does not count: its network has {sums.outputs} outputs, those of most have others"
        for device, sums in sorted(given.items())
        if sums.examples and device not in counted
    ]
    losses = {device: math.fsum(sums.loss) / sums.examples for device, sums in counted.items()}
    usual = statistics.median(losses.values()) if losses else 0.0
    return notes + [
        f"the evaluation's loss is {loss:.4g} on {device}, and {usual:.4g} on half of the devices at most"
        for device, loss in sorted(losses.items())
        if loss > EXTREME * max(usual, LEARNT_LOSS)
    ]


def _select_consistent_evaluations(updates: Collection[Update]) -> list[tuple[str, EvaluationSums]]:
    """Return (device, evaluation) pairs with the most frequent task and number of outputs."""
    found = [(each.device, each.evaluation) for each in updates if each.evaluation and each.evaluation.examples]
    shapes = Counter((sums.task, sums.outputs) for _, sums in found)
    usual = max(shapes, key=lambda shape: (shapes[shape], shape), default=None)
    return [(device, sums) for device, sums in found if (sums.task, sums.outputs) == usual]


def average_metrics(updates: Collection[Update]) -> dict[str, float]:
    """Return the weighted average of the training metrics that most devices report.

    A metric is left out if at most half of the devices report it, if all weights are 0, or if its average is not
    finite. See `explain_missing_metrics`.
    """
    told: dict[str, list[tuple[float, float]]] = {}
    for update in sorted(updates, key=lambda update: update.device):
        for name, value in update.metrics.items():
            told.setdefault(name, []).append((update.weight, value))
    result = {
        name: _weighted_mean(pairs)
        for name, pairs in told.items()
        if 2 * len(pairs) > len(updates) and any(weight for weight, _ in pairs)
    }
    return {name: value for name, value in result.items() if math.isfinite(value)}


def explain_missing_metrics(updates: Collection[Update], found: Mapping[str, float]) -> list[str]:
    """Return notes on the devices' metrics that have no value in the round's metrics.

    `found` is the result of `average_metrics`.
    """
    names = Counter(name for update in updates for name in update.metrics)
    lost = {name for name, count in names.items() if 2 * count > len(updates)} - found.keys()
    huge = {name for update in updates if update.weight for name in update.metrics} & lost
    said = []
    if alone := sorted(lost - huge):
        said.append(f"no mean of {', '.join(alone)}: every update counts as 0 examples")
    if huge:
        said.append(f"no value of {', '.join(sorted(huge))}: what the devices report adds up beyond any number")
    return said


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of (weight, value) pairs. Weights must not be negative, and not all 0."""
    total = of = 0.0
    for weight, value in pairs:
        total, of = total + weight * value, of + weight
    if math.isfinite(total) and math.isfinite(of):
        return total / of
    most = max(weight for weight, _ in pairs)
    shares = sum(weight / most for weight, _ in pairs)
    return sum(weight / most / shares * value for weight, value in pairs)


def explain_unchanged_loss(losses: Mapping[int, float], lr: object) -> str | None:
    """Return the probable cause if the loss has not changed in UNCHANGED_ROUNDS, or None.

    Args:
        losses: The mean training loss of each round of work so far, by number from 0.
        lr: The learning rate of the job, if any.
    """
    found = [losses[number] for number in range(UNCHANGED_ROUNDS) if number in losses]
    if len(losses) != UNCHANGED_ROUNDS or len(found) != UNCHANGED_ROUNDS or max(found) < LEARNT_LOSS:
        return None
    if max(found) - min(found) > UNCHANGED_SHARE * max(found):
        return None
    if isinstance(lr, float) and lr < LOW_LR:
        cause = f"the learning rate is probably too low ({lr:g}): raise [params] lr"
    else:
        cause = "inputs or labels probably do not vary: check them, and set [input] standardise = true"
    return f"the loss has stayed at {found[-1]:.4g} for {UNCHANGED_ROUNDS} rounds: {cause}"
