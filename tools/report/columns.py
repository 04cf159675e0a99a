"""Columns of a run, with one row per round or device, for data frames and callbacks."""

from __future__ import annotations

from typing import Any, Final

from fedquilt import metrics
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.views.run_summary import CostLedger, RunSummary
from fedquilt.coordinator.views.scores import RunScores

Row = dict[str, Any]

METRIC: Final = metrics.ACCURACY.name  # stands for the main metric of the job's task, by which columns are named

ROUND: Final = (
    "round",  # from 1
    METRIC,  # after the round: on the test set, or where the job has none on held-out shares; None: not known
    "loss",  # of the same evaluation
    f"held_{METRIC}",  # on the devices' held-out shares, by examples
    "worst_decile",  # likewise, mean of the worst tenth of the devices
    "deviation",  # likewise, standard deviation over devices
    "train_loss",  # mean over the devices' last epoch, by examples
    "seconds",  # from the round's opening to its end: on the boards' clock in a simulation
    "joules",  # of all tasks, gross; None: a board has no meter
    "down_bytes",
    "up_bytes",
    "participants",  # devices whose updates were aggregated
)
DEVICE: Final = (
    "device",
    "tasks",  # answered and counted
    "declined",  # refused tasks and refused updates
    "examples",
    "seconds",  # at tasks
    "joules",  # gross; None: no meter
    "net_joules",  # above idle
    "down_bytes",
    "up_bytes",
    "peak_bytes",  # of memory, of the largest task
    METRIC,  # of the last evaluation on its held-out share; None: there was none
)


def find_main_metric(job: JobSettings) -> metrics.Metric:
    return metrics.MAIN[metrics.task_from_network(job.model)]


def make_round_rows(summary: RunSummary) -> list[Row]:
    """Return one row per round of a run, without the scores of `fedquilt model evaluate`.

    The costs of surveys and evaluation-only rounds count with the preceding round, so that columns add up to the
    whole run.
    """
    rows, before = list[Row](), None  # what was taken before the first round
    for each in summary.committed_rounds():
        if each.scores is not None and rows:  # of the state before the round, hence after `rounds_before` rounds
            rows[min(each.rounds_before, len(rows)) - 1] |= {
                METRIC: each.scores.weighted,
                "loss": each.scores.loss,
                f"held_{METRIC}": each.scores.weighted,
                "worst_decile": each.scores.worst_decile,
                "deviation": each.scores.deviation,
            }
        cost = each.cost
        taken = {
            "seconds": each.duration_s,
            "joules": cost.whole_j if cost.tasks else 0.0,
            "down_bytes": cost.down_bytes,
            "up_bytes": cost.up_bytes,
        }
        if each.is_work:
            row = {**dict.fromkeys(ROUND), "round": each.rounds_before + 1, **taken}
            rows.append(row | {"train_loss": each.train_loss, "participants": cost.tasks})
            if before is not None:
                _add_costs(rows[-1], before)
                before = None
        elif rows:
            _add_costs(rows[-1], taken)
        else:
            before = taken
    return rows


def _add_costs(row: Row, more: Row) -> None:
    for name in ("seconds", "joules", "down_bytes", "up_bytes"):
        row[name] = None if row[name] is None or more[name] is None else row[name] + more[name]


def make_scored_rows(summary: RunSummary, job: JobSettings, found: RunScores) -> list[Row]:
    """Return one row per round, with scores of `fedquilt model evaluate` under the main metric."""
    held = {each.rounds: each for each in found.held}
    test = {each.rounds: each for each in found.scores}
    rows = []
    for row in make_round_rows(summary):
        if (own := held.get(row["round"])) is not None:
            row |= {f"held_{METRIC}": own.weighted, "worst_decile": own.worst_decile, "deviation": own.deviation}
            row |= {METRIC: own.weighted, "loss": own.loss}
        if test:
            score = test.get(row["round"])
            row |= {METRIC: score and score.value, "loss": score and score.loss}
        rows.append(metrics.rename_columns(find_main_metric(job), row))
    return rows


def make_round_columns(summary: RunSummary, job: JobSettings, found: RunScores) -> dict[str, list[Any]]:
    rows = make_scored_rows(summary, job, found)
    names = [metrics.column_name(find_main_metric(job), name) for name in ROUND]
    return {name: [row[name] for row in rows] for name in names}


def make_device_columns(summary: RunSummary, job: JobSettings, found: RunScores) -> dict[str, list[Any]]:
    last = max((score.rounds for score in summary.scores.values()), default=0)
    own = {name: score.value for name, score in summary.scores.items() if score.rounds == last > 0}
    values, account = found.devices or own, summary.device_costs()
    rows = []
    for name in sorted({*account, *values}):
        each = account.get(name, CostLedger())
        rows.append(
            {
                "device": name,
                "tasks": each.tasks,
                "declined": each.declined,
                "examples": int(each.examples),
                "seconds": each.wall_s,
                "joules": each.energy_j,
                "net_joules": each.net_j,
                "down_bytes": each.down_bytes,
                "up_bytes": each.up_bytes,
                "peak_bytes": each.peak_bytes,
                METRIC: values.get(name),
            }
        )
    return metrics.rename_columns(find_main_metric(job), {name: [row[name] for row in rows] for name in DEVICE})
