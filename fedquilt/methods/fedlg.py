"""FedLG: devices share only the learnGene, the convolutions with the smallest gradients.

Papers: Wang et al., Learngene: From Open-World to Your Learning Task, AAAI 2022 (arXiv 2106.06788), selects the layers
that change least while an ancestor model learns. FedLG is a baseline in GENE-FL's comparison (arXiv 2504.14628,
section 4) that "extracts information from gradient updates". There three convolutions of a ResNet18 are shared (18.28
MiB): two of 512x512x3x3 and one of 128x64x3x3. The unit is therefore a convolution's weight tensor.

In the first rounds (`probe`) devices train, and report the gradient size of each convolution in their mini-batches: the
root mean square over its values, from the Fisher diagonal with one group per mini-batch (`Trainer.fisher`). The
coordinator averages the sizes and shares the `layers` smallest from then on.

Deviations: GENE-FL's paper has no formula for the choice. The mean norm per parameter is our choice, made once. There
is one cluster. In a network without convolutions, weight matrices other than the head's take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import fedavg, fedrep, parfed
from fedquilt.models import local_training


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the size of the learnGene and the number of probing rounds."""

    layers: Annotated[int, Meta(ge=1)] = 3  # convolutions in the learnGene
    probe: Annotated[int, Meta(ge=1)] = 1  # rounds in which gradients are measured and no weights are sent


@dataclass(frozen=True)
class State(fedrep.State):
    """First values of all tensors as `own`, and the shared tensors as `model`."""

    candidates: tuple[str, ...]
    sizes: dict[str, float]  # sum over rounds of the devices' mean gradient size
    probed: int = 0  # rounds
    shared: tuple[str, ...] = ()  # the learnGene; empty: not yet known

    @property
    def phase(self) -> str:
        """Phase of the job: "probe" until the learnGene is chosen, then "share"."""
        return "share" if self.shared else "probe"


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with no shared tensors and every convolution as a candidate."""
    initial = fedavg.init(bundle, params, seed)
    names = tuple(parfed.convolution_weights(initial))
    split = fedrep.split_state(initial, initial.model.keys())
    return State(**vars(split), candidates=names, sizes=dict.fromkeys(names, 0.0))


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train. While probing, one more pass measures gradient sizes."""
    task_spec = fedrep.send(state, device)
    work = task_spec.work
    if not state.shared:  # one more pass, forward and back, for the gradients of the trained network
        one_epoch = replace(state.plain_state_with({**state.own, **state.model}), params={**state.params, "epochs": 1})
        work = work.add(local_training.training_work(one_epoch))
    params = {**task_spec.params, "candidates": list(state.candidates), "shared": list(state.shared)}
    return replace(task_spec, params=params, work=work)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the device's network, and return the learnGene or, while probing, the gradient sizes."""
    client_result = fedrep.split_result(
        local_training.train_from(task, site, fedrep.load_device_network(site)), task.params["shared"]
    )
    if task.params["shared"]:
        return client_result
    squares = site.engine.fisher(
        task.params["network"], client_result.private_state, site.train, examples_per_gradient=task.params["batch"]
    )
    sizes = {name: np.sqrt(np.mean(squares[name], dtype=np.float64)) for name in task.params["candidates"]}
    return replace(
        client_result, bundles={"sizes": {name: np.array([size], np.float64) for name, size in sizes.items()}}
    )


def update_schema(state: State) -> core.UpdateSchema:
    """Return the schema of an update: the learnGene or, while probing, the gradient sizes."""
    if state.shared:
        return core.UpdateSchema({"model": {name: state.own[name] for name in state.shared}})
    return core.UpdateSchema({"sizes": {name: np.zeros(1) for name in state.candidates}})


def fold(state: State, accumulator: WeightedSums | None, update: core.DeviceUpdate) -> WeightedSums:
    """Return the sums with an update's learnGene, or while probing its gradient sizes, added in place."""
    if state.shared:
        reference = {name: state.own[name] for name in state.shared}
        return fedavg.fold(replace(state, model=reference), accumulator, update)
    sizes = update.bundles.get("sizes", {})
    reference = {name: np.zeros(1) for name in state.candidates}
    tensors.require_matching(sizes, reference)
    if any((size < 0).any() for size in sizes.values()):
        raise core.UpdateError(f"{update.device} reports a negative gradient size")
    return fedavg.fold(replace(state, model=reference), accumulator, replace(update, bundles={"model": sizes}))


def step(state: State, total: WeightedSums | None) -> State:
    """Return the state with the mean learnGene or, while probing, with added gradient sizes.

    The last probing round chooses the learnGene.
    """
    if total is None or total.weight == 0:
        return state
    if state.shared:
        shared_tensors: Mapping[str, np.ndarray] = {name: state.own[name] for name in state.shared}
        return replace(state, model=tensors.cast_like(total.mean(), shared_tensors))
    mean = total.mean()
    sizes = {name: size + float(mean[name][0]) for name, size in state.sizes.items()}
    smallest = sorted(sizes, key=lambda name: (sizes[name], name))[: state.params["layers"]]
    shared = tuple(sorted(smallest)) if state.probed + 1 >= state.params["probe"] else ()
    return replace(state, sizes=sizes, probed=state.probed + 1, shared=shared)


def explain(state: State) -> list[str]:
    """Return a sentence with the layers of the learnGene after the round that chose them, otherwise []."""
    return [f"the learnGene is {', '.join(state.shared)}"] if state.shared and not state.model else []


METHOD = replace(
    parfed.METHOD,
    traits=replace(
        parfed.METHOD.traits, sent_data="gradient sizes, then the learnGene", private_data="all other tensors"
    ),
    paper="arXiv 2106.06788, as in arXiv 2504.14628",
    params=Params,
    state=State,
    init=init,
    send=send,
    work=work,
    aggregation=core.Aggregation(fold, accumulator=lambda state: WeightedSums, schema=update_schema),
    step=step,
    explain=explain,
)
