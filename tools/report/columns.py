"""Columns of a run, with one row per round or device, for data frames and trackers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fedquilt import metrics
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.views import costs, progress
from fedquilt.coordinator.views.scores import RunScores
from fedquilt.core import Update

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


@dataclass
class RoundRows:
    """Rows of a run's rounds, built from its events in order.

    The costs of surveys and evaluation-only rounds count with the preceding round, so that columns add up to the
    whole run.

    Args:
        limit: Maximum number of rounds of the job.
        metric: Main metric, after which columns are named.
    """

    limit: int
    metric: metrics.Metric = metrics.ACCURACY
    rows: list[Row] = field(default_factory=list)
    devices: dict[str, float] = field(default_factory=dict)  # device -> main metric at its last check
    _updates: list[Update] = field(default_factory=list)
    _extra: int = 0
    _over: bool = False
    _before: Row | None = None  # what was taken before the first round

    def add_event(self, fact: AnyEvent) -> None:
        if isinstance(fact, UpdateAccepted):
            self._updates.append(fact.update)
        if not isinstance(fact, RoundCommitted):
            return
        updates = [update for update in self._updates if update.round == fact.round]
        self._updates = []
        counted = fact.round - self._extra
        self._extra += fact.settled
        self._add_evaluation(counted, updates, fact)
        taken = _sum_costs(fact, updates)
        if fact.settled or self._over or counted >= self.limit:
            last = self.rows[-1] if self.rows else self._before
            if last is None:
                self._before = taken
            else:
                _add_costs(last, taken)
        else:
            row = {**dict.fromkeys(ROUND), "round": counted + 1, **taken}
            row |= {"train_loss": fact.metrics.get("loss"), "participants": len(updates)}
            if self._before is not None:
                _add_costs(row, self._before)
                self._before = None
            self.rows.append(row)
        self._over = self._over or fact.finished

    def _add_evaluation(self, done: int, updates: Iterable[Update], fact: RoundCommitted) -> None:
        # an evaluation in a round is of the state before the round, hence after `done` rounds
        found = progress.summarise_round(fact.evaluation, updates)
        if found is not None and self.rows and not fact.settled:
            self.devices = found.devices
            self.rows[min(done, len(self.rows)) - 1] |= {
                METRIC: found.weighted,
                "loss": found.loss,
                f"held_{METRIC}": found.weighted,
                "worst_decile": found.worst_decile,
                "deviation": found.deviation,
            }

    def merge_scores(self, found: RunScores) -> list[Row]:
        held = {each.rounds: each for each in found.held}
        test = {each.rounds: each for each in found.scores}
        rows = []
        for row in self.rows:
            row = dict(row)
            if (own := held.get(row["round"])) is not None:
                row |= {f"held_{METRIC}": own.weighted, "worst_decile": own.worst_decile, "deviation": own.deviation}
                row |= {METRIC: own.weighted, "loss": own.loss}
            if test:
                score = test.get(row["round"])
                row |= {METRIC: score and score.value, "loss": score and score.loss}
            rows.append(metrics.rename_columns(self.metric, row))
        return rows


def _sum_costs(fact: RoundCommitted, updates: Sequence[Update]) -> Row:
    whole = costs.sum_costs(updates)
    joules = whole.energy_j if whole.metered == whole.tasks else None
    return {
        "seconds": fact.took_s,
        "joules": joules if updates else 0.0,
        "down_bytes": whole.down_bytes,
        "up_bytes": whole.up_bytes,
    }


def _add_costs(row: Row, more: Row) -> None:
    for name in ("seconds", "joules", "down_bytes", "up_bytes"):
        row[name] = None if row[name] is None or more[name] is None else row[name] + more[name]


def make_round_columns(facts: Iterable[AnyEvent], job: JobSettings, found: RunScores) -> dict[str, list[Any]]:
    rows = collect_rounds(facts, job).merge_scores(found)
    names = [metrics.column_name(find_main_metric(job), name) for name in ROUND]
    return {name: [row[name] for row in rows] for name in names}


def collect_rounds(facts: Iterable[AnyEvent], job: JobSettings) -> RoundRows:
    made = RoundRows(job.rounds, find_main_metric(job))
    for fact in facts:
        made.add_event(fact)
    return made


def make_device_columns(facts: Sequence[AnyEvent], job: JobSettings, found: RunScores) -> dict[str, list[Any]]:
    values = found.devices or collect_rounds(facts, job).devices
    account = costs.compute_job_cost(facts).devices
    rows = []
    for name in sorted({*account, *values}):
        each = account.get(name, costs.CostLedger())
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
