"""FedNova: updates are normalised by each device's effective number of local steps.

Paper: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020 (arXiv 2007.07481), Eq. 7 and section 4. With p_i the share of examples and a_i the sum of
the factors of the tau_i gradients in the local optimizer,

    d_i = (x - y_i) / a_i,   x <- x - (sum_i p_i a_i) sum_i p_i d_i.

a_i is tau_i for plain SGD and (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho.

Deviations: with Nesterov's momentum a_i = tau + rho times that value. a_i ignores weight decay and clipping. Batch norm
statistics are averaged by p_i. The step is computed as one weighted mean of the models and x, so that a round's sum is
one model. The factor n_i / a_i of a model is rounded to float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.core import Aggregation, DeviceUpdate, UpdateError
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, restricted to SGD."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_plain_steps("FedNova requires local steps of equal length")
        if self.optimizer != "sgd":
            raise ValueError(f"optimizer = {self.optimizer!r}: FedNova defines a_i only for SGD; set 'sgd'")


@dataclass(frozen=True)
class FedNovaSums(WeightedSums):
    """Sums weighted by examples: trained tensors over their effective steps, and batch norm statistics."""

    inverse_steps: exact_sums.ExactScalar = exact_sums.ExactScalar()  # sum_i n_i / a_i
    weighted_steps: exact_sums.ExactScalar = exact_sums.ExactScalar()  # sum_i n_i a_i


def effective_steps(steps: float, params: Mapping[str, Any]) -> float:
    """Return a_i, the effective number of local steps with momentum (FedNova, section 4)."""
    rho = params["momentum"]
    if not rho:
        return steps
    heavy = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return steps + rho * heavy if params["nesterov"] else heavy


def validate_site_sums(state: NetworkState, total: FedNovaSums, weight: float) -> None:
    """Raise UpdateError if a site's sums are impossible for the total weight of its devices."""
    fedavg.validate_site_sums(state, total, weight)
    if weight and not (0 < float(total.inverse_steps) <= weight <= float(total.weighted_steps)):
        raise UpdateError("the site's sums of n_i / a_i and n_i a_i are impossible for devices with at least one step")


def fold(state: NetworkState, accumulator: FedNovaSums | None, update: DeviceUpdate) -> FedNovaSums:
    """Return the sums with an update added in place, trained tensors divided by the effective steps."""
    weight, a = update.weight, effective_steps(local_training.reported_steps(update), state.params)
    model, trained_names = update.bundles.get("model", {}), set(state.trained_names())
    tensors.require_addable(model, state.model)
    accumulator = accumulator or FedNovaSums()
    total = {
        name: exact_sums.add_to_sum(accumulator.total.get(name), array, weight / a if name in trained_names else weight)
        for name, array in model.items()
    }
    inverse_steps = accumulator.inverse_steps.add_numbers(weight / a)
    weighted_steps = accumulator.weighted_steps.add_numbers(weight * a)
    return FedNovaSums(total, accumulator.weights.add_numbers(weight), inverse_steps, weighted_steps)


def step(state: NetworkState, total: FedNovaSums | None) -> NetworkState:
    """Return the state moved along the mean normalised update (FedNova, Eq. 7), with mean statistics."""
    if total is None or total.weight == 0:
        return state
    model = total.mean()
    effective = float(total.weighted_steps) / total.weight
    for name in state.trained_names():
        model_share = 1 - effective * float(total.inverse_steps) / total.weight
        model[name] = model_share * state.model[name].astype(np.float64) + effective * model[name]
    return replace(state, model=tensors.cast_like(model, state.model))


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2007.07481",
    params=Params,
    aggregation=Aggregation(
        fold,
        accumulator=lambda state: FedNovaSums,
        schema=local_training.full_model_schema,
        check_sums=validate_site_sums,
    ),
    step=step,
    traits=replace(fedavg.METHOD.traits, unequal_epochs=True),
)
