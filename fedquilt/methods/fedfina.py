"""FedFina: only the last convolutions are averaged, everything else stays on the device.

Paper: GENE-FL's comparison (arXiv 2504.14628, section 4) has it as the counterpart of ParFed: it shares the
"last four convolution layers", of a ResNet18 the four 3x3 convolutions of its last stage, 31.50 MiB an upload.

Deviations: no other paper that we know uses the name; everything is trained, as with ParFed.
There is one cluster. In a network without convolutions, weight matrices other than the head's take their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt.core import Bundle
from fedquilt.methods import fedavg, fedrep, parfed


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and how many convolutions are shared."""

    layers: Annotated[int, Meta(ge=1)] = 4  # convolutions that are shared


def init(bundle: Bundle, params: Params, seed: int) -> fedrep.State:
    """Share the last convolutions of the bundle's model."""
    begun = fedavg.init(bundle, params, seed)
    own = parfed.last_weights(begun, params.layers)
    return fedrep.split(begun, begun.model.keys() - own)


METHOD = replace(
    parfed.METHOD,
    paper="as in arXiv 2504.14628",
    params=Params,
    init=init,
)
