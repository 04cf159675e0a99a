"""FedPer and LG-FedAvg: the last or first layers stay on the device, and the rest is averaged.

Papers: Arivazhagan et al., Federated Learning with Personalization Layers, 2019 (arXiv 1912.00818), Algorithms 1 and 2:
the first layers are shared, and the last K_P layers stay on the device. Liang et al., Think Locally, Act Globally:
Federated Learning with Local and Global Representations, 2020 (arXiv 2001.01523), Algorithm 1: the first layers are the
device's own representation, and the last layers are shared. In both, a device trains all layers together, and the
server averages the shared layers, weighted by examples.

`stays = "last"` is FedPer, `stays = "first"` is LG-FedAvg. The methods differ in nothing else.

Deviations: layers are counted from the classifier. The statistics of a normalisation belong to the layer before it.
FedPer counts the basic blocks of a ResNet, which are several layers here. LG-FedAvg's optional losses of the
representation are left out. Its authors' code starts from weights that FedAvg has trained (here `[model] weights`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from fedquilt.core import Bundle, ModelError
from fedquilt.methods import fedavg, fedrep, ft_part, parfed


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and where the network is divided."""

    stays: Literal["last", "first"] = "last"  # layers that stay on the device: last is FedPer, first is LG-FedAvg
    layers: Annotated[int, Meta(ge=1)] = 1  # K_P: last layers, which stay or are shared


def init(bundle: Bundle, params: Params, seed: int) -> fedrep.State:
    """Return the first state, with the network split into shared layers and layers that devices keep.

    Raises:
        ModelError: If the network has no last linear layer, or no other layers.
    """
    initial = fedavg.init(bundle, params, seed)
    last = ft_part.last_layer_tensors(initial, params.layers)
    if initial.model.keys() <= last:
        raise ModelError(f"layers = {params.layers} are all layers of the network: use a smaller number")
    return fedrep.split_state(initial, last if params.stays == "last" else initial.model.keys() - last)


METHOD = replace(
    parfed.METHOD,
    traits=replace(parfed.METHOD.traits, sent_data="the shared layers", private_data="all other layers"),
    paper="arXiv 1912.00818 and 2001.01523",
    params=Params,
    init=init,
)
