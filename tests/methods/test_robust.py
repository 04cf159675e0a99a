"""Robust aggregation: planted attackers are left out, and with nobody to leave out it is a mean."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import DeviceUpdate, JobError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.methods import robust
from fedquilt.testing.toy_networks import point_devices, run_method, toy_bundle

RULES = ("trimmed_mean", "median", "krum", "multi_krum", "clipped")


def begun(size: int = 2, **params: Any) -> robust.State:
    start = {"x": np.zeros(size, np.float32), "x.running_var": np.ones(1, np.float32), "seen": np.zeros((), np.int64)}
    return robust.init(
        toy_bundle({"name": "x"}, start, kinds={"x.running_var": "buffer", "seen": "counter"}),
        robust.Params(**params),
        0,
    )


def folded(
    state: robust.State, points: Mapping[str, Any], weight: float = 1.0, variances: Mapping[str, float] = {}
) -> robust.CollectedUpdates | None:
    total = None
    for device, point in points.items():
        model = {
            "x": np.array(point, np.float32),
            "x.running_var": np.array([variances.get(device, 1.0)], np.float32),
            "seen": np.array(7, np.int64),
        }
        total = robust.fold(state, total, DeviceUpdate(device, 0, weight, {}, {"model": model}))
    return total


HONEST = {"a": (1.0, 1.0), "b": (1.0, 1.2), "c": (1.2, 1.0), "d": (0.9, 1.0), "e": (1.0, 0.9), "f": (1.1, 1.1)}


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "trimmed_mean", "median"])
@pytest.mark.parametrize("planted", [(1e6, -1e6), (-30.0, -30.0), (1e19, 0.0)])
def test_a_planted_attacker_is_dropped(rule, planted):
    """Seven devices, one of them anywhere: the result lies among the honest ones. FedAvg's mean would not."""
    state = begun(rule=rule, attackers=0.2)
    points = {"0-evil": planted, **HONEST}
    after = robust.step(state, folded(state, points))
    assert np.all((after.model["x"] >= 0.9) & (after.model["x"] <= 1.2))
    assert np.abs(np.mean(list(points.values()), axis=0) - 1).max() > 1
    if "krum" in rule:
        assert "0-evil" not in after.log[0]


def test_krum_takes_one_update_and_multi_krum_the_mean_of_all_but_f():
    """On a line at 0, 1, 3, 7 and 20 with f = 1, scores are 10, 5, 13, 52 and 458."""
    points = {"a": [0.0], "b": [1.0], "c": [3.0], "d": [7.0], "e": [20.0]}
    state = begun(1, rule="krum", attackers=0.2)
    after = robust.step(state, folded(state, points))
    assert after.model["x"] == pytest.approx([1.0])
    assert after.log == ("krum chose b",)
    several = begun(1, rule="multi_krum", attackers=0.2)
    merged = robust.step(several, folded(several, points))
    assert merged.model["x"] == pytest.approx([11 / 4])
    assert merged.log == ("multi_krum chose a, b, c, d",)


def test_a_long_change_is_shortened_and_the_log_says_so():
    points = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (100.0, 0.0)}
    state = begun(rule="clipped", attackers=0.3)
    after = robust.step(state, folded(state, points))
    assert after.model["x"] == pytest.approx([2 / 3, 1 / 3])
    assert after.log == ("1 of 3 changes were clipped to the norm 1, the largest from 100",)
    given = begun(rule="clipped", attackers=0.3, radius=0.5)
    assert robust.step(given, folded(given, points)).model["x"] == pytest.approx([1 / 3, 1 / 6])
    wide = begun(rule="clipped", attackers=0.3, radius=1000.0)
    assert robust.step(wide, folded(wide, points)).log == ()


@pytest.mark.parametrize("rule", RULES)
def test_running_statistics_take_the_median_and_do_not_hide_an_update_from_krum(rule):
    state = begun(rule=rule, attackers=0.2)
    spread = {"a": -1e6, "b": 500.0, "c": 2.0, "d": 3.0, "e": 1e4, "f": 4.0, "g": 2.0}
    points = {**HONEST, "g": (1.05, 1.05)}
    after = robust.step(state, folded(state, points, variances=spread))
    assert after.model["x.running_var"] == pytest.approx([3.0])
    assert after.model["seen"] == 7
    plain = robust.step(state, folded(state, points))
    assert after.model["x"].tobytes() == plain.model["x"].tobytes()


def test_buckets_are_drawn_by_seed_and_round_and_named_in_the_log():
    points = {f"dev-{i}": (1 + 0.01 * i, 1.0) for i in range(10)}
    state = begun(rule="krum", attackers=0.1, bucket=2)
    first = robust.step(state, folded(state, points))
    assert first.log[0].count("+") == 1
    assert robust.step(state, folded(state, dict(reversed(points.items())))).log == first.log
    later = [robust.step(state, replace(folded(state, points), round=number)).log[0] for number in range(8)]
    assert len(set(later)) > 1


@pytest.mark.parametrize(
    "params", [{"rule": "trimmed_mean"}, {"rule": "multi_krum"}, {"rule": "clipped", "radius": 1e9}]
)
def test_with_nobody_to_leave_out_it_is_the_mean(params):
    """f = 0, or nothing to shorten, over three rounds with as many examples on each device: FedAvg."""
    small = {"epochs": 2, "batch": 4, "lr": 0.1}

    def model(name, **more):
        engine, cohort = NumpyEngine(1 << 40, base_bytes=0), {"min_devices": 3}
        *_, last = run_method(
            name, toy_bundle(), point_devices(3), {**small, **more}, engine=engine, rounds=3, cohort=cohort
        )
        return last.model

    ours, theirs = model("robust", attackers=0.0, **params), model("fedavg")
    for name in theirs:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_fleet_with_an_attacker_in_every_round_learns_all_the_same(rule):
    devices, engine = point_devices(7, 40), NumpyEngine(1 << 40, base_bytes=0)
    fleet = {"adversaries": {"share": 0.14, "attack": "sign_flip", "factor": 100.0}}

    def loss(name, rounds, **params):
        chosen, cohort = {"epochs": 2, "batch": 8, "lr": 0.1, **params}, {"min_devices": 3}
        *_, last = run_method(
            name, toy_bundle(), devices, chosen, engine=engine, rounds=rounds, cohort=cohort, fleet=fleet
        )
        evaluated = [compute_metrics(engine.evaluate(last.network, last.model, each.held_out)) for each in devices]
        return float(np.mean([each["loss"] for each in evaluated]))

    assert loss("robust", 8, rule=rule) < np.log(3)
    if rule == "median":
        assert loss("fedavg", 1) > 10  # devices soon refuse to go on from there


def test_claiming_many_examples_gains_nothing():
    for rule in RULES:
        state = begun(rule=rule)
        heavy = folded(state, {**HONEST}, weight=1e9)
        light = folded(state, {**HONEST}, weight=1.0)
        assert tensors.encode_tensors(robust.step(state, heavy).model) == tensors.encode_tensors(
            robust.step(state, light).model
        )


def test_too_few_updates_for_krum_change_nothing_and_it_says_so():
    """One of four may be an attacker: Krum wants five."""
    state = begun(rule="krum", attackers=0.3)
    after = robust.step(state, folded(state, {"a": (1.0, 1.0), "b": (2.0, 2.0), "c": (3.0, 3.0), "d": (3.0, 4.0)}))
    assert after.model is state.model
    few = "4 updates are too few for krum with 1 attackers: the model is unchanged"
    assert robust.METHOD.explain(after) == (few,)
    assert robust.step(state, None) is state


def test_the_log_says_where_a_share_of_attackers_is_nobody():
    state = begun(attackers=0.2)
    few = robust.step(state, folded(state, dict(list(HONEST.items())[:4])))
    assert few.log == ("trimmed_mean left no update out, because 4 updates are too few to assume an attacker",)
    assert robust.step(state, folded(state, HONEST)).log == ()


def test_only_so_many_updates_are_held_whatever_the_order_they_come_in():
    state = begun(rule="median", most=3)
    total, other = folded(state, HONEST), folded(state, dict(reversed(HONEST.items())))
    assert len(total.updates) == 3
    assert total.left_out == 3
    assert total.updates.keys() == other.updates.keys() != {"a", "b", "c"}
    assert robust.step(state, total).log[0] == "3 updates were left out, because at most 3 are compared"


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        ({"size": 4}, r"\[cohort\] size = 4 is too small: with its \[params\] robust needs at least 7 updates"),
        ({}, r"allows rounds with 1 update, but .* needs at least 7: set min_devices = 7"),
        ({"size": 10, "quorum": 0.5}, "allows rounds with 5 updates"),
        ({"size": 10, "quorum": 0.5, "min_devices": 7}, ""),
        ({"size": 7}, ""),
        ({"min_devices": 7}, ""),
    ],
)
def test_a_cohort_too_small_for_the_rule_is_refused_in_the_job(cohort, message):
    """Krum with a third of attackers: 6 updates are too few (f = 2), 7 are enough, and so are all more."""
    table = {"name": "j", "method": "robust", "params": {"rule": "krum", "attackers": 0.34}, "cohort": cohort}
    if not message:
        assert settings.parse_job(table).method == "robust"
        return
    with pytest.raises(JobError, match=message):
        settings.parse_job(table)
