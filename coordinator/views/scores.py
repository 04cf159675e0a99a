"""Evaluations of a run's global model, in HOME/evaluations/RUN.json."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import metrics
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import StoredJob
from fedquilt.coordinator.views.run_summary import PersonalScores, RunSummary, progress_points
from fedquilt.core import DataError, EvaluationSums, JobError
from fedquilt.data import spec
from fedquilt.formats import checksummed_json
from fedquilt.host.disk import PRIVATE, disk_errors

log = logging.getLogger("fedquilt.coordinator")


class EvaluationScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rounds: int
    value: float  # of `metric`; accuracy runs from 0 to 1
    examples: int
    loss: float | None = None  # None if the method reports no loss
    state: str = ""  # sha256
    metric: str = "accuracy"  # main metric of the task: a key of `fedquilt.metrics.METRICS`
    evaluation: EvaluationSums | None = None  # None for stitched networks


class HeldOutScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rounds: int
    weighted: float  # mean over all held-out examples
    mean: float  # mean over devices
    worst_decile: float  # mean of the lowest tenth of the devices, at least one
    gap: float  # between the means of the best and the worst tenth of the devices
    deviation: float  # standard deviation over devices
    count: int  # number of devices
    loss: float  # mean over all held-out examples
    metric: str = "accuracy"  # key of `fedquilt.metrics.METRICS`
    with_priors: float | None = None  # mean over all held-out examples, with class priors

    @staticmethod
    def from_summary(rounds: int, scores: PersonalScores) -> HeldOutScore:
        spread = scores.worst_decile, scores.gap, scores.deviation, scores.count
        return HeldOutScore(
            rounds, scores.weighted, scores.mean, *spread, scores.loss, scores.metric, scores.with_priors
        )


class RunScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    test: dict[str, Any]  # the test set as a [data] table
    scores: tuple[EvaluationScore, ...] = ()
    held: tuple[HeldOutScore, ...] = ()
    devices: dict[str, float] = {}  # device -> accuracy on held-out examples, in the latest entry of `held`


def class_names(job: JobSettings, count: int) -> tuple[str, ...]:
    names = tuple(map(str, job.labels or job.data.get("labels") or ()))
    return names if len(names) == count else tuple(map(str, range(count)))


def make_test_table(job: JobSettings) -> dict[str, Any]:
    """Return the [test] table with missing keys from [data]. Raise JobError without both tables."""
    if not job.data and not job.test:
        raise JobError(f"job {job.name!r} has neither [test] nor [data]: add [test] to evaluate its model")
    is_independent = {"path", "sources"} & job.test.keys() or job.test.get("dataset") in spec.SYNTHETIC
    arrays = _has_arrays_of_one_split(job.data)
    reading_keys = () if "path" not in job.test else spec.HOW if arrays else (*spec.HOW, "x", "y")
    unknown_arrays = [] if is_independent or not arrays else sorted({"x", "y"} & job.data.keys() - job.test.keys())
    if unknown_arrays:
        raise JobError(
            f"[test] {unknown_arrays[0]} is missing: [data] sets {unknown_arrays[0]} = "
            f"{job.data[unknown_arrays[0]]!r} for its own split, so set the array of [test] too"
        )
    shared = {key: value for key, value in job.data.items() if not is_independent or key in reading_keys}
    is_single_table = str(job.test.get("path", "")).endswith(spec.TABLES)  # all its rows belong to one split
    table = {**shared, "split": "train" if is_single_table else "test", **job.test}
    if table.get("dataset") in spec.SYNTHETIC:
        table.setdefault("seed", job.seed)  # devices draw their points with the same seed
    return {key: value for key, value in table.items() if key not in ("share", "shares", "held")}


@contextlib.contextmanager
def name_test_table() -> Iterator[None]:
    """Name [test] instead of [data] in data errors of the body, which reads the test set."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("[data", "[test")) from None


def _has_arrays_of_one_split(data: dict[str, Any]) -> bool:
    if data.get("format", "auto") != "auto":
        return data["format"] == "npz"
    path = str(data.get("path", ""))
    return not (path.endswith(spec.TABLES) or "audio" in data or "text" in data or not Path(path).suffix)


def scores_path(home: Path, run: str) -> Path:
    return home / "evaluations" / f"{run}.json"


def read_scores(home: Path, row: StoredJob) -> RunScores:
    """Return the stored scores, or empty scores if they are missing, damaged or of another test set."""
    try:
        empty_scores = RunScores(make_test_table(row.job) if row.job.data or row.job.test else {})
    except JobError:  # no default test split
        empty_scores = RunScores({})
    try:
        stored = checksummed_json.decode_with_checksum(scores_path(home, row.id).read_bytes(), RunScores)
    except FileNotFoundError:
        return empty_scores
    except checksummed_json.DamagedFileError as error:
        fix = f"write it again with `fedquilt model evaluate {row.id}`"
        log.warning("%s is damaged (%s): %s", scores_path(home, row.id), error, fix)
        return empty_scores
    return stored if stored.test == empty_scores.test else empty_scores


def list_held_out_scores(summary: RunSummary, stored: RunScores) -> list[HeldOutScore]:
    points = progress_points(summary)
    in_rounds = [HeldOutScore.from_summary(point.rounds, point.personal) for point in points if point.personal]
    by_rounds = {score.rounds: score for score in (*in_rounds, *stored.held)}
    return [by_rounds[rounds] for rounds in sorted(by_rounds)]


def describe_results(summary: RunSummary, stored: RunScores) -> dict[str, str]:
    """Return the latest values of a trained model under "held_out" and "test"."""
    results = {}
    if held_out := [score for score in list_held_out_scores(summary, stored) if score.rounds]:
        results["held_out"] = _describe_value(held_out[-1].metric, held_out[-1].weighted)
    if stored.scores:
        results["test"] = _describe_value(stored.scores[-1].metric, stored.scores[-1].value)
    return results


def _describe_value(name: str, value: float) -> str:
    metric = metrics.METRICS[name]
    return f"{metric.title} {metrics.format_value(metric, value, 1)}"


def write_scores(path: Path, scores: RunScores) -> None:
    with disk_errors(f"write {path}"):
        PRIVATE.make_folder(path.parent)
        PRIVATE.write_atomically(path, checksummed_json.encode_with_checksum(scores), durable=False)
