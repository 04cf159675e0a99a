"""Runs of several jobs with the same seeds, and their comparison (`fedquilt.compare`)."""

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
        note: A sentence on which scores are compared, and why, or "" if all are on the test set.
    """

    jobs: tuple[Job, ...]
    runs: tuple[tuple[SeedRun, ...], ...]
    failed: tuple[str, ...]
    note: str = ""

    @property
    def labels(self) -> list[str]:
        """Labels of the jobs: the method, and for a repeated method also the settings that differ."""
        flat_tables = [_flatten_table(job.to_table()) for job in self.jobs]
        methods = [job.method for job in self.jobs]
        if len(set(methods)) == len(methods):
            return methods
        differing_keys = {
            key
            for flat_table in flat_tables
            for key in flat_table
            if len({repr(other.get(key)) for other in flat_tables}) > 1
        }
        names = []
        for table, method in zip(flat_tables, methods, strict=True):
            parts = [f"{key}={table[key]}" for key in sorted(differing_keys - {"method"}) if key in table]
            names.append(" ".join([method, *parts]))
        return names

    def table(self, target: float | None = None) -> Table:
        """Return a table with one row per job, with means over the seeds.

        Columns: job, seeds, accuracy (0..1, last round) with sd, best, held_accuracy, worst_decile, difference
        (in accuracy, to the first job at the same seeds) with low and high (95 % interval by Student's t), rounds,
        bytes, joules, seconds and real_seconds. With a target, these last five are totals up to the first evaluation
        that reached the target, and reached is the number of such seeds. Accuracy is on held-out shares if there is no
        test set, or if the networks of a method differ by device.

        Args:
            target: Accuracy from 0 to 1, or value of the task's main metric. Without a target, totals cover whole runs.

        Returns:
            The table, with the main metric's name in place of "accuracy".

        Raises:
            JobError: If `target` is not a finite number.
        """
        if target is not None and not (isinstance(target, numbers.Real) and math.isfinite(target)):
            raise JobError(f"target = {target!r} is not a finite number: give one, as in table(target=0.9)")
        rows = []
        for name, job_runs in zip(self.labels, self.runs, strict=True):
            evaluated_runs = [run for run in job_runs if run.marks]
            row = tables.make_row(name, evaluated_runs, target)
            costs = row["in_all"] if target is None else row["to_target"]
            rows.append(
                {
                    "job": name,
                    "seeds": len(evaluated_runs),
                    "accuracy": row["accuracy"],
                    "sd": row["sd"],
                    "best": row["best"],
                    "held_accuracy": row["held"],
                    "worst_decile": row["worst_decile"],
                    **self._difference_to_first(evaluated_runs),
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
        return tables.find_main_metric([run for job_runs in self.runs for run in job_runs])

    def curves(self) -> Table:
        """Return one row per evaluation: job, seed, rounds, metrics and cumulative costs.

        Metrics are accuracy (or the main metric), held_accuracy and worst_decile. Unknown values are None.
        """
        rows = [
            {"job": name, "seed": run.seed, **_evaluation_columns(evaluation)}
            for name, job_runs in zip(self.labels, self.runs, strict=True)
            for run in job_runs
            for evaluation in run.marks
        ]
        keys = list(rows[0]) if rows else ["job", "seed"]
        return Table(metrics.rename_columns(self._main_metric, {key: [row[key] for row in rows] for key in keys}))

    @extras.report_missing_extras()
    def plot(self, x: str = "rounds", axes: Any = None) -> Axes:
        """Draw the mean accuracy of each job against a cost, with a band of one standard deviation.

        The mean and the deviation are over the seeds.

        Args:
            x: "rounds", "seconds", "real_seconds", "bytes" or "joules".
            axes: Axes of matplotlib, or None for those of a new figure.

        Returns:
            The axes.

        Raises:
            JobError: If matplotlib is not installed, no run has evaluations, or `x` is unknown.
        """
        from fedquilt.tools.report import plots

        runs = {label: job_runs for label, job_runs in zip(self.labels, self.runs, strict=True) if job_runs}
        return plots.draw_on_axes(plots.choose_plot(tables.make_cost_plots(runs), x), axes)

    def to_pandas(self) -> pd.DataFrame:
        """Return `curves` as a pandas data frame.

        Raises:
            JobError: If pandas is not installed.
        """
        return self.curves().to_pandas()

    def __repr__(self) -> str:
        return "\n".join(
            [repr(self.table()), *filter(None, [self.note]), *(f"failed: {failure}" for failure in self.failed)]
        )

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _difference_to_first(self, runs: Sequence[SeedRun]) -> dict[str, float | None]:
        baselines = {run.seed: _final_value(run) for run in self.runs[0]}
        pairs = [(_final_value(run), baselines.get(run.seed)) for run in runs]
        values = [value - baseline for value, baseline in pairs if value is not None and baseline is not None]
        if not values or runs == list(self.runs[0]):
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
    examples, in the same way for every job. Small networks of many devices are trained together, so states equal those
    of `simulate` to float tolerance, not bit for bit.

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
    sorted_seeds = sorted(set(seeds)) if isinstance(seeds, Iterable) else []
    if isinstance(jobs, Job | str) or not jobs or not sorted_seeds or not all(isinstance(job, Job) for job in jobs):
        raise JobError("compare takes a list of jobs and seeds, as in fq.compare([job, other], seeds=range(3))")
    repeated_job = next((job for position, job in enumerate(jobs) if job in jobs[:position]), None)
    if repeated_job is not None:
        raise JobError(f"the same job ({repeated_job.method}) is in the list twice: leave one of them out")
    cases_by_job = {index: _prepare_cases(job, Path(out), sorted_seeds) for index, job in enumerate(jobs)}
    # All jobs with the first seed, then all with the second, so that a stopped comparison has complete seeds.
    cases = [cases_by_job[index][position] for position in range(len(sorted_seeds)) for index in cases_by_job]
    with contextlib.closing(make_display(progress)) as display:

        def play_case(case: runs.ComparisonCase, report: runs.ReportRound) -> SeedRun:
            return run_seed(case.settings, Path(case.folder), report, workers, engine=engine, mixed=mixed)

        completed, failed = runs.run_cases(cases, Path(out), play_case, display.show, display.show)
    selected, note = runs.select_scores(list(completed.values()))
    completed = dict(zip(completed, selected, strict=True))
    runs_by_job = tuple(
        tuple(completed[case] for case in cases_by_job[index] if case in completed) for index in cases_by_job
    )
    return Comparison(tuple(jobs), runs_by_job, tuple(failed), note)


def _prepare_cases(job: Job, out: Path, seeds: Sequence[int]) -> list[runs.ComparisonCase]:
    from fedquilt.tools.artefacts import prepare

    settings = job.settings
    folder = out / "bundles" / bundle_folder_name(settings)
    prepare.prepare_and_check(settings, folder)
    return runs.make_cases(settings, folder, [job.method], seeds)


def _final_value(run: SeedRun) -> float | None:
    return run.marks[-1].value if run.marks else None


def _evaluation_columns(evaluation: EvaluationPoint) -> dict[str, Any]:
    return {
        "rounds": evaluation.rounds,
        "accuracy": evaluation.value,
        "held_accuracy": evaluation.held,
        "worst_decile": evaluation.worst_decile,
        "seconds": evaluation.seconds,
        "real_seconds": evaluation.real_s,
        "down_bytes": evaluation.down_bytes,
        "up_bytes": evaluation.up_bytes,
        "joules": evaluation.energy_j,
    }


def _flatten_table(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten_table(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
