"""HeteroFL: every device trains as wide a part of the network as its memory allows, the leading channels of each layer.

Paper: Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021 (arXiv 2010.01264), Algorithm 1. A device at rate r has the first ceil(r * C) of each layer's C
channels; an entry of the new global model is the mean over the devices that have it, and stays where none has
(Eq. 2-5); what a narrower layer says is multiplied by 1/r (the Scaler, section 3).

Deviations: the rate is the device's by its memory tier; one that has not said how much it has gets the smallest.
The mean is weighted by examples, as FedAvg's, where the paper counts devices: all rates 1 are FedAvg, bit for bit.
Batch normalisation's running statistics are averaged by entry too (the paper's "static" ones are recomputed by a pass
over all devices afterwards); so that they are those of the scaled network, the Scaler is there in a device's own
evaluation as well. The cross entropy is over all classes (the paper masks those that a device has not). Channels
that `fedquilt prepare` could not follow through the network stay whole; an addition ties what it adds.

The halves of a method that sends parts by width are here for others too (`order`, `hooks_of`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedquilt import tensors
from fedquilt.core import Answer, Bundle, Contribution, DeviceView, Hooks, ModelError, Order, Site, Task, UpdateError
from fedquilt.methods import fedavg
from fedquilt.models import masks, submodel
from fedquilt.models.masks import Plan
from fedquilt.models.submodel import Counted, Places

Rate = Annotated[float, Meta(gt=0, le=1)]
Rates = tuple[Rate, Rate, Rate, Rate, Rate]


@dataclass(frozen=True)
class Params(fedavg.Params):
    rates: Rates = (0.0625, 0.125, 0.25, 0.5, 1.0)  # r of devices with a budget under 1 GB, from 1, 2, 4 and 8 GB


@dataclass(frozen=True)
class State(fedavg.State):
    """The global model, and how its units hang together."""

    plan: Plan


def init(bundle: Bundle, params: Any, seed: int) -> State:
    begun = fedavg.init(bundle, params, seed)
    if "masks" not in bundle.files:
        raise ModelError(
            "the bundle has no plan of how the network's units hang together: run `fedquilt prepare` anew. If there "
            "is none still, torch.fx cannot trace the network: take another one"
        )
    plan = masks.from_array(bundle.load("masks")["json"])
    masks.require(plan, begun.model)
    if not plan.neurons:
        raise ModelError("this network has no hidden units that could be left out: it cannot be cut by width")
    return State(**vars(begun), plan=plan)


# -- sending parts --------------------------------------------------------------------------------


def part(state: State, rate: float) -> Places:
    """The leading units' entries."""
    return submodel.places(state.plan, state.model, submodel.leading(state.plan, rate))


def order(state: fedavg.State, at: Places, rate: float) -> Order:
    """Training of a part: its own FLOPs, bytes and memory."""
    sub = submodel.cut(state.model, at)
    flops, activations = submodel.lighter(state.model, sub)
    light = fedavg.State(
        state.params, state.network, sub, state.flops * flops, math.ceil(state.example_bytes * activations)
    )
    found = fedavg.order(light, {"model": sub})
    built = tensors.total_bytes([state.model])  # the network is built whole before it is cut
    work = msgspec.structs.replace(found.work, peak_bytes=max(found.work.peak_bytes, 2 * built))
    return replace(found, params={**found.params, "rate": rate}, work=work)


def send(state: State, device: DeviceView) -> Order:
    rate = submodel.by_tier(device.profile, state.params["rates"])
    return order(state, part(state, rate), rate)


def hooks_of(task: Task, site: Site, *, scaled: bool = True) -> Hooks:
    """The narrower network in the whole one's place; nothing where it is whole."""
    if task.params["rate"] == 1:
        return Hooks()
    start = site.load("model")
    return Hooks(prepare=lambda module: submodel.shrunk(module, start, scaled=scaled))


def work(task: Task, site: Site) -> Answer:
    return fedavg.work(task, site, hooks_of(task, site))


def check(task: Task, site: Site) -> Mapping[str, float]:
    """How good the device's own part is on its held-out share."""
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held, hooks=hooks_of(task, site))


# -- back again -----------------------------------------------------------------------------------


def sent_by(update: Contribution) -> Mapping[str, Any]:
    """The tensors of an update.

    Raises:
        UpdateError: it has none.
    """
    if "model" not in update.bundles:
        raise UpdateError(f"{update.device} sent no model")
    return update.bundles["model"]


def fold(state: State, so_far: Counted | None, update: Contribution) -> Counted:
    sent = sent_by(update)
    at = submodel.recognise(state.model, sent, [part(state, rate) for rate in sorted(set(state.params["rates"]))])
    return submodel.add(state.model, so_far, sent, at, update.weight)


def step(state: State, total: Counted | None) -> State:
    return replace(state, model=submodel.close(state.model, total))


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2010.01264",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    work=work,
    check=check,
    fold=fold,
    step=step,
)
