"""Run of a job on a simulated fleet: for a comparison (`run_seed`), or with an event log (`run_job`)."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.settings import EvaluationSettings, JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.terminal import VIRTUAL_FORMAT, Console
from fedquilt.core import DataError, Examples, FedquiltError, JobError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.experiments import evaluation
from fedquilt.tools.experiments.evaluation import EvaluationResult, LiveEvaluator
from fedquilt.tools.simulation import DeviceData, machines
from fedquilt.tools.simulation.agents import FleetPlan
from fedquilt.tools.simulation.run import WorkBackend, simulate
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation

FORMAT = 2  # version of finished runs on disk
ObserveRun = Callable[[Simulation, WorkBackend], Mapping[str, Any]]


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics of a run after some rounds, with costs since its start. None means unknown."""

    rounds: int
    test: float | None  # the main metric on the test set: accuracy, 0..1, unless the task has another
    held: float | None  # on all held-out shares together
    mean: float | None  # mean of the devices' values on their held-out shares
    worst_decile: float | None
    with_priors: float | None = None  # like `held`, with the devices' class priors
    seconds: float | None  # on the simulated boards, from each round's opening to its end
    real_s: float  # on this machine, without evaluation
    down_bytes: int
    up_bytes: int
    energy_j: float | None  # of all tasks, also of those without an update
    metric: str = "accuracy"  # a key of `fedquilt.metrics.METRICS`

    @property
    def value(self) -> float | None:
        """Main metric on the test set, or else on the held-out shares."""
        return self.held if self.test is None else self.test

    @property
    def prior_gain(self) -> float | None:
        return None if self.with_priors is None or self.held is None else self.with_priors - self.held


class SeedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: str
    seed: int
    params: dict[str, Any]
    devices: int
    tested: int  # examples of the test set, or 0 without a test set
    marks: tuple[EvaluationPoint, ...]
    refusals: dict[str, str] = {}  # device -> reason why it missed a round
    figures: dict[str, Any] = {}  # further values for a table of `fedquilt lab reproduce`
    format: int = FORMAT


def run_seed(
    job: JobSettings,
    folder: Path,
    report_round: Callable[[int], None],
    workers: int | None = 1,
    *,
    engine: str = "pool",
    mixed: bool = False,
    select_members: Callable[[list[DeviceData]], list[DeviceData]] = lambda members: members,
    offline_count: int = 0,
    batch_devices: bool = True,
    evaluate_first: bool = False,
    tested: bool = True,
    observe_run: ObserveRun = lambda simulation, backend: {},
) -> SeedRun:
    """Run a job with one seed, and evaluate its model outside of the rounds.

    The model is evaluated every `check.every` rounds and after the last round, and with `evaluate_first` also before
    the first round: on all held-out shares and, with `tested`, on the test set. The last `offline_count` devices start
    offline. `observe_run` is called before the first round, after each round and at the end. It may bring devices
    online, and returns `SeedRun.figures`. Raise JobError if the run fails.
    """
    members, test = load_devices(job, folder)
    members, test = select_members(members), test if tested else None
    marks: list[EvaluationPoint] = []
    costs = _CumulativeCost()
    every = job.check.every
    refusals: dict[str, str] = {}
    figures: dict[str, Any] = {}
    with LiveEvaluator(job, folder, test) as judge:

        def observe(simulation: Simulation, backend: WorkBackend) -> None:
            costs.add_rounds(simulation.rounds[costs.rounds :])
            rounds_done = simulation.completed_rounds
            if evaluate_first and not rounds_done and not marks and simulation.can_evaluate:
                marks.append(costs.make_evaluation_point(simulation, judge.evaluate(simulation, backend, shares=False)))
            if is_evaluation_due(simulation, every) and (not marks or marks[-1].rounds < rounds_done):
                marks.append(
                    costs.make_evaluation_point(simulation, judge.evaluate(simulation, backend, shares=bool(every)))
                )
            refusals.update(simulation.decline_reasons)
            figures.update(observe_run(simulation, backend))
            report_round(rounds_done)

        # [stop] patience counts evaluations in the log, which evaluations outside of rounds are not
        stops = job.stop.patience is not None
        checked = job if stops else msgspec.structs.replace(job, check=EvaluationSettings(every=every, beside=True))
        offline_devices = [member.device for member in members[len(members) - offline_count :]]
        simulate(
            checked,
            folder,
            members,
            workers=workers,
            engine=engine,
            mixed=mixed,
            batched=batch_devices,
            test=test,
            observe=observe,
            offline=offline_devices,
        )
    return SeedRun(
        method=job.method,
        seed=job.seed,
        params=job.params,
        devices=len(members),
        tested=len(test) if test is not None else 0,
        marks=tuple(marks),
        refusals=refusals,
        figures=figures,
    )


def is_evaluation_due(simulation: Simulation, every: int) -> bool:
    """Return whether an evaluation is due: after each `every` rounds (0 for none), and at the end."""
    is_last = simulation.is_finished or simulation.has_ended
    return bool(
        simulation.completed_rounds
        and simulation.can_evaluate
        and (is_last or (every and simulation.completed_rounds % every == 0))
    )


def load_devices(job: JobSettings, folder: Path) -> tuple[list[DeviceData], Examples | None]:
    """Return a job's devices with their examples, and the test set, or None if the data have none."""
    agents = FleetPlan(job, folder, Path()).make_agent_tables()
    split = examples.load_all_shares(DataSpec.parse(agents[0]["data"]))
    members = [DeviceData(agent["device"], *share) for agent, share in zip(agents, split, strict=True)]
    try:
        return members, evaluation.load_test_set(job)
    except (DataError, JobError):
        if job.test:
            raise
        return members, None


@dataclasses.dataclass
class _CumulativeCost:
    rounds: int = 0
    seconds: float | None = 0.0
    real_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    energy_j: float | None = 0.0

    def add_rounds(self, rounds: Sequence[SimulatedRound]) -> None:
        for round in rounds:
            self.rounds += 1
            self.seconds = _add_known(self.seconds, round.duration_s)
            self.energy_j = _add_known(self.energy_j, round.energy_j)
            self.real_s += round.wall_s
            self.down_bytes += round.down_bytes
            self.up_bytes += round.up_bytes

    def make_evaluation_point(self, simulation: Simulation, result: EvaluationResult) -> EvaluationPoint:
        held = result.held
        metric_source = result.test or held
        return EvaluationPoint(
            test=None if result.test is None else result.test.value,
            metric="accuracy" if metric_source is None else metric_source.metric,
            held=None if held is None else held.weighted,
            mean=None if held is None else held.mean,
            worst_decile=None if held is None else held.worst_decile,
            with_priors=None if held is None else held.with_priors,
            rounds=simulation.completed_rounds,
            seconds=self.seconds,
            real_s=self.real_s,
            down_bytes=self.down_bytes,
            up_bytes=self.up_bytes,
            energy_j=_add_known(self.energy_j, simulation.fleet.wasted_j),
        )


def _add_known(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value


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
    on_event: Callable[[RunningJob, AnyEvent], None] = lambda running, event: None,
    on_start: Callable[[str], None] = lambda run: None,
    on_round: Watch = lambda simulation: None,
) -> str:
    """Run a job to its end, or resume its unfinished run, and return the run id.

    Devices are trained one by one, so each state is bit-identical to that of `fedquilt simulate` with the same job.
    With [check] beside = true, the model is evaluated on all held-out shares after every `check.every` rounds. With
    any [check], and after the last round, the model is evaluated on the test set if the job has one. Scores are
    stored next to the log (`fedquilt.coordinator.views.scores`).
    """
    bundle = FleetPlan(job, folder, home).validate_and_load_bundle()
    settings.create_initial_state(job, bundle)
    members, test = load_devices(job, folder)
    simulations: list[Simulation] = []
    with LiveEvaluator(job, folder, test) as judge:

        def observe(simulation: Simulation, backend: WorkBackend) -> None:
            if not simulations:
                simulations.append(simulation)
                on_start(simulation.run)
            if is_evaluation_due(simulation, job.check.every):
                _evaluate_and_store_once(
                    home, simulation, lambda: judge.evaluate(simulation, backend, shares=job.check.beside)
                )
            on_round(simulation)

        simulate(
            job,
            folder,
            members,
            workers=workers,
            engine=engine,
            mixed=mixed,
            test=test,
            on_event=on_event,
            observe=observe,
            home=home,
        )
    for simulation in simulations:
        shutil.rmtree(simulation.devices_folder, ignore_errors=True)
    return simulations[0].run


def run_and_print(
    plan: FleetPlan, *, workers: int | None, engine: str, mixed: bool, verbose: bool = False
) -> tuple[str, str]:
    """Run the job of a plan, and print its rounds. Return the run id and its final status."""
    job = msgspec.structs.replace(plan.job, fleet=msgspec.structs.replace(plan.job.fleet, devices=plan.size))
    simulations: list[Simulation] = []
    runs: list[str] = []
    console = Console(
        verbose=verbose, clock=lambda: simulations[-1].now_s if simulations else 0.0, stamp=VIRTUAL_FORMAT.format
    )

    def print_machines(run: str) -> None:
        runs.append(run)
        for line in machines.format_machines(machines.read_machines(plan.home, run)):
            console.report(f"{run} on {line}")

    with Store(plan.home, durable=False) as store:
        if (unfinished := store.find_unfinished(job, plan.bundle.resolve(), "simulation")) is not None:
            console.report(plan.describe_start(store, unfinished))
    try:
        run = run_job(
            job,
            plan.bundle,
            plan.home,
            workers=workers,
            engine=engine,
            mixed=mixed,
            on_event=console.observe,
            on_start=print_machines,
            on_round=simulations.append,
        )
    except FedquiltError:
        with Store(plan.home, durable=False) as store:
            status = store.stored_status(runs[0]) if runs else "running"
        if status not in ("failed", "stopped"):
            raise
        return runs[0], status
    finally:
        console.close()
    return run, "done"


def _evaluate_and_store_once(home: Path, simulation: Simulation, evaluate: Callable[[], EvaluationResult]) -> None:
    with Store(home, durable=False) as store:
        row = store.find_job(simulation.run)
    stored = scores.read_scores(home, row)
    if simulation.completed_rounds in {
        *(score.rounds for score in stored.scores),
        *(score.rounds for score in stored.held),
    }:
        return
    result = evaluate()
    is_whole = not evaluation.find_untrained_tensors(row.job.method, simulation.state)
    test = (*stored.scores, result.test) if result.test and is_whole else stored.scores
    held = (*stored.held, result.held) if result.held else stored.held
    devices = dict(result.devices) or stored.devices
    scores.write_scores(scores.scores_path(home, row.id), scores.RunScores(stored.test, test, held, devices))
