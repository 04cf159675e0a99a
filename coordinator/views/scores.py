"""What is known of a run's global model on examples that no device has: HOME/evaluations/RUN.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Row
from fedquilt.core import JobError, StoreError


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The global model after so many rounds, on the test set."""

    rounds: int
    accuracy: float  # 0..1
    examples: int
    loss: float | None = None  # None: the method does not tell
    state: str = ""  # sha256


class Scores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is known of a run, and on what."""

    test: dict[str, Any]  # the test set as a [data] table
    scores: tuple[Score, ...] = ()


def test_table(job: Job) -> dict[str, Any]:
    """The test set as a [data] table: [test] over [data], split "test"; a [test] that says where from stands alone.

    Raises:
        JobError: the job has neither.
    """
    if not job.data and not job.test:
        raise JobError(f"job {job.name!r} has neither [test] nor [data]: there is nothing to test on")
    alone = {"path", "sources", "synthetic"} & job.test.keys()
    odd = [] if alone else sorted({"x", "y"} & job.data.keys() - job.test.keys())
    if odd:
        raise JobError(f"[data] names the array {odd[0]} = {job.data[odd[0]]!r}, of any split: name that of [test] too")
    found = {**({} if alone else job.data), "split": "test", **job.test}
    if found.get("synthetic"):
        found.setdefault("seed", job.seed)  # the devices' points are drawn by it too
    return {key: value for key, value in found.items() if key not in ("share", "shares", "held")}


def file(home: Path, run: str) -> Path:
    """Where a run's scores lie."""
    return home / "evaluations" / f"{run}.json"


def read(home: Path, row: Row) -> Scores:
    """What has been found of a run on the test set that its job names; nothing: no scores."""
    nothing = Scores({} if not (row.job.data or row.job.test) else test_table(row.job))
    try:
        found = msgspec.json.decode(file(home, row.id).read_bytes(), type=Scores)
    except (FileNotFoundError, msgspec.DecodeError):
        return nothing
    return found if found.test == nothing.test else nothing


def write(path: Path, found: Scores) -> None:
    """Write what has been found, whole or not at all.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        os.replace(part, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
