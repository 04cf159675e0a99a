"""The network that a board of a personal method runs: what its evaluation takes, as the network's own tensors."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, DeviceView, ModelError, Task
from fedquilt.core.evaluation import compute_metrics
from fedquilt.testing.toy_networks import image_devices, run_method, toy_bundle

torch = pytest.importorskip("torch", reason="networks with batch normalisation and attention are torch's")
from fedquilt.edge_agent.engines.torch.engine import TorchEngine  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402

INPUT = {"channels": 1, "size": 8}
NORMED = {"name": "residual", "channels": 1, "classes": 3, "width": 2, "input": INPUT}
ATTENTIVE = {"name": "vit", "size": 8, "classes": 3, "patch": 4, "width": 8, "depth": 2, "heads": 2, "input": INPUT}
ATTENTIVE["channels"] = 1
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("apfl", NORMED, {}),
    ("fedala", NORMED, {"layers": 2}),
    ("fedper", NORMED, {"layers": 2}),
    ("fedper", ATTENTIVE, {"stays": "first"}),
    ("ditto", NORMED, {}),
    ("ditto", ATTENTIVE, {"rank": 2}),
    ("fedbn", NORMED, {}),
    ("fedfina", NORMED, {"layers": 2}),
    ("fedlg", NORMED, {}),
    ("fedrep", NORMED, {}),
    ("fedrep", ATTENTIVE, {"rank": 2}),
    ("fedsdg", ATTENTIVE, {"rank": 2}),
    ("fedsdg", ATTENTIVE, {"rank": 2, "head": "private", "gates": "layer"}),
    ("genefl", NORMED, {"clusters": 1}),
    ("local", NORMED, {}),
    ("parfed", NORMED, {"layers": 2}),
    ("pfedme", NORMED, {"lr": 0.05, "pull": 1.0}),
]


class Played:
    """Two rounds on toy devices: the last state, and what each device has kept."""

    def __init__(self, name: str, network: dict[str, Any], params: dict[str, Any]) -> None:
        self.method, self.engine = methods.load(name), TorchEngine(1 << 40, base_bytes=0)
        self.members, self.kept = image_devices(2, 24), {}

        def work(task: Task, site: ClientContext) -> Any:
            answer = self.method.work(task, site)
            self.kept[site.device] = answer.private_state
            return answer

        first = {name: value.numpy() for name, value in registry.load_network(network, seed=1).state_dict().items()}
        self.first = toy_bundle(network, first)
        known = {"epochs": 1, "batch": 6, "lr": 0.1, **params}
        self.states = run_method(
            name, self.first, self.members, known, engine=self.engine, method=replace(self.method, work=work), rounds=2
        )

    def given(self, device: int, view: DeviceView) -> tuple[Task, ClientContext]:
        """A task of the last state that such a device gets, on this device."""
        return deliver_task(self.method, self.method.send(self.states[-1], view), self.members[device], self.engine)


@cache
def played_once(case: int) -> Played:
    """The run of a case: tests only look at it."""
    return Played(*CASES[case])


NUMBERS = [pytest.param(number, id=f"{case[0]}-{case[1]['name']}-{number}") for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", NUMBERS)
def test_a_boards_own_network_is_the_one_that_it_evaluates(case):
    network, played, made = CASES[case][1], played_once(case), []
    for device, member in enumerate(played.members):
        local = played.kept[member.device]
        task, site = played.given(device, DeviceView(member.device, None, (0, 1)))
        wanted = compute_metrics(played.method.check(task, replace(site, private_state=local)))
        task, site = played.given(device, DeviceView("", None))
        own = played.method.personal_model(task, replace(site, device=member.device, private_state=local))
        found = compute_metrics(played.engine.evaluate(network, own, site.held_out))
        assert found["accuracy"] == wanted["accuracy"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        made.append(tensors.encode_tensors(own))
    assert made[0] != made[1]


@pytest.mark.parametrize("case", [each for each in NUMBERS if CASES[each.values[0]][0] != "genefl"])
def test_a_newcomer_runs_what_it_would_evaluate(case):
    network, played = CASES[case][1], played_once(case)
    task, site = played.given(0, DeviceView("", None))
    own = played.method.personal_model(task, site)
    found = compute_metrics(played.engine.evaluate(network, own, site.held_out))
    wanted = compute_metrics(played.method.check(task, site))
    assert found["accuracy"] == wanted["accuracy"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_genefl_has_no_network_for_a_newcomer():
    played = played_once([name for name, _, _ in CASES].index("genefl"))
    task, site = played.given(0, DeviceView("", None))
    assert played.method.check(task, site).examples == 0
    with pytest.raises(ModelError, match=r"dev-0 has no model of job .*: with genefl a device has one"):
        played.method.personal_model(task, site)


def test_every_method_that_evaluates_what_a_board_keeps_says_what_it_is():
    """A method whose evaluation changes with private state, and that has no `personal_model`, would deploy another."""
    tried = {name for name, _, _ in CASES}
    assert {name for name in methods.builtin_names() if methods.load(name).personal_model is not None} == tried


@pytest.mark.parametrize("case", [number for number, case in enumerate(CASES) if case[0] == "fedsdg"])
def test_fedsdg_names_what_each_board_has_for_itself(case):
    found = played_once(case)
    meta = found.method.result(found.states[-1]).meta
    layers = {name for name in meta["private"] if not name.startswith("head")}
    assert layers
    assert all(name.endswith(".weight") for name in layers)
    assert ("head.weight" in meta["private"]) == ("head" in CASES[case][2])


def test_partial_fine_tuning_leaves_nothing_on_boards():
    """Its frozen layers are the same on all of them, so that its result is whole."""
    played = Played("ft_part", NORMED, {})
    found = played.method.result(played.states[-1])
    assert not found.meta.get("private")
    assert found.tensors.keys() == played.first.load("model").keys()
    assert all(np.isfinite(array).all() for array in found.tensors.values())
