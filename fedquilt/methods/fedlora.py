"""FedLoRA: low-rank adapters and the head of a frozen pre-trained network are averaged.

Papers: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv 2106.09685), on the output projections of
attention and feed-forward layers as in FedSDG's comparison (section 3.4), averaged as in McMahan et al.
(arXiv 1602.05629). With `mu` above 0 the adapters and the head have FedProx's proximal term (arXiv 1812.06127, Eq. 2).

Deviations: in a network without attention every linear layer before the head is adapted. The result is the plain
network with the adapters merged into its weights. A and B are averaged separately, as usual, although the mean of
products is not the product of means. FedRep and Ditto on adapters are those methods with `rank` above 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.costs import cost_model
from fedquilt.formats import tensor_register
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import lora

TRAITS = replace(
    fedavg.METHOD.traits,
    sent_data="low-rank adapters and the head",
    frozen_weights="all but the head",
    model_copies="mu",
)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters with Adam, and the adapters' parameters."""

    lr: Annotated[float, Meta(gt=0)] = 1e-3
    optimizer: core.Choice = "adam"
    clip: Annotated[float, Meta(ge=0)] = 1.0  # largest gradient norm, over all that is trained; 0: no clipping
    rank: Annotated[int, Meta(ge=1)] = 8  # r
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # factor of the adapters: alpha / r
    mu: Annotated[float, Meta(ge=0)] = 0.0  # pull towards the received values; above 0: FedProx


@dataclass(frozen=True)
class State(NetworkState):
    """Adapters and head as `model`, and the frozen backbone."""

    backbone: dict[str, np.ndarray]


def init(bundle: core.Bundle, params: Any, seed: int) -> State:
    """Return the first state: new adapters in the bundle's network, which is the frozen backbone."""
    initial = fedavg.init(bundle, params, seed)
    model = initial_shared_part(initial.model, params.rank, seed, initial.network)
    return State(**vars(replace(initial, model=model)), backbone=initial.model)


def initial_shared_part(
    backbone: core.Tensors, rank: int, seed: int, network: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the first values of the adapters, and the backbone's head."""
    return {
        **lora.initial_shared_adapters(backbone, adapted_layers(network), rank, tensors.seeded_rng(seed, "lora")),
        **{name: backbone[name] for name in head_names(network)},
    }


def adapted_layers(network: Mapping[str, Any]) -> tuple[lora.AdapterSite, ...]:
    """Return the layers that have adapters, with their shapes, grouped by block."""
    return lora.find_adapted_layers(tensor_register.register_from_table(network))


def head_names(network: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classifier's tensors.

    Raises:
        ModelError: If the last layer of the network is not linear.
    """
    register = tensor_register.register_from_table(network)
    head = register.find_classifier()
    if head is None:
        raise core.ModelError("the network has no last linear layer, which LoRA also trains: choose another method")
    return register.parameters_by_layer()[head]


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train adapters and head. The frozen backbone is sent once."""
    bundles = {"model": state.model, "backbone": state.backbone}
    return with_adapted_layers(
        local_training.training_task_spec(make_adapted_state(state), bundles, TRAITS, trained_tensors=state.model),
        state.network,
    )


def with_adapted_layers(task_spec: core.TaskSpec, network: Mapping[str, Any]) -> core.TaskSpec:
    """Return the task spec with the names of the adapted layers in its parameters."""
    return replace(task_spec, params={**task_spec.params, "places": adapted_layers(network)})


def make_adapted_state(state: State) -> NetworkState:
    """Return a plain state of the backbone with adapters, from which size and cost are computed."""
    full_state = state.plain_state_with({**state.backbone, **state.model})
    added = {name: array for name, array in state.model.items() if name not in state.backbone}
    return replace(full_state, layers=cost_model.add_adapter_layers(state.layers, state.backbone, added))


def adapter_scale(params: Mapping[str, Any]) -> float:
    """Return the factor of the adapters, alpha / r."""
    return float(params["alpha"] / params["rank"])


def make_adapter_hooks(task: core.Task, trained: core.Tensors) -> core.Hooks:
    """Return hooks that insert the adapters, train the tensors in `trained` and freeze all others."""
    sites, rank = lora.sites_from_json(task.params["places"]), task.params["rank"]
    mu = task.params.get("mu", 0.0)

    def prepare(module: Any) -> Any:
        from fedquilt.models.partial import adapter_layers

        return adapter_layers.insert_adapters(module, sites, rank, adapter_scale(task.params))

    pull = (lambda gradient, value, anchors: gradient + mu * (value - anchors["start"])) if mu else None
    return core.Hooks(
        prepare=prepare, correct_gradient=pull, steps=(core.Step(rate=lambda name: float(name in trained)),)
    )


def load_backbone(task: core.Task, site: core.ClientContext, trained: core.Tensors) -> tuple[core.Tensors, core.Hooks]:
    """Return the frozen tensors and the hooks that insert adapters. Both are empty without adapters."""
    return (site.load("backbone"), make_adapter_hooks(task, trained)) if task.params.get("rank") else ({}, core.Hooks())


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the adapters and the head on the frozen backbone, and return only these."""
    backbone, received = site.load("backbone"), site.load("model")
    client_result = local_training.train_from(task, site, {**backbone, **received}, make_adapter_hooks(task, received))
    model = client_result.bundles["model"]
    return replace(client_result, bundles={"model": {name: model[name] for name in received}})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the backbone with the received adapters and head on the held-out examples."""
    backbone, received = site.load("backbone"), site.load("model")
    adapter_hooks = make_adapter_hooks(task, received)
    return site.engine.evaluate(task.params["network"], {**backbone, **received}, site.held_out, hooks=adapter_hooks)


def result(state: State) -> core.Artefact:
    """Return the job's network with the adapters merged into its weights."""
    return local_training.weights_artefact(state.network, merged_model(state))


def merged_model(state: State) -> dict[str, np.ndarray]:
    """Return the backbone with the state's adapters merged into its weights."""
    return merge_adapters({**state.params, "places": adapted_layers(state.network)}, state.backbone, state.model)


def merge_adapters(params: Mapping[str, Any], backbone: core.Tensors, trained: core.Tensors) -> dict[str, np.ndarray]:
    """Return the backbone with adapters merged, and with all other tensors of `trained` put in place."""
    model = {**backbone, **{name: trained[name] for name in trained if name in backbone}}
    return lora.merge_shared(model, trained, lora.sites_from_json(params["places"]), adapter_scale(params))


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2106.09685",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    work=work,
    check=check,
    result=result,
    traits=TRAITS,
)
