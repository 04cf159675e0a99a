"""Robust aggregation: Krum, coordinate-wise trimmed mean, coordinate-wise median, in place of FedAvg's mean.

Papers: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017
(arXiv 1703.02757), sections 4 and 5: with n updates of which f may be anything, Krum takes the one with the least
sum of squared distances to its n - f - 2 nearest others; Multi-Krum the mean of the m best. Yin et al.,
Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018 (arXiv 1803.01498),
Definitions 1 and 2: of every value the median, or the mean without the f largest and the f smallest.

These rules need all updates of a round at once: the coordinator holds up to `most` models. Of more devices
that many count, drawn by the job's seed. Other methods that need all updates at once hold them likewise (`hold`).

Deviations: models replace gradients, as usual with local epochs. f is a share of the devices that answered, rounded
down. No update counts more for the examples that it claims. Where Krum's n > 2 f + 2 does not hold, a round changes
nothing, and the log shows it. Counters of batch normalisation take the median: an attacker could set the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fedquilt import tensors
from fedquilt.core import Bundle, Contribution, Tensors, derive_seed, expects
from fedquilt.methods import fedavg


def wrong(share: float, updates: int) -> int:
    """f: number of updates that may be arbitrary, of `updates` in all."""
    return int(share * updates + 1e-9)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the rule with its assumed attackers."""

    rule: Literal["krum", "trimmed_mean", "median"] = "krum"
    attackers: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2  # f / n: share of a round's updates that may be arbitrary
    chosen: Annotated[int, Meta(ge=0)] = 1  # m: best updates to average; 1: Krum; 0: all but f (Multi-Krum)
    most: Annotated[int, Meta(ge=1)] = 32  # updates of a round that are held at once, each as large as the model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "krum" and self.most <= 2 * wrong(self.attackers, self.most) + 2:
            raise ValueError("most: Krum wants more than 2 f + 2 updates, and f is `attackers` times as many")


@dataclass(frozen=True)
class State(fedavg.State):
    """Global model, and sentences on the last round."""

    seed: int
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """Updates of a round by device, and the number of further devices that answered."""

    sent: Mapping[str, Mapping[str, np.ndarray]]
    left_out: int = 0

    def told(self, what: str) -> list[str]:
        """One sentence if any updates were left out, else none."""
        return [f"{self.left_out} {what} beyond the {len(self.sent)} held at once were left out"] * bool(self.left_out)


def hold(so_far: Held | None, update: Contribution, sent: Tensors, most: int, seed: int) -> Held:
    """Add a device's tensors; beyond `most`, those drawn by `seed` stay, whatever the order of arrival."""
    held = {**(so_far.sent if so_far else {}), update.device: sent}
    left_out = so_far.left_out if so_far else 0
    if len(held) <= most:
        return Held(held, left_out)
    last = max(sorted(held), key=lambda device: derive_seed(seed, "held", update.round, device))
    return Held({device: each for device, each in held.items() if device != last}, left_out + 1)


def init(bundle: Bundle, params: Any, seed: int) -> State:
    """Start from the bundle's model; the seed draws which updates are held."""
    return State(**vars(fedavg.init(bundle, params, seed)), seed=seed)


@expects(fedavg.whole)
def fold(state: State, so_far: Held | None, update: Contribution) -> Held:
    """Hold an update, up to `most` of a round."""
    model = update.bundles.get("model", {})
    tensors.require_same(model, state.model)
    return hold(so_far, update, model, state.params["most"], state.seed)


def step(state: State, total: Held | None) -> State:
    """Replace the model by the rule's choice or mean of the updates held."""
    if total is None:
        return state
    devices, rule = sorted(total.sent), state.params["rule"]
    models = [total.sent[device] for device in devices]
    f = wrong(state.params["attackers"], len(models))
    told = total.told("updates")
    if rule == "krum":
        if len(models) <= 2 * f + 2:
            few = f"{len(models)} updates are too few for Krum with {f} attackers: the round changed nothing"
            return replace(state, told=(*told, few))
        best = np.argsort(scores(models, f), kind="stable")[: state.params["chosen"] or len(models) - f]
        told.append(f"Krum took {', '.join(devices[i] for i in sorted(best))}")
        models = [models[i] for i in sorted(best)]
    cut = {"krum": 0, "trimmed_mean": f, "median": (len(models) - 1) // 2}[rule]
    merged = {name: middle(np.stack([model[name] for model in models]), cut) for name in state.model}
    return replace(state, model=fedavg.cast(merged, state.model), told=tuple(told))


def scores(models: Sequence[Tensors], f: int) -> np.ndarray:
    """Krum score of each model, (n,): sum of its squared distances to its n - f - 2 nearest others."""
    distances = np.zeros((len(models), len(models)))
    for i, one in enumerate(models):
        for j in range(i):
            gaps = (one[name].astype(np.float64) - models[j][name] for name in one if one[name].dtype.kind == "f")
            distances[i, j] = distances[j, i] = sum(float(np.square(gap).sum()) for gap in gaps)
    near: np.ndarray = np.sort(distances, axis=1)[:, 1 : len(models) - f - 1]  # the first is the distance to itself
    return near.sum(axis=1)


def middle(values: np.ndarray, cut: int) -> np.ndarray:
    """Mean over axis 0 without the `cut` largest and smallest, value by value; of counters the upper median."""
    ordered = np.sort(values, axis=0)
    if values.dtype.kind in "iu":
        return ordered[len(values) // 2]
    return ordered[cut : len(values) - cut].mean(axis=0, dtype=np.float64)


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 1703.02757, arXiv 1803.01498",
    params=Params,
    state=State,
    init=init,
    fold=fold,
    step=step,
    explain=lambda state: state.told,
)
