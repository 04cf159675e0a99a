"""Methods whose devices train as much of the network as their memory allows: identities, and who gets what."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from submodels import MIXED, SMALL, bundle, engine, pictures, run, view

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import DeviceView, ModelError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import depthfl, fedavg, heterofl
from fedquilt.models import partial
from fedquilt.testing.toy_networks import deliver_task

ONES = (1.0,) * 5
BUDGETS = (512 * 10**6, 2 * 10**9, 8 * 10**9)
SUBMODELS = ("heterofl", "fjord", "fedlps", "depthfl", "fedepth")


@cache
def averaged() -> Any:
    return fedavg.METHOD.result(run("fedavg", bundle())[-1]).tensors


# -- identities -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("heterofl", {"rates": ONES, "clip": 0.0}),
        ("heterofl", {"rates": ONES, "clip": 0.0, "masked": False}),
        ("fjord", {"rates": ONES}),
        ("fedlps", {"ratios": (0.0,) * 5, "encoder": 0.0}),
        ("depthfl", {"exits": 1}),
        ("fedepth", {"groups": (1,) * 5}),
        ("ft_full", {}),
    ],
)
def test_with_nothing_left_out_it_is_fedavg_bit_for_bit(name, params):
    """Width 1, one exit, one group, nothing pruned. Batch norm's statistics from a method's end are not FedAvg's."""
    made, plain, method = bundle(), averaged(), methods.load(name)
    mine = method.result(run(name, made, **params)[-1]).tensors
    assert mine.keys() == plain.keys()
    for key, array in plain.items():
        if method.settle is None or not key.endswith(("running_mean", "running_var")):
            assert array.tobytes() == mine[key].tobytes(), key


@pytest.mark.parametrize("exits", [2, 3])
def test_depthfl_with_all_depths_equal_is_the_mean_of_everything(exits):
    method, totals = methods.load("depthfl"), []

    def step(state, total):
        totals.append(total)
        return method.step(state, total)

    double = replace(method, step=step)
    end = run("depthfl", bundle(), rounds=1, method=double, exits=exits, depths=(exits,) * 5)[-1]
    assert totals[0].weight.keys() == end.model.keys()
    assert all((weight.rounded_value() == 24).all() for weight in totals[0].weight.values())
    assert sum(name.startswith("exit.") for name in end.model) == 2 * (exits - 1)


# -- who gets what --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SUBMODELS)
def test_a_device_gets_and_sends_no_more_than_its_memory_tiers_part(name):
    method = methods.load(name)
    state = method.init(bundle(), method.params(**SMALL), 0)
    orders = [method.send(state, view(budget)) for budget in BUDGETS]
    assert all(order is not None for order in orders)
    peaks = [order.work.peak_bytes for order in orders if order]
    assert peaks == sorted(peaks)
    unknown = method.send(state, DeviceView("a", None))
    assert tensors.encode_tensors(unknown.bundles["model"]) == tensors.encode_tensors(orders[0].bundles["model"])
    sizes = [tensors.total_bytes([order.bundles["model"]]) for order in orders if order]
    if name == "fedepth":
        assert min(sizes) > 0  # all get all of the network, and their links
        assert peaks[0] < peaks[-1]
    else:
        assert sizes[0] < sizes[-1]
        assert orders[0].work.flops_per_example < orders[-1].work.flops_per_example


@pytest.mark.parametrize("name", ["depthfl", "fedepth"])
def test_a_mixed_fleet_goes_on_and_every_tensor_stays_finite(name):
    """Three tiers at once. Something is learned in each round, and the result has the network's own tensors."""
    method, made = methods.load(name), bundle()
    found = run(name, made, rounds=3, budgets=MIXED)
    result = method.result(found[-1]).tensors
    assert {key for key in result if not key.startswith("exit.")} == made.load("model").keys()
    assert all(np.isfinite(array).all() for array in result.values())
    before = method.result(found[-2]).tensors
    assert any(not np.array_equal(result[key], before[key]) for key in result)


@pytest.mark.parametrize("name", ["heterofl", "fjord", "depthfl"])
def test_entries_that_nobody_sent_stay_as_they_were(name):
    first, last = run(name, bundle(), rounds=2)[::2]
    at = (
        depthfl.leading_stage_places(first, 1)
        if name == "depthfl"
        else heterofl.leading_places(first, first.params["rates"][0])
    )
    sent = partial.width.add_entries(first.model, None, partial.width.cut_tensors(first.model, at), at, 1.0)
    for key, array in first.model.items():
        apart = name != "depthfl" and key.rpartition(".")[2] in (
            "running_mean",
            "running_var",
            "num_batches_tracked",
        )  # a narrow part's are its own
        many = sent.weight[key].rounded_value() if key in sent.weight else np.zeros(array.shape)
        counted = (many > 0) & (not apart)
        assert np.array_equal(array[~counted], last.model[key][~counted]), key
    moved = [key for key in at if not np.array_equal(first.model[key], last.model[key])]
    assert len(moved) > 3


@pytest.mark.parametrize("name", SUBMODELS)
def test_a_device_evaluates_its_own_part(name):
    method = methods.load(name)
    state = method.init(bundle(), method.params(**SMALL), 0)
    for budget in BUDGETS:
        order, member = method.send(state, view(budget)), pictures(1)[0]
        assert order is not None
        task, site = deliver_task(method, order, member, engine())
        told = method.check(task, site)
        assert told.examples == 4
        assert 0 <= compute_metrics(told)["accuracy"] <= 1


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedlps"])
def test_without_a_plan_of_units_the_job_says_what_to_do(name):
    whole = bundle()
    made = replace(whole, files={"model": whole.files["model"]})
    with pytest.raises(ModelError, match="fedquilt prepare"):
        methods.load(name).init(made, methods.load(name).params(), 0)
