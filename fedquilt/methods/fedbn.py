"""FedBN: batch normalisation stays on the device, and all other tensors are averaged.

Paper: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021
(arXiv 2102.07623), Algorithm 1: weight, bias and running statistics of batch norm layers are never sent.

Every normalisation with running statistics stays on the device, whatever its name (`fedquilt.formats.tensor_register`).
Batch norm without running statistics is averaged.

Deviations: the result has the batch norm tensors of the job's start, because the devices' own tensors are never sent.
`meta["private"]` lists their names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class State(NetworkState):
    """Shared tensors as `model`, and the first batch norm tensors of every device."""

    norm: dict[str, np.ndarray]


def private_names(state: NetworkState) -> set[str]:
    """Return the names of running statistics, and of all tensors in normalisations that have them."""
    register = state.register
    running_statistics = [statistic for statistic in register.tensors if register.is_running_statistic(statistic.name)]
    return {statistic.name for statistic in running_statistics} | register.tensors_of_modules(
        {entry.module for entry in running_statistics if entry.normalises}
    )


def init(bundle: core.Bundle, params: Any, seed: int) -> State:
    """Return the first state, with the bundle's model split into shared tensors and batch norm tensors."""
    initial = fedavg.init(bundle, params, seed)
    device_names = private_names(initial)
    shared = {name: array for name, array in initial.model.items() if name not in device_names}
    norm = {name: initial.model[name] for name in initial.model if name in device_names}
    return State(**vars(replace(initial, model=shared)), norm=norm)


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the network. The first batch norm tensors are sent once."""
    return local_training.training_task_spec(state, {"model": state.model, "norm": state.norm})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the whole network. Batch norm tensors stay on the device."""
    client_result = local_training.train_from(task, site, personal(task, site))
    model, device_names = client_result.bundles["model"], site.load("norm").keys()
    shared = {name: array for name, array in model.items() if name not in device_names}
    return replace(client_result, bundles={"model": shared}, private_state={name: model[name] for name in device_names})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the shared tensors with the device's batch norm on the held-out examples."""
    return site.engine.evaluate(task.params["network"], personal(task, site), site.held_out)


def result(state: State) -> core.Artefact:
    """Return the shared model with the batch norm tensors of the job's start."""
    return local_training.weights_artefact(state.network, {**state.model, **state.norm}, private=sorted(state.norm))


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the shared tensors with the device's batch norm, which before training is the initial one."""
    norm = site.load("norm")
    if site.private_state:
        tensors.require_matching(site.private_state, norm)
    return {**site.load("model"), **norm, **site.private_state}


METHOD = replace(
    fedavg.METHOD,
    traits=replace(
        fedavg.METHOD.traits,
        sent_data="the model without batch normalisation",
        private_data="tensors of batch normalisation",
    ),
    paper="arXiv 2102.07623",
    state=State,
    init=init,
    send=send,
    work=work,
    check=check,
    result=result,
    personal_model=personal,
)
