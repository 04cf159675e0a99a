"""Metrics of a round: the devices' values of each metric, combined into one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fedquilt.core import Update
from fedquilt.metrics import CHECK, KNOWN

EXAMPLES: Final = f"{CHECK}examples"  # held-out ones that an evaluation was made on
UNCHANGED_ROUNDS: Final = 5  # first rounds of a run in which the loss has to change
UNCHANGED_SHARE: Final = 1e-4  # smaller changes of the loss than this share are none
LEARNT_LOSS: Final = 0.01  # a smaller loss may stay as it is
LOW_LR: Final = 1e-4


def average(updates: Iterable[Update]) -> dict[str, float]:
    """Average each metric over devices, weighted by the examples behind it; RMSEs by their mean square.

    "check.examples" is summed. A metric without examples, or whose sum is not finite, is left out;
    `missing` explains why.
    """
    told: dict[str, list[tuple[float, float]]] = {}
    examples = 0.0
    for update in sorted(updates, key=lambda update: update.device):
        examples += update.metrics.get(EXAMPLES, 0.0)
        for name, value in update.metrics.items():
            told.setdefault(name, []).append((_weight(name, update), value))
    result = {name: _joined(name, pairs) for name, pairs in told.items() if any(weight for weight, _ in pairs)}
    if examples:
        result[EXAMPLES] = examples
    return {name: value for name, value in result.items() if math.isfinite(value)}


def missing(updates: Iterable[Update], found: Mapping[str, float]) -> list[str]:
    """Explain which metrics of the devices have no value in the round's metrics.

    Args:
        updates: of the round.
        found: result of `average` for them.
    """
    measured = [(name, update) for update in updates for name in update.metrics if name not in found]
    counted = {name for name, update in measured if name != EXAMPLES and _weight(name, update)}
    counted |= {name for name, update in measured if name == EXAMPLES and update.metrics[name]}
    alone = {name for name, _ in measured} - counted
    said = []
    if any(name.startswith(CHECK) for name in alone):
        said.append("no evaluation: none of the devices holds out an example ([data] held)")
    if own := sorted(name for name in alone if not name.startswith(CHECK)):
        said.append(f"no mean of {', '.join(own)}: every update counts as 0 examples")
    if huge := sorted(counted):
        said.append(f"no value of {', '.join(map(_title, huge))}: what the devices report adds up beyond any number")
    return said


def _title(name: str) -> str:
    """What a metric is called in a sentence."""
    if name == EXAMPLES:
        return "the number of held-out examples"
    plain = name.removeprefix(CHECK)
    title = KNOWN[plain].title if plain in KNOWN else plain
    return f"the evaluation's {title}" if name.startswith(CHECK) else title


def _weight(name: str, update: Update) -> float:
    """How much a device's value of a metric counts: as many examples as it was measured on."""
    return update.metrics.get(EXAMPLES, 0.0) if name.startswith(CHECK) else update.weight


def _joined(name: str, pairs: Sequence[tuple[float, float]]) -> float:
    """Merge the values that devices report for one metric, each with its weight."""
    metric = KNOWN.get(name.removeprefix(CHECK))
    if metric is None or metric.power == 1:
        return _mean(pairs)
    try:
        return float(_mean([(weight, value**metric.power) for weight, value in pairs]) ** (1 / metric.power))
    except OverflowError:
        return math.inf


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Weighted mean of (weight, value) pairs; weights are not negative, and not all 0."""
    total = of = 0.0
    for weight, value in pairs:
        total, of = total + weight * value, of + weight
    if math.isfinite(total) and math.isfinite(of):
        return total / of
    most = max(weight for weight, _ in pairs)
    shares = sum(weight / most for weight, _ in pairs)
    return sum(weight / most / shares * value for weight, value in pairs)


def unchanged_loss(losses: Mapping[int, float], lr: object) -> str | None:
    """Return what is probably wrong if the loss has not changed since the first round, or None.

    Args:
        losses: mean training loss of each round of work so far, by its number from 0.
        lr: the job's learning rate, if it has one.
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
