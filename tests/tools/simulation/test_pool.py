"""Whole runs on a pool of workers: devices trained in one graph, examples that come one by one, seconds and joules."""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import profiles
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.updates.aggregation import Aggregator, PartialAggregate
from fedquilt.core import Examples, JobError
from fedquilt.costs import cost_model
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.formats import job_bundle
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.testing.toy_networks import point_devices
from fedquilt.tools.simulation import DeviceData, processes
from fedquilt.tools.simulation.pool import SINGLE_THREAD_ENV, WorkerPool
from fedquilt.tools.simulation.processes import OutcomeSums
from fedquilt.tools.simulation.run import RunOutcomes, WorkBackend, simulate
from fedquilt.tools.simulation.simulated_job import Simulation

JOB = {
    "name": "toy",
    "method": "fedavg",
    "engine": "numpy",
    "rounds": 3,
    "params": {"epochs": 2, "batch": 4, "lr": 0.1},
}


def play(folder: Path, members: list[DeviceData] | None = None, *, job: Any = (), **options: Any) -> RunOutcomes:
    return simulate(settings.parse_job({**JOB, **dict(job)}), folder, members or point_devices(5, 13), **options)


def bits(outcome: RunOutcomes) -> bytes:
    return tensors.encode_tensors(outcome.artefact.tensors)


def test_devices_that_are_trained_in_one_graph_give_the_same_bits_on_any_number_of_workers(
    folder: Path,
) -> None:
    """And those of the loop to float tolerance: devices with 9 to 17 examples, whose last batches differ."""
    pytest.importorskip("torch")
    members = [point_devices(i + 1, 9 + 2 * i)[i] for i in range(5)]
    job = {"method": "fedprox", "engine": "torch"}
    one, two = (play(folder, members, job=job, workers=count, batched=True) for count in (1, 2))
    assert bits(one) == bits(two)
    loop = play(folder, members, job={"method": "fedprox"})
    for name, value in loop.artefact.tensors.items():
        np.testing.assert_allclose(one.artefact.tensors[name], value, rtol=1e-3, atol=1e-5)


def test_examples_that_are_made_as_they_are_asked_for_are_never_all_there(folder: Path) -> None:
    given = point_devices(5, 13)
    held: list[weakref.ref[np.ndarray]] = []

    def one_by_one() -> Iterator[DeviceData]:
        for member in given:
            assert sum(ref() is not None for ref in held) <= 1
            x = member.train.x.copy()
            held.append(weakref.ref(x))
            yield DeviceData(member.device, Examples(x, member.train.y), member.held_out)
            del x

    streamed = simulate(settings.parse_job(JOB), folder, one_by_one())
    assert bits(streamed) == bits(play(folder, given))
    assert all(ref() is None for ref in held)


def test_seconds_are_the_slowest_boards_and_joules_are_everybodys(folder: Path) -> None:
    """By their profiles: two kinds of boards taken in turn, 13 examples each in mini-batches of 4, two epochs."""
    kinds = ["jetson-tx2", "raspberry-pi-5"]
    outcome = play(folder, job={"fleet": {"boards": kinds, "policy": "board"}})
    points = [profiles.load_board_profile(name).operating_points()[0] for name in kinds]
    model = job_bundle.load_bundle(folder).load("model")
    order = local_training.training_task_spec(
        fedavg.init(job_bundle.load_bundle(folder), settings.parse_params(settings.parse_job(JOB)), 0), {"model": model}
    )
    work = order.work.total_for_examples(13)
    assert work.flops == 3 * 100.0 * 2 * 13
    assert work.launches > 2 * 4  # of each mini-batch some
    seconds = [cost_model.work_seconds(work, point) for point in points]
    joules = [
        cost_model.work_joules(second or 0.0, point) or 0.0 for second, point in zip(seconds, points, strict=True)
    ]
    for round in outcome.rounds:
        assert round.duration_s == pytest.approx(max(second or 0.0 for second in seconds))
        assert round.energy_j == pytest.approx(3 * joules[0] + 2 * joules[1])


def test_evaluations_beside_the_rounds_are_of_the_state_that_was_committed(folder: Path) -> None:
    members = point_devices(4, 13)
    members[1] = DeviceData(
        members[1].device, members[1].train, Examples(members[1].held_out.x[:0], members[1].held_out.y[:0])
    )
    test = members[0].train
    told: list[tuple[int, Any, dict[str, Any], Any]] = []

    def observe(simulation: Simulation, hands: WorkBackend) -> None:
        told.append(
            (
                simulation.completed_rounds,
                simulation.state.model,
                hands.evaluate(simulation),
                hands.evaluate_test_set(simulation),
            )
        )

    outcome = play(folder, members, test=test, observe=observe)
    assert [each[0] for each in told] == [0, 1, 2, 3]
    engine, network = NumpyEngine(1 << 40, base_bytes=0), job_bundle.load_bundle(folder).meta["network"]
    for _, model, devices, tested in told:
        assert sorted(devices) == ["dev-0", "dev-2", "dev-3"]
        for index in (0, 2, 3):
            assert devices[f"dev-{index}"] == engine.evaluate(network, model, members[index].held_out)
        assert tested == engine.evaluate(network, model, test)
    plain = play(folder, members)
    assert [round.energy_j for round in plain.rounds] == [round.energy_j for round in outcome.rounds]
    assert bits(plain) == bits(outcome)


@pytest.mark.parametrize("workers", [-1, 257])
def test_too_few_and_too_many_workers_are_refused(folder: Path, workers: int) -> None:
    with pytest.raises(JobError, match=f"{workers} workers: use 1 to 256"):
        play(folder, workers=workers)


@pytest.mark.parametrize("engine", ["numpy", "onnx", "torch"])
def test_a_process_that_forks_the_workers_has_one_thread(engine: str) -> None:
    code = "import os, sys; from fedquilt.tools.simulation import processes; processes.import_engine(sys.argv[1]); "
    code += "print(len(os.listdir('/proc/self/task')))"
    told = subprocess.run(
        [sys.executable, "-c", code, engine],
        env={**os.environ, **SINGLE_THREAD_ENV},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "1\n"


def test_a_worker_ends_without_a_traceback_where_its_coordinator_ends_within_a_message() -> None:
    received, sent = multiprocessing.Pipe(duplex=False)
    sent.send_bytes(b"whole")
    os.write(sent.fileno(), struct.pack("!i", 100) + b"a beginning")
    sent.close()
    assert list(processes.receive_messages(received)) == [b"whole"]


SUMMED: dict[str, Any] = {
    "name": "toy",
    "method": "fedavg",
    "engine": "numpy",
    "rounds": 3,
    "params": {"epochs": 1, "batch": 4, "lr": 0.1},
}


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
    made = simulate(settings.parse_job({**SUMMED, **job}), folder, point_devices(6, 13), workers=workers, batched=True)
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
