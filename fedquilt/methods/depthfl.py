"""DepthFL: each device trains the first stages of the network, with a classifier after each.

Paper: Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023, section 3. A device of
depth d has the first d stages with their classifiers, and minimises

    sum_{i <= d} CE_i + c(t)/(d - 1) * sum_i sum_{j != i} KL(p_j || p_i),   p_j constant in its term,
    c(t) = exp(-5 (1 - min(t, ramp)/ramp)^2) in round t.

The direction of the divergence is that of the public implementation: each exit learns from the outputs of the other
exits. A tensor of the new global model is the mean over the devices that have the tensor. Evaluation uses the mean of
all scores.

Deviations: a classifier consists of an average over pixels and a linear layer (the paper has attention and separable
convolutions before it), and the last classifier is the network's own. FedDyn's term is left out. A stage is a run of
consecutive blocks. Depth follows the memory tier, and is the least for a device that has not reported its memory. The
mean is weighted by examples. The result is the network "exits", whose output is the mean of all scores. Its tensors
except `exit.*` are those of the plain network. One exit is bit-identical to FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.formats import tensor_register
from fedquilt.methods import fedavg, heterofl
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.networks import stages
from fedquilt.models.partial import width as by_width
from fedquilt.models.partial.width import TensorCut, WeightedEntrySums

Depth = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the number of exits by memory tier."""

    exits: Depth = 4  # stages, each with a classifier; no more than the network has blocks
    depths: tuple[Depth, Depth, Depth, Depth, Depth] = (1, 1, 2, 3, 4)  # d: under 1 GB, from 1, 2, 4 and 8 GB
    ramp: Depth = 300  # rounds until c is 1


def init(bundle: core.Bundle, params: Params, seed: int) -> NetworkState:
    """Return the first state, with a random linear classifier after each stage but the last."""
    initial = fedavg.init(bundle, params, seed)
    network = stages.split_stages(initial.model, params.exits, initial.register)
    rng = tensors.seeded_rng(seed, "depthfl", "exits")
    model = dict(initial.model)
    for index, stage in enumerate(network.stages[1:]):  # exit i classifies the input of stage i + 1
        bound = stage.width**-0.5
        model[f"exit.{index}.weight"] = rng.uniform(-bound, bound, (network.classes, stage.width)).astype(np.float32)
        model[f"exit.{index}.bias"] = np.zeros(network.classes, np.float32)
    return replace(initial, model=model)


def body(state: NetworkState) -> stages.StagedNetwork:
    """Return the plain network, without exits, divided into stages."""
    return stages.split_stages(state.model, state.params["exits"], state.register)


def leading_stage_places(state: NetworkState, depth: int) -> TensorCut:
    """Select the first `depth` stages and their exits, with all entries of each tensor."""
    network = body(state)
    names = [name for stage in network.stages[:depth] for name in stage.names]
    names += [f"exit.{i}.{suffix}" for i in range(min(depth, len(network.stages) - 1)) for suffix in ("weight", "bias")]
    if depth >= len(network.stages):
        names += [name for name in state.model if not name.startswith("exit.") and name not in names]
    return dict.fromkeys(sorted(names), (None, None))


def exit_inputs(body: stages.StagedNetwork) -> list[list[Any]]:
    """Return, for each exit, the layer that receives the same input, and the input's channel count."""
    return [[stage.entrance, stage.width] for stage in body.stages[1:]]


def send(state: NetworkState, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the first stages that the device's memory tier allows."""
    depth = by_width.select_by_tier(device.profile, state.params["depths"])
    task_spec = heterofl.part_task_spec(state, leading_stage_places(state, depth), 1.0)
    network = body(state)
    inputs = exit_inputs(network)[:depth]
    params = {**task_spec.params, "looks": inputs, "classes": network.classes, "whole": depth >= len(network.stages)}
    return replace(task_spec, params=params)


@dataclass
class Exits:
    """Exits of a sub-network, with their scores on the latest mini-batch."""

    inputs: tuple[stages.Stage, ...]
    classes: int
    has_all_stages: bool
    strength: float = 0.0  # c(t)
    scores: list[Any] = field(default_factory=list)

    def make_prepare_hook(self, start: Mapping[str, np.ndarray]) -> Any:
        """Return the hook that adds the exits to the plain network. `start` has the tensors of both."""

        def add_exits(module: Any) -> Any:
            plain_names = module.state_dict().keys()
            initial = {name: array for name, array in start.items() if name in plain_names}
            module = stages.keep_first_stages(
                module,
                initial,
                self.inputs,
                lambda stage_inputs, final_scores: self._combine_scores(module, stage_inputs, final_scores),
                keep_later_stages=self.has_all_stages,
            )
            return stages.add_exits(module, self.inputs, self.classes)

        return add_exits

    def _combine_scores(self, module: Any, stage_inputs: list[Any], final_scores: Any) -> Any:
        """Return the mean of the exits' scores. The scores of each exit are stored in `scores`."""
        import torch

        self.scores = [linear(x) for linear, x in zip(module.exit, stage_inputs, strict=True)]
        self.scores += [] if final_scores is None else [final_scores]
        return torch.stack(self.scores).mean(dim=0) if len(self.scores) > 1 else self.scores[0]

    def divergence(self, forward: core.ForwardPass) -> Any:
        """Return c(t)/(d - 1) * sum_i sum_{j != i} KL(p_j || p_i), the divergence of the exits' outputs."""
        import torch

        log_probabilities = [torch.log_softmax(exit_scores, dim=1) for exit_scores in self.scores]
        total = forward.scores.new_zeros(())
        for i, log_p_i in enumerate(log_probabilities):
            for j, log_p_j in enumerate(log_probabilities):
                if i != j:
                    target = log_p_j.detach()
                    total = total + (target.exp() * (target - log_p_i)).sum(dim=1).mean()
        return self.strength / max(len(log_probabilities) - 1, 1) * total


def exits_from_task(task: core.Task) -> Exits:
    """Return the exits of a task, with the weight c(t) of the KL terms in the task's round."""
    inputs = tuple(stages.Stage(str(entrance), int(width), ()) for entrance, width in task.params["looks"])
    ramp = task.params["ramp"]
    strength = math.exp(-5 * (1 - min(task.round, ramp) / ramp) ** 2)
    return Exits(inputs, task.params["classes"], task.params["whole"], strength)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train all exits of the sub-network together, or as FedAvg if there is one exit."""
    exits = exits_from_task(task)
    if not exits.inputs:
        return fedavg.work(task, site)
    steps = (core.Step(exits=lambda: exits.scores, penalty=exits.divergence),)
    return fedavg.work(task, site, core.Hooks(prepare=exits.make_prepare_hook(site.load("model")), steps=steps))


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's sub-network on the held-out examples."""
    exits, model = exits_from_task(task), site.load("model")
    hooks = core.Hooks(prepare=exits.make_prepare_hook(model)) if exits.inputs else core.Hooks()
    return site.engine.evaluate(task.params["network"], model, site.held_out, hooks=hooks)


def fold(state: NetworkState, accumulator: WeightedEntrySums | None, update: core.DeviceUpdate) -> WeightedEntrySums:
    """Return the sums with an update's entries added. Raise UpdateError if its tensors fit no depth."""
    model = heterofl.require_sent_model(update)
    cuts = [leading_stage_places(state, depth) for depth in sorted(set(state.params["depths"]))]
    return by_width.add_entries(
        state.model, accumulator, model, by_width.recognise_cut(state.model, model, cuts), update.weight
    )


def step(state: NetworkState, total: WeightedEntrySums | None) -> NetworkState:
    """Return the state with the mean of each entry over the devices that sent the entry."""
    return replace(state, model=by_width.average_entries(state.model, total))


def result(state: NetworkState) -> core.Artefact:
    """Return the network with its classifiers, or the plain network if there is one exit."""
    network, table = body(state), tensor_register.without_register(state.network)
    if len(network.stages) > 1:
        inputs = {"input": table["input"]} if "input" in table else {}
        table = {"name": "exits", "of": table, "looks": exit_inputs(network), "classes": network.classes, **inputs}
    return core.Artefact("weights", {"network": table}, local_training.with_aliases(state.network, state.model))


METHOD = replace(
    fedavg.METHOD,
    paper="ICLR 2023 (DepthFL)",
    params=Params,
    engines=("torch",),
    traits=replace(  # exits share distributions over classes
        fedavg.METHOD.traits, sent_data="the first stages and exits, by its memory tier", prediction_tasks=("classes",)
    ),
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    aggregation=core.Aggregation(
        fold, accumulator=lambda state: WeightedEntrySums, schema=local_training.partial_model_schema
    ),
    step=step,
    result=result,
)
