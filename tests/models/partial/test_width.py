"""Cutting a network by width and by depth, and putting parts back: entry by entry, on numbers small enough to check."""

from typing import Any

import numpy as np
import pytest
from plain import budgeted

from fedquilt.core import ModelError, UpdateError
from fedquilt.formats.tensor_register import RegisterEntry, TensorRegister
from fedquilt.models.networks import stages
from fedquilt.models.partial import masks, width
from fedquilt.testing.toy_networks import MLP_MASKS

FLATTENED = masks.MaskPlan(
    {"0": 4},
    {"9": 2},
    {"0.weight": masks.TensorGroups((4, 1, 3, 3), ("0",)), "2.weight": masks.TensorGroups((3, 12), (), ("0", "9"), 2)},
)


def mlp() -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    shapes = {"1.weight": (5, 6), "1.bias": (5,), "3.weight": (3, 5), "3.bias": (3,)}
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def at_rate(model: dict[str, np.ndarray], rate: float) -> width.TensorCut:
    return width.unit_indices_by_tensor(MLP_MASKS, model, width.leading_units(MLP_MASKS, rate))


def test_the_leading_units_are_cut_out_of_every_tensor_that_follows_them():
    model = mlp()
    part = width.cut_tensors(model, at_rate(model, 0.4))
    assert {name: array.shape for name, array in part.items()} == {
        "1.weight": (2, 6),
        "1.bias": (2,),
        "3.weight": (3, 2),
        "3.bias": (3,),
    }
    assert np.array_equal(part["1.weight"], model["1.weight"][:2])
    assert np.array_equal(part["3.weight"], model["3.weight"][:, :2])
    assert all(array.flags.c_contiguous for array in part.values())


@pytest.mark.parametrize(("rate", "units"), [(0.2, 1), (0.21, 2), (0.4, 2), (0.6, 3), (1.0, 5), (0.001, 1)])
def test_a_rate_keeps_the_ceiling_of_its_share_and_one_unit_at_least(rate, units):
    """0.6 * 5 is 3.0000000000000004 in no machine's favour."""
    assert width.unit_count(5, rate) == units


def test_columns_after_a_flattening_go_with_their_unit_and_pinned_groups_stay():
    model = {"0.weight": np.zeros((4, 1, 3, 3), np.float32), "2.weight": np.arange(36).reshape(3, 12)}
    part = width.cut_tensors(model, width.unit_indices_by_tensor(FLATTENED, model, width.leading_units(FLATTENED, 0.5)))
    assert part["0.weight"].shape == (2, 1, 3, 3)
    assert part["2.weight"][0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_the_strongest_units_are_those_with_the_largest_weights_in_their_own_order():
    model = mlp()
    model["1.weight"][[3, 1]] *= 100
    assert width.strongest_units(MLP_MASKS, model, 0.4)["1"].tolist() == [1, 3]


def test_an_entry_is_the_mean_over_who_sent_it_and_stays_where_nobody_did():
    model = mlp()
    threes = {name: np.full_like(array, 3) for name, array in model.items()}
    small = at_rate(model, 0.4)
    ones = {name: np.ones_like(array) for name, array in width.cut_tensors(model, small).items()}
    first = width.add_entries(model, None, ones, small, 3.0)
    alone = width.average_entries(model, first)
    assert np.array_equal(alone["1.bias"], [1, 1, *model["1.bias"][2:]])
    both = width.average_entries(model, width.add_entries(model, first, threes, at_rate(model, 1.0), 1.0))
    assert both["1.bias"].tolist() == [1.5, 1.5, 3, 3, 3]
    assert both["3.weight"][0].tolist() == [1.5, 1.5, 3, 3, 3]
    assert both["3.bias"].tolist() == [1.5] * 3
    assert all(both[name].dtype == model[name].dtype for name in model)
    assert width.average_entries(model, None).keys() == model.keys()


def test_how_many_have_an_entry_is_counted_by_the_formula():
    model, total = mlp(), None
    for rate in (0.2, 0.4, 1.0):
        at = at_rate(model, rate)
        total = width.add_entries(model, total, width.cut_tensors(model, at), at, 1.0)
    assert total.weight["1.bias"].rounded_value().tolist() == [3, 2, 1, 1, 1]
    assert total.weight["3.weight"].rounded_value().tolist() == [[3, 2, 1, 1, 1]] * 3
    assert total.weight["3.bias"].rounded_value().tolist() == [3, 3, 3]
    kept = width.average_entries(model, total)
    assert all(np.allclose(kept[name], model[name]) for name in model)


def test_counters_are_not_averaged_and_no_weight_moves_nothing():
    model = {"n": np.array(3), "w": np.ones(2, np.float32)}
    at = {"n": (None, None), "w": (None, None)}
    total = width.add_entries(model, None, {"n": np.array(9), "w": np.zeros(2, np.float32)}, at, 2.0)
    total = width.add_entries(model, total, {"n": np.array(4), "w": np.zeros(2, np.float32)}, at, 2.0)
    assert width.average_entries(model, total)["n"] == 9
    idle = width.average_entries(
        model, width.add_entries(model, None, {"n": np.array(9), "w": np.zeros(2, np.float32)}, at, 0.0)
    )
    assert idle["w"].tolist() == [1, 1]
    assert idle["n"] == 3


def test_a_part_that_nobody_was_sent_is_refused():
    model = mlp()
    cuts = [at_rate(model, rate) for rate in (0.2, 1.0)]
    odd = width.cut_tensors(model, at_rate(model, 0.6))
    with pytest.raises(UpdateError, match="fit no sub-network"):
        width.recognise_cut(model, odd, cuts)
    with pytest.raises(UpdateError, match="names differ"):
        width.add_entries(model, None, {}, cuts[0], 1.0)
    bad = width.cut_tensors(model, cuts[0])
    bad["1.bias"][0] = np.nan
    with pytest.raises(UpdateError, match="not finite"):
        width.add_entries(model, None, bad, width.recognise_cut(model, bad, cuts), 1.0)


def test_a_tiers_value_is_the_largest_that_the_budget_reaches_and_the_first_where_it_is_not_known():
    values = ("a", "b", "c", "d", "e")
    budgets = (512 * 10**6, 10**9, 3 * 10**9, 8 * 10**9)
    assert [width.select_by_tier(budgeted(budget), values) for budget in budgets] == ["a", "b", "c", "e"]
    assert width.select_by_tier(None, values) == "a"


# -- by depth -------------------------------------------------------------------------------------


def tensors_of(table: dict[str, Any]) -> dict[str, np.ndarray]:
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    return {key: value.numpy() for key, value in registry.build_network(table).state_dict().items()}


RESIDUAL = {"name": "residual", "channels": 1, "classes": 3, "width": 2}
VIT = {"name": "vit", "channels": 1, "size": 8, "classes": 3, "width": 8, "depth": 1, "heads": 2}


def body_of(table: dict[str, Any], count: int) -> stages.StagedNetwork:
    """A network's body, for examples of 8 x 8 pixels."""
    from fedquilt.models.networks import registry, traces

    channels = 3 if "cifar" in table["name"] else 1
    return stages.split_stages(
        tensors_of(table), count, traces.trace_register(registry.build_network(table), (channels, 8, 8))
    )


def test_stages_hold_every_tensor_but_the_classifiers_once():
    """Of a small residual network, and of ResNet-20 whose three stages begin where the paper's do."""
    for table, count in ((RESIDUAL, 3), ({"name": "resnet20-cifar", "classes": 10}, 3)):
        model = tensors_of(table)
        body = body_of(table, count)
        names = [name for stage in body.stages for name in stage.names]
        assert sorted([*names, *body.head_names]) == sorted(model)
        assert len(body.stages) == count
    assert [stage.width for stage in body_of(RESIDUAL, 4).stages[1:]] == [2, 2, 4]
    deep = body_of({"name": "resnet20-cifar", "classes": 10}, 3)
    assert [stage.entrance for stage in deep.stages] == ["conv1", "layer2.0.conv1", "layer3.0.conv1"]


def test_what_has_no_weights_to_hear_with_goes_with_its_neighbour():
    pytest.importorskip("torch")
    model = tensors_of(VIT)
    found = body_of(VIT, 9)
    assert [stage.entrance for stage in found.stages] == ["embed", "blocks.0.norm1"]
    assert found.stages[1].width == 8
    assert found.stages[0].names == ("embed.bias", "embed.weight", "place")
    assert {"norm.weight", "norm.bias"} <= {*found.stages[1].names}
    assert (found.head, found.features, found.classes) == ("head", 8, 3)
    names = [name for stage in found.stages for name in stage.names]
    assert sorted([*names, *found.head_names]) == sorted(model)


def test_what_a_transformers_stage_hears_is_the_mean_over_its_patches():
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    table = {**VIT, "patch": 2, "width": 16}
    whole = registry.build_network(table).eval()
    model = {key: value.numpy() for key, value in whole.state_dict().items()}
    body = body_of(table, 2)
    part = registry.build_network(table).eval()
    start = {key: model[key] for key in body.stages[0].names}
    part = stages.keep_first_stages(part, start, body.stages[1:], lambda told, scores: told[0], keep_later_stages=False)
    assert part.state_dict().keys() == start.keys()
    part.load_state_dict({key: torch.tensor(value) for key, value in start.items()})
    x = torch.rand(3, 1, 8, 8)
    patches = whole.embed(x).flatten(2).transpose(1, 2) + whole.place
    assert patches.shape == (3, 16, 16)
    assert torch.equal(part(x), patches.mean(dim=1))


def test_a_network_of_one_layer_has_no_depth_to_cut():
    for kind, shape in (("Linear", (3, 4)), ("Conv2d", (3, 4, 1, 1))):
        row = RegisterEntry("0.weight", "parameter", "0", "0", kind, normalises=False, trained=True)
        with pytest.raises(ModelError, match="by depth"):
            stages.split_stages({"0.weight": np.zeros(shape)}, 2, TensorRegister((row,)))


@pytest.mark.parametrize("name", ["residual", "plain", "separable", "resnet20-cifar", "cnn"])
def test_the_first_stages_alone_say_what_they_say_within_the_network(name):
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    channels = 3 if name == "resnet20-cifar" else 1
    table = {"name": name, "classes": 3}
    table |= {} if name == "resnet20-cifar" else {"channels": 1, "width": 2}
    table |= {"size": 8} if name == "cnn" else {}
    whole = registry.build_network(table).eval()
    model = {key: value.numpy() for key, value in whole.state_dict().items()}
    body = body_of(table, 3)
    x, heard = torch.rand(2, channels, 8, 8), []
    behind = body.stages[1]
    whole.get_submodule(behind.entrance).register_forward_pre_hook(lambda layer, inputs: heard.append(inputs[0]))
    whole(x)
    start = {key: model[key] for key in body.stages[0].names}
    part = registry.build_network(table).eval()
    part = stages.keep_first_stages(part, start, (behind,), lambda told, scores: told[0], keep_later_stages=False)
    assert part.state_dict().keys() == start.keys()
    part.load_state_dict({key: torch.tensor(value) for key, value in start.items()})
    wanted = heard[0].mean(dim=(2, 3)) if heard[0].ndim > 2 else heard[0]
    assert torch.equal(part(x), wanted)


def test_an_order_of_calls_that_is_not_the_networks_is_found_out():
    torch = pytest.importorskip("torch")

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.z = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.z(self.a(self.b(x)))

    model = {key: value.numpy() for key, value in Odd().state_dict().items()}
    rows = [
        RegisterEntry(name, "parameter", name[0], name[0], "Linear", normalises=False, trained=True) for name in model
    ]
    body = stages.split_stages(model, 2, TensorRegister(tuple(rows), ("", "a", "b", "z")))
    start = {name: model[name] for name in body.stages[0].names}
    part = stages.keep_first_stages(
        Odd(), start, (body.stages[1],), lambda told, scores: told[0], keep_later_stages=False
    )
    with pytest.raises(ModelError, match="in the recorded order"):
        part(torch.rand(2, 4))


# -- in torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual", "plain", "separable", "cnn", "resnet20-cifar"])
def test_a_shrunk_network_says_what_the_whole_one_says_with_the_other_units_silenced(name):
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    channels = 3 if name == "resnet20-cifar" else 1
    table = {"name": name, "classes": 3}
    table |= {} if name == "resnet20-cifar" else {"channels": 1, "width": 4}
    table |= {"size": 8} if name == "cnn" else {}
    whole = registry.build_network(table).eval()
    plan = dependency_trace.trace_mask_plan(whole)
    model = {key: value.numpy().copy() for key, value in whole.state_dict().items()}
    at = width.unit_indices_by_tensor(plan, model, width.leading_units(plan, 0.5))
    part = width.cut_tensors(model, at)
    narrow = width.shrink_module(registry.build_network(table), part, scaled=False).eval()
    narrow.load_state_dict({key: torch.tensor(value) for key, value in part.items()})
    silenced = {key: torch.zeros_like(value) for key, value in whole.state_dict().items()}
    for key, value in silenced.items():
        rows, columns = at[key]
        if rows is None and columns is None:
            value.copy_(torch.tensor(model[key]))
        elif columns is None:
            value[torch.tensor(rows)] = torch.tensor(part[key])
        elif rows is None:
            value[:, torch.tensor(columns)] = torch.tensor(part[key])
        else:
            value[np.ix_(rows, columns)] = torch.tensor(part[key])
    whole.load_state_dict(silenced)
    x = torch.rand(2, channels, 8, 8)
    assert sum(array.size for array in part.values()) < sum(array.size for array in model.values())
    assert torch.allclose(narrow(x), whole(x), atol=1e-5)


def test_a_scaled_layer_says_its_full_width_through_its_own_times_as_much():
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    table = {"name": "mlp", "inputs": 4, "hidden": [6], "classes": 3}
    whole = registry.build_network(table)
    plan = dependency_trace.trace_mask_plan(whole)
    model = {key: value.numpy() for key, value in whole.state_dict().items()}
    part = width.cut_tensors(model, width.unit_indices_by_tensor(plan, model, width.leading_units(plan, 0.5)))
    outcomes = []
    for scaled in (True, False):
        narrow = width.shrink_module(registry.build_network(table), part, scaled=scaled).eval()
        narrow.load_state_dict({key: torch.tensor(value) for key, value in part.items()})
        outcomes.append(narrow(torch.ones(1, 4)) - torch.tensor(part["3.bias"]))
    assert torch.allclose(outcomes[0], 2 * outcomes[1])


def test_a_normalisation_without_weights_is_narrowed_by_its_statistics():
    """`affine = False` leaves it two buffers alone."""
    torch = pytest.importorskip("torch")
    from torch import nn

    from fedquilt.models.partial import dependency_trace

    def network():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))

    whole = network()
    plan, model = (
        dependency_trace.trace_mask_plan(whole),
        {key: value.numpy() for key, value in whole.state_dict().items()},
    )
    part = width.cut_tensors(model, width.unit_indices_by_tensor(plan, model, width.leading_units(plan, 0.5)))
    narrow = width.shrink_module(network(), part, scaled=False)
    assert narrow[1].num_features == 3
    assert narrow(torch.ones(2, 4)).shape == (2, 3)


def test_tensors_of_another_network_are_told_by_name():
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    with pytest.raises(ModelError, match=r"no tensor '1\.weight'"):
        width.shrink_module(registry.build_network({"name": "mlp", "inputs": 4, "classes": 3}), {}, scaled=False)
