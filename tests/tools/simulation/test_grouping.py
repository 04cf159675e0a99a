"""Which orders a pool gives to a worker at once: learnt from what became of the orders before, never from a clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import plain
import pytest

from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import pool
from fedquilt.tools.simulation.pool import Done, Pool

TASK = plain.task(engine="torch", deadline_s=0.0)


class Recorded(Pool):
    """A pool without processes: notes how many orders go to a worker at once, and answers as the test says."""

    def __init__(self) -> None:
        super().__init__("torch", [], together=True)
        self.groups: list[int] = []
        self.joint: list[bool] = []  # of the answers to come

    def _spread(self, orders: Sequence[bytes]) -> Iterator[bytes]:
        answers = iter(self.joint)
        for payload in orders:
            work = msgspec.msgpack.decode(payload, type=pool.Work)
            assert work.together
            self.groups.append(len(work.orders))
            yield msgspec.msgpack.encode([Done(Outcome(reason=each.device), next(answers)) for each in work.orders])

    def call(self, joint: Sequence[bool]) -> list[int]:
        """The groups of one call; each order's answer is its own."""
        self.groups, self.joint = [], list(joint)
        orders = [Order(TASK, f"dev-{index}", 0, {}, {}, None, "cache", "out") for index in range(len(joint))]
        assert [(order, outcome.reason) for order, outcome in self.carry_out(orders)] == [
            (order, order.device) for order in orders
        ]
        return self.groups


@pytest.mark.parametrize("count", [1, 32, 40])
def test_orders_go_together_once_the_first_of_a_call_has_been_trained_with_others(count: int) -> None:
    """In parts that are about equal and at most 32 long; whatever became of the later ones decides nothing."""
    made = Recorded()
    assert made.call([True] + [False] * 4) == [1] * 5  # nothing is known yet
    assert made.call([True] + [False] * (count - 1)) == {1: [1], 32: [32], 40: [20, 20]}[count]


def test_orders_go_alone_again_after_a_call_whose_first_was_trained_alone() -> None:
    """An evaluation between two rounds, say: the next call is not kept waiting for one worker."""
    made = Recorded()
    made.call([True, True])
    assert made.call([False, True, True]) == [3]
    assert made.call([True, True, True]) == [1, 1, 1]
    assert made.call([True, True, True]) == [3]
