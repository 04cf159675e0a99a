"""FedProto: devices with networks of their own share the mean features of each class, the prototypes.

Paper: Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022 (arXiv 2105.00243),
Algorithm 1. With f the features that enter a network's last linear layer, a device's prototype of class j is the mean
of f over its examples of j (Eq. 3). The global prototype C_j is the mean over the devices (Eq. 6), and the local
objective gains the distance of the features to the prototype of their class (Eq. 7):

    mean over examples (x, y) of   cross entropy + penalty * |f(x) - C_y|^2 / d.

The networks stay on their devices. Devices of a memory tier can have a network of their own (`[model.tier]`). All of
them need equally many features, d.

Deviations: the penalty is that of the authors' code, the mean over examples and features. In the paper's Eq. 7 it
compares prototypes. C_j is weighted by the devices' examples of j, as in Eq. 6 without its factor 1/|N_j|. The authors'
code takes the plain mean. Prototypes come from a forward pass after training, in evaluation mode. A class that no
device of a round has keeps its C_j. A device is evaluated with its own last layer. The authors' code also classifies by
the nearest prototype.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedquilt import core
from fedquilt.arrays import exact_sums
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import _prototypes, _tier_networks
from fedquilt.methods._prototypes import Params, State


def fold(state: State, accumulator: WeightedSums | None, update: core.DeviceUpdate) -> WeightedSums:
    """Return the sums with an update's prototypes added, weighted by the examples of each class."""
    _prototypes.validate_update(state, update)
    prototypes, accumulator = update.bundles["prototypes"], accumulator or WeightedSums()
    examples = prototypes["examples"].astype(np.float64)
    weighted = {"prototypes": prototypes["prototypes"] * examples[:, None], "examples": examples}
    return WeightedSums(exact_sums.add_arrays(accumulator.total, weighted), accumulator.weights.add_numbers(1.0))


def step(state: State, total: WeightedSums | None) -> State:
    """Return the state with the mean prototype of each class over the devices (FedProto, Eq. 6)."""
    if total is None or total.weight == 0:
        return state
    sums = exact_sums.rounded_values(total.total)
    counts = sums["examples"][:, None]
    mean_prototypes = (sums["prototypes"] / np.maximum(counts, 1)).astype(np.float32)
    has_prototype = np.maximum(state.has_prototype, (counts[:, 0] > 0).astype(np.uint8))
    return replace(
        state,
        prototypes=np.where(counts > 0, mean_prototypes, np.asarray(state.prototypes)),
        has_prototype=has_prototype,
    )


METHOD = core.Method(
    paper="arXiv 2105.00243",
    params=Params,
    state=State,
    engines=("torch",),
    init=_prototypes.init,
    send=_prototypes.send,
    work=_prototypes.work,
    check=_tier_networks.check,
    aggregation=core.Aggregation(
        fold,
        accumulator=lambda state: WeightedSums,
        schema=_prototypes.update_schema,
        check_update=_prototypes.validate_update,
    ),
    step=step,
    result=_tier_networks.result,
    traits=_prototypes.TRAITS,
)
