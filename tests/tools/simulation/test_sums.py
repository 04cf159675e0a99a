"""Sums that workers make of what simulated devices send: they count, change no bit, or are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.updates.aggregator import Aggregator
from fedquilt.coordinator.updates.partial_aggregate import PartialAggregate
from fedquilt.formats import job_bundle
from fedquilt.testing.toy_networks import point_members, toy_bundle
from fedquilt.tools.simulation.pool import WorkerPool
from fedquilt.tools.simulation.processes import OutcomeSums
from fedquilt.tools.simulation.run import simulate

JOB: dict[str, Any] = {
    "name": "toy",
    "method": "fedavg",
    "engine": "numpy",
    "rounds": 3,
    "params": {"epochs": 1, "batch": 4, "lr": 0.1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = toy_bundle()
    job_bundle.write_bundle(tmp_path / "bundle", made.meta, {"model": tensors.encode_tensors(made.load("model"))})
    return tmp_path / "bundle"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"sums": [], "folded": []}
    apart, added = PartialAggregate.add_pending_sum, Aggregator._fold_update

    def put_apart(self: PartialAggregate, given: Any, total: Any) -> None:
        found["sums"].append(len(given))
        apart(self, given, total)

    def one(self: Aggregator, given: Any) -> Any:
        found["folded"].append(1)
        return added(self, given)

    monkeypatch.setattr(PartialAggregate, "add_pending_sum", put_apart)
    monkeypatch.setattr(Aggregator, "_fold_update", one)
    return found


def played(folder: Path, workers: int, **job: Any) -> tuple[bytes, list[Any]]:
    made = simulate(settings.parse_job({**JOB, **job}), folder, point_members(6, 13), workers=workers, together=True)
    return tensors.encode_tensors(made.artefact.tensors), [each.devices for each in made.rounds]


def test_the_coordinator_merges_sums_and_folds_nothing_itself(folder: Path, taken: dict[str, list[int]]) -> None:
    on_a_pool = played(folder, 2)
    assert taken == {"sums": [1] * 6 + [6, 6], "folded": []}
    assert played(folder, 0) == on_a_pool
    assert taken["folded"] == [1] * 18


@pytest.mark.parametrize("job", [{"wire": {"codec": "int8"}}, {"method": "robust"}])
def test_no_sum_is_made_of_what_does_not_add_up_or_is_coded(
    folder: Path, taken: dict[str, list[int]], job: dict[str, Any]
) -> None:
    assert played(folder, 2, **job) == played(folder, 0, **job)
    assert taken["sums"] == []


def test_updates_of_a_sum_that_does_not_count_whole_are_folded_one_by_one(
    folder: Path, taken: dict[str, list[int]]
) -> None:
    late = {
        "cohort": {"size": 4, "over_select": 0.5},
        "fleet": {
            "boards": ["x86-host", "raspberry-pi-5", "jetson-nano", "jetson-tx2", "jetson-orin-nano", "jetson-orin-nx"]
        },
    }
    on_a_pool = played(folder, 2, **late)
    assert all(len(devices) == 4 for devices in on_a_pool[1])
    assert 6 in taken["sums"]
    assert taken["folded"]
    assert played(folder, 0, **late) == on_a_pool


def test_updates_whose_sum_does_not_come_to_be_are_folded_one_by_one(
    folder: Path, taken: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "_wait_for_sum", lambda self, package: b"")
    on_a_pool = played(folder, 2)
    assert taken == {"sums": [1] * 6 + [6, 6], "folded": [1] * 18}
    assert played(folder, 0) == on_a_pool


def test_what_cannot_be_folded_gives_no_sum(tmp_path: Path) -> None:
    sums = OutcomeSums()
    assert not sums.prepare_sum(str(tmp_path / "nothing"), [], [])
    assert sums.pack_sum() == b""
