"""Devices of a simulated fleet that come online later, and that are switched off and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import JobError
from fedquilt.edge_agent.engines.numpy.engine import NumpyEngine
from fedquilt.formats import job_bundle
from fedquilt.testing.toy_networks import point_members, toy_bundle
from fedquilt.tools.simulation.run import make_local_backend, run_rounds
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Simulation

JOB = {"name": "toy", "engine": "numpy", "params": {"epochs": 1, "batch": 4, "lr": 0.1}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = toy_bundle()
    job_bundle.write_bundle(tmp_path / "bundle", made.meta, {"model": tensors.encode_tensors(made.load("model"))})
    return tmp_path / "bundle"


def played(
    folder: Path,
    act: Callable[[Simulation], None],
    *,
    method: str = "fedavg",
    away: Collection[str] = (),
    **job: Any,
) -> Simulation:
    given = settings.parse_job({**JOB, "method": method, **job})
    hands, held = make_local_backend(point_members(4, 13), engine=NumpyEngine(ROOM_BYTES, base_bytes=0))
    with Simulation(given, folder, held, folder.parent / "home", away=away) as simulation:
        for each in run_rounds(simulation, hands):
            act(each)
    return simulation


def test_devices_that_come_later_take_part_from_the_round_that_is_open_then(folder: Path) -> None:
    def act(simulation: Simulation) -> None:
        if len(simulation.rounds) == 2:
            simulation.fleet.bring_online(["dev-2", "dev-3"])

    run = played(folder, act, away=("dev-2", "dev-3"), rounds=4)
    some, everybody = ("dev-0", "dev-1"), ("dev-0", "dev-1", "dev-2", "dev-3")
    assert [each.devices for each in run.rounds] == [some, some, everybody, everybody]
    assert run.status == "done"


def test_a_device_that_is_switched_off_loses_its_task_and_keeps_its_private_state(folder: Path) -> None:
    """Its round closes without it after 5 s offline; back online it takes part with the model that it had."""
    models: list[bytes] = []

    def act(simulation: Simulation) -> None:
        done = len(simulation.rounds)
        if done == 1:
            models.append((simulation.devices / "private/dev-3.safetensors").read_bytes())
            simulation.fleet.switch_off(["dev-3"])
        if done == 3:
            models.append((simulation.devices / "private/dev-3.safetensors").read_bytes())
            simulation.fleet.bring_online(["dev-3"])

    run = played(folder, act, method="local", rounds=5, cohort={"quorum": 0.5, "deadline_s": 100.0})
    some, everybody = ("dev-0", "dev-1", "dev-2"), ("dev-0", "dev-1", "dev-2", "dev-3")
    assert [each.devices for each in run.rounds] == [everybody, some, some, everybody, everybody]
    assert run.rounds[1].duration_s == pytest.approx(5.0)  # of which it could have come back
    assert run.rounds[2].duration_s < 1.0  # and then not asked at all
    assert models[0] == models[1]


def test_what_it_was_sent_is_still_there_when_a_device_comes_back(folder: Path) -> None:
    def act(simulation: Simulation) -> None:
        if len(simulation.rounds) == 1:
            simulation.fleet.switch_off(["dev-3"])
        if len(simulation.rounds) == 2:
            simulation.fleet.bring_online(["dev-3"])

    run = played(folder, act, method="local", rounds=3, cohort={"quorum": 0.5, "deadline_s": 100.0})
    assert run.rounds[0].down_bytes > 1000
    assert run.rounds[2].devices == ("dev-0", "dev-1", "dev-2", "dev-3")
    assert run.rounds[2].down_bytes == 0


def test_a_run_that_everybody_has_left_stands_still_and_says_so(folder: Path) -> None:
    given = settings.parse_job({**JOB, "method": "fedavg", "rounds": 2})
    hands, held = make_local_backend(point_members(4, 13), engine=NumpyEngine(ROOM_BYTES, base_bytes=0))
    with Simulation(given, folder, held, folder.parent / "home", away=held) as simulation:
        assert list(run_rounds(simulation, hands)) == []
        assert (simulation.status, simulation.reason) == ("running", "no device is left that could go on with it")
        simulation.fleet.bring_online(["dev-1"])
        assert [len(each.rounds) for each in run_rounds(simulation, hands)] == [0, 1, 2]
        assert (simulation.status, simulation.reason) == ("done", "")
        with pytest.raises(JobError, match="no device 'dev-9'"):
            simulation.fleet.bring_online(["dev-9"])
