"""Several devices in one graph are what each is in the loop, to float tolerance; what cannot go that way says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import DataError, Examples, Fit, Hooks, JobError, ModelError, Step, UpdateError

batched = pytest.importorskip("fedquilt.edge_agent.engines.torch.batch_engine")
torch = pytest.importorskip("torch")
nn = torch.nn

MLP = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3}
SIZES = (8, 7, 5, 13, 16, 3)  # with batches of 4: two to four steps, full and short last ones


@pytest.fixture(scope="module")
def engine() -> Any:
    return batched.BatchedTorchEngine(1 << 40, base_bytes=0)


def start(seed: int = 0) -> dict[str, np.ndarray]:
    rng = tensors.seeded_rng("start", seed)
    shapes = {"1.weight": (5, 6), "1.bias": (5,), "3.weight": (3, 5), "3.bias": (3,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def examples(count: int, seed: int = 0) -> Examples:
    rng = tensors.seeded_rng("examples", count, seed)
    return Examples(rng.normal(size=(count, 6)).astype(np.float32), rng.integers(3, size=count))


def arguments(seed: int, count: int, fit: Fit, network: dict[str, Any] = MLP) -> tuple[Any, ...]:
    return network, start(seed), examples(count, seed), fit, tensors.seeded_rng("order", seed)


def both(engine: Any, fit: Fit, hooks: list[Hooks] | None = None) -> tuple[list[Any], list[Any]]:
    """What the graph and the loop give for devices of all sizes, each with a model and a hook of its own."""
    hooks = hooks or [Hooks()] * len(SIZES)
    given = list(enumerate(zip(SIZES, hooks, strict=True)))
    calls = [engine.batchable_call(*arguments(seed, count, fit), hooks=hook) for seed, (count, hook) in given]
    assert None not in calls
    loop = [engine.train(*arguments(seed, count, fit), hooks=hook) for seed, (count, hook) in given]
    return engine.train_together(calls), loop


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    for (model, told), (other, wanted) in zip(ours, theirs, strict=True):
        assert list(model) == list(other)
        for name in model:
            assert model[name].dtype == np.float32
            np.testing.assert_allclose(model[name], other[name], rtol=2e-4, atol=2e-5)
        assert told["steps"] == wanted["steps"]
        assert told["loss"] == pytest.approx(wanted["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "fit",
    [
        Fit(epochs=2, batch=4, lr=0.1),
        Fit(epochs=2, batch=4, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        Fit(epochs=2, batch=4, lr=0.1, clip=0.5),
        Fit(epochs=2, batch=4, lr=0.01, optimizer="adam"),
        Fit(epochs=1, batch=64, lr=0.1),
    ],
)
def test_each_device_comes_out_as_from_the_loop(engine: Any, fit: Fit) -> None:
    assert_alike(*both(engine, fit))


def test_each_device_has_its_own_correction_and_anchors(engine: Any) -> None:
    def pull(mu: float) -> Hooks:
        return Hooks(correct_gradient=lambda gradient, value, at: gradient + mu * (value - at["start"]))

    shifted = Hooks(correct_gradient=lambda gradient, value, at: gradient + at["shift"], anchors={"shift": start(9)})
    scaled = Hooks(correct_gradient=lambda gradient, value, at: gradient / (1.0 + gradient.norm()))
    hooks = [pull(0.1), pull(2.0), shifted, scaled, Hooks(), pull(0.0)]
    ours, theirs = both(engine, Fit(epochs=2, batch=4, lr=0.1), hooks)
    assert_alike(ours, theirs)
    plain, _ = both(engine, Fit(epochs=2, batch=4, lr=0.1))
    assert not np.allclose(ours[1][0]["1.weight"], plain[1][0]["1.weight"], atol=1e-3)


def test_a_generator_is_left_where_the_loop_leaves_it(engine: Any) -> None:
    fit = Fit(epochs=2, batch=4)
    one, other = arguments(0, 8, fit), arguments(0, 8, fit)
    engine.train_together([engine.batchable_call(*one)])
    engine.train(*other)
    assert one[4].integers(1 << 40) == other[4].integers(1 << 40)


def test_one_device_that_diverges_is_refused_and_the_others_are_not(engine: Any) -> None:
    fit = Fit(epochs=3, batch=4, lr=0.5)
    odd = Examples(examples(8).x * np.float32(1e18), examples(8).y)
    network, begun, _, _, rng = arguments(0, 8, fit)
    calls = [engine.batchable_call(*arguments(1, 8, fit)), engine.batchable_call(network, begun, odd, fit, rng)]
    found = engine.train_together(calls)
    assert isinstance(found[1], UpdateError)
    assert_alike(found[:1], [engine.train(*arguments(1, 8, fit))])


def test_a_layer_that_stands_in_two_places_takes_the_loop(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(6, 6)
    monkeypatch.setattr(batched.registry, "build_network", lambda table: nn.Sequential(layer, nn.ReLU(), layer))
    assert engine.batchable_call(*arguments(0, 8, Fit(), {"name": "tied"})) is None


def test_the_stacked_forward_pass_is_each_networks_own() -> None:
    relu = nn.ReLU()
    network = nn.Sequential(
        nn.Flatten(1, 2),
        nn.Sequential(nn.Linear(4, 5), relu),
        nn.Linear(5, 3, bias=False),
        relu,
        nn.Flatten(),
        nn.GELU(),
    )
    given = torch.Generator().manual_seed(0)
    each = [{k: torch.randn(v.shape, generator=given) for k, v in network.state_dict().items()} for _ in range(3)]
    x = torch.randn(3, 7, 2, 6, 4, generator=given)
    stacked = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    found = batched.forward(network, stacked, x)
    for index, values in enumerate(each):
        torch.testing.assert_close(found[index], torch.func.functional_call(network, values, (x[index],)))


def test_stacked_gradients_come_in_the_order_in_which_weights_are_kept() -> None:
    values = {"0.weight": torch.randn(3, 2, 5, requires_grad=True), "0.bias": torch.randn(3, 2, requires_grad=True)}
    scores = batched.forward(nn.Sequential(nn.Linear(5, 2)), values, torch.randn(3, 4, 5))
    for gradient in torch.autograd.grad(scores.square().sum(), list(values.values())):
        assert gradient.is_contiguous()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"start": {"1.weight": np.zeros((5, 6), np.float32)}}, ModelError),
        ({"examples": Examples(np.zeros((4, 6), np.float32), np.full(4, 7))}, DataError),
        ({"examples": Examples(np.zeros((4, 9), np.float32), np.zeros(4, np.int64))}, DataError),
        ({"hooks": Hooks(correct_gradient=lambda g, v, at: g, anchors={"old": {}})}, ModelError),
        ({"fit": Fit(epochs=-1)}, JobError),
    ],
)
def test_what_does_not_fit_is_told_as_by_the_loop(engine: Any, change: dict[str, Any], kind: type) -> None:
    given = {
        "network": MLP,
        "start": start(),
        "examples": examples(4),
        "fit": Fit(),
        "rng": tensors.seeded_rng(0),
        "hooks": Hooks(),
        **change,
    }
    with pytest.raises(kind) as raised:
        engine.train(**given)
    (found,) = engine.train_together([engine.batchable_call(**{**given, "rng": tensors.seeded_rng(0)})])
    assert type(found) is type(raised.value)
    assert str(found) == str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"network": {"name": "cnn", "channels": 1, "size": 8, "classes": 3}},
        {"network": {"name": "plain", "channels": 1, "classes": 3}},
        {"hooks": Hooks(prepare=lambda module: module)},
        {"hooks": Hooks(inputs=lambda x: x)},
        {"hooks": Hooks(steps=(Step(rate=lambda name: 0.5),))},
        {"fit": Fit(mixed=True)},
        {"examples": Examples(np.zeros((0, 6), np.float32), np.zeros(0, np.int64))},
    ],
)
def test_what_cannot_go_through_one_graph_takes_the_loop(engine: Any, change: dict[str, Any]) -> None:
    """Convolutions, batch norm, a method's own network, inputs or steps, 16 bits, and nobody's examples."""
    given = {"network": MLP, "start": start(), "examples": examples(8), "fit": Fit(), "rng": tensors.seeded_rng(0)}
    assert engine.batchable_call(**given) is not None
    assert engine.batchable_call(**{**given, **change}) is None
