"""All that a run's page shows, read from the coordinator's store."""

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
    """One run as its page shows it."""

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
    def checks(self) -> list[Point]:
        """Points that have an evaluation."""
        return [point for point in self.points if point.personal is not None]


def gather(store: Store, run: str) -> Found:
    """Collect what a page shows of a run, by its id or its job's name.

    Raises:
        StoreError: there is no such run, or it cannot be read.
    """
    row = store.job(run)
    facts = tuple((at, fact) for _, at, fact in store.facts(row.id))
    plain = [fact for _, fact in facts]
    parts = why.parts(plain, Plan.of(row.job))
    return Found(
        store.home,
        row,
        facts,
        costs.account(plain),
        tuple(progress.points(facts, row.job.rounds)),
        tuple(progress.splits(facts)),
        parts,
        scores.read(store.home, row).scores,
        _partition(row, {device for devices in parts.values() for device in devices}),
        front.candidates(store, row.id),
    )


def _partition(row: Row, devices: Set[str]) -> str:
    """The picture of who has what, if these are the job's simulated devices and the data can be read here.

    Boards of one's own have data of their own, which a coordinator never sees.
    """
    if not row.job.data or not devices:
        return ""
    try:
        from fedquilt.tools.report.partition import of_job, svg

        for count in (len(devices), row.job.fleet.devices):  # all were heard of; or some never came
            counts = of_job(row.job, count)
            if devices <= set(counts.devices):
                return svg(counts)
    except (FedquiltError, ModuleNotFoundError):
        pass
    return ""
