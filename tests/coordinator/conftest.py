"""What several tests of the coordinator begin with: a job driven by hand, and homes that are closed at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from by_hand import Stage
from homes import Federation
from rolled import Ground
from side_by_side import LONG, Staged, TwoJobs, begin_two_jobs

from fedquilt.coordinator.facts import Answered
from fedquilt.coordinator.limits import Limits
from fedquilt.coordinator.store import Store


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A job of one round."""
    made = Stage(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    """Makes stages whose coordinators serve all jobs, each in a folder of its own; all are closed at the end."""
    made: list[Stage] = []

    def make(limits: Limits = Limits(), **table: Any) -> Stage:
        made.append(Stage(tmp_path / str(len(made)), limits, **table))
        return made[-1]

    yield make
    for stage in made:
        stage.store.close()


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
def home(tmp_path: Path) -> Path:
    """A home in the middle of a round's answers."""
    federation = Federation(tmp_path / "run", "fedavg").make()
    federation.run(lambda fact: isinstance(fact, Answered) and fact.round == 1)
    return federation.folder / "coordinator"


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A home without boards."""
    return Ground(tmp_path)
