"""FedRep: devices learn a common representation, and each device has its own head.

Paper: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
(arXiv 2102.07078), Algorithm 1. In a round a device first trains its head with the received representation frozen, then
the representation with its head frozen. The server averages the representations. The head stays on the device.

Deviations: both parts are trained by whole epochs (`head_epochs`, then `epochs`), as in the authors' code. The mean is
weighted by examples, as in FedAvg (in the paper all devices have the same number). Frozen normalisation layers keep
their statistics. A device's first head is the job's, not one fitted before round 0. With `rank` above 0 the
representation consists of low-rank adapters in a frozen pre-trained network (`fedlora`).

Other methods that share a part of the network use the functions of this module (`split_state`, `load_device_network`).
The shared part is `State.model`, and `State.own` is the start of the rest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg, fedlora
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters for the representation, and those of the head."""

    head_epochs: Annotated[int, Meta(ge=0)] = 10  # tau: passes over the examples that train the head alone
    rank: Annotated[int, Meta(ge=0)] = 0  # r of low-rank adapters as the representation; 0: the network's own layers
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # adapters count alpha / r
    head: tuple[str, ...] | None = None  # layers that stay on the device; not given: the classifier; []: FedAvg


@dataclass(frozen=True)
class State(NetworkState):
    """Shared tensors as `model`, first values of devices' own tensors, and frozen tensors."""

    own: dict[str, np.ndarray]
    backbone: dict[str, np.ndarray]  # frozen network around the adapters; {}: no adapters


def split_state(begun: NetworkState, own: Collection[str]) -> State:
    """Return FedRep's state, in which the tensors named in `own` stay on the devices."""
    shared = {name: array for name, array in begun.model.items() if name not in own}
    rest = {name: array for name, array in begun.model.items() if name in own}
    return State(**vars(replace(begun, model=shared)), own=rest, backbone={})


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the whole network. Only the shared part is sent in every round."""
    trained = {**state.own, **state.model}
    all_of_it = {**state.backbone, **trained}
    plain = state.plain_state_with(all_of_it)
    if state.backbone:
        plain = fedlora.make_adapted_state(
            fedlora.State(**vars(state.plain_state_with(trained)), backbone=state.backbone)
        )
    still = {"backbone": state.backbone} if state.backbone else {}
    order = local_training.training_task_spec(plain, {"model": state.model, "own": state.own, **still}, moved=trained)
    return fedlora.with_adapted_layers(order, state.network) if state.backbone else order


def load_device_network(site: core.ClientContext) -> dict[str, np.ndarray]:
    """Return the device's network: the received part and the device's own part."""
    own = site.load("own")
    tensors.require_matching(site.private_state, {name: own[name] for name in own if name in site.private_state})
    return {**own, **site.private_state, **site.load("model")}


def split_result(answer: core.ClientResult, shared: Collection[str]) -> core.ClientResult:
    """Return the result with the tensors in `shared` to send and the others kept on the device."""
    model = answer.bundles["model"]
    sent = {name: model[name] for name in sorted(shared)}
    return replace(
        answer, bundles={"model": sent}, private_state={name: model[name] for name in model if name not in sent}
    )


def train_whole_network(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train all tensors together and send the shared part."""
    return split_result(local_training.train_from(task, site, load_device_network(site)), site.load("model"))


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's network on the held-out examples."""
    still, hooks = fedlora.load_backbone(task, site, {})
    model = {**still, **load_device_network(site)}
    return site.engine.evaluate(task.params["network"], model, site.held_out, hooks=core.Hooks(prepare=hooks.prepare))


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the device's network, with adapters merged into its weights."""
    still, mine = fedlora.load_backbone(task, site, {})[0], load_device_network(site)
    return fedlora.merge_adapters(task.params, still, mine) if still else mine


def result(state: State) -> core.Artefact:
    """Return the shared part in the first network. `meta["private"]` names the devices' own tensors."""
    model, private = {**state.own, **state.model}, sorted(state.own.keys() - state.model.keys())
    if state.backbone:
        model = fedlora.merged_model(
            fedlora.State(**vars(state.plain_state_with(state.model)), backbone=state.backbone)
        )
    return local_training.weights_artefact(state.network, model, private=private)


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Split the bundle's network into representation and head.

    Raises:
        JobError: If `head` and `rank` are both given.
        ModelError: If there is no last linear layer, a layer is unknown, or nothing is left to share.
    """
    begun = fedavg.init(bundle, params, seed)
    if params.rank:
        if params.head is not None:
            raise core.JobError("head and rank: with rank, each device keeps the last layer for itself; leave head out")
        both = replace(begun, model=fedlora.initial_shared_part(begun.model, params.rank, seed, begun.network))
        return replace(split_state(both, fedlora.head_names(begun.network)), backbone=begun.model)
    found = begun.register.parameters_by_layer()
    last = begun.register.find_classifier() if params.head is None else None
    chosen = params.head if params.head is not None else (last,) if last else ()
    inside = {entry.module: entry.layer for entry in begun.register.tensors}
    chosen = tuple(inside.get(name, name) for name in chosen)  # a normalisation goes with its layer
    if params.head is None and last is None:
        raise core.ModelError('this network has no last linear layer: name the layers that stay, as head = ["conv10"]')
    if odd := sorted(set(chosen) - found.keys()):
        raise core.ModelError(f"head: the network has no layer {odd[0]!r}; it has {', '.join(found)}")
    if chosen and found.keys() == set(chosen):
        raise core.ModelError("head: these are all layers, nothing would be shared; the method 'local' does that")
    return split_state(begun, {name for layer in chosen for name in found[layer]})


def fedrep_task_spec(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train head and representation, with the cost of the head's epochs."""
    sent = send(state, device)
    if not state.own:
        return sent
    all_of_it = state.plain_state_with({**state.backbone, **state.own, **state.model})
    light = replace(all_of_it, params={**state.params, "epochs": state.params["head_epochs"]})
    head = local_training.training_work(light, moved=state.own)
    return replace(sent, work=sent.work.add(head))


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the head, then the representation, and send the representation (Algorithm 1)."""
    head, model, steps = set(site.load("own")), load_device_network(site), 0.0
    body = model.keys() - head
    still, adapters = fedlora.load_backbone(task, site, {})
    fit, epochs = local_training.fit_from_task(task), task.params["head_epochs"] if head else 0
    first = epochs / (epochs + fit.epochs)  # share of the work

    def train_tensors(
        site: core.ClientContext, fit: core.Fit, names: Collection[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        hooks = core.Hooks(prepare=adapters.prepare, steps=(core.Step(rate=lambda name: float(name in names)),))
        network, start = task.params["network"], {**still, **model}
        after, told = site.engine.train(network, start, site.train, fit, site.rng, hooks=hooks, progress=site.progress)
        return {name: after[name] for name in model}, told

    if epochs:
        at = replace(site, progress=lambda done: site.progress(first * done))
        model, told = train_tensors(at, replace(fit, epochs=epochs), head)
        steps = told["steps"]
    at = replace(site, progress=lambda done: site.progress(first + (1 - first) * done))
    model, told = train_tensors(at, fit, body)
    return split_result(
        core.ClientResult({"model": model}, float(len(site.train)), {**told, "steps": steps + told["steps"]}), body
    )


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2102.07078",
    params=Params,
    state=State,
    init=init,
    send=fedrep_task_spec,
    work=work,
    check=check,
    result=result,
    personal_model=personal,
)
