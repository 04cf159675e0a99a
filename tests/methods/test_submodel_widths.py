"""HeteroFL, FjORD and FedLPS: parts of a network that are narrower than it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from submodels import MIXED, NETWORK, bundle, engine, pictures, run, view

from fedquilt import methods
from fedquilt.core import Bundle, DeviceUpdate, Examples, JobError, Method, ModelError, UpdateError
from fedquilt.formats.tensor_register import register_from_kinds
from fedquilt.methods import fedlps, fjord, heterofl
from fedquilt.models.partial import masks
from fedquilt.testing.toy_networks import MLP_MASKS, bundle_files, deliver_task, toy_bundle
from fedquilt.tools.simulation import DeviceData

torch = pytest.importorskip("torch")


def folded(method: Method, state: Any, *sent: tuple[int, float, float, list[int]]) -> Any:
    """The state after devices of so many bytes have sent, by so much weight, their part full of a value, and have
    examples of these classes."""
    total = None
    for budget, weight, value, classes in sent:
        order = method.send(state, view(budget))
        model = {key: np.full_like(array, value) for key, array in order.bundles["model"].items()}
        held = {"held": np.isin(np.arange(3), classes).astype(np.uint8)}
        total = method.aggregation.fold(
            state, total, DeviceUpdate("a", 0, weight, {}, {"model": model, "classes": held})
        )
    return method.step(state, total)


@pytest.mark.parametrize("name", ["heterofl", "fjord"])
def test_each_width_has_statistics_of_its_own(name):
    method = methods.load(name)
    state = method.init(bundle(), method.params(rates=(0.25, 0.25, 0.5, 0.5, 1.0)), 0)
    everything = [0, 1, 2]
    after = folded(method, state, (2 * 10**9, 1.0, 1.0, everything), (8 * 10**9, 1.0, 5.0, everything))
    parts = {size: method.send(after, view(size * 10**9)).bundles["model"] for size in (1, 2, 8)}
    assert parts[2]["0.1.running_var"].tolist() == [1, 1]
    assert parts[8]["0.1.running_var"].tolist() == [5, 5, 5, 5]
    assert parts[1]["0.1.running_mean"].tolist() == [0]
    assert parts[2]["0.1.weight"].tolist() == [3, 3]
    assert parts[8]["0.1.weight"].tolist() == [3, 3, 5, 5]
    assert method.result(after).tensors["0.1.running_mean"].tolist() == [5, 5, 5, 5]


def test_the_fewer_steps_at_the_largest_width_count_the_more_in_its_statistics():
    """Two widths by turns: a step at the larger moves the mean by 1 - 0.9^2 of the way, where all would by 0.1 each."""
    from fedquilt.models.networks import registry

    plan = masks.plan_from_array(bundle().load("masks")["json"])
    ordered = fjord.OrderedDropoutHooks(plan, 1.0, (0.5, 1.0), np.random.default_rng(0))
    module, momenta = ordered.insert_gates(registry.build_network(NETWORK)), []
    for width in (1.0, 0.5):
        ordered.width = width
        module(torch.rand(2, 1, 8, 8))
        momenta.append({each.momentum for each in module.modules() if hasattr(each, "running_mean")})
    assert momenta == [{1 - 0.9**2}, {0.0}]


def test_rates_that_cut_as_much_share_their_statistics():
    rates = [0.05, 0.0625, 0.5, 0.99]
    assert [heterofl.canonical_rate([4, 8, 16], rates, rate) for rate in rates] == [0.0625, 0.0625, 0.5, 1.0]


def test_rows_of_a_class_are_averaged_over_devices_that_have_it():
    """Class 0 at both devices, class 1 at the second, class 2 at none, by weights 3 and 1; all else is of both."""
    method = methods.load("heterofl")
    state = method.init(toy_bundle(), method.params(), 0)
    first, second = (8 * 10**9, 3.0, 1.0, [0]), (8 * 10**9, 1.0, 5.0, [0, 1])
    after = folded(method, state, first, second)
    assert after.model["3.bias"].tolist() == [2, 5, state.model["3.bias"][2]]
    assert np.array_equal(after.model["3.weight"][2], state.model["3.weight"][2])
    assert after.model["1.bias"].tolist() == [2] * 5
    plain = method.init(toy_bundle(), method.params(masked=False), 0)
    assert folded(method, plain, first, second).model["3.bias"].tolist() == [2, 2, 2]


def test_a_class_that_a_device_has_not_is_out_of_its_loss():
    method, x = methods.load("heterofl"), np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    member = DeviceData("a", Examples(x, np.array([0, 2] * 4)), Examples(x, np.array([0, 2] * 4)))
    moved = []
    for masked in (True, False):
        state = method.init(toy_bundle(), method.params(masked=masked, batch=4), 0)
        order = method.send(state, view(8 * 10**9))
        assert order is not None
        task, site = deliver_task(method, order, member, engine())
        answer = method.work(task, site)
        assert ("classes" in answer.bundles) == masked
        assert not masked or answer.bundles["classes"]["held"].tolist() == [1, 0, 1]
        moved.append(not np.array_equal(answer.bundles["model"]["3.weight"][1], state.model["3.weight"][1]))
    assert moved == [False, True]


def test_a_device_that_does_not_say_its_classes_is_refused_and_so_is_a_network_without_any():
    method = methods.load("heterofl")
    state = method.init(toy_bundle(), method.params(), 0)
    for bundles in ({}, {"classes": {"held": np.ones(2, np.uint8)}}):
        with pytest.raises(UpdateError):
            method.aggregation.fold(state, None, DeviceUpdate("a", 0, 1.0, {}, {"model": state.model, **bundles}))
    plan = masks.MaskPlan({"0": 2}, {}, {"0.weight": masks.TensorGroups((2, 1, 3, 3), ("0",))})
    parts = {"model": {"0.weight": np.zeros((2, 1, 3, 3), np.float32)}, "masks": {"json": masks.plan_to_array(plan)}}
    meta = {"network": {}, "register": register_from_kinds(parts["model"], {})}
    made = Bundle(meta, bundle_files(parts), lambda name: parts[name])
    assert method.init(made, method.params(masked=False), 0).widths.keys() == {"0.0625", "0.125", "0.25", "0.5"}
    with pytest.raises(ModelError, match="masked = false"):
        method.init(made, method.params(), 0)


def test_a_step_at_a_smaller_width_leaves_the_statistics_alone():
    from fedquilt.core import Fit, Hooks, Step

    made, examples = bundle(), pictures(1)[0].train
    plan, model, moved = masks.plan_from_array(made.load("masks")["json"]), made.load("model"), []
    for width in (0.5, 1.0):
        ordered = fjord.OrderedDropoutHooks(plan, 1.0, (width,), np.random.default_rng(0))
        hooks = Hooks(prepare=ordered.insert_gates, steps=(Step(begin=ordered.draw_width),))
        after, _ = engine().train(NETWORK, model, examples, Fit(batch=4), np.random.default_rng(0), hooks=hooks)
        names = [key for key in model if key.rpartition(".")[2] in ("running_mean", "running_var")]
        moved.append(sum(not np.array_equal(after[key], model[key]) for key in names) / len(names))
    assert moved == [0, 1]


def test_ordered_dropout_hides_what_is_beyond_the_width_and_moves_none_of_it():
    from fedquilt.core import Fit, Hooks, Step

    model = toy_bundle().load("model")
    ordered = fjord.OrderedDropoutHooks(MLP_MASKS, 1.0, (0.4,), np.random.default_rng(0))
    assert ordered.unit_mask(("1",), 1).tolist() == [1, 1, 1, 1, 1]
    draws = np.random.default_rng(0)
    examples = Examples(draws.normal(size=(8, 6)).astype(np.float32), draws.integers(0, 3, 8))
    network = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3}
    hooks = Hooks(prepare=ordered.insert_gates, steps=(Step(begin=ordered.draw_width),))
    after, _ = engine().train(network, model, examples, Fit(batch=8), draws, hooks=hooks)
    assert ordered.unit_mask(("1",), 2).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    for key, (rows, columns) in {"1.weight": (2, 6), "1.bias": (2, 0), "3.weight": (3, 2)}.items():
        still = np.ones(model[key].shape, bool)
        still[(slice(rows), slice(columns)) if columns else slice(rows)] = False
        assert np.array_equal(after[key][still], model[key][still]), key
    assert not np.array_equal(after["3.weight"][:, :2], model["3.weight"][:, :2])


def test_fjord_draws_every_width_up_to_the_devices_own():
    ordered = fjord.OrderedDropoutHooks(MLP_MASKS, 0.6, (0.2, 0.4, 0.6), np.random.default_rng(0))
    drawn = []
    for _ in range(300):
        ordered.draw_width(None)
        drawn.append(ordered.width)
    assert sorted(set(drawn)) == [0.2, 0.4, 0.6]
    assert min(drawn.count(width) for width in set(drawn)) > 70


def test_fedlps_holds_its_encoder_still_and_sends_only_the_predictor():
    method, answers = methods.load("fedlps"), []

    def work(task, site):
        answers.append(method.work(task, site))
        return answers[-1]

    found = run("fedlps", bundle(), rounds=3, method=replace(method, work=work), budgets=MIXED)
    held = fedlps.encoder_names(found[0])
    assert any(name.endswith("running_mean") for name in held)
    for name in held:
        assert np.array_equal(found[0].model[name], found[-1].model[name])
    trained = [answer.bundles["model"] for answer in answers if "model" in answer.bundles]  # else it told statistics
    assert trained
    assert all(model.keys() == found[0].model.keys() - held for model in trained)


def test_fedlps_prunes_the_predictor_alone_and_the_same_channels_in_every_round():
    method = methods.load("fedlps")
    found = run("fedlps", bundle(), rounds=2, budgets=MIXED)
    first, last = found[0], found[-1]
    held = fedlps.encoder_names(first)
    narrow = method.send(last, view(512 * 10**6)).bundles["model"]
    assert all(narrow[name].shape == first.model[name].shape for name in held)
    smaller = [name for name in first.model if narrow[name].shape != first.model[name].shape]
    assert len(smaller) > 3
    for left, groups in first.kept.items():
        assert all(np.array_equal(units, last.kept[left][group]) for group, units in groups.items())


def test_fedlps_refuses_an_encoder_of_random_weights():
    """The bundle says that they are; with encoder = 0 nothing is held still."""
    method, made = methods.load("fedlps"), bundle()
    random = replace(made, meta={**made.meta, "pretrained": False})
    with pytest.raises(JobError, match="encoder = 0"):
        method.init(random, method.params(), 0)
    assert method.init(random, method.params(encoder=0.0), 0).encoder == ()
