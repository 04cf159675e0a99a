"""Which orders a pool gives to a worker at once: learnt from what became of the orders before, never from a clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import plain
import pytest

from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation.pool import PoolSetup, WorkBatch, WorkerPool, WorkerReply, WorkOutcome

TASK = plain.task(engine="torch", deadline_s=0.0)


class Recorded:
    def __init__(self) -> None:
        self.ready = (0,)
        self.groups: list[int] = []
        self.joint: Iterator[bool] = iter(())  # of the answers to come
        self.answers: list[WorkerReply] = []

    def send_work(self, worker: int, work: WorkBatch) -> None:
        assert work.together
        self.groups.append(len(work.orders))
        self.answers.append(
            WorkerReply([WorkOutcome(WorkResult(reason=each.device), next(self.joint)) for each in work.orders])
        )

    def receive_replies(self, *, block: bool) -> list[tuple[int, WorkerReply | None]]:
        found: list[tuple[int, WorkerReply | None]] = [(0, answer) for answer in self.answers]
        self.answers = []
        return found

    def start(self, folder: Path) -> None: ...

    def send_setup(self, setup: PoolSetup) -> None: ...

    def wait_until_ready(self) -> None: ...

    def stop(self, *, now: bool) -> None: ...


class Grouped:
    def __init__(self) -> None:
        self.worker = Recorded()
        self.pool = WorkerPool(self.worker, [], together=True)

    def call(self, joint: Sequence[bool]) -> list[int]:
        self.worker.groups, self.worker.joint = [], iter(joint)
        orders = [WorkRequest(TASK, f"dev-{index}", 0, {}, {}, None, "cache", "out") for index in range(len(joint))]
        assert [(order, outcome.reason) for order, outcome in self.pool.run_requests(orders)] == [
            (order, order.device) for order in orders
        ]
        return self.worker.groups


@pytest.mark.parametrize("count", [1, 32, 40])
def test_orders_go_together_once_the_first_of_a_call_has_been_trained_with_others(count: int) -> None:
    """In parts that are about equal and at most 32 long; whatever became of the later ones decides nothing."""
    made = Grouped()
    assert made.call([True] + [False] * 4) == [1] * 5  # nothing is known yet
    assert made.call([True] + [False] * (count - 1)) == {1: [1], 32: [32], 40: [20, 20]}[count]


def test_orders_go_alone_again_after_a_call_whose_first_was_trained_alone() -> None:
    made = Grouped()
    made.call([True, True])
    assert made.call([False, True, True]) == [3]
    assert made.call([True, True, True]) == [1, 1, 1]
    assert made.call([True, True, True]) == [3]
