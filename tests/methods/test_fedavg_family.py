"""The FedAvg family: what each is when its knobs are at zero, and what it is on paper."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from fedavg_runs import numpy_one, play, same_bits, torch_one

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import Bundle, DeviceUpdate, Examples, Fit, ForwardPass, ModelError, UpdateError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedavg, fedbn, fednova, fedopt, moon, scaffold
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.testing.toy_networks import MLP, point_devices, toy_bundle
from fedquilt.tools.simulation import DeviceData


class Quadratics:
    """An engine that goes down a/2 (x - b)^2 for the one example (a, b) of a device, by gradient steps."""

    name = "numpy"

    def train(self, network, start, examples, fit, rng, *, hooks, progress):
        (curvature, place), x = examples.x[0], start["x"].astype(np.float64)
        for _ in range(fit.epochs):
            gradient = curvature * (x - place)
            if hooks.correct_gradient:
                at = {"start": start["x"], **{key: held["x"] for key, held in hooks.anchors.items()}}
                gradient = hooks.correct_gradient(gradient, x, at)
            x = x - fit.lr * gradient
        return {"x": x.astype(np.float32)}, {"loss": 0.0, "steps": float(fit.epochs)}


def quadratics(*pairs: tuple[float, float]) -> tuple[Bundle, list[DeviceData]]:
    """One device for each (a, b), and x = 0 to begin with."""
    at = [Examples(np.array([pair]), np.zeros(1, np.int64)) for pair in pairs]
    members = [DeviceData(f"dev-{i}", one, one) for i, one in enumerate(at)]
    zero = {"x": np.zeros(1, np.float32)}
    return toy_bundle({"name": "x"}, zero, kinds={}), members


def update(model: Mapping[str, np.ndarray], weight: float = 1.0, device: str = "d", **metrics: float) -> DeviceUpdate:
    return DeviceUpdate(device, 0, weight, metrics, {"model": model})


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "fit"),
    [
        ("fedprox", {"mu": 0.0}, {"momentum": 0.9, "schedule": {"name": "step", "factor": 0.5}}),
        ("fedopt", {"server": "sgd", "server_lr": 1.0, "beta1": 0.0}, {"momentum": 0.9, "nesterov": True}),
        ("fedbn", {}, {"optimizer": "adam", "lr": 0.01}),
    ],
)
def test_with_its_knobs_at_zero_a_method_is_fedavg_bit_for_bit(name, params, fit):
    members = point_devices(3, examples=13)
    ours, theirs = play(name, devices=members, **params, **fit), play("fedavg", devices=members, **fit)
    assert [tensors.encode_tensors(state.model) for state in ours] == [
        tensors.encode_tensors(state.model) for state in theirs
    ]
    assert not same_bits(ours[0].model, ours[-1].model)


def test_scaffold_with_zero_variates_is_fedavg_bit_for_bit():
    """All variates are zero in the first round; devices have 16 examples each, so that both means are the same."""
    ours, theirs = play("scaffold", rounds=2), play("fedavg", rounds=2)
    assert same_bits(ours[1].model, theirs[1].model)
    assert not same_bits(ours[2].model, theirs[2].model)


def test_moon_without_contrast_is_fedavg_bit_for_bit():
    """mu = 0 with the contrastive forward passes taken all the same; with mu = 1 the second round differs."""
    none, some, plain = play("moon", torch_one(), mu=0.0), play("moon", torch_one()), play("fedavg", torch_one())
    assert [tensors.encode_tensors(state.model) for state in none] == [
        tensors.encode_tensors(state.model) for state in plain
    ]
    assert same_bits(some[1].model, plain[1].model)
    assert not same_bits(some[2].model, plain[2].model)


def test_the_learning_rate_decays_by_round():
    params = {"lr": 0.1, "schedule": {"name": "step", "factor": 0.5}}
    assert [local_training.learning_rate(params, r) for r in range(3)] == [0.1, 0.05, 0.025]


# -- SCAFFOLD -------------------------------------------------------------------------------------

TWO = ((1.0, 0.0), (4.0, 3.0))  # the sum of both is least at (1 * 0 + 4 * 3) / (1 + 4) = 2.4
QUADRATIC = {"epochs": 8, "lr": 0.05}


def test_scaffold_reaches_the_least_of_two_quadratics_and_fedavg_does_not():
    """Closed form: sum a_i b_i / sum a_i = 2.4. FedAvg's eight steps on each end where both have gone too far.

    One of its rounds maps x to b_i + r_i (x - b_i) on device i, r_i = (1 - 0.05 a_i)^8; the fixed point of
    their mean is sum (1 - r_i) b_i / sum (1 - r_i), about 2.13.
    """
    bundle, members = quadratics(*TWO)
    ours = play("scaffold", Quadratics(), bundle, members, rounds=60, **QUADRATIC)
    theirs = play("fedavg", Quadratics(), bundle, members, rounds=60, **QUADRATIC)
    pulls = [1 - (1 - 0.05 * a) ** 8 for a, _ in TWO]
    drifted = sum(pull * b for pull, (_, b) in zip(pulls, TWO, strict=True)) / sum(pulls)
    assert ours[-1].model["x"][0] == pytest.approx(2.4, abs=1e-4)
    assert theirs[-1].model["x"][0] == pytest.approx(drifted, abs=1e-4)
    assert abs(drifted - 2.4) > 0.2


def test_the_servers_variate_is_the_mean_of_all_devices_variates():
    """Though devices send only models, take part in turn, and N grows from what is seen: 1 of 3, then 2, then 3."""
    kept = []  # of each round's one device

    def work(task, site):
        answer = scaffold.work(task, site)
        kept.append((site.device, answer.private_state))
        return answer

    run = play("scaffold", rounds=8, cohort=1, method=replace(scaffold.METHOD, work=work))
    assert len(kept) == 8
    for number, state in enumerate(run):
        latest = dict(kept[:number])
        for name, control in state.control.items():
            mean = sum(own[name] for own in latest.values()) / max(1, len(latest))
            np.testing.assert_allclose(control, mean + np.zeros_like(control), atol=1e-5)
    assert [state.known for state in run][:2] == [0, 1]
    assert run[-1].known == len(dict(kept)) == 3


def test_scaffold_takes_a_known_number_of_devices():
    """N = 10 where one takes part: c gets a tenth of its slope, (0 - y) / (K eta) with y = 1, K = 2, eta = 0.1."""
    bundle, _ = quadratics(*TWO)
    state = scaffold.init(bundle, scaffold.Params(lr=0.1, devices=10, server_lr=0.5), 0)
    total = scaffold.fold(state, None, update({"x": np.ones(1, np.float32)}, steps=2.0, new=1.0))
    after = scaffold.step(state, total)
    assert after.control["x"] == pytest.approx([-0.5])
    assert after.model["x"] == pytest.approx([0.5])  # eta_g = 1/2 goes half of the way
    assert after.known == 1


def test_devices_that_kept_their_variates_count_with_a_new_coordinator():
    bundle, _ = quadratics(*TWO)
    state = scaffold.init(bundle, scaffold.Params(lr=0.1), 0)
    total = None
    for device, place in (("a", 1.0), ("b", 3.0)):
        total = scaffold.fold(
            state, total, update({"x": np.full(1, place, np.float32)}, device=device, steps=2.0, new=0.0)
        )
    after = scaffold.step(state, total)
    assert after.control["x"] == pytest.approx([-10.0])
    assert after.model["x"] == pytest.approx([2.0])
    assert after.known == 2


# -- FedNova --------------------------------------------------------------------------------------


def test_fednova_with_unequal_steps_is_what_it_is_on_paper():
    """x = 1; y = 3 after 2 steps with 10 examples, y = 13 after 4 with 30.

    d = (-1, -3), p = (1/4, 3/4): sum p d = -2.5, sum p tau = 3.5, so x goes to 9.75 (FedAvg: 10.5).
    """
    bundle, _ = quadratics(*TWO)
    state = replace(fednova.METHOD.init(bundle, fednova.Params(), 0), model={"x": np.ones(1, np.float32)})
    total = None
    for model, weight, steps in ((3.0, 10.0, 2.0), (13.0, 30.0, 4.0)):
        total = fednova.fold(state, total, update({"x": np.full(1, model, np.float32)}, weight, steps=steps))
    assert fednova.step(state, total).model["x"] == pytest.approx([9.75])


def test_how_far_momentum_goes_is_summed_up_by_hand():
    """Three steps at rho = 1/2: gradients count 1 + 1/2 + 1/4, 1 + 1/2, 1, in all 4.25; with Nesterov's 3 + 4.25/2."""
    assert fednova.effective_steps(3, {"momentum": 0.5, "nesterov": False}) == pytest.approx(4.25)
    assert fednova.effective_steps(3, {"momentum": 0.5, "nesterov": True}) == pytest.approx(5.125)
    assert fednova.effective_steps(3, {"momentum": 0.0, "nesterov": False}) == 3


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_engine_goes_as_far_as_fednova_reckons(nesterov):
    network = {**MLP, "hidden": []}
    start = {"1.weight": np.zeros((3, 6), np.float32), "1.bias": np.zeros(3, np.float32)}
    one = Examples(np.ones((1, 6), np.float32), np.zeros(1, np.int64))

    def moved(epochs):
        fit = Fit(epochs=epochs, lr=1e-4, momentum=0.8, nesterov=nesterov)
        return float(numpy_one().train(network, start, one, fit, tensors.seeded_rng(0))[0]["1.bias"][0])

    reckoned = [fednova.effective_steps(tau, {"momentum": 0.8, "nesterov": nesterov}) for tau in (1, 5)]
    assert moved(5) / moved(1) == pytest.approx(reckoned[1] / reckoned[0], rel=1e-2)


# -- FedOpt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "points"),
    [
        # D = 1 from x = 0, eta 0.1, beta1 1/2, beta2 3/4, tau 1 (v begins at 1); then D = 1 again.
        # sgd: m = 1, 1.5.  others: m = 0.5, 0.75.
        ("sgd", (0.1, 0.25)),
        ("adagrad", (0.1 * 0.5 / (2**0.5 + 1), 0.1 * 0.5 / (2**0.5 + 1) + 0.1 * 0.75 / (3**0.5 + 1))),
        ("adam", (0.1 * 0.5 / 2, 0.1 * 0.5 / 2 + 0.1 * 0.75 / 2)),  # v stays 1
        ("yogi", (0.1 * 0.5 / 2,)),  # v = D^2, so its sign is 0; what float32 makes of the next D decides the sign
    ],
)
def test_server_steps_are_what_they_are_on_paper(server, points):
    bundle, _ = quadratics(*TWO)
    params = fedopt.Params(server=server, server_lr=0.1, beta1=0.5, beta2=0.75, tau=1.0)
    state = fedopt.init(bundle, params, 0)
    for point in points:
        state = fedopt.step(state, fedavg.fold(state, None, update({"x": state.model["x"] + np.float32(1)}, 5.0)))
        assert state.model["x"] == pytest.approx([point], rel=1e-6)


def test_yogi_moves_its_second_moment_by_the_sign():
    """v = 1, D = 2: 1 + (1 - 3/4) 4 = 2; D = 1/2 from there: 2 - 1/4 / 4 = 1.9375."""
    params = {"server": "yogi", "beta2": 0.75}
    assert fedopt._compute_second_moment(params, np.ones(1), np.full(1, 4.0)) == 2.0
    assert fedopt._compute_second_moment(params, np.full(1, 2.0), np.full(1, 0.25)) == 1.9375


def test_no_server_optimizer_touches_batch_norms_statistics():
    """A variance from 1 to 3 is 3, where momentum and adaptive steps would put it elsewhere; the weight moves so."""
    start = {
        "bn.weight": np.ones(1, np.float32),
        "bn.running_mean": np.zeros(1, np.float32),
        "bn.running_var": np.ones(1, np.float32),
        "bn.num_batches_tracked": np.zeros((), np.int64),
    }
    kinds = dict(zip(start, ("parameter", "buffer", "buffer", "counter"), strict=True))
    given = {name: array + array.dtype.type(2) for name, array in start.items()}
    for name in ("fedopt", "scaffold", "fednova"):
        method = methods.load(name)
        changes = {"server_lr": 0.25} if name != "fednova" else {}
        state = method.init(toy_bundle({"name": "x"}, start, kinds=kinds), method.params(**changes), 0)
        first, second = (update(given, 1.0, device, steps=s, new=1.0) for device, s in (("a", 2.0), ("b", 8.0)))
        after = method.step(
            state, method.aggregation.fold(state, method.aggregation.fold(state, None, first), second)
        ).model
        assert after["bn.running_var"] == pytest.approx([3.0])
        assert after["bn.running_mean"] == pytest.approx([2.0])
        assert int(after["bn.num_batches_tracked"]) == 2
        assert after["bn.weight"] != pytest.approx([3.0])


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
def test_an_update_that_does_not_say_its_steps_is_refused(name):
    method = methods.load(name)
    state = method.init(toy_bundle(), method.params(), 0)
    for metrics in ({}, {"steps": 0.0}, {"steps": float("nan")}):
        with pytest.raises(UpdateError, match="this method requires"):
            method.aggregation.fold(state, None, update(state.model, new=1.0, **metrics))
    if name == "scaffold":
        with pytest.raises(UpdateError, match="reports the metric new = None"):
            method.aggregation.fold(state, None, update(state.model, steps=1.0))


BN = {"name": "residual", "channels": 1, "classes": 3, "width": 2, "input": {"channels": 1, "size": 8}}


def bn_start() -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    torch.manual_seed(0)
    return {name: value.numpy().copy() for name, value in registry.build_network(BN).state_dict().items()}


def pictures(count: int = 2) -> list[DeviceData]:
    """Each device's pictures have a brightness of their own."""
    found = []
    for i in range(count):
        x = (np.random.default_rng(i).integers(0, 50, (12, 8, 8)) + 100 * i).astype(np.uint8)
        y = np.arange(12) % 3
        found.append(DeviceData(f"dev-{i}", Examples(x, y), Examples(x[:6], y[:6])))
    return found


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
        found = contrast.penalty(ForwardPass(module, x, None, scores, at))
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
    contrast.penalty(ForwardPass(module, x, None, module(x), anchors))
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
    found = float(contrast.penalty(ForwardPass(module, x, None, module(x), anchors)).detach())
    assert found == pytest.approx(np.log1p(np.exp(-4)), rel=1e-5)  # likenesses 1 and -1, over T = 1/2


def test_moon_says_so_where_there_is_no_linear_layer():
    pytest.importorskip("torch")
    table = {**BN, "name": "torchvision/squeezenet1_1", "input": {"channels": 3, "size": 32}}
    table = {key: table[key] for key in ("name", "classes", "input")}
    with pytest.raises(ModelError, match="has no last linear layer, whose inputs MOON compares"):
        moon.init(toy_bundle(table, {}), moon.Params(), 0)


def test_batch_norm_stays_on_the_device_and_is_used_there():
    kept = {}
    checked = []

    def work(task, site):
        answer = fedbn.work(task, site)
        assert answer.bundles["model"].keys().isdisjoint(answer.private_state)
        with_own = compute_metrics(fedbn.check(task, replace(site, private_state=answer.private_state)))
        with_first = compute_metrics(fedbn.check(task, replace(site, private_state={})))
        checked.append(abs(with_own["loss"] - with_first["loss"]))
        kept[site.device] = answer.private_state
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
