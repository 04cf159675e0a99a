"""A whole job on a simulated fleet, kept in a coordinator's home: what `fedquilt.simulate` does.

The same executor, members, boards and submission checks as a comparison's runs, with one difference: devices are
trained one by one, so that every state is, bit for bit, that of `fedquilt fleet` with the same job.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from fedquilt import methods
from fedquilt.coordinator import preflight
from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.settings import Check, Job
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.terminal import Console
from fedquilt.core import FedquiltError
from fedquilt.tools.experiments.beside import Judge, Verdict
from fedquilt.tools.experiments.single_run import due, shares
from fedquilt.tools.simulation import machines
from fedquilt.tools.simulation.agents import Plan
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.run import simulate
from fedquilt.tools.simulation.simulated_job import Simulation

Watch = Callable[[Simulation], None]


def evaluated(job: Job) -> Job:
    """The job as it is simulated: one without a [check] is evaluated beside its rounds, every round."""
    if job.check.every or methods.load(job.method).check is None:
        return job
    return msgspec.structs.replace(job, check=Check(every=1, beside=True))


def play(
    job: Job,
    folder: Path,
    home: Path,
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    heard: Callable[[Running, AnyFact], None] = lambda running, fact: None,
    begun: Callable[[str], None] = lambda run: None,
    watch: Watch = lambda simulation: None,
) -> str:
    """Run a job to its end, or continue its unfinished run in that home; returns the run's id.

    With [check] beside = true, the global model is evaluated after every `check.every` rounds on all devices' held-out
    shares; with any [check], and after the last round, on the test set if the job has one. Neither costs a device
    anything. The results are beside the log (`fedquilt.coordinator.views.scores`).

    Args:
        job: with data and a fleet.
        folder: the job's bundle.
        home: folder of the run.
        workers: processes; None: one for each core, of this machine or of the Ray cluster.
        engine: "auto", "pool", "ray" or "ray://HOST:PORT".
        mixed: permit machines that differ in processor, GPU and libraries.
        heard: called with each fact of the run.
        begun: called with the run's id before its first round.
        watch: called before the first round, after each, and at the end.

    Raises:
        FedquiltError: the job does not fit its bundle, data or fleet, or the run has failed; gives the reason.
    """
    made = Plan(job, folder, home).require()
    preflight.first_state(job, made)
    members, test = shares(job, folder)
    ran: list[Simulation] = []
    with Judge(job, folder, test) as judge:

        def observe(simulation: Simulation, hands: Hands) -> None:
            if not ran:
                ran.append(simulation)
                begun(simulation.run)
            if due(simulation, job.check.every):
                _keep(home, simulation, lambda: judge.look(simulation, hands, shares=job.check.beside))
            watch(simulation)

        simulate(
            job,
            folder,
            members,
            workers=workers,
            engine=engine,
            mixed=mixed,
            test=test,
            heard=heard,
            observe=observe,
            home=home,
        )
    for each in ran:
        shutil.rmtree(each.devices, ignore_errors=True)
    return ran[0].run


def told(plan: Plan, *, workers: int | None, engine: str, mixed: bool, wordy: bool = False) -> tuple[str, str]:
    """Run a plan's job as it is, and print its rounds and what computes them. Returns (run, how it ended).

    Args:
        plan: of the fleet.
        workers: as of `play`.
        engine: as of `play`.
        mixed: as of `play`.
        wordy: print every fact.

    Raises:
        FedquiltError: as `play`, but for a run that has failed or was stopped.
    """
    job = msgspec.structs.replace(plan.job, fleet=msgspec.structs.replace(plan.job.fleet, devices=plan.size))
    seen: list[Simulation] = []
    runs: list[str] = []
    console = Console(wordy=wordy, clock=lambda: seen[-1].now_s if seen else 0.0)

    def begun(run: str) -> None:
        runs.append(run)
        for line in machines.lines(machines.read(plan.home, run)):
            console.say(f"{run} on {line}")

    try:
        run = play(
            job,
            plan.bundle,
            plan.home,
            workers=workers,
            engine=engine,
            mixed=mixed,
            heard=console.observe,
            begun=begun,
            watch=seen.append,
        )
    except FedquiltError:
        with Store(plan.home, durable=False) as store:
            ended = store.status(runs[0]) if runs else "running"
        if ended not in ("failed", "stopped"):
            raise
        return runs[0], ended
    return run, "done"


def _keep(home: Path, simulation: Simulation, look: Callable[[], Verdict]) -> None:
    """Evaluate a state and write what is found, unless that has been done."""
    with Store(home, durable=False) as store:
        row = store.job(simulation.run)
    found = scores.read(home, row)
    if simulation.done in {*(each.rounds for each in found.scores), *(each.rounds for each in found.held)}:
        return
    verdict = look()
    test = (*found.scores, verdict.test) if verdict.test else found.scores
    held = (*found.held, verdict.held) if verdict.held else found.held
    devices = dict(verdict.devices) or found.devices
    scores.write(scores.file(home, row.id), scores.Scores(found.test, test, held, devices))
