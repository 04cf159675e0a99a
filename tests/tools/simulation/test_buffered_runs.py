"""Buffered runs on virtual time: the same bits twice, FedBuff's arithmetic, and a resume in the middle."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_fleets import Fleet, read_events

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import CohortSelected, ModeChosen, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation import run
from fedquilt.tools.simulation.simulated_job import Simulation, draw_failure_times

BOARDS = ["jetson-nano", "jetson-tx2", "jetson-orin-nano", "raspberry-pi-5"]  # 27, 14, 3 and 4 s for a task
COHORT = {"mode": "buffered", "size": 2}
Trained = dict[tuple[str, int], dict[str, np.ndarray]]  # device and round of its state -> trained model


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def begin(fleet: Fleet, method: str = "fedavg", home: str = "", **cohort: Any) -> tuple[Simulation, run.WorkBackend]:
    table = {"rounds": 12, "cohort": {**COHORT, **cohort}, "fleet": {"devices": 6, "boards": BOARDS}}
    return fleet.begin(method, devices=6, home=home, **table)


def play(
    simulation: Simulation, backend: run.WorkBackend, trained: Trained, rounds: int = 99
) -> dict[int, dict[str, np.ndarray]]:
    """Run to the end, or until so many rounds are committed, and return the models by number of commits."""

    def work(requests: Sequence[WorkRequest]) -> Iterator[WorkResult]:
        for request, result in zip(requests, backend(requests), strict=True):
            bundle = tensors.decode_tensors(result.blobs[result.bundles["model"].sha256])
            trained[request.device, request.task.round] = {name: np.array(value) for name, value in bundle.items()}
            yield result

    models = {}
    for current in run.run_rounds(simulation, work):
        models[len(current.rounds)] = dict(current.state.model)
        if len(current.rounds) >= rounds:
            break
    return models


def replay(events: Sequence[Any], first: dict[str, np.ndarray], trained: Trained) -> list[dict[str, np.ndarray]]:
    """Return the models that FedBuff's Algorithm 1 gives for these events, weighted by examples and staleness.

    Sums are rounded once. An update of the present state needs no difference, and is taken as it is.
    """
    models, buffer = [first], list[UpdateAccepted]()
    for event in events:
        if isinstance(event, UpdateAccepted):
            buffer.append(event)
        elif isinstance(event, RoundCommitted):
            present, weights, new = models[-1], [each.update.weight for each in buffer], dict[str, np.ndarray]()
            for name, x in present.items():
                moved = []
                for each in buffer:
                    start, y = models[each.update.round][name], trained[each.update.device, each.update.round][name]
                    s = (1 + each.round - each.update.round) ** -0.5
                    change = s * (y.astype(np.float64) - start)
                    moved.append(y if start is x else (x + change).astype(np.float32))
                terms = [weight * np.ravel(y).astype(float) for weight, y in zip(weights, moved, strict=True)]
                sums = [math.fsum(values) for values in zip(*terms, strict=True)]
                mean = np.reshape(sums, x.shape) / sum(weights)
                new[name] = mean.astype(np.float32)
            models.append(new)
            buffer = []
    return models


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedopt", "genefl", "ditto"])
def test_two_runs_have_the_same_events_and_bits(fleet: Fleet, method: str) -> None:
    found = []
    for _ in range(2):
        simulation, backend = begin(fleet, method)
        for _ in run.run_rounds(simulation, backend):
            pass
        assert simulation.status == "done", simulation.reason
        updates = [(event.round, event.update) for event in read_events(simulation, UpdateAccepted)]
        found.append((simulation.state_digest, [(round, each.device, each.round) for round, each in updates]))
    assert found[0] == found[1]
    assert any(round > base for round, _, base in found[0][1])


def test_every_state_has_the_bits_of_fedbuff_over_the_recorded_events(fleet: Fleet) -> None:
    trained: Trained = {}
    simulation, backend = begin(fleet)
    models = play(simulation, backend, trained)
    expected = replay(read_events(simulation), models[0], trained)
    assert len(models) > 8
    for number, model in models.items():
        for name, value in model.items():
            np.testing.assert_array_equal(value, expected[number][name], err_msg=f"{name} after {number} rounds")
    ages = [event.round - event.update.round for event in read_events(simulation, UpdateAccepted)]
    assert max(ages) > 5
    assert min(ages) == 0


def test_a_resumed_run_counts_no_update_twice_and_continues_from_earlier_states(fleet: Fleet) -> None:
    trained: Trained = {}
    simulation, backend = begin(fleet, home="home")
    models = play(simulation, backend, trained, rounds=5)
    assert simulation.running is not None
    versions = simulation.running.job_state.earlier_versions.values()
    simulation.__exit__()
    with Store(fleet.place / "home") as store:  # no garbage collector deletes the states meanwhile
        assert {version.state.sha256 for version in versions if version.state} <= store.referenced_blobs()
    assert versions
    simulation, backend = begin(fleet, home="home")
    models |= play(simulation, backend, trained)
    assert simulation.status == "done"
    events = read_events(simulation)
    counted = [(event.update.device, event.update.round) for event in events if isinstance(event, UpdateAccepted)]
    assert len(set(counted)) == len(counted)
    expected = replay(events, models[0], trained)
    for name, value in models[12].items():
        np.testing.assert_array_equal(value, expected[12][name])


def test_without_stragglers_the_states_are_those_of_synchronous_rounds(fleet: Fleet) -> None:
    digests = []
    for cohort in ({"mode": "buffered", "size": 3, "staleness": {"function": "constant"}}, {}):
        simulation = fleet.run_job(devices=3, rounds=3, cohort=cohort, fleet={"devices": 3, "boards": BOARDS[:1]})
        digests.append(simulation.state_digest)
    assert digests[0] == digests[1]


def test_concurrency_and_staleness_are_kept(fleet: Fleet) -> None:
    simulation, backend = begin(fleet, size=1, concurrency=3, staleness={"max": 2})
    at_work = set[str]()
    for _ in run.run_rounds(simulation, backend):
        pass
    for event in read_events(simulation):
        if isinstance(event, CohortSelected):
            at_work |= set(event.devices)
        elif isinstance(event, UpdateAccepted):
            assert event.round - event.update.round <= 2
            at_work.remove(event.update.device)
        at_work -= set(getattr(event, "devices", ())) if type(event).__name__ == "TasksCancelled" else set()
        assert len(at_work) <= 3


@pytest.mark.parametrize(("fair", "bound"), [("off", 0.2), ("contributions", 0.5)])
def test_a_slow_device_has_half_as_many_updates_as_any_other_if_fair(fleet: Fleet, fair: str, bound: float) -> None:
    table = {"rounds": 40, "fleet": {"devices": 4, "boards": BOARDS}}
    simulation, backend = fleet.begin(devices=4, cohort={"mode": "buffered", "size": 1, "fair": fair}, **table)
    for _ in run.run_rounds(simulation, backend):
        pass
    counts = Counter(event.update.device for event in read_events(simulation, UpdateAccepted))
    assert sum(counts.values()) == 40
    ratio = (min(counts.values()) + 1) / max(counts.values())  # a task may be open at the end
    assert (ratio >= bound) == (fair == "contributions")


def test_devices_go_offline_for_good_and_their_joules_are_counted(fleet: Fleet) -> None:
    failures = {"share": 0.3, "within_s": 60.0}
    table = {"rounds": 30, "fleet": {"devices": 6, "boards": BOARDS, "failures": failures}}
    simulation, backend = fleet.begin(devices=6, cohort=COHORT, **table)
    times_s = draw_failure_times(simulation.job, simulation.held_out_counts)
    assert len(times_s) == 2
    assert max(times_s.values()) < 60
    last_update_s = dict[str, float]()
    for _ in run.run_rounds(simulation, backend):
        last_update_s |= dict.fromkeys(simulation.rounds[-1].devices if simulation.rounds else (), simulation.now_s)
    assert simulation.status == "done"
    assert all(last_update_s.get(device, 0.0) <= time_s for device, time_s in times_s.items())
    assert simulation.fleet.wasted_j > 0
    assert draw_failure_times(simulation.job, simulation.held_out_counts, 10.0) == {
        device: time_s - 10 for device, time_s in times_s.items()
    }


def test_a_resumed_job_keeps_its_mode(fleet: Fleet) -> None:
    for mode, boards in (("buffered", BOARDS), ("synchronous", BOARDS[:1])):
        table = {"rounds": 6, "cohort": {**COHORT, "mode": "auto"}, "fleet": {"devices": 6, "boards": boards}}
        simulation, backend = fleet.begin(devices=6, home=mode, **table)
        for current in run.run_rounds(simulation, backend):
            if len(current.rounds) >= 2:
                break
        simulation.__exit__()
        simulation, backend = fleet.begin(devices=6, home=mode, **table)
        for _ in run.run_rounds(simulation, backend):
            pass
        assert simulation.status == "done"
        assert [event.mode for event in read_events(simulation, ModeChosen)] == [mode]


def test_states_that_no_task_needs_are_deleted(fleet: Fleet) -> None:
    simulation, backend = begin(fleet, staleness={"max": 3})
    for current in run.run_rounds(simulation, backend):
        assert current.running is not None
        state = current.running.job_state
        commits = read_events(current, RoundCommitted)
        stored = {event.state.sha256 for event in commits if current.fleet.blob_store.has_blob(event.state)}
        needed = {version.state.sha256 for version in state.earlier_versions.values() if version.state}
        assert needed - {read_events(current)[0].state.sha256} <= stored
        assert len(stored) <= 6  # a task may be cancelled since the latest commit
