"""Devices of a simulated fleet that come online later, and that are switched off and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_fleets import Fleet, read_events

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import JobEnded, TaskDeclined, UpdateAccepted, UpdateRejected
from fedquilt.core import Aggregation, ClientContext, ClientResult, JobError, Method, Task, UpdateError
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE
from fedquilt.testing.toy_networks import point_devices
from fedquilt.tools.simulation.run import make_local_backend, run_rounds
from fedquilt.tools.simulation.simulated_job import UNLIMITED_BYTES, Simulation

JOB = {"name": "toy", "engine": "numpy", "params": {"epochs": 1, "batch": 4, "lr": 0.1}}


def played(
    folder: Path, act: Callable[[Simulation], None], *, method: str = "fedavg", away: Collection[str] = (), **job: Any
) -> Simulation:
    given = settings.parse_job({**JOB, "method": method, **job})
    hands, held = make_local_backend(point_devices(4, 13), engine=NumpyEngine(UNLIMITED_BYTES, base_bytes=0))
    with Simulation(given, folder, held, folder.parent / "home", offline=away) as simulation:
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


def test_a_run_that_everybody_has_left_stands_still_and_says_so(folder: Path) -> None:
    given = settings.parse_job({**JOB, "method": "fedavg", "rounds": 2})
    hands, held = make_local_backend(point_devices(4, 13), engine=NumpyEngine(UNLIMITED_BYTES, base_bytes=0))
    with Simulation(given, folder, held, folder.parent / "home", offline=held) as simulation:
        assert list(run_rounds(simulation, hands)) == []
        assert (simulation.status, simulation.reason) == ("running", "no device can continue the run")
        simulation.fleet.bring_online(["dev-1"])
        assert [len(each.rounds) for each in run_rounds(simulation, hands)] == [0, 1, 2]
        assert (simulation.status, simulation.reason) == ("done", "")
        with pytest.raises(JobError, match="no device 'dev-9'"):
            simulation.fleet.bring_online(["dev-9"])


def refusing(number: int, device: str, seen: list[tuple[int, str, bool]]) -> Method:
    method = methods.load("local")

    def work(task: Task, site: ClientContext) -> ClientResult:
        before = float(site.private_state["tasks"][0]) if site.private_state else 0.0
        seen.append((task.round, site.device, bool(site.private_state)))
        return ClientResult({}, 1.0, {"tasks": before + 1}, {"tasks": np.array([before + 1])})

    def fold(state: Any, total: Any, update: Any) -> Any:
        from fedquilt.core import UpdateError

        if (update.round, update.device) == (number, device):
            raise UpdateError("not this one")
        return method.aggregation.fold(state, total, update)

    return replace(method, work=work, aggregation=Aggregation(fold))


def test_private_state_counts_only_with_an_update_that_was_taken(fleet: Fleet) -> None:
    """dev-1's second update is refused: at its third task it is where it was after its first."""
    seen: list[tuple[int, str, bool]] = []
    ended = fleet.run_job("local", devices=2, rounds=3, method=refusing(1, "dev-1", seen))
    assert [(fact.round, fact.device) for fact in read_events(ended, UpdateRejected)] == [(1, "dev-1")]
    counted = {(f.round, f.update.device): f.update.metrics["tasks"] for f in read_events(ended, UpdateAccepted)}
    assert counted == {(0, "dev-0"): 1, (0, "dev-1"): 1, (1, "dev-0"): 2, (2, "dev-0"): 3, (2, "dev-1"): 2}


def leaving(seen: list[list[str]], work: Callable[[Task, ClientContext], ClientResult]) -> Method:
    """ "local" whose devices do this; notes which private tensors each task of dev-0 found."""

    def noted(task: Task, site: ClientContext) -> ClientResult:
        if site.device == "dev-0":
            seen.append(sorted(site.private_state))
        return work(task, site)

    return replace(methods.load("local"), work=noted)


def test_a_file_in_a_tasks_cache_is_never_taken_for_private_state(fleet: Fleet) -> None:
    seen: list[list[str]] = []
    there: list[bool] = []

    def caches(task: Task, site: ClientContext) -> ClientResult:
        there.append((site.cache / PRIVATE_FILE).exists())
        (site.cache / PRIVATE_FILE).write_bytes(tensors.encode_tensors({"cached": np.ones(1)}))
        return ClientResult({}, 1.0, {}, {})

    fleet.run_job("local", devices=1, rounds=3, method=leaving(seen, caches))
    assert seen == [[], [], []]
    assert there == [False, True, True]


def test_a_device_whose_tasks_keep_nothing_has_no_folder_for_it(fleet: Fleet) -> None:
    ended = fleet.run_job(devices=2)
    assert ended.status == "done"
    assert not (ended.devices_folder / "work").exists()


def test_private_state_of_a_task_that_failed_is_not_taken_with_the_next_one(fleet: Fleet) -> None:
    """dev-0's first task writes it and then tells a metric that is no number; its second leaves none."""
    seen: list[list[str]] = []

    def fails_once(task: Task, site: ClientContext) -> ClientResult:
        if task.round == 0 and site.device == "dev-0":
            return ClientResult({}, 1.0, {"loss": np.inf}, {"stale": np.ones(1)})
        return ClientResult({}, 1.0, {}, {})

    ended = fleet.run_job("local", devices=2, rounds=3, method=leaving(seen, fails_once))
    assert [(fact.round, fact.device) for fact in read_events(ended, TaskDeclined)] == [(0, "dev-0")]
    assert seen == [[], [], []]


def test_an_update_on_its_way_is_kept_though_an_equal_one_of_another_device_is_refused(fleet: Fleet) -> None:
    """Both are one blob in the coordinator's store, which the refusal releases while dev-1's is under way."""
    plain = methods.load("fedavg")

    def fold(state: Any, total: Any, update: Any) -> Any:
        if update.device == "dev-0":
            raise UpdateError("not this one")
        return plain.aggregation.fold(state, total, update)

    def work(task: Task, site: ClientContext) -> ClientResult:
        return ClientResult({"model": {name: array + 1 for name, array in site.load("model").items()}}, 1.0, {})

    method = replace(plain, work=work, aggregation=Aggregation(fold))
    links, cohort = {"links": ["10MB/s 1s", "300B/s"]}, {"quorum": 0.5, "deadline_s": 1000.0}
    ended = fleet.run_job("fedavg", devices=2, rounds=1, method=method, fleet=links, cohort=cohort)
    assert [fact.device for fact in read_events(ended, UpdateRejected)] == ["dev-0"]
    assert [fact.update.device for fact in read_events(ended, UpdateAccepted)] == ["dev-1"]
    assert [fact.status for fact in read_events(ended, JobEnded)] == ["done"]
