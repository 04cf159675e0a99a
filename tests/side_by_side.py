"""Several jobs of one coordinator, and devices that run all tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from by_hand import Hand, Stage, constant_model

from fedquilt.core import Task

LONG = {"deadline_s": 10_000.0, "attempts": 1}
Staged: TypeAlias = Callable[..., Stage]  # makes a stage from limits and a job's table, as the fixture `staged` does


class TwoJobs(NamedTuple):
    """A job whose task both devices have, and a second queued job."""

    stage: Stage
    first: str
    second: str
    a: Hand
    b: Hand


def begin_two_jobs(stage: Stage) -> TwoJobs:
    """Add two devices, wait until they have the task of the first job, and queue a second job."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    return TwoJobs(stage, stage.job, stage.add("k", cohort=LONG), a, b)


def read_events(stage: Stage, id: str, kind: type) -> list[Any]:
    """Return the events of one class in the log of a job."""
    return [event for _, _, event in stage.store.read_events(id) if isinstance(event, kind)]


class Worker:
    """Device that runs all tasks, with a duration for each job."""

    def __init__(self, hand: Hand, seconds: dict[str, float]) -> None:
        self.hand, self._seconds = hand, seconds
        self._seen, self._due_s = 0, float("inf")

    def step(self, now_s: float) -> None:
        while self._seen < len(self.hand.tasks):
            task = self.hand.tasks[self._seen]
            self._seen += 1
            if task is None:
                self._due_s = float("inf")
            elif self._due_s == float("inf"):
                self._due_s = now_s + self._seconds.get(_name(task), 1.0)
        if now_s >= self._due_s:
            self._due_s = float("inf")
            task = next(task for task in reversed(self.hand.tasks) if task)
            self.hand.answer(constant_model(1.0 + task.round + len(task.job) + ord(self.hand.name[-1])))


def _name(task: Task) -> str:
    return task.job.partition("-")[0]


def work(stage: Stage, workers: list[Worker], seconds: float) -> None:
    """Advance virtual time while these devices work."""
    end_s = stage.broker.now_s + seconds
    while stage.broker.now_s < end_s:
        stage.play(0.05)
        for worker in workers:
            worker.step(stage.broker.now_s)
