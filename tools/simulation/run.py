"""Loops that drive simulated jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt import methods
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.updates.job_validation import required_packages
from fedquilt.core import Artefact, Examples, JobError, Method
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.formats import job_bundle
from fedquilt.tools.simulation import DeviceData, machines
from fedquilt.tools.simulation.scratch_folders import ScratchFolder
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation
from fedquilt.tools.simulation.workers.backend import Carry, WorkBackend, make_local_backend, open_pool_backend


def run_rounds(simulations: Sequence[Simulation], carry: Carry) -> Iterator[Simulation]:
    """Run simulations side by side, and yield each before its first round and after all rounds."""
    told = dict.fromkeys(range(len(simulations)), -1)
    while True:
        asked: list[tuple[Simulation, WorkRequest]] = []
        for index, each in enumerate(simulations):
            orders = each.advance()
            asked += [(each, order) for order in orders]
            if each.running is not None and told[index] < len(each.rounds):
                told[index] = len(each.rounds)
                began_s = time.perf_counter()
                yield each
                each.exclude_time(time.perf_counter() - began_s)
        if not asked:
            return
        for (each, order), outcome in zip(asked, carry(asked), strict=True):
            each.deliver_outcome(order.device, outcome)


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
            for each in run_rounds([simulation], carry):
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
        together: Train devices in one graph where the engine can. Faster for small networks, and equal to the loop to
            float tolerance, not bit-identical.
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
                job,
                members,
                workers=workers,
                engine=engine,
                mixed=mixed,
                modules=modules,
                together=together,
                test=test,
            )
            carry, held = stack.enter_context(pool)
        simulation = stack.enter_context(Simulation(job, folder, held, place, heard=heard, away=away))
        simulation.set_prefetcher(carry.ahead)
        waited_s = time.perf_counter()
        carry.ready()  # workers have imported their engine while the run was taken up
        simulation.exclude_time(time.perf_counter() - waited_s)
        machines.record_machines(place, simulation.run, carry.machines, mixed=mixed)
        start_s = time.perf_counter() - began_s
        for each in run_rounds([simulation], carry):
            observe(each, carry)
        if simulation.status != "done":
            raise JobError(f"{simulation.run} has {simulation.final_status}: {simulation.reason}")
        assert simulation.running is not None
        artefact = simulation.running.method.result(simulation.state)
        return RunOutcomes(tuple(simulation.rounds), artefact, start_s, time.perf_counter() - began_s)
