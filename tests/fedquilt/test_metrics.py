"""The main metric of a task: which it is, which way is better, what a round's devices come to."""

import math

import plain
import pytest
from evaluations import of_classes, of_numbers, total

from fedquilt import metrics
from fedquilt.coordinator import settings
from fedquilt.coordinator.updates import aggregation as updates_metrics
from fedquilt.coordinator.views import event_messages, run_summary
from fedquilt.core import EvaluationSums, JobError, Update, evaluation
from fedquilt.tools.experiments import tables
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun

RMSE = metrics.METRICS["rmse"]


def update(device: str, sums: EvaluationSums | None = None, **metrics: float) -> Update:
    return plain.update(device=device, metrics=metrics, evaluation=sums)


def test_errors_of_devices_are_those_of_all_their_examples():
    """3 over one example and 1 over three: the root of (9 + 3) / 4, as over all four at once; MAE is 6 / 4."""
    updates = [update("a", of_numbers(3.0, 3.0, 1)), update("b", of_numbers(1.0, 1.0, 3))]
    sums = updates_metrics.aggregate_evaluations(updates)
    assert sums is not None
    assert evaluation.compute_metrics(sums) == {"rmse": math.sqrt(3.0), "mae": 1.5, "loss": 3.0}
    own = run_summary.summarise_round(sums, updates)
    assert (own.metric, own.weighted, own.worst_decile, own.deviation) == ("rmse", math.sqrt(3.0), 3.0, 1.0)


def test_a_metric_of_fewer_than_most_devices_is_none_of_the_round():
    invented = {f"mine{number}": 1.0 for number in range(60)}
    updates = [update("a", loss=1.0), update("b", loss=3.0), update("c", loss=2.0, **invented)]
    assert updates_metrics.average_metrics(updates) == {"loss": 2.0}
    assert updates_metrics.explain_missing_metrics(updates, {"loss": 2.0}) == []


def test_a_device_whose_loss_is_far_from_the_others_is_named():
    updates = [update(name, of_classes(0.5, loss=loss)) for name, loss in (("a", 0.4), ("b", 0.5), ("c", 1e9))]
    assert updates_metrics.explain_evaluation(updates) == [
        "evaluation of c: the loss is 1e+09, and the median of all devices is 0.5"
    ]


def test_a_device_of_another_network_does_not_count_and_is_named():
    updates = [update("a", of_classes(0.5)), update("b", of_classes(0.7)), update("c", of_numbers(1.0, 1.0, 5))]
    sums = updates_metrics.aggregate_evaluations(updates)
    assert sums == total(of_classes(0.5), of_classes(0.7))
    assert updates_metrics.explain_evaluation(updates) == [
        "evaluation of c ignored: its network has 1 outputs, unlike most devices' networks"
    ]


def test_smaller_is_better_for_errors_and_larger_for_shares():
    assert metrics.reaches_target(RMSE, 0.2, 0.3)
    assert not metrics.reaches_target(metrics.ACCURACY, 0.2, 0.3)
    assert metrics.best_value(RMSE, [3.0, 1.0, 2.0]) == 1.0
    assert metrics.best_value(metrics.ACCURACY, [0.3, 0.7]) == 0.7
    assert metrics.format_value(RMSE, 12.3456) == "12.35"
    assert metrics.format_value(metrics.ACCURACY, 0.777) == "77.70 %"


def run_of(values: list[float], metric: str) -> SeedRun:
    none = {"mean": None, "worst_decile": None, "seconds": None, "energy_j": None}
    marks = [
        EvaluationPoint(
            rounds=n + 1, test=value, held=None, real_s=1.0, down_bytes=1, up_bytes=1, metric=metric, **none
        )
        for n, value in enumerate(values)
    ]
    return SeedRun(method="fedavg", seed=0, params={}, devices=1, tested=1, marks=tuple(marks))


def test_a_comparison_of_errors_counts_down_to_its_target():
    found = tables.make_result("j", [run_of([5.0, 2.0, 3.0], "rmse")], 2.5)
    (row,) = found["table"]
    assert (found["metric"], row["best"], row["to_target"]["rounds"]) == ("rmse", 2.0, 2.0)
    head, cells = tables.make_table_head(found), tables.format_table_cells(found)[0]
    assert head[2] == "RMSE"
    assert cells[2] == "3.0000"
    assert any("at or below the target" in line for line in tables.make_table_notes(found))


def test_a_line_of_the_log_names_the_metric():
    assert event_messages.describe_evaluation(of_numbers(0.25, 0.25, 8))[0] == "RMSE 0.25 on 8 held-out examples"


# -- in a job -------------------------------------------------------------------------------------

MODEL = {"name": "mlp", "inputs": 4, "outputs": 1}


def job(**table: object) -> settings.JobSettings:
    return settings.parse_job({"name": "j", "method": "fedavg", **table})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"model": {**MODEL, "task": "regression"}, "data": {"path": "a", "task": "labels"}},
            r"\[model\] task = 'regression' and \[data\] task = 'labels'",
        ),
        (
            {"model": {**MODEL, "task": "ranking"}},
            "task = 'ranking' is unknown: write one of classes, regression, labels",
        ),
        ({"model": {**MODEL, "classes": 2}}, "outputs and classes have the same meaning"),
        (
            {"model": {**MODEL, "task": "regression"}, "method": "genefl"},
            "task = 'regression' is not supported by genefl, which needs 'classes'",
        ),
        (
            {"model": {**MODEL, "task": "labels"}, "method": "depthfl"},
            "task = 'labels' is not supported by depthfl, which needs 'classes'",
        ),
    ],
)
def test_a_task_that_cannot_be_is_told_before_anything_runs(table, said):
    with pytest.raises(JobError, match=said):
        job(**table)
