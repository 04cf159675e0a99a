"""Training in plain torch, which methods' rules are compared with: no engine, method or register takes part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import Bundle, ClientContext, ClientResult, Examples, Task, derive_seed
from fedquilt.testing import toy_networks
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.simulation import DeviceData

torch = pytest.importorskip("torch")

import difficult_networks  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from fedquilt.edge_agent.engines.torch.engine import TorchEngine  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402

Model = dict[str, np.ndarray]
SIZES, ROUNDS, BATCH, LR, SEED = (16, 11, 6), 2, 5, 0.05, 3  # every last mini-batch has one example
PUBLIC = np.random.default_rng(9).normal(size=(7, 6)).astype(np.float32)  # on all devices; one in the last mini-batch
DROPS = ("root_parameter", "tokens")  # dropout is left out, whose draws are an engine's own


def table_of(network: str) -> dict[str, Any]:
    return difficult_networks.network_table(network, **({"drop": 0.0} if network in DROPS else {}))


@cache
def bundle_of(network: str) -> Bundle:
    bundle = prepare.prepare_bundle({"model": {**table_of(network), "seed": 5}}, Path(mkdtemp()))
    return toy_networks.add_public_examples(bundle, PUBLIC)


@cache
def members() -> list[DeviceData]:
    """Three devices; the last one has no example of class 2."""
    found = []
    for index, size in enumerate(SIZES):
        draws = np.random.default_rng(index)
        x, y = draws.normal(size=(size + 4, 6)).astype(np.float32), draws.integers(0, 3 - (index == 2), size + 4)
        x[np.arange(len(y)), y] += 2
        found.append(DeviceData(f"dev-{index}", Examples(x[4:], y[4:]), Examples(x[:4], y[:4])))
    return found


def generator(device: str, round: int) -> np.random.Generator:
    """Generator of a device's round."""
    return tensors.seeded_rng(derive_seed(SEED, "local", round, device))


def batches(order: np.ndarray) -> Iterator[np.ndarray]:
    yield from (order[first : first + BATCH] for first in range(0, len(order), BATCH))


def steps_of(member: DeviceData) -> int:
    return -(-len(member.train) // BATCH)


def parameters(network: str) -> list[str]:
    return [name for name, _ in registry.build_network(table_of(network)).named_parameters()]


# -- plain torch ----------------------------------------------------------------------------------


def alone(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Have batch norm work as in evaluation where a channel has one value."""
    layer.training = inputs[0].numel() > inputs[0].shape[1]


def normalises(module: nn.Module) -> bool:
    return any(True for _ in module.buffers(recurse=False)) and not any(True for _ in module.children())


class Plain:
    """A network with tensors, and steps of plain gradient descent on it.

    Args:
        network: of `awkward`.
        begun: its tensors, and further ones.
        trained: names of what is trained; normalisations without any keep their statistics. None: everything.
        made: values -> tensors of the network to run it with.
    """

    def __init__(
        self,
        network: str,
        begun: Mapping[str, np.ndarray],
        trained: Collection[str] | None = None,
        made: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values,
    ) -> None:
        self.module, self.made = registry.build_network(table_of(network)).train(), made
        given = {name: torch.tensor(array) for name, array in begun.items()}
        own = self.module.state_dict()
        self.module.load_state_dict({name: each for name, each in given.items() if name in own}, strict=False)
        self.values = dict(self.module.named_parameters())
        self.values |= {name: each.requires_grad_() for name, each in given.items() if name not in own}
        for path, each in self.module.named_modules():
            names = {f"{path}.{leaf}" for leaf in each.state_dict()}
            if trained is not None and normalises(each) and names.isdisjoint(trained):
                each.training = False
            elif isinstance(each, nn.BatchNorm1d):  # a single value has no variance: running statistics instead
                each.register_forward_pre_hook(alone)

    def scores(self, x: np.ndarray) -> Any:
        return torch.func.functional_call(self.module, self.made(self.values), (torch.tensor(x),))

    def loss(self, share: Examples, rows: np.ndarray) -> Any:
        return F.cross_entropy(self.scores(share.x[rows]), torch.tensor(share.y[rows]))

    def gradients(self, share: Examples, rows: np.ndarray) -> dict[str, Any]:
        gradients = torch.autograd.grad(self.loss(share, rows), list(self.values.values()), materialize_grads=True)
        return dict(zip(self.values, gradients, strict=True))

    def move(self, steps: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, step in steps.items():
                self.values[name] -= step

    def descend(
        self,
        share: Examples,
        order: np.ndarray,
        only: Collection[str] | None = None,
        correct: Callable[[str, Any, Any], Any] | None = None,
        clip: float = 0.0,
    ) -> None:
        """One epoch in this order; `correct(name, gradient, value)` changes gradients before they are clipped."""
        for rows in batches(order):
            found = self.gradients(share, rows)
            found = {name: each for name, each in found.items() if only is None or name in only}
            with torch.no_grad():
                if correct:
                    found = {name: correct(name, each, self.values[name]) for name, each in found.items()}
                norm = float(torch.sqrt(sum(each.double().square().sum() for each in found.values())))
                factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            self.move({name: LR * factor * each for name, each in found.items()})

    def state(self, like: Collection[str]) -> Model:
        held = {**self.module.state_dict(), **self.values}
        return {name: held[name].detach().numpy().copy() for name in like}


def local(network: str, begun: Model, member: DeviceData, round: int, correct: Any = None, only: Any = None) -> Model:
    """Tensors after one epoch of a device, in which all of them or those of the names in `only` move."""
    plain = Plain(network, begun, only)
    order = generator(member.device, round).permutation(len(member.train))
    plain.descend(member.train, order, None if only is None else set(only) & plain.values.keys(), correct)
    return plain.state(begun)


def mean(models: list[Model], weights: Any = SIZES) -> Model:
    """Weighted mean of numbers, plain with None; of whole numbers the largest."""
    weights = [1.0] * len(models) if weights is None else weights
    result = {}
    for name, first_update in models[0].items():
        each = np.stack([model[name] for model in models])
        if first_update.dtype.kind in "iu":
            result[name] = each.max(axis=0)
        else:
            share = np.asarray(weights, float) / np.sum(weights)
            result[name] = np.tensordot(share, each.astype(np.float64), axes=1).astype(first_update.dtype)
    return result


def own_of(stored: Mapping[str, Model]) -> Model:
    """Private tensors by device and name."""
    return {f"{device}/{name}": array for device, held in stored.items() for name, array in held.items()}


# -- the product ----------------------------------------------------------------------------------


@dataclass
class Played:
    """States of a run, tensors that each device keeps at its end, and the devices of each round."""

    states: list[Any]
    kept: dict[str, Model]
    devices: list[tuple[str, ...]]


Rule = Callable[[str, Model, Played], Model]


def params_of(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    there = {field.name for field in fields(methods.load(name).params)}
    common = {"epochs": 1, "batch": BATCH, "lr": LR}
    return {**{key: value for key, value in common.items() if key in there}, **more}


def played(
    name: str,
    network: str,
    more: Mapping[str, Any],
    rounds: int = ROUNDS,
    budgets: tuple[str, ...] = ("64GB",),
    meta: Mapping[str, Any] = {},
    **table: Any,
) -> Played:
    """A run of a method on an awkward network, by the coordinator's rounds."""
    method, found = methods.load(name), Played([], {}, [])

    def work(task: Task, site: ClientContext) -> ClientResult:
        result = method.work(task, site)
        if result.private_state:
            found.kept[site.device] = {key: np.array(array) for key, array in result.private_state.items()}
        return result

    def observe(simulation: Any, backend: Any) -> None:
        found.devices[:] = [each.devices for each in simulation.rounds]

    made = bundle_of(network)
    found.states = toy_networks.run_method(
        name,
        replace(made, meta={**made.meta, **meta}),
        members(),
        params_of(name, more),
        engine=TorchEngine(1 << 40, base_bytes=0),
        method=replace(method, work=work),
        observe=observe,
        seed=SEED,
        rounds=rounds,
        fleet={"budgets": list(budgets)},
        **table,
    )
    return found


def require_equal(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], close: float) -> None:
    """Compare all tensors, and those of 16 bits to 2e-3."""
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        tolerance = 2e-3 if array.dtype == np.float16 else close
        np.testing.assert_allclose(found[key], array, rtol=tolerance, atol=tolerance, err_msg=key)
