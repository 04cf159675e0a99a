"""The register says what a network's tensors are: by what the network does, not by names and shapes."""

from collections import OrderedDict
from typing import Any

import difficult_networks
import pytest
from torch import nn

from fedquilt.core import ModelError
from fedquilt.formats.tensor_register import (
    RegisterEntry,
    TensorRegister,
    make_mlp_register,
    register_from_table,
    without_register,
)
from fedquilt.host import torchvision_compat
from fedquilt.models.networks import registry, traces

torch = pytest.importorskip("torch")


def traced(network: dict[str, Any]) -> TensorRegister:
    return traces.trace_register(registry.build_network(network), registry.input_shape(network))


def kinds(register: TensorRegister) -> dict[str, str]:
    return {entry.name: entry.kind for entry in register.tensors}


# -- what depends on it ---------------------------------------------------------------------------


def test_batch_norm_couples_examples_unless_all_its_tensors_are_held_still():
    layers = {"a": nn.Conv1d(2, 2, 3), "b": nn.BatchNorm1d(2, track_running_stats=False), "c": nn.GroupNorm(1, 2)}
    register = traces.trace_register(nn.Sequential(OrderedDict(layers)), (2, 8))
    names = {entry.name for entry in register.tensors}
    assert register.is_coupled(names)
    assert register.is_coupled(names, {"b.bias"})
    assert not register.is_coupled(names, {"a.weight", "c.weight"})
    assert not register.is_coupled({"a.weight", "c.weight"})
    bare = traces.trace_register(nn.Sequential(nn.BatchNorm1d(2, affine=False)), (2, 8))
    assert bare.is_coupled({"0.running_mean"}, set())


def test_convolutions_along_time_are_convolutions_and_learned_places_are_not():
    tokens = traced(difficult_networks.network_table("tokens"))
    assert tokens.convolution_paths(kinds(tokens)) == set()
    series = traced({"name": "conv1d", "channels": 3, "steps": 20, "classes": 3})
    found = series.convolution_paths(kinds(series))
    assert found == {entry.module for entry in series.tensors if entry.type == "Conv1d"} != set()
    assert series.convolution_paths([]) == set()


def test_a_running_variance_is_paired_with_the_mean_of_its_module():
    named = nn.Module()
    named.register_buffer("running_mean", torch.zeros(2))
    named.register_buffer("running_var", torch.ones(2))
    named.forward = lambda x: x
    register = traces.trace_register(nn.Sequential(nn.BatchNorm1d(2), named), (2, 8))
    assert register.running_means_by_variance() == {"0.running_var": "0.running_mean"}


# -- what a tensor is -----------------------------------------------------------------------------


def test_a_normalisation_of_any_name_has_statistics_that_no_gradient_moves():
    register = traced(difficult_networks.network_table("moving_average"))
    entry = register.find_entry("2.mean_ema")
    assert (entry.kind, entry.module, entry.normalises, entry.trained) == ("buffer", "2", True, True)
    assert register.parameter_names({"1.weight": 0, "2.mean_ema": 0}) == ["1.weight"]
    assert register.is_running_statistic("2.var_ema")


def test_a_constant_buffer_of_three_axes_is_no_weight_and_no_statistic():
    register = traced(difficult_networks.network_table("tokens"))
    waves, token = register.find_entry("waves"), register.find_entry("class_token")
    assert (waves.kind, waves.trained, waves.normalises) == ("buffer", False, False)
    assert (token.kind, token.module) == ("parameter", "")
    assert register.find_entry("attention.in_proj_weight").type == "MultiheadAttention"
    assert register.find_entry("attention.out_proj.weight").type == "Linear"


def test_whole_numbers_are_counters_whether_training_counts_in_them_or_not():
    register = traced(difficult_networks.network_table("typed_buffers"))
    found = kinds(register)
    assert (found["order"], found["seen"], found["scale"], found["level"]) == ("counter", "counter", "buffer", "buffer")
    assert [entry.name for entry in register.tensors if not entry.trained] == ["order", "scale"]


def test_a_tensor_of_two_names_is_in_the_register_once():
    rows = {entry.name: entry.aliases for entry in traced(difficult_networks.network_table("tied")).tensors}
    assert rows["second.weight"] == ("third.weight",)
    assert "third.weight" not in rows
    shared = traced(difficult_networks.network_table("shared"))
    assert shared.find_entry("2.1.running_var").aliases == ("3.1.running_var",)
    model = {"2.0.weight": 1, "5.weight": 2}
    assert shared.with_aliases(model) == {"2.0.weight": 1, "5.weight": 2, "3.0.weight": 1}


def test_tracing_leaves_the_network_as_it_was():
    model = registry.build_network(difficult_networks.network_table("root_parameter"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    traces.trace_register(model, (6,))
    assert torch.equal(torch.rand(1), wanted)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- layers ---------------------------------------------------------------------------------------


def test_a_batch_norm_goes_with_the_layer_called_before_it_if_that_gives_as_many_channels():
    found = traced({"name": "plain", "channels": 1, "classes": 3, "width": 2, "input": {"channels": 1, "size": 8}})
    assert found.parameters_by_layer()["0.0"] == ("0.0.weight", "0.1.bias", "0.1.weight")
    assert found.find_entry("0.1.running_mean").layer == "0.0"
    before = traces.trace_register(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.BatchNorm1d(3)), (6,))
    assert before.parameters_by_layer() == {
        "0": ("0.bias", "0.weight"),
        "1": ("1.bias", "1.weight", "2.bias", "2.weight"),
    }


def test_the_head_is_the_linear_layer_called_last():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Linear(8, 3)
            self.encoder = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True))
            self.a_first = nn.Linear(6, 8)

        def forward(self, x):
            value = self.encoder[0](self.a_first(x))[:, None]
            return self.classifier(self.encoder[1](value, value, value)[0][:, 0])

    register = traces.trace_register(Net(), (6,))
    assert list(register.parameters_by_layer()) == [
        "a_first",
        "encoder.0",
        "encoder.1",
        "encoder.1.out_proj",
        "classifier",
    ]
    assert register.find_classifier() == "classifier"


def test_a_head_with_the_weights_of_another_layer_is_refused_by_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.mix(self.embed(x.long()).mean(1)))

    with pytest.raises(ModelError, match=r"the last layer 'head' shares the tensor 'embed\.weight'"):
        traces.trace_register(Net(), (3,)).find_classifier()


@pytest.mark.parametrize("name", ["convnext_tiny", "squeezenet1_1", "mnasnet0_5"])
def test_the_head_of_a_torchvision_classifier_is_the_layer_that_gives_its_classes(name):
    model = torchvision_compat.import_torchvision().models.get_model(name)
    heads = [path for path, each in model.named_modules() if isinstance(each, nn.Linear) and each.out_features == 1000]
    assert [traces.trace_register(model, (3, 64, 64)).find_classifier()] == (heads or [None])


def test_a_residual_net_s_batch_norms_go_with_their_convolutions():
    found = traced({"name": "torchvision/resnet18", "classes": 10, "input": {"channels": 3, "size": 32}})
    layers = found.parameters_by_layer()
    assert len(layers) == 21
    assert layers["layer1.0.conv2"] == ("layer1.0.bn2.bias", "layer1.0.bn2.weight", "layer1.0.conv2.weight")
    assert all(len(names) == 3 for layer, names in layers.items() if layer != "fc")
    assert found.find_classifier() == "fc"


# -- in a network's table -------------------------------------------------------------------------


def test_a_table_without_a_register_is_refused_unless_it_says_the_tensors_itself():
    network = {"name": "mlp", "inputs": 6, "hidden": [5, 4], "classes": 3}
    assert register_from_table(network) == traced(network) == make_mlp_register(3)
    with pytest.raises(ModelError, match="no tensor register of network 'gru'"):
        register_from_table({"name": "gru"})
    with pytest.raises(ModelError, match="register is damaged"):
        register_from_table({"name": "gru", "register": {"tensors": [1]}})


def test_numbers_in_names_are_compared_as_numbers():
    rows = [RegisterEntry(f"{n}.weight", "parameter", f"{n}", f"{n}", "Linear", False, True) for n in (10, 2, 9)]
    register = TensorRegister(tuple(rows))
    assert list(register.parameters_by_layer()) == ["2", "9", "10"]
    assert register.find_classifier() == "10"
    assert without_register({"name": "x", "register": {}}) == {"name": "x"}


@pytest.mark.parametrize("normalised", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_tensors_that_a_weight_is_made_of_belong_to_its_layer(normalised):
    register = traces.trace_register(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), normalised(nn.Linear(5, 3))), (4,))
    made = [entry for entry in register.tensors if ".parametrizations." in entry.name]
    assert made
    assert {(entry.module, entry.layer, entry.name_in_module, entry.type, entry.normalises) for entry in made} == {
        ("2", "2", "weight", "Linear", False)
    }
    assert register.find_classifier() == "2"
    assert register.weights_by_module()["2"].startswith("2.parametrizations.weight.original")
    with pytest.raises(ModelError, match=r"weight of '2' is computed from '2\.parametrizations\.weight\.original"):
        register.require_plain_weight("2")
    register.require_plain_weight("0")


def test_buffers_outside_the_state_are_not_in_the_register():
    layer = nn.Linear(4, 3)
    layer.register_buffer("frequencies", torch.ones(4), persistent=False)
    assert [entry.name for entry in traces.trace_register(layer, (4,)).tensors] == ["weight", "bias"]
