"""AFL over toy donors: one round, exact, whatever the split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.core import DeviceUpdate, DeviceView, Examples, JobError, ModelError, UpdateError
from fedquilt.data import inputs
from fedquilt.methods.afl import METHOD, Params, State
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, joint_head
from fedquilt.models.stitching.algebra.class_moments import ExactMomentSums
from fedquilt.testing.toy_networks import build_donors, image_devices, run_method
from fedquilt.tools.simulation import DeviceData

POOLED = Examples(*(np.concatenate([getattr(each.train, part) for each in image_devices()]) for part in ("x", "y")))
PATHS = {"ash": ("ash.0", "ash.1", "ash.2"), "elm": ("elm.0", "elm.1")}


def played(
    devices: list[DeviceData] | None = None, *, rounds: int = 100, cohort: int = 0, **params: Any
) -> list[State]:
    bundle, runner = build_donors()
    members_ = image_devices() if devices is None else devices
    table = {"cohort": {"size": cohort}}
    return run_method("afl", bundle, members_, params, engine=runner, method=METHOD, seed=3, rounds=rounds, **table)


def features(x: np.ndarray, path: tuple[str, ...] = PATHS["ash"]) -> np.ndarray:
    """Pooled last maps of a donor's body, float32 as the devices hold them."""
    bundle, runner = build_donors()
    maps = inputs.prepare_inputs(x, bundle.meta["input"])
    for name in path:
        maps = runner.run(Path(f"{name}.onnx"), maps)
    return np.asarray(stitched_network.global_average_pool(maps).astype(np.float32).astype(np.float64))


def central(z: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """(labels, d): ridge regression of one-hot labels on z without bias, as one stacked least-squares problem."""
    d = z.shape[1]
    lam = ridge * (z**2).sum() / d
    rows = np.concatenate([z, np.sqrt(lam) * np.eye(d)])
    return np.asarray(np.linalg.lstsq(rows, np.concatenate([np.eye(3)[y], np.zeros((d, 3))]), rcond=None)[0].T)


def split(parts: list[np.ndarray]) -> list[DeviceData]:
    """The pooled examples dealt out anew."""
    none = Examples(POOLED.x[:0], POOLED.y[:0])
    return [DeviceData(f"dev-{i:02}", Examples(POOLED.x[rows], POOLED.y[rows]), none) for i, rows in enumerate(parts)]


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("donor", ["ash", "elm"])
def test_one_round_equals_the_central_solution(donor, ridge):
    first, last = played(donor=donor, ridge=ridge)
    assert (METHOD.is_done(first), METHOD.is_done(last)) == (False, True)
    head = stitched_network.from_artefact(*(lambda a: (a.meta, a.tensors))(METHOD.result(last))).head
    wanted = central(features(POOLED.x, PATHS[donor]), POOLED.y, ridge)
    np.testing.assert_allclose(head["weights"], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    assert not head["bias"].any()


SPLITS = {
    "one device": [np.arange(len(POOLED))],
    "one example each at first": np.split(np.arange(len(POOLED)), [*range(1, 25), 100]),
    "by label": [np.flatnonzero(POOLED.y == label) for label in range(3)],
    "uneven": np.split(np.arange(len(POOLED)), [2, 5, 100]),
}


PARAMS = ({"ridge": 1e-3}, {"gcv": True}, {"random_features": 20, "ridge": 1e-3})


@pytest.mark.parametrize(
    ("name", "params"),
    [  # by day each split and each head once
        pytest.param(name, params, marks=() if row % 3 == column else pytest.mark.nightly, id=f"{name}-{params}")
        for row, name in enumerate(SPLITS)
        for column, params in enumerate(PARAMS)
    ],
)
def test_the_split_and_the_order_of_devices_do_not_matter(name, params):
    parts = SPLITS[name]
    *_, wanted = played(**params)
    *_, found = played(split(parts), **params)
    renamed = [replace(each, device=f"dev-{99 - i:02}") for i, each in enumerate(split(parts))]
    *_, turned = played(renamed, **params)
    for other in (found, turned):
        for part, array in wanted.head.items():
            np.testing.assert_allclose(other.head[part], array, rtol=0, atol=1e-6 * np.abs(array).max())


def test_the_papers_aggregation_gives_the_same():
    *_, last = played()
    gamma, solved, inner = 1.0, [], []
    for each in image_devices():
        z = features(each.train.x)
        inner.append(z.T @ z + gamma * np.eye(z.shape[1]))
        solved.append(np.linalg.solve(inner[-1], z.T @ np.eye(3)[each.train.y]))
    w, c = solved[0], inner[0]
    for other, own in zip(solved[1:], inner[1:], strict=True):
        eye, both = np.eye(len(c)), np.linalg.inv(c + own)
        ours = eye - np.linalg.inv(c) @ own + np.linalg.inv(c) @ own @ both @ own
        theirs = eye - np.linalg.inv(own) @ c + np.linalg.inv(own) @ c @ both @ c
        w, c = ours @ w + theirs @ other, c + own
    cleaned = w + len(inner) * gamma * np.linalg.inv(c - len(inner) * gamma * np.eye(len(c))) @ w
    np.testing.assert_allclose(last.head["weights"], cleaned.T, rtol=0, atol=1e-6 * np.abs(cleaned).max())


def test_cross_validation_chooses_a_ridge_of_standardised_features():
    *_, last = played(gcv=True)
    z = features(POOLED.x)
    varies = z.std(axis=0) > 1e-6
    s, t = (z[:, varies] - z[:, varies].mean(axis=0)) / z[:, varies].std(axis=0), np.eye(3)[POOLED.y]
    tried = []
    for ridge in joint_head.STRENGTHS:
        hat = s @ np.linalg.solve(s.T @ s + len(s) * ridge * np.eye(s.shape[1]), s.T)
        rest = t - t.mean(axis=0) - hat @ (t - t.mean(axis=0))
        tried.append(((rest**2).sum() / (1 - (np.trace(hat) + 1) / len(s)) ** 2, -ridge))
    ridge = -min(tried)[1]
    inner = s.T @ s + len(s) * ridge * np.eye(s.shape[1])
    wanted = s @ np.linalg.solve(inner, s.T @ (t - t.mean(axis=0))) + t.mean(axis=0)
    np.testing.assert_allclose(z @ last.head["weights"].T + last.head["bias"], wanted, atol=1e-5)


def test_random_features_are_in_the_result():
    *_, last = played(random_features=20, ridge=1e-3)
    found = METHOD.result(last)
    bundle, runner = build_donors()
    x = inputs.prepare_inputs(POOLED.x, found.meta["input"])
    run = lambda block, maps: runner.run(Path(block.stages[0][0]), maps)  # noqa: E731
    network = stitched_network.from_artefact(found.meta, found.tensors)
    scores = stitched_network.compute_label_scores(
        network, stitched_network.load_donor_pool(bundle.meta).blocks, run, x
    )
    drawn = np.maximum(features(POOLED.x) @ network.head["hidden"].T, 0)
    np.testing.assert_allclose(scores, drawn @ central(drawn, POOLED.y, 1e-3).T, atol=1e-4)
    assert (scores.argmax(axis=1) == POOLED.y).mean() > 0.8


def test_rounds_hear_each_device_once():
    *_, whole = played(ridge=1e-3)
    several = played(ridge=1e-3, rounds=100, cohort=1)
    assert len(several) == 2
    assert len(several[-1].heard) == 1
    bundle, runner = build_donors()
    table = {"cohort": {"size": 1}, "rounds": 100}
    run = run_method(
        "afl", bundle, image_devices(), {"ridge": 1e-3, "rounds": 9}, engine=runner, method=METHOD, seed=3, **table
    )
    assert METHOD.is_done(run[-1])
    assert len(run[-1].heard) == 4
    np.testing.assert_allclose(run[-1].head["weights"], whole.head["weights"], atol=1e-6)
    early = METHOD.result(run[2]).tensors["head.weights"]  # of two devices so far
    assert early.shape == whole.head["weights"].shape
    assert not np.allclose(early, whole.head["weights"], atol=1e-3)


def test_a_class_that_nobody_has_is_never_predicted():
    some = [
        replace(each, train=Examples(each.train.x[each.train.y != 1], each.train.y[each.train.y != 1]))
        for each in image_devices()
    ]
    *_, last = played(some, ridge=1e-3)
    assert any("never predicted, because no device has examples: b" in line for line in METHOD.explain(last))
    scores = -1e4 * features(POOLED.x) @ np.abs(last.head["weights"].T) + last.head["bias"]
    assert (scores.argmin(axis=1) == 1).all()
    assert np.isneginf(METHOD.result(last).tensors["head.bias"]).tolist() == [False, True, False]


def test_a_sum_of_a_site_is_refused_that_cannot_be_one():
    bundle, _ = build_donors()
    state, sound = METHOD.init(bundle, Params(), 0), METHOD.aggregation.check_sums
    part = class_moments.pack_moments(class_moments.compute_moments(features(POOLED.x), POOLED.y, 3), exact=True)
    held = ExactMomentSums(parts={"a": part}, devices={"a": 1})
    n = len(POOLED)
    for total in (held, held.fold_parts_into_sums()):
        sound(state, total, n)
        with pytest.raises(UpdateError, match=f"on {n} examples, but the update's weight is 1$"):
            sound(state, total, 1.0)

    def summed(name: str, place: Any, values: Any) -> ExactMomentSums:
        found = held.fold_parts_into_sums()
        found.sums[name].limbs[0][place] += values
        return found

    largest = 3 * np.abs(held.fold_parts_into_sums().sums["second.0"].rounded_value()).max()
    sums = held.fold_parts_into_sums().sums
    few = {name: each for name, each in sums.items() if name != "totals"}
    for total, why in (
        (replace(held, devices={}), "the site names no device"),
        (replace(held, devices={"a": 2}), "counts a device twice"),
        (replace(held, devices={"a": 1, "b": 1}), "the devices of the parts differ from the listed devices"),
        (replace(held, sums=sums), "the devices of the parts differ from the listed devices"),
        (replace(held, parts={"a": {**part, "factor": part["factor"] / 10}}), "positive semi-definite"),
        (summed("second.0", (0, 1), largest), "the product of two features is larger than their squares allow"),
        (summed("second.0", (0, 0), -largest), "the sum of squares of a feature is negative"),
        (replace(held, parts={}, sums=few), "names of sums differ: totals"),
        (summed("counts", slice(2), (0.5, -0.5)), "negative or not integers"),
    ):
        with pytest.raises(UpdateError, match=why):
            sound(state, total, n)


def test_what_cannot_begin_or_be_folded_says_why():
    """No such donor, two ways to a ridge, nobody heard; an update of another round, or with moments that cannot be."""
    bundle, _ = build_donors()
    with pytest.raises(JobError, match="donor = 'oak' is not in the bundle: choose one of ash, elm, fir"):
        METHOD.init(bundle, Params(donor="oak"), 0)
    with pytest.raises(JobError, match="not possible with gcv = true, which chooses the ridge"):
        METHOD.init(bundle, Params(ridge=0.1, gcv=True), 0)
    state = METHOD.init(bundle, Params(), 0)
    with pytest.raises(ModelError, match="no device has sent"):
        METHOD.result(state)
    part = class_moments.compute_moments(features(POOLED.x), POOLED.y, 3)
    good = DeviceUpdate(
        "a", 0, float(len(POOLED)), {"turn": 0.0}, {"moments": class_moments.pack_moments(part, exact=True)}
    )
    assert METHOD.aggregation.fold(state, None, good).devices == {"a": 1}
    with pytest.raises(UpdateError, match="the update is for turn 1"):
        METHOD.aggregation.fold(state, None, replace(good, metrics={"turn": 1.0}))
    with pytest.raises(UpdateError, match="moments"):
        METHOD.aggregation.fold(state, None, replace(good, bundles={"moments": class_moments.pack_moments(part)}))
    with pytest.raises(UpdateError, match=f"on {len(POOLED)} examples, but the update's weight is 1$"):
        METHOD.aggregation.fold(state, None, replace(good, weight=1.0))
    order = METHOD.send(state, DeviceView("a", None))
    assert set(order.bundles) == {"ash.0.onnx", "ash.1.onnx", "ash.2.onnx"}
    assert (order.work.flops, order.work.flops_per_example) == (0, 3000)
