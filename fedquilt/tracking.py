"""Telling trackers of a run: rows read from its log, errors of trackers kept from it, and trackers named in a word."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import fedquilt as fq
from fedquilt import config, trackers
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.core import JobError
from fedquilt.tools.report import columns
from fedquilt.trackers import Tracker

log = logging.getLogger(__name__)

CALLS: Final = {"start": "start(job, run)", "round": "round(row)", "end": "end(run)"}  # of a tracker, as written

NAMED: Final[dict[str, Callable[[str], Tracker]]] = {  # by the word before the colon; told what stands after it
    "tensorboard": lambda folder: trackers.TensorBoard(folder or "runs"),
    "mlflow": lambda experiment: trackers.MLflow(experiment or "fedquilt"),
    "wandb": lambda project: trackers.WandB(project or "fedquilt"),
}


def named(text: str) -> Tracker:
    """A tracker from "tensorboard:FOLDER", "mlflow:EXPERIMENT" or "wandb:PROJECT"; ":..." may be left out.

    Raises:
        JobError: there is no such tracker, or its package is not installed.
    """
    name, _, where = text.partition(":")
    if name not in NAMED:
        raise JobError(f"there is no tracker {name!r}; there are: {', '.join(NAMED)}{config.nearest(name, NAMED)}")
    return NAMED[name](where)


def require(given: Iterable[Tracker]) -> tuple[Tracker, ...]:
    """The trackers, each of which has the three calls of one.

    Raises:
        JobError: one has not; names it and what it lacks.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise JobError(f"trackers = {given!r}: a list of trackers is wanted, as in [fq.trackers.TensorBoard('runs')]")
    found = tuple(given)
    for each in found:
        if isinstance(each, type):
            raise JobError(f"tracker {each.__name__} is a class: give one of its objects, as in {each.__name__}(...)")
        lacks = [written for name, written in CALLS.items() if not callable(getattr(each, name, None))]
        if lacks:
            raise JobError(f"{each!r} is no tracker: it has no {' and no '.join(lacks)} (see fedquilt.trackers)")
    return found


class Follower:
    """Rows of a run's rounds as they are finished, read from its log with each call of `new`.

    A round whose accuracy comes with the next round's checks is finished with these.
    """

    def __init__(self, home: Path, id: str) -> None:
        self._home, self._id = home, id
        self._seen, self._told = 0, 0
        self._made: columns.Rounds | None = None

    def new(self, *, ended: bool) -> list[dict[str, Any]]:
        """The rows that are finished since the last call; with `ended` all that are left."""
        with Store(self._home, durable=False) as store:
            row = store.job(self._id)
            if self._made is None:
                self._made = columns.gathered((), row.job)
            for number, _, fact in store.facts(self._id, after=self._seen):
                self._seen = number
                self._made.add(fact)
            rows = self._made.scored(scores.read(self._home, row))
        checked_later = row.job.check.every and not row.job.check.beside
        ready = rows if ended or not checked_later else rows[:-1]
        new = ready[self._told :]
        self._told = max(self._told, len(ready))
        return new


class Audience:
    """The trackers of one run. What one raises is logged once, with its name, and neither the run nor others notice.

    A tracker whose `start` has failed hears nothing more; one whose `round` has failed hears the rounds that follow.
    """

    def __init__(self, heard_by: Sequence[Tracker]) -> None:
        self._all = tuple(heard_by)
        self._begun: list[Tracker] = []
        self._warned: set[int] = set()  # places in `_all`

    def start(self, job: fq.Job, run: str) -> None:
        """Tell all that the run begins."""
        for tracker in self._all:
            if self._told(tracker, "start", job, run):
                self._begun.append(tracker)

    def round(self, row: dict[str, Any]) -> None:
        """Tell those that have begun of a finished round."""
        for tracker in self._begun:
            self._told(tracker, "round", row)

    def end(self, run: fq.Run) -> None:
        """Tell those that have begun that the run is over, however it has ended."""
        for tracker in self._begun:
            self._told(tracker, "end", run)

    def _told(self, tracker: Tracker, call: str, *about: Any) -> bool:
        try:
            getattr(tracker, call)(*about)
        except Exception as error:
            place = next(number for number, each in enumerate(self._all) if each is tracker)
            if place not in self._warned:
                self._warned.add(place)
                log.warning("%s", _failed(tracker, call, error))
            return False
        return True


@contextmanager
def following(home: Path, id: str, told: Audience) -> Iterator[Callable[[bool], None]]:
    """Tell trackers of a run from its log, whoever runs it; at the end they hear that it is over for them.

    Yields a function that looks at the log again: it takes whether no more will come, so that what is left is told.
    """
    run, rows = fq.Run(home, id), Follower(home, id)

    def look(last: bool) -> None:
        for row in rows.new(ended=last):
            told.round(row)

    told.start(run.job, id)
    try:
        yield look
    finally:
        told.end(run)


def _failed(tracker: Tracker, call: str, error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    rest = "it is told nothing more of this run" if call == "start" else "further errors of it are not reported"
    return (
        f"tracker {type(tracker).__name__}: {call} failed with {type(error).__name__}: {error} "
        f"({frame.filename}, line {frame.lineno}); the run goes on, and {rest}"
    )
