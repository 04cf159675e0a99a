"""Data of a run's page, read from the coordinator's store."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from fedquilt.coordinator.rounds.events import AnyEvent, JobConstants
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.views import round_outcomes
from fedquilt.coordinator.views.run_summary import ProgressPoint, RunSummary, progress_points
from fedquilt.coordinator.views.scores import EvaluationScore, HeldOutScore, read_scores
from fedquilt.core import FedquiltError
from fedquilt.tools.report import candidate_costs

Dated = tuple[float, AnyEvent]  # wall-clock seconds, and the event


@dataclass(frozen=True)
class RunData:
    home: Path  # of the store
    row: StoredJob
    facts: tuple[Dated, ...]
    summary: RunSummary
    points: tuple[ProgressPoint, ...]
    parts: Mapping[int, Mapping[str, round_outcomes.DeviceOutcome]]
    scores: tuple[EvaluationScore, ...]
    held: tuple[HeldOutScore, ...]  # of evaluations in the rounds and outside of them
    partition: str  # SVG; "": the data is not at hand
    candidates: candidate_costs.Candidates = ()  # of a stitching job's result


def load_run_data(store: Store, run: str) -> RunData:
    """Return the data of a run's page, by its id or the name of its job."""
    row = store.find_job(run)
    facts = tuple((at, fact) for _, at, fact in store.read_events(row.id))
    told = round_outcomes.RoundOutcomes(JobConstants.from_job(row.job))
    for at, fact in facts:
        told.apply_event(fact, at)
    parts, summary = told.found, told.summary
    points, found = tuple(progress_points(summary)), read_scores(store.home, row)
    held = [HeldOutScore.from_summary(point.rounds, point.personal) for point in points if point.personal]
    return RunData(
        store.home,
        row,
        facts,
        summary,
        points,
        parts,
        found.scores,
        tuple({score.rounds: score for score in sorted((*held, *found.held), key=lambda score: score.rounds)}.values()),
        _draw_partition(row, {device for devices in parts.values() for device in devices}),
        candidate_costs.load_candidates(store, row.id),
    )


def _draw_partition(row: StoredJob, devices: Set[str]) -> str:
    # only for simulated devices: the coordinator never sees the data of real devices
    if not row.job.data or not devices:
        return ""
    try:
        from fedquilt.tools.report.partition import count_examples, draw_counts
        from fedquilt.tools.report.plots import render_picture

        for count in (len(devices), row.job.fleet.devices):  # all were heard of; or some never came
            counts = count_examples(row.job, count)
            if devices <= set(counts.devices):
                return render_picture(draw_counts(counts))
    except (FedquiltError, ModuleNotFoundError):
        pass
    return ""
