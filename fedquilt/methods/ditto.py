"""Ditto: beside the federation's model each device trains one of its own that is drawn to it.

Paper: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
(arXiv 2012.04221), Algorithm 1 and 2: the global model w is trained as usual (here by FedAvg), and

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)),

w^t as it was received. v_k stays on the device, and is what it is evaluated with.

Deviations: v_k takes the steps, epochs and rate of w, on the same mini-batches in the same order, as in the
authors' own code; it begins as the first w that the device receives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt import tensors
from fedquilt.core import Answer, DeviceView, Hooks, Order, Site, Task, Tensors
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class Params(fedavg.Params):
    pull: Annotated[float, Meta(ge=0)] = 1.0  # lambda: of the own model to the received one; 0 is training alone


def send(state: fedavg.State, device: DeviceView) -> Order:
    return fedavg.order(state, {"model": state.model}, passes=6, anchors=2)


def work(task: Task, site: Site) -> Answer:
    received, pull = site.load("model"), task.params["pull"]
    again = copy.deepcopy(site.rng)  # the same mini-batches a second time
    answer = fedavg.trained(task, replace(site, progress=lambda done: site.progress(done / 2)), received)
    hooks = Hooks(
        correct=lambda gradient, value, at: gradient + pull * (value - at["received"]),
        anchors={"received": received},
    )
    second = replace(site, rng=again, progress=lambda done: site.progress(0.5 + done / 2))
    mine = fedavg.trained(task, second, own(site, received), hooks if pull else Hooks())
    return replace(answer, local=mine.bundles["model"], metrics={**answer.metrics, "own_loss": mine.metrics["loss"]})


def own(site: Site, received: Tensors) -> Tensors:
    """The device's own model; what was received, until it has one."""
    if site.local:
        tensors.require_like(site.local, received)
    return site.local or received


def check(task: Task, site: Site) -> Mapping[str, float]:
    return site.engine.evaluate(task.params["network"], own(site, site.load("model")), site.held)


METHOD = replace(fedavg.METHOD, paper="arXiv 2012.04221", params=Params, send=send, work=work, check=check)
