"""Sites whose sums are large: they lie on the disk on both sides, and go up in turn."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import carried
import msgspec
import pytest
import virtual_site
from sited import federation

from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.blobs.upload import UploadQueue
from fedquilt.coordinator.rounds.events import UpdateRejected
from fedquilt.coordinator.settings import CohortSettings, CoordinatorLimits
from fedquilt.coordinator.updates import aggregation, job_blobs
from fedquilt.tools.simulation.agents import FleetPlan


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found: set[str] = set()

    def begin(queue: UploadQueue, now_s: float) -> list[str]:
        begun = plain(queue, now_s)
        found.update(f"site-{number}" for number in range(4) if math.isinf(queue.waiting_s(f"site-{number}")))
        return begun

    plain = UploadQueue.start_turns
    monkeypatch.setattr(UploadQueue, "start_turns", begin)
    monkeypatch.setattr(virtual_site, "LARGE_BYTES", 0)
    monkeypatch.setattr(aggregation, "ScratchFile", partial(ScratchFile, min_entries=1))
    for module in (job_blobs, aggregation):
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)
    return found


def played(name: str, folder: Path, split: tuple[int, ...]) -> list[bytes]:
    given = carried.plan(name, folder)
    cohort = CohortSettings(start_devices=len(split) or 4, min_devices=2, deadline_s=60)
    job = msgspec.structs.replace(given.job, cohort=cohort)
    with federation(FleetPlan(job, given.bundle, given.home), split, limits=CoordinatorLimits(waiting_mb=0)) as made:
        assert made.play() == "done", made.facts[-1]
        assert not [fact for fact in made.facts if isinstance(fact, UpdateRejected)]
        return made.states


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "afl", "fedstitch", "robust"])
def test_sites_with_large_sums_wait_for_their_turn_and_come_to_the_bits_of_all_boards(
    tmp_path: Path, name: str, waited: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sited = played(name, tmp_path / "sited", (2, 1, 1))
    assert waited
    monkeypatch.undo()
    assert sited == played(name, tmp_path / "flat", ())
