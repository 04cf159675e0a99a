"""ParFed: the last convolutions stay on the device, and all other layers are averaged.

Papers: Sun et al., PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization,
NeurIPS 2021, in the form of GENE-FL's comparison (arXiv 2504.14628, section 4): ParFed "skips the
four convolutional layers", which in a ResNet18 are the four 3x3 convolutions of the last stage, 31.50 of 42.65 MiB.

Deviations: the layers that a device loads are fixed here, and PartialFed also learns them. Running statistics of batch
normalisation stay on the device too, because GENE-FL counts no bytes for them. There is one cluster. In a network
without convolutions, weight matrices other than the head's take their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt.core import Bundle, ModelError
from fedquilt.formats.tensor_register import ATTENTION, CONVOLUTIONS, PARAMETRIZATION_PATH
from fedquilt.methods import fedavg, fedrep
from fedquilt.models.local_training import NetworkState

# Modules whose weights are matrices.
MATRIX_MODULES = ("Linear", "Embedding", "Bilinear", "GRU", "LSTM", "RNN", ATTENTION)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the number of convolutions that stay on the device."""

    layers: Annotated[int, Meta(ge=0)] = 4  # convolutions that stay on the device; 0 shares all learned tensors


def convolution_weights(initial: NetworkState) -> list[str]:
    """Return the weight names of convolutions larger than 1x1, in the network's call order.

    Without convolutions, these are the matrices of linear, attention and recurrent layers, except the head's.

    Raises:
        ModelError: If there are neither convolutions nor matrices.
    """
    register, model = initial.register, initial.model
    trained_names = register.sort_by_call_order(initial.trained_names())
    types = {entry.name: "" if PARAMETRIZATION_PATH in entry.name else entry.type for entry in register.tensors}
    weight_names = [
        name for name in trained_names if types[name] in CONVOLUTIONS and max(model[name].shape[2:], default=0) > 1
    ]
    if not weight_names:
        head_names = register.parameters_by_layer().get(register.find_classifier() or "", ())
        weight_names = [
            name
            for name in trained_names
            if types[name] in MATRIX_MODULES and model[name].ndim == 2 and name not in head_names
        ]
    if not weight_names:
        raise ModelError("the network has no convolutions and only one linear layer: choose another method")
    return weight_names


def last_weights(initial: NetworkState, count: int) -> set[str]:
    """Return the last `count` names in `convolution_weights`."""
    return set(convolution_weights(initial)[-count:]) if count else set()


def init(bundle: Bundle, params: Params, seed: int) -> fedrep.State:
    """Return the first state, in which devices keep the last convolutions and all statistics."""
    initial = fedavg.init(bundle, params, seed)
    shared = set(initial.trained_names()) - last_weights(initial, params.layers)
    return fedrep.split_state(initial, initial.model.keys() - shared)


METHOD = replace(
    fedrep.METHOD,
    traits=replace(
        fedrep.METHOD.traits,
        sent_data="all but the last convolutions",
        private_data="the last convolutions, and statistics",
    ),
    paper="NeurIPS 2021 (PartialFed), as in arXiv 2504.14628",
    params=Params,
    init=init,
    send=fedrep.send,
    work=fedrep.train_whole_network,
)
