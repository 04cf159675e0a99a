"""Reports of rounds to TensorBoard, MLflow and Weights & Biases, each by one callback.

A callback receives a row of `Run.rounds` for each finished round. `fq.simulate(..., on_round=...)` or
your own loop over `Run.follow` calls it, also for a run on real boards:

    with mlflow_run("digits", job) as report:
        fq.simulate(job, on_round=report)

    with tensorboard("runs/train") as report:
        for row in fq.Run.open("fedquilt-runs", "train").follow():
            report(row)

Install your tracker with `pip install tensorboard`, `mlflow-skinny` or `wandb`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fedquilt as fq

Callback = Callable[[Mapping[str, Any]], None]


def known_values(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "round" and value is not None}


@contextmanager
def tensorboard(folder: str) -> Iterator[Callback]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder)

    def report(row: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in known_values(row).items()]
        writer.add_event(Event(step=row["round"], summary=Summary(value=values)))

    try:
        yield report
    finally:
        writer.close()


@contextmanager
def mlflow_run(experiment: str, job: fq.Job) -> Iterator[Callback]:
    import mlflow

    mlflow.set_experiment(experiment)
    with mlflow.start_run():
        mlflow.log_params({key: str(value) for key, value in job.to_table().items()})
        yield lambda row: mlflow.log_metrics(known_values(row), step=row["round"])


@contextmanager
def wandb_run(project: str, job: fq.Job, **options: Any) -> Iterator[Callback]:
    import wandb

    with wandb.init(project=project, config=job.to_table(), **options) as run:
        yield lambda row: run.log(known_values(row), step=row["round"])
