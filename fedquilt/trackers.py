"""Experiment trackers that a simulation reports to: each needs its own package, an extra of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedquilt import extras

if TYPE_CHECKING:
    from fedquilt.api.job import Job
    from fedquilt.api.run import Run


class Tracker(Protocol):
    """Receiver of reports on a simulated run. Any object with these three methods is one."""

    def start(self, job: Job, run: str) -> None:
        """Receive the id of a run that begins or continues."""
        ...

    def round(self, row: Mapping[str, Any]) -> None:
        """Receive a finished round: a row of `Run.rounds`; unknown values are None."""
        ...

    def end(self, run: Run) -> None:
        """Receive the end of the run: done, failed or interrupted, by its status."""
        ...


class TensorBoard:
    """Writes event files into FOLDER/RUN, for `tensorboard --logdir FOLDER`: pip install 'fedquilt[tensorboard]'.

    Raises:
        JobError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path = "runs") -> None:
        self._writers = extras.load("tensorboard.summary.writer.event_file_writer")
        self._event = extras.load("tensorboard.compat.proto.event_pb2").Event
        self._summary = extras.load("tensorboard.compat.proto.summary_pb2").Summary
        self._folder = Path(folder)

    def start(self, job: Job, run: str) -> None:
        """Open an event file in FOLDER/RUN."""
        self._writer = self._writers.EventFileWriter(str(self._folder / run))

    def round(self, row: Mapping[str, Any]) -> None:
        """Write a scalar for each known column, at the round's number."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()]
        self._writer.add_event(self._event(step=row["round"], summary=self._summary(value=values)))

    def end(self, run: Run) -> None:
        """Close the event file."""
        self._writer.close()


class MLflow:
    """Logs to MLflow, parameters and a metric for each column: pip install 'fedquilt[mlflow]'.

    Args:
        uri: of the tracking server or store, such as "http://tracking.site:5000"; "": as set in MLflow. A store in a
            database of your own, "sqlite:///mlflow.db", needs the whole of `mlflow`.

    Raises:
        JobError: mlflow is not installed.
    """

    def __init__(self, experiment: str = "fedquilt", uri: str = "") -> None:
        self._mlflow = extras.load("mlflow")
        self._experiment, self._uri = experiment, uri

    def start(self, job: Job, run: str) -> None:
        """Begin a run of the experiment, with the job as parameters."""
        if self._uri:
            self._mlflow.set_tracking_uri(self._uri)
        self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(run_name=run)
        self._mlflow.log_params(flat(job.table()))

    def round(self, row: Mapping[str, Any]) -> None:
        """Log a metric for each known column, at the round's number."""
        self._mlflow.log_metrics(numbers(row), step=row["round"])

    def end(self, run: Run) -> None:
        """End MLflow's run."""
        self._mlflow.end_run()


class WandB:
    """Logs to Weights & Biases: pip install 'fedquilt[wandb]'.

    Args:
        mode: "offline" writes into `folder` and sends nothing; "online" needs a login.

    Raises:
        JobError: wandb is not installed.
    """

    def __init__(self, project: str = "fedquilt", *, mode: str = "offline", folder: str | Path = ".") -> None:
        self._wandb = extras.load("wandb")
        self._options = {"project": project, "mode": mode, "dir": str(folder)}

    def start(self, job: Job, run: str) -> None:
        """Begin a run of the project, with the job as configuration."""
        self._run = self._wandb.init(name=run, config=job.table(), **self._options)

    def round(self, row: Mapping[str, Any]) -> None:
        """Log the known columns, at the round's number."""
        self._run.log(numbers(row), step=row["round"])

    def end(self, run: Run) -> None:
        """Finish the run."""
        self._run.finish()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Known columns of a round, without its number."""
    return {name: float(value) for name, value in row.items() if name != "round" and value is not None}


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Table of a job with one level: "cohort.size"."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found
