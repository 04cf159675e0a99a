"""The main metric of a task: which it is, which way is better, how devices' values become one."""

from __future__ import annotations

import math

import pytest

from fedquilt import metrics
from fedquilt.coordinator import settings
from fedquilt.coordinator.round_metrics import average
from fedquilt.coordinator.views import log, progress
from fedquilt.core import JobError, Update, Usage
from fedquilt.tools.experiments import tables
from fedquilt.tools.experiments.single_run import Mark, Run

RMSE = metrics.KNOWN["rmse"]


def update(device: str, **told: float) -> Update:
    found = {f"check.{name}": value for name, value in told.items()}
    return Update(job="j", round=0, attempt=0, device=device, weight=1.0, bundles={}, metrics=found, usage=Usage())


def test_errors_of_devices_are_joined_by_their_squares() -> None:
    """3 over one example and 1 over three: the root of (9 + 3) / 4, as over all four at once; MAE is a plain mean."""
    updates = [update("a", rmse=3.0, mae=3.0, examples=1.0), update("b", rmse=1.0, mae=1.0, examples=3.0)]
    found = average(updates)
    assert found["check.rmse"] == pytest.approx(math.sqrt(3.0))
    assert found["check.mae"] == 1.5
    own = progress.personal(updates)
    assert own is not None
    assert (own.metric, own.weighted) == ("rmse", pytest.approx(math.sqrt(3.0)))
    assert own.worst_decile == 3.0  # the largest is the worst


def test_an_error_too_large_to_square_is_left_out() -> None:
    """As any metric whose sum is no number."""
    assert "check.rmse" not in average([update("a", rmse=1e200, examples=1.0)])


def test_smaller_is_better_for_errors_and_larger_for_shares() -> None:
    """For a target, and for the best of a run."""
    assert metrics.reached(RMSE, 0.2, 0.3)
    assert not metrics.reached(metrics.ACCURACY, 0.2, 0.3)
    assert metrics.best(RMSE, [3.0, 1.0, 2.0]) == 1.0
    assert metrics.best(metrics.ACCURACY, [0.3, 0.7]) == 0.7
    assert metrics.shown(RMSE, 12.3456) == "12.35"
    assert metrics.shown(metrics.ACCURACY, 0.777) == "77.70 %"


def run_of(values: list[float], metric: str) -> Run:
    none = {"mean": None, "worst_decile": None, "seconds": None, "energy_j": None}
    marks = [
        Mark(rounds=n + 1, test=value, held=None, real_s=1.0, down_bytes=1, up_bytes=1, metric=metric, **none)  # type: ignore[arg-type]
        for n, value in enumerate(values)
    ]
    return Run(method="fedavg", seed=0, params={}, devices=1, tested=1, marks=tuple(marks))


def test_a_comparison_of_errors_counts_down_to_its_target() -> None:
    """The first at or below it; the best is the least; numbers are not per cent."""
    found = tables.result("j", [run_of([5.0, 2.0, 3.0], "rmse")], 2.5)
    (row,) = found["table"]
    assert (found["metric"], row["best"], row["to_target"]["rounds"]) == ("rmse", 2.0, 2.0)
    head, cells = tables.head(found), tables.rows(found)[0]
    assert head[2] == "RMSE"
    assert cells[2] == "3.0000"
    assert any("at or below the target" in line for line in tables.notes(found))


def test_a_line_of_the_log_names_the_metric() -> None:
    """With its own unit, and how many examples it is of."""
    assert log._evaluated({"check.rmse": 0.25, "check.examples": 8.0})[0] == "RMSE 0.25 on 8 held-out examples"


# -- in a job -------------------------------------------------------------------------------------

MODEL = {"name": "mlp", "inputs": 4, "outputs": 1}


def job(**table: object) -> settings.Job:
    return settings.parse({"name": "j", "method": "fedavg", **table})


def test_a_task_in_one_table_holds_for_the_other() -> None:
    """And `outputs` is another word for `classes`; a job for classes stays as it was written."""
    found = job(model={**MODEL, "task": "regression"}, data={"path": "a.csv"})
    assert found.model == {"name": "mlp", "inputs": 4, "classes": 1, "task": "regression"}
    assert found.data == {"path": "a.csv", "task": "regression"}
    assert job(model=MODEL, data={"path": "a.csv", "task": "labels"}).model["task"] == "labels"
    plain = {"name": "mlp", "inputs": 4, "classes": 3}
    assert (job(model=plain, data={"path": "a"}).model, job(model=plain, data={"path": "a"}).data) == (
        plain,
        {"path": "a"},
    )


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"model": {**MODEL, "task": "regression"}, "data": {"path": "a", "task": "labels"}},
            r"\[model\] task = 'regression' and \[data\] task = 'labels'",
        ),
        ({"model": {**MODEL, "task": "ranking"}}, "task = 'ranking': there are classes, regression, labels"),
        ({"model": {**MODEL, "classes": 2}}, "outputs and classes: both count"),
        (
            {"model": {**MODEL, "task": "regression"}, "method": "genefl"},
            "task = 'regression': genefl works with 'classes' only",
        ),
        (
            {"model": {**MODEL, "task": "labels"}, "method": "depthfl"},
            "task = 'labels': depthfl works with 'classes' only",
        ),
    ],
)
def test_a_task_that_cannot_be_is_told_before_anything_runs(table: dict[str, object], said: str) -> None:
    """When the job is read."""
    with pytest.raises(JobError, match=said):
        job(**table)
