"""Shared code of methods that train a separate network on each device, chosen by memory tier (`[model.tier]`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.costs import peak_memory
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


def find_network(state: Any, device: core.DeviceView) -> NetworkState:
    """Return the initial network of a device's memory tier. "" in `state.networks` is the default network."""
    networks: Mapping[str, NetworkState] = state.networks
    return networks[peak_memory.largest_tier_within(device.profile, networks)]


def load_own_network(site: core.ClientContext) -> core.Tensors:
    """Return the device's network, or before its first training the initial network of its tier."""
    first = site.load("own")
    shapes, own_shapes = (
        {name: array.shape for name, array in tensors.tensor_shapes(network).items()}
        for network in (first, site.private_state)
    )
    if own_shapes != shapes:  # the device has no network yet, or that of another tier, because its budget has changed
        return first
    tensors.require_finite(site.private_state)
    return site.private_state


def record_layer(
    task: core.Task,
    site: core.ClientContext,
    network: core.Tensors,
    examples: core.Examples,
    layer: str,
    select: Callable[[Any, Any], Any],
) -> np.ndarray:
    """Run a network in evaluation mode, and return a value of one layer for each example, (n, ...).

    `layer` is a path, "" for the network itself. `select` gets the layer's input and output for a mini-batch.
    """
    batches: list[np.ndarray] = []

    def record(module: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        if not module.training:  # an engine probes the network in training mode, without real examples
            batches.append(select(inputs[0], outputs).float().cpu().numpy())

    def prepare(module: Any) -> Any:
        module.get_submodule(layer).register_forward_hook(record)
        return module

    site.engine.evaluate(task.params["network"], network, examples, hooks=core.Hooks(prepare=prepare))
    return np.concatenate(batches)


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's network on the held-out examples."""
    return site.engine.evaluate(task.params["network"], load_own_network(site), site.held_out)


def result(state: Any) -> core.Artefact:
    """Return the initial default network, because the devices' networks never leave them."""
    first = state.networks[""]
    return local_training.weights_artefact(first.network, first.model, private=sorted(first.model))
