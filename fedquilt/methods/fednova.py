"""FedNova: devices that take unequal numbers of steps count by their direction, not by their distance.

Paper: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020 (arXiv 2007.07481), Eq. 7 and section 4: with p_i the share of examples and a_i the sum of
the factors that the local optimizer gives to each of its tau_i gradients,

    d_i = (x - y_i) / a_i,   x <- x - (sum_i p_i a_i) sum_i p_i d_i.

a_i is tau_i for plain SGD and (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho.

Deviations: with Nesterov's momentum a_i = tau + rho times that. a_i ignores weight decay and
clipping. Batch norm's statistics are averaged by p_i. Written as one weighted mean of the models
and x, so that a round's sum is one model. A model's factor n_i / a_i is rounded to float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt import exact, tensors
from fedquilt.core import Contribution, UpdateError, adds_up, expects
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters; a_i is known for SGD only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "sgd":
            raise ValueError("FedNova knows how far sgd goes in a number of steps, not how far adam does")


@dataclass(frozen=True)
class Sum(fedavg.Sum):
    """Sums: n_i y_i / a_i of learned tensors, n_i y_i of statistics, and the three divisors."""

    inverse: exact.Number = exact.Number()  # sum_i n_i / a_i
    lengths: exact.Number = exact.Number()  # sum_i n_i a_i


def length(steps: float, params: Mapping[str, Any]) -> float:
    """a_i: distance of `steps` steps of the local optimizer, in plain gradients."""
    rho = params["momentum"]
    if not rho:
        return steps
    heavy = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return steps + rho * heavy if params["nesterov"] else heavy


def sound(state: fedavg.State, total: Sum, weight: float) -> None:
    """Check a site's sums; raises UpdateError as `fedavg.sound`, and where the divisors are not positive."""
    fedavg.sound(state, total, weight)
    if weight and not (0 < float(total.inverse) <= weight <= float(total.lengths)):
        raise UpdateError("the sums of 1 / a_i and of a_i are none of devices that took a step or more each")


@adds_up(Sum, sound)
@expects(fedavg.whole)
def fold(state: fedavg.State, so_far: Sum | None, update: Contribution) -> Sum:
    """Add an update to the sums, with trained tensors divided by the device's number of effective steps."""
    weight, a = update.weight, length(fedavg.steps_of(update), state.params)
    model, learned = update.bundles.get("model", {}), set(fedavg.trained_names(state))
    tensors.require_same(model, state.model)
    so_far = so_far or Sum()
    total = {
        name: exact.add(so_far.total.get(name), array, weight / a if name in learned else weight)
        for name, array in model.items()
    }
    inverse, lengths = so_far.inverse.plus(weight / a), so_far.lengths.plus(weight * a)
    return Sum(total, so_far.weights.plus(weight), inverse, lengths)


def step(state: fedavg.State, total: Sum | None) -> fedavg.State:
    """Move the model along the mean normalised update. Replace other tensors by their mean."""
    if total is None or total.weight == 0:
        return state
    model = fedavg.mean(total)
    effective = float(total.lengths) / total.weight
    for name in fedavg.trained_names(state):
        kept = 1 - effective * float(total.inverse) / total.weight
        model[name] = kept * state.model[name].astype(np.float64) + effective * model[name]
    return replace(state, model=fedavg.cast(model, state.model))


METHOD = replace(fedavg.METHOD, paper="arXiv 2007.07481", params=Params, fold=fold, step=step, uneven=True)
