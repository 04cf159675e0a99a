"""FedBABU: the last layers keep their first values in training, and each device fine-tunes the network for itself.

Paper: Oh, Kim and Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022 (arXiv
2106.06042), Algorithm 1: devices train all layers but the head, which keeps its random values, and the server averages
these layers. Before a device uses the network, it fine-tunes all layers on its own examples.

Deviations: the mean is weighted by examples, as in FedAvg. The fine-tuned network is made for an evaluation and is not
kept. It is tuned by plain steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt import core
from fedquilt.methods import fedavg, fedavg_ft, fedrep, ft_part, perfedavg
from fedquilt.models import local_training

TRAITS = replace(fedavg.METHOD.traits, sent_data="all but the last layers")


@dataclass(frozen=True)
class Params(fedavg_ft.Params):
    """FedAvg-FT's parameters, and the number of layers that keep their first values."""

    alpha: Annotated[float, Meta(ge=0)] = 0.01  # learning rate of the fine-tuning; 0 keeps the head's random values
    layers: Annotated[int, Meta(ge=1)] = 1  # last layers that are not trained before the fine-tuning


def init(bundle: core.Bundle, params: Params, seed: int) -> fedrep.State:
    """Return the first state, with the last layers apart.

    Raises:
        ModelError: If the network has no last linear layer, or no other layers.
    """
    initial = fedavg.init(bundle, params, seed)
    last = ft_part.last_layer_tensors(initial, params.layers)
    if set(initial.trained_names()) <= last:
        raise core.ModelError(f"layers = {params.layers} are all layers of the network: use a smaller number")
    return fedrep.split_state(initial, last)


def send(state: fedrep.State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train all but the last layers. The last layers are sent once."""
    network = state.plain_state_with({**state.own, **state.model})
    bundles = {"model": state.model, "own": state.own}
    task_spec = local_training.training_task_spec(network, bundles, TRAITS, trained_tensors=state.model)
    return perfedavg.with_adaptation(task_spec, network)


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the received network, fine-tuned on the device's examples, on the held-out examples."""
    network = {**site.load("own"), **site.load("model")}
    return site.engine.evaluate(task.params["network"], perfedavg.adapt(task, site, network), site.held_out)


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2106.06042",
    params=Params,
    state=fedrep.State,
    init=init,
    send=send,
    work=ft_part.work,
    check=check,
    result=fedrep.result,
)
