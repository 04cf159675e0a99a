"""Ditto: each device also trains a personal model, regularised towards the global model.

Paper: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021
(arXiv 2012.04221), Algorithms 1 and 2. The global model w is trained as usual (here by FedAvg), and

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)),

with w^t as received. The personal model v_k stays on the device, and evaluation on the device uses v_k.

Deviations: v_k takes the steps, epochs and learning rate of w, on the same mini-batches in the same order, as in the
authors' code. The first v_k is the first w that the device receives. With `rank` above 0, w and v_k are low-rank
adapters and the head of a frozen pre-trained network, as in `fedlora`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg, fedlora
from fedquilt.models import local_training

TRAITS = replace(fedavg.METHOD.traits, private_data="its personal model", training_passes=2, model_copies=2)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the regularisation of the personal model, and optional adapters."""

    pull: Annotated[float, Meta(ge=0)] = 1.0  # lambda: pull of the personal model to the received model
    rank: Annotated[int, Meta(ge=0)] = 0  # r of the low-rank adapters that are trained; 0: the whole network
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # factor of the adapters: alpha / r


def init(bundle: core.Bundle, params: Params, seed: int) -> fedlora.State:
    """Return the first state. With adapters, the bundle's network is the frozen backbone."""
    if params.rank:
        return fedlora.init(bundle, params, seed)
    return fedlora.State(**vars(fedavg.init(bundle, params, seed)), backbone={})


def send(state: fedlora.State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train two models, with twice FedAvg's cost."""
    if not state.backbone:
        return local_training.training_task_spec(state, {"model": state.model}, TRAITS)
    full_state = fedlora.make_adapted_state(state)
    bundles = {"model": state.model, "backbone": state.backbone}
    return fedlora.with_adapted_layers(
        local_training.training_task_spec(full_state, bundles, TRAITS, trained_tensors=state.model), state.network
    )


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the global and the personal model on the same mini-batches (Ditto, Algorithm 1)."""
    received, pull = site.load("model"), task.params["pull"]
    frozen, hooks = fedlora.load_backbone(task, site, received)
    start = {**frozen, **received}
    batch_rng = copy.deepcopy(site.rng)  # selects the same mini-batches for the personal model
    global_result = local_training.train_from(
        task, replace(site, progress=lambda fraction: site.progress(fraction / 2)), start, hooks
    )
    if pull:
        pull_to_received = lambda gradient, value, anchors: gradient + pull * (value - anchors["received"])  # noqa: E731
        hooks = replace(hooks, correct_gradient=pull_to_received, anchors={"received": start})
    own_site = replace(site, rng=batch_rng, progress=lambda fraction: site.progress(0.5 + fraction / 2))
    own_result = local_training.train_from(task, own_site, {**frozen, **load_personal_model(site, received)}, hooks)
    model = {name: global_result.bundles["model"][name] for name in received}
    local = {name: own_result.bundles["model"][name] for name in received}
    metrics = {**global_result.metrics, "own_loss": own_result.metrics["loss"]}
    return replace(global_result, bundles={"model": model}, private_state=local, metrics=metrics)


def load_personal_model(site: core.ClientContext, received: core.Tensors) -> core.Tensors:
    """Return the device's personal model, or the received model before the first training."""
    if site.private_state:
        tensors.require_matching(site.private_state, received)
    return site.private_state or received


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the personal model on the held-out examples."""
    received = site.load("model")
    frozen, hooks = fedlora.load_backbone(task, site, received)
    model = {**frozen, **load_personal_model(site, received)}
    return site.engine.evaluate(task.params["network"], model, site.held_out, hooks=hooks)


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the personal model, with adapters merged into its weights."""
    received = site.load("model")
    frozen, personal_model = fedlora.load_backbone(task, site, received)[0], load_personal_model(site, received)
    return fedlora.merge_adapters(task.params, frozen, personal_model) if frozen else personal_model


def result(state: Any) -> core.Artefact:
    """Return the global model. Personal models never leave their devices."""
    return fedlora.result(state) if state.backbone else fedavg.result(state)


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2012.04221",
    params=Params,
    state=fedlora.State,
    init=init,
    send=send,
    work=work,
    check=check,
    result=result,
    personal_model=personal,
)
