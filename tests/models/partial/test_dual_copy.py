"""Networks in two copies: identities that hold for every architecture."""

import copy
from typing import Any

import pytest

from fedquilt.core import ModelError

torch = pytest.importorskip("torch", reason="the copies are torch networks")

from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.models.partial.dual_copy import DualCopy  # noqa: E402

nn = torch.nn

CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 3, "width": 2}
RESIDUAL = {"name": "residual", "channels": 1, "classes": 3, "width": 4}
WHOLE = ["0", "3", "7", "9"]  # of CNN

NETWORKS: list[tuple[dict[str, Any], list[str], int]] = [
    (CNN, WHOLE, 8),
    (RESIDUAL, ["2", "3", "6"], 16),
    ({"name": "plain", "channels": 1, "classes": 3, "width": 4}, ["3"], 16),
    ({"name": "separable", "channels": 1, "classes": 3, "width": 4}, ["3"], 16),
    ({"name": "resnet20-cifar"}, ["layer3", "linear"], 16),
    ({"name": "torchvision/alexnet", "classes": 10}, ["classifier"], 64),
    ({"name": "torchvision/resnet18", "classes": 10}, ["layer4", "fc"], 32),
    ({"name": "torchvision/squeezenet1_1", "classes": 10}, ["features.12", "classifier"], 64),
    ({"name": "torchvision/mobilenet_v2", "classes": 10}, ["features.17", "features.18", "classifier"], 32),
]


def built(network: dict[str, Any], size: int, spread: float = 1.0) -> tuple[Any, Any]:
    """The network with statistics of batch norm that are not 0 and 1, and examples for it."""
    model = registry.load_network(network, seed=3)
    draw = torch.Generator().manual_seed(5)
    for name, value in model.state_dict().items():
        if name.endswith("running_mean"):
            value.copy_(0.1 * torch.randn(value.shape, generator=draw))
        if name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=draw))
    channels = network.get("channels", 3)
    return model, spread * torch.randn(4, channels, size, size, generator=draw)


def filled(module: Any, model: Any) -> Any:
    """A pair whose both copies hold the network's tensors."""
    held = model.state_dict()
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(held[name.partition(".")[2]])
    return module.eval()


@pytest.mark.parametrize(
    ("network", "trained", "size"),
    [
        pytest.param(*row, id=row[0]["name"], marks=pytest.mark.nightly if "alexnet" in row[0]["name"] else ())
        for row in NETWORKS
    ],
)
def test_two_equal_copies_are_the_network_bit_for_bit(network, trained, size):
    model, x = built(network, size, spread=10.0)
    with torch.no_grad():
        wanted = model(x)
        for pool in ("own", "sk"):
            pair = filled(DualCopy(network, trained, pool=pool).build_copy_pair(copy.deepcopy(model)), model)
            assert torch.equal(pair(x), wanted)


def test_averaging_the_weights_of_one_trained_layer_averages_its_scores():
    model, x = built(CNN, 8)
    for options, linear in (({"pool": "sk"}, True), ({"gates": "own"}, False)):
        scores = []
        for amount in (1.0, -0.5, 0.25):  # the last is the mean of the first two
            pair = filled(DualCopy(CNN, ["3"], **options).build_copy_pair(registry.build_network(CNN)), model)
            with torch.no_grad():
                weight = pair.qk.get_parameter("3.weight")
                weight.add_(amount * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
                scores.append(pair(x))
        assert torch.allclose((scores[0] + scores[1]) / 2, scores[2], rtol=1e-5, atol=1e-5) == linear


def test_no_gradient_reaches_the_frozen_copy():
    model, x = built(RESIDUAL, 16)
    dual = DualCopy(RESIDUAL, ["3", "6"])
    module = filled(dual.build_copy_pair(registry.build_network(RESIDUAL)), model).train()
    module(x).sum().backward()
    assert all(value.grad is None for value in module.frozen.parameters())
    assert all(module.qk.get_parameter(name).grad is not None for name in dual.trained)
    assert all(name.startswith(("3.", "6.", "4.", "5.")) for name in dual.names)


def test_gates_are_the_frozen_copys_however_the_other_one_moves():
    network = {"name": "mlp", "inputs": 4, "hidden": [8], "classes": 3}
    model = registry.load_network(network, seed=0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    pair = filled(DualCopy(network, ["1"]).build_copy_pair(registry.build_network(network)), model)
    with torch.no_grad():
        before = pair(x) - model[3].bias
        for name in ("1.weight", "1.bias"):
            pair.qk.get_parameter(name).mul_(-1)
        torch.testing.assert_close(pair(x) - model[3].bias, -before)


@pytest.mark.parametrize(("activation", "replaced"), [(nn.GELU(), True), (nn.SiLU(), True), (nn.LeakyReLU(0.2), False)])
def test_other_nonlinearities_become_gates(activation, replaced, monkeypatch):
    """GELU and SiLU become binary gates, as the paper says; leaky ReLU keeps its slope, so nothing changes."""
    model = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 3)).eval()
    monkeypatch.setattr(registry, "build_network", lambda network, **more: copy.deepcopy(model))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    pair = filled(DualCopy({"name": "own"}, ["0"]).build_copy_pair(copy.deepcopy(model)), model)
    z = model[0](x)
    wanted = model[2](torch.where(z > 0, z, 0.0)) if replaced else model(x)
    torch.testing.assert_close(pair(x), wanted)


def test_batch_norm_keeps_its_statistics_or_has_its_own():
    model, x = built(RESIDUAL, 16)
    for bn, moves in (("frozen_stats", False), ("train", True)):
        module = filled(
            DualCopy(RESIDUAL, ["3", "6"], bn=bn).build_copy_pair(registry.build_network(RESIDUAL)), model
        ).train()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module(x)
        changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
        assert bool(changed) == moves
        assert not any(name.startswith("frozen.") for name in changed)


def test_gates_of_its_own_make_it_the_network_with_a_frozen_part():
    model, x = built(RESIDUAL, 16)
    pair = filled(DualCopy(RESIDUAL, ["3", "6"], gates="own").build_copy_pair(registry.build_network(RESIDUAL)), model)
    with torch.no_grad():
        for module in (model, pair.qk):
            module.get_parameter("6.weight").mul_(2)
            module.get_parameter("3.conv1.weight").neg_()
        assert torch.equal(pair(x), model(x))


def test_a_network_that_branches_on_values_is_refused_by_name(monkeypatch):
    """It cannot be taken apart."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, x):
            return self.one(x) if x.sum() > 0 else x

    monkeypatch.setattr(registry, "build_network", lambda network, **more: Branching())
    with pytest.raises(ModelError, match="'mine' cannot be traced"):
        DualCopy({"name": "mine"}, ["one"])


def test_a_schedule_that_trains_nothing_is_refused():
    with pytest.raises(ModelError, match="uses no tensor of nowhere"):
        DualCopy(CNN, ["nowhere"])
