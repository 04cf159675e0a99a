"""Ditto: beside the federation's model each device trains one of its own, pulled towards it.

Paper: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
(arXiv 2012.04221), Algorithm 1 and 2: the global model w is trained as usual (here by FedAvg), and

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)),

with w^t as it was received. v_k stays on the device, and evaluation there uses it.

Deviations: v_k takes the steps, epochs and rate of w, on the same mini-batches in the same order, as in the
authors' own code; it begins as the first w that the device receives. With `rank` above 0 w and v_k are low-rank
adapters and the head of a frozen pre-trained network, as in `fedlora`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from fedquilt import tensors
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    DeviceView,
    EvaluationSums,
    Hooks,
    Order,
    Site,
    Task,
    Tensors,
    same_for_all,
)
from fedquilt.methods import fedavg, fedlora


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the pull of the personal model, and optional adapters."""

    pull: Annotated[float, Meta(ge=0)] = 1.0  # lambda: pull of the own model to the received one; 0: trains alone
    rank: Annotated[int, Meta(ge=0)] = 0  # r of low-rank adapters, which alone are trained; 0: the whole network
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # adapters count alpha / r


def init(bundle: Bundle, params: Params, seed: int) -> fedlora.State:
    """Start from the bundle's network; with adapters it becomes the frozen backbone, without them there is none."""
    if params.rank:
        return fedlora.init(bundle, params, seed)
    return fedlora.State(**vars(fedavg.init(bundle, params, seed)), backbone={})


@same_for_all
def send(state: fedlora.State, device: DeviceView) -> Order:
    """Return the order to train two models, at twice FedAvg's cost and with one more copy in memory."""
    if not state.backbone:
        return fedavg.training_order(state, {"model": state.model}, trainings=2, anchors=2)
    whole = fedlora.adapted(state)
    bundles = {"model": state.model, "backbone": state.backbone}
    return fedlora.with_adapted_layers(
        fedavg.training_order(whole, bundles, trainings=2, anchors=2, moved=state.model), state.network
    )


def work(task: Task, site: Site) -> Answer:
    """Train the received model, then the device's own with the pull; both see the same mini-batches."""
    received, pull = site.load("model"), task.params["pull"]
    still, hooks = backbone_and_hooks(task, site, received)
    start = {**still, **received}
    again = copy.deepcopy(site.rng)  # the same mini-batches a second time
    answer = fedavg.trained(task, replace(site, progress=lambda done: site.progress(done / 2)), start, hooks)
    if pull:
        correct = lambda gradient, value, at: gradient + pull * (value - at["received"])  # noqa: E731
        hooks = replace(hooks, correct=correct, anchors={"received": start})
    second = replace(site, rng=again, progress=lambda done: site.progress(0.5 + done / 2))
    mine = fedavg.trained(task, second, {**still, **own(site, received)}, hooks)
    model, local = ({name: each.bundles["model"][name] for name in received} for each in (answer, mine))
    told = {**answer.metrics, "own_loss": mine.metrics["loss"]}
    return replace(answer, bundles={"model": model}, local=local, metrics=told)


def backbone_and_hooks(task: Task, site: Site, received: Tensors) -> tuple[Tensors, Hooks]:
    """Return the frozen tensors and the hooks that add adapters to them, or nothing without adapters."""
    if not task.params.get("rank"):
        return {}, Hooks()
    backbone = site.load("backbone")
    return backbone, fedlora.adapter_hooks(task, received)


def own(site: Site, received: Tensors) -> Tensors:
    """The device's own model; the received one before its first training."""
    if site.local:
        tensors.require_like(site.local, received)
    return site.local or received


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the device's own model on its held-out share."""
    received = site.load("model")
    still, hooks = backbone_and_hooks(task, site, received)
    model = {**still, **own(site, received)}
    return site.engine.evaluate(task.params["network"], model, site.held, hooks=hooks)


def personal(task: Task, site: Site) -> Tensors:
    """The device's own model, adapters merged into its weights."""
    received = site.load("model")
    still, _ = backbone_and_hooks(task, site, received)
    return fedlora.merge_adapters(task.params, still, own(site, received)) if still else own(site, received)


def result(state: Any) -> Artefact:
    """Shared model: the devices' own are known to nobody else."""
    return fedlora.result(state) if state.backbone else fedavg.result(state)


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2012.04221",
    params=Params,
    state=fedlora.State,
    init=init,
    send=send,
    work=work,
    check=check,
    result=result,
    personal=personal,
)
