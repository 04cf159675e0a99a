"""Every method works through sites, and its states have the bits of one coordinator with all boards.

Methods are found by their files, so that a new one is tested here without an edit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from carried import plan
from sited import federation

from fedquilt import methods
from fedquilt.coordinator.rounds.events import RoundCommitted, TaskDeclined, UpdateRejected
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.tools.simulation.agents import FleetPlan

QUICK = ("depthfl", "fedavg", "fedpews", "robust")


def played(name: str, folder: Path, split: tuple[int, ...], **table: Any) -> tuple[list[bytes], list[RoundCommitted]]:
    given = plan(name, folder)
    cohort = CohortSettings(start_devices=len(split) + 4 - sum(split), min_devices=2, deadline_s=60)
    job = msgspec.structs.replace(given.job, cohort=cohort, **table)
    with federation(FleetPlan(job, given.bundle, given.home), split) as made:
        assert made.play() == "done", made.facts[-1]
        assert not [fact for fact in made.facts if isinstance(fact, UpdateRejected)]
        refused = [fact for fact in made.facts if isinstance(fact, TaskDeclined) and fact.device.startswith("site")]
        assert not refused
        return made.states, [fact for fact in made.facts if isinstance(fact, RoundCommitted)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in methods.builtin_names()]
)
def test_the_bits_of_every_method_are_those_of_one_coordinator(name: str, tmp_path: Path) -> None:
    flat, _ = played(name, tmp_path / "flat", ())
    sited, _ = played(name, tmp_path / "sited", (2, 1))
    assert len(flat) == len(set(flat)) >= 2
    assert flat == sited
