"""FedLP: each device sends each layer with probability p, and senders' layers are averaged.

Paper: Zhu et al., FedLP: Layer-wise Pruning Mechanism for Communication-Computation Efficient Federated
Learning, ICC 2023 (arXiv 2303.06360), the homogeneous scheme. Layer l of device k is kept with probability p, and

    w^l = sum_k n_k w_k^l / sum_k n_k   over the devices that kept the layer, or unchanged if none did.

Deviations: layers are dropped on the device, before the upload (the authors' code drops them on the server). A layer is
a weight tensor with its bias, its normalisation and the statistics of the normalisation. Every device trains all
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the probability that a layer is sent."""

    keep: Annotated[float, Meta(gt=0, le=1)] = 0.5  # p: probability that a layer is sent; 1 is FedAvg


@dataclass(frozen=True)
class FedLPSums(WeightedSums):
    """Sums over devices: received tensors times the device's examples, and the examples of each tensor."""

    tensor_weights: Mapping[str, exact_sums.ExactScalar] = field(default_factory=dict)


def layer_units(state: NetworkState) -> list[tuple[str, ...]]:
    """Return the names of the tensors of each layer, including its normalisation's statistics."""
    names_by_layer = {layer: set(names) for layer, names in state.register.parameters_by_layer().items()}
    for entry in state.register.tensors:
        names_by_layer.setdefault(entry.layer, set()).add(entry.name)
    return [tuple(sorted(names)) for names in names_by_layer.values()]


def send(state: NetworkState, device: core.DeviceView) -> core.TaskSpec:
    """Return FedAvg's task spec with the tensor names of each layer, the unit that is sent or dropped."""
    task_spec = fedavg.send(state, device)
    return replace(task_spec, params={**task_spec.params, "units": layer_units(state)})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train as in FedAvg, and return each layer with probability `keep`."""
    client_result = fedavg.work(task, site)
    model = client_result.bundles["model"]
    kept_layers = [names for names in task.params["units"] if site.rng.random() < task.params["keep"]]
    return replace(client_result, bundles={"model": {name: model[name] for names in kept_layers for name in names}})


def fold(state: NetworkState, accumulator: FedLPSums | None, update: core.DeviceUpdate) -> FedLPSums:
    """Return the sums with an update's layers added in place. Raise UpdateError for an invalid update."""
    if "model" not in update.bundles:
        raise core.UpdateError(f"{update.device} sent no bundle 'model', which is required even without layers")
    model = update.bundles["model"]
    received_names = {name for names in layer_units(state) if not model.keys().isdisjoint(names) for name in names}
    partial_state = replace(state, model={name: state.model[name] for name in sorted(received_names)})
    accumulator = accumulator or FedLPSums()
    sums = fedavg.fold(partial_state, accumulator, update)
    tensor_weights = {
        name: accumulator.tensor_weights.get(name, exact_sums.ExactScalar()).add_numbers(update.weight)
        for name in partial_state.model
    }
    return FedLPSums(sums.total, sums.weights, {**accumulator.tensor_weights, **tensor_weights})


def step(state: NetworkState, total: FedLPSums | None) -> NetworkState:
    """Return the state with the mean of each layer over the devices that sent the layer."""
    if total is None:
        return state
    mean: dict[str, np.ndarray] = {}
    for name, weight in total.tensor_weights.items():
        if float(weight):
            mean[name] = total.total[name].mean(float(weight))
    return replace(state, model={**state.model, **tensors.cast_like(mean, state.model)})


METHOD = replace(
    fedavg.METHOD,
    traits=replace(fedavg.METHOD.traits, sent_data="a random part of the layers"),
    paper="arXiv 2303.06360",
    params=Params,
    send=send,
    work=work,
    aggregation=core.Aggregation(fold, accumulator=lambda state: FedLPSums, schema=local_training.partial_model_schema),
    step=step,
)
