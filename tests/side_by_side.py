"""Several jobs of one coordinator, and boards that carry out whatever they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from by_hand import Hand, Stage, ones

from fedquilt.core import Task

LONG = {"deadline_s": 10_000.0, "attempts": 1}
Staged: TypeAlias = Callable[..., Stage]  # makes a stage from limits and a job's table, as the fixture `staged` does


class TwoJobs(NamedTuple):
    """A job whose task both boards have, and a job that was queued since."""

    stage: Stage
    first: str
    second: str
    a: Hand
    b: Hand


def begin_two_jobs(stage: Stage) -> TwoJobs:
    """Give both boards of a stage the task of its job, and queue a second job."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    return TwoJobs(stage, stage.job, stage.add("k", cohort=LONG), a, b)


def facts(stage: Stage, id: str, kind: type) -> list[Any]:
    """The facts of one kind in a job's log."""
    return [fact for _, _, fact in stage.store.read_events(id) if isinstance(fact, kind)]


class Worker:
    """A hand that carries out whatever it is sent: each task takes its job's time."""

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
            self.hand.answer(ones(1.0 + task.round + len(task.job) + ord(self.hand.name[-1])))


def _name(task: Task) -> str:
    return task.job.partition("-")[0]


def work(stage: Stage, workers: list[Worker], seconds: float) -> None:
    """Let virtual time pass in which these boards work."""
    until = stage.broker.now_s + seconds
    while stage.broker.now_s < until:
        stage.play(0.05)
        for worker in workers:
            worker.step(stage.broker.now_s)
