"""Comparison of several jobs with the same seeds (`fedquilt.compare`)."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt import extras, metrics
from fedquilt.api.job import Job
from fedquilt.api.run import Table
from fedquilt.api.simulation import bundle_folder_name, make_display
from fedquilt.core import JobError
from fedquilt.tools.experiments import comparison as runs
from fedquilt.tools.experiments import tables
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun, run_seed
from fedquilt.tools.experiments.tables import confidence_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Comparison:
    """Runs of several jobs with the same seeds.

    Attributes:
        jobs: The compared jobs.
        runs: Completed runs of each job, in the order of seeds.
        failed: A sentence for each failed run.
        note: Which scores are compared and why, if not those on the test set alone.
    """

    jobs: tuple[Job, ...]
    runs: tuple[tuple[SeedRun, ...], ...]
    failed: tuple[str, ...]
    note: str = ""

    @property
    def labels(self) -> list[str]:
        """Label of each job: the method, with the settings that differ if methods are repeated."""
        written = [_flatten_table(job.to_table()) for job in self.jobs]
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
        """Return a table with one row per job, with means over the seeds.

        Columns: job, seeds, accuracy (0..1 after the last round), sd, best, held_accuracy, worst_decile, difference
        (in accuracy, to the first job at the same seeds) with low and high (95 % interval by Student's t), rounds,
        bytes, joules, seconds and real_seconds. With a target, these last five are totals up to the first evaluation
        that reached the target, and reached is the number of such seeds. Accuracy is on held-out shares without a test
        set, or if the networks of a method differ by device.

        Args:
            target: Accuracy from 0 to 1, or value of the task's main metric. Without a target, totals cover whole runs.

        Returns:
            The table, with the main metric's name in place of "accuracy".

        Raises:
            JobError: If `target` is not a finite number.
        """
        if target is not None and not (isinstance(target, numbers.Real) and math.isfinite(target)):
            raise JobError(f"target = {target!r}: wanted a number, as in table(target=0.9)")
        rows = []
        for name, of in zip(self.labels, self.runs, strict=True):
            made = [run for run in of if run.marks]
            row = tables.make_row(name, made, target)
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
                    **self._difference_to_first(made),
                    **({} if target is None else {"reached": row["reached"]}),
                    "rounds": costs["rounds"],
                    "bytes": costs["bytes"],
                    "joules": costs["energy_j"],
                    "seconds": costs["seconds"],
                    "real_seconds": costs["real_s"],
                }
            )
        return Table(metrics.rename_columns(self._main_metric, {key: [row[key] for row in rows] for key in rows[0]}))

    @property
    def _main_metric(self) -> metrics.Metric:
        return tables.find_main_metric([run for of in self.runs for run in of])

    def curves(self) -> Table:
        """Return one row per evaluation: job, seed, rounds, metrics and cumulative costs.

        Metrics are accuracy (or the main metric), held_accuracy and worst_decile. Unknown values are None.
        """
        found = [
            {"job": name, "seed": run.seed, **_mark_columns(mark)}
            for name, of in zip(self.labels, self.runs, strict=True)
            for run in of
            for mark in run.marks
        ]
        keys = list(found[0]) if found else ["job", "seed"]
        return Table(metrics.rename_columns(self._main_metric, {key: [row[key] for row in found] for key in keys}))

    @extras.report_missing_extras()
    def plot(self, x: str = "rounds", axes: Any = None) -> Axes:
        """Draw the mean accuracy of each job over a cost, with a band of one standard deviation over the seeds.

        Args:
            x: "rounds", "seconds", "real_seconds", "bytes" or "joules".
            axes: Axes of matplotlib, or None for those of a new figure.

        Returns:
            The axes.

        Raises:
            JobError: If matplotlib is not installed, no run has been evaluated, or `x` is unknown.
        """
        from fedquilt.tools.report import plots

        runs = {label: of for label, of in zip(self.labels, self.runs, strict=True) if of}
        return plots.draw_on_axes(plots.choose_plot(tables.make_cost_plots(runs), x), axes)

    def to_pandas(self) -> pd.DataFrame:
        """Convert `curves` to a pandas data frame.

        Raises:
            JobError: If pandas is not installed.
        """
        return self.curves().to_pandas()

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *filter(None, [self.note]), *(f"failed: {each}" for each in self.failed)])

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _difference_to_first(self, made: Sequence[SeedRun]) -> dict[str, float | None]:
        # The difference to the first job at the same seeds. One seed has no interval.
        first = {run.seed: _final_value(run) for run in self.runs[0]}
        pairs = [(_final_value(run), first.get(run.seed)) for run in made]
        values = [own - other for own, other in pairs if own is not None and other is not None]
        if not values or made == list(self.runs[0]):
            return {"difference": None, "low": None, "high": None}
        low, high = confidence_interval(values) if len(values) > 1 else (None, None)
        return {"difference": sum(values) / len(values), "low": low, "high": high}


@extras.report_missing_extras()
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
    """Run each job with each seed on its simulated fleet.

    Completed runs are stored in `out` and not repeated. A seed determines the partition, the cohorts and the order of
    examples, equally for every job. Devices of a small network are trained in one graph, so states equal those of
    `simulate` to float tolerance, not bit for bit.

    Args:
        jobs: Jobs with a fleet and data.
        seeds: Seeds of the runs of each job.
        out: Folder of completed runs and bundles, shared with `fedquilt compare`.
        workers: Number of workers, or None for one per core of this machine or of the Ray cluster.
        engine: Engine, as in `simulate`.
        mixed: Whether machines may differ, as in `simulate`.
        progress: True to show progress lines, False to show none, or None to show them on terminals and in notebooks.

    Returns:
        The comparison. Errors of runs are in `Comparison.failed`.

    Raises:
        JobError: If there are no jobs or seeds, a job is repeated, or a key is wrong.
        DataError: If the data cannot be read, or do not fit the network.
        ModelError: If the network cannot be loaded or trained.
        StoreError: If `out` cannot be written.
    """
    chosen = sorted(set(seeds)) if isinstance(seeds, Iterable) else []
    if isinstance(jobs, Job | str) or not jobs or not chosen or not all(isinstance(each, Job) for each in jobs):
        raise JobError("compare takes a list of jobs and seeds, as in fq.compare([job, other], seeds=range(3))")
    first = next((job for place, job in enumerate(jobs) if job in jobs[:place]), None)
    if first is not None:
        raise JobError(f"the same job ({first.method}) is in the list twice: leave one of them out")
    todo = {index: _prepare_cases(job, Path(out), chosen) for index, job in enumerate(jobs)}
    order = [todo[index][place] for place in range(len(chosen)) for index in todo]  # seed by seed: whole rows first
    with contextlib.closing(make_display(progress)) as shown:

        def play_case(case: runs.ComparisonCase, tell: runs.ReportRound) -> SeedRun:
            return run_seed(case.settings, Path(case.folder), tell, workers, engine=engine, mixed=mixed)

        found, failed = runs.run_cases(order, Path(out), play_case, shown.show, shown.show)
    selected, note = runs.select_scores(list(found.values()))
    found = dict(zip(found, selected, strict=True))
    done = tuple(tuple(found[case] for case in todo[index] if case in found) for index in todo)
    return Comparison(tuple(jobs), done, tuple(failed), note)


def _prepare_cases(job: Job, out: Path, seeds: Sequence[int]) -> list[runs.ComparisonCase]:
    from fedquilt.tools.artefacts import prepare

    wanted = job.settings
    folder = out / "bundles" / bundle_folder_name(wanted)
    prepare.prepare_and_check(wanted, folder)
    return runs.make_cases(wanted, folder, [job.method], seeds)


def _final_value(run: SeedRun) -> float | None:
    return run.marks[-1].value if run.marks else None


def _mark_columns(mark: EvaluationPoint) -> dict[str, Any]:
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


def _flatten_table(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flatten_table(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found
