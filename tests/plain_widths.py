"""Rules, in plain torch, of methods that train units of hidden layers: parts by width, and masks; as in `plain_rules`.

Which units belong together in each awkward network is written down here, by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from plain_parts import LAYERS, ROOTS, names_of, statistics
from plain_training import (
    SEED,
    SIZES,
    Model,
    Plain,
    Played,
    batches,
    generator,
    local,
    members,
    own_of,
)
from torch import nn

from fedquilt.arrays import tensors
from fedquilt.core import derive_seed

UNITS: dict[str, dict[str, tuple[str, ...]]] = {
    "root_parameter": {"second.weight": ("a", ""), "second.bias": ("a",), "head.weight": ("", "a")},
    "tied": {
        **dict.fromkeys(("first.weight", "first.bias", "norm.weight", "norm.bias"), ("a",)),
        **dict.fromkeys(("norm.running_mean", "norm.running_var"), ("a",)),
        "second.weight": ("a", "a"),
        "head.weight": ("", "a"),
    },
    "maps": {
        **{f"norm1.{leaf}": ("a",) for leaf in ("weight", "bias", "running_mean", "running_var")},
        **{f"norm2.{leaf}": ("b",) for leaf in ("weight", "bias", "running_mean", "running_var")},
        "first.weight": ("a",),
        "first.bias": ("a",),
        "second.weight": ("b", "a"),
        "head.weight": ("", "b"),
    },
}
"""Tensor -> group of hidden units along its first axis, and along its second; other tensors stay whole."""

WIDTHS = {"root_parameter": {"a": 8}, "tied": {"a": 8}, "maps": {"a": 8, "b": 16}}


# -- parts by width -------------------------------------------------------------------------------

RATES = {"dev-0": 1.0, "dev-1": 0.5, "dev-2": 0.25}
DEVICES = tuple(RATES)
BUDGETS = ("64GB", "3GB", "1500MB")
BY_TIER = (0.25, 0.25, 0.5, 0.5, 1.0)


def marked(network: str, model: Model, kept: Mapping[str, np.ndarray]) -> Model:
    """1 for entries of kept units, else 0; groups that are not in `kept` are whole."""
    found = {name: np.ones(array.shape, np.float32) for name, array in model.items()}
    for name, groups in UNITS[network].items():
        for axis, group in enumerate(groups):
            if group in kept:
                along = np.isin(np.arange(model[name].shape[axis]), kept[group]).astype(np.float32)
                found[name] *= along.reshape([-1 if at == axis else 1 for at in range(model[name].ndim)])
    return found


def leading(network: str, rate: float) -> dict[str, np.ndarray]:
    return {group: np.arange(int(np.ceil(rate * width))) for group, width in WIDTHS[network].items()}


@dataclass
class Width:
    """One method's parts by width.

    Args:
        kept: rate -> units that are left in each group; whole groups are left out.
        scaled: whether a narrower layer's outputs count by the inverse of its share.
        still: tensors that nobody trains.
        masked: whether scores of classes that a device lacks are 0, and their rows of the head do not count.
    """

    network: str
    kept: Callable[[float], dict[str, np.ndarray]]
    scaled: bool = False
    still: frozenset[str] = frozenset()
    masked: bool = False
    clip: float = 0.0
    own: dict[float, Model] = field(default_factory=dict)  # rate -> batch norm's buffers

    def marks(self, model: Model, rate: float) -> Model:
        return marked(self.network, model, self.kept(rate))

    def making(self, model: Model, rate: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
        marks, factors = self.marks(model, rate), dict.fromkeys(model, 1.0)
        for name, groups in UNITS[self.network].items():
            layer = f"{name.rpartition('.')[0]}.weight"
            if self.scaled and groups[0] and model[layer].ndim > 1:
                factors[name] = model[layer].shape[0] / len(self.kept(rate).get(groups[0], range(len(model[layer]))))
        return lambda values: {
            name: value * torch.tensor(marks[name]) * factors[name] for name, value in values.items()
        }

    def play(self, model: Model, train: Callable[[Plain, Any, float, int], None]) -> Model:
        norms = {name for name in model if name.startswith("norm") and name in statistics(self.network)}
        parts = {rate for rate in RATES.values() if rate < 1 and self.kept(rate)}
        self.own = {rate: {name: model[name] for name in norms} for rate in parts}
        trained = model.keys() - self.still
        for round in range(2):
            total, count = dict.fromkeys(model, 0.0), dict.fromkeys(model, 0.0)
            counters, before = dict(model), dict(self.own)
            for each in members():
                rate = RATES[each.device] if RATES[each.device] in parts else 1.0
                begun = {**model, **before.get(rate, {})}
                plain = Plain(self.network, begun, trained, self.making(model, rate))
                train(plain, each, rate, round)
                after, marks = plain.state(model), self.marks(model, rate)
                if self.masked:
                    held = np.isin(np.arange(3), each.train.y).astype(np.float32)
                    marks["head.weight"], marks["head.bias"] = marks["head.weight"] * held[:, None], held
                if rate in parts:
                    self.own[rate] = {name: after[name] if name in trained else model[name] for name in norms}
                for name in model.keys() - (norms if rate in parts else set()):
                    total[name] = total[name] + len(each.train) * marks[name] * after[name].astype(float)
                    count[name] = count[name] + len(each.train) * marks[name]
                    counters[name] = np.maximum(counters[name], after[name])
            for name in trained:
                if model[name].dtype.kind in "iu":
                    model = {**model, name: counters[name]}
                else:
                    fresh = np.divide(total[name], count[name], out=np.array(model[name], float), where=count[name] > 0)
                    model = {**model, name: fresh.astype(np.float32)}
        return self.settled(model)

    def settled(self, model: Model) -> Model:
        """Statistics of each width over all devices' examples, each normalised by its device's own."""
        found = dict(model)
        for rate in (1.0, *self.own):
            moments: dict[str, Any] = {}
            for each in members():
                plain = Plain(self.network, {**model, **self.own.get(rate, {})}, made=self.making(model, rate))
                plain.module.eval()
                for path, inner in plain.module.named_modules():
                    inner._forward_pre_hooks.clear()
                    if isinstance(inner, nn.BatchNorm1d) and f"{path}.running_mean" not in self.still:
                        inner.training = True
                        inner.register_forward_pre_hook(self.noting(path, moments, len(each.train)))
                plain.scores(each.train.x)
            for path, (first, second) in moments.items():
                mean_, square = first / sum(SIZES), second / sum(SIZES)
                fresh = {f"{path}.running_mean": mean_, f"{path}.running_var": square - mean_**2}
                into = found if rate == 1 else self.own[rate]
                into |= {name: array.numpy().astype(np.float32) for name, array in fresh.items()}
        return found

    @staticmethod
    def noting(path: str, moments: dict[str, Any], examples: int) -> Any:
        def note(layer: Any, inputs: Any) -> None:
            x = inputs[0].detach().double().transpose(0, 1).flatten(1)  # (channels, values)
            first, second = examples * x.mean(1), examples * x.square().mean(1)
            before = moments.get(path, (0.0, 0.0))
            moments[path] = (before[0] + first, before[1] + second)

        return note

    def narrow(self) -> Model:
        """Own statistics of each width, in its own shapes."""
        found = {}
        for rate, held in self.own.items():
            for name, array in held.items():
                group = UNITS[self.network].get(name, ("",))[0]
                found[f"{rate:g}/{name}"] = array[self.kept(rate)[group]] if group in self.kept(rate) else array
        return found


def order_of(member: Any, round: int) -> np.ndarray:
    return generator(member.device, round).permutation(len(member.train))


def heterofl(network: str, model: Model, run: Played) -> Model:
    """Leading ceil(r C) units, outputs times 1 / r, absent classes' scores 0; gradients clipped to 0.5."""
    width = Width(network, lambda rate: {} if rate == 1 else leading(network, rate), scaled=True, masked=True)

    def train(plain: Plain, member: Any, rate: float, round: int) -> None:
        held = torch.tensor(np.isin(np.arange(3), member.train.y).astype(np.float32))
        scores = plain.scores
        plain.scores = lambda x: scores(x) * held  # type: ignore[method-assign]
        plain.descend(member.train, order_of(member, round), clip=0.5)

    return width.play(model, train) | width.narrow()


def fjord(network: str, model: Model, run: Played) -> Model:
    """Each mini-batch trains a width drawn among those up to the device's, whose steps alone count in statistics."""
    width = Width(network, lambda rate: {} if rate == 1 else leading(network, rate))

    def train(plain: Plain, member: Any, rate: float, round: int) -> None:
        draws = tensors.seeded_rng(derive_seed(SEED, "local", round, member.device), "widths")
        rates = [each for each in (0.25, 0.5, 1.0) if each <= rate]
        for rows in batches(order_of(member, round)):
            drawn = rates[int(draws.integers(len(rates)))]
            plain.made = width.making(model, drawn)
            for inner in plain.module.modules():
                if isinstance(inner, nn.BatchNorm1d):
                    inner.momentum = 1 - 0.9 ** len(rates) if drawn == rate else 0.0
            plain.descend(member.train, rows)

    return width.play(model, train) | width.narrow()


def fedlps(network: str, model: Model, run: Played) -> Model:
    """The first half of the layers is still; of the others' units those with the largest sums of |w| are trained."""
    layers = [*LAYERS[network]]
    encoder = layers[: int(0.5 * len(layers))]
    still = names_of(network, encoder)
    still |= {name for name in statistics(network) if name.startswith(("norm.", "norm1.")) and "first" in encoder}
    still |= {"seen"} & model.keys() if layers[0] in ROOTS else set()  # of the module whose parameter is still
    sums = {
        group: sum(
            np.abs(model[name].astype(float)).reshape(len(model[name]), -1).sum(1)
            for name, groups in UNITS[network].items()
            if groups[0] == group and model[name].ndim > 1
        )
        for group in WIDTHS[network]
    }
    whole = {UNITS[network][name][0] for name in still if name in UNITS[network]}

    def kept(rate: float) -> dict[str, np.ndarray]:
        count = {group: int(np.ceil(rate * width)) for group, width in WIDTHS[network].items()}
        free = [group for group in count if group not in whole and rate < 1]
        return {group: np.sort(np.argsort(-sums[group], kind="stable")[: count[group]]) for group in free}

    width = Width(network, kept, still=frozenset(still))

    def train(plain: Plain, member: Any, rate: float, round: int) -> None:
        plain.descend(member.train, order_of(member, round), plain.values.keys() - still)

    return width.play(model, train) | width.narrow()


# -- masks ----------------------------------------------------------------------------------------


def by_group(network: str, neurons: Any) -> dict[str, Any]:
    """Values of all hidden units by group."""
    parts = np.cumsum([0, *WIDTHS[network].values()])
    return {group: neurons[parts[at] : parts[at + 1]] for at, group in enumerate(WIDTHS[network])}


def covered(network: str, model: Model, neurons: np.ndarray) -> Model:
    return marked(network, model, {group: np.flatnonzero(each) for group, each in by_group(network, neurons).items()})


def reading(network: str, mask: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Weights whose inputs are multiplied by the mask of the units that they read."""
    masks = by_group(network, mask)

    def made(values: dict[str, Any]) -> dict[str, Any]:
        found = dict(values)
        for name, groups in UNITS[network].items():
            if len(groups) > 1 and groups[1]:
                found[name] = values[name] * masks[groups[1]].reshape(1, -1, *[1] * (values[name].ndim - 2))
        return found

    return made


def averaged(model: Model, sent: list[Model], marks: list[Model]) -> Model:
    """x <- x - 0.5 (x - sum n x m / sum n m) where any mask covers the entry; of whole numbers the largest."""
    found = {}
    for name, before in model.items():
        each = np.stack([y[name] for y in sent])
        if before.dtype.kind in "iu":
            found[name] = each.max(0)
            continue
        weight = np.stack([n * m[name] for n, m in zip(SIZES, marks, strict=True)]).astype(float)
        middle = np.divide((weight * each).sum(0), weight.sum(0), out=np.array(before, float), where=weight.sum(0) > 0)
        found[name] = (before - 0.5 * (before - middle)).astype(np.float32)
    return found


def pull_to(model: Model, marks: Model) -> Any:
    """FedProx's gradient 0.1 (x - x_g) on covered entries."""
    first, held = ({name: torch.tensor(array) for name, array in some.items()} for some in (model, marks))
    return lambda name, gradient, value: gradient + 0.1 * (value - first[name]) * held[name]


def fedavg_after(network: str, model: Model, round: int) -> Model:
    """The round after the warm-up: FedProx on everything."""
    whole = marked(network, model, {})
    sent = [local(network, model, each, round, pull_to(model, whole)) for each in members()]
    return averaged(model, sent, [whole] * len(sent))


def fedpews(network: str, model: Model, run: Played) -> Model:
    """Two rounds of Procedures I and II, Eq. 4 to 8, lambda = 2, then one without masks."""
    units = sum(WIDTHS[network].values())
    scores = {each.device: np.full(units, 0.3, np.float32) for each in members()}
    published: dict[str, np.ndarray] = {}
    for round in range(2):
        sent, marks, fresh = [], [], dict(published)
        for each in members():
            known = [theta for name, theta in published.items() if name != each.device] or [np.full(units, 0.5)]
            others = np.mean(known, axis=0).astype(np.float32)
            rng = generator(each.device, round)
            after, scores[each.device] = procedures(network, model, scores[each.device], others, each, rng)
            theta = (1 / (1 + np.exp(-scores[each.device].astype(float)))).astype(np.float32)
            sent.append(after)
            marks.append(covered(network, model, rng.random(units) < theta))
            fresh[each.device] = theta.astype(np.float16).astype(float)
        model, published = averaged(model, sent, marks), fresh
    return fedavg_after(network, model, 2) | own_of({device: {"scores": each} for device, each in scores.items()})


def procedures(
    network: str, model: Model, scores: np.ndarray, others: np.ndarray, member: Any, rng: np.random.Generator
) -> tuple[Model, np.ndarray]:
    """Tensors and scores after one epoch, in which each mini-batch moves the scores, then the weights."""
    order, s, given = rng.permutation(len(member.train)), torch.tensor(scores), torch.tensor(others)
    with torch.random.fork_rng():
        torch.manual_seed(int(rng.integers(2**53)))  # as the engine does, before it builds the network
        plain = Plain(network, model)
        for rows in batches(order):
            held = {name: value.clone() for name, value in plain.module.named_buffers()}
            theta = torch.sigmoid(s)
            mask = (torch.rand(len(s)) < theta).float().requires_grad_()
            plain.made = reading(network, mask)
            (slope,) = torch.autograd.grad(plain.loss(member.train, rows), mask)
            s = s - 0.1 * (slope - 2 * 2.0 * (theta - given)) * theta * (1 - theta)
            for name, value in plain.module.named_buffers():  # Procedure I moves scores and nothing else
                value.copy_(held[name])
            mask = (torch.rand(len(s)) < torch.sigmoid(s)).float()
            plain.made = reading(network, mask)
            plain.descend(member.train, rows, correct=pull_to(model, covered(network, model, mask.numpy())))
    return plain.state(model), s.numpy()


def fedpews_fixed(network: str, model: Model, run: Played) -> Model:
    """Two rounds in which each device trains one half of every group of units, then one of the whole network."""
    for round in range(2):
        sent, marks = [], []
        for index, each in enumerate(members()):
            halves = {group: np.arange(width) // (width // 2) for group, width in WIDTHS[network].items()}
            mark = marked(network, model, {group: np.flatnonzero(half == index % 2) for group, half in halves.items()})
            held = {name: torch.tensor(each) for name, each in mark.items()}
            made = lambda values: {name: value * held[name] for name, value in values.items()}  # noqa: B023, E731
            plain = Plain(network, model, made=made)
            plain.descend(each.train, order_of(each, round), correct=pull_to(model, mark))
            sent.append(plain.state(model))
            marks.append(mark)
        model = averaged(model, sent, marks)
    return fedavg_after(network, model, 2)
