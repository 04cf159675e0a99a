"""What a method may change of a training: corrections, anchors, masks, precision; in both engines."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_cases import (
    AMPLE,
    CNN,
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

from fedquilt.arrays import tensors
from fedquilt.core import Examples, Fit, Hooks, ModelError, Step, UpdateError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.edge_agent.engines import numpy_engine as numpy_engine


def changed(engine, hooks: Hooks, fit: Fit = Fit(epochs=2, batch=8), budget: int = AMPLE, **more):
    start = {**numpy_engine.init_tensors(MLP, 0), **more}
    return engine(budget).train(MLP, start, table(), fit, tensors.seeded_rng(1), hooks=hooks)


def test_a_correction_with_an_anchor_is_the_same_in_both_engines():
    ones = {name: np.ones(array.shape) for name, array in numpy_engine.init_tensors(MLP, 0).items()}  # float64 as well
    zeros = {name: np.zeros_like(array) for name, array in ones.items()}

    def shifted(anchor):
        return Hooks(correct_gradient=lambda g, v, at: g + 0.1 * at["by"] + (v - at["start"]), anchors={"by": anchor})

    ours, theirs = (changed(engine, shifted(ones))[0] for engine in (numpy_one, torch_one))
    assert close(ours, theirs)
    for engine in (numpy_one, torch_one):
        plain = changed(engine, Hooks())[0]
        none = Hooks(correct_gradient=lambda g, v, at: g + at["by"], anchors={"by": zeros})
        assert same_bits(changed(engine, none)[0], plain)
        assert not close(changed(engine, shifted(ones))[0], plain, 1e-3)


@both
def test_an_anchor_that_does_not_fit_is_refused(engine):
    short = {"1.weight": np.zeros((5, 6), np.float32)}
    with pytest.raises(ModelError, match=r"'1.bias' of anchor 'by' is missing, the network expects \(5,\)"):
        changed(engine, Hooks(correct_gradient=lambda g, v, at: g, anchors={"by": short}))
    wide = {**numpy_engine.init_tensors(MLP, 0), "5.bias": np.zeros(7)}
    with pytest.raises(ModelError, match=r"'5.bias' of anchor 'by' has shape \(7,\)"):
        changed(engine, Hooks(correct_gradient=lambda g, v, at: g, anchors={"by": wide}))


@both
def test_what_is_held_still_does_not_move(engine):
    start = numpy_engine.init_tensors(MLP, 0)
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
    bits = tensors.seeded_rng("bits").integers(0, 2, (20, 6)).astype(np.uint8)
    y = bits[:, :3].argmax(axis=1)
    unpack = Hooks(inputs=lambda x: np.unpackbits(x, axis=1, count=6).astype(np.float32))
    start, one = numpy_engine.init_tensors(MLP, 0), engine(AMPLE)
    packed, plain = Examples(np.packbits(bits, axis=1), y), Examples(bits.astype(np.float32), y)
    model, _ = one.train(MLP, start, packed, Fit(batch=5), tensors.seeded_rng(0), hooks=unpack)
    assert same_bits(model, one.train(MLP, start, plain, Fit(batch=5), tensors.seeded_rng(0))[0])
    assert one.evaluate(MLP, model, packed, hooks=unpack) == one.evaluate(MLP, model, plain)


def test_the_numpy_engine_refuses_what_wants_a_module():
    refused = {
        "prepare": Hooks(prepare=lambda module: module),
        "a second step": Hooks(steps=(Step(), Step())),
        "penalty and before_step": Hooks(steps=(Step(penalty=lambda *_: 0.0, before_step=lambda module: None),)),
    }
    for name, hooks in refused.items():
        with pytest.raises(
            ModelError, match=rf"lacks {name}, which this method requires: pip install 'fedquilt\[train\]'"
        ):
            changed(numpy_one, hooks)


@pytest.mark.parametrize("budget", [AMPLE, TIGHT], ids=["whole", "micro-batches"])
def test_a_penalty_is_the_correction_that_is_its_gradient(budget: int):
    """w^2 / 2 from the start adds w - start to the gradient, however many micro-batches the step takes.

    The loss told is the network's own, without the penalty.
    """

    def penalty(forward):
        values, start = dict(forward.module.named_parameters()), forward.anchors["start"]
        return sum(((value - start[name]) ** 2).sum() for name, value in values.items()) / 2

    by_loss, told = changed(torch_one, Hooks(steps=(Step(penalty=penalty),)), budget=budget)
    by_gradient, wanted = changed(
        torch_one, Hooks(correct_gradient=lambda g, v, at: g + v - at["start"]), budget=budget
    )
    assert close(by_loss, by_gradient, 1e-6)
    assert told == pytest.approx(wanted, abs=1e-6)
    assert not close(by_loss, changed(torch_one, Hooks(), budget=budget)[0], 1e-3)


def test_a_penalty_that_is_not_finite_is_refused():
    with pytest.raises(UpdateError, match="the loss became NaN at step 1"):
        changed(torch_one, Hooks(steps=(Step(penalty=lambda forward: 0 * forward.scores.sum() / 0),)))


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
        kept = (module.drawn.to(theta.device) < theta).float()
        return output * (kept + theta - theta.detach())  # forward the bits, backward straight through

    module[2].register_forward_hook(mask)
    return module


def test_two_turns_on_a_batch_train_masks_and_then_weights():
    torch = pytest.importorskip("torch")
    drawn: list[str] = []

    def draw(which):
        def begin(module):
            drawn.append(which)
            module.drawn = torch.rand(5)

        return begin

    def only(own):
        return lambda name: 10.0 if name == own else 0.0

    scores = Step(rate=only("scores"), before_step=draw("scores"))
    weights = Step(rate=lambda name: float(name != "scores"), before_step=draw("weights"))
    begun = np.zeros(5, np.float32)
    whole, metrics = changed(torch_one, Hooks(prepare=masked, steps=(scores, weights)), scores=begun)
    assert drawn == ["scores", "weights"] * int(metrics["steps"])
    assert np.abs(whole["scores"]).max() > 0
    single, _ = changed(torch_one, Hooks(prepare=masked, steps=(scores, weights)), budget=TIGHT, scores=begun)
    assert close(whole, single, 1e-5)
    again, _ = changed(torch_one, Hooks(prepare=masked, steps=(scores, weights)), scores=begun)
    assert same_bits(whole, again)
    start = numpy_engine.init_tensors(MLP, 0)
    first, _ = changed(torch_one, Hooks(prepare=masked, steps=(scores,)), scores=begun)
    assert same_bits({name: first[name] for name in start}, start)
    assert np.abs(first["scores"]).min() > 0
    second, _ = changed(torch_one, Hooks(prepare=masked, steps=(weights,)), scores=begun)
    assert not second["scores"].any()
    assert not close({name: second[name] for name in start}, start, 1e-3)


def test_a_prepared_network_is_evaluated_as_it_was_trained():
    torch = pytest.importorskip("torch")

    def closed(module):
        module = masked(module)
        module.drawn = torch.ones(5)
        return module

    model = {**numpy_engine.init_tensors(MLP, 0), "scores": np.zeros(5, np.float32)}
    found = torch_one(AMPLE).evaluate(MLP, model, table(), hooks=Hooks(prepare=closed))
    blind = {**model, "1.weight": 0 * model["1.weight"], "1.bias": 0 * model["1.bias"]}
    del blind["scores"]
    assert found == torch_one(AMPLE).evaluate(MLP, blind, table())
    with pytest.raises(ModelError, match="'scores' is not in the network"):
        torch_one(AMPLE).evaluate(MLP, model, table())


def test_a_frozen_batch_norm_keeps_its_statistics():
    network = {"name": "plain", "channels": 1, "classes": 2, "width": 2, "input": {"channels": 1, "size": 8}}
    start = torch_start(network)
    head = max(name for name in start if name.endswith("weight"))
    hooks = Hooks(steps=(Step(rate=lambda name: float(name == head)),))
    model, _ = torch_one(AMPLE).train(network, start, pictures(), Fit(batch=8), tensors.seeded_rng(0), hooks=hooks)
    assert [name for name in start if not np.array_equal(model[name], start[name])] == [head]
    none = Hooks(steps=(Step(rate=lambda name: 0.0),))
    with pytest.raises(ModelError, match="freezes every tensor"):
        torch_one(AMPLE).train(network, start, pictures(), Fit(), tensors.seeded_rng(0), hooks=none)


def dropped(hooks: Hooks, **settings: object):
    """First and trained tensors of a network with dropout."""
    network = {"name": "difficult_networks:root_parameter", "inputs": 6, "classes": 3, **settings}
    start, x = torch_start(network), np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    return start, torch_one(AMPLE).train(
        network, start, Examples(x, np.arange(20) % 3), Fit(batch=8), tensors.seeded_rng(0), hooks=hooks
    )[0]


@pytest.mark.parametrize("root", [False, True])
def test_a_frozen_parameter_at_the_root_leaves_the_modules_within_in_training(root: bool):
    pytest.importorskip("torch")
    last = Hooks(steps=(Step(rate=lambda name: float(name.startswith(("second", "head")))),))
    start, some = dropped(last, root=root, drop=0.5)
    _, none = dropped(last, root=root, drop=0.0)
    assert not close(some, none, 1e-3)
    assert np.array_equal(some["norm.running_mean"], start["norm.running_mean"])
    norm = Hooks(steps=(Step(rate=lambda name: float(name.startswith(("norm", "head")))),))
    start, moved = dropped(norm, root=root, drop=0.0)
    assert np.abs(moved["norm.running_mean"] - start["norm.running_mean"]).max() > 1e-3
    assert moved["norm.num_batches_tracked"] == 3


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_mixed_precision_computes_in_16_bits_and_keeps_32(half: str):
    """Near to the 32-bit result but not the same; what is returned is float32 and C-ordered, and learning happens."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    start, fit = torch_start(CNN), Fit(epochs=5, batch=6, lr=0.2)
    engine = TorchEngine(AMPLE, half_dtype=getattr(torch, half))
    mixed, _ = engine.train(CNN, start, pictures(), dataclasses.replace(fit, mixed=True), tensors.seeded_rng(0))
    full, _ = engine.train(CNN, start, pictures(), fit, tensors.seeded_rng(0))
    assert not same_bits(mixed, full)
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in mixed.values())
    assert compute_metrics(engine.evaluate(CNN, mixed, pictures()))["accuracy"] == 1.0


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_a_scaled_loss_is_unscaled_before_clipping(half: str):
    """A small bound on the gradient's norm: the 16-bit steps end about where the 32-bit ones do."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    start, fit = torch_start(CNN), Fit(epochs=2, batch=6, lr=0.2, clip=0.1)
    engine = TorchEngine(AMPLE, half_dtype=getattr(torch, half))
    mixed, full = (
        engine.train(CNN, start, pictures(), dataclasses.replace(fit, mixed=m), tensors.seeded_rng(0))[0]
        for m in (True, False)
    )

    def apart(a, b):
        return np.sqrt(sum(np.square(a[name] - b[name]).sum() for name in start))

    assert apart(mixed, full) < 0.2 * apart(full, start)


def test_mixed_precision_is_left_aside_on_a_cpu():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    start = torch_start(CNN)
    models = [
        torch_one(AMPLE).train(CNN, start, pictures(), Fit(mixed=m), tensors.seeded_rng(0))[0] for m in (False, True)
    ]
    assert same_bits(*models)


def test_the_layout_of_training_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch import engine as torch_engine

    start, fit, engine = torch_start(CNN), Fit(epochs=2, batch=6, lr=0.2), torch_engine.TorchEngine(AMPLE)
    seen: list[bool] = []

    def begin(model: object) -> None:
        four = [value for value in model.parameters() if value.ndim == 4 and min(value.shape[1:]) > 1]
        seen.extend(value.is_contiguous(memory_format=torch.channels_last) for value in four)

    def trained() -> tuple[dict[str, np.ndarray], bool]:
        seen.clear()
        model, _ = engine.train(
            CNN, start, pictures(), fit, tensors.seeded_rng(0), hooks=Hooks(steps=(Step(before_step=begin),))
        )
        return model, seen[0]

    last, turned = trained()
    assert turned or torch.cuda.is_available()
    scored = compute_metrics(engine.evaluate(CNN, last, pictures()))
    monkeypatch.setattr(torch_engine, "MAX_CHANNELS_LAST_WEIGHTS", 1)
    first, turned = trained()
    assert not turned
    assert compute_metrics(engine.evaluate(CNN, last, pictures())) == pytest.approx(scored, rel=1e-5)
    for name, array in first.items():
        np.testing.assert_allclose(last[name], array, rtol=1e-5, atol=1e-5)
