"""Experiment trackers for runs. Each requires its own package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedquilt import extras

if TYPE_CHECKING:
    from fedquilt.api.job import Job
    from fedquilt.api.run import Run


class Tracker(Protocol):
    """Protocol of objects that receive reports on a run."""

    def start(self, job: Job, run: str) -> None:
        """Receive the job and the id of a run that starts or continues."""
        ...

    def round(self, row: Mapping[str, Any]) -> None:
        """Receive a finished round, a row of `Run.rounds` with None for unknown values."""
        ...

    def end(self, run: Run) -> None:
        """Receive the run after its end, with a status such as "done", "failed" or "interrupted"."""
        ...


class TensorBoard:
    """Tracker that writes event files into FOLDER/RUN, for `tensorboard --logdir FOLDER`.

    The package is installed with pip install 'fedquilt[tensorboard]'.

    Args:
        folder: Folder of all runs.

    Raises:
        JobError: If tensorboard is not installed.
    """

    def __init__(self, folder: str | Path = "runs") -> None:
        self._writers = extras.load_optional("tensorboard.summary.writer.event_file_writer")
        self._event = extras.load_optional("tensorboard.compat.proto.event_pb2").Event
        self._summary = extras.load_optional("tensorboard.compat.proto.summary_pb2").Summary
        self._folder = Path(folder)

    def start(self, job: Job, run: str) -> None:
        self._writer = self._writers.EventFileWriter(str(self._folder / run))

    def round(self, row: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in known_values(row).items()]
        self._writer.add_event(self._event(step=row["round"], summary=self._summary(value=values)))

    def end(self, run: Run) -> None:
        self._writer.close()


class MLflow:
    """Tracker that logs parameters and metrics to MLflow.

    The package is installed with pip install 'fedquilt[mlflow]'.

    Args:
        experiment: Name of the experiment.
        uri: Tracking server or store, such as "http://tracking.site:5000", or "" for MLflow's own setting. A database
            such as "sqlite:///mlflow.db" requires the full `mlflow` package.

    Raises:
        JobError: If mlflow is not installed.
    """

    def __init__(self, experiment: str = "fedquilt", uri: str = "") -> None:
        self._mlflow = extras.load_optional("mlflow")
        self._experiment, self._uri = experiment, uri

    def start(self, job: Job, run: str) -> None:
        if self._uri:
            self._mlflow.set_tracking_uri(self._uri)
        self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(run_name=run)
        self._mlflow.log_params(flatten_table(job.to_table()))

    def round(self, row: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics(known_values(row), step=row["round"])

    def end(self, run: Run) -> None:
        self._mlflow.end_run()


class WandB:
    """Tracker that logs to Weights & Biases.

    The package is installed with pip install 'fedquilt[wandb]'.

    Args:
        project: Name of the project.
        mode: "offline" to write only into `folder`, or "online", which requires a login.
        folder: Folder of the local files.

    Raises:
        JobError: If wandb is not installed.
    """

    def __init__(self, project: str = "fedquilt", *, mode: str = "offline", folder: str | Path = ".") -> None:
        self._wandb = extras.load_optional("wandb")
        self._options = {"project": project, "mode": mode, "dir": str(folder)}

    def start(self, job: Job, run: str) -> None:
        self._run = self._wandb.init(name=run, config=job.to_table(), **self._options)

    def round(self, row: Mapping[str, Any]) -> None:
        self._run.log(known_values(row), step=row["round"])

    def end(self, run: Run) -> None:
        self._run.finish()


def known_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the known values of a round's row as floats, without the round number."""
    return {name: float(value) for name, value in row.items() if name != "round" and value is not None}


def flatten_table(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flatten_table(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found
