"""`fedquilt.compare`: several jobs over the same seeds, with the runs of `fedquilt compare`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt import extras, metrics
from fedquilt.api import live
from fedquilt.api.job import Job
from fedquilt.api.simulation import digest
from fedquilt.api.table import Table
from fedquilt.core import JobError
from fedquilt.tools.experiments import compare as runs
from fedquilt.tools.experiments import tables
from fedquilt.tools.experiments.intervals import interval
from fedquilt.tools.experiments.single_run import Mark, Run, play
from fedquilt.trackers import flat

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """Runs of several jobs with the same seeds, by job."""

    jobs: tuple[Job, ...]
    runs: tuple[tuple[Run, ...], ...]  # of each job, in the order of seeds; without those that failed
    failed: tuple[str, ...]  # a sentence for each run that failed

    @property
    def names(self) -> list[str]:
        """Label of each job: its method, or where methods are equal the settings that differ."""
        written = [flat(job.table()) for job in self.jobs]
        methods = [job.method for job in self.jobs]
        if len(set(methods)) == len(methods):
            return methods
        differs = {key for each in written for key in each if len({repr(other.get(key)) for other in written}) > 1}
        names = []
        for table, method in zip(written, methods, strict=True):
            parts = [f"{key}={table[key]}" for key in sorted(differs - {"method"}) if key in table]
            names.append(" ".join([method, *parts]))
        return names

    def table(self, target: float | None = None) -> Table:
        """One row per job: means over its seeds.

        Columns: job, seeds, accuracy (0..1, after the last round: on the test set, or on held-out shares if there is
        none), sd, best, held_accuracy, worst_decile; difference (in accuracy, to the first job at the same seeds) with
        low and high, its 95 % interval by Student's t; rounds, bytes, joules, seconds, real_seconds: totals of the
        runs, or with a target up to the first evaluation that reached it, and reached, the number of seeds that did.

        Args:
            target: accuracy, 0..1, or a value of the task's main metric.
        """
        rows = []
        for name, of in zip(self.names, self.runs, strict=True):
            made = [run for run in of if run.marks]
            row = tables.row(name, made, target)
            costs = row["in_all"] if target is None else row["to_target"]
            rows.append(
                {
                    "job": name,
                    "seeds": len(made),
                    "accuracy": row["accuracy"],
                    "sd": row["sd"],
                    "best": row["best"],
                    "held_accuracy": row["held"],
                    "worst_decile": row["worst_decile"],
                    **self._difference(made),
                    **({} if target is None else {"reached": row["reached"]}),
                    "rounds": costs["rounds"],
                    "bytes": costs["bytes"],
                    "joules": costs["energy_j"],
                    "seconds": costs["seconds"],
                    "real_seconds": costs["real_s"],
                }
            )
        return Table(metrics.titled(self._metric, {key: [row[key] for row in rows] for key in rows[0]}))

    @property
    def _metric(self) -> metrics.Metric:
        return tables.metric_of([run for of in self.runs for run in of])

    def curves(self) -> Table:
        """One row per evaluation: job, seed, rounds, accuracy, held_accuracy, worst_decile, and costs up to it."""
        found = [
            {"job": name, "seed": run.seed, **_columns(mark)}
            for name, of in zip(self.names, self.runs, strict=True)
            for run in of
            for mark in run.marks
        ]
        keys = list(found[0]) if found else ["job", "seed"]
        return Table(metrics.titled(self._metric, {key: [row[key] for row in found] for key in keys}))

    def to_pandas(self) -> pd.DataFrame:
        """`curves` as a pandas data frame.

        Raises:
            JobError: pandas is not installed.
        """
        return self.curves().to_pandas()

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *(f"failed: {each}" for each in self.failed)])

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _difference(self, made: Sequence[Run]) -> dict[str, float | None]:
        """Final accuracy less that of the first job with the same seed; of one seed there is no interval."""
        first = {run.seed: _last(run) for run in self.runs[0]}
        pairs = [(_last(run), first.get(run.seed)) for run in made]
        values = [own - other for own, other in pairs if own is not None and other is not None]
        if not values or made == list(self.runs[0]):
            return {"difference": None, "low": None, "high": None}
        low, high = interval(values) if len(values) > 1 else (None, None)
        return {"difference": sum(values) / len(values), "low": low, "high": high}


@extras.named()
def compare(
    jobs: Sequence[Job],
    *,
    seeds: Iterable[int] = (0, 1, 2),
    out: str | Path = "fedquilt-compare",
    workers: int | None = None,
    engine: str = "auto",
    mixed: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Run each job with each seed on its simulated fleet; finished runs are kept and are not repeated.

    A seed draws the partition, the cohorts and the order of examples, the same for every job. Devices of a small
    network are trained in one graph, so states equal those of `simulate` to float tolerance, not to the bit.

    Args:
        jobs: each with a fleet and data of its own.
        seeds: each job runs once with each of them.
        out: folder of finished runs and bundles, the same as of `fedquilt compare`.
        workers: how many; None: one for each core, of this machine or of the Ray cluster.
        engine: as of `simulate`.
        mixed: as of `simulate`.
        progress: None: a line on a terminal or in a notebook; True: a line in any case; False: nothing.

    Raises:
        JobError: no jobs or seeds, or a key is wrong. What a run raises is in `Comparison.failed`.
        DataError, ModelError, StoreError: as `simulate`.
    """
    chosen = sorted(set(seeds)) if isinstance(seeds, Iterable) else []
    if isinstance(jobs, Job | str) or not jobs or not chosen or not all(isinstance(each, Job) for each in jobs):
        raise JobError("compare takes a list of jobs and seeds, as in fq.compare([job, other], seeds=range(3))")
    todo = {index: _cases(job, Path(out), chosen) for index, job in enumerate(jobs)}
    order = [todo[index][place] for place in range(len(chosen)) for index in todo]  # seed by seed: whole rows first
    with contextlib.closing(live.display(progress)) as shown:

        def player(case: runs.Case, tell: runs.Tell) -> Run:
            return play(case.settings, Path(case.folder), tell, workers, engine=engine, mixed=mixed)

        found, failed = runs.finished(order, Path(out), player, shown.show, shown.show)
    return Comparison(
        tuple(jobs),
        tuple(tuple(found[case] for case in todo[index] if case in found) for index in todo),
        tuple(failed),
    )


def _cases(job: Job, out: Path, seeds: Sequence[int]) -> list[runs.Case]:
    from fedquilt.tools.artefacts import prepare

    wanted = job.settings
    folder = out / "bundles" / digest(wanted)
    prepare.prepare_and_check(wanted, folder)
    return runs.cases(wanted, folder, [job.method], seeds)


def _last(run: Run) -> float | None:
    return run.marks[-1].value if run.marks else None


def _columns(mark: Mark) -> dict[str, Any]:
    return {
        "rounds": mark.rounds,
        "accuracy": mark.value,
        "held_accuracy": mark.held,
        "worst_decile": mark.worst_decile,
        "seconds": mark.seconds,
        "real_seconds": mark.real_s,
        "down_bytes": mark.down_bytes,
        "up_bytes": mark.up_bytes,
        "joules": mark.energy_j,
    }
