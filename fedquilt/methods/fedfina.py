"""FedFina: only the last convolutions are averaged, and all other layers stay on the device.

Paper: GENE-FL's comparison (arXiv 2504.14628, section 4) uses FedFina as the counterpart of ParFed: it shares the
"last four convolution layers", which in a ResNet18 are the four 3x3 convolutions of the last stage, 31.50 MiB an
upload.

Deviations: no other paper known to us uses the name. All layers are trained, as in ParFed. There is one cluster. In a
network without convolutions, weight matrices other than the head's take their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt.core import Bundle
from fedquilt.methods import fedavg, fedrep, parfed


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the number of shared convolutions."""

    layers: Annotated[int, Meta(ge=1)] = 4  # convolutions that are shared


def init(bundle: Bundle, params: Params, seed: int) -> fedrep.State:
    """Return the first state, with the last convolutions of the bundle's model as the shared tensors."""
    initial = fedavg.init(bundle, params, seed)
    shared_names = parfed.last_weights(initial, params.layers)
    return fedrep.split_state(initial, initial.model.keys() - shared_names)


METHOD = replace(
    parfed.METHOD,
    traits=replace(parfed.METHOD.traits, sent_data="the last convolutions", private_data="all other tensors"),
    paper="as in arXiv 2504.14628",
    params=Params,
    init=init,
)
