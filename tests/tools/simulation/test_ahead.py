"""Orders that are announced before they are asked for: begun early, and counted only if exactly these are asked for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.testing.toy_networks import point_devices
from fedquilt.tools.simulation.pool import PoolError, WorkBatch, WorkerPool
from fedquilt.tools.simulation.processes import ProcessWorkers
from fedquilt.tools.simulation.run import WorkBackend, run_rounds, simulate
from fedquilt.tools.simulation.simulated_job import Simulation

JOB: dict[str, Any] = {
    "name": "toy",
    "method": "fedavg",
    "engine": "numpy",
    "rounds": 3,
    "params": {"epochs": 1, "batch": 4, "lr": 0.1},
}
MEMBERS = point_devices(5, 13)


@contextmanager
def begun(folder: Path, home: Path, **more: Any) -> Iterator[Simulation]:
    job, held = settings.parse_job({**JOB, **more}), {each.device: len(each.held_out) for each in MEMBERS}
    with Simulation(job, folder, held, home) as simulation:
        yield simulation


class Heard:
    def __init__(self) -> None:
        self.counts: list[int] = []
        self.requests: list[WorkRequest] = []

    def expect_requests(self, count: int) -> None:
        self.counts.append(count)
        self.requests = []

    def prefetch(self, order: WorkRequest) -> None:
        self.requests.append(order)

    def set_sum_receiver(self, sums: Simulation) -> None: ...


class Watched(ProcessWorkers):
    def __init__(self, count: int) -> None:
        super().__init__("numpy", count)
        self.given = 0

    def send_work(self, worker: int, work: WorkBatch) -> None:
        self.given += 1
        super().send_work(worker, work)


def bundles(found: Iterator[tuple[WorkRequest, WorkResult]]) -> list[tuple[str, dict[str, Any]]]:
    return [(order.device, outcome.bundles) for order, outcome in found]


def test_a_round_announces_exactly_the_orders_that_it_then_asks_for(folder: Path, tmp_path: Path) -> None:
    heard = Heard()
    with begun(folder, tmp_path / "home", cohort={"size": 3}) as simulation:
        simulation.set_prefetcher(heard)
        orders = simulation.advance()
    assert heard.counts == [3]
    assert len(orders) == 3
    assert all(one is other for one, other in zip(orders, heard.requests, strict=True))


def test_nothing_is_announced_where_adversaries_listen_to_the_others(folder: Path, tmp_path: Path) -> None:
    heard = Heard()
    lies = {"adversaries": {"share": 0.4, "attack": "inner_product"}}
    with begun(folder, tmp_path / "home", fleet=lies) as simulation:
        simulation.set_prefetcher(heard)
        assert simulation.advance()
    assert heard.counts == []


def test_workers_begin_announced_orders_which_are_not_sent_again(folder: Path, tmp_path: Path) -> None:
    with begun(folder, tmp_path / "home") as simulation, WorkerPool(workers := Watched(2), MEMBERS) as pool:
        orders = simulation.advance()
        plain = bundles(pool.run_requests(orders))
        workers.given = 0
        pool.expect_requests(len(orders))
        for order in orders:
            pool.prefetch(order)
        assert workers.given >= 2
        assert bundles(pool.run_requests(orders)) == plain
        assert workers.given == len(orders)


def test_other_orders_than_were_announced_are_carried_out_as_if_nothing_had_been(folder: Path, tmp_path: Path) -> None:
    with begun(folder, tmp_path / "home") as simulation, WorkerPool(Watched(2), MEMBERS) as pool:
        orders = simulation.advance()
        plain = bundles(pool.run_requests(orders))
        pool.expect_requests(len(orders))
        for order in orders:
            pool.prefetch(order)
        assert bundles(pool.run_requests(orders[4:])) == plain[4:]
        assert bundles(pool.run_requests([orders[1], orders[0]])) == [plain[1], plain[0]]
        pool.expect_requests(2)
        pool.prefetch(orders[3])
        assert bundles(pool.run_requests(orders)) == plain


def test_a_worker_that_died_when_an_order_was_announced_is_told_when_it_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    with (
        begun(folder, tmp_path / "home") as simulation,
        WorkerPool(workers := ProcessWorkers("numpy", 1), MEMBERS) as pool,
    ):
        orders = simulation.advance()
        list(pool.run_requests(orders))
        os.kill(workers.pid, signal.SIGKILL)
        os.waitid(os.P_PID, workers.pid, os.WEXITED | os.WNOWAIT)
        pool.expect_requests(len(orders))
        for order in orders:
            pool.prefetch(order)
        with pytest.raises(PoolError, match="killed"):
            list(pool.run_requests(orders))


def test_a_run_on_a_pool_gives_the_bits_of_one_that_announces_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[bytes, list[Any]]:
        tested: list[Any] = []

        def observe(simulation: Simulation, hands: WorkBackend) -> None:
            tested.append(hands.evaluate_test_set(simulation))

        job = settings.parse_job({**JOB, "cohort": {"size": 4}})
        outcome = simulate(job, folder, MEMBERS, workers=2, test=MEMBERS[0].train, observe=observe)
        return tensors.encode_tensors(outcome.artefact.tensors), [*tested, *(each.devices for each in outcome.rounds)]

    ahead = run()
    monkeypatch.setattr(Simulation, "set_prefetcher", lambda self, ahead: None)
    assert run() == ahead


def test_a_rounds_seconds_hold_its_asking_and_not_what_is_done_between_the_rounds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    class Slow(Heard):
        def prefetch(self, order: WorkRequest) -> None:
            now_s[0] += 1.0

    with begun(folder, tmp_path / "home", rounds=2) as simulation, WorkerPool(Watched(1), MEMBERS) as pool:
        simulation.set_prefetcher(Slow())
        carry = WorkBackend(lambda orders: [done for _, done in pool.run_requests(orders)], {})
        for _ in run_rounds(simulation, carry):
            now_s[0] += 100.0
        assert [each.wall_s for each in simulation.rounds] == [5.0, 5.0]
