"""The same steps in numpy and torch, under any budget of memory, and the same bits again."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
from engine_cases import (
    AMPLE,
    LINEAR,
    MLP,
    TIGHT,
    both,
    close,
    numpy_one,
    pictures,
    same_bits,
    table,
    torch_one,
    torch_start,
)

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, Examples, Fit, Hooks, ModelError, Step, Task, WorkEstimate
from fedquilt.core.evaluation import compute_metrics
from fedquilt.edge_agent.engines import numpy_engine as numpy_engine


# -- one step, by hand ----------------------------------------------------------------------------
@both
def test_one_step_of_a_linear_network_is_what_it_is_on_paper(engine):
    """From zero, both classes have p = 1/2: with x = (1, 2), y = 0 the weights' gradient is (p - y) x.

    So w moves by lr 0.1 to ((0.05, 0.1), (-0.05, -0.1)), b to (0.05, -0.05), and the loss was ln 2.
    """
    start = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
    examples = Examples(np.array([[1, 2]], np.float32), np.array([0]))
    model, metrics = engine(AMPLE).train(LINEAR, start, examples, Fit(lr=0.1), tensors.seeded_rng(0))
    np.testing.assert_allclose(model["1.weight"], [[0.05, 0.1], [-0.05, -0.1]], atol=1e-7)
    np.testing.assert_allclose(model["1.bias"], [0.05, -0.05], atol=1e-7)
    assert metrics == {"loss": pytest.approx(np.log(2)), "steps": 1.0}


@both
def test_bytes_are_scaled_to_the_unit_interval(engine):
    """A pixel of 255 is 1: the step is the same as with the number 1."""
    start = numpy_engine.init_tensors(LINEAR, 0)
    y = np.array([0, 1])
    by_byte = Examples(np.array([[255, 0], [0, 255]], np.uint8), y)
    by_number = Examples(np.eye(2, dtype=np.float32), y)
    models = [engine(AMPLE).train(LINEAR, start, e, Fit(), tensors.seeded_rng(0))[0] for e in (by_byte, by_number)]
    assert same_bits(*models)


@both
def test_clipping_bounds_the_whole_gradient(engine):
    """The step of the first test has norm sqrt(3); clipped to 0.001 every value moves 0.001 / sqrt(3) as far."""
    start = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
    examples = Examples(np.array([[1, 2]], np.float32), np.array([0]))
    model, _ = engine(AMPLE).train(LINEAR, start, examples, Fit(lr=1.0, clip=1e-3), tensors.seeded_rng(0))
    assert np.sqrt(sum(np.square(array).sum() for array in model.values())) == pytest.approx(1e-3, rel=1e-2)
    assert model["1.weight"][0, 1] == pytest.approx(2 * model["1.weight"][0, 0])


# -- identities -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fit",
    [
        Fit(epochs=3, batch=8, lr=0.1),
        Fit(epochs=2, batch=7, lr=0.05, momentum=0.9, weight_decay=0.01),
        Fit(epochs=2, batch=20, lr=0.1, momentum=0.5, clip=0.1),
        Fit(epochs=2, batch=7, lr=0.05, momentum=0.9, nesterov=True),
        Fit(epochs=3, batch=8, lr=0.01, optimizer="adam", weight_decay=0.1),
    ],
)
def test_numpy_and_torch_agree(fit: Fit):
    """The same start, examples and generator: equal to 1e-5 after several epochs, and so are the metrics."""
    start, examples = numpy_engine.init_tensors(MLP, seed=1), table()
    ours, our_metrics = numpy_one(AMPLE).train(MLP, start, examples, fit, tensors.seeded_rng(2))
    theirs, their_metrics = torch_one(AMPLE).train(MLP, start, examples, fit, tensors.seeded_rng(2))
    assert close(ours, theirs)
    assert not close(ours, start)
    assert our_metrics == pytest.approx(their_metrics, abs=1e-5)
    evaluated = [compute_metrics(engine(AMPLE).evaluate(MLP, ours, examples)) for engine in (numpy_one, torch_one)]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)


def test_numpy_and_torch_agree_on_images():
    network = {"name": "mlp", "inputs": 16, "hidden": [5], "classes": 2}
    network["input"] = {"channels": 1, "size": 4, "mean": [0.5], "std": [0.25]}
    start = numpy_engine.init_tensors(network, 0)
    models = [
        e(AMPLE).train(network, start, pictures(), Fit(), tensors.seeded_rng(3))[0] for e in (numpy_one, torch_one)
    ]
    assert close(*models)


def test_both_engines_name_the_same_tensors():
    wanted = torch_start(MLP)
    made = numpy_engine.init_tensors(MLP, 0)
    assert {name: (a.shape, a.dtype) for name, a in made.items()} == {n: (a.shape, a.dtype) for n, a in wanted.items()}
    assert same_bits(made, numpy_engine.init_tensors(MLP, 0))
    assert not same_bits(made, numpy_engine.init_tensors(MLP, 1))
    assert np.abs(made["1.weight"]).max() <= 1 / np.sqrt(6)


@both
def test_fedprox_without_pull_is_fedavg_bit_for_bit(engine):
    """mu = 0 through the methods' own client halves; with mu > 0 the model stays nearer to its start."""
    start = numpy_engine.init_tensors(MLP, 0)
    moved = {}
    for name, mu in (("fedavg", None), ("fedprox", 0.0), ("fedprox", 1.0)):
        params = {"epochs": 3, "batch": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "network": MLP}
        if mu is not None:
            params["mu"] = mu
        task = Task(
            job="j", round=0, attempt=0, method=name, engine="numpy", actions=("work",), params=params,
            bundles={}, work=WorkEstimate(), seed=0, deadline_s=1.0,
        )  # fmt: skip
        site = ClientContext(
            "d", AMPLE, engine(AMPLE), tensors.seeded_rng(5), table(), table(4), {}, lambda _: start, Path, Path()
        )
        moved[name, mu] = methods.load(name).work(task, site).bundles["model"]
    assert same_bits(moved["fedavg", None], moved["fedprox", 0.0])

    def distance(model):
        return sum(np.square(model[name] - start[name]).sum() for name in start)

    assert distance(moved["fedprox", 1.0]) < 0.9 * distance(moved["fedavg", None])


@both
def test_micro_batches_take_the_same_steps(engine):
    start, examples, fit = numpy_engine.init_tensors(MLP, 0), table(), Fit(epochs=2, batch=8, momentum=0.9, clip=0.5)
    whole, metrics = engine(AMPLE).train(MLP, start, examples, fit, tensors.seeded_rng(1))
    single, same_metrics = engine(TIGHT).train(MLP, start, examples, fit, tensors.seeded_rng(1))
    assert close(whole, single, 1e-6)
    assert not same_bits(whole, single), "the tight budget changed nothing: this test compared nothing"
    assert metrics == pytest.approx(same_metrics, abs=1e-6)
    evaluated = [compute_metrics(engine(budget).evaluate(MLP, whole, examples)) for budget in (AMPLE, TIGHT)]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-6)


# -- batch normalisation --------------------------------------------------------------------------
RESIDUAL = {"name": "residual", "channels": 1, "classes": 2, "width": 4, "input": {"channels": 1, "size": 8}}


def normed(module):
    """In the MLP's place: batch normalisation in a row, beside a skip, behind dropout, and without statistics."""
    from torch import nn

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU(inplace=True), nn.BatchNorm1d(7))

        def forward(self, x):
            return x + self.inner(x)

    blind = nn.BatchNorm1d(7, track_running_stats=False)
    first = [nn.Linear(6, 7), nn.BatchNorm1d(7, momentum=None), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(*first, Skip(), blind, Skip(), nn.Linear(7, 3))


def normed_start():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return {name: value.numpy().copy() for name, value in normed(None).state_dict().items()}


def pull(forward):
    """A penalty with a forward pass of its own."""
    own_pass = forward.module(forward.x)
    return 0.1 * (forward.scores - own_pass).square().mean() + 0.01 * forward.scores.square().mean()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("steps", [(Step(),), (Step(penalty=pull), Step(rate=lambda name: float("0" in name)))])
def test_batch_normalisation_takes_the_same_steps_under_any_budget(steps, optimizer):
    start, examples = normed_start(), table(22)
    fit = Fit(epochs=2, batch=8, momentum=0.9 * (optimizer == "sgd"), optimizer=optimizer, clip=0.5)
    hooks = Hooks(prepare=normed, steps=steps)
    found = [torch_one(b).train(MLP, start, examples, fit, tensors.seeded_rng(1), hooks=hooks) for b in (AMPLE, TIGHT)]
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not close(found[0][0], start, 1e-3)


def test_a_residual_network_takes_the_same_steps_under_any_budget():
    """Convolutions, with the last mini-batch smaller than the others; with 8 examples at once it took other ones."""
    start, examples, fit = torch_start(RESIDUAL), pictures(20), Fit(epochs=2, batch=16, lr=0.1)
    engines = [torch_one(budget) for budget in (AMPLE, TIGHT)]
    found = [engine.train(RESIDUAL, start, examples, fit, tensors.seeded_rng(1))[0] for engine in engines]
    assert close(found[0], found[1], 1e-5)
    assert found[0]["0.1.num_batches_tracked"] == 4
    assert engines[1].planned_bytes < engines[0].planned_bytes


def test_what_is_kept_for_the_backward_pass_is_held_in_pieces(monkeypatch):
    """Of 40 layers' inputs never more than a piece and one layer's are there at once, and all are in the end."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch import recomputation

    class Watched(torch.autograd.Function):
        held, most = 0, 0

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x + 0)
            return x * 1.01

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            alive = sum(each.value is not None for each in placed)
            Watched.held, Watched.most = Watched.held + 1, max(Watched.most, alive)
            return gradient + 0 * x

    class Placed(recomputation._SavedTensor):
        def __init__(self, index):
            super().__init__(index)
            placed.add(self)

    placed = weakref.WeakSet()
    monkeypatch.setattr(recomputation, "_SavedTensor", Placed)
    model, x = torch.nn.Linear(4, 4), torch.ones(5, 4)

    def forward():
        value = model(x)
        for _ in range(40):
            value = Watched.apply(value)
        return value.sum()

    recomputation.run_with_recomputation(model, forward, (x,), 5 * 80).backward()  # each is 5 x 4 float32: 80 bytes
    assert Watched.held == 40
    assert 2 <= Watched.most <= 6
    again = model.weight.grad.clone()
    model.zero_grad()
    forward().backward()
    assert torch.equal(again, model.weight.grad)


@pytest.mark.parametrize("budget", [AMPLE, TIGHT])
@pytest.mark.parametrize("count", [1, 9])
def test_a_mini_batch_of_one_example_is_normalised_by_the_running_statistics(count, budget):
    torch = pytest.importorskip("torch")

    def prepare(module):
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))

    torch.manual_seed(0)
    start = {name: value.numpy().copy() for name, value in prepare(None).state_dict().items()}
    hooks, fit, examples = Hooks(prepare=prepare), Fit(batch=8, lr=0.1), table(count)
    model, metrics = torch_one(budget).train(MLP, start, examples, fit, tensors.seeded_rng(1), hooks=hooks)
    assert metrics["steps"] == (2 if count > 1 else 1)
    assert model["1.num_batches_tracked"] == metrics["steps"] - 1
    if count == 1:
        assert np.array_equal(model["1.running_mean"], start["1.running_mean"])
        module = prepare(None).eval()
        module.load_state_dict({name: torch.tensor(array) for name, array in start.items()})
        x, y = torch.tensor(examples.x), torch.tensor(examples.y)
        torch.nn.functional.cross_entropy(module(x), y).backward()
        for name, value in module.named_parameters():
            np.testing.assert_allclose(model[name], (value - 0.1 * value.grad).detach().numpy(), atol=1e-6)


def test_one_example_without_running_statistics_is_told_by_name():
    torch = pytest.importorskip("torch")

    def prepare(module):
        blind = torch.nn.BatchNorm1d(5, track_running_stats=False)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), blind, torch.nn.Linear(5, 3))

    start = {name: value.numpy().copy() for name, value in prepare(None).state_dict().items()}
    with pytest.raises(ModelError, match="batch normalisation '1' has no running statistics and gets one value"):
        torch_one(AMPLE).train(MLP, start, table(9), Fit(batch=8), tensors.seeded_rng(1), hooks=Hooks(prepare=prepare))


@both
def test_the_same_seed_gives_the_same_bits(engine):
    start, examples, fit = numpy_engine.init_tensors(MLP, 0), table(), Fit(batch=3)
    models = [engine(AMPLE).train(MLP, start, examples, fit, tensors.seeded_rng(seed))[0] for seed in (1, 1, 2)]
    assert same_bits(models[0], models[1])
    assert not same_bits(models[0], models[2])


def test_dropout_is_repeated_with_its_seed():
    torch = pytest.importorskip("torch")
    network = {"name": "torchvision/squeezenet1_1", "classes": 2, "input": {"channels": 3, "size": 32}}
    start, examples = torch_start(network), pictures(4)
    before = torch.random.get_rng_state()
    models = [torch_one(AMPLE).train(network, start, examples, Fit(), tensors.seeded_rng(s))[0] for s in (1, 1, 2)]
    assert same_bits(models[0], models[1])
    assert not same_bits(models[0], models[2])
    assert torch.equal(before, torch.random.get_rng_state())
