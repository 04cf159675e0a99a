"""Data of a run's page, read from the coordinator's store."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.store import Row, Store
from fedquilt.coordinator.views import costs, progress, scores, why
from fedquilt.coordinator.views.costs import Account
from fedquilt.coordinator.views.progress import Dated, Point
from fedquilt.core import FedquiltError
from fedquilt.tools.report import front


@dataclass(frozen=True)
class Found:
    home: Path  # of the store
    row: Row
    facts: tuple[Dated, ...]
    account: Account
    points: tuple[Point, ...]
    splits: tuple[progress.Split, ...]
    parts: Mapping[int, Mapping[str, why.Part]]
    scores: tuple[scores.Score, ...]
    partition: str  # SVG; "": the data is not at hand
    candidates: front.Candidates = ()  # of a stitching job's result

    @property
    def evaluated_points(self) -> list[Point]:
        return [point for point in self.points if point.personal is not None]


def load_run_data(store: Store, run: str) -> Found:
    """Return the data of a run's page, by its id or the name of its job.

    Raises:
        StoreError: If the run does not exist or cannot be read.
    """
    row = store.find_job(run)
    facts = tuple((at, fact) for _, at, fact in store.read_events(row.id))
    plain = [fact for _, fact in facts]
    parts = why.outcomes_by_round(plain, Plan.from_job(row.job))
    return Found(
        store.home,
        row,
        facts,
        costs.compute_job_cost(plain),
        tuple(progress.progress_points(facts, row.job.rounds)),
        tuple(progress.split_round_times(facts)),
        parts,
        scores.read_scores(store.home, row).scores,
        _draw_partition(row, {device for devices in parts.values() for device in devices}),
        front.load_candidates(store, row.id),
    )


def _draw_partition(row: Row, devices: Set[str]) -> str:
    # only for simulated devices: the coordinator never sees the data of real devices
    if not row.job.data or not devices:
        return ""
    try:
        from fedquilt.tools.report.partition import count_examples, draw_counts

        for count in (len(devices), row.job.fleet.devices):  # all were heard of; or some never came
            counts = count_examples(row.job, count)
            if devices <= set(counts.devices):
                return draw_counts(counts)
    except (FedquiltError, ModuleNotFoundError):
        pass
    return ""
