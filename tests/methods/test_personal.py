"""Personalised methods: what each is with its knobs at zero, what it is on paper, and what never leaves a device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import (
    ClientContext,
    ClientResult,
    DeviceUpdate,
    DeviceView,
    Examples,
    Fit,
    ForwardPass,
    Method,
    ModelError,
    Task,
    UpdateError,
)
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.methods import ditto, fedavg, fedbabu, feddyn, fedper, fedrep, local, perfedavg, pfedme
from fedquilt.testing.toy_networks import point_devices, run_method, toy_bundle

SMALL = {"epochs": 2, "batch": 4, "lr": 0.1}
BN = {"name": "residual", "channels": 1, "classes": 3, "width": 2, "input": {"channels": 1, "size": 8}}


def numpy_one() -> NumpyEngine:
    return NumpyEngine(1 << 40, base_bytes=0)


def torch_one() -> Any:
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")
    return module.TorchEngine(1 << 40, base_bytes=0)


class Played:
    """A run on toy devices: the states, and what each task gave, (device, answer), in order."""

    def __init__(self, name: str, engine: Any = None, rounds: int = 3, **params: Any) -> None:
        self.answers: list[tuple[str, ClientResult]] = []
        method = methods.load(name)

        def work(task: Task, site: ClientContext) -> ClientResult:
            answer = method.work(task, site)
            self.answers.append((site.device, answer))
            return answer

        self.states = run_method(
            name,
            toy_bundle(),
            point_devices(3, 13),
            {**SMALL, **params},
            engine=engine or numpy_one(),
            method=replace(method, work=work),
            rounds=rounds,
        )

    @property
    def kept(self) -> list[bytes]:
        """Of each task the private state after it."""
        return [tensors.encode_tensors(answer.private_state) for _, answer in self.answers]

    @property
    def models(self) -> list[bytes]:
        return [tensors.encode_tensors(state.model) for state in self.states]


def one(method: Method, engine: Any, **params: Any) -> tuple[Task, ClientContext]:
    """The first round's task of one device."""
    state = method.init(toy_bundle(), method.params(**{**SMALL, **params}), 0)
    return deliver_task(method, method.send(state, DeviceView("dev-0", None)), point_devices(1, 13)[0], engine)


@pytest.mark.parametrize(
    ("name", "params", "torch"),
    [
        ("ditto", {}, False),  # its global model, whatever the own ones do
        ("fedrep", {"head": ()}, False),
        ("fedrep", {"head": ()}, True),
        ("perfedavg", {"alpha": 0.0}, True),
        ("apfl", {"alpha": 0.0, "adaptive": False}, True),
        ("fedlp", {"keep": 1.0}, False),
    ],
)
def test_with_its_knobs_at_zero_a_method_is_fedavg_bit_for_bit(name, params, torch):
    engine = torch_one if torch else numpy_one
    ours, theirs = Played(name, engine(), **params), Played("fedavg", engine())
    assert ours.models == theirs.models
    assert len(set(ours.models)) == 4


def test_ditto_without_pull_trains_its_own_models_as_if_alone():
    """lambda = 0: what each device keeps is what it keeps with "local", in every bit; with lambda = 1 it is not."""
    alone = Played("local")
    assert Played("ditto", pull=0.0).kept == alone.kept != Played("ditto", pull=1.0).kept
    assert len(set(alone.models)) == 1
    assert not any(answer.bundles for _, answer in alone.answers)


def test_dittos_own_model_takes_the_papers_step():
    """v <- v - eta (g + lambda (v - w)) for one step with all examples, g being what lambda = 0 went by.

    From v = w + 1: with eta = 0.1 and lambda = 2 every value comes out 0.2 lower than without pull.
    """
    moved = {}
    for pull in (0.0, 2.0):
        task, site = one(ditto.METHOD, numpy_one(), pull=pull, epochs=1, batch=13)
        start = {name: array + np.float32(1) for name, array in site.load("model").items()}
        moved[pull] = ditto.work(task, replace(site, private_state=start)).private_state
    for name in moved[0.0]:
        assert moved[2.0][name] == pytest.approx(moved[0.0][name] - 0.2, abs=1e-6)


def test_ditto_evaluates_the_own_model_and_sends_the_other():
    task, site = one(ditto.METHOD, numpy_one(), pull=0.5)
    answer = ditto.work(task, site)
    own, plain = answer.private_state, fedavg.work(*one(fedavg.METHOD, numpy_one()))
    assert tensors.encode_tensors(answer.bundles["model"]) == tensors.encode_tensors(plain.bundles["model"])
    wanted = site.engine.evaluate(task.params["network"], own, site.held_out)
    assert ditto.check(task, replace(site, private_state=own)) == wanted != ditto.check(task, site)
    assert ditto.check(task, site) == fedavg.check(task, site)


class Parabola:
    """An engine in torch that goes down a/2 (x - b)^2 by a method's steps, `epochs` mini-batches of it."""

    name = "parabola"

    def __init__(self, curvature: float, place: float) -> None:
        self.curvature, self.place = curvature, place

    def train(self, network, start, examples, fit, rng, *, hooks, progress):
        torch = pytest.importorskip("torch")
        module = torch.nn.Module()
        module.x = torch.nn.Parameter(torch.tensor(start["x"], dtype=torch.float64))
        anchors = {key: {"x": torch.tensor(held["x"], dtype=torch.float64)} for key, held in hooks.anchors.items()}
        for _ in range(fit.epochs):
            for step in hooks.steps:
                if step.before_step:
                    step.before_step(module)
                loss = self.curvature / 2 * (module.x - self.place).square().sum()
                if step.penalty:
                    loss = loss + step.penalty(ForwardPass(module, None, None, None, anchors))
                (gradient,) = torch.autograd.grad(loss, [module.x])
                if hooks.correct_gradient:
                    gradient = hooks.correct_gradient(
                        gradient, module.x.detach(), {k: v["x"] for k, v in anchors.items()}
                    )
                with torch.no_grad():
                    module.x -= fit.lr * step.rate("x") * gradient
        return {"x": module.x.detach().numpy().copy()}, {"loss": 0.0, "steps": float(fit.epochs)}


def parabola(method: Any, curvature: float, place: float, **params: Any) -> ClientResult:
    """The answer of a device whose loss this is, from x = 0."""
    task, site = one(method.METHOD, numpy_one())
    zero = {"x": np.zeros(1)}
    task = Task(**{**{f: getattr(task, f) for f in task.__struct_fields__}, "params": {**task.params, **params}})
    return method.work(task, replace(site, engine=Parabola(curvature, place), load=lambda name: zero))


def test_pfedme_on_a_quadratic_comes_to_its_closed_form():
    """theta = (a b + lambda w) / (a + lambda), then w <- w - eta lambda (w - theta), mini-batch by mini-batch.

    a = 2, b = 3, lambda = 6 and eta lambda = 1/2, K large: theta = 0.75 from w = 0, w = 0.375;
    then theta = (6 + 6 * 0.375) / 8 = 1.03125 and w = 0.703125.
    """
    for batches, theta, w in ((1, 0.75, 0.375), (2, 1.03125, 0.703125)):
        answer = parabola(pfedme, 2.0, 3.0, pull=6.0, inner=200, outer_lr=0.5 / 6, epochs=batches, lr=0.1)
        assert answer.private_state["x"] == pytest.approx([theta], rel=1e-9)
        assert answer.bundles["model"]["x"] == pytest.approx([w], rel=1e-9)
        assert answer.weight == 1.0


def test_pfedmes_server_goes_by_beta_and_by_no_examples():
    """From 0 to models 1 and 4: the mean is 2.5, with beta = 2 it is 5. One that weighs more is refused."""
    start = {"x": np.zeros(1, np.float32)}
    for beta, wanted in ((1.0, 2.5), (2.0, 5.0)):
        state = pfedme.METHOD.init(toy_bundle({"name": "x"}, start, kinds={}), pfedme.Params(beta=beta), 0)
        total = None
        for device, value in (("a", 1.0), ("b", 4.0)):
            model = {"model": {"x": np.full(1, value, np.float32)}}
            total = pfedme.fold(state, total, DeviceUpdate(device, 0, 1.0, {}, model))
        with pytest.raises(UpdateError, match="c has weight 99: this method requires 1"):
            pfedme.fold(state, total, DeviceUpdate("c", 0, 99.0, {}, model))
        assert pfedme.step(state, total).model["x"] == pytest.approx([wanted])


def test_perfedavg_on_a_quadratic_takes_the_gradient_from_one_step_ahead():
    """a = 2, b = 3, w = 0, alpha = 1/4, beta = 1/10: u = 1.5, the gradient there is -3, so w = 0.3 (FedAvg: 0.6).

    The second mini-batch: u = 0.3 + 1.35 = 1.65, gradient -2.7, w = 0.57.
    """
    for batches, w in ((1, 0.3), (2, 0.57)):
        answer = parabola(perfedavg, 2.0, 3.0, alpha=0.25, lr=0.1, epochs=batches)
        assert answer.bundles["model"]["x"] == pytest.approx([w], rel=1e-6)
        assert not answer.private_state


def test_perfedavg_is_evaluated_after_a_step_on_the_devices_own_examples():
    task, site = one(perfedavg.METHOD, torch_one(), alpha=0.2)
    plain = fedavg.check(task, site)
    fit = Fit(epochs=1, batch=4, lr=0.2)
    rng = tensors.seeded_rng(task.seed)
    adapted, _ = site.engine.train(task.params["network"], site.load("model"), site.train, fit, rng)
    assert perfedavg.check(task, site) == site.engine.evaluate(task.params["network"], adapted, site.held_out) != plain
    nobody = replace(site, train=Examples(site.train.x[:0], site.train.y[:0]))
    assert perfedavg.check(task, nobody) == plain
    for params in ({"alpha": 0.0}, {"adapt_epochs": 0}):
        assert perfedavg.check(*one(perfedavg.METHOD, torch_one(), **{"alpha": 0.2, **params})) == plain


def test_fedbabu_sends_the_body_and_is_evaluated_after_fine_tuning_all_layers():
    task, site = one(fedbabu.METHOD, torch_one(), alpha=0.2, adapt_epochs=2)
    assert fedbabu.METHOD.work(task, site).bundles["model"].keys() == {"1.weight", "1.bias"}
    network = {**site.load("model"), **site.load("own")}
    fresh = [replace(site, rng=tensors.seeded_rng(task.seed)) for _ in range(2)]
    tuned = perfedavg.adapt(task, fresh[0], network)
    assert all((tuned[name] != array).any() for name, array in network.items())
    table = task.params["network"]
    assert fedbabu.check(task, fresh[1]) == site.engine.evaluate(table, tuned, site.held_out)
    with pytest.raises(ModelError, match="layers = 2 are all layers"):
        fedbabu.init(toy_bundle(), fedbabu.Params(layers=2), 0)


def test_fedreps_progress_goes_from_nothing_to_all_once():
    told = []
    task, site = one(fedrep.METHOD, numpy_one(), head_epochs=3)
    answer = fedrep.work(task, replace(site, progress=told.append))
    assert (answer.private_state.keys(), answer.metrics["steps"]) == (
        {"3.weight", "3.bias"},
        (3 + 2) * 4,
    )  # 13 in fours
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    assert len(told) == 20


def test_head_and_representation_are_all_of_the_network_and_have_nothing_in_common():
    pytest.importorskip("torch")
    torch_one()
    from fedquilt.models.networks import registry

    start = {name: value.numpy().copy() for name, value in registry.build_network(BN).state_dict().items()}
    state = fedrep.init(toy_bundle(BN, start), fedrep.Params(), 0)
    assert state.own.keys().isdisjoint(state.model)
    assert state.own.keys() | state.model.keys() == start.keys()
    assert {array.shape[0] for array in state.own.values()} == {3}  # the classifier of three classes
    result = fedrep.result(state)
    assert result.tensors.keys() == start.keys()
    assert result.meta["private"] == sorted(state.own)


def test_a_head_of_several_layers_is_named():
    state = fedrep.init(toy_bundle(), fedrep.Params(head=("1",)), 0)
    assert state.own.keys() == {"1.weight", "1.bias"}
    with pytest.raises(ModelError, match=r"layer 'fc' is not in the network: choose among 1, 3"):
        fedrep.init(toy_bundle(), fedrep.Params(head=("fc",)), 0)
    with pytest.raises(ModelError, match="nothing would be shared"):
        fedrep.init(toy_bundle(), fedrep.Params(head=("1", "3")), 0)
    convolutional = toy_bundle({"name": "x"}, {"conv10.weight": np.zeros((3, 1, 1, 1), np.float32)}, kinds={})
    with pytest.raises(ModelError, match="no last linear layer"):
        fedrep.init(convolutional, fedrep.Params(), 0)


def test_a_device_of_feddyn_that_keeps_another_networks_slope_is_refused():
    task, site = one(methods.load("feddyn"), numpy_one())
    with pytest.raises(UpdateError):
        feddyn.work(task, replace(site, private_state={"9.weight": np.zeros(2, np.float32)}))


def test_feddyns_h_is_the_mean_of_what_the_devices_keep():
    """With m = 4 and three devices, whose g_k are kept: h = sum_k g_k / 4, and x = mean y - h / alpha."""
    played = Played("feddyn", rounds=2, alpha=0.5, devices=4)
    last = dict(played.answers[-3:])
    for name, h in played.states[-1].h.items():
        wanted = sum(answer.private_state[name].astype(float) for answer in last.values()) / 4
        np.testing.assert_allclose(h, wanted, atol=1e-6)
        mean = sum(answer.bundles["model"][name].astype(float) for answer in last.values()) / 3
        np.testing.assert_allclose(played.states[-1].model[name], mean - h / 0.5, atol=1e-6)


def test_a_network_whose_layers_all_stay_is_refused():
    with pytest.raises(ModelError, match="layers = 2 are all layers of the network"):
        fedper.init(toy_bundle(), fedper.Params(layers=2), 0)


def test_fedavg_ft_is_fedavg_that_is_evaluated_after_tuning():
    ours, theirs = Played("fedavg_ft"), Played("fedavg")
    assert ours.models == theirs.models
    task, site = one(methods.load("fedavg_ft"), numpy_one(), alpha=0.1)
    tuned, _ = site.engine.train(
        task.params["network"],
        site.load("model"),
        site.train,
        Fit(epochs=5, batch=4, lr=0.1),
        tensors.seeded_rng(task.seed),
    )
    wanted = site.engine.evaluate(task.params["network"], tuned, site.held_out)
    assert perfedavg.check(task, site) == wanted != fedavg.check(task, site)


def test_nothing_travels_with_local():
    state = local.init(toy_bundle(), local.METHOD.params(), 0)
    with pytest.raises(UpdateError, match="dev-7 sent the bundles model"):
        local.fold(state, None, DeviceUpdate("dev-7", 0, 1.0, {}, {"model": dict(state.model)}))
    assert local.step(state, None) is state


@pytest.mark.parametrize("name", ["local", "ditto", "fedrep", "pfedme", "apfl", "fedala"])
def test_a_private_model_of_another_network_is_refused(name):
    method = methods.load(name)
    task, site = one(method, torch_one())
    odd = replace(site, private_state={"9.weight": np.zeros(2, np.float32)})
    with pytest.raises(UpdateError):
        method.check(task, odd)
    if name != "pfedme":  # its own model counts in evaluation only
        with pytest.raises(UpdateError):
            method.work(task, odd)


def test_fedrep_moves_the_head_first_and_then_what_it_stands_on():
    task, site = one(fedrep.METHOD, numpy_one(), head_epochs=3)
    answer = fedrep.work(task, site)
    first = fedrep.load_device_network(site)
    assert answer.private_state.keys() == {"3.weight", "3.bias"}
    assert answer.bundles["model"].keys() == {"1.weight", "1.bias"}
    assert answer.metrics["steps"] == (3 + 2) * 4  # 13 examples in fours
    held = {}

    def seen(network, start, *rest, **options):
        held.setdefault("starts", []).append(start)
        return site.engine.train(network, start, *rest, **options)

    class Watched:
        train = staticmethod(seen)

    fedrep.work(task, replace(site, engine=Watched(), rng=tensors.seeded_rng(task.seed)))
    begun, between = held["starts"]
    assert tensors.encode_tensors(begun) == tensors.encode_tensors(first)
    for name in ("1.weight", "1.bias"):
        assert np.array_equal(between[name], first[name])
        assert not np.array_equal(answer.bundles["model"][name], first[name])
    for name in ("3.weight", "3.bias"):
        assert not np.array_equal(between[name], first[name])
        assert np.array_equal(between[name], answer.private_state[name])
