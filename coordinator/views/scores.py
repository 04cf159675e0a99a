"""Evaluations of a run's global model on examples that no device has: HOME/evaluations/RUN.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import checked
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Row
from fedquilt.coordinator.views.progress import Personal
from fedquilt.core import EvaluationSums, JobError
from fedquilt.data import spec
from fedquilt.disk import PRIVATE, doing

log = logging.getLogger("fedquilt.coordinator")


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of the global model after some rounds, on the test set."""

    rounds: int
    value: float  # of `metric`; accuracy runs from 0 to 1
    examples: int
    loss: float | None = None  # None: the method does not report it
    state: str = ""  # sha256
    metric: str = "accuracy"  # main metric of the task: a key of `fedquilt.metrics.KNOWN`
    evaluation: EvaluationSums | None = None  # None: of a stitched network, whose accuracy alone is known


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of the global model after some rounds, on all devices' held-out shares: values of `metric`."""

    rounds: int
    weighted: float  # over all held-out examples
    mean: float  # over devices, however many examples each has
    worst_decile: float  # mean of the tenth of the devices, at least one, for which it is lowest
    loss: float | None = None  # over all held-out examples; None: the method does not report it
    metric: str = "accuracy"  # as of `Score`
    deviation: float | None = None  # standard deviation over devices

    @staticmethod
    def of(rounds: int, found: Personal) -> Held:
        """Result from the summary of the devices' values."""
        own = found.weighted, found.mean, found.worst_decile, found.loss, found.metric, found.deviation
        return Held(rounds, *own)


class Scores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All evaluations of a run made beside its rounds, with their test set."""

    test: dict[str, Any]  # the test set as a [data] table
    scores: tuple[Score, ...] = ()
    held: tuple[Held, ...] = ()
    devices: dict[str, float] = {}  # device -> accuracy on its held-out share, of the last of `held`


def test_table(job: Job) -> dict[str, Any]:
    """The test set as a [data] table: [test] over [data], split "test".

    A [test] with a path of its own stands alone, except for keys of [data] on how files are read (`spec.HOW`).

    Raises:
        JobError: the job has neither.
    """
    if not job.data and not job.test:
        raise JobError(f"job {job.name!r} has neither [test] nor [data]: there is nothing to test on")
    alone = {"path", "sources", "synthetic"} & job.test.keys()
    arrays = _holds_arrays(job.data)
    how = () if "path" not in job.test else spec.HOW if arrays else (*spec.HOW, "x", "y")
    odd = [] if alone or not arrays else sorted({"x", "y"} & job.data.keys() - job.test.keys())
    if odd:
        raise JobError(f"[data] names the array {odd[0]} = {job.data[odd[0]]!r}, of any split: name that of [test] too")
    shared = {key: value for key, value in job.data.items() if not alone or key in how}
    one_table = str(job.test.get("path", "")).endswith(spec.TABLES)  # all its rows belong to one split
    found = {**shared, "split": "train" if one_table else "test", **job.test}
    if found.get("synthetic"):
        found.setdefault("seed", job.seed)  # the devices' points are drawn by it too
    return {key: value for key, value in found.items() if key not in ("share", "shares", "held")}


def _holds_arrays(data: dict[str, Any]) -> bool:
    """Whether x and y of a [data] table name arrays of one split, not columns that every split has."""
    if data.get("format", "auto") != "auto":
        return data["format"] == "npz"
    path = str(data.get("path", ""))
    return not (path.endswith(spec.TABLES) or "audio" in data or "text" in data or not Path(path).suffix)


def file(home: Path, run: str) -> Path:
    """Path of a run's scores."""
    return home / "evaluations" / f"{run}.json"


def read(home: Path, row: Row) -> Scores:
    """Scores of a run on the test set that its job names; without any: no scores."""
    nothing = Scores({} if not (row.job.data or row.job.test) else test_table(row.job))
    try:
        found = checked.decode(file(home, row.id).read_bytes(), Scores)
    except FileNotFoundError:
        return nothing
    except checked.DamagedFileError as error:
        log.warning("%s is damaged (%s): `fedquilt evaluate %s` makes it anew", file(home, row.id), error, row.id)
        return nothing
    return found if found.test == nothing.test else nothing


def write(path: Path, found: Scores) -> None:
    """Write scores, whole or not at all.

    Raises:
        StoreError: the file cannot be written.
    """
    with doing(f"write {path}"):
        PRIVATE.make(path.parent)
        PRIVATE.put(path, checked.encode(found), durable=False)
