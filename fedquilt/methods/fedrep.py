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
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # factor of the adapters: alpha / r
    head: tuple[str, ...] | None = None  # layers that stay on the device; not given: the classifier; []: FedAvg


@dataclass(frozen=True)
class State(NetworkState):
    """Shared tensors as `model`, first values of the tensors that devices keep, and frozen tensors."""

    own: dict[str, np.ndarray]
    backbone: dict[str, np.ndarray]  # frozen network around the adapters; {}: no adapters


def split_state(initial: NetworkState, private_names: Collection[str]) -> State:
    """Return a state in which the tensors named in `private_names` stay on the devices."""
    shared = {name: array for name, array in initial.model.items() if name not in private_names}
    private = {name: array for name, array in initial.model.items() if name in private_names}
    return State(**vars(replace(initial, model=shared)), own=private, backbone={})


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the whole network. Only the shared part is sent in every round."""
    trained = {**state.own, **state.model}
    full_model = {**state.backbone, **trained}
    cost_state = state.plain_state_with(full_model)
    if state.backbone:
        cost_state = fedlora.make_adapted_state(
            fedlora.State(**vars(state.plain_state_with(trained)), backbone=state.backbone)
        )
    frozen = {"backbone": state.backbone} if state.backbone else {}
    task_spec = local_training.training_task_spec(
        cost_state, {"model": state.model, "own": state.own, **frozen}, trained_tensors=trained
    )
    return fedlora.with_adapted_layers(task_spec, state.network) if state.backbone else task_spec


def load_device_network(site: core.ClientContext) -> dict[str, np.ndarray]:
    """Return the received tensors with the device's own ones, which before training are the job's."""
    initial_own = site.load("own")
    tensors.require_matching(
        site.private_state, {name: initial_own[name] for name in initial_own if name in site.private_state}
    )
    return {**initial_own, **site.private_state, **site.load("model")}


def split_result(client_result: core.ClientResult, shared: Collection[str]) -> core.ClientResult:
    """Return the result that sends the tensors in `shared` and keeps all others on the device."""
    model = client_result.bundles["model"]
    shared_tensors = {name: model[name] for name in sorted(shared)}
    return replace(
        client_result,
        bundles={"model": shared_tensors},
        private_state={name: model[name] for name in model if name not in shared_tensors},
    )


def train_whole_network(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train all tensors together, and return a result that sends only the shared tensors."""
    return split_result(local_training.train_from(task, site, load_device_network(site)), site.load("model"))


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's network on the held-out examples."""
    frozen, hooks = fedlora.load_backbone(task, site, {})
    model = {**frozen, **load_device_network(site)}
    return site.engine.evaluate(task.params["network"], model, site.held_out, hooks=core.Hooks(prepare=hooks.prepare))


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the device's network, with adapters merged into its weights."""
    frozen, device_network = fedlora.load_backbone(task, site, {})[0], load_device_network(site)
    return fedlora.merge_adapters(task.params, frozen, device_network) if frozen else device_network


def result(state: State) -> core.Artefact:
    """Return the shared tensors and initial values of all others, which `meta["private"]` lists."""
    model, private = {**state.own, **state.model}, sorted(state.own.keys() - state.model.keys())
    if state.backbone:
        model = fedlora.merged_model(
            fedlora.State(**vars(state.plain_state_with(state.model)), backbone=state.backbone)
        )
    return local_training.weights_artefact(state.network, model, private=private)


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with the representation shared and the head kept by devices.

    Raises:
        JobError: If `head` and `rank` are both given.
        ModelError: If there is no last linear layer, a layer is unknown, or nothing is left to share.
    """
    initial = fedavg.init(bundle, params, seed)
    if params.rank:
        if params.head is not None:
            raise core.JobError("head is not possible with rank, which keeps the last layer on devices: leave head out")
        adapted = replace(initial, model=fedlora.initial_shared_part(initial.model, params.rank, seed, initial.network))
        return replace(split_state(adapted, fedlora.head_names(initial.network)), backbone=initial.model)
    layers = initial.register.parameters_by_layer()
    classifier = initial.register.find_classifier() if params.head is None else None
    head = params.head if params.head is not None else (classifier,) if classifier else ()
    layer_by_module = {entry.module: entry.layer for entry in initial.register.tensors}
    head = tuple(layer_by_module.get(name, name) for name in head)  # a normalisation goes with its layer
    if params.head is None and classifier is None:
        raise core.ModelError('the network has no last linear layer: name its head, as in head = ["conv10"]')
    if unknown := sorted(set(head) - layers.keys()):
        raise core.ModelError(f"head: layer {unknown[0]!r} is not in the network: choose among {', '.join(layers)}")
    if head and layers.keys() == set(head):
        raise core.ModelError("head lists all layers, so nothing would be shared: choose the method 'local'")
    return split_state(initial, {name for layer in head for name in layers[layer]})


def fedrep_task_spec(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train head and representation, with the cost of the head's epochs."""
    task_spec = send(state, device)
    if not state.own:
        return task_spec
    full_state = state.plain_state_with({**state.backbone, **state.own, **state.model})
    head_state = replace(full_state, params={**state.params, "epochs": state.params["head_epochs"]})
    head_work = local_training.training_work(head_state, trained_tensors=state.own)
    return replace(task_spec, work=task_spec.work.add(head_work))


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the head, then the representation, and send the representation (FedRep, Algorithm 1)."""
    head, model, steps = set(site.load("own")), load_device_network(site), 0.0
    body = model.keys() - head
    frozen, adapters = fedlora.load_backbone(task, site, {})
    fit, epochs = local_training.fit_from_task(task), task.params["head_epochs"] if head else 0
    head_share = epochs / (epochs + fit.epochs)  # share of the work

    def train_tensors(
        site: core.ClientContext, fit: core.Fit, names: Collection[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        hooks = core.Hooks(prepare=adapters.prepare, steps=(core.Step(rate=lambda name: float(name in names)),))
        network, start = task.params["network"], {**frozen, **model}
        trained, metrics = site.engine.train(
            network, start, site.train, fit, site.rng, hooks=hooks, progress=site.progress
        )
        return {name: trained[name] for name in model}, metrics

    if epochs:
        phase_site = replace(site, progress=lambda fraction: site.progress(head_share * fraction))
        model, metrics = train_tensors(phase_site, replace(fit, epochs=epochs), head)
        steps = metrics["steps"]
    phase_site = replace(site, progress=lambda fraction: site.progress(head_share + (1 - head_share) * fraction))
    model, metrics = train_tensors(phase_site, fit, body)
    return split_result(
        core.ClientResult({"model": model}, float(len(site.train)), {**metrics, "steps": steps + metrics["steps"]}),
        body,
    )


METHOD = replace(
    fedavg.METHOD,
    traits=replace(fedavg.METHOD.traits, sent_data="the representation", private_data="its head"),
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
