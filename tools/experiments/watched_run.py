"""One job on a simulated fleet with a stored event log, as run by `fedquilt.simulate`.

Devices are trained one by one, so that each state is bit-identical to that of `fedquilt simulate` with the same job.
All else is as in the runs of a comparison.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from fedquilt import methods
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.settings import EvaluationSettings, JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import job_validation
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.terminal import VIRTUAL, Console
from fedquilt.core import FedquiltError
from fedquilt.tools.experiments.live_evaluation import EvaluationResult, LiveEvaluator
from fedquilt.tools.experiments.single_run import is_evaluation_due, load_devices
from fedquilt.tools.simulation import machines
from fedquilt.tools.simulation.agents import FleetPlan
from fedquilt.tools.simulation.run import simulate
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend

Watch = Callable[[Simulation], None]


def add_evaluation(job: JobSettings) -> JobSettings:
    """Return the job with an evaluation outside of each round if the job has no [check]."""
    if job.check.every or methods.load(job.method).check is None:
        return job
    return msgspec.structs.replace(job, check=EvaluationSettings(every=1, beside=True))


def run_job(
    job: JobSettings,
    folder: Path,
    home: Path,
    *,
    workers: int | None = 1,
    engine: str = "pool",
    mixed: bool = False,
    heard: Callable[[RunningJob, AnyEvent], None] = lambda running, fact: None,
    begun: Callable[[str], None] = lambda run: None,
    watch: Watch = lambda simulation: None,
) -> str:
    """Run a job to its end, or resume its unfinished run, and return the run id.

    With [check] beside = true, the model is evaluated on all held-out shares after every `check.every` rounds. With
    any [check], and after the last round, the model is evaluated on the test set if the job has one. Scores are
    stored next to the log (`fedquilt.coordinator.views.scores`).
    """
    made = FleetPlan(job, folder, home).validate_and_load_bundle()
    job_validation.create_initial_state(job, made)
    members, test = load_devices(job, folder)
    ran: list[Simulation] = []
    with LiveEvaluator(job, folder, test) as judge:

        def observe(simulation: Simulation, hands: WorkBackend) -> None:
            if not ran:
                ran.append(simulation)
                begun(simulation.run)
            if is_evaluation_due(simulation, job.check.every):
                _evaluate_and_store_once(
                    home, simulation, lambda: judge.evaluate(simulation, hands, shares=job.check.beside)
                )
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


def run_and_print(
    plan: FleetPlan, *, workers: int | None, engine: str, mixed: bool, wordy: bool = False
) -> tuple[str, str]:
    """Run the job of a plan, and print its rounds. Return the run id and its final status."""
    job = msgspec.structs.replace(plan.job, fleet=msgspec.structs.replace(plan.job.fleet, devices=plan.size))
    seen: list[Simulation] = []
    runs: list[str] = []
    console = Console(wordy=wordy, clock=lambda: seen[-1].now_s if seen else 0.0, stamp=VIRTUAL.format)

    def print_machines(run: str) -> None:
        runs.append(run)
        for line in machines.format_machines(machines.read_machines(plan.home, run)):
            console.report(f"{run} on {line}")

    try:
        run = run_job(
            job,
            plan.bundle,
            plan.home,
            workers=workers,
            engine=engine,
            mixed=mixed,
            heard=console.observe,
            begun=print_machines,
            watch=seen.append,
        )
    except FedquiltError:
        with Store(plan.home, durable=False) as store:
            ended = store.stored_status(runs[0]) if runs else "running"
        if ended not in ("failed", "stopped"):
            raise
        return runs[0], ended
    finally:
        console.close()
    return run, "done"


def _evaluate_and_store_once(home: Path, simulation: Simulation, look: Callable[[], EvaluationResult]) -> None:
    with Store(home, durable=False) as store:
        row = store.find_job(simulation.run)
    found = scores.read_scores(home, row)
    if simulation.completed_rounds in {*(each.rounds for each in found.scores), *(each.rounds for each in found.held)}:
        return
    verdict = look()
    test = (*found.scores, verdict.test) if verdict.test else found.scores
    held = (*found.held, verdict.held) if verdict.held else found.held
    devices = dict(verdict.devices) or found.devices
    scores.write_scores(scores.scores_path(home, row.id), scores.RunScores(found.test, test, held, devices))
