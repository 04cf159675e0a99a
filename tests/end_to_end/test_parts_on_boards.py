"""Results of which each board has a part for itself, brought to the boards: agents as processes and a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from federation import LIMIT_S, Agents, Federation, make_job, read_events, write_digits
from ordinary import User

from fedquilt.arrays import tensors
from fedquilt.coordinator import run_control
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.events import UpdateAccepted
from fedquilt.coordinator.rounds.rollout import Rollout, RolloutPlan
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.core.evaluation import main_metric_value
from fedquilt.tools import simulation
from fedquilt.tools.artefacts import export
from fedquilt.transport import link as links
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

METHODS = ("fedbn", "genefl")
SHARES = {"canary": 0.4, "phases": (1.0,), "soak_s": 1.0}


@pytest.fixture
def federation(
    user: User, mosquitto: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Federation]:
    torch = pytest.importorskip("torch", reason="networks with batch normalisation are torch's")
    pytest.importorskip("onnxruntime", reason="boards run models with it")
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data, broker = write_digits(user.folder / "digits.npz"), mosquitto().url
    boards = simulation.agents.FleetPlan(make_job("fedavg", "perceptron", data), Path(), Path()).make_agent_tables()
    yield Federation(broker, Agents(user, broker, boards), data, tmp_path / "bundles")
    torch.set_num_threads(threads)


def rolled_out(federation: Federation, home: Path, run: str, killed: str = "") -> Rollout:
    """Deploy a run, and wait until every board has committed it; `killed`: dies when it says that it checks."""
    link = MqttLink(Broker.from_url(federation.broker), "fedquilt-coordinator-fleet")
    end_s, left = time.monotonic() + LIMIT_S, [killed] if killed else []
    with Store(home) as store:
        id = run_control.queue_rollout(
            store, RolloutPlan("model", run, **SHARES), export.encode_for_devices(store, run)[0]
        )
        assert store.acquire_lock()

        def done() -> bool:
            state = store.rollouts.find_rollout(id).state
            assert time.monotonic() < end_s, f"{state.reports} {federation.agents.log.read_text()[-3000:]}"
            if left and state.device_phase(left[0]) == "checking":
                federation.agents.kill(left[0])
                federation.agents.start(left.pop())
            federation.agents.require_alive()
            return state.status == "done" and set(state.count_outcomes()) == {"committed"}

        server = Server(LinkExecutor(link, "fleet", store.blob_store, store.begin_epoch()), store)
        links.run_endpoint(server, link, done)
        server.shut_down()
        assert not left, f"{killed} was not killed while it checked"
        return store.rollouts.find_rollout(id).state


def test_boards_put_their_own_parts_into_what_they_run(federation: Federation, user: User, tmp_path: Path) -> None:
    """After two jobs each is deployed: all boards run networks of their own, with the accuracy of its evaluation.

    Batch normalisation and a whole model stay on the boards. An agent is killed while it checks.
    """
    onnx, home = pytest.importorskip("onnx"), tmp_path / "runs"
    runs = {}
    for method in METHODS:
        plan = federation.plan(method, "batch-norm", home)
        with Store(home) as store:
            runs[method] = plan.queue_or_resume(store)
        federation.coordinate(home, runs[method])
    for method, run in runs.items():
        state = rolled_out(federation, home, run, federation.agents.names[0] if method == "fedbn" else "")
        with Store(home) as store:
            shared = {} if method == "genefl" else dict(export.load_result(store, run).tensors)
        made = set()
        for device in federation.agents.names:
            path = (user.home / device / "models" / "current" / "model.onnx").resolve()
            held = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(str(path)).graph.initializer}
            kept = sorted((user.home / device / "private").glob(f"{run}@*"), key=lambda file: round_of(file.name))[-1]
            own = tensors.read_tensors(kept)
            assert own
            for name, array in {**shared, **own}.items():
                if array.dtype.kind == "f":
                    assert np.array_equal(held[name], array), (method, device, name)
            told = [
                main_metric_value(fact.update.evaluation)
                for fact in read_events(home, run)
                if isinstance(fact, UpdateAccepted) and fact.update.device == device
                if fact.update.evaluation is not None and fact.update.evaluation.examples
            ]
            assert state.reports[device].metrics["accuracy"] == pytest.approx(told[-1], abs=1e-6), (method, device)
            made.add(path.read_bytes())
        assert len(made) == len(federation.agents.names), "each board has a network of its own"


def round_of(name: str) -> int:
    return int(name.rpartition("@")[2].partition(".")[0])
