"""What a network is trained to predict, and the metric by which such networks are compared.

Light (no numpy): the coordinator's views, comparisons and reports all ask here which metric of an evaluation is the
main one, whether more of it is better, and how values of several devices become one. An engine computes the metrics
(`fedquilt.edge_agent.engines.objectives`); nothing else has to know which task it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from fedquilt.core.errors import JobError

TaskKind = Literal["classes", "regression", "labels"]
"""One class of several; one or more real numbers; each of several labels present or absent."""

TASKS: Final[tuple[TaskKind, ...]] = ("classes", "regression", "labels")


class Metric(NamedTuple):
    """How a number of an evaluation is read."""

    name: str  # as engines report it
    title: str  # for people
    higher: bool = True  # whether more is better
    share: bool = True  # whether it runs from 0 to 1 and is shown in per cent
    power: int = 1  # of the mean that joins several devices' values: 2 for a root of a mean of squares


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
    """The task in a network's table; without a key `task` it tells classes apart.

    Raises:
        JobError: an unknown task; lists those there are.
    """
    task = network.get("task", "classes")
    if task not in TASKS:
        raise JobError(f"task = {task!r}: there are {', '.join(TASKS)}")
    return task


def main(told: Mapping[str, float], prefix: str = "") -> tuple[Metric, float] | None:
    """The main metric among those that an evaluation reports, and its value; None: it reports none.

    Args:
        prefix: before each name: "check." in updates and committed rounds.
    """
    for metric in MAIN.values():
        if f"{prefix}{metric.name}" in told:
            return metric, told[f"{prefix}{metric.name}"]
    return None


def joined(metric: Metric, told: Iterable[tuple[float, float]]) -> float:
    """One value of several devices' (value, weight): a mean, by weight; of RMSEs the root of the mean of squares."""
    pairs = list(told)
    whole = sum(weight for _, weight in pairs)
    return float((sum(value**metric.power * weight for value, weight in pairs) / whole) ** (1 / metric.power))


def best(metric: Metric, values: Sequence[float]) -> float:
    """The best of one or more values."""
    return max(values) if metric.higher else min(values)


def reached(metric: Metric, value: float, target: float) -> bool:
    """Whether a value is as good as the target, or better."""
    return value >= target if metric.higher else value <= target


def worst_first(metric: Metric, values: Iterable[float]) -> list[float]:
    """The values in order, the worst first."""
    return sorted(values, reverse=not metric.higher)


def scale(metric: Metric) -> float:
    """Factor for showing values: 100 where they are shown in per cent."""
    return 100.0 if metric.share else 1.0


def shown(metric: Metric, value: float, digits: int = 2) -> str:
    """A value with its unit: "77.70 %", or four significant digits."""
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.{digits}f} %" if metric.share else f"{value:.4g}"


def label(metric: Metric) -> str:
    """The metric's name with its unit, for the head of a column or an axis."""
    return f"{metric.title} %" if metric.share else metric.title


def column(metric: Metric, name: str) -> str:
    """What a table's column "accuracy" or "held_accuracy" is called where the main metric is another."""
    return {"accuracy": metric.name, "held_accuracy": f"held_{metric.name}"}.get(name, name)


def titled(metric: Metric, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row, or a table of columns, with its columns named after the main metric."""
    return {column(metric, name): value for name, value in row.items()}
