"""Rules of methods in plain torch: what two rounds of three devices make of an awkward network.

Each takes (network, its first tensors, the run that it is compared with, for what that has drawn) and returns the
job's result, and as "DEVICE/NAME" tensors that devices keep. They follow the papers: local steps by autograd, sums by
numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import difficult_networks
import numpy as np
import torch
from plain_training import (
    LR,
    PUBLIC,
    ROUNDS,
    SEED,
    SIZES,
    Model,
    Plain,
    Played,
    batches,
    generator,
    local,
    mean,
    members,
    own_of,
    parameters,
    steps_of,
    table_of,
)
from torch import nn

from fedquilt.arrays import tensors
from fedquilt.models.networks import registry


def fedavg(network: str, model: Model, run: Played) -> Model:
    for round in range(ROUNDS):
        model = mean([local(network, model, each, round) for each in members()])
    return model


def moon(network: str, model: Model, run: Played) -> Model:
    """FedAvg, and each device keeps its last model."""
    for round in range(ROUNDS):
        sent = [local(network, model, each, round) for each in members()]
        model = mean(sent)
    return model | own_of({each.device: last for each, last in zip(members(), sent, strict=True)})


def ditto(network: str, model: Model, run: Played) -> Model:
    """FedAvg, and on the same batches v <- v - eta (g + 0.5 (v - w)), w as it was received."""
    own = {each.device: model for each in members()}
    for round in range(ROUNDS):
        first = {name: torch.tensor(array) for name, array in model.items()}
        pull = lambda name, gradient, value: gradient + 0.5 * (value - first[name])  # noqa: B023, E731
        own = {each.device: local(network, own[each.device], each, round, pull) for each in members()}
        model = mean([local(network, model, each, round) for each in members()])
    return model | own_of(own)


def fedprox(network: str, model: Model, run: Played) -> Model:
    """mu = 0.5: gradient + mu (w - w_0)."""
    for round in range(ROUNDS):
        first = {name: torch.tensor(array) for name, array in model.items()}
        pull = lambda name, gradient, value: gradient + 0.5 * (value - first[name])  # noqa: B023, E731
        model = mean([local(network, model, each, round, pull) for each in members()])
    return model


def fedopt(network: str, model: Model, run: Played) -> Model:
    """Server momentum 0.9 at rate 1: m <- 0.9 m + D, x <- x + m; buffers take their mean."""
    moment = {name: np.zeros(model[name].shape) for name in parameters(network)}
    for round in range(ROUNDS):
        found = mean([local(network, model, each, round) for each in members()])
        for name in moment:
            moment[name] = 0.9 * moment[name] + found[name] - model[name]
            found[name] = (model[name] + moment[name]).astype(np.float32)
        model = found
    return model


def fednova(network: str, model: Model, run: Played) -> Model:
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


def scaffold(network: str, model: Model, run: Played) -> Model:
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
        model = mean(sent, None)
    return model | own_of(own)


def feddyn(network: str, model: Model, run: Played) -> Model:
    """alpha = 0.5: g - g_k + alpha (y - x); g_k and h lose alpha (y - x); x is the mean of y, less h / alpha."""
    names = parameters(network)
    h = {name: np.zeros(model[name].shape) for name in names}
    own = {each.device: {name: np.zeros_like(model[name]) for name in names} for each in members()}
    for round in range(ROUNDS):
        sent, first = [], {name: torch.tensor(array) for name, array in model.items()}
        for each in members():
            slope = {name: torch.tensor(array) for name, array in own[each.device].items()}
            add = lambda name, gradient, value: gradient - slope[name] + 0.5 * (value - first[name])  # noqa: B023, E731
            sent.append(local(network, model, each, round, add))
            own[each.device] = {
                name: own[each.device][name] - np.float32(0.5) * (sent[-1][name] - model[name]) for name in names
            }
        found = mean(sent, None)
        for name in names:
            h[name] = h[name] - 0.5 / 3 * sum(y[name].astype(float) - model[name] for y in sent)
            found[name] = (np.mean([y[name].astype(float) for y in sent], axis=0) - h[name] / 0.5).astype(np.float32)
        model = found
    return model | own_of(own)


def apfl(network: str, model: Model, run: Played) -> Model:
    """m = a v + (1 - a) w with a = 0.3 at first: v by a grad f(m), a by <v - w, grad f(m)>, w by its own gradient."""
    own, shares = {each.device: model for each in members()}, {each.device: 0.3 for each in members()}
    for round in range(ROUNDS):
        sent = []
        for each in members():
            w, mixed, a = Plain(network, model), Plain(network, own[each.device]), shares[each.device]
            v = {name: value.detach().clone() for name, value in mixed.values.items()}
            for rows in batches(generator(each.device, round).permutation(len(each.train))):
                with torch.no_grad():
                    for name, value in mixed.values.items():
                        value.copy_(a * v[name] + (1 - a) * w.values[name])
                found, plain = mixed.gradients(each.train, rows), w.gradients(each.train, rows)
                slope = sum(float(((v[name] - w.values[name].detach()) * g).sum()) for name, g in found.items())
                v = {name: v[name] - LR * a * g for name, g in found.items()}
                w.move({name: LR * g for name, g in plain.items()})
                a = min(max(a - LR * slope, 0.0), 1.0)
            sent.append(w.state(model))
            own[each.device] = {**mixed.state(model), **{name: value.numpy() for name, value in v.items()}}
            shares[each.device] = a
        model = mean(sent)
    return model | own_of({device: {**v, "/alpha": np.array(shares[device])} for device, v in own.items()})


def pfedme(network: str, model: Model, run: Played) -> Model:
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
        model = mean(sent, None)
    return model | own_of({device: theta.state(model) for device, theta in thetas.items()})


def perfedavg(network: str, model: Model, run: Played) -> Model:
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


def median(network: str, model: Model, run: Played) -> Model:
    for round in range(ROUNDS):
        sent = [local(network, model, each, round) for each in members()]
        model = {name: np.median([y[name] for y in sent], axis=0).astype(model[name].dtype) for name in model}
    return model


def norms(network: str) -> set[str]:
    """All tensors of modules that normalise by running statistics."""
    model = registry.build_network(table_of(network))
    kinds = (nn.BatchNorm1d, difficult_networks.MovingNorm)
    found = {
        f"{path}.{leaf}"
        for path, each in model.named_modules()
        if isinstance(each, kinds)
        for leaf in each.state_dict()
    }
    return found | ({"level"} if network == "typed_buffers" else set())  # a statistic in a buffer of the network itself


def fedrep(network: str, model: Model, run: Played) -> Model:
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


def fedproto(network: str, model: Model, run: Played) -> Model:
    """The mean of f over all examples as C."""
    return prototyped(network, model, run, lambda round, means, counts: np.average(means, 0, counts))


def fedtgp(network: str, model: Model, run: Played) -> Model:
    """C = F(v): four epochs at the rate 0.05 in mini-batches of three, by autograd; the margin is at most 0.5."""
    begun = {name: torch.tensor(array).double().requires_grad_() for name, array in run.states[0].generator.items()}

    def train(round: int, means: np.ndarray, counts: np.ndarray) -> np.ndarray:
        device, labels = np.nonzero(counts[:, :, 0])
        points, held = torch.tensor(means[device, labels]), counts[:, :, 0] > 0
        middles = [means[held[:, label], label].mean(0) for label in range(3) if held[:, label].any()]
        margin = min(0.5, max(float(np.linalg.norm(one - other)) for one in middles for other in middles))
        rng = tensors.seeded_rng(SEED, round)
        for _ in range(4):
            order = rng.permutation(len(points))
            for rows in (order[first : first + 3] for first in range(0, len(order), 3)):
                distances = torch.cdist(points[rows], generated(begun), compute_mode="donot_use_mm_for_euclid_dist")
                scores = -distances - margin * torch.nn.functional.one_hot(torch.tensor(labels[rows]), 3)
                loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels[rows]))
                for value, slope in zip(begun.values(), torch.autograd.grad(loss, list(begun.values())), strict=True):
                    value.data -= 0.05 * slope
        for value in begun.values():
            value.data = value.data.float().double()  # as the state stores them
        return generated(begun).detach().numpy()

    return prototyped(network, model, run, train)


def generated(layers: dict[str, Any]) -> Any:
    hidden = torch.relu(layers["v"] @ layers["w1"].T + layers["b1"])
    return hidden @ layers["w2"].T + layers["b2"]


def prototyped(network: str, model: Model, run: Played, combine: Callable[[int, Any, Any], np.ndarray]) -> Model:
    """Cross entropy + 0.5 |f - C_y|^2 / d on each device's own model; C is made of mean features and counts."""
    own, shape = {each.device: model for each in members()}, model[f"{head_of(network)}weight"].shape
    middle, known = torch.zeros(shape), torch.zeros(3)
    for round in range(ROUNDS):
        means, counts = [], []
        for each in members():
            plain = Plain(network, own[each.device])
            seen, entropy = features_of(plain, network), plain.loss

            def loss(share: Any, rows: Any, seen: Any = seen, entropy: Any = entropy) -> Any:
                value, labels = entropy(share, rows), share.y[rows]
                return value + 0.5 * ((seen[-1] - middle[labels]).square().mean(1) * known[labels]).mean()  # noqa: B023

            plain.loss = loss  # type: ignore[method-assign]
            plain.descend(each.train, generator(each.device, round).permutation(len(each.train)))
            own[each.device], sums = plain.state(model), np.zeros(shape)
            np.add.at(sums, each.train.y, evaluated_features(plain, network, each))
            count = np.bincount(each.train.y, minlength=3)[:, None]
            means.append((sums / np.maximum(count, 1)).astype(np.float32).astype(float))
            counts.append(np.broadcast_to(count, shape))
        middle, known = torch.tensor(combine(round, np.stack(means), np.stack(counts))).float(), torch.ones(3)
    np.testing.assert_allclose(run.states[-1].prototypes, middle.numpy(), rtol=1e-6, atol=1e-6)
    return model | own_of(own)


def fedmd(network: str, model: Model, run: Played) -> Model:
    """Each device regresses to the mean scores of the public examples, then trains on its own; then scores anew."""
    own, consensus = {each.device: model for each in members()}, None
    for round in range(ROUNDS):
        scores = []
        for each in members():
            plain, rng = Plain(network, own[each.device]), generator(each.device, round)
            if consensus is not None:
                digest(plain, rng.permutation(len(PUBLIC)), consensus)
                rng.integers(2**53)  # the engine's seed of torch
            plain.descend(each.train, rng.permutation(len(each.train)))
            own[each.device] = plain.state(model)
            set_evaluation_mode(plain)
            with torch.no_grad():
                scores.append(plain.scores(PUBLIC).numpy().astype(np.float64))
        consensus = torch.tensor(np.mean(scores, axis=0)).float()
    np.testing.assert_allclose(run.states[-1].scores, consensus, rtol=1e-6, atol=1e-6)
    return model | own_of(own)


def digest(plain: Plain, order: np.ndarray, consensus: Any) -> None:
    for rows in batches(order):
        loss = torch.nn.functional.mse_loss(plain.scores(PUBLIC[rows]), consensus[rows])
        slopes = torch.autograd.grad(loss, list(plain.values.values()), materialize_grads=True)
        plain.move({name: LR * slope for name, slope in zip(plain.values, slopes, strict=True)})


def set_evaluation_mode(plain: Plain) -> None:
    for inner in plain.module.eval().modules():
        inner._forward_pre_hooks.clear()


def features_of(plain: Plain, network: str) -> list[Any]:
    """The inputs of the head in every forward pass from now on, in order."""
    seen: list[Any] = []
    plain.module.get_submodule(head_of(network)[:-1]).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    return seen


def evaluated_features(plain: Plain, network: str, member: Any) -> np.ndarray:
    set_evaluation_mode(plain)
    seen = features_of(plain, network)
    with torch.no_grad():
        plain.scores(member.train.x)
    return seen[0].numpy().astype(np.float64)


def head_of(network: str) -> str:
    return {"shared": "4", "moving_average": "4"}.get(network, "head") + "."
