"""Metrics of a round: the devices' values of each metric, combined into one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedquilt.core import Update
from fedquilt.metrics import KNOWN


def average(updates: Iterable[Update]) -> dict[str, float]:
    """Average each metric over devices, weighted by the examples behind it; RMSEs by their mean square.

    "check.examples" is summed. A metric without examples, or whose sum is not finite, is left out.
    """
    told: dict[str, list[tuple[float, float]]] = {}
    examples = 0.0
    for update in sorted(updates, key=lambda update: update.device):
        checked = update.metrics.get("check.examples", 0.0)
        examples += checked
        for name, value in update.metrics.items():
            told.setdefault(name, []).append((checked if name.startswith("check.") else update.weight, value))
    result = {name: _joined(name, pairs) for name, pairs in told.items() if any(weight for weight, _ in pairs)}
    if examples:
        result["check.examples"] = examples
    return {name: value for name, value in result.items() if math.isfinite(value)}


def _joined(name: str, pairs: Sequence[tuple[float, float]]) -> float:
    """One value for the devices' (weight, value) pairs of a metric."""
    metric = KNOWN.get(name.removeprefix("check."))
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
