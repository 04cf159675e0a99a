"""Who carries simulated devices' orders out: this process, or a pool of warm workers, here or on a Ray cluster.

Evaluations of the global model (`Hands.evaluate`, `Hands.test`) are made beside the rounds: they cost the devices
nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedquilt import methods
from fedquilt.coordinator.settings import Job
from fedquilt.core import EvaluationSums, Examples, JobError, Method
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import Member, hands, machines
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.pool import Pool
from fedquilt.tools.simulation.processes import Processes
from fedquilt.tools.simulation.ray_cluster import chosen
from fedquilt.tools.simulation.ray_workers import RayWorkers
from fedquilt.tools.simulation.simulated_job import NEWCOMER, Ahead, Simulation, engine_of
from fedquilt.tools.simulation.workers import Workers

Carry = Callable[[Sequence[tuple[Simulation, Order]]], Iterable[Outcome]]
"""Carries orders out, of one simulation or several: outcomes in the same order."""


class Hands:
    """Whoever carries the orders of one simulation out, and evaluates its model beside the rounds.

    Args:
        carry: carries orders out, one outcome each, in their order.
        held: device -> how many held-out examples it has.
        ahead: is told of orders before they are to be carried out; None: nobody.
        ready: waits until orders are carried out at once.
        machines: that do the work, by name.
    """

    def __init__(
        self,
        carry: Callable[[Sequence[Order]], Iterable[Outcome]],
        held: Mapping[str, int],
        ahead: Ahead | None = None,
        ready: Callable[[], None] = lambda: None,
        machines: Mapping[str, Machine] = {},
    ) -> None:
        self._carry, self._held, self.ahead, self.ready, self.machines = carry, held, ahead, ready, machines

    def __call__(self, asked: Sequence[tuple[Simulation, Order]]) -> Iterable[Outcome]:
        """Carry out the orders, one outcome each."""
        return self._carry([order for _, order in asked])

    def evaluate(self, simulation: Simulation, devices: Iterable[str] = ()) -> dict[str, EvaluationSums]:
        """Evaluate each device that holds examples out; without `devices` of all of them.

        Raises:
            FedquiltError: a device's check failed.
        """
        names = list(devices) or sorted(name for name in simulation.members if self._held.get(name))
        orders = [order for name in names if (order := simulation.evaluation(name)) is not None]
        found = {}
        for order, outcome in zip(orders, self._carry(orders), strict=True):
            if outcome.code != "ok":
                raise JobError(f"the evaluation on {order.device} failed ({outcome.code}): {outcome.reason}")
            if outcome.evaluation is not None:
                found[order.device] = outcome.evaluation
        return found

    def test(self, simulation: Simulation) -> EvaluationSums | None:
        """Evaluate on the test set, or return None if the method has nothing to test yet."""
        return self.evaluate(simulation, [NEWCOMER]).get(NEWCOMER)


@contextlib.contextmanager
def by_pool(
    job: Job,
    members: Iterable[Member],
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    modules: Collection[str] = (),
    together: bool = False,
    test: Examples | None = None,
) -> Iterator[tuple[Hands, dict[str, int]]]:
    """Hands of warm workers; and of each member how many examples it holds out.

    Args:
        job: whose work they do.
        members: iterated once.
        workers: how many; None: one for each core, of this machine or of the Ray cluster.
        engine: "auto", "pool", "ray" or "ray://HOST:PORT" (`ray_cluster.chosen`).
        mixed: permit a Ray cluster's nodes to differ in processor, GPU and libraries.
        modules: top-level modules of the job's plug-ins.
        together: train several devices in one graph.
        test: examples of `Hands.test`.

    Raises:
        JobError: no such engine or number of workers, or nodes that differ.
        PoolError: a worker has ended, or no cluster is reached.
    """
    nothing = () if test is None else (Member(NEWCOMER, Examples(test.x[:0], test.y[:0]), test),)
    library, where = engine_of(job, methods.load(job.method)), chosen(engine, os.environ)
    made: Workers
    if where == "pool":
        made = Processes(library, len(os.sched_getaffinity(0)) if workers is None else workers, modules)
    else:
        made = RayWorkers(library, where, count=workers, mixed=mixed, modules=modules)
    with Pool(made, itertools.chain(members, nothing), together=together) as pool:
        held = {name: count for name, count in pool.held.items() if name != NEWCOMER}

        def carry(orders: Sequence[Order]) -> Iterator[Outcome]:
            return (outcome for _, outcome in pool.carry_out(orders))

        yield Hands(carry, held, pool, pool.warm, made.machines), held


def in_process(
    members: Iterable[Member],
    *,
    load: Callable[[str], Method] = methods.load,
    engine: Any = None,
    together: bool = False,
    test: Examples | None = None,
) -> tuple[Hands, dict[str, int]]:
    """Hands in this process; and the number of held-out examples of each member.

    Args:
        members: devices with their examples.
        load: finds a method by its name.
        engine: one engine for all devices, whatever their budgets; None: made for each budget.
        together: train several devices in one graph.
        test: examples of `Hands.test`.
    """
    make = hands.make_engine if together else engines.make
    made, count = bench(members, load=load, engine=engine, test=test, make=make)

    def carry(orders: Sequence[Order]) -> list[Outcome]:
        return [outcome for outcome, _ in hands.carry_out([(made, order) for order in orders], together)]

    return Hands(carry, count, machines={machines.name(): machines.here()}), count


def bench(
    members: Iterable[Member],
    *,
    load: Callable[[str], Method] = methods.load,
    engine: Any = None,
    test: Examples | None = None,
    make: Callable[[str, int], Any] = engines.make,
) -> tuple[hands.Bench, dict[str, int]]:
    """Bench for members' orders in this process; and each member's number of held-out examples."""
    held = {member.device: member for member in members}
    count = {name: len(member.held) for name, member in held.items()}
    if test is not None:
        held[NEWCOMER] = Member(NEWCOMER, Examples(test.x[:0], test.y[:0]), test)

    def share(device: str) -> tuple[Examples, Examples]:
        return held[device].train, held[device].held

    return hands.Bench(share, load, make) if engine is None else hands.OneEngine(share, load, engine), count
