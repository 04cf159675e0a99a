"""Metrics of each kind of prediction: their names, titles and units, and which of them compares networks.

Light (no numpy): the coordinator's views, comparisons and reports all take from here the main metric of an
evaluation, and whether more of it is better. Their values come from `fedquilt.evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fedquilt import evaluation
from fedquilt.core import EvaluationSums, JobError, TaskKind

TASKS: Final[tuple[TaskKind, ...]] = ("classes", "regression", "labels")


class Metric(NamedTuple):
    """Meaning of one number of an evaluation."""

    name: str  # as of `evaluation.metrics_of`
    title: str  # for people
    higher: bool = True  # whether more is better
    share: bool = True  # whether it runs from 0 to 1 and is shown in per cent


ACCURACY: Final = Metric("accuracy", "accuracy")
KNOWN: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        ACCURACY,
        Metric("rmse", "RMSE", higher=False, share=False),
        Metric("label_accuracy", "label accuracy"),
        Metric("mae", "MAE", higher=False, share=False),
        Metric("r2", "R²", share=False),
        Metric("exact_match", "exact matches"),
        Metric("balanced_accuracy", "balanced accuracy"),
        Metric("macro_precision", "macro precision"),
        Metric("macro_recall", "macro recall"),
        Metric("macro_f1", "macro F1"),
        Metric("micro_precision", "micro precision"),
        Metric("micro_recall", "micro recall"),
        Metric("micro_f1", "micro F1"),
        Metric("auc", "AUC", share=False),
        Metric("auc_error", "error of the AUC", higher=False, share=False),
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


def main(sums: EvaluationSums | None) -> tuple[Metric, float] | None:
    """Return the main metric of an evaluation and its value, or None without examples."""
    if sums is None or not sums.examples:
        return None
    return MAIN[sums.task], evaluation.main_value(sums)


def over_devices(sums: EvaluationSums | None) -> evaluation.OverDevices | None:
    """Summarise the main metric over the devices of a round's evaluation, or return None if there is none."""
    return None if sums is None else evaluation.over_devices(sums, higher=MAIN[sums.task].higher)


def best(metric: Metric, values: Sequence[float]) -> float:
    """Best of one or more values."""
    return max(values) if metric.higher else min(values)


def reached(metric: Metric, value: float, target: float) -> bool:
    """Whether a value is as good as the target, or better."""
    return value >= target if metric.higher else value <= target


def scale(metric: Metric) -> float:
    """Factor for display: 100 for values in per cent."""
    return 100.0 if metric.share else 1.0


def shown(metric: Metric, value: float, digits: int = 2) -> str:
    """Value with its unit: "77.70 %", or four significant digits."""
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.{digits}f} %" if metric.share else f"{value:.4g}"


def describe(sums: EvaluationSums, digits: int = 2, skip: Collection[str] = ()) -> list[str]:
    """Return the metrics of an evaluation with their titles and units, the main one first."""
    values = evaluation.metrics_of(sums)
    told = {name: f"{KNOWN[name].title} {shown(KNOWN[name], value, digits)}" for name, value in values.items()}
    if (error := values.get("auc_error")) is not None:
        told["auc"] += f" ± {error:.2g}"
    return [said for name, said in told.items() if name != "auc_error" and name not in skip]


def label(metric: Metric) -> str:
    """Name of the metric with its unit, for the head of a column or an axis."""
    return f"{metric.title} %" if metric.share else metric.title


def column(metric: Metric, name: str) -> str:
    """Name of a table's column "accuracy" or "held_accuracy" when the main metric is another."""
    return {"accuracy": metric.name, "held_accuracy": f"held_{metric.name}"}.get(name, name)


def titled(metric: Metric, row: Mapping[str, Any]) -> dict[str, Any]:
    """Row, or table of columns, with its columns named after the main metric."""
    return {column(metric, name): value for name, value in row.items()}
