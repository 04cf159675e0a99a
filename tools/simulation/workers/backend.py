"""Backends for the work of simulated devices: this process or a pool of workers.

Evaluations of the global model (`WorkBackend.evaluate`, `WorkBackend.evaluate_test_set`) happen outside of the rounds
and cost the devices nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedquilt import methods
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import EvaluationSums, Examples, JobError, Method
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation import DeviceData, machines
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.simulated_job import NEWCOMER, Prefetcher, Simulation, choose_job_engine
from fedquilt.tools.simulation.workers import local_backend
from fedquilt.tools.simulation.workers.pool import WorkerPool
from fedquilt.tools.simulation.workers.processes import ProcessWorkers
from fedquilt.tools.simulation.workers.protocol import WorkerGroup, choose_engine

Carry = Callable[[Sequence[tuple[Simulation, WorkRequest]]], Iterable[WorkResult]]
"""Carries orders out, of one simulation or several: outcomes in the same order."""


class WorkBackend:
    """Backend that runs the work requests of one simulation and evaluates its model."""

    def __init__(
        self,
        carry: Callable[[Sequence[WorkRequest]], Iterable[WorkResult]],
        held: Mapping[str, int],
        ahead: Prefetcher | None = None,
        ready: Callable[[], None] = lambda: None,
        machines: Mapping[str, Machine] = {},
    ) -> None:
        self._carry, self._held, self.ahead, self.ready, self.machines = carry, held, ahead, ready, machines

    def __call__(self, asked: Sequence[tuple[Simulation, WorkRequest]]) -> Iterable[WorkResult]:
        return self._carry([order for _, order in asked])

    def evaluate(self, simulation: Simulation, devices: Iterable[str] = ()) -> dict[str, EvaluationSums]:
        """Evaluate the model on the held-out examples of devices, by default of all that have any.

        Devices without anything to evaluate are missing in the result.
        """
        names = list(devices) or sorted(name for name in simulation.members if self._held.get(name))
        orders = [order for name in names if (order := simulation.make_evaluation_request(name)) is not None]
        found = {}
        for order, outcome in zip(orders, self._carry(orders), strict=True):
            if outcome.code != "ok":
                raise JobError(f"the evaluation on {order.device} failed ({outcome.code}): {outcome.reason}")
            if outcome.evaluation is not None:
                found[order.device] = outcome.evaluation
        return found

    def evaluate_test_set(self, simulation: Simulation) -> EvaluationSums | None:
        """Evaluate on the test set, or return None if the method has nothing to evaluate yet."""
        return self.evaluate(simulation, [NEWCOMER]).get(NEWCOMER)


@contextlib.contextmanager
def open_pool_backend(
    job: JobSettings,
    members: Iterable[DeviceData],
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    modules: Collection[str] = (),
    together: bool = False,
    test: Examples | None = None,
) -> Iterator[tuple[WorkBackend, dict[str, int]]]:
    """Start a pool and return its backend, and the number of held-out examples of each device.

    The pool ends with the context.
    """
    nothing = () if test is None else (_test_set_device(test),)
    library, where = choose_job_engine(job, methods.load(job.method)), choose_engine(engine, os.environ)
    made: WorkerGroup
    if where == "pool":
        made = ProcessWorkers(library, len(os.sched_getaffinity(0)) if workers is None else workers, modules)
    else:
        from fedquilt.tools.simulation.workers.ray.workers import RayWorkers  # here, as it is a pack

        made = RayWorkers(library, where, count=workers, mixed=mixed, modules=modules)
    with WorkerPool(made, itertools.chain(members, nothing), together=together) as pool:
        held = {name: count for name, count in pool.held.items() if name != NEWCOMER}

        def carry(orders: Sequence[WorkRequest]) -> Iterator[WorkResult]:
            return (outcome for _, outcome in pool.run_requests(orders))

        yield WorkBackend(carry, held, pool, pool.wait_until_ready, made.machines), held


def make_local_backend(
    members: Iterable[DeviceData],
    *,
    load: Callable[[str], Method] = methods.load,
    engine: Any = None,
    together: bool = False,
    test: Examples | None = None,
) -> tuple[WorkBackend, dict[str, int]]:
    """Return a backend in this process, and the number of held-out examples of each device."""
    held = {member.device: member for member in members}
    count = {name: len(member.held) for name, member in held.items()}
    if test is not None:
        held[NEWCOMER] = _test_set_device(test)

    def share(device: str) -> tuple[Examples, Examples]:
        return held[device].train, held[device].held

    if engine is None:
        make = local_backend.make_engine if together else engines.create_engine
        executor = local_backend.WorkExecutor(share, load, make)
    else:
        executor = local_backend.SingleEngineExecutor(share, load, engine)

    def carry(orders: Sequence[WorkRequest]) -> list[WorkResult]:
        return [outcome for outcome, _ in local_backend.run_requests([(executor, order) for order in orders], together)]

    return WorkBackend(carry, count, machines={machines.get_machine_name(): machines.describe_this_machine()}), count


def _test_set_device(test: Examples) -> DeviceData:
    return DeviceData(NEWCOMER, Examples(test.x[:0], test.y[:0]), test)
