"""FT-Part: devices with enough memory fine-tune the last layers of a pre-trained network.

Paper: FedStitch (arXiv 2409.07202), section V-A3 and Table III, a baseline of its group 2: federated averaging of a
pre-trained model's classifier, in which almost all devices can take part.

Deviations: the memory limit is that of `ft_full`. A frozen layer keeps no activations: a step is assumed to need the
share `kept` of an example's bytes in the training of the whole network, without gradients of frozen weights, because
the bundle has no activations by layer. Frozen tensors are sent once and keep their statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt import core
from fedquilt.methods import fedavg, fedrep, ft_full
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(ft_full.Params):
    """FT-Full's parameters, and the layers that are trained."""

    layers: Annotated[int, Meta(ge=1)] = 1  # last layers that are trained, the head first
    kept: Annotated[float, Meta(gt=0, le=1)] = 0.5  # share of an example's training memory with frozen layers


def init(bundle: core.Bundle, params: Params, seed: int) -> fedrep.State:
    """Return the first state, with the last layers as shared tensors and frozen first layers.

    Raises:
        ModelError: If the network has no last linear layer.
    """
    initial = fedavg.init(bundle, params, seed)
    return fedrep.split_state(initial, initial.model.keys() - last_layer_tensors(initial, params.layers))


def last_layer_tensors(initial: NetworkState, count: int) -> set[str]:
    """Return the tensor names of the last `count` layers, of which the classifier is the last.

    Raises:
        ModelError: If the network has no last linear layer.
    """
    layers, head = initial.register.parameters_by_layer(), initial.register.find_classifier()
    if head is None:
        raise core.ModelError("the network has no last linear layer: choose another method")
    last_layers = [*(name for name in layers if name != head), head][-count:]
    return {entry.name for entry in initial.register.tensors if entry.layer in last_layers}


def send(state: fedrep.State, device: core.DeviceView) -> core.TaskSpec | None:
    """Return the task spec to train the last layers, or None if the device lacks the memory."""
    reduced_state = replace(state, example_bytes=int(state.params["kept"] * state.example_bytes))
    full_state = replace(reduced_state, model={**state.own, **state.model})
    task_spec = local_training.training_task_spec(
        full_state, {"model": state.model, "own": state.own}, trained_tensors=state.model
    )
    predicted_examples = local_training.minimum_batch(full_state, state.model)
    return ft_full.limit_by_memory(task_spec, reduced_state, device, ("torch", "numpy"), predicted_examples)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the last layers on the frozen ones, and return a result that sends only the last layers."""
    model = site.load("model")
    start = {**site.load("own"), **model}
    client_result = local_training.train_from(
        task, site, start, core.Hooks(steps=(core.Step(rate=lambda name: float(name in model)),))
    )
    return replace(client_result, bundles={"model": {name: client_result.bundles["model"][name] for name in model}})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the frozen network with the received last layers on the held-out examples."""
    return site.engine.evaluate(task.params["network"], {**site.load("own"), **site.load("model")}, site.held_out)


def result(state: fedrep.State) -> core.Artefact:
    """Return the whole network. Its frozen layers are the same on all devices."""
    return local_training.weights_artefact(state.network, {**state.own, **state.model})


METHOD = replace(
    fedrep.METHOD,
    paper="arXiv 2409.07202, section V-A3",
    params=Params,
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    result=result,
    personal_model=None,
    traits=replace(
        fedrep.METHOD.traits, sent_data="the last layers", private_data="", frozen_weights="all but the last layers"
    ),
)
