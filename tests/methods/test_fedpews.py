"""FedPeWS and FedPeWS-Fixed: what they are without masks, what masks change, and what stays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fedavg_runs import SMALL, numpy_one, torch_one

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.core import Bundle, DeviceUpdate, DeviceView, ModelError, UpdateError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedpews, fedpews_fixed
from fedquilt.models.partial import masks
from fedquilt.testing.toy_networks import MLP, MLP_MASKS, point_devices, toy_bundle
from fedquilt.testing.toy_networks import run_method as run
from fedquilt.tools.simulation import DeviceData

PLAN = MLP_MASKS
H = 5


def play(name: str, engine: Any = None, members: list[DeviceData] | None = None, **params: Any) -> list[Any]:
    """The states of three rounds on toy devices."""
    return play_on(toy_bundle(), name, engine, members, **params)


def play_on(
    bundle: Bundle, name: str, engine: Any = None, members: list[DeviceData] | None = None, **params: Any
) -> list[Any]:
    """Likewise of another network."""
    method, work = methods.load(name), params.pop("work", None)
    return run(
        name,
        bundle,
        members or point_devices(),
        {**SMALL, **params},
        engine=engine or torch_one(),
        method=replace(method, work=work) if work else None,
        rounds=3,
    )


def begun(name: str = "fedpews", **params: Any) -> Any:
    method = methods.load(name)
    return method.init(toy_bundle(), method.params(**params), 0)


ALL_ONES = {"warmup": 3, "first_score": 100.0, "diversity": 0.0}  # theta is 1 and stays it: its slope is 0


def models(run: list[Any]) -> list[bytes]:
    return [tensors.encode_tensors(state.model) for state in run]


def told(device: str, mask: list[int], value: float, weight: float = 1.0, theta: Any = None) -> DeviceUpdate:
    """What a device sends whose weights are all `value`."""
    neurons = np.array(mask, bool)
    marks = masks.covered_entries(PLAN, neurons)
    model = {name: np.full(array.shape, value, np.float32) for name, array in begun().model.items()}
    given = np.array(mask if theta is None else theta, np.float16)
    return DeviceUpdate(
        device,
        0,
        weight,
        {},
        {"model": masks.select_covered(model, marks), "mask": {"bits": masks.pack_mask(neurons), "theta": given}},
    )


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "base"), [(0.0, "fedavg"), (0.3, "fedprox")])
def test_with_all_ones_masks_it_is_its_base_bit_for_bit(mu, base):
    devices = point_devices(3, examples=13)
    ours = play("fedpews", members=devices, mu=mu, **ALL_ONES)
    theirs = play(base, torch_one(), devices, **({"mu": mu} if mu else {}))
    assert models(ours) == models(theirs)
    assert len(set(models(ours))) == 4
    assert [fedpews.is_warmup(state) for state in ours] == [True, True, True, False]
    assert ours[2].reached == 1.0


@pytest.mark.parametrize(
    ("name", "params", "base", "theirs"),
    [
        ("fedpews", {"mu": 0.3}, "fedprox", {"mu": 0.3}),
        ("fedpews_fixed", {}, "fedavg", {}),
        ("fedpews_fixed", {"server_lr": 0.5}, "fedopt", {"server": "sgd", "beta1": 0.0, "server_lr": 0.5}),
    ],
)
def test_without_warm_up_it_is_its_base_bit_for_bit(name, params, base, theirs):
    assert models(play(name, warmup=0, **params)) == models(play(base, torch_one(), **theirs))


@pytest.mark.parametrize(
    ("engine", "fit", "base"),
    [
        (numpy_one, {"momentum": 0.9, "weight_decay": 0.01}, "fedavg"),
        (torch_one, {"optimizer": "adam", "lr": 0.01}, "fedavg"),
        (numpy_one, {"mu": 0.3}, "fedprox"),
    ],
)
def test_fixed_with_one_part_is_its_base_bit_for_bit(engine, fit, base):
    ours = play("fedpews_fixed", engine(), parts=1, warmup=3, **fit)
    assert models(ours) == models(play(base, engine(), **fit))


def test_micro_batches_take_the_same_steps():
    params = {"members": point_devices(1), "warmup": 3, "mu": 0.3, "diversity": 0.5}
    ours, theirs = play("fedpews", torch_one(1), **params), play("fedpews", **params)
    for name, array in theirs[-1].model.items():
        np.testing.assert_allclose(ours[-1].model[name], array, atol=1e-5)


# -- on the coordinator ---------------------------------------------------------------------------


def test_a_warm_up_round_is_what_it_is_on_paper():
    """By hand. x is all 1, eta_g = 1/2. a: neurons 0 1, all 3, 1 example; b: neurons 1 2, all 6, 2 examples.

    The mean is 3 where a alone covers, (3 + 12) / 3 = 5 where both, 6 where b alone; half of the way is
    2, 3 and 3.5. Neurons 3 and 4 are nobody's: 1 stays.
    """
    state = begun(server_lr=0.5)
    state = replace(state, model={name: np.ones_like(array) for name, array in state.model.items()})
    total = fedpews.fold(state, None, told("a", [1, 1, 0, 0, 0], 3.0))
    total = fedpews.fold(state, total, told("b", [0, 1, 1, 0, 0], 6.0, weight=2.0))
    after = fedpews.step(state, total)
    by_neuron = np.array([2.0, 3.0, 3.5, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(after.model["1.bias"], by_neuron)
    np.testing.assert_array_equal(after.model["1.weight"], np.repeat(by_neuron[:, None], 6, axis=1))
    np.testing.assert_array_equal(after.model["3.weight"], np.repeat(by_neuron[None], 3, axis=0))
    np.testing.assert_array_equal(after.model["3.bias"], np.full(3, 3.0, np.float32))  # never masked
    assert after.reached == pytest.approx((3 * 10 + 3) / 53)
    assert fedpews.explain(after) == ["warm-up round 1 of 25: the devices' masks together covered 62 % of the network"]


def test_devices_may_all_count_alike():
    """The same round as the paper has it: (3 + 6) / 2 where both cover."""
    state = begun(weigh="devices")
    total = fedpews.fold(state, None, told("a", [1, 1, 0, 0, 0], 3.0))
    total = fedpews.fold(state, total, told("b", [0, 1, 1, 0, 0], 6.0, weight=2.0))
    assert fedpews.step(state, total).model["1.bias"][:3].tolist() == [3.0, 4.5, 6.0]


def test_the_others_probabilities_are_those_last_published():
    state = begun()

    def others(device):
        found = fedpews.send(state, DeviceView(device, None)).bundles["others"]
        assert isinstance(found, Mapping)
        return found["theta"].tolist()

    assert others("a") == [0.5] * H
    for values in ({"a": 0.0, "b": 0.5, "c": 1.0}, {"a": 0.25, "b": 0.75}):
        total = None
        for device, theta in values.items():
            total = fedpews.fold(state, total, told(device, [1] * H, 1.0, theta=[theta] * H))
        state = fedpews.step(state, total)
    assert others("a") == [0.875] * H  # b 0.75, c 1
    assert others("c") == [0.5] * H
    assert others("new") == pytest.approx([2 / 3] * H)


def test_bits_stand_for_probabilities_where_only_they_are_published():
    state = begun(publish="bits")
    first = told("a", [1, 0, 1, 0, 1], 1.0)
    first = replace(first, bundles={**first.bundles, "mask": {"bits": first.bundles["mask"]["bits"]}})
    state = fedpews.step(state, fedpews.fold(state, None, first))
    assert state.published["a"].nbytes == 1
    seen = fedpews.send(state, DeviceView("b", None)).bundles["others"]
    assert isinstance(seen, Mapping)
    assert seen["theta"].tolist() == [1, 0, 1, 0, 1]
    own = fedpews.send(state, DeviceView("a", None))
    assert "others" not in own.bundles
    assert own.params["alone"] is True


def test_when_the_warm_up_is_over_nothing_of_masks_is_left():
    answers = []

    def work(task, site):
        answers.append(fedpews.work(task, site))
        return answers[-1]

    run = play("fedpews", work=work, warmup=2)
    assert [sorted(answer.bundles) for answer in answers] == [["mask", "model"]] * 6 + [["model"]] * 3
    assert [sorted(answer.private_state) for answer in answers] == [["scores"]] * 6 + [[]] * 3
    assert [len(state.published) for state in run] == [0, 3, 3, 0]
    order = fedpews.send(run[2], DeviceView("a", None))
    assert sorted(order.bundles) == ["model"]
    assert "masked" not in order.params
    assert fedpews.explain(run[3]) == []
    assert answers[-1].bundles["model"]["1.weight"].shape == (5, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"theta": np.full(H, 1.5, np.float16)}, "not 5 float16 probabilities"),
        ({"theta": np.full(H, np.nan, np.float16)}, "not 5 float16 probabilities"),
        ({"theta": np.full(H, 0.5, np.float32)}, "not 5 float16 probabilities"),
        ({"theta": np.full(4, 0.5, np.float16)}, "not 5 float16 probabilities"),
        ({"bits": np.zeros(2, np.uint8)}, "not 1 bytes for 5 neurons"),
        ({"bits": np.full(1, 255, np.uint8)}, "its mask covers 30 entries"),
        ({"more": np.zeros(1)}, "published .* of its mask"),
    ],
)
def test_a_mask_that_is_none_is_refused(change, message):
    """Probabilities beyond 1 would draw all the others away; bits have to tell what was sent."""
    state, good = begun(), told("a", [1, 1, 0, 0, 0], 3.0)
    odd = replace(good, bundles={**good.bundles, "mask": {**good.bundles["mask"], **change}})
    with pytest.raises(UpdateError, match=message):
        fedpews.fold(state, None, odd)


def test_an_update_of_another_phase_is_refused():
    state = begun(warmup=1)
    whole = DeviceUpdate("a", 0, 1.0, {}, {"model": state.model})
    with pytest.raises(UpdateError, match="published \\[\\] of its mask"):
        fedpews.fold(state, None, whole)
    masked = told("a", [1, 1, 0, 0, 0], 3.0)
    after = fedpews.step(state, fedpews.fold(state, None, masked))
    with pytest.raises(UpdateError, match="shape"):
        fedpews.fold(after, None, masked)
    assert fedpews.step(after, fedpews.fold(after, None, whole)).round == 2


# -- on the device --------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", ["theta", "bits"])
def test_an_upload_is_its_formula(publish):
    sizes = []

    def work(task, site):
        answer = fedpews.work(task, site)
        neurons = masks.unpack_mask(answer.bundles["mask"]["bits"], H)
        used = int(neurons.sum())
        covered = used * 6 + used + used * 3 + 3  # rows of the first layer, its biases, columns of the second, scores
        wanted = 1 + 4 * covered + (2 * H if publish == "theta" else 0)
        assert tensors.total_bytes(answer.bundles.values()) == wanted
        assert answer.metrics["used"] == used / H
        sizes.append(wanted)
        return answer

    play("fedpews", work=work, warmup=3, publish=publish)
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("publish", ["theta", "bits"])
def test_mask_scores_stay_on_the_device(publish):
    def work(task, site):
        answer = fedpews.work(task, site)
        assert answer.private_state.keys() == {"scores"}
        scores = answer.private_state["scores"]
        theta = 1 / (1 + np.exp(-scores.astype(np.float64)))
        sent = b"".join(tensors.encode_tensors(bundle) for bundle in answer.bundles.values())
        for kind in (np.float16, np.float32, np.float64):
            assert scores.astype(kind).tobytes() not in sent
            if kind != np.float16:
                assert theta.astype(kind).tobytes() not in sent
        assert (theta.astype(np.float32).astype(np.float16).tobytes() in sent) == (publish == "theta")
        assert len(np.unique(scores)) == H
        return answer

    play("fedpews", work=work, warmup=3, publish=publish)


def test_scores_are_kept_from_round_to_round_and_begun_anew_where_they_are_lost():
    first = []

    def work(task, site):
        if site.private_state:
            site = replace(
                site, private_state={"scores": np.full(H, 3.0, np.float32)} if site.device != "dev-0" else {}
            )
        answer = fedpews.work(task, site)
        first.append(round(float(answer.private_state["scores"].mean()), 2))
        return answer

    play("fedpews", work=work, warmup=3, mask_lr=1e-6, first_score=-1.0)
    assert first == [-1.0] * 3 + [-1.0, 3.0, 3.0] * 2


def test_the_mask_learning_rate_does_not_decay():
    """eta_s = 0.1 at eta_l = 0.1 * 0.5^r: the scores' step takes place at 1, 2, 4 times the weights' rate."""
    rates = []

    class Listens:
        name = "torch"

        def train(self, network, start, examples, fit, rng, *, hooks, progress):
            rates.append([step.rate(name) * fit.lr for step in hooks.steps for name in ("mask_scores", "1.weight")])
            return dict(start), {"loss": 0.0, "steps": 1.0}

    pytest.importorskip("torch")
    play("fedpews", Listens(), point_devices(1), warmup=3, schedule={"name": "step", "factor": 0.5})
    np.testing.assert_allclose(rates, [[0.1, 0, 0, 0.1 * 0.5**r] for r in range(3)])


# -- refusals -------------------------------------------------------------------------------------


def test_a_bundle_without_a_plan_of_masks_is_refused_where_one_is_wanted():
    bundle = toy_bundle()
    bare = replace(bundle, files={"model": bundle.files["model"]})
    with pytest.raises(ModelError, match="run `fedquilt prepare` again"):
        fedpews.init(bare, fedpews.Params(), 0)
    unmasked = fedpews.init(bare, fedpews.Params(warmup=0), 0)
    assert unmasked.plan.neurons == 0
    assert fedpews.step(unmasked, WeightedSums()) is unmasked
    empty = {"json": masks.plan_to_array(masks.MaskPlan({}, {}, {}))}
    none = replace(bundle, load=lambda name: empty if name == "masks" else bundle.load(name))
    with pytest.raises(ModelError, match="no hidden neuron of this network"):
        fedpews.init(none, fedpews.Params(), 0)


def test_fixed_masks_of_all_devices_sum_to_one():
    state = begun("fedpews_fixed", devices=("x", "y", "z"))
    held = [fedpews_fixed.device_mask(state, device).astype(int) for device in ("x", "y")]
    assert sum(held).tolist() == [1] * H
    assert fedpews_fixed.device_mask(state, "z").tolist() == held[0].astype(bool).tolist()
    assert fedpews_fixed.part_index(state, "nobody knows") in (0, 1)


def test_of_a_fixed_part_only_its_entries_travel_both_ways():
    """Neurons 0 and 1 of 5: 2 (6 + 1 + 3) + 3 entries of 4 bytes; the plan goes once."""
    state = begun("fedpews_fixed", devices=("dev-0",))
    order = fedpews_fixed.send(state, DeviceView("dev-0", None))
    down = order.bundles["model"]
    assert isinstance(down, Mapping)
    assert tensors.total_bytes([down]) == 4 * 23
    assert "mask_scores" not in down
    sent = []

    def work(task, site):
        answer = fedpews_fixed.work(task, site)
        sent.append(tensors.total_bytes(answer.bundles.values()))
        return answer

    play("fedpews_fixed", numpy_one(), point_devices(1), devices=["dev-0"], warmup=2, work=work)
    assert sent == [4 * 23, 4 * 23, 4 * 53]


def test_a_device_is_judged_by_what_it_has():
    checked = []

    def work(task, site):
        checked.append(compute_metrics(fedpews_fixed.check(task, site))["accuracy"])
        return fedpews_fixed.work(task, site)

    run = play("fedpews_fixed", numpy_one(), point_devices(1), devices=["dev-0"], warmup=2, work=work)
    mark = masks.covered_entries(PLAN, np.array([1, 1, 0, 0, 0], bool))
    held = point_devices(1)[0].held_out
    own = [{n: a * mark[n] if n in mark else a for n, a in state.model.items()} for state in run[:2]]
    wanted = [compute_metrics(numpy_one().evaluate(MLP, model, held))["accuracy"] for model in [*own, run[2].model]]
    assert checked == wanted
