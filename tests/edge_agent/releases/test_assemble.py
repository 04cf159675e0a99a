"""A board's own network, made of what was sent and of what the board has kept: which one it is, and what is refused."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain
import pytest
from linear_models import board_data, fitting_budget_bytes
from one_agent import Board
from toy_kinds import release

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import BlobRef, Traits
from fedquilt.core.evaluation import compute_metrics
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.agent_state import PrivateState
from fedquilt.edge_agent.engines import numpy_engine as numpy_engine
from fedquilt.edge_agent.releases import check_process
from fedquilt.edge_agent.releases.models import ModelReleases
from fedquilt.edge_agent.settings import AgentSettings, ModelSettings
from fedquilt.edge_agent.task.protocol import CheckRequest, SplitModelFiles, WorkResult
from fedquilt.formats import personal_models
from fedquilt.onnx import graph_check, weights

NETWORK = {"name": "mlp", "inputs": 64, "hidden": [8], "classes": 10}
FIRST = numpy_engine.init_tensors(NETWORK, seed=0)
HEAD = {name: np.full_like(FIRST[name], 0.25) for name in ("3.weight", "3.bias")}
JOB = "digits-1"


@pytest.fixture(scope="module")
def sent() -> bytes:
    """What is sent of a run of FedRep, whose boards keep the last layer."""
    pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    from fedquilt.models.networks import onnx_file

    task = plain.task(job=JOB, method="fedrep", params={"network": NETWORK, "rank": 0}, actions=("check",))
    bundles = {
        "own": {name: FIRST[name] for name in HEAD},
        "model": {name: array for name, array in FIRST.items() if name not in HEAD},
    }
    return personal_models.encode_personal(task, onnx_file.export_without_weights(NETWORK), bundles)


class Place:
    """A release of a model in its folder, and a private state."""

    def __init__(self, folder: Path, sent: bytes) -> None:
        self.folder = folder
        self.model, self.shared = folder / "model.onnx", folder / "shared.safetensors"
        self.shared.write_bytes(sent)
        self.private = folder / "private"

    def keep(self, kept: dict[str, np.ndarray]) -> SplitModelFiles:
        self.private.write_bytes(tensors.encode_tensors(kept))
        sha256 = hashlib.sha256(self.private.read_bytes()).hexdigest()
        return SplitModelFiles(str(self.shared), "d", str(self.private), sha256)

    def checked(self, parted: SplitModelFiles, **changes: Any) -> WorkResult:
        given = {"budget_bytes": fitting_budget_bytes(), "data": board_data(), "timing_s": 0.01, **changes}
        order = CheckRequest(model=str(self.model), current_model=None, split_model=parted, **given)
        return check_process.run_check(order)


@pytest.fixture
def place(tmp_path: Path, sent: bytes) -> Place:
    return Place(tmp_path, sent)


def accuracy(model: dict[str, np.ndarray]) -> float:
    """Of a network on the held-out digits, by the engine that trains."""
    _, held = examples.load_share(DataSpec(**board_data()))
    engine = numpy_engine.NumpyEngine(1 << 40, base_bytes=0)
    return float(compute_metrics(engine.evaluate(NETWORK, model, held))["accuracy"])


def test_the_boards_own_part_is_in_its_network_and_is_checked_on_its_own_data(place: Place) -> None:
    draws = np.random.default_rng(1)
    head = {name: draws.normal(size=array.shape).astype(np.float32) for name, array in HEAD.items()}
    found = place.checked(place.keep(head))
    assert (found.code, found.reason, found.note) == ("ok", "", "")
    whole = b"".join(weights.fill_graph(personal_models.read_personal(place.shared).graph.data, {**FIRST, **head}))
    assert place.model.read_bytes() == whole
    assert found.metrics["accuracy"] == pytest.approx(accuracy({**FIRST, **head}))
    graph_check.check_file(place.model)


def test_a_newcomer_gets_what_the_method_evaluates_of_one_and_says_so(place: Place) -> None:
    found = place.checked(SplitModelFiles(str(place.shared), "d"))
    assert found.code == "ok"
    assert found.note == f"this device has no private state of {JOB}: the network is that of a new device"
    assert place.model.read_bytes() == b"".join(
        weights.fill_graph(personal_models.read_personal(place.shared).graph.data, FIRST)
    )


def test_without_data_it_is_put_together_as_well(place: Place) -> None:
    found = place.checked(place.keep(HEAD), data={})
    assert (found.code, found.note) == ("ok", "accuracy was not measured: this device has no [data]")


def test_a_private_state_that_is_lost_is_told_or_refused_as_the_method_has_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = place.keep(HEAD)
    place.private.write_bytes(place.private.read_bytes()[:-1] + b"x")
    found = place.checked(parted)
    assert found.code == "ok"
    assert f"the private state of {JOB} is damaged on this device's disk" in found.note
    method = replace(methods.load("fedrep"), traits=Traits(replaces_private_state=False))
    monkeypatch.setattr(methods, "load", lambda name: method)
    place.model.unlink()
    found = place.checked(parted)
    assert found.code == "disk"
    assert "fedrep does not allow a device to start with new private state" in found.reason
    assert not place.model.exists()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda place: place.keep({"3.weight": np.zeros((2, 2), np.float32)}), "3.weight"),
        (lambda place: place.keep({**HEAD, "3.bias": np.full(10, np.nan, np.float32)}), "3.bias"),
        (lambda place: place.shared.write_bytes(b"x") and place.keep(HEAD), "does not name its run"),
        (lambda place: place.shared.write_bytes(place.shared.read_bytes()[:-9]) and place.keep(HEAD), "damaged"),
        (lambda place: place.model.mkdir() or place.keep(HEAD), "cannot write"),
    ],
)
def test_what_makes_no_network_is_refused_by_name(
    place: Place, spoil: Callable[[Place], SplitModelFiles], said: str
) -> None:
    found = place.checked(spoil(place))
    assert found.code != "ok"
    assert said in found.reason


def test_a_method_that_cannot_put_it_together_is_refused_by_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(methods.load("fedrep"), personal_model=None)
    monkeypatch.setattr(methods, "load", lambda name: method)
    found = place.checked(place.keep(HEAD))
    assert (found.code, found.reason) == (
        "method",
        "method 'fedrep' does not define how a device assembles its network",
    )


# -- in the agent ---------------------------------------------------------------------------------


class Checks:
    """A check's process that answers nothing: what it is asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def start(self, order: Any, now_s: float) -> None:
        self.requests.append(order)


class Agent:
    """A board's models, to whom a result with parts on boards is sent; the test carries their checks out."""

    def __init__(self, root: Path, sent: bytes, **settings: Any) -> None:
        self.root, self.asked = root, list[str]()
        self.kept = PrivateState(str(root / "private"), "5" * 64)
        self.settings = AgentSettings(device="d", home=str(root / "d"), models=ModelSettings(**settings))
        self.checks = Checks()
        self.models = self.begin()
        self.blob = root / "blob"
        self.blob.write_bytes(sent)
        self.wanted = release(1, BlobRef(sha256=hashlib.sha256(sent).hexdigest(), size=len(sent)))

    def begin(self) -> ModelReleases:
        def kept(job: str) -> PrivateState:
            self.asked.append(job)
            return self.kept

        return ModelReleases(self.settings, Board(), self.checks, private_state=kept)  # type: ignore[arg-type]

    @property
    def place(self) -> Path:
        assert self.wanted.blob is not None
        return self.models.folder / self.wanted.blob.sha256[:16]

    @property
    def out(self) -> Path:
        return self.root / "d/check/out"


def test_the_check_is_told_where_the_parts_of_that_run_are(tmp_path: Path, sent: bytes) -> None:
    agent = Agent(tmp_path, sent, folder=str(tmp_path / "srv"))
    agent.models.stage(agent.wanted, agent.blob)
    agent.models.start_check(agent.wanted)
    (order,) = agent.checks.requests
    shared = agent.place / "shared.safetensors"
    assert order.split_model == SplitModelFiles(str(shared), "d", str(tmp_path / "private"), "5" * 64, "")
    assert order.model == str(agent.out / "model.onnx")
    assert agent.asked == [JOB]
    assert shared.read_bytes() == sent
    assert not (agent.place / "model.onnx").exists()


def test_what_runs_is_known_by_what_was_sent_and_the_runner_by_the_file(tmp_path: Path, sent: bytes) -> None:
    agent = Agent(tmp_path, sent)
    agent.models.stage(agent.wanted, agent.blob)
    (agent.place / "model.onnx").write_bytes(b"made here")
    agent.models.activate(agent.wanted)
    assert agent.wanted.blob is not None
    assert agent.models.current_sha256() == agent.wanted.blob.sha256
    (agent.place / "release.json").write_bytes(b"{")
    again = agent.begin()
    assert again.current_sha256() == agent.wanted.blob.sha256
    made = hashlib.sha256(b"made here").hexdigest()
    served = agent.models.folder / "served.json"
    for model, taken_up in ((made, True), (agent.wanted.blob.sha256, False)):
        served.write_text(f'{{"at": {time.time()}, "model": "{model}", "served": 5}}')
        watched = agent.begin()
        watched.activate(agent.wanted)
        assert watched.is_settled() is taken_up
