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
        run_requests: Callable[[Sequence[WorkRequest]], Iterable[WorkResult]],
        held_out_counts: Mapping[str, int],
        pool: WorkerPool | None = None,
        wait_until_ready: Callable[[], None] = lambda: None,
        machines: Mapping[str, Machine] = {},
    ) -> None:
        self._run_requests, self._held_out_counts = run_requests, held_out_counts
        self.pool, self.wait_until_ready, self.machines = pool, wait_until_ready, machines

    def __call__(self, requests: Sequence[WorkRequest]) -> Iterable[WorkResult]:
        return self._run_requests(requests)

    def evaluate(self, simulation: Simulation, devices: Iterable[str] = ()) -> dict[str, EvaluationSums]:
        """Evaluate the model on the held-out examples of devices, by default of all that have any.

        Devices that have no model yet are missing in the result. Raise JobError if an evaluation fails.
        """
        names = list(devices) or sorted(name for name in simulation.held_out_counts if self._held_out_counts.get(name))
        requests = [r for name in names if (r := simulation.make_evaluation_request(name)) is not None]
        sums_by_device = {}
        for request, result in zip(requests, self._run_requests(requests), strict=True):
            if result.code != "ok":
                raise JobError(f"the evaluation on {request.device} failed ({result.code}): {result.reason}")
            if result.evaluation is not None:
                sums_by_device[request.device] = result.evaluation
        return sums_by_device

    def evaluate_test_set(self, simulation: Simulation) -> EvaluationSums | None:
        """Evaluate on the test set, or return None if the method has nothing to evaluate yet."""
        return self.evaluate(simulation, [NEWCOMER]).get(NEWCOMER)


@contextlib.contextmanager
def open_pool_backend(
    job: JobSettings,
    devices: Iterable[DeviceData],
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    modules: Collection[str] = (),
    batched: bool = False,
    test: Examples | None = None,
) -> Iterator[tuple[WorkBackend, dict[str, int]]]:
    """Start a pool and return its backend, and the number of held-out examples of each device.

    The pool ends with the context.
    """
    test_devices = () if test is None else (_test_set_device(test),)
    training_engine, worker_engine = choose_job_engine(job, methods.load(job.method)), choose_engine(engine, os.environ)
    workers_group: WorkerGroup
    if worker_engine == "pool":
        count = len(os.sched_getaffinity(0)) if workers is None else workers
        workers_group = ProcessWorkers(training_engine, count, modules)
    else:
        from fedquilt.tools.simulation.ray_workers import RayWorkers  # optional package

        workers_group = RayWorkers(training_engine, worker_engine, count=workers, mixed=mixed, modules=modules)
    with WorkerPool(workers_group, itertools.chain(devices, test_devices), batched=batched) as pool:
        held_out_counts = {name: count for name, count in pool.held_out_counts.items() if name != NEWCOMER}

        def run_on_pool(requests: Sequence[WorkRequest]) -> Iterator[WorkResult]:
            return (outcome for _, outcome in pool.run_requests(requests))

        backend = WorkBackend(run_on_pool, held_out_counts, pool, pool.wait_until_ready, workers_group.machines)
        yield backend, held_out_counts


def make_local_backend(
    devices: Iterable[DeviceData],
    *,
    load_method: Callable[[str], Method] = methods.load,
    engine: Any = None,
    batched: bool = False,
    test: Examples | None = None,
) -> tuple[WorkBackend, dict[str, int]]:
    """Return a backend in this process, and the number of held-out examples of each device."""
    devices_by_name = {member.device: member for member in devices}
    held_out_counts = {name: len(member.held_out) for name, member in devices_by_name.items()}
    if test is not None:
        devices_by_name[NEWCOMER] = _test_set_device(test)

    def load_shard(device: str) -> tuple[Examples, Examples]:
        return devices_by_name[device].train, devices_by_name[device].held_out

    if engine is None:
        create_engine = local_backend.make_engine if batched else engines.create_engine
        executor = local_backend.WorkExecutor(load_shard, load_method, create_engine)
    else:
        executor = local_backend.SingleEngineExecutor(load_shard, load_method, engine)

    def run_here(requests: Sequence[WorkRequest]) -> list[WorkResult]:
        pairs = [(executor, request) for request in requests]
        return [outcome for outcome, _ in local_backend.run_requests(pairs, batched)]

    this_machine = {machines.get_machine_name(): machines.describe_this_machine()}
    return WorkBackend(run_here, held_out_counts, machines=this_machine), held_out_counts


def _test_set_device(test: Examples) -> DeviceData:
    return DeviceData(NEWCOMER, Examples(test.x[:0], test.y[:0]), test)


def run_rounds(
    simulation: Simulation, run_requests: Callable[[Sequence[WorkRequest]], Iterable[WorkResult]]
) -> Iterator[Simulation]:
    """Run a simulation, and yield the simulation before the first round, after each round, and at the end."""
    reported_rounds = -1
    while True:
        requests = simulation.advance()
        if simulation.running is not None and reported_rounds < len(simulation.rounds):
            reported_rounds = len(simulation.rounds)
            started_s = time.perf_counter()
            yield simulation
            simulation.exclude_time(time.perf_counter() - started_s)
        if not requests:
            return
        for request, result in zip(requests, run_requests(requests), strict=True):
            simulation.deliver_outcome(request.device, result)


def iterate_states(
    job: JobSettings,
    folder: Path,
    devices: Iterable[DeviceData],
    *,
    load_method: Callable[[str], Method] = methods.load,
    engine: Any = None,
    observe: Callable[[Simulation, WorkBackend], None] = lambda simulation, backend: None,
) -> Iterator[Any]:
    """Run a job in this process, and yield the method state before the first round and after each round.

    Raise JobError if the run fails.
    """
    backend, held_out_counts = make_local_backend(devices, load_method=load_method, engine=engine)
    with ScratchFolder() as home:
        name = None if engine is None else engine.name
        with Simulation(job, folder, held_out_counts, home, load_method=load_method, engine=name) as simulation:
            for current in run_rounds(simulation, backend):
                observe(current, backend)
                yield current.state
            if simulation.status != "done":
                raise JobError(f"{simulation.run} has {simulation.final_status}: {simulation.reason}")


@dataclass(frozen=True)
class RunOutcomes:
    rounds: tuple[SimulatedRound, ...]
    artefact: Artefact
    start_s: float  # until the first round started
    wall_s: float  # of the whole run, with `start_s`


def simulate(
    job: JobSettings,
    folder: Path,
    devices: Iterable[DeviceData],
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    batched: bool = False,
    test: Examples | None = None,
    on_event: Callable[[RunningJob, AnyEvent], None] = lambda running, fact: None,
    observe: Callable[[Simulation, WorkBackend], None] = lambda simulation, backend: None,
    home: Path | None = None,
    offline: Collection[str] = (),
) -> RunOutcomes:
    """Run a whole job on a pool of workers. Results are bit-identical for any number of workers.

    Args:
        job: Job with its fleet.
        folder: Folder of the bundle.
        devices: Devices, iterated once. Examples of an iterator are never in memory all at once.
        workers: Number of workers, 0 to run the work in this process, or None for one per core.
        engine: "auto", "pool", "ray" or "ray://HOST:PORT".
        mixed: Permit machines that differ in processor, GPU and libraries.
        batched: Train devices in one graph where the engine can, equal to the loop to float tolerance.
        test: Examples of `WorkBackend.evaluate_test_set`.
        on_event: Function called with each event of the run.
        observe: Function called before the first round, after each round, and at the end.
        home: Folder of the run, which resumes there after an interruption, or None for a temporary folder.
        offline: Devices that are offline at first.

    Raises:
        JobError: If the run fails, or does not fit this machine or its engines.
    """
    started_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        run_folder = stack.enter_context(ScratchFolder()) if home is None else home
        if workers == 0:
            backend, held_out_counts = make_local_backend(devices, batched=batched, test=test)
        else:
            modules = required_packages(job, job_bundle.load_bundle(folder))
            pool = open_pool_backend(
                job, devices, workers=workers, engine=engine, mixed=mixed, modules=modules, batched=batched, test=test
            )
            backend, held_out_counts = stack.enter_context(pool)
        simulation = stack.enter_context(
            Simulation(job, folder, held_out_counts, run_folder, on_event=on_event, offline=offline)
        )
        simulation.set_prefetcher(backend.pool)
        wait_started_s = time.perf_counter()
        backend.wait_until_ready()  # workers import their engine while the simulation is created
        simulation.exclude_time(time.perf_counter() - wait_started_s)
        machines.record_machines(run_folder, simulation.run, backend.machines, mixed=mixed)
        start_s = time.perf_counter() - started_s
        for current in run_rounds(simulation, backend):
            observe(current, backend)
        if simulation.status != "done":
            raise JobError(f"{simulation.run} has {simulation.final_status}: {simulation.reason}")
        assert simulation.running is not None
        artefact = simulation.running.method.result(simulation.state)
        return RunOutcomes(tuple(simulation.rounds), artefact, start_s, time.perf_counter() - started_s)
