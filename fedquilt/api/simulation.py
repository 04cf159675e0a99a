"""Simulation of jobs by the coordinator's code (`fedquilt.simulate`), with live progress."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fedquilt import extras, metrics
from fedquilt.api.job import Job
from fedquilt.api.run import RoundReader, Run
from fedquilt.console import progress as console
from fedquilt.coordinator import settings
from fedquilt.core import JobError
from fedquilt.tools.report import columns

if TYPE_CHECKING:
    from fedquilt.tools.simulation.simulated_job import Simulation

log = logging.getLogger(__name__)

BUNDLE_SETTINGS: Final = ("model", "schedule", "input", "data", "public", "labels", "donors")


@extras.report_missing_extras()
def simulate(
    job: Job,
    *,
    seed: int | None = None,
    workers: int | None = 1,
    engine: str = "auto",
    mixed: bool = False,
    home: str | Path | None = None,
    evaluate: bool = True,
    on_round: Callable[[Mapping[str, Any]], None] | None = None,
    progress: bool | None = None,
) -> Run:
    """Run a job to its end on its simulated fleet.

    Rounds, deadlines, budgets, clock control and codecs run the code of coordinator and agents. Only devices and time
    are simulated. Every state is bit-identical to that of `fedquilt simulate` with the same job, for any number of
    workers.

    Args:
        job: Job with a [data] table.
        seed: Seed in place of the job's. The partition uses it too, unless the job's data has a seed.
        workers: Number of training processes, or None for one per core of this machine or of the Ray cluster.
        engine: "pool" for processes of this machine, "ray" for the Ray cluster of this node (or a new local Ray),
            "ray://HOST:PORT" for another cluster, or "auto" for a pool unless RAY_ADDRESS is set.
        mixed: Whether processor, GPU or libraries may differ between nodes, or after an interruption. Results are then
            not bit-identical.
        home: Folder of the run and its bundle, in which an interrupted run is continued, or None for a temporary
            folder.
        evaluate: Whether to evaluate the global model after each round if the job has no [check], on held-out shares
            and the test set, without cost for the devices.
        on_round: Function that receives each finished round as a row of `Run.rounds`, for a tracker of experiments.
            Its errors are logged, and the run continues.
        progress: True to show progress lines, False to show none, or None to show them on terminals and in notebooks.

    Returns:
        The finished run.

    Raises:
        JobError: If an argument or a key of the job is wrong, a library is missing, machines differ, or the run failed.
        DataError: If the data cannot be read, or do not fit the network.
        ModelError: If the network cannot be loaded or trained by the method.
        StoreError: If the home cannot be written.
    """
    from fedquilt.tools.artefacts import prepare
    from fedquilt.tools.experiments import single_run
    from fedquilt.tools.simulation.pool import ScratchFolder

    if not isinstance(job, Job):
        raise JobError(f"{job!r} is not a fq.Job: read a job file with fq.simulate(fq.Job.read('job.toml'))")
    job_settings = job.settings if seed is None else job.replace(seed=seed).settings
    run_settings = single_run.add_evaluation(job_settings) if evaluate else job_settings
    if not run_settings.data:
        raise JobError("the job has no data: give some, as in fq.Job(..., data=fq.Data('digits.npz'))")
    with contextlib.ExitStack() as stack:
        folder = Path(home) if home is not None else stack.enter_context(ScratchFolder())
        bundle = folder / "bundles" / bundle_folder_name(run_settings)
        prepare.prepare_and_check(run_settings, bundle)
        with contextlib.closing(make_display(progress)) as display:
            reporter = _RunReporter(run_settings, folder, on_round, display.show)
            id = single_run.run_job(
                run_settings,
                bundle,
                folder,
                workers=workers,
                engine=engine,
                mixed=mixed,
                on_start=reporter.begin,
                on_round=reporter,
            )
            reporter.report_rounds(has_ended=True)
        run = Run(folder, id)
        if home is None:
            weakref.finalize(run, stack.pop_all().close)  # a temporary home lasts as long as its run
    return run


def bundle_folder_name(job: settings.JobSettings) -> str:
    """Return the folder name of a job's bundle, with a hash of the settings that affect the bundle."""
    parts = {name: getattr(job, name) for name in BUNDLE_SETTINGS}
    return f"{job.name}-{hashlib.sha256(msgspec.json.encode(parts, order='sorted')).hexdigest()[:12]}"


class _RunReporter:
    def __init__(
        self,
        job: settings.JobSettings,
        home: Path,
        on_round: Callable[[Mapping[str, Any]], None] | None,
        show: Callable[[str, float, float], None],
    ) -> None:
        self._job, self._home, self._on_round, self._show = job, home, on_round, show
        self._reader: RoundReader | None = None
        self._metric, self._latest_score = columns.find_main_metric(job), ""

    def begin(self, run: str) -> None:
        self._reader = RoundReader(self._home, run)

    def __call__(self, simulation: Simulation) -> None:
        self.report_rounds(has_ended=False)
        completed, rounds = simulation.completed_rounds, self._job.rounds
        self._show(f"{simulation.run}: round {completed} of {rounds}{self._latest_score}", completed, rounds)

    def report_rounds(self, *, has_ended: bool) -> None:
        for row in self._reader.read_new_rows(has_ended=has_ended) if self._reader is not None else ():
            if row[self._metric.name] is not None:
                value = metrics.format_value(self._metric, row[self._metric.name], 1)
                self._latest_score = f", {self._metric.title} {value}"
            try:
                if self._on_round is not None:
                    self._on_round(row)
            except Exception:
                log.warning("on_round failed at round %s, and the run continues", row["round"], exc_info=True)


# -- progress -------------------------------------------------------------------------------------


class Display:
    """Base class of progress displays, without output. Each new line replaces the previous line."""

    def show(self, line: str, completed: float | None = None, total: float | None = None) -> None: ...

    def close(self) -> None: ...


class TerminalDisplay(Display):
    """Display on standard error. A terminal shows one changing line, any other output a line at intervals."""

    def __init__(self) -> None:
        self._last_line = ""

    def show(self, line: str, completed: float | None = None, total: float | None = None) -> None:
        self._last_line = line
        console.LINE.show_status(line, completed, total)

    def close(self) -> None:
        console.LINE.end_operation()
        if self._last_line:
            console.LINE.print_lines(self._last_line)


class NotebookDisplay(Display):
    """Display in the output of a notebook cell, through IPython."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._handle: Any = None

    def show(self, line: str, completed: float | None = None, total: float | None = None) -> None:
        if total:
            line = f"{line} {console.format_bar((completed or 0.0) / total)}"
        html = self._ipython.HTML(f"<pre>{escape(line)}</pre>")
        if self._handle is None:
            self._handle = self._ipython.display(html, display_id=True)
        else:
            self._handle.update(html)


def make_display(progress: bool | None) -> Display:
    """Return the display that `progress` selects, as described for `simulate`."""
    if progress is False:
        return Display()
    if _is_notebook():
        from IPython import display as ipython

        return NotebookDisplay(ipython)
    return TerminalDisplay() if progress or sys.stderr.isatty() else Display()


def _is_notebook() -> bool:
    # IPython is looked up among the loaded modules, and never imported.
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
