"""Names, titles and units of metrics, and the main metric of each task.

This module needs no numpy. `fedquilt.core.evaluation` computes the values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fedquilt.core import EvaluationSums, JobError, TaskKind, evaluation

TASKS: Final[tuple[TaskKind, ...]] = ("classes", "regression", "labels")


class Metric(NamedTuple):
    name: str  # key in the result of `evaluation.compute_metrics`
    title: str
    higher: bool = True  # whether more is better
    share: bool = True  # whether values are from 0 to 1 and shown in per cent


ACCURACY: Final = Metric("accuracy", "accuracy")
METRICS: Final[Mapping[str, Metric]] = {
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
MAIN_METRICS: Final[Mapping[TaskKind, Metric]] = {
    "classes": METRICS["accuracy"],
    "regression": METRICS["rmse"],
    "labels": METRICS["label_accuracy"],
}


def task_from_network(network: Mapping[str, Any]) -> TaskKind:
    """Return the task in a network's table, by default "classes". Raise JobError for an unknown task."""
    task = network.get("task", "classes")
    if task not in TASKS:
        raise JobError(f"task = {task!r} is unknown: write one of {', '.join(TASKS)}")
    return task


def main_metric(sums: EvaluationSums | None) -> tuple[Metric, float] | None:
    """Return the main metric of an evaluation with its value, or None without examples."""
    if sums is None or not sums.examples:
        return None
    return MAIN_METRICS[sums.task], evaluation.main_metric_value(sums)


def summarise_over_devices(sums: EvaluationSums | None) -> evaluation.MetricOverDevices | None:
    return None if sums is None else evaluation.summarise_over_devices(sums, higher=MAIN_METRICS[sums.task].higher)


def best_value(metric: Metric, values: Sequence[float]) -> float:
    return max(values) if metric.higher else min(values)


def reaches_target(metric: Metric, value: float, target: float) -> bool:
    return value >= target if metric.higher else value <= target


def display_factor(metric: Metric) -> float:
    return 100.0 if metric.share else 1.0


def format_value(metric: Metric, value: float, digits: int = 2) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{100 * value:.{digits}f} %" if metric.share else f"{value:.4g}"


def describe_metrics(sums: EvaluationSums, digits: int = 2, skip: Collection[str] = ()) -> list[str]:
    values = evaluation.compute_metrics(sums)
    metrics = [(METRICS[name], value) for name, value in values.items()]
    texts = {metric.name: f"{metric.title} {format_value(metric, value, digits)}" for metric, value in metrics}
    if (error := values.get("auc_error")) is not None:
        texts["auc"] += f" ± {error:.2g}"
    return [text for name, text in texts.items() if name != "auc_error" and name not in skip]


def describe_evaluation(sums: EvaluationSums, skip: Collection[str] = ()) -> str:
    """Return metrics and the number of examples, the main metric first.

    The loss of a regression, the square of the RMSE, is left out.
    """
    metric = MAIN_METRICS[sums.task]
    main, *other_metrics = describe_metrics(sums, skip=(*skip, "loss") if sums.task == "regression" else skip)
    return ", ".join((f"{main} {'of' if metric.share else 'on'} {sums.examples} examples", *other_metrics))


def axis_label(metric: Metric) -> str:
    return f"{metric.title} %" if metric.share else metric.title


def column_name(metric: Metric, name: str) -> str:
    """Return a table column's name, with the main metric's name in place of "accuracy"."""
    return {"accuracy": metric.name, "held_accuracy": f"held_{metric.name}"}.get(name, name)


def rename_columns(metric: Metric, row: Mapping[str, Any]) -> dict[str, Any]:
    return {column_name(metric, name): value for name, value in row.items()}
