"""FedRep: all devices learn a representation together, and each has a head of its own.

Paper: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
(arXiv 2102.07078), Algorithm 1: in a round a device first takes steps on its head with the received
representation frozen, then on the representation with its head frozen; the server averages the
representations. The head stays on the device.

Deviations: both parts are trained by whole epochs (`head_epochs`, then `epochs`), as in the authors' own code.
The mean is weighted by examples, as FedAvg's, where the paper's devices all have as many. Frozen
normalisation layers keep their statistics too. A device's first head is the job's, not one fitted before round 0.
With `rank` above 0 the representation is low-rank adapters in a frozen pre-trained network (`fedlora`).

Other methods that share a part of the network use the halves of this one (`split`, `whole`): the
shared part is `State.model`, and the rest begins as `State.own`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import tensors
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    DeviceView,
    EvaluationSums,
    Fit,
    Hooks,
    JobError,
    ModelError,
    Order,
    Site,
    Step,
    Task,
    Tensors,
    same_for_all,
)
from fedquilt.methods import fedavg, fedlora


@dataclass(frozen=True)
class Params(fedavg.Params):
    """Settings of both parts; `epochs` is the representation's."""

    head_epochs: Annotated[int, Meta(ge=0)] = 10  # tau: passes over the examples that train the head alone
    rank: Annotated[int, Meta(ge=0)] = 0  # r of low-rank adapters as the representation; 0: the network's own layers
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # adapters count alpha / r
    head: tuple[str, ...] | None = None  # layers that stay on the device; not given: the classifier; []: FedAvg


@dataclass(frozen=True)
class State(fedavg.State):
    """Shared tensors as `model`, first values of the devices' own tensors, and tensors that nobody trains."""

    own: dict[str, np.ndarray]
    backbone: dict[str, np.ndarray]  # frozen network around the adapters; {}: no adapters


# -- sharing a part -------------------------------------------------------------------------------


def split(begun: fedavg.State, own: Collection[str]) -> State:
    """FedAvg's state with the tensors named in `own` left to the devices."""
    shared = {name: array for name, array in begun.model.items() if name not in own}
    rest = {name: array for name, array in begun.model.items() if name in own}
    return State(**vars(replace(begun, model=shared)), own=rest, backbone={})


@same_for_all
def send(state: State, device: DeviceView) -> Order:
    """Return the order to train the whole network. Only its shared part is sent anew each round."""
    trained = {**state.own, **state.model}
    all_of_it = {**state.backbone, **trained}
    plain = state.of(all_of_it)
    if state.backbone:
        plain = fedlora.adapted(fedlora.State(**vars(state.of(trained)), backbone=state.backbone))
    still = {"backbone": state.backbone} if state.backbone else {}
    order = fedavg.training_order(plain, {"model": state.model, "own": state.own, **still}, moved=trained)
    return fedlora.with_adapted_layers(order, state.network) if state.backbone else order


def whole(site: Site) -> dict[str, np.ndarray]:
    """The device's network: the received part with its own rest, or the job's rest before it has trained."""
    own = site.load("own")
    tensors.require_like(site.local, {name: own[name] for name in own if name in site.local})
    return {**own, **site.local, **site.load("model")}


def parted(answer: Answer, shared: Collection[str]) -> Answer:
    """Answer that sends the shared part of a whole network, and keeps the rest on the device."""
    model = answer.bundles["model"]
    sent = {name: model[name] for name in sorted(shared)}
    return replace(answer, bundles={"model": sent}, local={name: model[name] for name in model if name not in sent})


def work_on_all(task: Task, site: Site) -> Answer:
    """Train everything at once and send the shared part."""
    return parted(fedavg.trained(task, site, whole(site)), site.load("model"))


def backbone_and_insert(task: Task, site: Site) -> tuple[Tensors, Any]:
    """Return the frozen tensors and the hook that inserts adapters, or {} and None without adapters."""
    if not task.params.get("rank"):
        return {}, None
    backbone = site.load("backbone")
    return backbone, fedlora.adapter_hooks(task, {}).prepare


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the shared part with the device's own rest."""
    still, prepare = backbone_and_insert(task, site)
    model = {**still, **whole(site)}
    return site.engine.evaluate(task.params["network"], model, site.held, hooks=Hooks(prepare=prepare))


def personal(task: Task, site: Site) -> Tensors:
    """The network that `check` evaluates, adapters merged into its weights."""
    still, _ = backbone_and_insert(task, site)
    return fedlora.merge_adapters(task.params, still, whole(site)) if still else whole(site)


def result(state: State) -> Artefact:
    """Return the shared part in the first network. `meta["private"]` names the tensors of devices."""
    model, private = {**state.own, **state.model}, sorted(state.own.keys() - state.model.keys())
    if state.backbone:
        model = fedlora.merged_model(fedlora.State(**vars(state.of(state.model)), backbone=state.backbone))
    return fedavg.weights_artefact(state.network, model, private=private)


# -- the method -----------------------------------------------------------------------------------


def init(bundle: Bundle, params: Params, seed: int) -> State:
    """Split the bundle's network into representation and head.

    Raises:
        JobError: `head` together with `rank`.
        ModelError: no last linear layer, an unknown layer, or nothing left to share.
    """
    begun = fedavg.init(bundle, params, seed)
    if params.rank:
        if params.head is not None:
            raise JobError(
                "head and rank: the device's own layer is the one that tells classes where adapters are shared"
            )
        both = replace(begun, model=fedlora.initial_shared_part(begun.model, params.rank, seed, begun.network))
        return replace(split(both, fedlora.head_names(begun.network)), backbone=begun.model)
    found, last = begun.register.parameters_by_layer(), begun.register.classifier() if params.head is None else None
    chosen = params.head if params.head is not None else (last,) if last else ()
    inside = {entry.module: entry.layer for entry in begun.register.tensors}
    chosen = tuple(inside.get(name, name) for name in chosen)  # a normalisation goes with its layer
    if params.head is None and last is None:
        raise ModelError('this network has no last linear layer: name the layers that stay, as head = ["conv10"]')
    if odd := sorted(set(chosen) - found.keys()):
        raise ModelError(f"head: the network has no layer {odd[0]!r}; it has {', '.join(found)}")
    if chosen and found.keys() == set(chosen):
        raise ModelError("head: these are all layers, nothing would be shared; the method 'local' does that")
    return split(begun, {name for layer in chosen for name in found[layer]})


def order(state: State, device: DeviceView) -> Order:
    """Order training of head and representation; the head's own epochs train nothing else."""
    sent = send(state, device)
    if not state.own:
        return sent
    all_of_it = state.of({**state.backbone, **state.own, **state.model})
    light = replace(all_of_it, params={**state.params, "epochs": state.params["head_epochs"]})
    head = fedavg.training_order(light, {}, moved=state.own).work
    return replace(sent, work=sent.work.plus(head))


def work(task: Task, site: Site) -> Answer:
    """Train the head for its epochs, then the representation; only the latter is sent."""
    head, model, steps = set(site.load("own")), whole(site), 0.0
    body = model.keys() - head
    still, prepare = backbone_and_insert(task, site)
    fit, epochs = fedavg.fit_of(task), task.params["head_epochs"] if head else 0
    first = epochs / (epochs + fit.epochs)  # share of the work

    def moved(site: Site, fit: Fit, names: Collection[str]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """The device's network after training the tensors of these names only, and the engine's metrics."""
        hooks = Hooks(prepare=prepare, steps=(Step(rate=lambda name: float(name in names)),))
        network, start = task.params["network"], {**still, **model}
        after, told = site.engine.train(network, start, site.train, fit, site.rng, hooks=hooks, progress=site.progress)
        return {name: after[name] for name in model}, told

    if epochs:
        at = replace(site, progress=lambda done: site.progress(first * done))
        model, told = moved(at, replace(fit, epochs=epochs), head)
        steps = told["steps"]
    at = replace(site, progress=lambda done: site.progress(first + (1 - first) * done))
    model, told = moved(at, fit, body)
    return parted(Answer({"model": model}, float(len(site.train)), {**told, "steps": steps + told["steps"]}), body)


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2102.07078",
    params=Params,
    state=State,
    init=init,
    send=order,
    work=work,
    check=check,
    result=result,
    personal=personal,
)
