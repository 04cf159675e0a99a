"""Metrics of each kind of prediction, and which of them compares networks.

Light (no numpy): the coordinator's views, comparisons and reports all take from here the main metric of an
evaluation, whether more of it is better, and how values of several devices are combined. An engine computes the
metrics (`fedquilt.edge_agent.engines.objectives`); no other code depends on the task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from fedquilt.core.errors import JobError

TaskKind = Literal["classes", "regression", "labels"]
"""One class of several; one or more real numbers; each of several labels present or absent."""

TASKS: Final[tuple[TaskKind, ...]] = ("classes", "regression", "labels")
CHECK: Final = "check."  # prefix of the metrics of an evaluation round


class Metric(NamedTuple):
    """Meaning of one number of an evaluation."""

    name: str  # as reported by engines
    title: str  # for people
    higher: bool = True  # whether more is better
    share: bool = True  # whether it runs from 0 to 1 and is shown in per cent
    power: int = 1  # exponent of the mean over devices: 2 for a root of a mean of squares


ACCURACY: Final = Metric("accuracy", "accuracy")
KNOWN: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        ACCURACY,
        Metric("rmse", "RMSE", higher=False, share=False, power=2),
        Metric("label_accuracy", "label accuracy"),
        Metric("mae", "MAE", higher=False, share=False),
        Metric("r2", "R²", share=False),
        Metric("exact_match", "exact matches"),
        Metric("macro_f1", "macro F1"),
        Metric("loss", "loss", higher=False, share=False),
    )
}
MAIN: Final[Mapping[TaskKind, Metric]] = {
    "classes": KNOWN["accuracy"],
    "regression": KNOWN["rmse"],
    "labels": KNOWN["label_accuracy"],
}


def task_of(network: Mapping[str, Any]) -> TaskKind:
    """Task in a network's table; without a key `task` it is classes.

    Raises:
        JobError: an unknown task; lists the known ones.
    """
    task = network.get("task", "classes")
    if task not in TASKS:
        raise JobError(f"task = {task!r}: there are {', '.join(TASKS)}")
    return task


def main(told: Mapping[str, float], prefix: str = "") -> tuple[Metric, float] | None:
    """Main metric of an evaluation's report, and its value; None: it reports none.

    Args:
        told: metric -> value.
        prefix: before each name: "check." in updates and committed rounds.
    """
    for metric in MAIN.values():
        if f"{prefix}{metric.name}" in told:
            return metric, told[f"{prefix}{metric.name}"]
    return None


def joined(metric: Metric, told: Iterable[tuple[float, float]]) -> float:
    """Combine several devices' (value, weight): a weighted mean; of RMSEs the root of the mean of squares."""
    pairs = list(told)
    whole = sum(weight for _, weight in pairs)
    return float((sum(value**metric.power * weight for value, weight in pairs) / whole) ** (1 / metric.power))


def best(metric: Metric, values: Sequence[float]) -> float:
    """Best of one or more values."""
    return max(values) if metric.higher else min(values)


def reached(metric: Metric, value: float, target: float) -> bool:
    """Whether a value is as good as the target, or better."""
    return value >= target if metric.higher else value <= target


def worst_first(metric: Metric, values: Iterable[float]) -> list[float]:
    """Values in order, the worst first."""
    return sorted(values, reverse=not metric.higher)


def scale(metric: Metric) -> float:
    """Factor for display: 100 for values in per cent."""
    return 100.0 if metric.share else 1.0


def shown(metric: Metric, value: float, digits: int = 2) -> str:
    """Value with its unit: "77.70 %", or four significant digits."""
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.{digits}f} %" if metric.share else f"{value:.4g}"


def label(metric: Metric) -> str:
    """Name of the metric with its unit, for the head of a column or an axis."""
    return f"{metric.title} %" if metric.share else metric.title


def column(metric: Metric, name: str) -> str:
    """Name of a table's column "accuracy" or "held_accuracy" when the main metric is another."""
    return {"accuracy": metric.name, "held_accuracy": f"held_{metric.name}"}.get(name, name)


def titled(metric: Metric, row: Mapping[str, Any]) -> dict[str, Any]:
    """Row, or table of columns, with its columns named after the main metric."""
    return {column(metric, name): value for name, value in row.items()}
