"""Client halves stop where they train, are trained together, and go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest

from fedquilt.core import ClientContext, Examples
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation.local_backend import RestartableClient, run_together
from fedquilt.tools.simulation.pool import PoolSetup, WorkBatch, WorkerPool, WorkerReply, WorkOutcome


@dataclass
class Call:
    start: float
    rng: np.random.Generator


class Doubling:
    def __init__(self, alone: float | None = None) -> None:
        self.batches: list[list[float]] = []
        self.alone = alone
        self.name = "doubling"

    def batchable_call(self, network: Any, start: float, examples: Any, fit: Any, rng: Any) -> Call | None:
        return None if start == self.alone else Call(start, rng)

    def train(self, network: Any, start: float, examples: Any, fit: Any, rng: Any) -> float:
        self.batches.append([start])
        rng.integers(10)
        return 2 * start

    def train_together(self, calls: list[Call]) -> list[float | Exception]:
        self.batches.append([call.start for call in calls])
        for call in calls:
            call.rng.integers(10)
        return [ValueError("no thirteens") if call.start == 13 else 2 * call.start for call in calls]


def half(value: float, times: int) -> Any:
    def run(engine: Any) -> tuple[float, int, str]:
        rng, now = np.random.default_rng(int(value)), value
        for _ in range(times):
            now = engine.train(None, now, None, None, rng)
        return now, int(rng.integers(1 << 30)), engine.name

    return run


def test_halves_that_train_are_trained_together() -> None:
    engine = Doubling()
    found = run_together([half(1, 1), half(2, 2), half(3, 0), half(4, 2)], engine)
    assert engine.batches == [[1, 2, 4], [4, 8]]
    assert [value[0] for value, _ in found] == [2, 8, 3, 16]
    assert [joint for _, joint in found] == [True, True, False, True]


def test_a_half_draws_on_as_if_it_had_not_been_broken_off() -> None:
    plain = Doubling()
    for times in range(3):
        ((found, _),) = run_together([half(5, times)], Doubling())
        assert found == half(5, times)(plain)


def test_a_call_that_takes_the_loop_is_made_at_once() -> None:
    """The engine does not want 4 among others."""
    engine = Doubling(alone=4)
    found = run_together([half(4, 1), half(6, 1)], engine)
    assert engine.batches == [[4], [6]]
    assert [joint for _, joint in found] == [False, True]


def test_what_a_training_raises_is_raised_in_its_half_alone() -> None:
    def careful(engine: Any) -> str:
        with pytest.raises(ValueError, match="thirteens"):
            engine.train(None, 13, None, None, np.random.default_rng(0))
        return "caught"

    found = [value for value, _ in run_together([half(13, 1), careful, half(1, 1)], Doubling())]
    assert isinstance(found[0], ValueError)
    assert found[1] == "caught"
    assert found[2][0] == 2


def test_an_engine_that_trains_nobody_together_is_used_as_it_is() -> None:
    def bad(engine: Any) -> float:
        raise KeyError("x")

    found = run_together([lambda engine: engine + 1, bad], 41)
    assert found[0] == (42, False)
    assert isinstance(found[1][0], KeyError)


def test_a_half_that_is_called_again_finds_its_site_as_it_was() -> None:
    made: list[int] = []
    nothing = Examples(np.zeros((0, 1)), np.zeros(0, int))

    def site(engine: Any) -> ClientContext:
        made.append(1)
        rng = np.random.default_rng(5)
        return ClientContext(
            "dev", 0, engine, rng, nothing, nothing, {}, lambda name: {}, lambda name: Path(name), Path()
        )

    drawn: list[int] = []

    def work(site: ClientContext) -> float:
        drawn.append(int(site.rng.integers(1000)))
        return float(site.engine.train(None, 3.0, None, None, site.rng))

    engine = Doubling()
    assert run_together([RestartableClient(site, work)], engine) == [(6.0, True)]
    assert len(made) == 1
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


TASK = plain.task(engine="torch", deadline_s=0.0)


class Recorded:
    def __init__(self) -> None:
        self.ready = (0,)
        self.groups: list[int] = []
        self.batchable: Iterator[bool] = iter(())  # of the answers to come
        self.answers: list[WorkerReply] = []

    def send_work(self, worker: int, work: WorkBatch) -> None:
        assert work.batched
        self.groups.append(len(work.requests))
        self.answers.append(
            WorkerReply([WorkOutcome(WorkResult(reason=each.device), next(self.batchable)) for each in work.requests])
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
        self.pool = WorkerPool(self.worker, [], batched=True)

    def call(self, joint: Sequence[bool]) -> list[int]:
        self.worker.groups, self.worker.batchable = [], iter(joint)
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
