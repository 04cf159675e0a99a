"""Reporting of runs to experiment trackers, from the event log and without effect on the run."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import fedquilt as fq
from fedquilt.api import trackers
from fedquilt.api.trackers import Tracker
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.core import JobError
from fedquilt.formats import toml
from fedquilt.tools.report import columns

log = logging.getLogger(__name__)

CALLS: Final = {"start": "start(job, run)", "round": "round(row)", "end": "end(run)"}  # of a tracker, as written

NAMED: Final[dict[str, Callable[[str], Tracker]]] = {  # by the word before the colon; the argument is the text after it
    "tensorboard": lambda folder: trackers.TensorBoard(folder or "runs"),
    "mlflow": lambda experiment: trackers.MLflow(experiment or "fedquilt"),
    "wandb": lambda project: trackers.WandB(project or "fedquilt"),
}


def tracker_from_text(text: str) -> Tracker:
    """Return a tracker from "tensorboard:FOLDER", "mlflow:EXPERIMENT" or "wandb:PROJECT".

    The part after the name is optional.

    Raises:
        JobError: If the tracker is unknown, or its package is not installed.
    """
    name, _, where = text.partition(":")
    if name not in NAMED:
        raise JobError(
            f"there is no tracker {name!r}; there are: {', '.join(NAMED)}{toml.suggest_nearest(name, NAMED)}"
        )
    return NAMED[name](where)


def require_trackers(given: Iterable[Tracker]) -> tuple[Tracker, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise JobError(f"trackers = {given!r}: a list of trackers is wanted, as in [fq.trackers.TensorBoard('runs')]")
    found = tuple(given)
    for each in found:
        if isinstance(each, type):
            raise JobError(f"tracker {each.__name__} is a class: give one of its objects, as in {each.__name__}(...)")
        lacks = [written for name, written in CALLS.items() if not callable(getattr(each, name, None))]
        if lacks:
            raise JobError(f"{each!r} is no tracker: it has no {' and no '.join(lacks)} (see fedquilt.api.trackers)")
    return found


class LogFollower:
    """Reader of a run's finished rounds, which returns each round once.

    A round that is evaluated during the next round is finished with that evaluation.
    """

    def __init__(self, home: Path, id: str) -> None:
        self._home, self._id = home, id
        self._seen, self._told = 0, 0
        self._summary: RunSummary | None = None

    def read_new_rows(self, *, ended: bool) -> list[dict[str, Any]]:
        """Return the rows finished since the last call. With `ended`, all remaining rows are finished."""
        with Store(self._home, durable=False) as store:
            row = store.find_job(self._id)
            summary = self._summary or RunSummary.from_job(row.job)
            for number, at_s, fact in store.read_events(self._id, after=self._seen):
                self._seen, summary = number, summary.after(fact, at_s)
            self._summary = summary
            rows = columns.make_scored_rows(summary, row.job, scores.read_scores(self._home, row))
        checked_later = row.job.check.every and not row.job.check.beside
        ready = rows if ended or not checked_later else rows[:-1]
        new = ready[self._told :]
        self._told = max(self._told, len(ready))
        return new


class TrackerGroup:
    """Trackers of one run, isolated from the run and from each other.

    The first error of each tracker is logged. A tracker whose `start` failed is not called again.
    """

    def __init__(self, heard_by: Sequence[Tracker]) -> None:
        self._all = tuple(heard_by)
        self._begun: list[Tracker] = []
        self._warned: set[int] = set()  # places in `_all`

    def start(self, job: fq.Job, run: str) -> None:
        for tracker in self._all:
            if self._call_tracker(tracker, "start", job, run):
                self._begun.append(tracker)

    def round(self, row: dict[str, Any]) -> None:
        for tracker in self._begun:
            self._call_tracker(tracker, "round", row)

    def end(self, run: fq.Run) -> None:
        for tracker in self._begun:
            self._call_tracker(tracker, "end", run)

    def _call_tracker(self, tracker: Tracker, call: str, *about: Any) -> bool:
        try:
            getattr(tracker, call)(*about)
        except Exception as error:
            place = next(number for number, each in enumerate(self._all) if each is tracker)
            if place not in self._warned:
                self._warned.add(place)
                log.warning("%s", _failure_message(tracker, call, error))
            return False
        return True


@contextmanager
def follow_run(home: Path, id: str, told: TrackerGroup) -> Iterator[Callable[[bool], None]]:
    """Report a run to trackers from its event log, and report the end when the body ends.

    The yielded function reports new rounds. With True, all remaining rounds are reported.
    """
    run, rows = fq.Run(home, id), LogFollower(home, id)

    def report_new_rows(last: bool) -> None:
        for row in rows.read_new_rows(ended=last):
            told.round(row)

    told.start(run.job, id)
    try:
        yield report_new_rows
    finally:
        told.end(run)


def _failure_message(tracker: Tracker, call: str, error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    rest = "it is told nothing more of this run" if call == "start" else "further errors of it are not reported"
    return (
        f"tracker {type(tracker).__name__}: {call} failed with {type(error).__name__}: {error} "
        f"({frame.filename}, line {frame.lineno}); the run goes on, and {rest}"
    )
