"""Work that orders predict, against torch's own count of the same training."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import methods
from fedquilt.coordinator.updates import tasks
from fedquilt.core import BlobRef, Bundle, DeviceView, Examples
from fedquilt.costs import cost_model
from fedquilt.costs.cost_model import Layer
from fedquilt.methods import fedsq
from fedquilt.models.networks import numpy_init
from fedquilt.testing.toy_networks import register_entry
from fedquilt.tools.simulation import DeviceData, local_backend

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from fedquilt.edge_agent.engines.torch.engine import TorchEngine  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.models.networks import traces as traced  # noqa: E402

MLP: dict[str, Any] = {"name": "mlp", "inputs": 48, "hidden": [32, 16], "classes": 10}
PLAIN: dict[str, Any] = {"name": "plain", "channels": 3, "width": 4, "classes": 10, "input": {"channels": 3, "size": 8}}
VIT: dict[str, Any] = {"name": "vit", "classes": 10, "input": {"channels": 3, "size": 8}}
COUNT, BATCH = 24, 8


def made(network: Mapping[str, Any], **more: Any) -> Bundle:
    model, shape = registry.load_network(network, seed=0), registry.input_shape(network)
    start = {name: value.numpy() for name, value in model.state_dict().items()}
    facts = {
        "network": dict(network),
        "layers": traced.trace_layer_costs(model, shape),
        "flops": registry.measure_cost(model, shape).flops,
    }
    facts |= register_entry(network)
    return Bundle({**facts, **more}, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: start)


def examples(network: Mapping[str, Any]) -> Examples:
    shape, draws = registry.input_shape(network), np.random.default_rng(0)
    if len(shape) == 3:
        x: np.ndarray = draws.integers(0, 256, (COUNT, *shape[1:], 3), np.uint8)
    else:
        x = draws.random((COUNT, *shape), np.float32)
    return Examples(x, draws.integers(0, 10, COUNT))


def counted(name: str, network: Mapping[str, Any], folder: Path, rounds: tuple[int, ...] = (0,), **params: Any) -> Any:
    method = methods.load(name)
    settings = msgspec.convert({"batch": BATCH, "epochs": 2, **params}, method.params)
    state = method.init(made(network), settings, 0)
    order = method.send(state, DeviceView("a", None, rounds))
    own = examples(network)
    engine, none = TorchEngine(1 << 40), Examples(own.x[:0], own.y[:0])
    deliver = partial(
        local_backend.make_task_and_context, method, order, DeviceData("a", own, none), folder, engine=engine
    )
    task, site = deliver(cache=folder / "cache")
    if rounds:
        local = method.work(task, site).private_state  # what a cache and a device keep is there afterwards
        task, site = deliver(cache=folder / "cache", local=local)
    counter = FlopCounterMode(display=False)
    with counter:
        method.work(task, site)
    return tasks.predict_work(order, ("work",), "torch").total_for_examples(COUNT), float(counter.get_total_flops())


@pytest.mark.parametrize("last", [1, 2, 3])
def test_only_what_is_trained_and_behind_it_costs_a_backward_pass(last):
    model = registry.load_network(PLAIN, seed=0)
    layers = traced.trace_layer_costs(model, (3, 8, 8))
    names = [name for name, value in model.named_parameters() if value.ndim > 1][-last:]
    for name, value in model.named_parameters():
        value.requires_grad_(name in names)
    counter = FlopCounterMode(display=False)
    with counter:
        model.train()(torch.zeros(4, 3, 8, 8)).sum().backward()
    assert 4 * cost_model.training_cost(layers, names).flops == counter.get_total_flops()


def test_launches_are_the_operations_that_torch_begins():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += not func.is_view
            return func(*args, **(kwargs or {}))

    for network in (MLP, PLAIN):
        model, shape = registry.load_network(network, seed=0), registry.input_shape(network)
        names = [name for name, _ in model.named_parameters()]
        with Operations() as seen:
            model.train()(torch.zeros(4, *shape)).square().mean().backward()
        told = (
            cost_model.training_cost(traced.trace_layer_costs(model, shape), names).launches + cost_model.STEP_LAUNCHES
        )
        assert seen.count / 1.33 < told < 1.33 * seen.count


def test_a_perceptron_is_weighed_without_torch_as_with_it():
    table = dict(MLP)
    assert numpy_init.mlp_costs_by_layer(table) == traced.trace_layer_costs(registry.load_network(table, seed=0), (48,))


def test_attention_costs_its_products_between_activations_in_training_twice():
    layers = [Layer("a", 10.0, 6.0, 0.0, 1), Layer("b", 4.0, 0.0, 0.0, 1)]
    assert cost_model.training_cost(layers, ["a.w", "b.w"]).flops == 10 + 6 + 4 + 10 + 12 + 8
    assert cost_model.training_cost(layers, ["b.w"]).flops == 10 + 6 + 4 + 4


def test_a_narrower_part_costs_its_share_of_every_layer():
    model = numpy_init.initial_mlp_weights(MLP, 0)
    part = {"1.weight": model["1.weight"][:16], "3.weight": model["3.weight"][:8, :16]}
    part["5.weight"] = model["5.weight"][:, :8]
    part |= {"1.bias": model["1.bias"][:16], "3.bias": model["3.bias"][:8], "5.bias": model["5.bias"]}
    small = numpy_init.mlp_costs_by_layer({**MLP, "hidden": [16, 8]})
    assert [each.flops for each in cost_model.scale_layers(numpy_init.mlp_costs_by_layer(MLP), model, part)] == [
        each.flops for each in small
    ]


@pytest.mark.parametrize(
    ("name", "network", "params"),
    [
        ("fedavg", MLP, {}),
        ("fedavg", PLAIN, {}),
        ("fedprox", MLP, {}),
        ("ditto", MLP, {}),
        ("pfedme", MLP, {}),
        ("perfedavg", MLP, {}),
        ("moon", MLP, {}),
        ("fedrep", MLP, {}),
        ("fedrep", PLAIN, {"head_epochs": 3}),
        ("ft_part", PLAIN, {"layers": 2}),
        ("fedlora", MLP, {"rank": 4}),
        ("fedsq", PLAIN, {"trained": ["3", "6"]}),
        ("fedsq", PLAIN, {"trained": ["3", "6"], "cache": "off"}),
    ],
    ids=str,
)
def test_an_order_predicts_what_torch_counts(name, network, params, tmp_path):
    work, flops = counted(name, network, tmp_path, **params)
    trial = 2 * made(network).meta["flops"] * 2
    assert 0.9 * (flops - trial) <= work.flops <= 1.1 * flops


def test_fedsqs_first_round_runs_the_frozen_part_once_and_later_ones_do_not():
    params = fedsq.Params(trained=("6",), batch=BATCH, epochs=3)
    state = fedsq.METHOD.init(made(PLAIN), params, 0)
    off = fedsq.METHOD.init(made(PLAIN), replace(params, cache="off"), 0)
    first, later, never = (
        fedsq.METHOD.send(each, DeviceView("a", None, rounds)).work.flops_per_example
        for each, rounds in ((state, ()), (state, (0,)), (off, (0,)))
    )
    once = cost_model.forward_cost(state.layers).flops
    assert first == later + once
    assert never == later + 3 * once
    assert later < once


def test_an_evaluation_costs_a_forward_pass_of_the_held_out_share():
    method = methods.load("fedavg")
    order = method.send(method.init(made(PLAIN), method.params(epochs=5, batch=BATCH), 0), DeviceView("a", None))
    check = tasks.predict_work(order, ("check",), "torch", held_out_share=0.2)
    assert check.flops_per_example == pytest.approx(0.25 * made(PLAIN).meta["flops"])
    assert check.workload == "torch-conv"
    both = tasks.predict_work(order, ("check", "work"), "torch", held_out_share=0.2)
    assert both.flops_per_example == pytest.approx(check.flops_per_example + order.work.flops_per_example)
