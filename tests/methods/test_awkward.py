"""Awkward networks under every method: the trajectory of the method's rule in plain torch, or a refusal by tensor.

The references are computed here from the papers' rules with torch alone: local steps by autograd, sums by numpy. No
engine, no method and no register takes part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from fedquilt import methods, tensors
from fedquilt.coordinator import settings
from fedquilt.core import Bundle, Examples, ModelError, derive_seed
from fedquilt.testing import toys
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.simulation import Member

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from fedquilt.edge_agent.engines.torch_engine import TorchEngine  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.testing import awkward  # noqa: E402

Model = dict[str, np.ndarray]
SIZES, ROUNDS, BATCH, LR, SEED = (16, 11, 6), 2, 5, 0.05, 3  # every last mini-batch has one example
DROPS = ("root_parameter", "tokens")  # dropout is left out, whose draws are an engine's own
QUICK = ("fedavg", "fedopt", "pfedme", "fedbn", "scaffold", "fedrep")  # in `make test` on all networks


def table_of(network: str) -> dict[str, Any]:
    return awkward.table(network, **({"drop": 0.0} if network in DROPS else {}))


@cache
def bundle_of(network: str) -> Bundle:
    return prepare.prepare({"model": {**table_of(network), "seed": 5}}, Path(mkdtemp()))


def members() -> list[Member]:
    found = []
    for index, size in enumerate(SIZES):
        draws = np.random.default_rng(index)
        x, y = draws.normal(size=(size + 4, 6)).astype(np.float32), draws.integers(0, 3, size + 4)
        x[np.arange(len(y)), y] += 2
        found.append(Member(f"dev-{index}", Examples(x[4:], y[4:]), Examples(x[:4], y[:4])))
    return found


def orders(device: str, round: int, epochs: int = 1) -> Iterator[np.ndarray]:
    """Mini-batches of a device's round."""
    rng, count = tensors.rng(derive_seed(SEED, "local", round, device)), SIZES[int(device[-1])]
    for _ in range(epochs):
        order = rng.permutation(count)
        yield from (order[first : first + BATCH] for first in range(0, count, BATCH))


# -- plain torch ----------------------------------------------------------------------------------


def alone(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Have batch norm work as in evaluation where a channel has one value."""
    layer.training = inputs[0].numel() > inputs[0].shape[1]


class Plain:
    """A network with tensors, and steps of plain gradient descent on it."""

    def __init__(self, network: str, begun: Model) -> None:
        self.module = registry.build(table_of(network)).train()
        self.module.load_state_dict({name: torch.tensor(array) for name, array in begun.items()}, strict=False)
        self.values = dict(self.module.named_parameters())
        for each in self.module.modules():
            if isinstance(each, nn.BatchNorm1d):  # a single value has no variance: running statistics instead
                each.register_forward_pre_hook(alone)

    def gradients(self, share: Examples, rows: np.ndarray) -> dict[str, Any]:
        loss = F.cross_entropy(self.module(torch.tensor(share.x[rows])), torch.tensor(share.y[rows]))
        found = torch.autograd.grad(loss, list(self.values.values()))
        return dict(zip(self.values, found, strict=True))

    def move(self, steps: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, step in steps.items():
                self.values[name] -= step

    def state(self, like: Model) -> Model:
        held = self.module.state_dict()
        return {name: held[name].numpy().copy() for name in like}


def local(network: str, begun: Model, member: Member, round: int, correct: Any = None, only: Any = None) -> Model:
    """Tensors after one epoch of a device; `correct(name, gradient, value)` changes gradients."""
    plain = Plain(network, begun)
    for rows in orders(member.device, round):
        found = plain.gradients(member.train, rows)
        with torch.no_grad():
            if correct:
                found = {name: correct(name, each, plain.values[name]) for name, each in found.items()}
        plain.move({name: LR * each for name, each in found.items() if only is None or name in only})
    return plain.state(begun)


def mean(models: list[Model], weights: Any = SIZES) -> Model:
    """Weighted mean of numbers; of whole numbers the largest."""
    found = {}
    for name, first in models[0].items():
        each = np.stack([model[name] for model in models])
        if first.dtype.kind in "iu":
            found[name] = each.max(axis=0)
        else:
            share = np.asarray(weights, float) / np.sum(weights)
            found[name] = np.tensordot(share, each.astype(np.float64), axes=1).astype(first.dtype)
    return found


def steps_of(member: Member) -> int:
    return -(-len(member.train) // BATCH)


def parameters(network: str) -> list[str]:
    return [name for name, _ in registry.build(table_of(network)).named_parameters()]


def fedavg(network: str, model: Model) -> Model:
    for round in range(ROUNDS):
        model = mean([local(network, model, each, round) for each in members()])
    return model


def fedprox(network: str, model: Model) -> Model:
    """mu = 0.5: gradient + mu (w - w_0)."""
    for round in range(ROUNDS):
        first = {name: torch.tensor(array) for name, array in model.items()}
        pull = lambda name, gradient, value: gradient + 0.5 * (value - first[name])  # noqa: B023, E731
        model = mean([local(network, model, each, round, pull) for each in members()])
    return model


def fedopt(network: str, model: Model) -> Model:
    """Server momentum 0.9 at rate 1: m <- 0.9 m + D, x <- x + m; buffers take their mean."""
    moment = {name: np.zeros(model[name].shape) for name in parameters(network)}
    for round in range(ROUNDS):
        found = mean([local(network, model, each, round) for each in members()])
        for name in moment:
            moment[name] = 0.9 * moment[name] + found[name] - model[name]
            found[name] = (model[name] + moment[name]).astype(np.float32)
        model = found
    return model


def fednova(network: str, model: Model) -> Model:
    """x <- x - (sum_i p_i tau_i) sum_i p_i (x - y_i) / tau_i."""
    shares, taus = np.array(SIZES) / sum(SIZES), [steps_of(each) for each in members()]
    for round in range(ROUNDS):
        sent = [local(network, model, each, round) for each in members()]
        found = mean(sent)
        for name in parameters(network):
            way = sum(p * (model[name] - y[name]) / tau for p, y, tau in zip(shares, sent, taus, strict=True))
            found[name] = (model[name] - float(shares @ taus) * way).astype(np.float32)
        model = found
    return model


def scaffold(network: str, model: Model) -> Model:
    """y <- y - eta (g - c_i + c); c_i+ = c_i - c + (x - y) / (K eta); c the mean of all c_i."""
    names = parameters(network)
    server = {name: np.zeros_like(model[name]) for name in names}
    own = {each.device: dict(server) for each in members()}
    for round in range(ROUNDS):
        sent = []
        for each in members():
            shift = {name: torch.tensor(server[name] - own[each.device][name]) for name in names}
            add = lambda name, gradient, value: gradient + shift[name]  # noqa: B023, E731
            sent.append(local(network, model, each, round, add))
            path = steps_of(each) * LR
            own[each.device] = {
                name: own[each.device][name] - server[name] + (model[name] - sent[-1][name]) / np.float32(path)
                for name in names
            }
        server = {name: np.mean([each[name] for each in own.values()], axis=0) for name in names}
        model = mean(sent, [1.0] * len(sent))
    return model


def pfedme(network: str, model: Model) -> Model:
    """Two steps of theta on each mini-batch with the pull 5 (theta - w), then w <- w - 0.02 * 5 (w - theta)."""
    for round in range(ROUNDS):
        sent = []
        for each in members():
            theta = Plain(network, model)
            w = {name: value.detach().clone() for name, value in theta.values.items()}
            for rows in orders(each.device, round):
                for _ in range(2):
                    found = theta.gradients(each.train, rows)
                    with torch.no_grad():
                        steps = {name: LR * (g + 5.0 * (theta.values[name] - w[name])) for name, g in found.items()}
                    theta.move(steps)
                w = {name: value - 0.1 * (value - theta.values[name].detach()) for name, value in w.items()}
            sent.append({**theta.state(model), **{name: value.numpy() for name, value in w.items()}})
        model = mean(sent, [1.0] * len(sent))
    return model


def perfedavg(network: str, model: Model) -> Model:
    """On each mini-batch u = w - 0.02 g(w), then w <- w - eta g(u)."""
    for round in range(ROUNDS):
        sent = []
        for each in members():
            plain = Plain(network, model)
            for rows in orders(each.device, round):
                before = {name: value.detach().clone() for name, value in plain.values.items()}
                plain.move({name: 0.02 * g for name, g in plain.gradients(each.train, rows).items()})
                ahead = plain.gradients(each.train, rows)
                with torch.no_grad():
                    back = {name: plain.values[name] - before[name] + LR * g for name, g in ahead.items()}
                plain.move(back)
            sent.append(plain.state(model))
        model = mean(sent)
    return model


def median(network: str, model: Model) -> Model:
    for round in range(ROUNDS):
        sent = [local(network, model, each, round) for each in members()]
        model = {name: np.median([y[name] for y in sent], axis=0).astype(model[name].dtype) for name in model}
    return model


def apart(names: Callable[[str], set[str]]) -> Callable[[str, Model], Model]:
    """FedAvg on all tensors but those of these names, which stay on each device and begin as the job's."""

    def play(network: str, model: Model) -> Model:
        own = {each.device: {name: model[name] for name in names(network)} for each in members()}
        for round in range(ROUNDS):
            sent = []
            for each in members():
                found = local(network, {**model, **own[each.device]}, each, round)
                own[each.device] = {name: found[name] for name in own[each.device]}
                sent.append(found)
            found = mean(sent)
            model = {name: model[name] if name in names(network) else found[name] for name in model}
        return model

    return play


def norms(network: str) -> set[str]:
    """All tensors of modules that normalise by running statistics."""
    model = registry.build(table_of(network))
    kinds = (nn.BatchNorm1d, awkward.MovingNorm)
    found = {
        f"{path}.{leaf}"
        for path, each in model.named_modules()
        if isinstance(each, kinds)
        for leaf in each.state_dict()
    }
    return found | ({"level"} if network == "typed" else set())  # a statistic in a buffer of the network itself


def fedrep(network: str, model: Model) -> Model:
    """The head alone for one epoch, then all else; the head stays on the device. Frozen norms keep their statistics."""
    head = [name for name in parameters(network) if name.startswith(head_of(network))]
    rest = [name for name in parameters(network) if name not in head]
    own = {each.device: {name: model[name] for name in head} for each in members()}
    for round in range(ROUNDS):
        sent = []
        for each in members():
            rng = tensors.rng(derive_seed(SEED, "local", round, each.device))
            held = {**model, **own[each.device]}
            for names in (head, rest):
                plain, order = Plain(network, held), rng.permutation(len(each.train))
                for inner in plain.module.modules():
                    if names is head and [*inner.buffers(recurse=False)] and not [*inner.children()]:
                        inner._forward_pre_hooks.clear()
                        inner.training = False
                for first in range(0, len(order), BATCH):
                    found = plain.gradients(each.train, order[first : first + BATCH])
                    plain.move({name: LR * found[name] for name in names})
                rng.integers(2**53)  # the engine's seed of dropout
                held = plain.state(held)
            own[each.device] = {name: held[name] for name in head}
            sent.append(held)
        found = mean(sent)
        model = {name: model[name] if name in head else found[name] for name in model}
    return model


def head_of(network: str) -> str:
    return {"shared": "4", "moving_average": "4"}.get(network, "head") + "."


ALL = (1.0,) * 5
REFERENCES: dict[str, tuple[Callable[[str, Model], Model], dict[str, Any]]] = {
    "fedavg": (fedavg, {}),
    "ft_full": (fedavg, {}),
    "ditto": (fedavg, {}),
    "moon": (fedavg, {"mu": 0.0}),
    "fedlp": (fedavg, {"keep": 1.0}),
    "fedpews": (fedavg, {"warmup": 0}),
    "fedpews_fixed": (fedavg, {"warmup": 0}),
    "depthfl": (fedavg, {"exits": 1, "depths": (1,) * 5}),
    "fedepth": (fedavg, {"stages": 1, "groups": (1,) * 5}),
    "fedprox": (fedprox, {"mu": 0.5}),
    "fedopt": (fedopt, {"server": "sgd", "server_lr": 1.0, "beta1": 0.9}),
    "fednova": (fednova, {}),
    "scaffold": (scaffold, {}),
    "pfedme": (pfedme, {"pull": 5.0, "inner": 2, "outer_lr": 0.02}),
    "perfedavg": (perfedavg, {"alpha": 0.02}),
    "robust": (median, {"rule": "median", "attackers": 0.0}),
    "fedbn": (apart(norms), {}),
    "fedrep": (fedrep, {"head_epochs": 1}),
}
"""Method -> its rule in plain torch, and the parameters of both beside the common ones."""


def known(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    there = {field.name for field in fields(methods.load(name).params)}
    common = {"epochs": 1, "batch": BATCH, "lr": LR}
    return {**{key: value for key, value in common.items() if key in there}, **more}


def result_of(name: str, network: str, more: Mapping[str, Any]) -> tuple[Model, Model]:
    """First tensors, and the result after ROUNDS, each tensor once."""
    made = bundle_of(network)
    engine = TorchEngine(1 << 40, base_bytes=0)
    *_, last = toys.play(
        name, made, members(), known(name, more), engine=engine, seed=SEED, rounds=ROUNDS, fleet={"budgets": ["64GB"]}
    )
    begun = dict(made.load("model"))
    found = methods.load(name).result(last).tensors
    return begun, {key: found[key] for key in found if key in begun}


CASES = [
    pytest.param(name, network, marks=() if name in QUICK else pytest.mark.nightly, id=f"{name}-{network}")
    for name in REFERENCES
    for network in awkward.NETWORKS
]


@pytest.mark.parametrize(("name", "network"), CASES)
def test_a_method_does_to_an_awkward_network_what_its_rule_does_in_plain_torch(name: str, network: str) -> None:
    """All tensors after two rounds of three devices, buffers too, to 2e-5; and they have moved."""
    rule, more = REFERENCES[name]
    begun, found = result_of(name, network, more)
    wanted = rule(network, begun)
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        close = 2e-3 if array.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(found[key], array, rtol=close, atol=close, err_msg=key)
    assert max(float(np.abs(found[key] - begun[key]).max()) for key in parameters(network)) > 1e-3


# -- every method ---------------------------------------------------------------------------------

PAIRS = [
    pytest.param(name, network, marks=() if network == "tied" else pytest.mark.nightly, id=f"{name}-{network}")
    for name in methods.names()
    if "torch" in methods.load(name).engines
    for network in awkward.NETWORKS
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention's gradients, example by example
@pytest.mark.parametrize(("name", "network"), PAIRS)
def test_a_method_trains_an_awkward_network_or_refuses_it_as_the_job_is_prepared(
    name: str, network: str, tmp_path: Path
) -> None:
    """A dry run of its rounds, export and reload; a refusal names a module or tensor of the network, or its class."""
    more = {"encoder": 0.0} if name == "fedlps" else {}
    table = {"name": "awkward", "method": name, "model": table_of(network), "params": more}
    refused = ""
    try:
        prepare.whole(settings.parse(table), tmp_path)
    except ModelError as error:
        refused = str(error)
    held = registry.build(table_of(network))
    there = [*held.state_dict(), *(path for path, _ in held.named_modules() if path)]
    assert not refused or any(f"'{each}'" in refused for each in there) or type(held).__name__ in refused, refused
    assert refused or (name, network) not in REFUSED, "this network was expected to be refused"


REFUSED = {  # parts of the network share the tensor that the refusal names
    *((name, network) for name in ("depthfl", "fedepth", "fedsq") for network in ("tied", "shared")),
    ("fedsq", "moving_average"),
}
