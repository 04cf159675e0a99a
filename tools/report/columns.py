"""Columns of a run, with one row per round or device, for data frames and callbacks."""

from __future__ import annotations

from typing import Any, Final

from fedquilt import metrics
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.views.run_summary import CostLedger, RunSummary
from fedquilt.coordinator.views.scores import RunScores

Row = dict[str, Any]

METRIC: Final = metrics.ACCURACY.name  # placeholder for the main metric of the job's task in names of columns

ROUND_COLUMNS: Final = (
    "round",  # from 1
    METRIC,  # after the round, on the test set or else on held-out shares, or None if unknown
    "loss",  # from the same evaluation
    f"held_{METRIC}",  # on the devices' held-out shares, weighted by examples
    "worst_decile",  # on held-out shares: mean of the worst tenth of the devices
    "deviation",  # on held-out shares: standard deviation over devices
    "train_loss",  # mean over the devices' last epoch, by examples
    "seconds",  # from the round's opening to its end, on the boards' clock in a simulation
    "joules",  # of all tasks, gross, or None if a board has no meter
    "down_bytes",
    "up_bytes",
    "participants",  # devices whose updates were aggregated
)
DEVICE_COLUMNS: Final = (
    "device",
    "tasks",  # with an aggregated update
    "declined",  # refused tasks and refused updates
    "staleness",  # in buffered mode: mean number of commits since the states of its updates
    "examples",
    "seconds",  # in tasks
    "joules",  # gross, or None without a meter
    "net_joules",  # above idle
    "down_bytes",
    "up_bytes",
    "peak_bytes",  # memory of the largest task
    METRIC,  # from the last evaluation on its held-out share, or None without an evaluation
)


def find_main_metric(job: JobSettings) -> metrics.Metric:
    return metrics.MAIN_METRICS[metrics.task_from_network(job.model)]


def make_round_rows(summary: RunSummary) -> list[Row]:
    """Return one row per round of a run, without the scores of `fedquilt model evaluate`.

    The costs of rounds without work are added to the preceding round, so that columns add up to the whole run.
    """
    rows = list[Row]()
    unassigned_costs = None  # costs before the first round
    for round in summary.committed_rounds():
        if round.scores is not None and rows:  # scores are of the state before the round
            rows[min(round.rounds_before, len(rows)) - 1] |= {
                METRIC: round.scores.weighted,
                "loss": round.scores.loss,
                f"held_{METRIC}": round.scores.weighted,
                "worst_decile": round.scores.worst_decile,
                "deviation": round.scores.deviation,
            }
        cost = round.cost
        costs = {
            "seconds": round.duration_s,
            "joules": cost.whole_j if cost.tasks else 0.0,
            "down_bytes": cost.down_bytes,
            "up_bytes": cost.up_bytes,
        }
        if round.is_work:
            row = {**dict.fromkeys(ROUND_COLUMNS), "round": round.rounds_before + 1, **costs}
            rows.append(row | {"train_loss": round.train_loss, "participants": cost.tasks})
            if unassigned_costs is not None:
                _add_costs(rows[-1], unassigned_costs)
                unassigned_costs = None
        elif rows:
            _add_costs(rows[-1], costs)
        else:
            unassigned_costs = costs
    return rows


def _add_costs(row: Row, costs: Row) -> None:
    for name in ("seconds", "joules", "down_bytes", "up_bytes"):
        row[name] = None if row[name] is None or costs[name] is None else row[name] + costs[name]


def make_scored_rows(summary: RunSummary, job: JobSettings, scores: RunScores) -> list[Row]:
    """Return one row per round, with scores of `fedquilt model evaluate` in the column of the main metric."""
    held = {row_score.rounds: row_score for row_score in scores.held}
    test = {row_score.rounds: row_score for row_score in scores.scores}
    rows = []
    for row in make_round_rows(summary):
        if (held_score := held.get(row["round"])) is not None:
            row |= {
                f"held_{METRIC}": held_score.weighted,
                "worst_decile": held_score.worst_decile,
                "deviation": held_score.deviation,
            }
            row |= {METRIC: held_score.weighted, "loss": held_score.loss}
        if test:
            score = test.get(row["round"])
            row |= {METRIC: score and score.value, "loss": score and score.loss}
        rows.append(metrics.rename_columns(find_main_metric(job), row))
    return rows


def make_round_columns(summary: RunSummary, job: JobSettings, scores: RunScores) -> dict[str, list[Any]]:
    rows = make_scored_rows(summary, job, scores)
    names = [metrics.column_name(find_main_metric(job), name) for name in ROUND_COLUMNS]
    return {name: [row[name] for row in rows] for name in names}


def make_device_columns(summary: RunSummary, job: JobSettings, scores: RunScores) -> dict[str, list[Any]]:
    last_rounds = max((score.rounds for score in summary.scores.values()), default=0)
    held_out_values = {name: score.value for name, score in summary.scores.items() if score.rounds == last_rounds > 0}
    values, costs = scores.devices or held_out_values, summary.device_costs()
    rows = []
    for name in sorted({*costs, *values}):
        device_cost = costs.get(name, CostLedger())
        rows.append(
            {
                "device": name,
                "tasks": device_cost.tasks,
                "declined": device_cost.declined,
                "staleness": device_cost.mean_staleness if summary.state.is_buffered else None,
                "examples": int(device_cost.examples),
                "seconds": device_cost.wall_s,
                "joules": device_cost.energy_j,
                "net_joules": device_cost.net_j,
                "down_bytes": device_cost.down_bytes,
                "up_bytes": device_cost.up_bytes,
                "peak_bytes": device_cost.peak_bytes,
                METRIC: values.get(name),
            }
        )
    return metrics.rename_columns(find_main_metric(job), {name: [row[name] for row in rows] for name in DEVICE_COLUMNS})
