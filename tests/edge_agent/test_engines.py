"""The training engines: the same steps in numpy and torch, the same bits again, and learning that happens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from fedquilt import methods, tensors
from fedquilt.core import DataError, Examples, Fit, Hooks, JobError, ModelError, Site, Step, Task, UpdateError, Work
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines import numpy_engine, training
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine

AMPLE = 8 * 2**30
TIGHT = 1  # nothing fits: one example at a time
MLP = {"name": "mlp", "inputs": 6, "hidden": [5, 4], "classes": 3}
LINEAR = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 2, "width": 2, "input": {"channels": 1, "size": 8}}


def numpy_one(budget_bytes: int) -> NumpyEngine:
    return NumpyEngine(budget_bytes, base_bytes=0)


def torch_one(budget_bytes: int):
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch_engine")  # before torch: it says how threads wait
    return module.TorchEngine(budget_bytes, base_bytes=0)


both = pytest.mark.parametrize("engine", [numpy_one, torch_one], ids=["numpy", "torch"])


def table(count: int = 20, inputs: int = 6, classes: int = 3, seed: int = 0) -> Examples:
    """Random values; the label is which of the first `classes` is the largest, by at least 0.5."""
    x = tensors.rng("table", seed).normal(size=(count, inputs)).astype(np.float32)
    y = x[:, :classes].argmax(axis=1)
    x[np.arange(count), y] += 0.5
    return Examples(x, y)


def pictures(count: int = 24) -> Examples:
    """Grey 8x8 images, bright in the left half or in the right."""
    y = np.arange(count) % 2
    x = tensors.rng("pictures").integers(0, 60, (count, 8, 8), dtype=np.uint8)
    for image, side in zip(x, y, strict=True):
        image[:, 4 * side : 4 * side + 4] += 150
    return Examples(x, y)


def torch_start(network, seed=0):
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    torch.manual_seed(seed)
    model = registry.build({key: value for key, value in network.items() if key != "input"})
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def same_bits(a, b) -> bool:
    return tensors.encode(a) == tensors.encode(b)


def close(a, b, tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(np.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in a)


# -- making them ----------------------------------------------------------------------------------


def test_engines_are_made_by_name():
    """Each calls itself what it was asked for by."""
    for name in engines.available():
        engine = engines.make(name, AMPLE)
        assert engine.name == name
        engine.close()


def test_an_unknown_engine_lists_those_there_are():
    """The mend is in the message."""
    with pytest.raises(JobError, match=r"'tensorflow' is unknown; there are: numpy, onnx, torch"):
        engines.make("tensorflow", AMPLE)


def test_asking_what_is_available_imports_nothing_heavy():
    """The daemon asks, and holds none of them; an absent library is named with the command that brings it."""
    check = """
import sys
from fedquilt.core import JobError
from fedquilt.edge_agent import engines
assert "numpy" in engines.available()
assert not {"numpy", "torch", "onnxruntime"} & set(sys.modules)
sys.path[:] = []  # now nothing further is installed
assert engines.available() == ()
try:
    engines.make("torch", 1)
except JobError as error:
    assert str(error) == "engine 'torch' needs torch, which is not installed: pip install 'fedquilt[train]'", error
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- one step, by hand ----------------------------------------------------------------------------


@both
def test_one_step_of_a_linear_network_is_what_it_is_on_paper(engine):
    """From zero, both classes have p = 1/2: with x = (1, 2), y = 0 the weights' gradient is (p - y) x.

    So w moves by lr 0.1 to ((0.05, 0.1), (-0.05, -0.1)), b to (0.05, -0.05), and the loss was ln 2.
    """
    start = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
    examples = Examples(np.array([[1, 2]], np.float32), np.array([0]))
    model, metrics = engine(AMPLE).train(LINEAR, start, examples, Fit(lr=0.1), tensors.rng(0))
    np.testing.assert_allclose(model["1.weight"], [[0.05, 0.1], [-0.05, -0.1]], atol=1e-7)
    np.testing.assert_allclose(model["1.bias"], [0.05, -0.05], atol=1e-7)
    assert metrics == {"loss": pytest.approx(np.log(2)), "steps": 1.0}


@both
def test_bytes_are_scaled_to_the_unit_interval(engine):
    """A pixel of 255 is 1: the step is the same as with the number 1."""
    start = numpy_engine.init(LINEAR, 0)
    y = np.array([0, 1])
    by_byte = Examples(np.array([[255, 0], [0, 255]], np.uint8), y)
    by_number = Examples(np.eye(2, dtype=np.float32), y)
    models = [engine(AMPLE).train(LINEAR, start, e, Fit(), tensors.rng(0))[0] for e in (by_byte, by_number)]
    assert same_bits(*models)


@both
def test_clipping_bounds_the_whole_gradient(engine):
    """The step of the first test has norm sqrt(3); clipped to 0.001 every value moves 0.001 / sqrt(3) as far."""
    start = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
    examples = Examples(np.array([[1, 2]], np.float32), np.array([0]))
    model, _ = engine(AMPLE).train(LINEAR, start, examples, Fit(lr=1.0, clip=1e-3), tensors.rng(0))
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
    start, examples = numpy_engine.init(MLP, seed=1), table()
    ours, our_metrics = numpy_one(AMPLE).train(MLP, start, examples, fit, tensors.rng(2))
    theirs, their_metrics = torch_one(AMPLE).train(MLP, start, examples, fit, tensors.rng(2))
    assert close(ours, theirs)
    assert not close(ours, start)
    assert our_metrics == pytest.approx(their_metrics, abs=1e-5)
    evaluated = [engine(AMPLE).evaluate(MLP, ours, examples) for engine in (numpy_one, torch_one)]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5)


def test_numpy_and_torch_agree_on_images():
    """With an input table: grey bytes are resized and normalised the same way in both."""
    network = {"name": "mlp", "inputs": 16, "hidden": [5], "classes": 2}
    network["input"] = {"channels": 1, "size": 4, "mean": [0.5], "std": [0.25]}
    start = numpy_engine.init(network, 0)
    models = [e(AMPLE).train(network, start, pictures(), Fit(), tensors.rng(3))[0] for e in (numpy_one, torch_one)]
    assert close(*models)


def test_both_engines_name_the_same_tensors():
    """What one initialises the other takes: names, shapes and types."""
    wanted = torch_start(MLP)
    made = numpy_engine.init(MLP, 0)
    assert {name: (a.shape, a.dtype) for name, a in made.items()} == {n: (a.shape, a.dtype) for n, a in wanted.items()}
    assert same_bits(made, numpy_engine.init(MLP, 0))
    assert not same_bits(made, numpy_engine.init(MLP, 1))
    assert np.abs(made["1.weight"]).max() <= 1 / np.sqrt(6)


@both
def test_fedprox_without_pull_is_fedavg_bit_for_bit(engine):
    """mu = 0 through the methods' own client halves; with mu > 0 the model stays nearer to its start."""
    start = numpy_engine.init(MLP, 0)
    moved = {}
    for name, mu in (("fedavg", None), ("fedprox", 0.0), ("fedprox", 1.0)):
        params = {"epochs": 3, "batch": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "network": MLP}
        if mu is not None:
            params["mu"] = mu
        task = Task(
            job="j", round=0, attempt=0, method=name, engine="numpy", actions=("work",), params=params,
            bundles={}, work=Work(), seed=0, deadline_s=1.0,
        )  # fmt: skip
        site = Site("d", AMPLE, engine(AMPLE), tensors.rng(5), table(), table(4), {}, lambda _: start, Path, Path())
        moved[name, mu] = methods.load(name).work(task, site).bundles["model"]
    assert same_bits(moved["fedavg", None], moved["fedprox", 0.0])

    def distance(model):
        return sum(np.square(model[name] - start[name]).sum() for name in start)

    assert distance(moved["fedprox", 1.0]) < 0.9 * distance(moved["fedavg", None])


@both
def test_micro_batches_take_the_same_steps(engine):
    """One example at a time, gradients added up, against the whole mini-batch: equal to float tolerance."""
    start, examples, fit = numpy_engine.init(MLP, 0), table(), Fit(epochs=2, batch=8, momentum=0.9, clip=0.5)
    whole, metrics = engine(AMPLE).train(MLP, start, examples, fit, tensors.rng(1))
    single, same_metrics = engine(TIGHT).train(MLP, start, examples, fit, tensors.rng(1))
    assert close(whole, single, 1e-6)
    assert not same_bits(whole, single), "the tight budget changed nothing: this test compared nothing"
    assert metrics == pytest.approx(same_metrics, abs=1e-6)
    evaluated = [engine(budget).evaluate(MLP, whole, examples) for budget in (AMPLE, TIGHT)]
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


def pull(module, x, scores, anchors):
    """A penalty with a forward pass of its own."""
    return 0.1 * (scores - module(x)).square().mean() + 0.01 * scores.square().mean()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("steps", [(Step(),), (Step(penalty=pull), Step(rate=lambda name: float("0" in name)))])
def test_batch_normalisation_takes_the_same_steps_under_any_budget(steps, optimizer):
    """Its statistics, and the gradients through them, are of whole mini-batches: in bits, running statistics too."""
    start, examples = normed_start(), table(22)
    fit = Fit(epochs=2, batch=8, momentum=0.9 * (optimizer == "sgd"), optimizer=optimizer, clip=0.5)
    hooks = Hooks(prepare=normed, steps=steps)
    found = [torch_one(b).train(MLP, start, examples, fit, tensors.rng(1), hooks=hooks) for b in (AMPLE, TIGHT)]
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not close(found[0][0], start, 1e-3)


def test_a_residual_network_takes_the_same_steps_under_any_budget():
    """Convolutions, with the last mini-batch smaller than the others; with 8 examples at once it took other ones."""
    start, examples, fit = torch_start(RESIDUAL), pictures(20), Fit(epochs=2, batch=16, lr=0.1)
    engines = [torch_one(budget) for budget in (AMPLE, TIGHT)]
    found = [engine.train(RESIDUAL, start, examples, fit, tensors.rng(1))[0] for engine in engines]
    assert close(found[0], found[1], 1e-5)
    assert found[0]["0.1.num_batches_tracked"] == 4
    assert engines[1].planned_bytes < engines[0].planned_bytes


def test_what_is_kept_for_the_backward_pass_is_held_in_pieces(monkeypatch):
    """Of 40 layers' inputs never more than a piece and one layer's are there at once, and all are in the end."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines import torch_recompute

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

    class Placed(torch_recompute._Kept):
        def __init__(self, index):
            super().__init__(index)
            placed.add(self)

    placed = weakref.WeakSet()
    monkeypatch.setattr(torch_recompute, "_Kept", Placed)
    model, x = torch.nn.Linear(4, 4), torch.ones(5, 4)

    def forward():
        value = model(x)
        for _ in range(40):
            value = Watched.apply(value)
        return value.sum()

    torch_recompute.run(model, forward, (x,), 5 * 80).backward()  # each is 5 x 4 float32: 80 bytes
    assert Watched.held == 40
    assert 2 <= Watched.most <= 6
    again = model.weight.grad.clone()
    model.zero_grad()
    forward().backward()
    assert torch.equal(again, model.weight.grad)


@pytest.mark.parametrize("budget", [AMPLE, TIGHT])
@pytest.mark.parametrize("count", [1, 9])
def test_a_mini_batch_of_one_example_is_normalised_by_the_running_statistics(count, budget):
    """It trains, and where a channel has one value the statistics are as the step before left them."""
    torch = pytest.importorskip("torch")

    def prepare(module):
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))

    torch.manual_seed(0)
    start = {name: value.numpy().copy() for name, value in prepare(None).state_dict().items()}
    hooks, fit, examples = Hooks(prepare=prepare), Fit(batch=8, lr=0.1), table(count)
    model, metrics = torch_one(budget).train(MLP, start, examples, fit, tensors.rng(1), hooks=hooks)
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
    """There is nothing to normalise it by."""
    torch = pytest.importorskip("torch")

    def prepare(module):
        blind = torch.nn.BatchNorm1d(5, track_running_stats=False)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), blind, torch.nn.Linear(5, 3))

    start = {name: value.numpy().copy() for name, value in prepare(None).state_dict().items()}
    with pytest.raises(
        ModelError, match="batch normalisation '1' keeps no running statistics, and a mini-batch of one"
    ):
        torch_one(AMPLE).train(MLP, start, table(9), Fit(batch=8), tensors.rng(1), hooks=Hooks(prepare=prepare))


@both
def test_the_same_seed_gives_the_same_bits(engine):
    """And another seed, which shuffles otherwise, gives others."""
    start, examples, fit = numpy_engine.init(MLP, 0), table(), Fit(batch=3)
    models = [engine(AMPLE).train(MLP, start, examples, fit, tensors.rng(seed))[0] for seed in (1, 1, 2)]
    assert same_bits(models[0], models[1])
    assert not same_bits(models[0], models[2])


def test_dropout_is_repeated_with_its_seed():
    """torch's own draws come from the generator too, and leave the process's own as they were."""
    torch = pytest.importorskip("torch")
    network = {"name": "torchvision/squeezenet1_1", "classes": 2, "input": {"channels": 3, "size": 32}}
    start, examples = torch_start(network), pictures(4)
    before = torch.random.get_rng_state()
    models = [torch_one(AMPLE).train(network, start, examples, Fit(), tensors.rng(s))[0] for s in (1, 1, 2)]
    assert same_bits(models[0], models[1])
    assert not same_bits(models[0], models[2])
    assert torch.equal(before, torch.random.get_rng_state())


# -- what a method may change ---------------------------------------------------------------------


def changed(engine, hooks: Hooks, fit: Fit = Fit(epochs=2, batch=8), budget: int = AMPLE, **more):
    start = {**numpy_engine.init(MLP, 0), **more}
    return engine(budget).train(MLP, start, table(), fit, tensors.rng(1), hooks=hooks)


def test_a_correction_with_an_anchor_is_the_same_in_both_engines():
    """Plain arithmetic on the engine's own arrays; an anchor of zeros changes no bit, one of ones does."""
    ones = {name: np.ones(array.shape) for name, array in numpy_engine.init(MLP, 0).items()}  # float64 as well
    zeros = {name: np.zeros_like(array) for name, array in ones.items()}

    def shifted(anchor):
        return Hooks(correct=lambda g, v, at: g + 0.1 * at["by"] + (v - at["start"]), anchors={"by": anchor})

    ours, theirs = (changed(engine, shifted(ones))[0] for engine in (numpy_one, torch_one))
    assert close(ours, theirs)
    for engine in (numpy_one, torch_one):
        plain = changed(engine, Hooks())[0]
        none = Hooks(correct=lambda g, v, at: g + at["by"], anchors={"by": zeros})
        assert same_bits(changed(engine, none)[0], plain)
        assert not close(changed(engine, shifted(ones))[0], plain, 1e-3)


@both
def test_an_anchor_that_does_not_fit_is_refused(engine):
    """By its name and the tensor's."""
    short = {"1.weight": np.zeros((5, 6), np.float32)}
    with pytest.raises(ModelError, match=r"'1.bias' of anchor 'by' is missing, the network wants \(5,\)"):
        changed(engine, Hooks(correct=lambda g, v, at: g, anchors={"by": short}))
    wide = {**numpy_engine.init(MLP, 0), "5.bias": np.zeros(7)}
    with pytest.raises(ModelError, match=r"'5.bias' of anchor 'by' has shape \(7,\)"):
        changed(engine, Hooks(correct=lambda g, v, at: g, anchors={"by": wide}))


@both
def test_what_is_held_still_does_not_move(engine):
    """Only the head trains: weight decay and clipping leave the rest alone, and half the rate goes half as far."""
    start = numpy_engine.init(MLP, 0)
    fit = Fit(epochs=1, batch=20, lr=0.1, weight_decay=0.1, clip=0.01)
    moved = []
    for rate in (1.0, 0.5):
        head = Hooks(steps=(Step(rate=lambda name, rate=rate: rate if name.startswith("5.") else 0.0),))
        model, _ = changed(engine, head, fit)
        assert same_bits(
            {n: a for n, a in model.items() if n[0] != "5"}, {n: a for n, a in start.items() if n[0] != "5"}
        )
        moved.append(model["5.weight"] - start["5.weight"])
    np.testing.assert_allclose(moved[1], 0.5 * moved[0], atol=1e-7)
    assert np.abs(moved[0]).max() > 1e-4


@both
def test_stored_examples_may_be_read_in_a_methods_own_way(engine):
    """Six bits in a byte are six inputs: packed and unpacked they train to the same bits, and are judged alike."""
    bits = tensors.rng("bits").integers(0, 2, (20, 6)).astype(np.uint8)
    y = bits[:, :3].argmax(axis=1)
    unpack = Hooks(inputs=lambda x: np.unpackbits(x, axis=1, count=6).astype(np.float32))
    start, one = numpy_engine.init(MLP, 0), engine(AMPLE)
    packed, plain = Examples(np.packbits(bits, axis=1), y), Examples(bits.astype(np.float32), y)
    model, _ = one.train(MLP, start, packed, Fit(batch=5), tensors.rng(0), hooks=unpack)
    assert same_bits(model, one.train(MLP, start, plain, Fit(batch=5), tensors.rng(0))[0])
    assert one.evaluate(MLP, model, packed, hooks=unpack) == one.evaluate(MLP, model, plain)


def test_the_numpy_engine_refuses_what_wants_a_module():
    """By name, and with the engine that can."""
    refused = {
        "prepare": Hooks(prepare=lambda module: module),
        "a second step": Hooks(steps=(Step(), Step())),
        "penalty and begin": Hooks(steps=(Step(penalty=lambda *_: 0.0, begin=lambda module: None),)),
    }
    for name, hooks in refused.items():
        with pytest.raises(ModelError, match=rf"cannot train with {name} as this method asks: install fedquilt\[train"):
            changed(numpy_one, hooks)


@pytest.mark.parametrize("budget", [AMPLE, TIGHT], ids=["whole", "micro-batches"])
def test_a_penalty_is_the_correction_that_is_its_gradient(budget: int):
    """w^2 / 2 from the start adds w - start to the gradient, however many micro-batches the step takes.

    The loss told is the network's own, without the penalty.
    """

    def penalty(module, x, scores, anchors):
        return sum(((value - anchors["start"][name]) ** 2).sum() for name, value in module.named_parameters()) / 2

    by_loss, told = changed(torch_one, Hooks(steps=(Step(penalty=penalty),)), budget=budget)
    by_gradient, wanted = changed(torch_one, Hooks(correct=lambda g, v, at: g + v - at["start"]), budget=budget)
    assert close(by_loss, by_gradient, 1e-6)
    assert told == pytest.approx(wanted, abs=1e-6)
    assert not close(by_loss, changed(torch_one, Hooks(), budget=budget)[0], 1e-3)


def test_a_penalty_that_is_not_finite_is_refused():
    """Though the network's own loss is fine."""
    with pytest.raises(UpdateError, match="the loss is nan in step 1"):
        changed(torch_one, Hooks(steps=(Step(penalty=lambda module, x, scores, anchors: 0 * scores.sum() / 0),)))


def masked(module):
    """The network with a score for each unit of its first hidden layer, which a sampled mask stands for."""
    torch = pytest.importorskip("torch")
    scores = torch.nn.Parameter(torch.zeros(5))
    module.register_parameter("scores", scores)
    module.drawn = None

    def mask(layer, inputs, output):
        if module.drawn is None:
            return output
        theta = torch.sigmoid(scores)
        kept = (module.drawn < theta).float()
        return output * (kept + theta - theta.detach())  # forward the bits, backward straight through

    module[2].register_forward_hook(mask)
    return module


def test_two_turns_on_a_batch_train_masks_and_then_weights():
    """As FedPeWS does: scores move in the first step alone, weights in the second, with a mask drawn for each step.

    A mask is drawn once for a step, so that micro-batches are all under the same one.
    """
    torch = pytest.importorskip("torch")
    drawn: list[str] = []

    def draw(which):
        def begin(module):
            drawn.append(which)
            module.drawn = torch.rand(5)

        return begin

    def only(own):
        return lambda name: 10.0 if name == own else 0.0

    scores = Step(rate=only("scores"), begin=draw("scores"))
    weights = Step(rate=lambda name: float(name != "scores"), begin=draw("weights"))
    begun = np.zeros(5, np.float32)
    whole, metrics = changed(torch_one, Hooks(prepare=masked, steps=(scores, weights)), scores=begun)
    assert drawn == ["scores", "weights"] * int(metrics["steps"])
    assert np.abs(whole["scores"]).max() > 0
    single, _ = changed(torch_one, Hooks(prepare=masked, steps=(scores, weights)), budget=TIGHT, scores=begun)
    assert close(whole, single, 1e-5)
    again, _ = changed(torch_one, Hooks(prepare=masked, steps=(scores, weights)), scores=begun)
    assert same_bits(whole, again)
    start = numpy_engine.init(MLP, 0)
    first, _ = changed(torch_one, Hooks(prepare=masked, steps=(scores,)), scores=begun)
    assert same_bits({name: first[name] for name in start}, start)
    assert np.abs(first["scores"]).min() > 0
    second, _ = changed(torch_one, Hooks(prepare=masked, steps=(weights,)), scores=begun)
    assert not second["scores"].any()
    assert not close({name: second[name] for name in start}, start, 1e-3)


def test_a_prepared_network_is_evaluated_as_it_was_trained():
    """A mask that lets nothing through leaves the biases to tell; without `prepare` its tensors do not fit."""
    torch = pytest.importorskip("torch")

    def closed(module):
        module = masked(module)
        module.drawn = torch.ones(5)
        return module

    model = {**numpy_engine.init(MLP, 0), "scores": np.zeros(5, np.float32)}
    found = torch_one(AMPLE).evaluate(MLP, model, table(), hooks=Hooks(prepare=closed))
    blind = {**model, "1.weight": 0 * model["1.weight"], "1.bias": 0 * model["1.bias"]}
    del blind["scores"]
    assert found == torch_one(AMPLE).evaluate(MLP, blind, table())
    with pytest.raises(ModelError, match="they have 'scores'"):
        torch_one(AMPLE).evaluate(MLP, model, table())


def test_a_frozen_batch_norm_keeps_its_statistics():
    """Only the head trains: no tensor of the rest moves, running statistics and counters included."""
    network = {"name": "plain", "channels": 1, "classes": 2, "width": 2, "input": {"channels": 1, "size": 8}}
    start = torch_start(network)
    head = max(name for name in start if name.endswith("weight"))
    hooks = Hooks(steps=(Step(rate=lambda name: float(name == head)),))
    model, _ = torch_one(AMPLE).train(network, start, pictures(), Fit(batch=8), tensors.rng(0), hooks=hooks)
    assert [name for name in start if not np.array_equal(model[name], start[name])] == [head]
    none = Hooks(steps=(Step(rate=lambda name: 0.0),))
    with pytest.raises(ModelError, match="nothing to train"):
        torch_one(AMPLE).train(network, start, pictures(), Fit(), tensors.rng(0), hooks=none)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_mixed_precision_computes_in_16_bits_and_keeps_32(half: str):
    """Near to the 32-bit result but not the same; what is returned is float32 and C-ordered, and learning happens."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    start, fit = torch_start(CNN), Fit(epochs=5, batch=6, lr=0.2)
    engine = TorchEngine(AMPLE, half=getattr(torch, half))
    mixed, _ = engine.train(CNN, start, pictures(), dataclasses.replace(fit, mixed=True), tensors.rng(0))
    full, _ = engine.train(CNN, start, pictures(), fit, tensors.rng(0))
    assert not same_bits(mixed, full)
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in mixed.values())
    assert engine.evaluate(CNN, mixed, pictures())["accuracy"] == 1.0


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_scaled_loss_is_unscaled_before_clipping(half: str):
    """A small bound on the gradient's norm: the 16-bit steps end about where the 32-bit ones do."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    start, fit = torch_start(CNN), Fit(epochs=2, batch=6, lr=0.2, clip=0.1)
    engine = TorchEngine(AMPLE, half=getattr(torch, half))
    mixed, full = (
        engine.train(CNN, start, pictures(), dataclasses.replace(fit, mixed=m), tensors.rng(0))[0]
        for m in (True, False)
    )

    def apart(a, b):
        return np.sqrt(sum(np.square(a[name] - b[name]).sum() for name in start))

    assert apart(mixed, full) < 0.2 * apart(full, start)


def test_mixed_precision_is_left_aside_on_a_cpu():
    """The same bits with and without it."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    start = torch_start(CNN)
    models = [torch_one(AMPLE).train(CNN, start, pictures(), Fit(mixed=m), tensors.rng(0))[0] for m in (False, True)]
    assert same_bits(*models)


# -- learning -------------------------------------------------------------------------------------


@both
def test_learning_happens(engine):
    """300 separable examples, 100 others to be told: from about a third right to above 95 %."""
    network = {**MLP, "hidden": [16]}
    start, train, held = numpy_engine.init(network, 0), table(300), table(100, seed=1)
    one = engine(AMPLE)
    before = one.evaluate(network, start, held)
    model, metrics = one.train(network, start, train, Fit(epochs=15, batch=16, lr=0.1, momentum=0.9), tensors.rng(0))
    after = one.evaluate(network, model, held)
    assert before["accuracy"] < 0.6
    assert after["accuracy"] > 0.95
    assert after["examples"] == 100.0
    assert metrics["loss"] < 0.2 < before["loss"]
    assert metrics["steps"] == 15 * np.ceil(300 / 16)


def test_a_convolutional_network_learns_from_images():
    """Left or right, in micro-batches of one, with the received tensors left as they were."""
    start, examples = torch_start(CNN), pictures()
    kept = {name: array.copy() for name, array in start.items()}
    engine = torch_one(TIGHT)
    model, _ = engine.train(CNN, start, examples, Fit(epochs=5, batch=6, lr=0.2), tensors.rng(0))
    assert engine.evaluate(CNN, model, examples)["accuracy"] == 1.0
    assert same_bits(start, kept)


def test_counters_of_batch_norm_stay_integers():
    """Two steps are two: the examples that were run to see what they cost are not counted."""
    network = {"name": "resnet20-cifar", "input": {"channels": 3, "size": 8}}
    start = torch_start(network)
    model, _ = torch_one(AMPLE).train(network, start, pictures(8), Fit(batch=4), tensors.rng(0))
    counters = {name: array for name, array in model.items() if name.endswith("num_batches_tracked")}
    assert {int(array) for array in counters.values()} == {2}
    assert {array.dtype.kind for array in counters.values()} == {"i"}
    assert model.keys() == start.keys()


# -- progress and refusals ------------------------------------------------------------------------


@both
def test_progress_runs_to_one_and_may_cancel(engine):
    """Every step is told; what progress raises ends the training there and comes through."""
    told: list[float] = []
    fit, start = Fit(batch=1), numpy_engine.init(MLP, 0)
    engine(AMPLE).train(MLP, start, table(4), fit, tensors.rng(0), progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]

    def cancel(fraction: float) -> None:
        raise InterruptedError(fraction)

    with pytest.raises(InterruptedError, match=r"0\.25"):
        engine(AMPLE).train(MLP, start, table(4), fit, tensors.rng(0), progress=cancel)


@both
def test_a_loss_that_is_not_finite_is_refused(engine):
    """Whether it got there by its steps or started so; the message says what to lower."""
    start = numpy_engine.init(MLP, 0)
    with pytest.raises(UpdateError, match=r"the loss is (nan|inf) in step \d+ of 50: lower lr \(now 1e\+30\)"):
        engine(AMPLE).train(MLP, start, table(10), Fit(epochs=5, batch=1, lr=1e30), tensors.rng(0))
    broken = {**start, "1.bias": np.full(5, np.nan, np.float32)}
    with pytest.raises(UpdateError, match="the loss is nan in step 1"):
        engine(AMPLE).train(MLP, broken, table(), Fit(), tensors.rng(0))
    with pytest.raises(UpdateError, match="of the model on 20 held-out examples is nan"):
        engine(AMPLE).evaluate(MLP, broken, table())


@both
def test_a_training_that_explodes_is_refused(engine):
    """Every loss is finite, but a step as long as this leads nowhere; the message says how bad and what to lower."""
    start = numpy_engine.init(LINEAR, 0)
    draws = tensors.rng("noise")
    noise = Examples(draws.normal(size=(40, 2)).astype(np.float32), draws.integers(0, 2, 40))
    with pytest.raises(
        UpdateError, match=r"exploded: a mean of \S+ up to step 10 of 20, where at most \S+ is reasonable"
    ):
        engine(AMPLE).train(LINEAR, start, noise, Fit(lr=1e4, batch=2), tensors.rng(0))


def test_one_odd_step_is_no_explosion():
    """A single loss of 50 among tenths passes, as does a bad beginning; a mean above ten times the first does not."""
    told: list[float] = []
    steps = training.Steps(20, Fit(batch=1, epochs=2), told.append)
    for loss in [0.1] * 5 + [50.0] + [0.1] * 14:
        steps.took(loss, 1)
    assert steps.metrics() == {"loss": pytest.approx((50 + 1.9) / 20), "steps": 20.0}
    assert told[-1] == 0.5
    bad = training.Steps(3, Fit(batch=1), told.append)
    for loss in (30.0, 200.0, 250.0):  # at most 300
        bad.took(loss, 1)
    worse = training.Steps(3, Fit(batch=1), told.append)
    worse.took(0.5, 1)  # at most 10
    worse.took(15.0, 1)
    with pytest.raises(UpdateError, match=r"a mean of 10\.2 up to step 3 of 3, where at most 10 is reasonable"):
        worse.took(15.1, 1)  # the epoch is over


@both
def test_tensors_of_another_network_are_refused(engine):
    """Names first, then shapes, each by name."""
    start = numpy_engine.init(MLP, 0)
    fewer = {name: array for name, array in start.items() if name != "3.bias"}
    with pytest.raises(ModelError, match=r"1 names differ, they lack '3.bias'"):
        engine(AMPLE).train(MLP, fewer, table(), Fit(), tensors.rng(0))
    wider = {**start, "3.bias": np.zeros(9, np.float32)}
    with pytest.raises(ModelError, match=r"'3.bias' has shape \(9,\), the network wants \(4,\)"):
        engine(AMPLE).evaluate(MLP, wider, table())


@both
def test_examples_that_do_not_fit_are_refused(engine):
    """A label beyond the classes, examples of another size, none at all."""
    start, good = numpy_engine.init(MLP, 0), table()
    for odd in (3, -1):
        y = good.y.copy()
        y[7] = odd
        with pytest.raises(DataError, match=r"labels run from .* 3 classes \(0 to 2\)"):
            engine(AMPLE).train(MLP, start, Examples(good.x, y), Fit(), tensors.rng(0))
    with pytest.raises(DataError, match="examples"):
        engine(AMPLE).train(MLP, start, Examples(good.x[:, :4], good.y), Fit(), tensors.rng(0))
    with pytest.raises(DataError, match="no examples"):
        engine(AMPLE).train(MLP, start, Examples(good.x[:0], good.y[:0]), Fit(), tensors.rng(0))
    assert engine(AMPLE).evaluate(MLP, start, Examples(good.x[:0], good.y[:0])) == {"examples": 0.0}


def test_the_numpy_engine_says_what_it_cannot_train():
    """And which engine can."""
    with pytest.raises(ModelError, match=r"not 'cnn': install fedquilt\[train\]"):
        numpy_engine.init(CNN, 0)
    with pytest.raises(ModelError, match=r"network 'mlp': key 'inputs' is missing"):
        numpy_engine.init({"name": "mlp", "classes": 3}, 0)
    with pytest.raises(ModelError, match="must be 1 or more"):
        numpy_engine.init({**MLP, "hidden": [5, 0]}, 0)


# -- what goes through at once --------------------------------------------------------------------


def test_what_does_not_fit_is_halved_until_it_does():
    """Room for 300 of 10 bytes each is 30 examples: 128, 64, 32 are too many, 16 fit; never fewer than 1."""
    assert training.fitting(300, 10, 128) == 16
    assert training.fitting(300, 10, 30) == 30
    assert training.fitting(-5, 10, 128) == 1


def test_micro_batches_are_of_about_one_size():
    """33 examples at most 32 at once are 17 and 16, not 32 and a lonely one."""
    parts = training.micro_batches(np.arange(33), 32)
    assert [len(part) for part in parts] == [17, 16]
    assert np.concatenate(parts).tolist() == list(range(33))
