"""One run of a comparison: a method with a seed on a simulated fleet, and what it had come to after its rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.coordinator import progress
from fedquilt.coordinator.settings import Job
from fedquilt.core import DataError, Examples, JobError
from fedquilt.edge_agent import data
from fedquilt.tools import evaluator, fleet, pool_run
from fedquilt.tools.evaluator import Evaluator
from fedquilt.tools.local_run import Member

FORMAT = 1  # of a finished run on disk


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stood after so many rounds. Costs are of all of them; None: not known."""

    rounds: int
    test: float | None  # accuracy on the test set, 0..1
    held: float | None  # on all held-out shares together
    mean: float | None  # likewise, of devices
    worst_decile: float | None
    seconds: float | None  # of the slowest simulated board of each round
    real_s: float  # on this machine, evaluation aside
    down_bytes: int
    up_bytes: int
    energy_j: float | None

    @property
    def accuracy(self) -> float | None:
        """On the test set, or where there is none on held-out shares."""
        return self.held if self.test is None else self.test


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method with one seed."""

    method: str
    seed: int
    params: dict[str, Any]
    devices: int
    tested: int  # examples of the test set; 0: there is none
    marks: tuple[Mark, ...]
    format: int = FORMAT


def play(job: Job, folder: Path, tell: Callable[[int], None], workers: int = 1, alone: str = "") -> Run:
    """Make one run. `tell` hears how many rounds are done.

    Args:
        alone: the one device that takes part; "": all do.

    Raises:
        FedquiltError: what its data, its bundle or a device's work raise.
    """
    members, test = shares(job, folder)
    members = [member for member in members if alone in ("", member.device)]
    marks: list[Mark] = []
    spent = _Spent()
    with Evaluator(job, folder, test=test or _nothing(members)) as judge:

        def observe(round: pool_run.Round, state: Any) -> None:
            spent.add(round)
            done = round.number + 1
            if round.check is not None or done == job.rounds or judge.method.done(state):
                score = judge.score(state, done) if test is not None else None
                marks.append(spent.mark(done, round.check, None if score is None else score.accuracy))
            tell(done)

        pool_run.run(job, folder, members, workers=workers, observe=observe)
    return Run(
        method=job.method,
        seed=job.seed,
        params=job.params,
        devices=len(members),
        tested=len(test) if test is not None else 0,
        marks=tuple(marks),
    )


def shares(job: Job, folder: Path) -> tuple[list[Member], Examples | None]:
    """What each device has, and the test set; None: the job names none and its [data] has no split "test".

    Raises:
        DataError: it cannot be read.
    """
    agents = fleet.Plan(job, folder, Path()).agents()
    split = data.load_shares(data.parse(agents[0]["data"]))
    members = [Member(agent["device"], *share) for agent, share in zip(agents, split, strict=True)]
    try:
        return members, evaluator.test_set(job)
    except (DataError, JobError):
        if job.test:
            raise
        return members, None


def _nothing(members: Sequence[Member]) -> Examples:
    some = members[0].train
    return Examples(some.x[:0], some.y[:0])


@dataclasses.dataclass
class _Spent:
    """What the rounds so far have taken."""

    seconds: float | None = 0.0
    real_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    energy_j: float | None = 0.0

    def add(self, round: pool_run.Round) -> None:
        self.seconds = _plus(self.seconds, round.duration_s)
        self.energy_j = _plus(self.energy_j, round.energy_j)
        self.real_s += round.wall_s
        self.down_bytes += round.down_bytes
        self.up_bytes += round.up_bytes

    def mark(self, rounds: int, check: pool_run.Check | None, test: float | None) -> Mark:
        told = {} if check is None else check.devices
        own = progress.of_devices({name: (m["accuracy"], m["examples"]) for name, m in told.items() if "accuracy" in m})
        return Mark(
            rounds=rounds,
            test=test,
            held=None if own is None else own.weighted,
            mean=None if own is None else own.mean,
            worst_decile=None if own is None else own.worst_decile,
            **vars(self),
        )


def _plus(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value
