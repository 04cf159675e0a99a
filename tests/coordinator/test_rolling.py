"""Rollouts carried out by a coordinator: phases, abort, rollback, boards that are away, restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rolled import Ground

from fedquilt.coordinator.rollouts import Done, Offered, Passed


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A home without boards."""
    return Ground(tmp_path)


def test_a_good_model_reaches_all_in_phases(ground: Ground) -> None:
    """The canary first, and the next share only once those before have committed."""
    ground.fleet(20)
    id = ground.deploy(canary=0.05, phases=(0.25, 1.0))
    ground.play(30.0)
    assert ground.state(id).status == "done"
    assert len(ground.having()) == 20
    told = [fact for _, fact in ground.facts if isinstance(fact, Offered | Passed | Done)]
    assert [len(fact.devices) if isinstance(fact, Offered) else type(fact) for fact in told] == [
        *(1, Passed, 4, Passed, 15, Passed, Done),
    ]
