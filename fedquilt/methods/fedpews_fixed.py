"""FedPeWS-Fixed: in the first rounds each device trains a part of the network that was cut out for it.

Paper: Tastan et al., FedPeWS (arXiv 2410.03042), section 4, "Use of fixed subnetworks", and appendix
B.2: the neurons of every hidden layer are split into N parts, one for each device, without overlap. The
rest is `fedquilt.methods.fedpews`, without mask scores.

Only the covered entries travel, both ways: the coordinator knows the mask. The device trains the network
with 0 in all other places. They stay 0 by themselves: a neuron without weights says nothing and hears
nothing, so that no mask is applied while training, and any engine and optimizer will do. That wants an
activation that is 0 at 0 (ReLU and its kin, tanh).

Deviations: a device that `devices` does not name gets the part that its name hashes to, so two
may share one, and one that nobody has stays as it was until the warm-up is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt.core import Answer, Contribution, DeviceView, Order, Site, Task, Tensors, derive_seed, expects
from fedquilt.methods import fedavg, fedpews
from fedquilt.models.partial import masks


@dataclass(frozen=True)
class Params(fedpews.Warmup):
    parts: Annotated[int, Meta(ge=1)] = 2  # N: parts that every hidden layer is split into
    devices: tuple[str, ...] = ()  # whose part is the first, the second, ...; goes round if there are more than parts


def part_of(state: fedpews.State, device: str) -> int:
    """Which part is a device's, counted from 0."""
    named, parts = list(state.params["devices"]), int(state.params["parts"])
    return (named.index(device) if device in named else derive_seed("part", device)) % parts


def mask_of(state: fedpews.State, device: str) -> np.ndarray:
    """A device's neurons, (h,)."""
    return masks.part(state.plan, part_of(state, device), int(state.params["parts"]))


def send(state: fedpews.State, device: DeviceView) -> Order:
    if not fedpews.warm(state):
        return fedpews.full(state)
    neurons = mask_of(state, device.device)
    sent = masks.take(state.model, masks.covered(state.plan, neurons))
    bundles = {"model": sent, "plan": {"json": masks.to_array(state.plan)}}
    order = fedavg.order(state, bundles, anchors=int(state.params["mu"] > 0))
    return replace(order, params={**order.params, "masked": True, "part": part_of(state, device.device)})


def work(task: Task, site: Site) -> Answer:
    if not task.params.get("masked"):
        return fedavg.work(task, site, fedpews.proximal(task))
    part, marks = _received(task, site)
    answer = fedavg.trained(task, site, part, fedpews.proximal(task))
    return replace(answer, bundles={"model": masks.take(answer.bundles["model"], marks)})


def check(task: Task, site: Site) -> Mapping[str, float]:
    """Of what the device has: in the warm-up its own part alone."""
    model = _received(task, site)[0] if task.params.get("masked") else site.load("model")
    return site.engine.evaluate(task.params["network"], model, site.held)


def _received(task: Task, site: Site) -> tuple[Tensors, Mapping[str, np.ndarray]]:
    """The device's part of the network, 0 elsewhere, and which entries it is."""
    plan = masks.from_array(site.load("plan")["json"])
    marks = masks.covered(plan, masks.part(plan, task.params["part"], task.params["parts"]))
    return masks.put(site.load("model"), marks), marks


@expects(fedpews.taken)
def fold(
    state: fedpews.State, so_far: fedpews.Covered | fedavg.Sum | None, update: Contribution
) -> fedpews.Covered | fedavg.Sum:
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
)
