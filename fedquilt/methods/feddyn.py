"""FedDyn: a dynamic regulariser aligns the devices' minima with that of the global objective.

Paper: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (arXiv 2111.04263), Algorithm 1. With
theta the received model, a device approaches

    theta_k = argmin L_k(theta_k) - <g_k, theta_k> + alpha/2 |theta_k - theta|^2,
    g_k <- g_k - alpha (theta_k - theta),

and the server h <- h - alpha/m sum_k (theta_k - theta),   theta <- mean theta_k - h / alpha.

Deviations: the minimum is approached by `epochs` of mini-batches, as in the authors' code. That code divides alpha by
each device's share of the examples, and adds it to the weight decay. Here alpha is the same for all devices, as in the
paper. m is the number of devices that have taken part so far, unless `devices` is given. Batch norm statistics are
averaged. If a device has lost its g_k, h still contains the old one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = replace(fedavg.METHOD.traits, private_data="its slope g_k", model_copies=2)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the strength of the regulariser and the number of devices."""

    alpha: Annotated[float, Meta(gt=0)] = 0.1  # alpha: strength of the regulariser
    devices: Annotated[int, Meta(ge=0)] = 0  # m: devices in the federation; 0: those that have taken part


@dataclass(frozen=True)
class State(NetworkState):
    """Global model, and h, the mean of all devices' slopes g_k."""

    h: dict[str, np.ndarray]
    participants: int  # devices that have taken part


@dataclass(frozen=True)
class FedDynSums(WeightedSums):
    """Sum of a round's models, and the number of its new devices."""

    new_devices: int = 0


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with h = 0."""
    initial = fedavg.init(bundle, params, seed)
    h = {name: np.zeros_like(initial.model[name]) for name in initial.trained_names()}
    return State(**vars(initial), h=h, participants=0)


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train, with two more copies of the model in memory."""
    task_spec = local_training.training_task_spec(state, {"model": state.model}, TRAITS)
    return replace(task_spec, params={**task_spec.params, "trained": sorted(state.h)})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train with the regulariser's gradient, alpha (theta_k - theta) - g_k. The device keeps the new g_k."""
    received, alpha = site.load("model"), task.params["alpha"]
    zeros = {name: np.zeros_like(received[name]) for name in task.params["trained"]}
    tensors.require_matching(site.private_state or zeros, zeros)
    slope = site.private_state or zeros
    regulariser = core.Hooks(
        correct_gradient=lambda gradient, value, anchors: (
            gradient - anchors["slope"] + alpha * (value - anchors["start"])
        ),
        anchors={"slope": slope},
    )
    client_result = local_training.train_from(task, site, received, regulariser)
    model = client_result.bundles["model"]
    new_slope = {name: slope[name] - np.float32(alpha) * (model[name] - received[name]) for name in slope}
    metrics = {**client_result.metrics, core.NEW_DEVICE: float(not site.private_state)}
    return replace(client_result, weight=1.0, metrics=metrics, private_state=new_slope)


def validate_update(state: State, update: core.DeviceUpdate) -> None:
    """Raise UpdateError if an update is invalid for FedAvg, or its weight or metric "new" is wrong."""
    if (is_new := update.metrics.get(core.NEW_DEVICE)) not in (0.0, 1.0):
        raise core.UpdateError(f"{update.device} does not report whether it is new (new = {is_new})")
    local_training.require_unit_weight(update)
    fedavg.validate_update(state, update)


def validate_site_sums(state: State, total: FedDynSums, weight: float) -> None:
    """Raise UpdateError if a site's sums are impossible for the total weight of its devices."""
    fedavg.validate_site_sums(state, total, weight)
    if not 0 <= total.new_devices <= weight:
        raise core.UpdateError(f"{total.new_devices} of {weight:g} devices are reported as new")


def fold(state: State, accumulator: FedDynSums | None, update: core.DeviceUpdate) -> FedDynSums:
    """Return the sums with an update's model added in place, with the same weight for every device."""
    validate_update(state, update)
    sums = fedavg.fold(state, accumulator, update)
    new_devices = accumulator.new_devices if accumulator else 0
    return FedDynSums(sums.total, sums.weights, new_devices + int(update.metrics[core.NEW_DEVICE]))


def step(state: State, total: FedDynSums | None) -> State:
    """Return the state with a new h, and with the mean of the models moved by -h / alpha."""
    if total is None or total.weight == 0:
        return state
    weight, alpha, mean = total.weight, state.params["alpha"], total.mean()
    # A site's sums may count too few new devices.
    device_count = max(state.participants + total.new_devices, math.ceil(weight))
    devices_before = max(state.participants, state.params["devices"])
    devices_after = max(device_count, state.params["devices"])
    h = {}
    for name, old_h in state.h.items():
        change = mean[name] - state.model[name].astype(np.float64)
        new_h = np.asarray((devices_before * old_h.astype(np.float64) - alpha * weight * change) / devices_after)
        mean[name], h[name] = np.asarray(mean[name] - new_h / alpha), new_h.astype(old_h.dtype)
    return replace(state, model=tensors.cast_like(mean, state.model), h=h, participants=device_count)


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2111.04263",
    params=Params,
    state=State,
    init=init,
    send=send,
    work=work,
    aggregation=core.Aggregation(
        fold,
        accumulator=lambda state: FedDynSums,
        schema=local_training.full_model_schema,
        check_update=validate_update,
        check_sums=validate_site_sums,
    ),
    step=step,
)
