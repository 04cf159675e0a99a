"""Rules, in plain torch, of methods that train or send some layers or adapters; as in `plain_rules`.

Which tensors belong together in each awkward network is written down here, by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from plain_training import (
    SIZES,
    Model,
    Plain,
    Played,
    Rule,
    batches,
    bundle_of,
    generator,
    local,
    mean,
    members,
    own_of,
    parameters,
)
from torch import nn

from fedquilt.arrays import tensors

LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "root_parameter": {
        "shift": ("shift",),
        "first": ("first.weight", "first.bias", "norm.weight", "norm.bias"),
        "second": ("second.weight", "second.bias"),
        "head": ("head.weight", "head.bias"),
    },
    "tied": {
        "gain": ("gain",),
        "first": ("first.weight", "first.bias", "norm.weight", "norm.bias"),
        "second": ("second.weight",),
        "head": ("head.weight", "head.bias"),
    },
    "shared": {
        "1": ("1.weight", "1.bias"),
        "2.0": ("2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"),
        "4": ("4.weight", "4.bias"),
    },
    "moving_average": {"1": ("1.weight", "1.bias"), "4": ("4.weight", "4.bias")},
    "tokens": {
        "root": ("class_token", "pos_embedding"),
        "embed": ("embed.weight", "embed.bias"),
        "norm": ("norm.weight", "norm.bias"),
        "attention": ("attention.in_proj_weight", "attention.in_proj_bias"),
        "attention.out_proj": ("attention.out_proj.weight", "attention.out_proj.bias"),
        "inner": ("inner.weight", "inner.bias"),
        "outer": ("outer.weight", "outer.bias"),
        "head": ("head.weight", "head.bias"),
    },
    "maps": {
        "first": ("first.weight", "first.bias", "norm1.weight", "norm1.bias"),
        "second": ("second.weight", "norm2.weight", "norm2.bias"),
        "head": ("head.weight", "head.bias"),
    },
    "typed_buffers": {"first": ("first.weight", "first.bias"), "head": ("head.weight", "head.bias")},
    "weight_normalisation": {
        "first": ("first.weight", "first.bias"),
        "scale": ("scale.weight", "scale.bias"),
        "second": ("second.bias", *(f"second.parametrizations.weight.original{index}" for index in (0, 1))),
        "head": ("head.weight", "head.bias"),
    },
}
"""Layers by their first call, each with its parameters and those of the batch norm behind it."""
ROOTS = ("shift", "gain", "root")  # parameters of the network itself, which is called first

WEIGHTS: dict[str, tuple[str, ...]] = {
    "root_parameter": ("first.weight", "second.weight"),
    "tied": ("first.weight", "second.weight"),
    "shared": ("1.weight", "2.0.weight"),
    "moving_average": ("1.weight",),
    "tokens": (
        "embed.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "inner.weight",
        "outer.weight",
    ),
    "maps": ("first.weight", "second.weight"),
    "typed_buffers": ("first.weight",),
    "weight_normalisation": ("first.weight",),  # the other layer's weight is made of two tensors
}
"""Weights of convolutions, or without any the weight matrices before the head."""


def names_of(network: str, layers: Any) -> set[str]:
    return {name for layer in layers for name in LAYERS[network][layer]}


def statistics(network: str) -> set[str]:
    """All tensors that no gradient moves."""
    return bundle_of(network).load("model").keys() - set(parameters(network))


def with_buffers(network: str, names: set[str]) -> set[str]:
    """These tensors, and the buffers of their modules."""
    modules = {name.rpartition(".")[0] for name in names}
    return names | {name for name in statistics(network) if name.rpartition(".")[0] in modules}


# -- parts of a network ---------------------------------------------------------------------------


def alone(network: str, model: Model, run: Played) -> Model:
    """Each device goes on with its own model."""
    own = {each.device: model for each in members()}
    for round in range(2):
        own = {each.device: local(network, own[each.device], each, round) for each in members()}
    return model | own_of(own)


def ft_part(network: str, model: Model, run: Played) -> Model:
    """The last two layers move, with the buffers of their modules; everything else stays as it was."""
    return train_part(network, model, last_layers(network))


def fedbabu(network: str, model: Model, run: Played) -> Model:
    """All but the last layer move."""
    return train_part(network, model, model.keys() - last_layers(network, 1))


def train_part(network: str, model: Model, moved: set[str]) -> Model:
    for round in range(2):
        found = mean([local(network, model, each, round, only=moved) for each in members()])
        model = {name: found[name] if name in moved else array for name, array in model.items()}
    return model


def apart(own_names: Callable[[str], set[str]]) -> Rule:
    """FedAvg on all tensors but those of these names, which stay on each device and begin as the job's."""

    def play(network: str, model: Model, run: Played) -> Model:
        names = own_names(network)
        own = {each.device: {name: model[name] for name in names} for each in members()}
        for round in range(2):
            sent = [local(network, {**model, **own[each.device]}, each, round) for each in members()]
            own = {each.device: {name: y[name] for name in names} for each, y in zip(members(), sent, strict=True)}
            found = mean(sent)
            model = {name: array if name in names else found[name] for name, array in model.items()}
        return model | own_of(own)

    return play


def parfed(network: str) -> set[str]:
    """The last weights before the head, and all statistics, stay on the device."""
    return {*statistics(network), WEIGHTS[network][-1]}


def fedfina(network: str) -> set[str]:
    """All but the last two weights before the head stay on the device."""
    return bundle_of(network).load("model").keys() - set(WEIGHTS[network][-2:])


def last_layers(network: str, count: int = 2) -> set[str]:
    """The last layers, with the buffers of their modules."""
    return with_buffers(network, names_of(network, [*LAYERS[network]][-count:]))


def first_layers(network: str) -> set[str]:
    return bundle_of(network).load("model").keys() - last_layers(network)


def fedala(network: str, model: Model, run: Played) -> Model:
    """W of the last two layers, by 0.5 d * gradient on half of the examples, d = received - own; then FedAvg."""
    blended = sorted(last_layers(network) & set(parameters(network)))
    own, weights = dict[str, Model](), dict[str, dict[str, Any]]()
    for round in range(3):
        for each in members():
            rng, start = generator(each.device, round), model
            if round:
                old = {name: torch.tensor(own[each.device][name]) for name in blended}
                difference = {name: torch.tensor(model[name]) - old[name] for name in blended}
                w = weights.setdefault(each.device, {name: torch.ones_like(old[name]) for name in blended})
                rows = rng.permutation(len(each.train))[: -(-len(each.train) // 2)]
                orders = [rng.permutation(len(rows)) for _ in range(2 if round == 1 else 1)]
                rng.integers(2**53)  # the engine's seed of dropout
                mixed = lambda: {name: (old[name] + difference[name] * w[name]).numpy() for name in blended}  # noqa: B023, E731
                plain = Plain(network, {**model, **mixed()}, blended)
                for order in orders:
                    for part in batches(rows[order]):
                        found = plain.gradients(each.train, part)
                        for name in blended:
                            w[name] = (w[name] - 0.5 * difference[name] * found[name]).clamp(0, 1)
                        plain.move(
                            {name: plain.values[name].detach() - torch.tensor(mixed()[name]) for name in blended}
                        )
                start = {**model, **mixed()}
            plain = Plain(network, start)
            plain.descend(each.train, rng.permutation(len(each.train)))
            own[each.device] = plain.state(model)
        model = mean([own[each.device] for each in members()])
    kept = {
        device: {**own[device], **{f"/weight/{name}": each.numpy() for name, each in w.items()}}
        for device, w in weights.items()
    }
    return model | own_of(kept)


def squares(plain: Plain, member: Any, each: int) -> Model:
    """Mean over groups of `each` examples of the squared gradient of a group's mean loss, in evaluation mode."""
    plain.module.eval()
    for inner in plain.module.modules():
        inner._forward_pre_hooks.clear()
    total: dict[str, Any] = {}
    groups = [np.arange(first, min(first + each, len(member.train))) for first in range(0, len(member.train), each)]
    for rows in groups:
        for name, found in plain.gradients(member.train, rows).items():
            total[name] = total.get(name, 0.0) + found.square()
    return {name: array.numpy() / len(groups) for name, array in total.items()}


def fedlg(network: str, model: Model, run: Played) -> Model:
    """One round alone, then the one weight whose gradient in mini-batches is smallest is averaged."""
    own = {each.device: local(network, model, each, 0) for each in members()}
    sizes = dict.fromkeys(WEIGHTS[network], 0.0)
    for each, share in zip(members(), np.array(SIZES) / sum(SIZES), strict=True):
        found = squares(Plain(network, own[each.device]), each, 5)
        for name in sizes:
            sizes[name] += share * float(np.sqrt(np.mean(found[name], dtype=np.float64)))
    for name, size in sizes.items():
        np.testing.assert_allclose(run.states[1].sizes[name], size, rtol=1e-4, err_msg=name)
    gene = min(sizes, key=lambda name: sizes[name])
    for round in (1, 2):
        own = {each.device: local(network, own[each.device], each, round) for each in members()}
        shared = mean([{gene: own[each.device][gene]} for each in members()])
        own = {device: {**held, **shared} for device, held in own.items()}
    kept = {device: {name: array for name, array in held.items() if name != gene} for device, held in own.items()}
    return {**model, **shared} | own_of(kept)


# -- adapters -------------------------------------------------------------------------------------

RANK, ALPHA = 2, 4.0
ADAPTED = {
    "root_parameter": ("first", "second"),
    "tied": ("first", "second"),
    "shared": ("1", "2.0"),
    "moving_average": ("1",),
    "typed_buffers": ("first",),
}
HEAD = {"shared": "4", "moving_average": "4"}


def adapting(network: str, backbone: Model, own: bool = False) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Values -> weights W + s (A B)^T, and with `own` + m s (A_p B_p)^T, m = sigmoid(gate)."""

    def made(values: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in values.items() if name in backbone}
        for layer in ADAPTED[network]:
            change = values[f"{layer}.lora_a"] @ values[f"{layer}.lora_b"]
            if own:
                gate = torch.sigmoid(values[f"{layer}.gate"])
                change = change + gate * (values[f"{layer}.own_a"] @ values[f"{layer}.own_b"])
            found[f"{layer}.weight"] = values[f"{layer}.weight"] + ALPHA / RANK * change.T
        return found

    return made


def merged(network: str, backbone: Model, shared: Model) -> Model:
    found = {**backbone, **{name: array for name, array in shared.items() if name in backbone}}
    for layer in ADAPTED[network]:
        a, b = shared[f"{layer}.lora_a"].astype(float), shared[f"{layer}.lora_b"].astype(float)
        found[f"{layer}.weight"] = (found[f"{layer}.weight"] + ALPHA / RANK * (a @ b).T).astype(np.float32)
    return found


def fedlora(network: str, model: Model, run: Played) -> Model:
    """A, B and the head by clipped gradients with FedProx's pull 0.1; A is drawn by the method, B begins as 0."""
    shared = dict(run.states[0].model)
    assert all(not array.any() for name, array in shared.items() if name.endswith(".lora_b"))
    for round in range(2):
        first = {name: torch.tensor(array) for name, array in shared.items()}
        pull = lambda name, gradient, value: gradient + 0.1 * (value - first[name])  # noqa: B023, E731
        sent = []
        for each in members():
            plain = Plain(network, {**model, **shared}, shared, adapting(network, model))
            order = generator(each.device, round).permutation(len(each.train))
            plain.descend(each.train, order, shared, pull, clip=0.5)
            sent.append(plain.state(shared))
        shared = mean(sent)
    return merged(network, model, shared)


def fedsdg(network: str, model: Model, run: Played) -> Model:
    """Eq. 3 to 10; a device that comes later begins with its own first branch and the shared part of that round."""
    shared, own = dict(run.states[0].model), dict[str, Model]()
    for round, devices in enumerate(run.devices):
        changes = []
        for each in members():
            if each.device not in devices:
                continue
            own.setdefault(each.device, branch(network, model, run.states[0], each.device))
            after = gated_steps(network, model, shared, own[each.device], each, round)
            changes.append({name: after[name] - array for name, array in shared.items()})
            own[each.device] = {name: after[name] for name in own[each.device]}
        rows = np.stack([np.concatenate([change[name].ravel() for name in sorted(shared)]) for change in changes])
        middle = rows.mean(axis=0)
        cosines = rows @ middle / (np.linalg.norm(rows, axis=1) * np.linalg.norm(middle) + 1e-8)
        weights = np.maximum(cosines, 0) / (np.maximum(cosines, 0).sum() + 1e-8)
        steps = {name: sum(w * change[name] for w, change in zip(weights, changes, strict=True)) for name in shared}
        shared = {name: (array + steps[name]).astype(np.float32) for name, array in shared.items()}
    return merged(network, model, shared) | own_of(own)


def branch(network: str, model: Model, state: Any, device: str) -> Model:
    """First branch of a device, drawn from its seed: A_p from N(0, 1/r), B_p from N(0, 0.01^2), gates 0."""
    rng, found = tensors.seeded_rng(state.params["own_seed"], device), Model()
    for layer in ADAPTED[network]:
        out, into = model[f"{layer}.weight"].shape
        found[f"{layer}.own_a"] = rng.normal(0, RANK**-0.5, (into, RANK)).astype(np.float32)
        found[f"{layer}.own_b"] = rng.normal(0, 0.01, (RANK, out)).astype(np.float32)
        found[f"{layer}.gate"] = np.zeros((), np.float32)
    return found


def gated_steps(network: str, model: Model, shared: Model, own: Model, member: Any, round: int) -> Model:
    """One epoch by Adam at three rates: cross entropy + 0.01 sum m + 0.001 |theta_p|^2, gradients clipped to 0.5."""
    plain = Plain(network, {**model, **shared, **own}, {*shared, *own}, adapting(network, model, own=True))
    gates = [plain.values[name] for name in own if name.endswith(".gate")]
    branches = [plain.values[name] for name in own if not name.endswith(".gate")]
    both = [plain.values[name] for name in shared]
    groups = [(both, 0.003), (branches, 0.002), (gates, 0.02)]
    adam = torch.optim.Adam([{"params": some, "lr": rate} for some, rate in groups])
    for rows in batches(generator(member.device, round).permutation(len(member.train))):
        loss = plain.loss(member.train, rows) + 0.01 * sum(torch.sigmoid(gate) for gate in gates)
        loss = loss + 0.001 * sum(each.square().sum() for each in branches)
        moved = [*both, *branches, *gates]
        for value, gradient in zip(moved, torch.autograd.grad(loss, moved, materialize_grads=True), strict=True):
            value.grad = gradient
        nn.utils.clip_grad_norm_(moved, 0.5)
        adam.step()
    return plain.state({*shared, *own})


# -- two copies -----------------------------------------------------------------------------------


class Gates(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Notes where each nonlinearity's input is above 0; or puts 1[noted] * z in place of the nonlinearity."""

    def __init__(self, noted: list[Any] | None = None) -> None:
        super().__init__()
        self.seen, self.noted = list[Any](), noted

    def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called not in (torch.relu, F.relu, F.gelu):
            return called(*args, **(kwargs or {}))
        self.seen.append(args[0] > 0)
        return called(*args, **(kwargs or {})) if self.noted is None else self.noted[len(self.seen) - 1] * args[0]


def fedsq(network: str, model: Model, run: Played) -> Model:
    """h_l = 1[z_l(w_SK) > 0] z_l(w_QK), weight decay 0.01; batch norm of both copies has the job's statistics."""
    frozen = Plain(network, model)
    frozen.module.eval()
    for round in range(2):
        sent = []
        for each in members():
            plain = Plain(network, model)
            for inner in (*frozen.module.modules(), *plain.module.modules()):
                inner._forward_pre_hooks.clear()
                inner.training = inner.training and not isinstance(inner, nn.BatchNorm1d)
            plain.scores = lambda x, plain=plain: dual(frozen, plain, x)  # type: ignore[method-assign]
            decay = lambda name, gradient, value: gradient + 0.01 * value  # noqa: E731
            plain.descend(each.train, generator(each.device, round).permutation(len(each.train)), correct=decay)
            sent.append(plain.state(model))
        model = mean(sent)
    return model


def dual(frozen: Plain, plain: Plain, x: np.ndarray) -> Any:
    with torch.no_grad(), Gates() as gates:
        frozen.module(torch.tensor(x))
    with Gates(gates.seen):
        return plain.module(torch.tensor(x))


# -- layers of clusters ---------------------------------------------------------------------------


def units_of(network: str) -> dict[str, tuple[str, ...]]:
    """Layers; parameters of the network itself go with the first one."""
    found = dict(LAYERS[network])
    root = next((found.pop(layer) for layer in ROOTS if layer in found), ())
    first = next(iter(found))
    return {**found, first: (*found[first], *root)}


def fingerprint(x: np.ndarray) -> np.ndarray:
    """Two leading left singular vectors of the examples as columns, the largest entry of each positive."""
    left = np.linalg.svd(x.astype(np.float64).T, full_matrices=False)[0][:, :2]
    return left * np.sign(left[np.abs(left).argmax(axis=0), [0, 1]])


def closest() -> dict[str, int]:
    """Device -> cluster: of three devices the two that are closest are one of two clusters, numbered by device."""
    marks = [fingerprint(each.train.x) for each in members()]
    pair = min(itertools.combinations(range(3), 2), key=lambda two: np.square(marks[two[0]] - marks[two[1]]).sum())
    return {f"dev-{index}": int((index in pair) != (0 in pair)) for index in range(3)}


def genefl(network: str, model: Model, run: Played) -> Model:
    """Eq. 4 to 12 with lambda_1 = 0.5, lambda_2 = 0.05, gamma = 0.5; one layer is sent, by the lowest score."""
    units, clusters = units_of(network), closest()
    sizes = {layer: sum(model[name].size for name in names) for layer, names in units.items()}
    inner = [layer for layer in units if layer != HEAD.get(network, "head")]
    theta: dict[str, Model] = {}
    told: dict[int, Model] = {0: {}, 1: {}}
    for round in (1, 2, 3):
        sent: dict[int, list[Model]] = {0: [], 1: []}
        for each in members():
            before, rng = theta.get(each.device, model), generator(each.device, round)
            aims = told[clusters[each.device]] if each.device in theta else {}
            elastic = elastic_of(network, before, aims, each)
            if aims:
                rng.permutation(len(each.train))  # of the examples for the Fisher diagonal, here all of them
            strength = {name: sizes[layer] / max(sizes.values()) for layer in units for name in units[layer]}

            def pull(name: str, gradient: Any, value: Any, aims: Any = aims, elastic: Any = elastic) -> Any:
                if name not in aims:
                    return gradient
                smooth = 2 * 0.5 * strength[name] * (value - torch.tensor(aims[name]))  # noqa: B023
                return gradient + smooth + 2 * 0.05 * (value - torch.tensor(elastic[name]))

            plain = Plain(network, before)
            plain.descend(each.train, rng.permutation(len(each.train)), correct=pull)
            theta[each.device] = after = plain.state(model)
            turned = {layer: sizes[layer] * turn(after, before, units[layer]) for layer in inner}
            gene = min(inner, key=lambda layer: turned[layer])
            sent[clusters[each.device]].append({name: after[name] for name in units[gene]})
        for cluster, genes in sent.items():
            for name in {name for gene in genes for name in gene}:
                told[cluster][name] = mean([{name: gene[name]} for gene in genes if name in gene], None)[name]
    return {f"{cluster}/{name}": array for cluster, held in told.items() for name, array in held.items()} | own_of(
        theta
    )


def elastic_of(network: str, before: Model, aims: Model, member: Any) -> Model:
    """theta~ where the Fisher diagonal at theta~, scaled to 0..1 in each tensor, is below 0.5; else Theta."""
    if not aims:
        return {}
    fisher, found = squares(Plain(network, before), member, 1), {}
    for name, aim in aims.items():
        low, high = fisher[name].min(), fisher[name].max()
        scaled = (fisher[name] - low) / (high - low) if high > low else np.zeros_like(aim)
        found[name] = np.where(scaled < 0.5, before[name], aim)
    return found


def turn(after: Model, before: Model, names: Any) -> float:
    """1 - cos of a layer's tensors, in one row."""
    now, then = (
        np.concatenate([some[name].ravel() for name in sorted(names)]).astype(float) for some in (after, before)
    )
    return 1 - float(now @ then / (np.linalg.norm(now) * np.linalg.norm(then)))
