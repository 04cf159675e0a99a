"""FedOpt: the server applies an optimizer to the devices' mean change.

Papers: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2, for
adagrad, adam and yogi. Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification (arXiv 1909.06335), section 3, for sgd (server momentum, FedAvgM). With
D the mean of y_i - x:

    sgd:      m <- beta1 m + D,                                               x <- x + eta_g m
    others:   m <- beta1 m + (1 - beta1) D,                                   x <- x + eta_g m / (sqrt(v) + tau)
    adagrad:  v <- v + D^2
    adam:     v <- beta2 v + (1 - beta2) D^2
    yogi:     v <- v - (1 - beta2) D^2 sign(v - D^2)

Deviations: the mean is weighted by examples, as FedAvg's. v begins at tau^2, the least that Algorithm 2
allows. Bias is not corrected, as in the paper. Batch norm's statistics are averaged: no
optimizer may make a variance negative.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fedquilt.arrays import tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.core import Bundle
from fedquilt.methods import fedavg
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of the server's optimizer."""

    server: Literal["sgd", "adagrad", "adam", "yogi"] = "adam"
    server_lr: Annotated[float, Meta(gt=0)] = 0.01  # eta_g; 1 with sgd and beta1 = 0 is FedAvg
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9  # of the mean change; 0 is the paper's for adagrad
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99  # of its square: adam and yogi
    tau: Annotated[float, Meta(gt=0)] = 1e-3  # smaller values adapt more


@dataclass(frozen=True)
class State(NetworkState):
    """Global model, and the server optimizer's moments of the trained tensors, float32."""

    first: dict[str, np.ndarray]  # m
    second: dict[str, np.ndarray]  # v; empty with sgd


def init(bundle: Bundle, params: Params, seed: int) -> State:
    """Return the first state, with first moments of 0 and second moments of tau^2."""
    initial = fedavg.init(bundle, params, seed)
    names = initial.trained_names()
    first = {name: np.zeros_like(initial.model[name]) for name in names}
    second = {name: np.full_like(initial.model[name], params.tau**2) for name in names}
    return State(**vars(initial), first=first, second={} if params.server == "sgd" else second)


def step(state: State, total: WeightedSums | None) -> State:
    """Return the state after a server step along the mean change (Reddi et al., Algorithm 2)."""
    if total is None or total.weight == 0:
        return state
    params, model = state.params, total.mean()
    eta, beta1 = params["server_lr"], params["beta1"]
    first, second = {}, {}
    for name in state.first:
        x, moment = state.model[name].astype(np.float64), state.first[name].astype(np.float64)
        change = model[name] - x
        if params["server"] == "sgd":
            first[name] = beta1 * moment + change
            # x + eta m, in a form that equals the mean bit for bit if eta = 1 and beta1 = 0
            model[name] = (1 - eta) * x + eta * (model[name] + beta1 * moment)
        else:
            first[name] = beta1 * moment + (1 - beta1) * change
            second[name] = _compute_second_moment(params, state.second[name].astype(np.float64), np.square(change))
            model[name] = x + eta * first[name] / (np.sqrt(second[name]) + params["tau"])
    return replace(
        state,
        model=tensors.cast_like(model, state.model),
        first=tensors.cast_like(first, state.model),
        second=tensors.cast_like(second, state.model),
    )


def _compute_second_moment(params: dict[str, Any], v: np.ndarray, square: np.ndarray) -> np.ndarray:
    if params["server"] == "adagrad":
        return v + square
    if params["server"] == "adam":
        return params["beta2"] * v + (1 - params["beta2"]) * square
    return v - (1 - params["beta2"]) * square * np.sign(v - square)


METHOD = replace(fedavg.METHOD, paper="arXiv 2003.00295", params=Params, state=State, init=init, step=step)
