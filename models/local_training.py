"""Local training of one network by mini-batches: method state, predicted cost, task and result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from typing import Any

import msgspec
import numpy as np

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.costs import cost_model, peak_memory
from fedquilt.formats import tensor_register, training_choices

FIT_SETTINGS = tuple(setting.name for setting in fields(core.Fit) if setting.name != "round")


@dataclass(frozen=True)
class NetworkState:
    """Global model, with the parameters of the job and the table and cost of the network."""

    params: dict[str, Any]
    network: dict[str, Any]
    model: dict[str, np.ndarray]
    flops: float  # of one forward pass of one example
    example_bytes: int  # minimum memory of one example in training, without the weights, or 0 if unknown
    layers: tuple[cost_model.Layer, ...] = field(default=(), kw_only=True)  # cost of each layer, or () if unknown

    def costs_by_layer(self) -> tuple[cost_model.Layer, ...]:
        return self.layers or cost_model.parse_layers({"flops": self.flops})

    @property
    def register(self) -> tensor_register.TensorRegister:
        return tensor_register.register_from_table(self.network)

    def trained_names(self) -> list[str]:
        return self.register.parameter_names(self.model)

    def plain_state_with(self, model: Mapping[str, np.ndarray]) -> NetworkState:
        return NetworkState(self.params, self.network, dict(model), self.flops, self.example_bytes, layers=self.layers)


def change_norm(state: NetworkState, update: core.DeviceUpdate) -> float:
    """Return the norm of the difference between an update's model and the state's."""
    squares = (
        float(np.square(np.asarray(value, np.float64) - state.model[name]).sum())
        for name, value in update.bundles["model"].items()
    )
    return math.sqrt(math.fsum(squares))


def unprotected_names(state: NetworkState) -> list[str]:
    """Return the names of the model's counters and running statistics, which noise would make useless."""
    return sorted(state.model.keys() - set(state.trained_names()))


def rebase_model(
    state: NetworkState, earlier: NetworkState, update: core.DeviceUpdate, weight: float
) -> core.DeviceUpdate:
    """Return an update of an earlier model as one of the present model.

    Trained tensors become x + s (y - x_earlier) with the weight s, so that the weighted mean of K updates is FedBuff's
    x + sum(n s (y - x_earlier)) / sum(n) (Nguyen et al. 2022, Algorithm 1, weighted by examples n). The sum is not
    divided by the sum of s, so that stale updates move the model less. Integer counters add their increase. Running
    statistics are mixed, (1 - s) x + s y (FedAsync, Xie et al. 2019, Algorithm 1), because a difference could make a
    variance negative.
    """
    trained_names, model = set(state.trained_names()), {}
    for name, value in update.bundles.get("model", {}).items():
        present = state.model[name]
        if present.dtype.kind in "iu":
            model[name] = present + (value - earlier.model[name])
        else:
            start = earlier.model[name] if name in trained_names else present
            model[name] = (present + weight * (value - start.astype(np.float64))).astype(present.dtype)
    return replace(update, bundles={**update.bundles, "model": model})


def initial_state(bundle: core.Bundle, params: Any) -> NetworkState:
    """Return the state with the bundle's network, or raise ModelError if the bundle has none."""
    if "model" not in bundle.files:
        raise core.ModelError("the bundle has no 'model': add a [model] table to the job and run `fedquilt prepare`")
    table = {name: getattr(params, name) for name in type(params).__dataclass_fields__}
    network, model = dict(bundle.meta["network"]), dict(bundle.load("model"))
    if "register" in bundle.meta:
        network["register"] = msgspec.to_builtins(bundle.meta["register"])
    flops, example_bytes = float(bundle.meta.get("flops", 0)), int(bundle.meta.get("example_bytes", 0))
    layers = cost_model.parse_layers(bundle.meta) if "layers" in bundle.meta else ()
    return NetworkState(table, network, model, flops, example_bytes, layers=layers)


def initial_states_by_tier(bundle: core.Bundle, params: Any) -> dict[str, NetworkState]:
    """Return the initial state of each network: by memory tier, and as "" for all devices without a tier."""
    states = {"": initial_state(bundle, params)}
    for tier, meta in bundle.meta.get("tiers", {}).items():
        prefix = f"{tier}/"
        files = {name.removeprefix(prefix): ref for name, ref in bundle.files.items() if name.startswith(prefix)}
        states[tier] = initial_state(core.Bundle(meta, files, partial(_load_with_prefix, bundle, prefix)), params)
    return states


def _load_with_prefix(bundle: core.Bundle, prefix: str, name: str) -> core.Tensors:
    return bundle.load(prefix + name)


def training_task_spec(
    state: NetworkState,
    bundles: Mapping[str, core.Tensors],
    traits: core.Traits = core.Traits(),
    *,
    trained_tensors: core.Tensors | None = None,
) -> core.TaskSpec:
    """Return the task spec to train the whole network by mini-batches, with its cost by `training_work`."""
    params = {**state.params, "network": tensor_register.without_register(state.network)}
    return core.TaskSpec(
        params, bundles, training_work(state, traits, trained_tensors=trained_tensors), check=evaluation_work(state)
    )


def training_work(
    state: NetworkState, traits: core.Traits = core.Traits(), *, trained_tensors: core.Tensors | None = None
) -> core.WorkEstimate:
    """Return the cost of training the whole network by mini-batches.

    The memory peak is that of one example at a time, or of a mini-batch if batch norm is trained.

    Args:
        state: State with the parameters, the network's table and the cost of a forward pass.
        traits: Traits of the method: passes over each example, and copies of the model in memory.
        trained_tensors: Trained tensors, or None for all. Other tensors have no gradients and no moments.
    """
    passes, copies = traits.training_passes, traits.model_copies
    trainings = int(state.params[passes]) if isinstance(passes, str) else passes
    anchors = int(bool(state.params.get(copies, True))) if isinstance(copies, str) else copies
    size = tensors.total_bytes([state.model])
    moments = peak_memory.optimizer_copies(state.params) + bool(state.params.get("ema"))
    library = str(state.network.get("name", "")).partition("/")[0]
    convolutions = state.register.convolution_paths(state.model)
    moving = (1 + moments) * (size if trained_tensors is None else tensors.total_bytes([trained_tensors]))
    fixed = peak_memory.fixed_training_bytes(
        size, len(convolutions), moving, copies=peak_memory.WEIGHT_COPIES + anchors, library=library
    )
    fixed += peak_memory.imported_bytes(state.params, library)
    peak_bytes = fixed + minimum_batch(state, trained_tensors) * state.example_bytes
    costs, names = state.costs_by_layer(), state.model if trained_tensors is None else trained_tensors
    pass_cost = cost_model.PassCost().add_scaled(cost_model.training_cost(costs, names), trainings)
    pass_cost = pass_cost.add_scaled(cost_model.forward_cost(costs), traits.forward_passes)
    steps = {
        name: round(trainings * count) for name, count in cost_model.trained_tensor_bytes(state.model, names).items()
    }
    work = cost_model.training_work(pass_cost, state.params, steps, size)
    kind = cost_model.workload_kind(costs, convolutions)
    return msgspec.structs.replace(work, peak_bytes=peak_bytes, workload=kind)


def groups_work(state: NetworkState, model: core.Tensors, groups: Sequence[Sequence[str]]) -> core.WorkEstimate:
    """Return the cost of training groups of layers one after another, each together with the classifier.

    A group costs a forward pass up to its end and a backward pass through itself.

    Args:
        state: State of the whole network.
        model: Tensors of the network. Those in no group are the classifier's.
        groups: Names of the tensors of each group, first to last.
    """
    works, peaks, earlier_tensors = [], [], dict[str, np.ndarray]()
    head = {name: model[name] for name in model.keys() - {name for group in groups for name in group}}
    costs = state.costs_by_layer()
    for group in groups:
        group_tensors = {name: model[name] for name in group}
        earlier_tensors |= group_tensors
        part = replace(
            state.plain_state_with({**earlier_tensors, **head}),
            flops=state.flops * cost_model.part_shares(costs, model, earlier_tensors)[0],
            layers=cost_model.scale_layers(state.layers, state.model, {**earlier_tensors, **head}),
        )
        works.append(training_work(part, trained_tensors={**group_tensors, **head}))
        activations = cost_model.part_shares(costs, model, group_tensors)[1]
        light = replace(state, example_bytes=math.ceil(activations * state.example_bytes))
        peaks.append(training_work(light, trained_tensors={**group_tensors, **head}).peak_bytes)
    return msgspec.structs.replace(reduce(core.WorkEstimate.add, works), peak_bytes=max(peaks))


def evaluation_work(state: NetworkState) -> core.WorkEstimate:
    """Return the cost of one forward pass over the device's training examples."""
    costs = state.costs_by_layer()
    kind = cost_model.workload_kind(costs, state.register.convolution_paths(state.model))
    work = cost_model.inference_work(cost_model.forward_cost(costs), tensors.total_bytes([state.model]))
    return msgspec.structs.replace(work, workload=kind)


def minimum_batch(state: NetworkState, trained_tensors: core.Tensors | None = None) -> int:
    """Return the minimum number of examples in memory: 1, or a micro-batch if batch norm is trained."""
    names = None if trained_tensors is None else trained_tensors.keys()
    batch = math.ceil(state.params.get("batch", 1) / state.params.get("accumulate", 1))
    return batch if state.register.is_coupled(state.model, names) else 1


def fit_from_task(task: core.Task) -> core.Fit:
    settings = {name: task.params[name] for name in FIT_SETTINGS if name in task.params}
    settings["augment"] = tuple(settings.get("augment", ()))
    round = training_round(task.params, task.round)
    return core.Fit(**{**settings, "lr": learning_rate(task.params, task.round), "round": round})


def training_round(params: Mapping[str, Any], round: int) -> int:
    """Return a round's number without the evaluation-only rounds before it (`params["settled"]`)."""
    return round - int(params.get("settled", 0))


def learning_rate(params: Mapping[str, Any], round: int) -> float:
    """Return the client's learning rate in a round. The engine applies schedules over steps."""
    schedule = training_choices.parse_schedule(params.get("schedule", "constant"))
    factor = 1.0 if schedule.over == "steps" else schedule.rate_factor(training_round(params, round))
    return float(params["lr"]) * factor


def train_from(
    task: core.Task, site: core.ClientContext, start: core.Tensors, hooks: core.Hooks = core.Hooks()
) -> core.ClientResult:
    """Train from `start` and return the trained tensors as bundle "model", weighted by examples."""
    model, metrics = site.engine.train(
        task.params["network"], start, site.train, fit_from_task(task), site.rng, hooks=hooks, progress=site.progress
    )
    return core.ClientResult({"model": model}, weight=float(len(site.train)), metrics=metrics)


def full_model_schema(state: Any) -> core.UpdateSchema:
    return core.UpdateSchema({"model": tensors.tensor_shapes(state.model)})


def partial_model_schema(state: Any) -> core.UpdateSchema:
    return core.UpdateSchema({"model": tensors.tensor_shapes(state.model)}, exact=False)


def require_unit_weight(update: core.DeviceUpdate) -> None:
    if update.weight != 1:
        raise core.UpdateError(f"the update of {update.device} has weight {update.weight:g}: this method requires 1")


def reported_steps(update: core.DeviceUpdate) -> float:
    """Return the mini-batches that a device reports as "steps", or raise UpdateError below 1."""
    steps = update.metrics.get("steps", 0.0)
    if not 1 <= steps < 2**53:
        raise core.UpdateError(f"{update.device} reports {steps:g} steps: this method requires 1 or more")
    return float(steps)


def weights_artefact(network: Mapping[str, Any], model: core.Tensors, **meta: Any) -> core.Artefact:
    """Return a trained network as an artefact, with each tensor under all of its names."""
    table = {"network": tensor_register.without_register(network), **meta}
    return core.Artefact("weights", table, with_aliases(network, model))


def with_aliases(network: Mapping[str, Any], model: core.Tensors) -> core.Tensors:
    return tensor_register.register_from_table(network).with_aliases(model) if "register" in network else model
