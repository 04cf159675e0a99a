"""Networks by name and their weights."""

import pytest

from fedquilt import plugins
from fedquilt.core import ModelError

torch = pytest.importorskip("torch", reason="the zoo builds torch networks")

from fedquilt.arrays import tensors  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402

MLP = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}


def test_a_multilayer_perceptron_costs_two_flops_per_weight():
    """4 x 3 and 3 x 2 weights are 18, 36 FLOPs; with 3 + 2 biases there are 23 parameters."""
    assert registry.measure_cost(registry.build_network(MLP), (4,)) == (36.0, 23)


def test_a_convolution_is_counted_at_every_position():
    """conv 1 -> 16, 5 x 5 on 28 x 28: 2 * 16 * 25 * 784 FLOPs, and 400 + 16 parameters."""
    first = registry.build_network({"name": "cnn", "channels": 1, "size": 28, "classes": 10})[0]
    assert registry.measure_cost(first, (1, 28, 28)) == (2 * 16 * 25 * 784, 416)


def test_a_network_whose_module_is_given_a_parameter_is_counted_and_asks_for_gradients_afterwards():
    class Begun(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.begin, self.cell = torch.nn.Parameter(torch.zeros(4)), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.cell(self.begin.expand(len(x), -1)) + x

    model = Begun()
    assert registry.measure_cost(model, (4,)) == (32.0, 24)
    assert all(value.requires_grad for value in model.parameters())


def test_lazy_modules_are_built_whole_with_weights_of_the_seed(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(
        "from torch import nn\ndef network(inputs, classes):\n    return nn.Sequential(nn.LazyBatchNorm1d(), "
        "nn.LazyLinear(classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    table = {"name": "late:network", "inputs": 3, "classes": 2}
    model, again, other = (registry.load_network(table, seed=seed) for seed in (1, 1, 2))
    assert registry.build_network(table).training
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == {
        "0.weight": (3,),
        "0.bias": (3,),
        "1.weight": (2, 3),
        "1.bias": (2,),
    }
    assert torch.equal(model[1].weight, again[1].weight)
    assert not torch.equal(model[1].weight, other[1].weight)


def test_a_network_whose_lazy_modules_cannot_run_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "unfit.py").write_text(
        "from torch import nn\ndef network(inputs):\n    return nn.Sequential(nn.LazyLinear(4), nn.Linear(7, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"'unfit:network' has lazy modules, .* of shape \(5,\) \(mat1 and mat2"):
        registry.build_network({"name": "unfit:network", "inputs": 5})


@pytest.mark.parametrize(
    "network",
    [
        MLP,
        {"name": "cnn", "channels": 3, "size": 32, "classes": 7},
        {"name": "plain", "channels": 1, "classes": 7, "input": {"channels": 1, "size": 28}},
        {"name": "residual", "channels": 1, "classes": 7, "input": {"channels": 1, "size": 28}},
        {"name": "separable", "channels": 3, "classes": 7, "input": {"channels": 3, "size": 20}},
        {"name": "vit", "channels": 3, "size": 20, "classes": 7},
        {"name": "conv1d", "channels": 3, "steps": 20, "classes": 7},
        {"name": "gru", "channels": 3, "steps": 20, "classes": 7, "layers": 2},
        {"name": "transformer", "vocabulary": 9, "length": 5, "classes": 7},
        {"name": "resnet20-cifar", "classes": 7, "input": {"channels": 3, "size": 32}},
        {"name": "torchvision/squeezenet1_1", "classes": 7, "input": {"channels": 3, "size": 64}},
    ],
    ids=lambda network: network["name"],
)
def test_every_network_takes_its_input_shape_and_yields_one_score_per_class(network):
    model = registry.load_network(network)
    shape = registry.input_shape(network)
    assert model(torch.zeros(2, *shape)).shape == (2, network["classes"])


def test_series_of_a_single_step_are_convolved_without_pooling():
    """Nothing is left to pool; an even kernel would shift a series by half a step."""
    model = registry.build_network({"name": "conv1d", "channels": 2, "steps": 1, "classes": 3})
    assert model(torch.zeros(2, 1, 2)).shape == (2, 3)
    with pytest.raises(ModelError, match="kernel 4 is even: give an odd number"):
        registry.build_network({"name": "conv1d", "channels": 2, "steps": 8, "classes": 3, "kernel": 4})


def test_a_transformer_reads_the_order_of_tokens_and_no_padding():
    model = registry.load_network({"name": "transformer", "vocabulary": 9, "length": 4, "classes": 3, "width": 8})
    one, other, empty = model(torch.tensor([[1.0, 2, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]]))
    assert not torch.allclose(one, other)
    assert torch.isfinite(empty).all()
    with pytest.raises(ModelError, match="width 6 is not a multiple of heads 4"):
        registry.build_network(
            {"name": "transformer", "vocabulary": 9, "length": 4, "classes": 3, "width": 6, "heads": 4}
        )


def test_a_table_that_does_not_say_its_input_is_refused():
    with pytest.raises(ModelError, match=r"'residual' has no input shape: set channels and size in \[input\]"):
        registry.input_shape({"name": "residual", "channels": 1, "classes": 2})


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_own_seed_alone():
    before = torch.get_rng_state()
    one, same, other = (tensors.encode_tensors(_numpy(registry.load_network(MLP, seed=seed))) for seed in (1, 1, 2))
    assert one == same != other
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["pt", "th", "safetensors"])
def test_weights_come_from_every_kind_of_file(tmp_path, kind):
    source = registry.load_network(MLP, seed=5)
    path = tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        path.write_bytes(tensors.encode_tensors(_numpy(source)))
    elif kind == "th":
        torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}, "best": 0.9}, path)
    else:
        torch.save(source.state_dict(), path)
    assert tensors.encode_tensors(_numpy(registry.load_network(MLP, path))) == tensors.encode_tensors(_numpy(source))


def test_weights_of_another_network_are_refused_by_the_first_tensor_that_differs(tmp_path):
    torch.save(registry.build_network({**MLP, "hidden": [9]}).state_dict(), tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"w\.pt do not fit network 'mlp'.*'1\.bias'"):
        registry.load_network(MLP, tmp_path / "w.pt")


def test_a_file_that_would_run_code_is_not_read(tmp_path):
    torch.save(registry.build_network(MLP), tmp_path / "w.pt")
    with pytest.raises(ModelError, match="save a plain state dict"):
        registry.load_network(MLP, tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("network", "weights", "message"),
    [
        ({"name": "mpl"}, None, r"'mpl' is unknown; did you mean 'mlp'\? There are: cnn, "),
        ({"name": "mlp", "inputs": 4}, None, "'classes'"),
        ({"name": "mlp", "inputs": 4, "classes": 2, "width": 3}, None, "'width'"),
        ({"name": "torchvision/resnet51"}, None, "no architecture 'resnet51'"),
        (MLP, "absent.pt", "absent.pt: no such file"),
        (MLP, "DEFAULT", "'DEFAULT' of network 'mlp': no such file"),
        ({"name": "torchvision/resnet18", "classes": 9}, "IMAGENET9", "are for 1000 classes, not 9"),
        ({"name": "torchvision/resnet18"}, "IMAGENET9", "no weights 'IMAGENET9'"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(network, weights, message):
    with pytest.raises(ModelError, match=message):
        registry.load_network(network, weights)


def test_a_users_own_code_runs_where_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "my_own_net.py").write_text(
        "from torch import nn\ndef tiny(classes):\n    return nn.Linear(3, classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    table = {"name": "my_own_net:tiny", "classes": 5}
    with plugins.restrict_plugins_within(None), pytest.raises(ModelError, match="add 'my_own_net:tiny' to `plugins`"):
        registry.build_network(table)
    assert registry.build_network(table).out_features == 5
    with plugins.restrict_plugins_within(["my_own_net:tiny"]):
        assert registry.build_network(table).out_features == 5
    with pytest.raises(ModelError, match="my_own_net:huge"):
        registry.build_network({"name": "my_own_net:huge"})


def _numpy(model: torch.nn.Module) -> dict:
    return {name: value.numpy() for name, value in model.state_dict().items()}
