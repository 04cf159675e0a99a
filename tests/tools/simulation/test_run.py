"""Runs of the coordinator's rounds in this process: who is asked, what travels, and several runs abreast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
from msgspec import structs

from fedquilt import methods, wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.selection import CohortDraw, select_cohort
from fedquilt.core import (
    BlobRef,
    Bundle,
    ClientContext,
    ClientResult,
    DeviceView,
    JobError,
    Method,
    ModelError,
    Task,
)
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.testing.toy_networks import make_job, point_devices, run_method, toy_bundle, write_bundle
from fedquilt.tools.simulation import run
from fedquilt.tools.simulation.fleet import EncodedTasks
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.task_process import TaskProcess

SMALL = {"epochs": 2, "batch": 4, "lr": 0.1}


@pytest.fixture
def engine() -> NumpyEngine:
    return NumpyEngine(1 << 40, base_bytes=0)


@pytest.fixture
def begin(tmp_path: Path, engine: NumpyEngine) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        bundle = write_bundle(tmp_path / "bundle", toy_bundle())
        homes = (tmp_path / f"home-{i}" for i in range(100))

        def make(name: str = "fedavg", method: Method | None = None, **table: Any) -> Simulation:
            wanted = make_job(name, {**SMALL, **table.pop("params", {})}, **table)
            load = methods.load if method is None else lambda name: method
            held = {member.device: len(member.held_out) for member in point_devices(5, 13)}
            return stack.enter_context(Simulation(wanted, bundle, held, next(homes), load_method=load, engine="numpy"))

        yield make


def counting(seen: list[str]) -> Method:
    """FedAvg whose devices count their tasks in their caches: "dev-0 1" and so on."""
    method = methods.load("fedavg")

    def work(task: Task, site: ClientContext) -> ClientResult:
        file = site.cache / "tasks"
        count = int(file.read_text()) + 1 if file.exists() else 1
        file.write_text(str(count))
        seen.append(f"{site.device} {count}")
        return method.work(task, site)

    return replace(method, work=work)


def test_devices_of_one_name_in_two_runs_have_a_cache_each(begin: Any, engine: NumpyEngine) -> None:
    seen: list[str] = []
    method = counting(seen)
    carry, _ = run.make_local_backend(point_devices(5, 13), load_method=lambda name: method, engine=engine)
    for _ in range(2):
        list(run.run_rounds(begin(method=method, rounds=2, cohort={"size": 1}), carry))
    assert sorted(seen) == sorted(
        [f"{select_cohort(CohortDraw(0, number), [f'dev-{i}' for i in range(5)], 1)[0]} 1" for number in (0, 1)] * 2
    )


def test_bytes_are_those_of_contents_and_each_goes_to_a_device_once(engine: NumpyEngine) -> None:
    size = len(tensors.encode_tensors(toy_bundle().load("model")))
    taken: list[tuple[int, int]] = []

    def observe(simulation: Simulation, hands: WorkBackend) -> None:
        taken[:] = [(each.down_bytes, each.up_bytes) for each in simulation.rounds]

    run_method("fedavg", toy_bundle(), point_devices(3), SMALL, engine=engine, observe=observe, rounds=2)
    assert taken == [(3 * size, 3 * size)] * 2
    run_method("local", toy_bundle(), point_devices(3), SMALL, engine=engine, observe=observe, rounds=2)
    assert taken == [(3 * size, 0), (0, 0)]


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_codec_makes_updates_smaller_and_the_model_another(codec: str, engine: NumpyEngine) -> None:
    taken: dict[str, tuple[int, int]] = {}

    def models(codec: str) -> list[bytes]:
        def observe(simulation: Simulation, hands: WorkBackend) -> None:
            if simulation.rounds:
                taken[codec] = (simulation.rounds[0].down_bytes, simulation.rounds[0].up_bytes)

        wire = {"codec": codec}
        run = run_method(
            "fedavg", toy_bundle(), point_devices(3), SMALL, engine=engine, observe=observe, rounds=2, wire=wire
        )
        return [tensors.encode_tensors(state.model) for state in run]

    raw, coded = models("raw"), models(codec)
    assert raw[0] == coded[0]
    assert raw[1] != coded[1]
    assert taken[codec][0] == taken["raw"][0]
    header = 400  # each bundle's, whose names get longer
    assert taken[codec][1] < taken["raw"][1] + 3 * header


def test_an_engine_that_is_given_stays_open_however_many_budgets_there_are(engine: NumpyEngine) -> None:
    closed: list[str] = []

    class Lent(NumpyEngine):
        def close(self) -> None:
            closed.append("closed")

    budgets = {"budgets": [f"{100 + each}MB" for each in range(10)]}
    run_method(
        "fedavg", toy_bundle(), point_devices(10), SMALL, engine=Lent(1 << 40, base_bytes=0), rounds=1, fleet=budgets
    )
    assert closed == []


def test_a_run_that_cannot_be_taken_up_says_why_and_does_not_wait(engine: NumpyEngine) -> None:
    def init(bundle: Any, params: Any, seed: int) -> Any:
        raise JobError("the bundle is of another kind")

    broken = replace(methods.load("fedavg"), init=init)
    with pytest.raises(JobError, match=r"has failed: the bundle is of another kind"):
        run_method("fedavg", toy_bundle(), point_devices(2), SMALL, engine=engine, method=broken, rounds=1)


def test_a_run_that_waits_for_devices_that_never_come_ends(engine: NumpyEngine) -> None:
    with pytest.raises(JobError, match=r"has stopped: no device can continue the run"):
        run_method("fedavg", toy_bundle(), point_devices(2), SMALL, engine=engine, rounds=1, cohort={"min_devices": 3})


def test_an_engine_that_the_method_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not supported by fedavg: choose torch or numpy"):
        make_job("fedavg", SMALL, engine="onnx")


TASK = plain.task(engine="numpy", deadline_s=1.0)


def test_what_tasks_share_is_encoded_once_and_each_comes_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, plainly = [], wire.encode
    monkeypatch.setattr(wire, "encode", lambda message: encoded.append(message) or plainly(message))
    given = [
        TASK,
        structs.replace(TASK, seed=7, tier="small", last_counted_round=3),
        structs.replace(TASK, seed=8),
        structs.replace(TASK, attempt=1),
    ]
    come = EncodedTasks()
    found = [come(task) for task in given]
    assert encoded == [given[0], given[3]]
    assert found == [wire.decode(plainly(task), Task) for task in given]
    assert found[1].params is not TASK.params


NETWORK = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
MODEL = {
    "1.weight": np.arange(12, dtype=np.float32).reshape(3, 4) / 12,
    "1.bias": np.zeros(3, np.float32),
    "3.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 6,
    "3.bias": np.zeros(2, np.float32),
}


def test_a_task_tells_its_peak_and_gives_what_it_would_send_or_says_why_not(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x_train=draws.random((20, 4), np.float32), y_train=np.arange(20) % 2)
    method = methods.load("fedavg")
    made = Bundle({"network": NETWORK}, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: MODEL)
    order = method.send(method.init(made, method.params(), 0), DeviceView("alone", None))
    assert order is not None
    data = {"path": str(tmp_path / "own.npz")}
    with TaskProcess("fedavg", "numpy", 1 << 30, data, Path, tmp_path) as process:
        outcome, sent = process.run_task(order, 0)
        assert outcome.weight == 16  # the others are held out
        assert outcome.peak_bytes is not None
        assert 10**7 < outcome.peak_bytes < 1 << 30
        assert outcome.peak_bytes <= process.kernel_peak_bytes < 1.5 * outcome.peak_bytes  # a little later, so no less
        assert sent["model"].keys() == MODEL.keys()
        assert not np.array_equal(sent["model"]["1.weight"], MODEL["1.weight"])
        order.params["network"]["inputs"] = 5  # type: ignore[index]
        with pytest.raises(ModelError, match="a task of fedavg failed in 1074 MB: "):
            process.run_task(order, 1)
