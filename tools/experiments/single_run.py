"""One run of a comparison: a method with a seed on a simulated fleet, and what it had come to after its rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.coordinator.settings import Check, Job
from fedquilt.core import DataError, Examples, JobError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.experiments import evaluate
from fedquilt.tools.experiments.beside import Judge, Verdict
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.agents import Plan
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.run import simulate
from fedquilt.tools.simulation.simulated_job import Round, Simulation

FORMAT = 2  # of a finished run on disk
Look = Callable[[Simulation, Hands], Mapping[str, Any]]


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stood after so many rounds. Costs are of all of them; None: not known."""

    rounds: int
    test: float | None  # the main metric on the test set: accuracy, 0..1, unless the task has another
    held: float | None  # on all held-out shares together
    mean: float | None  # likewise, of devices
    worst_decile: float | None
    seconds: float | None  # on the simulated boards, from each round's opening to its end
    real_s: float  # on this machine, evaluation aside
    down_bytes: int
    up_bytes: int
    energy_j: float | None
    metric: str = "accuracy"  # a key of `fedquilt.metrics.KNOWN`

    @property
    def value(self) -> float | None:
        """The main metric on the test set, or where there is none on held-out shares."""
        return self.held if self.test is None else self.test


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method with one seed."""

    method: str
    seed: int
    params: dict[str, Any]
    devices: int
    tested: int  # examples of the test set; 0: there is none
    marks: tuple[Mark, ...]
    refusals: dict[str, str] = {}  # device -> why it did not take part in some round
    figures: dict[str, Any] = {}  # what a table of `fedquilt reproduce` reads from the run besides
    format: int = FORMAT


def play(
    job: Job,
    folder: Path,
    tell: Callable[[int], None],
    workers: int | None = 1,
    *,
    engine: str = "pool",
    mixed: bool = False,
    pick: Callable[[list[Member]], list[Member]] = lambda members: members,
    away: int = 0,
    together: bool = True,
    first: bool = False,
    tested: bool = True,
    look: Look = lambda simulation, hands: {},
) -> Run:
    """Make one run.

    The global model is evaluated beside the rounds, every `check.every` of them and after the last: on all devices'
    held-out shares and on the test set.

    Args:
        job: with the run's method and seed.
        folder: its bundle.
        tell: called with the number of finished rounds.
        workers: processes that carry the devices' work out; 0: this one does; None: one for each core, of this
            machine or of the Ray cluster.
        engine: "auto", "pool", "ray" or "ray://HOST:PORT".
        mixed: permit a Ray cluster's nodes to differ in processor, GPU and libraries.
        pick: chooses among the devices of the job those that take part.
        away: so many of these, the last ones, are not online at first; `look` may let them come.
        together: train small networks' devices in one graph, which equals training one by one to float tolerance.
        first: evaluate on the test set before the first round too.
        tested: evaluate on the test set at all.
        look: told before the first round, after each and at the end; what it returns is kept in `Run.figures`.

    Raises:
        FedquiltError: an error of its data, its bundle or the run, which has failed.
    """
    members, test = shares(job, folder)
    members, test = pick(members), test if tested else None
    marks: list[Mark] = []
    spent = _Spent()
    every = job.check.every
    refusals: dict[str, str] = {}
    figures: dict[str, Any] = {}
    with Judge(job, folder, test) as judge:

        def observe(simulation: Simulation, hands: Hands) -> None:
            spent.add(simulation.rounds[spent.rounds :])
            done = simulation.done
            if first and not done and not marks and simulation.ready:
                marks.append(spent.mark(0, judge.look(simulation, hands, shares=False)))
            if due(simulation, every) and (not marks or marks[-1].rounds < done):
                marks.append(spent.mark(done, judge.look(simulation, hands, shares=bool(every))))
            refusals.update(simulation.refusals)
            figures.update(look(simulation, hands))
            tell(done)

        beside = msgspec.structs.replace(job, check=Check(every=every, beside=True))
        absent = [member.device for member in members[len(members) - away :]]
        simulate(
            beside,
            folder,
            members,
            workers=workers,
            engine=engine,
            mixed=mixed,
            together=together,
            test=test,
            observe=observe,
            away=absent,
        )
    return Run(
        method=job.method,
        seed=job.seed,
        params=job.params,
        devices=len(members),
        tested=len(test) if test is not None else 0,
        marks=tuple(marks),
        refusals=refusals,
        figures=figures,
    )


def due(simulation: Simulation, every: int) -> bool:
    """Whether the state is to be evaluated now: after `every` so many rounds, and after the last; 0: then only."""
    last = simulation.finished or simulation.over
    return bool(simulation.done and simulation.ready and (last or (every and simulation.done % every == 0)))


def shares(job: Job, folder: Path) -> tuple[list[Member], Examples | None]:
    """What each device has, and the test set; None: the job names none and its [data] has no split "test".

    Raises:
        DataError: it cannot be read.
    """
    agents = Plan(job, folder, Path()).agents()
    split = examples.load_shares(DataSpec.parse(agents[0]["data"]))
    members = [Member(agent["device"], *share) for agent, share in zip(agents, split, strict=True)]
    try:
        return members, evaluate.test_set(job)
    except (DataError, JobError):
        if job.test:
            raise
        return members, None


@dataclasses.dataclass
class _Spent:
    """Cost of the rounds so far."""

    rounds: int = 0
    seconds: float | None = 0.0
    real_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    energy_j: float | None = 0.0

    def add(self, rounds: Sequence[Round]) -> None:
        for round in rounds:
            self.rounds += 1
            self.seconds = _plus(self.seconds, round.duration_s)
            self.energy_j = _plus(self.energy_j, round.energy_j)
            self.real_s += round.wall_s
            self.down_bytes += round.down_bytes
            self.up_bytes += round.up_bytes

    def mark(self, done: int, found: Verdict) -> Mark:
        own = found.held
        known = found.test or own
        return Mark(
            test=None if found.test is None else found.test.value,
            metric="accuracy" if known is None else known.metric,
            held=None if own is None else own.weighted,
            mean=None if own is None else own.mean,
            worst_decile=None if own is None else own.worst_decile,
            **{**vars(self), "rounds": done},
        )


def _plus(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value
