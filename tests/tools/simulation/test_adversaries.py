"""Simulated boards that lie: what they send, who they are, and that no agent is ever asked to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import UpdateAccepted
from fedquilt.core import Aggregation, ClientContext, ClientResult, DeviceUpdate, Examples, JobError, Method, Task
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.testing.toy_networks import make_job, point_devices, run_method, toy_bundle, write_bundle
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation import adversaries, run
from fedquilt.tools.simulation.simulated_job import Simulation

START = {"x": np.array([1.0, 2.0], np.float32), "gain": np.array(1.0, np.float32), "seen": np.array(3, np.int64)}
LIARS = 2
DEVICES = [f"dev-{index}" for index in range(5)]


def lying(attack: str, factor: float = 10.0, share: float = 0.4) -> dict[str, Any]:
    return {"adversaries": {"share": share, "attack": attack, "factor": factor}}


def one_further(seen: dict[str, Mapping[str, np.ndarray]], labels: dict[str, np.ndarray]) -> Method:
    """FedAvg with work that adds 1 + the device's number to each value, and a fold that notes what comes."""
    method = methods.load("fedavg")

    def work(task: Task, site: ClientContext) -> ClientResult:
        labels[site.device] = site.train.y
        number = 1 + int(site.device.rpartition("-")[2])
        received = site.load("model")
        model = {name: np.asarray(value + number).astype(value.dtype) for name, value in received.items()}
        return ClientResult({"model": model}, weight=float(len(site.train)), metrics={"loss": 0.5})

    def fold(state: Any, so_far: Any, update: DeviceUpdate) -> Any:
        seen[update.device] = update.bundles["model"]
        return method.aggregation.fold(state, so_far, update)

    return replace(method, work=work, aggregation=Aggregation(fold))


def sent(**fleet: Any) -> tuple[dict[str, Mapping[str, np.ndarray]], frozenset[str], dict[str, np.ndarray]]:
    seen: dict[str, Mapping[str, np.ndarray]] = {}
    labels: dict[str, np.ndarray] = {}
    drawn: set[str] = set()
    run_method(
        "fedavg",
        toy_bundle({"name": "x", "classes": 3}, START, kinds={"seen": "counter"}),
        point_devices(5),
        engine=NumpyEngine(1 << 40, base_bytes=0),
        method=one_further(seen, labels),
        observe=lambda simulation, hands: drawn.update(simulation.adversaries),
        rounds=1,
        fleet=fleet,
    )
    return seen, frozenset(drawn), labels


def changes(seen: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, list[float]]:
    return {
        device: [*(model["x"] - START["x"]).tolist(), float(model["gain"] - START["gain"])]
        for device, model in seen.items()
    }


def test_without_adversaries_everybody_is_honest() -> None:
    """1 is added by dev-0, 5 by dev-4."""
    seen, drawn, _ = sent()
    assert not drawn
    assert changes(seen) == {device: [1.0 + i] * 3 for i, device in enumerate(DEVICES)}


@pytest.mark.parametrize(("attack", "times"), [("scaled", 10.0), ("sign_flip", -10.0)])
def test_changes_are_scaled_or_turned_round(attack: str, times: float) -> None:
    seen, drawn, _ = sent(**lying(attack))
    assert len(drawn) == LIARS
    for index, device in enumerate(DEVICES):
        assert changes(seen)[device] == pytest.approx([(1 + index) * (times if device in drawn else 1)] * 3)
        assert seen[device]["seen"] == 3 + 1 + index


def test_flipped_labels_are_learned_from_and_nothing_else_is_changed() -> None:
    """Class c of three becomes 2 - c on those that lie."""
    honest, _, before = sent()
    seen, drawn, labels = sent(**lying("label_flip"))
    assert changes(seen) == changes(honest)
    for device in DEVICES:
        assert labels[device].tolist() == (2 - before[device] if device in drawn else before[device]).tolist()


def test_numbers_and_several_labels_are_mirrored_within_their_range() -> None:
    """1 and 5 change places, 0 and 1 too; x is what it was."""
    x = np.zeros((3, 2), np.float32)
    numbers = adversaries.mirror_labels(Examples(x, np.array([1.0, 2.0, 5.0])), {"task": "regression", "classes": 1})
    assert numbers.y.tolist() == [5.0, 4.0, 1.0]
    several = adversaries.mirror_labels(Examples(x[:2], np.array([[0, 1], [1, 0]])), {"task": "labels", "classes": 2})
    assert several.y.tolist() == [[1, 0], [0, 1]]


def test_inner_product_manipulation_sends_the_honest_mean_turned_round() -> None:
    """All that lie send the same: - 0.5 times the mean of what the three others add."""
    seen, drawn, _ = sent(**lying("inner_product", 0.5))
    own = {device: 1 + index for index, device in enumerate(DEVICES)}
    mean = np.mean([own[device] for device in DEVICES if device not in drawn])
    for device, change in changes(seen).items():
        assert change == pytest.approx([-0.5 * mean if device in drawn else own[device]] * 3)


def test_who_lies_is_drawn_by_the_jobs_seed_alone() -> None:
    drawn = {
        seed: adversaries.choose_adversaries(make_job("fedavg", seed=seed, fleet=lying("scaled")), DEVICES)
        for seed in range(20)
    }
    other = adversaries.choose_adversaries(make_job("robust", seed=3, fleet=lying("label_flip")), DEVICES[::-1])
    assert other == drawn[3]
    assert {len(each) for each in drawn.values()} == {LIARS}
    assert len(set(drawn.values())) > 1
    assert len(adversaries.choose_adversaries(make_job("fedavg", fleet=lying("scaled", share=0.01)), DEVICES)) == 1


def digits(**table: Any) -> settings.JobSettings:
    return settings.parse_job(
        {
            "name": "lies",
            "method": "fedavg",
            "engine": "numpy",
            "rounds": 2,
            "params": {"batch": 16, "lr": 0.1},
            "model": {"name": "mlp", "inputs": 64, "hidden": [6], "classes": 10},
            "data": {"path": str(Path(demo.__file__).parent / "digits.npz"), "limit": 240},
            **table,
            "fleet": {"devices": 6, **table.get("fleet", {})},
        }
    )


def test_a_run_that_was_interrupted_in_a_round_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = make_job("fedavg", {"batch": 4}, rounds=2, fleet=lying("inner_product"))
    bundle = write_bundle(tmp_path / "bundle", toy_bundle())
    carry, held = run.make_local_backend(point_devices(5), engine=NumpyEngine(1 << 40, base_bytes=0))
    note, answered = Simulation._record_event, []

    class Killed(Exception):
        pass

    def until_two_have_answered(self: Simulation, fact: Any) -> None:
        note(self, fact)
        if isinstance(fact, UpdateAccepted):
            answered.append(fact.update.device)
            if len(answered) == 2:
                raise Killed

    def played(name: str) -> Simulation:
        with Simulation(wanted, bundle, held, tmp_path / name, engine="numpy") as simulation:
            list(run.run_rounds(simulation, carry))
            return simulation

    whole = played("whole")
    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "_record_event", until_two_have_answered)
        with pytest.raises(Killed):
            played("cut")
    assert not set(answered) & whole.adversaries
    again = played("cut")
    assert again.state_digest == whole.state_digest
    assert [each.devices for each in again.rounds] == [each.devices for each in whole.rounds]


def test_inner_product_manipulation_wants_updates_as_they_are() -> None:
    with pytest.raises(JobError, match="not supported with the attack 'inner_product'"):
        digits(fleet=lying("inner_product"), wire={"codec": "int8"})
    assert digits(fleet=lying("scaled"), wire={"codec": "int8"}).fleet.adversaries is not None


def test_an_attack_that_there_is_not_is_named() -> None:
    with pytest.raises(JobError, match="sign_flip"):
        digits(fleet=lying("backdoor"))


@pytest.mark.parametrize("verb", [["run"], ["simulate", "--link", "embedded"], ["simulate"]])
def test_no_agent_is_asked_to_lie(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = digits(fleet=lying("scaled"))
    prepare.prepare_and_check(wanted, tmp_path / "job.bundle")
    table = (
        'name = "lies"\nmethod = "fedavg"\nmodel = { name = "mlp", inputs = 64, hidden = [6], classes = 10 }\n'
        f'data.path = "{Path(demo.__file__).parent / "digits.npz"}"\n'
        'fleet.adversaries = { share = 0.2, attack = "scaled" }\n'
    )
    (tmp_path / "job.toml").write_text(table)
    where = [str(tmp_path / "job.toml"), "--home", str(tmp_path / "home")]
    assert main([verb[0], *where, *verb[1:]]) == 2
    assert "[fleet] adversaries have no effect on agents" in capsys.readouterr().err
    assert not list((tmp_path / "home").glob("agents/*"))
