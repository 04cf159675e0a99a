"""Neuron masks: what they cover, how they travel, and that masking activations is masking weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedquilt.core import ModelError, UpdateError
from fedquilt.models.partial import masks
from fedquilt.models.partial.masks import MaskPlan, TensorGroups
from fedquilt.testing.toy_networks import MLP, MLP_MASKS

# 3 inputs, 4 neurons, a flattening to 2 entries each, 2 neurons, 2 scores
PLAN = MaskPlan(
    {"a": 4, "b": 2},
    {},
    {
        "a.weight": TensorGroups((4, 3), ("a",)),
        "a.bias": TensorGroups((4,), ("a",)),
        "b.weight": TensorGroups((2, 8), ("b",), ("a",), 2),
        "c.weight": TensorGroups((2, 2), (), ("b",)),
    },
)
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"inputs": 6, "classes": 3, "hidden": [5, 4]},
    "cnn": {"channels": 1, "size": 8, "classes": 3, "width": 2},
    "plain": {"channels": 1, "classes": 3, "width": 4},
    "residual": {"channels": 1, "classes": 3, "width": 4},
    "separable": {"channels": 1, "classes": 3, "width": 4},
    "resnet20-cifar": {},
    "torchvision/squeezenet1_1": {"classes": 3},
    "torchvision/mobilenet_v2": {"classes": 3},
}
SHAPES = {
    "mlp": (6,),
    "resnet20-cifar": (3, 16, 16),
    **dict.fromkeys(("cnn", "plain", "residual", "separable"), (1, 8, 8)),
}


def table(name: str) -> dict[str, Any]:
    return {"name": name, **NETWORKS[name]}


def a_mask(*neurons: int) -> np.ndarray:
    return np.array(neurons, bool)


def test_an_entry_is_covered_where_both_its_ends_are():
    marks = masks.covered_entries(PLAN, a_mask(1, 0, 0, 1, 0, 1))
    assert marks["a.weight"].tolist() == [[True] * 3, [False] * 3, [False] * 3, [True] * 3]
    assert marks["a.bias"].tolist() == [True, False, False, True]
    assert np.flatnonzero(marks["b.weight"]).tolist() == [8, 9, 14, 15]
    assert marks["c.weight"].tolist() == [[False, True], [False, True]]


def test_what_is_taken_is_put_back_where_it_was():
    model = {
        "a.weight": np.arange(12.0).reshape(4, 3) + 1,
        "a.bias": np.ones(4),
        "b.weight": np.arange(16.0).reshape(2, 8) + 1,
        "c.weight": np.ones((2, 2)),
        "c.bias": np.ones(2),
    }
    marks = masks.covered_entries(PLAN, a_mask(1, 0, 0, 1, 0, 1))
    sent = masks.select_covered(model, marks)
    assert {name: array.size for name, array in sent.items()} == {
        "a.weight": 6,
        "a.bias": 2,
        "b.weight": 4,
        "c.weight": 2,
        "c.bias": 2,
    }
    again = masks.restore_masked_tensors(sent, marks)
    for name, array in model.items():
        np.testing.assert_array_equal(again[name], array * marks.get(name, 1))
    with pytest.raises(UpdateError, match=r"'a.bias' has shape \(3,\), but its mask covers 2"):
        masks.restore_masked_tensors({**sent, "a.bias": np.ones(3)}, marks)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_parts_of_all_devices_sum_to_one(parts):
    total = sum(masks.mask_of_equal_part(PLAN, index, parts).astype(int) for index in range(parts))
    assert total.tolist() == [1] * 6
    for index in range(parts):
        for name, mark in masks.split_by_group(PLAN, masks.mask_of_equal_part(PLAN, index, parts)).items():
            assert abs(int(mark.sum()) - PLAN.widths[name] / parts) < 1


def test_a_mask_is_a_bit_for_each_neuron():
    mask = np.random.default_rng(0).random(13) < 0.5
    bits = masks.pack_mask(mask)
    assert (bits.nbytes, masks.unpack_mask(bits, 13).tolist()) == (2, mask.tolist())
    for odd in (bits[:1], bits.astype(np.int8), np.zeros((1, 2), np.uint8)):
        with pytest.raises(UpdateError, match="not 2 bytes for 13 neurons"):
            masks.unpack_mask(odd, 13)


def test_a_plan_travels_as_a_tensor():
    assert masks.plan_from_array(masks.plan_to_array(PLAN)) == PLAN
    for odd in (b"", b"{}", b"\xff", b'{"widths":{"a":"b"},"pinned":{},"follows":{}}'):
        with pytest.raises(ModelError, match="plan of masks"):
            masks.plan_from_array(np.frombuffer(odd, np.uint8))


def test_a_plan_of_another_network_is_refused():
    """A tensor that is absent or shaped otherwise; groups that do not make up a shape, or do not exist."""
    model = {name: np.zeros(follow.shape) for name, follow in PLAN.follows.items()}
    masks.validate_plan(PLAN, model)
    for odd in ({**model, "a.bias": np.zeros(5)}, {k: v for k, v in model.items() if k != "a.bias"}):
        with pytest.raises(ModelError, match=r"another network, with a tensor 'a\.bias'"):
            masks.validate_plan(PLAN, odd)
    for follow in (TensorGroups((4,), ("b",)), TensorGroups((4,), ("z",)), TensorGroups((4,), ("a",), ("b",))):
        with pytest.raises(ModelError, match=r"damaged at 'a\.bias'"):
            masks.validate_plan(replace(PLAN, follows={**PLAN.follows, "a.bias": follow}), model)


def network(name: str) -> tuple[Any, Any, MaskPlan]:
    """torch, a network of the zoo in which every tensor is away from its beginnings, and its plan."""
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    module = registry.load_network(table(name), seed=1)
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point() and value.ndim == 1:
                value.add_(0.1 + 0.3 * torch.rand(value.shape, generator=torch.Generator().manual_seed(len(value))))
    plan = dependency_trace.trace_mask_plan(module)
    masks.validate_plan(plan, {key: value.numpy() for key, value in module.state_dict().items()})
    return torch, module, plan


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [False, True])
def test_masking_activations_is_masking_weights(name, training):
    torch, module, plan = network(name)
    from fedquilt.models.partial.torch_masks import SCORES, MaskHooks

    mask = np.random.default_rng(3).random(plan.neurons) < 0.6
    marks = masks.covered_entries(plan, mask)
    assert 0 < mask.sum() < plan.neurons
    x = torch.randn(4, *SHAPES.get(name, (3, 64, 64)), generator=torch.Generator().manual_seed(0))
    zeroed = {
        key: value * torch.from_numpy(marks[key].copy()) if key in marks else value
        for key, value in module.state_dict().items()
    }
    for each in module.modules():
        each.p = 0.0 if isinstance(each, torch.nn.Dropout) else getattr(each, "p", None)
    module.train(training)
    with torch.no_grad():
        wanted = torch.func.functional_call(module, {k: v.clone() for k, v in zeroed.items()}, (x,))
        gates = MaskHooks(plan, None, 0.0, 0.0)
        gates.prepare(module)
        getattr(module, SCORES).copy_(torch.from_numpy(np.where(mask, 100.0, -100.0)))
        gates.training_steps(1.0)[1].before_step(module)
        found = module(x)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert float(wanted.std()) > 0


def test_the_toy_networks_plan_is_the_traced_one():
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    assert dependency_trace.trace_mask_plan(registry.build_network(MLP)) == MLP_MASKS


def test_channels_that_are_added_share_a_mask():
    _, _, plan = network("residual")
    assert plan.follows["2.conv2.weight"].out == plan.follows["2.shortcut.0.weight"].out
    assert plan.follows["2.conv1.weight"].out == ("2.conv1",)
    assert plan.follows["2.bn1.running_var"].out == ("2.conv1",)
    assert plan.follows["2.conv1.weight"].into == plan.follows["2.shortcut.0.weight"].into


def test_what_is_padded_is_not_masked():
    """ResNet-20's shortcuts pad channels, so its residual streams are left alone: 3 x (16 + 32 + 64) inner ones."""
    _, _, plan = network("resnet20-cifar")
    assert plan.neurons == 336
    assert "conv1.weight" not in plan.follows
    assert "linear.weight" not in plan.follows


def test_the_papers_networks_have_the_neurons_it_counts():
    """Table 4: h = 32 + 64 + 128 + 32 = 256, a mask of 32 bytes, of 14,884 weights."""
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    module = registry.build_network({"name": "mlp", "inputs": 5, "hidden": [32, 64, 128, 32], "classes": 4})
    plan = dependency_trace.trace_mask_plan(module)
    assert plan.neurons == 256
    assert sum(value.numel() for value in module.parameters()) == 14_884
    assert masks.pack_mask(np.ones(256, bool)).nbytes == 32


def test_scores_are_never_masked():
    _, _, plan = network("torchvision/squeezenet1_1")
    assert plan.follows["classifier.1.weight"].out == ()
    assert "classifier.1.bias" not in plan.follows
    assert len(plan.follows["features.4.squeeze.weight"].into) == 2  # two that are put side by side


def test_a_network_that_cannot_be_traced_says_so():
    torch = pytest.importorskip("torch")
    from fedquilt.models.partial import dependency_trace

    class Odd(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    line = Odd.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        ModelError, match=rf"torch.fx fails in the network's own forward\(\) \(Odd, test_masks.py, line {line}\)"
    ):
        dependency_trace.trace_mask_plan(Odd())
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU(), Odd()))
    with pytest.raises(ModelError, match=rf"module '1.1' \(Odd, test_masks.py, line {line}\): .*remove branches"):
        dependency_trace.trace_mask_plan(inner)


def test_units_that_a_weight_made_of_other_tensors_reads_stay_whole():
    torch = pytest.importorskip("torch")
    from fedquilt.models.partial import dependency_trace

    made = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    plan = dependency_trace.trace_mask_plan(
        torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), made, torch.nn.Linear(4, 3))
    )
    assert (plan.widths, plan.follows, plan.whole) == ({}, {}, {"0": "2"})


def one_neuron() -> tuple[Any, Any, MaskPlan]:
    """1 input, 1 hidden neuron, 2 scores; all weights 1, no biases' effect."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(3.0)
    return (
        torch,
        module,
        MaskPlan(
            {"0": 1}, {}, {"0.weight": TensorGroups((1, 1), ("0",)), "2.weight": TensorGroups((1, 1), (), ("0",))}
        ),
    )


def test_a_step_on_scores_leaves_batch_norms_statistics():
    torch, module, plan = network("plain")
    from fedquilt.models.partial.torch_masks import MaskHooks

    gates = MaskHooks(plan, None, 0.0, 0.0)
    gates.prepare(module).train()
    x = torch.randn(4, 1, 8, 8)
    for turn in gates.training_steps(1.0):
        turn.before_step(module)
        module(x)
    assert int(module.state_dict()["0.1.num_batches_tracked"]) == 1


def test_a_plan_that_names_a_layer_the_network_lacks_is_refused():
    """Where the device would otherwise mask nothing."""
    torch, module, plan = one_neuron()
    from fedquilt.models.partial.torch_masks import MaskHooks

    odd = replace(plan, follows={"7.weight": plan.follows["2.weight"]})
    with pytest.raises(ModelError, match="with a layer '7'"):
        MaskHooks(odd, None, 0.0, 0.0).prepare(module)
    assert torch is not None
