"""What several tests of the coordinator begin with: a job driven by hand, and homes that are closed at the end."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from by_hand import Stage
from homes import Federation
from job_facts import BLOB
from rolled import Ground
from side_by_side import LONG, Staged, TwoJobs, begin_two_jobs
from stored_runs import DEVICES, Run, of

from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded, JobStarted, UpdateAccepted
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store


@pytest.fixture(autouse=True)
def close_stages() -> Iterator[None]:
    yield
    while Stage.made:
        Stage.made.pop().store.close()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A job of one round."""
    return Stage(tmp_path)


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    """Makes stages whose coordinators serve all jobs, each in a folder of its own."""

    def make(limits: CoordinatorLimits = CoordinatorLimits(), **table: Any) -> Stage:
        return Stage(tmp_path / str(len(Stage.made)), limits, **table)

    return make


@pytest.fixture
def two_jobs(staged: Staged) -> TwoJobs:
    """A job whose task both boards have, and a job that was queued since."""
    return begin_two_jobs(staged(cohort=LONG))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores on one folder, as so many processes would; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Store(tmp_path))


@pytest.fixture
def often(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores on one folder that keep a snapshot of every round; all are closed at the end."""
    made: list[Store] = []

    def open() -> Store:
        made.append(Store(tmp_path, every=-len(DEVICES)))
        return made[-1]

    yield open
    for store in made:
        store.close()


@pytest.fixture
def run(often: Callable[[], Store]) -> Run:
    """A run of three rounds, with a snapshot after the third and two facts behind it."""
    made = Run(often())
    made.record(JobStarted(BLOB), EligibilityRecorded(0, DEVICES))
    for number in range(3):
        made.round(number, *DEVICES)
    made.record(CohortSelected(3, 0, DEVICES), UpdateAccepted(3, of(made.id, "a", 3)))
    return made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home in the middle of a round's answers."""
    federation = Federation(tmp_path / "run", "fedavg").create()
    federation.run(lambda fact: isinstance(fact, UpdateAccepted) and fact.round == 1)
    return federation.folder / "coordinator"


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A home without boards."""
    return Ground(tmp_path)
