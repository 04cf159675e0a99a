"""FedPeWS-Fixed: in the first rounds each device trains a fixed part of the network.

Paper: Tastan et al., FedPeWS (arXiv 2410.03042), section 4, "Use of fixed subnetworks", and appendix
B.2: the neurons of every hidden layer are split into N parts, one for each device, without overlap. The
rest is `fedquilt.methods.fedpews`, without mask scores.

Only the covered entries travel, both ways: the coordinator knows the mask. The device trains the network
with 0 in all other places. They stay 0 by themselves: a neuron without weights has no output and no
input, so that no mask is applied while training, and any engine and optimizer will do. This needs an
activation that is 0 at 0 (ReLU and its kin, tanh).

Deviations: a device that `devices` does not name gets the part that its name hashes to, so two
may share one, and a part that nobody has stays unchanged until the warm-up is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt.core import (
    Answer,
    Contribution,
    DeviceView,
    EvaluationSums,
    Order,
    Site,
    Task,
    Tensors,
    derive_seed,
    expects,
)
from fedquilt.methods import fedavg, fedpews
from fedquilt.models.partial import masks


@dataclass(frozen=True)
class Params(fedpews.Warmup):
    """Parameters of the fixed parts, besides the warm-up's."""

    parts: Annotated[int, Meta(ge=1)] = 2  # N: parts that every hidden layer is split into
    devices: tuple[str, ...] = ()  # devices of the first part, the second, ...; goes round if there are more parts


def part_of(state: fedpews.State, device: str) -> int:
    """Index of a device's part, from 0."""
    named, parts = list(state.params["devices"]), int(state.params["parts"])
    return (named.index(device) if device in named else derive_seed("part", device)) % parts


def mask_of(state: fedpews.State, device: str) -> np.ndarray:
    """Mask of a device's neurons, (h,)."""
    return masks.part(state.plan, part_of(state, device), int(state.params["parts"]))


def send(state: fedpews.State, device: DeviceView) -> Order:
    """Order training of the device's part; after the warm-up of the whole network."""
    if not fedpews.warm(state):
        return fedpews.full(state)
    neurons = mask_of(state, device.device)
    sent = masks.take(state.model, masks.covered(state.plan, neurons))
    bundles = {"model": sent, "plan": {"json": masks.to_array(state.plan)}}
    order = fedavg.training_order(state, bundles, anchors=int(state.params["mu"] > 0))
    return replace(order, params={**order.params, "masked": True, "part": part_of(state, device.device)})


def work(task: Task, site: Site) -> Answer:
    """Train the received part with 0 in all other places."""
    if not task.params.get("masked"):
        return fedavg.work(task, site, fedpews.proximal(task))
    part, marks = _received(task, site)
    answer = fedavg.trained(task, site, part, fedpews.proximal(task))
    return replace(answer, bundles={"model": masks.take(answer.bundles["model"], marks)})


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate what the device has: in the warm-up its own part alone."""
    model = _received(task, site)[0] if task.params.get("masked") else site.load("model")
    return site.engine.evaluate(task.params["network"], model, site.held)


def _received(task: Task, site: Site) -> tuple[Tensors, Mapping[str, np.ndarray]]:
    """The device's part of the network, 0 elsewhere, and the marks of its entries."""
    plan = masks.from_array(site.load("plan")["json"])
    marks = masks.covered(plan, masks.part(plan, task.params["part"], task.params["parts"]))
    return masks.put(site.load("model"), marks), marks


@expects(fedpews.taken)
def fold(
    state: fedpews.State, so_far: fedpews.Covered | fedavg.Sum | None, update: Contribution
) -> fedpews.Covered | fedavg.Sum:
    """Add the entries of a device's part; after the warm-up its model."""
    if not fedpews.warm(state):
        assert not isinstance(so_far, fedpews.Covered)
        return fedpews.fold_full(state, so_far, update)
    assert not isinstance(so_far, fedavg.Sum)
    return fedpews.add(state, so_far, update, mask_of(state, update.device), {})


METHOD = replace(
    fedpews.METHOD,
    params=Params,
    engines=("torch", "numpy"),
    send=send,
    work=work,
    check=check,
    fold=fold,
    keeps="",  # it publishes no mask
)
