"""Robust aggregation: planted attackers are left out, and with nobody to leave out it is a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedquilt import methods, tensors
from fedquilt.coordinator import settings
from fedquilt.core import Answer, Contribution, JobError, Site, Task
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.methods import krum
from fedquilt.testing.toys import learners, play, to_train


def begun(size: int = 2, **params: Any) -> krum.State:
    start = {"x": np.zeros(size, np.float32), "seen": np.zeros((), np.int64)}
    return krum.init(to_train({"name": "x"}, start), krum.Params(**params), 0)


def folded(state: krum.State, points: Mapping[str, Any], weight: float = 1.0) -> krum.Held | None:
    total = None
    for device, point in points.items():
        model = {"x": np.array(point, np.float32), "seen": np.array(7, np.int64)}
        total = krum.fold(state, total, Contribution(device, 0, weight, {}, {"model": model}))
    return total


HONEST = {"a": (1.0, 1.0), "b": (1.0, 1.2), "c": (1.2, 1.0), "d": (0.9, 1.0), "e": (1.0, 0.9), "f": (1.1, 1.1)}


@pytest.mark.parametrize("rule", ["krum", "trimmed_mean", "median"])
@pytest.mark.parametrize("planted", [(1e6, -1e6), (-30.0, -30.0), (1e19, 0.0)])
def test_a_planted_attacker_is_dropped(rule: Any, planted: tuple[float, float]) -> None:
    """Seven devices, one of them anywhere: the result lies among the honest ones. FedAvg's mean would not."""
    state = begun(rule=rule, attackers=0.2)
    points = {"0-evil": planted, **HONEST}
    after = krum.step(state, folded(state, points))
    assert np.all((after.model["x"] >= 0.9) & (after.model["x"] <= 1.2))
    assert np.abs(np.mean(list(points.values()), axis=0) - 1).max() > 1
    if rule == "krum":
        assert "0-evil" not in after.told[0]


@pytest.mark.parametrize("rule", ["krum", "median", "trimmed_mean"])
def test_two_attackers_who_agree_are_dropped_too(rule: Any) -> None:
    """Close to each other, so that each has a near neighbour: f = 2 of eight looks at four."""
    state = begun(rule=rule, attackers=0.25)
    points = {**HONEST, "y": (50.0, 50.0), "z": (50.0, 50.0)}
    after = krum.step(state, folded(state, points))
    assert np.all((after.model["x"] >= 0.9) & (after.model["x"] <= 1.2))


def test_krums_scores_are_summed_up_by_hand() -> None:
    """On a line at 0, 1, 3, 7 and 20 with f = 1: two nearest of each, squared.

    0: 1 + 9; 1: 1 + 4; 3: 4 + 9; 7: 16 + 36; 20: 169 + 289. So the model at 1 is taken.
    """
    places = {"a": 0.0, "b": 1.0, "c": 3.0, "d": 7.0, "e": 20.0}
    models = [{"x": np.array([place], np.float32)} for place in places.values()]
    assert krum.scores(models, 1).tolist() == [10.0, 5.0, 13.0, 52.0, 458.0]
    state = begun(1, attackers=0.2)
    after = krum.step(state, folded(state, {k: [v] for k, v in places.items()}))
    assert after.model["x"] == pytest.approx([1.0])
    assert after.told == ("Krum took b",)
    several = begun(1, attackers=0.2, chosen=3)
    merged = krum.step(several, folded(several, {k: [v] for k, v in places.items()}))
    assert merged.model["x"] == pytest.approx([4 / 3])
    assert merged.told == ("Krum took a, b, c",)


def test_trimmed_mean_and_median_go_value_by_value() -> None:
    """Of 0, 1, 3, 7, 20 the mean without both ends is 11/3, the median 3; of four values 1, 3, 7, 20 it is 5."""
    values = np.array([[20.0, 0.0], [0.0, 20.0], [3.0, 1.0], [1.0, 7.0], [7.0, 3.0]])
    assert krum.middle(values, 1) == pytest.approx([11 / 3, 11 / 3])
    assert krum.middle(values, 2) == pytest.approx([3.0, 3.0])
    assert krum.middle(np.array([[1.0], [20.0], [3.0], [7.0]]), 1) == pytest.approx([5.0])
    assert krum.middle(np.array([3, 2**60, 4]), 0) == 4  # a counter: nobody sets it alone


@pytest.mark.parametrize("params", [{"rule": "trimmed_mean"}, {"rule": "krum", "chosen": 0}])
def test_with_nobody_to_leave_out_it_is_the_mean(params: dict[str, Any]) -> None:
    """Trimmed mean and Multi-Krum with f = 0, over three rounds with as many examples on each device: FedAvg."""
    small = {"epochs": 2, "batch": 4, "lr": 0.1}

    def model(name: str, **more: Any) -> Mapping[str, np.ndarray]:
        engine = NumpyEngine(1 << 40, base_bytes=0)
        *_, last = play(name, to_train(), learners(3), {**small, **more}, engine=engine, rounds=3)
        return last.model

    ours, theirs = model("krum", attackers=0.0, **params), model("fedavg")
    for name in theirs:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-6)


@pytest.mark.parametrize("rule", ["krum", "trimmed_mean", "median"])
def test_a_fleet_with_an_attacker_in_every_round_learns_all_the_same(rule: Any) -> None:
    """One of seven sends -100 times its model: FedAvg explodes, here the others have less loss than a guess (ln 3)."""
    devices, engine = learners(7, 40), NumpyEngine(1 << 40, base_bytes=0)

    def loss(name: str, **params: Any) -> float:
        method = methods.load(name)

        def work(task: Task, site: Site) -> Answer:
            answer = method.work(task, site)
            if site.device != "dev-3":
                return answer
            model = {key: -100 * array for key, array in answer.bundles["model"].items()}
            return replace(answer, bundles={"model": model})

        chosen = {"epochs": 2, "batch": 8, "lr": 0.1, **params}
        double = replace(method, work=work)
        *_, last = play(name, to_train(), devices, chosen, engine=engine, method=double, rounds=8)
        held = [
            engine.evaluate(last.network, last.model, each.held)["loss"] for each in devices if each.device != "dev-3"
        ]
        return float(np.mean(held))

    assert loss("krum", rule=rule) < np.log(3)
    if rule == "median":
        assert loss("fedavg") > 1e6


def test_claiming_many_examples_gains_nothing() -> None:
    """A weight of 1e9 counts as one of 1."""
    for rule in ("krum", "trimmed_mean", "median"):
        state = begun(rule=rule)
        heavy = folded(state, {**HONEST}, weight=1e9)
        light = folded(state, {**HONEST}, weight=1.0)
        assert tensors.encode(krum.step(state, heavy).model) == tensors.encode(krum.step(state, light).model)


def test_too_few_updates_for_krum_change_nothing_and_it_says_so() -> None:
    """One of four may be an attacker: Krum wants five."""
    state = begun(attackers=0.3)
    after = krum.step(state, folded(state, {"a": (1.0, 1.0), "b": (2.0, 2.0), "c": (3.0, 3.0), "d": (3.0, 4.0)}))
    assert after.model is state.model
    assert krum.METHOD.explain(after) == ("4 updates are too few for Krum with 1 attackers: the round changed nothing",)
    assert krum.step(state, None) is state


def test_only_so_many_updates_are_held_whatever_the_order_they_come_in() -> None:
    """Three of six, drawn by the seed and not by name; how many were left out is told."""
    state = begun(rule="median", most=3)
    total, other = folded(state, HONEST), folded(state, dict(reversed(HONEST.items())))
    assert total is not None
    assert other is not None
    assert len(total.sent) == 3
    assert total.left_out == 3
    assert total.sent.keys() == other.sent.keys() != {"a", "b", "c"}
    assert krum.step(state, total).told[0] == "3 updates beyond the 3 held at once were left out"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"attackers": 0.5}, r"attackers = "),
        ({"rule": "mean"}, r"rule = "),
        ({"most": 2}, "Krum wants more than 2 f"),
        ({"most": 10, "attackers": 0.4}, "Krum wants more than 2 f"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_in_the_job(params: dict[str, Any], message: str) -> None:
    """Half of the updates wrong is beyond any rule."""
    with pytest.raises(JobError, match=message):
        settings.parse({"name": "j", "method": "krum", "params": params})
