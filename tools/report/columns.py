"""A run as columns, one row a round or a device: what `fedquilt.Run` gives to data frames and trackers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fedquilt import metrics
from fedquilt.coordinator.facts import Answered, AnyFact, Committed
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.views import costs, progress
from fedquilt.coordinator.views.scores import Scores
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


def metric_of(job: Job) -> metrics.Metric:
    """The main metric of a job's task; a column of values is called by its name."""
    return metrics.MAIN[metrics.task_of(job.model)]


@dataclass
class Rounds:
    """Rows of a run's rounds, made of its facts in their order.

    Gathering statistics and closing evaluations are no rounds: what they take counts with the round that they follow,
    so that columns add up to the whole run.

    Args:
        limit: rounds after which the job ends at the latest.
        metric: the main one, by which columns are named.
    """

    limit: int
    metric: metrics.Metric = metrics.ACCURACY
    rows: list[Row] = field(default_factory=list)
    devices: dict[str, float] = field(default_factory=dict)  # device -> main metric at its last check
    _updates: list[Update] = field(default_factory=list)
    _extra: int = 0
    _over: bool = False
    _before: Row | None = None  # what was taken before the first round

    def add(self, fact: AnyFact) -> None:
        """Let a fact count."""
        if isinstance(fact, Answered):
            self._updates.append(fact.update)
        if not isinstance(fact, Committed):
            return
        updates = [update for update in self._updates if update.round == fact.round]
        self._updates = []
        counted = fact.round - self._extra
        self._extra += fact.settled
        self._checked(counted, updates, fact)
        taken = _taken(fact, updates)
        if fact.settled or self._over or counted >= self.limit:
            last = self.rows[-1] if self.rows else self._before
            if last is None:
                self._before = taken
            else:
                _plus(last, taken)
        else:
            row = {**dict.fromkeys(ROUND), "round": counted + 1, **taken}
            row |= {"train_loss": fact.metrics.get("loss"), "participants": len(updates)}
            if self._before is not None:
                _plus(row, self._before)
                self._before = None
            self.rows.append(row)
        self._over = self._over or fact.finished

    def _checked(self, done: int, updates: Iterable[Update], fact: Committed) -> None:
        """A check in a round is of the state that the round began with, hence after `done` rounds."""
        found = progress.personal(fact.evaluation, updates)
        if found is not None and self.rows and not fact.settled:
            self.devices = found.devices
            self.rows[min(done, len(self.rows)) - 1] |= {
                METRIC: found.weighted,
                "loss": found.loss,
                f"held_{METRIC}": found.weighted,
                "worst_decile": found.worst_decile,
                "deviation": found.deviation,
            }

    def scored(self, found: Scores) -> list[Row]:
        """The rows so far, with the evaluations made beside the rounds."""
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
            rows.append(metrics.titled(self.metric, row))
        return rows


def _taken(fact: Committed, updates: Sequence[Update]) -> Row:
    whole = costs.total(updates)
    joules = whole.energy_j if whole.metered == whole.tasks else None
    return {
        "seconds": fact.took_s,
        "joules": joules if updates else 0.0,
        "down_bytes": whole.down_bytes,
        "up_bytes": whole.up_bytes,
    }


def _plus(row: Row, more: Row) -> None:
    for name in ("seconds", "joules", "down_bytes", "up_bytes"):
        row[name] = None if row[name] is None or more[name] is None else row[name] + more[name]


def rounds(facts: Iterable[AnyFact], job: Job, found: Scores) -> dict[str, list[Any]]:
    """The columns of ROUND."""
    rows = gathered(facts, job).scored(found)
    names = [metrics.column(metric_of(job), name) for name in ROUND]
    return {name: [row[name] for row in rows] for name in names}


def gathered(facts: Iterable[AnyFact], job: Job) -> Rounds:
    """The rows of a run's facts."""
    made = Rounds(job.rounds, metric_of(job))
    for fact in facts:
        made.add(fact)
    return made


def devices(facts: Sequence[AnyFact], job: Job, found: Scores) -> dict[str, list[Any]]:
    """The columns of DEVICE, sorted by device: all that have answered, declined or been evaluated."""
    values = found.devices or gathered(facts, job).devices
    account = costs.account(facts).devices
    rows = []
    for name in sorted({*account, *values}):
        each = account.get(name, costs.Ledger())
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
    return metrics.titled(metric_of(job), {name: [row[name] for row in rows] for name in DEVICE})
