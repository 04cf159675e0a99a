"""Which orders a pool gives to a worker at once: learnt from what became of the orders before, never from a clock."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import msgspec
import plain
import pytest

from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import pool
from fedquilt.tools.simulation.pool import Done, Pool

TASK = plain.task(engine="torch", deadline_s=0.0)


class Recorded(Pool):
    """A pool whose only worker is played: notes how many orders go to it at once, and answers as the test says."""

    def __init__(self) -> None:
        super().__init__("torch", [], together=True)
        self._sockets = [Mock(socket.socket)]  # never written to
        self.groups: list[int] = []
        self.joint: Iterator[bool] = iter(())  # of the answers to come
        self.answer = b""

    def _send(self, to: socket.socket, payload: bytes) -> None:
        work = msgspec.msgpack.decode(payload, type=pool.Work)
        assert work.together
        self.groups.append(len(work.orders))
        done = [Done(Outcome(reason=each.device), next(self.joint)) for each in work.orders]
        self.answer = msgspec.msgpack.encode(done)

    def _collect(self, *, block: bool) -> None:
        for worker in list(self._given):
            self._given.pop(worker).answer = self.answer

    def call(self, joint: Sequence[bool]) -> list[int]:
        """The groups of one call; each order's answer is its own."""
        self.groups, self.joint = [], iter(joint)
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
