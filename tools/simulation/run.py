"""Simulated jobs: loops that drive them, and backends that run the work of their devices.

Evaluations of the global model (`WorkBackend.evaluate`) happen outside of the rounds and cost the devices nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt import methods
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.settings import JobSettings, required_packages
from fedquilt.core import Artefact, EvaluationSums, Examples, JobError, Method
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.tools.simulation import DeviceData, local_backend, machines
from fedquilt.tools.simulation.machines import Machine
from fedquilt.tools.simulation.pool import ScratchFolder, WorkerGroup, WorkerPool, choose_engine
from fedquilt.tools.simulation.processes import ProcessWorkers
from fedquilt.tools.simulation.simulated_job import NEWCOMER, SimulatedRound, Simulation, choose_job_engine


class WorkBackend:
    """Backend that runs the work requests of one simulation and evaluates its model."""

    def __init__(
        self,
        carry: Callable[[Sequence[WorkRequest]], Iterable[WorkResult]],
        held: Mapping[str, int],
        ahead: WorkerPool | None = None,
        ready: Callable[[], None] = lambda: None,
        machines: Mapping[str, Machine] = {},
    ) -> None:
        self._carry, self._held, self.ahead, self.ready, self.machines = carry, held, ahead, ready, machines

    def __call__(self, orders: Sequence[WorkRequest]) -> Iterable[WorkResult]:
        return self._carry(orders)

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
        from fedquilt.tools.simulation.ray_workers import RayWorkers  # here, as it is a pack

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


def run_rounds(
    simulation: Simulation, run_requests: Callable[[Sequence[WorkRequest]], Iterable[WorkResult]]
) -> Iterator[Simulation]:
    """Run a simulation, and yield it before its first round, after each round, and at the end."""
    told = -1
    while True:
        orders = simulation.advance()
        if simulation.running is not None and told < len(simulation.rounds):
            told = len(simulation.rounds)
            began_s = time.perf_counter()
            yield simulation
            simulation.exclude_time(time.perf_counter() - began_s)
        if not orders:
            return
        for order, outcome in zip(orders, run_requests(orders), strict=True):
            simulation.deliver_outcome(order.device, outcome)


def iterate_states(
    job: JobSettings,
    folder: Path,
    members: Iterable[DeviceData],
    *,
    load: Callable[[str], Method] = methods.load,
    engine: Any = None,
    observe: Callable[[Simulation, WorkBackend], None] = lambda simulation, hands: None,
) -> Iterator[Any]:
    """Run a job here, and yield the method state before the first round and after each round."""
    carry, held = make_local_backend(members, load=load, engine=engine)
    with ScratchFolder() as home:
        name = None if engine is None else engine.name
        with Simulation(job, folder, held, home, load=load, engine=name) as simulation:
            for each in run_rounds(simulation, carry):
                observe(each, carry)
                yield each.state
            if simulation.status != "done":
                raise JobError(f"{simulation.run} has {simulation.final_status}: {simulation.reason}")


@dataclass(frozen=True)
class RunOutcomes:
    rounds: tuple[SimulatedRound, ...]
    artefact: Artefact
    start_s: float  # until the first round began
    wall_s: float  # of all, that included


def simulate(
    job: JobSettings,
    folder: Path,
    members: Iterable[DeviceData],
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    together: bool = False,
    test: Examples | None = None,
    heard: Callable[[RunningJob, AnyEvent], None] = lambda running, fact: None,
    observe: Callable[[Simulation, WorkBackend], None] = lambda simulation, hands: None,
    home: Path | None = None,
    away: Collection[str] = (),
) -> RunOutcomes:
    """Run a whole job on a pool of workers. Results are bit-identical for any number of workers.

    Args:
        job: Job with its fleet.
        folder: Folder of the bundle.
        members: Devices, iterated once. Examples of an iterator are never in memory all at once.
        workers: Number of workers, 0 to run the work in this process, or None for one per core.
        engine: "auto", "pool", "ray" or "ray://HOST:PORT".
        mixed: Permit machines that differ in processor, GPU and libraries.
        together: Train devices in one graph where the engine can, equal to the loop to float tolerance.
        test: Examples of `WorkBackend.evaluate_test_set`.
        heard: Function called with each event of the run.
        observe: Function called before the first round, after each round, and at the end.
        home: Folder of the run, which resumes there after an interruption, or None for a temporary folder.
        away: Devices that are offline at first.
    """
    began_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(ScratchFolder()) if home is None else home
        if workers == 0:
            carry, held = make_local_backend(members, together=together, test=test)
        else:
            modules = required_packages(job, job_bundle.load_bundle(folder))
            pool = open_pool_backend(
                job, members, workers=workers, engine=engine, mixed=mixed, modules=modules, together=together, test=test
            )
            carry, held = stack.enter_context(pool)
        simulation = stack.enter_context(Simulation(job, folder, held, place, heard=heard, away=away))
        simulation.set_prefetcher(carry.ahead)
        waited_s = time.perf_counter()
        carry.ready()  # workers have imported their engine while the run was taken up
        simulation.exclude_time(time.perf_counter() - waited_s)
        machines.record_machines(place, simulation.run, carry.machines, mixed=mixed)
        start_s = time.perf_counter() - began_s
        for each in run_rounds(simulation, carry):
            observe(each, carry)
        if simulation.status != "done":
            raise JobError(f"{simulation.run} has {simulation.final_status}: {simulation.reason}")
        assert simulation.running is not None
        artefact = simulation.running.method.result(simulation.state)
        return RunOutcomes(tuple(simulation.rounds), artefact, start_s, time.perf_counter() - began_s)
