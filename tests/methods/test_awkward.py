"""Awkward networks under every method: the trajectory of the method's rule in plain torch, or a refusal by tensor.

The references are computed here from the papers' rules with torch alone: local steps by autograd, sums by numpy.
Methods that train or send a part of a network are in `test_awkward_parts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.core import ModelError
from fedquilt.tools.artefacts import prepare

torch = pytest.importorskip("torch")

from plain_training import (  # noqa: E402
    LR,
    ROUNDS,
    SIZES,
    Model,
    Plain,
    batches,
    bundle_of,
    generator,
    local,
    mean,
    members,
    own_of,
    parameters,
    played,
    require_equal,
    steps_of,
    table_of,
)
from torch import nn  # noqa: E402

from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.testing import awkward  # noqa: E402

QUICK = ("fedavg", "fedopt", "pfedme", "fedbn", "scaffold", "fedrep")  # in `make test` on all networks

Rule = Callable[[str, Model], Model]
"""(network, its first tensors) -> the job's result, and as "DEVICE/NAME" tensors that devices keep."""


def fedavg(network: str, model: Model) -> Model:
    for round in range(ROUNDS):
        model = mean([local(network, model, each, round) for each in members()])
    return model


def moon(network: str, model: Model) -> Model:
    """FedAvg, and each device keeps its last model."""
    for round in range(ROUNDS):
        sent = [local(network, model, each, round) for each in members()]
        model = mean(sent)
    return model | own_of({each.device: last for each, last in zip(members(), sent, strict=True)})


def ditto(network: str, model: Model) -> Model:
    """FedAvg, and on the same batches v <- v - eta (g + 0.5 (v - w)), w as it was received."""
    own = {each.device: model for each in members()}
    for round in range(ROUNDS):
        first = {name: torch.tensor(array) for name, array in model.items()}
        pull = lambda name, gradient, value: gradient + 0.5 * (value - first[name])  # noqa: B023, E731
        own = {each.device: local(network, own[each.device], each, round, pull) for each in members()}
        model = mean([local(network, model, each, round) for each in members()])
    return model | own_of(own)


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
    return model | own_of(own)


def pfedme(network: str, model: Model) -> Model:
    """Two steps of theta on each mini-batch with the pull 5 (theta - w), then w <- w - 0.02 * 5 (w - theta)."""
    thetas: dict[str, Plain] = {}
    for round in range(ROUNDS):
        sent = []
        for each in members():
            theta = thetas[each.device] = Plain(network, model)
            w = {name: value.detach().clone() for name, value in theta.values.items()}
            for rows in batches(generator(each.device, round).permutation(len(each.train))):
                for _ in range(2):
                    found = theta.gradients(each.train, rows)
                    with torch.no_grad():
                        steps = {name: LR * (g + 5.0 * (theta.values[name] - w[name])) for name, g in found.items()}
                    theta.move(steps)
                w = {name: value - 0.1 * (value - theta.values[name].detach()) for name, value in w.items()}
            sent.append({**theta.state(model), **{name: value.numpy() for name, value in w.items()}})
        model = mean(sent, [1.0] * len(sent))
    return model | own_of({device: theta.state(model) for device, theta in thetas.items()})


def perfedavg(network: str, model: Model) -> Model:
    """On each mini-batch u = w - 0.02 g(w), then w <- w - eta g(u)."""
    for round in range(ROUNDS):
        sent = []
        for each in members():
            plain = Plain(network, model)
            for rows in batches(generator(each.device, round).permutation(len(each.train))):
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


def apart(names: Callable[[str], set[str]]) -> Rule:
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
        return model | own_of(own)

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
    own = {each.device: {name: model[name] for name in head} for each in members()}
    for round in range(ROUNDS):
        sent = []
        for each in members():
            rng = generator(each.device, round)
            held = {**model, **own[each.device]}
            for names in (set(head), model.keys() - head):
                plain = Plain(network, held, names)
                plain.descend(each.train, rng.permutation(len(each.train)), names & plain.values.keys())
                rng.integers(2**53)  # the engine's seed of dropout
                held = plain.state(held)
            own[each.device] = {name: held[name] for name in head}
            sent.append(held)
        found = mean(sent)
        model = {name: model[name] if name in head else found[name] for name in model}
    return model | own_of(own)


def head_of(network: str) -> str:
    return {"shared": "4", "moving_average": "4"}.get(network, "head") + "."


ALL = (1.0,) * 5
REFERENCES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "fedavg": (fedavg, {}),
    "ft_full": (fedavg, {}),
    "ditto": (ditto, {"pull": 0.5}),
    "moon": (moon, {"mu": 0.0}),
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


CASES = [
    pytest.param(name, network, marks=() if name in QUICK else pytest.mark.nightly, id=f"{name}-{network}")
    for name in REFERENCES
    for network in awkward.NETWORKS
]


@pytest.mark.parametrize(("name", "network"), CASES)
def test_a_method_does_to_an_awkward_network_what_its_rule_does_in_plain_torch(name: str, network: str) -> None:
    """All tensors after two rounds of three devices, buffers too, to 2e-5; and they have moved."""
    rule, more = REFERENCES[name]
    begun = dict(bundle_of(network).load("model"))
    wanted, run = rule(network, begun), played(name, network, more)
    found = {key: array for key, array in methods.load(name).result(run.states[-1]).tensors.items() if key in begun}
    require_equal(found | own_of(run.kept), wanted)
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
    """A dry run of its rounds, export and reload; a refusal names a module or tensor of the network, or the tracer."""
    more = {"encoder": 0.0} if name == "fedlps" else {}
    table = {"name": "awkward", "method": name, "model": table_of(network), "params": more}
    refused = ""
    try:
        prepare.whole(settings.parse(table), tmp_path)
    except ModelError as error:
        refused = str(error)
    held = registry.build(table_of(network))
    there = [*held.state_dict(), *(path for path, _ in held.named_modules() if path)]
    assert not refused or any(f"'{each}'" in refused for each in there) or "trace" in refused, refused
    assert refused or (name, network) not in REFUSED, "this network was expected to be refused"


REFUSED = {  # parts of the network share the tensor that the refusal names
    *((name, network) for name in ("depthfl", "fedepth", "fedsq") for network in ("tied", "shared")),
    ("fedsq", "moving_average"),
}
