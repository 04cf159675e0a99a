"""Run simulated jobs: several abreast (`play`), one state after another (`states`), or a whole run (`simulate`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt import bundle, methods
from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.preflight import needs
from fedquilt.coordinator.settings import Job
from fedquilt.core import Artefact, Examples, JobError, Method
from fedquilt.edge_agent.task.protocol import Order
from fedquilt.tools.simulation import Member, machines
from fedquilt.tools.simulation.carriers import Carry, Hands, by_pool, in_process
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import Round, Simulation


def play(simulations: Sequence[Simulation], carry: Carry) -> Iterator[Simulation]:
    """Go on with all, abreast. Yields a simulation before its first round, after each, and when it has ended.

    Raises:
        FedquiltError: what `carry` raises.
    """
    told = dict.fromkeys(range(len(simulations)), -1)
    while True:
        asked: list[tuple[Simulation, Order]] = []
        for index, each in enumerate(simulations):
            orders = each.advance()
            asked += [(each, order) for order in orders]
            if each.running is not None and told[index] < len(each.rounds):
                told[index] = len(each.rounds)
                began_s = time.perf_counter()
                yield each
                each.paused(time.perf_counter() - began_s)
        if not asked:
            return
        for (each, order), outcome in zip(asked, carry(asked), strict=True):
            each.worked(order.device, outcome)


def states(
    job: Job,
    folder: Path,
    members: Iterable[Member],
    *,
    load: Callable[[str], Method] = methods.load,
    engine: Any = None,
    observe: Callable[[Simulation, Hands], None] = lambda simulation, hands: None,
) -> Iterator[Any]:
    """The method's state before the first round and after each, of a run in this process.

    Raises:
        JobError: the run has failed; says why.
    """
    carry, held = in_process(members, load=load, engine=engine)
    with Scratch() as home:
        name = None if engine is None else engine.name
        with Simulation(job, folder, held, home, load=load, engine=name) as simulation:
            for each in play([simulation], carry):
                observe(each, carry)
                yield each.state
            if simulation.status != "done":
                raise JobError(f"{simulation.run} has {simulation.ended}: {simulation.reason}")


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a run."""

    rounds: tuple[Round, ...]
    artefact: Artefact
    start_s: float  # until the first round began
    wall_s: float  # of all, that included


def simulate(
    job: Job,
    folder: Path,
    members: Iterable[Member],
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    together: bool = False,
    test: Examples | None = None,
    heard: Callable[[Running, AnyFact], None] = lambda running, fact: None,
    observe: Callable[[Simulation, Hands], None] = lambda simulation, hands: None,
    home: Path | None = None,
    away: Collection[str] = (),
) -> Outcomes:
    """Run a whole job on a pool of workers. The same bits for any number of workers.

    Args:
        job: with its fleet.
        folder: its bundle.
        workers: processes of the pool; 0: this process carries the devices' work out; None: one for each
            core, of this machine or of the Ray cluster.
        engine: "auto", "pool", "ray" or "ray://HOST:PORT".
        mixed: permit machines that differ in processor, GPU and libraries: of one cluster, or of an interrupted run
            and of what goes on with it.
        members: iterated once: examples made by an iterator are never in memory all at once.
        together: train devices in one graph where the engine can: faster for small networks, and equal to the
            loop to float tolerance, not to the bit.
        test: examples of `Hands.test`.
        heard: called with each fact of the run.
        observe: called before the first round, after each, and at the end.
        home: folder that keeps the run, which continues there if interrupted; None: not kept.
        away: members that are not online at first.

    Raises:
        JobError: the run has failed; gives the reason. Or machines differ.
        PoolError: a worker has ended, or no cluster is reached.
    """
    began_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(Scratch()) if home is None else home
        if workers == 0:
            carry, held = in_process(members, together=together, test=test)
        else:
            modules = needs(job, bundle.load(folder))
            pool = by_pool(
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
        simulation.look_ahead(carry.ahead)
        waited_s = time.perf_counter()
        carry.ready()  # workers have imported their engine while the run was taken up
        simulation.paused(time.perf_counter() - waited_s)
        machines.keep(place, simulation.run, carry.machines, mixed=mixed)
        start_s = time.perf_counter() - began_s
        for each in play([simulation], carry):
            observe(each, carry)
        if simulation.status != "done":
            raise JobError(f"{simulation.run} has {simulation.ended}: {simulation.reason}")
        assert simulation.running is not None
        artefact = simulation.running.method.result(simulation.state)
        return Outcomes(tuple(simulation.rounds), artefact, start_s, time.perf_counter() - began_s)
