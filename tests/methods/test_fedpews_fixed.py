"""FedPeWS with fixed masks: each device trains its part, and nothing else moves."""

from collections.abc import Mapping

import numpy as np
import pytest
from fedavg_runs import numpy_one, torch_one
from fedpews_runs import PLAN, H, begun, play, play_on

from fedquilt.arrays import tensors
from fedquilt.core import Bundle, DeviceView
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedpews_fixed
from fedquilt.models.partial import masks
from fedquilt.testing.toy_networks import MLP, bundle_files, point_members


def test_fixed_masks_of_all_devices_sum_to_one():
    state = begun("fedpews_fixed", devices=("x", "y", "z"))
    held = [fedpews_fixed.device_mask(state, device).astype(int) for device in ("x", "y")]
    assert sum(held).tolist() == [1] * H
    assert fedpews_fixed.device_mask(state, "z").tolist() == held[0].astype(bool).tolist()
    assert fedpews_fixed.part_index(state, "nobody knows") in (0, 1)


@pytest.mark.parametrize("engine", [numpy_one, torch_one])
def test_a_fixed_part_is_trained_by_itself_and_nothing_else_moves(engine):
    params = {"devices": ["dev-0"], "warmup": 3, "mu": 0.2}
    run = play("fedpews_fixed", engine(), point_members(1), **params)
    mark = masks.covered_entries(PLAN, np.array([1, 1, 0, 0, 0], bool))
    first, last = run[0].model, run[-1].model
    for name, held in mark.items():
        assert (last[name][~held] == first[name][~held]).all()
        assert (last[name][held] != first[name][held]).any()
    narrow = {
        "1.weight": first["1.weight"][:2],
        "1.bias": first["1.bias"][:2],
        "3.weight": first["3.weight"][:, :2],
        "3.bias": first["3.bias"],
    }
    bundle = Bundle({"network": {**MLP, "hidden": [2]}}, bundle_files({"model": narrow}), lambda name: narrow)
    *_, small = play_on(bundle, "fedprox", engine(), point_members(1), mu=0.2)
    np.testing.assert_allclose(small.model["1.weight"], last["1.weight"][:2], atol=1e-6)
    np.testing.assert_allclose(small.model["3.bias"], last["3.bias"], atol=1e-6)


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

    play("fedpews_fixed", numpy_one(), point_members(1), devices=["dev-0"], warmup=2, work=work)
    assert sent == [4 * 23, 4 * 23, 4 * 53]


def test_a_device_is_judged_by_what_it_has():
    checked = []

    def work(task, site):
        checked.append(compute_metrics(fedpews_fixed.check(task, site))["accuracy"])
        return fedpews_fixed.work(task, site)

    run = play("fedpews_fixed", numpy_one(), point_members(1), devices=["dev-0"], warmup=2, work=work)
    mark = masks.covered_entries(PLAN, np.array([1, 1, 0, 0, 0], bool))
    held = point_members(1)[0].held
    own = [{n: a * mark[n] if n in mark else a for n, a in state.model.items()} for state in run[:2]]
    wanted = [compute_metrics(numpy_one().evaluate(MLP, model, held))["accuracy"] for model in [*own, run[2].model]]
    assert checked == wanted
