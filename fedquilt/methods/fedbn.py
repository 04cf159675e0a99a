"""FedBN: batch normalisation stays on the device, all else is averaged.

Paper: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021
(arXiv 2102.07623), Algorithm 1: weight, bias and running statistics of batch norm layers are never sent.

Every normalisation that keeps running statistics stays on the device, by whatever name (`fedquilt.tensor_register`).
Batch norm without running statistics is averaged like all else.

Deviations: the result carries the batch norm tensors that the job began with, as the devices' own are known to
nobody else; `meta["private"]` names them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt import tensors
from fedquilt.core import Answer, Artefact, Bundle, DeviceView, EvaluationSums, Order, Site, Task, Tensors, same_for_all
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class State(fedavg.State):
    """Shared tensors as `model`, and the batch norm tensors that every device starts from."""

    norm: dict[str, np.ndarray]


def private_names(state: fedavg.State) -> set[str]:
    """Return the names of normalisations' tensors with running statistics, and of all running statistics."""
    register = state.register
    running = [entry for entry in register.tensors if register.is_running_statistic(entry.name)]
    return {entry.name for entry in running} | register.tensors_of_modules(
        {each.module for each in running if each.normalises}
    )


def init(bundle: Bundle, params: Any, seed: int) -> State:
    """Split the bundle's model into shared tensors and batch norm."""
    begun = fedavg.init(bundle, params, seed)
    own = private_names(begun)
    shared = {name: array for name, array in begun.model.items() if name not in own}
    norm = {name: begun.model[name] for name in begun.model if name in own}
    return State(**vars(replace(begun, model=shared)), norm=norm)


@same_for_all
def send(state: State, device: DeviceView) -> Order:
    """Order training of the shared tensors; batch norm's first values never change, so they are sent once."""
    return fedavg.training_order(state, {"model": state.model, "norm": state.norm})


def work(task: Task, site: Site) -> Answer:
    """Train the whole network; batch norm stays as the device's own."""
    answer = fedavg.trained(task, site, personal(task, site))
    model, own = answer.bundles["model"], site.load("norm").keys()
    shared = {name: array for name, array in model.items() if name not in own}
    return replace(answer, bundles={"model": shared}, local={name: model[name] for name in own})


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the shared tensors with the device's own batch norm."""
    return site.engine.evaluate(task.params["network"], personal(task, site), site.held)


def result(state: State) -> Artefact:
    """Return the shared model with the batch normalisation's tensors of the job's start."""
    return fedavg.weights_artefact(state.network, {**state.model, **state.norm}, private=sorted(state.norm))


def personal(task: Task, site: Site) -> Tensors:
    """Shared tensors with the device's own batch norm, or the job's first before it has trained."""
    norm = site.load("norm")
    if site.local:
        tensors.require_like(site.local, norm)
    return {**site.load("model"), **norm, **site.local}


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2102.07623",
    state=State,
    init=init,
    send=send,
    work=work,
    check=check,
    result=result,
    personal=personal,
)
