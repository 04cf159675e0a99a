"""FedBN and MOON: batch norm that stays on a device, and the contrast between models."""

from dataclasses import replace

import numpy as np
import pytest
from fedavg_runs import play, same_bits, torch_one

from fedquilt.core import Examples, ModelError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedavg, fedbn, moon
from fedquilt.models.local_training import NetworkState
from fedquilt.testing.toy_networks import toy_bundle
from fedquilt.tools.simulation import DeviceData

BN = {"name": "residual", "channels": 1, "classes": 3, "width": 2, "input": {"channels": 1, "size": 8}}


def pictures(count: int = 2) -> list[DeviceData]:
    """Each device's pictures have a brightness of their own."""
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x = (draws.integers(0, 50, (12, 8, 8)) + 100 * i).astype(np.uint8)
        y = np.arange(12) % 3
        found.append(DeviceData(f"dev-{i}", Examples(x, y), Examples(x[:6], y[:6])))
    return found


def bn_start() -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    torch.manual_seed(0)
    return {name: value.numpy().copy() for name, value in registry.build_network(BN).state_dict().items()}


def begun() -> NetworkState:
    return fedavg.init(toy_bundle(BN, bn_start()), fedavg.Params(), 0)


def test_batch_norm_is_told_by_type_and_not_by_name():
    """Every tensor of a BatchNorm2d and no other, though names here are `1`, `shortcut.1`, `bn1`."""
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    model = registry.build_network(BN)
    wanted = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.BatchNorm2d)
        for name in module.state_dict()
    }
    assert fedbn.private_names(begun()) == wanted
    assert any("bn" not in name for name in wanted)


def test_batch_norm_stays_on_the_device_and_is_used_there():
    kept = {}
    checked = []

    def work(task, site):
        answer = fedbn.work(task, site)
        assert answer.bundles["model"].keys().isdisjoint(answer.local)
        with_own = compute_metrics(fedbn.check(task, replace(site, local=answer.local)))
        with_first = compute_metrics(fedbn.check(task, replace(site, local={})))
        checked.append(abs(with_own["loss"] - with_first["loss"]))
        kept[site.device] = answer.local
        return answer

    double = replace(fedbn.METHOD, work=work)
    run = play("fedbn", torch_one(), toy_bundle(BN, bn_start()), pictures(), rounds=2, method=double)
    assert kept["dev-0"].keys() == kept["dev-1"].keys() == fedbn.private_names(begun())
    means = [kept[device]["0.1.running_mean"] for device in ("dev-0", "dev-1")]
    assert np.abs(means[0] - means[1]).max() > 1e-3
    assert min(checked) > 0
    assert run[-1].model.keys() == bn_start().keys() - kept["dev-0"].keys()
    assert same_bits(run[-1].norm, run[0].norm)
    found = fedbn.result(run[-1])
    assert found.tensors.keys() == bn_start().keys()
    assert found.meta["private"] == sorted(kept["dev-0"])


def test_moons_contrast_is_what_it_is_on_paper():
    """z = (1, 0) as the received model's, the previous one's is (0, 1): s = 1 and 0, and T = 1/2.

    l_con = -log(e^2 / (e^2 + e^0)) = log(1 + e^-2), times mu = 3; the other way round log(1 + e^2).
    """
    torch_one()
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2))
    same, swapped = torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    contrast, x = moon.ContrastiveHooks(3.0, 0.5, "1"), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    contrast.prepare(module)
    with torch.no_grad():
        module[0].weight.copy_(same)
    anchors = [{**module.state_dict(), "0.weight": weight} for weight in (same, swapped)]
    for (start, previous), wanted in (((0, 1), -2.0), ((1, 0), 2.0)):
        scores = module(x)
        at = {"start": anchors[start], "previous": anchors[previous]}
        found = contrast.penalty(module, x, scores, at)
        assert float(found.detach()) == pytest.approx(3 * np.log1p(np.exp(wanted)), rel=1e-6)
    assert module.training


def test_moons_other_models_only_look():
    torch_one()
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    module[0].eval()
    contrast, x = moon.ContrastiveHooks(1.0, 0.5, "2"), torch.randn(4, 2)
    contrast.prepare(module)
    anchors = {key: {n: v.clone() for n, v in module.state_dict().items()} for key in ("start", "previous")}
    contrast.penalty(module, x, module(x), anchors)
    assert [int(held["1.num_batches_tracked"]) for held in anchors.values()] == [0, 0]
    assert int(module[1].num_batches_tracked) == 1
    assert [each.training for each in module] == [False, True, True]


def test_moon_looks_at_other_models_with_tied_weights():
    """Which have one name: the second layer has the other model's weights too. z and the two others lie at 90 degrees.

    Both layers turn by a quarter with the received weights, which leaves half a turn; so z = (-1, 0), received.
    """
    torch = pytest.importorskip("torch")
    quarter, none = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(2)
    body = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    body[1].weight = body[0].weight
    module, x = torch.nn.Sequential(body, torch.nn.Linear(2, 2)), torch.tensor([[1.0, 0.0]])
    with torch.no_grad():
        body[0].weight.copy_(quarter)
    contrast = moon.ContrastiveHooks(1.0, 0.5, "1")
    contrast.prepare(module)
    head = {"1.weight": torch.eye(2), "1.bias": torch.zeros(2)}
    anchors = {"start": {"0.0.weight": quarter, **head}, "previous": {"0.0.weight": none, **head}}
    found = float(contrast.penalty(module, x, module(x), anchors).detach())
    assert found == pytest.approx(np.log1p(np.exp(-4)), rel=1e-5)  # likenesses 1 and -1, over T = 1/2


def test_moon_says_so_where_there_is_no_linear_layer():
    pytest.importorskip("torch")
    table = {**BN, "name": "torchvision/squeezenet1_1", "input": {"channels": 3, "size": 32}}
    table = {key: table[key] for key in ("name", "classes", "input")}
    with pytest.raises(ModelError, match="last linear layer, and this network has none"):
        moon.init(toy_bundle(table, {}), moon.Params(), 0)
