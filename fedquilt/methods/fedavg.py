"""FedAvg: the server averages the devices' models, weighted by their examples.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017 (arXiv 1602.05629), Algorithm 1.

Deviations: integer tensors (batch norm's `num_batches_tracked`) are counters. The largest value is kept instead of the
mean, so that a counter grows in every round by the largest number of steps of a device. Updates are rejected if their
tensors have other types than the model's, or are too large to be summed. The sum is exact
(`fedquilt.arrays.exact_sums`) and does not depend on the order of the devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import (
    Aggregation,
    Artefact,
    Bundle,
    ClientContext,
    ClientResult,
    DeviceUpdate,
    DeviceView,
    EvaluationSums,
    Fit,
    Hooks,
    Method,
    ModelError,
    Task,
    TaskSpec,
    Tensors,
    Traits,
    UpdateError,
    UpdateSchema,
    WorkEstimate,
)
from fedquilt.costs import layer_costs, peak_memory
from fedquilt.formats import tensor_register

Batch: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]  # a greater one is a slip: no device has so many examples


@dataclass(frozen=True)
class Params:
    """Hyper-parameters of the client's training."""

    epochs: Annotated[int, Meta(ge=1)] = 1  # E: passes over the device's own examples in a round
    batch: Batch = 32  # B: mini-batch size; a device with fewer examples takes all of them in one step
    lr: Annotated[float, Meta(gt=0)] = 0.05  # eta: learning rate
    lr_decay: Annotated[float, Meta(gt=0, le=1)] = 1.0  # factor on eta after every round
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # of sgd, begun anew in every round
    nesterov: bool = False
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip: Annotated[float, Meta(ge=0)] = 0.0  # largest gradient norm; 0: no clipping
    mixed: bool = False  # 16-bit arithmetic where a device's GPU has it; weights and what travels stay 32-bit

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true wants a momentum above 0")


@dataclass(frozen=True)
class State:
    """Global model, with the parameters of the job and the table and cost of the network."""

    params: dict[str, Any]
    network: dict[str, Any]
    model: dict[str, np.ndarray]
    flops: float  # of one forward pass of one example
    example_bytes: int  # bytes of one example in training at the least, beside the weights; 0: not in the bundle
    layers: tuple[layer_costs.Layer, ...] = field(default=(), kw_only=True)  # their costs; (): not in the bundle

    def costs_by_layer(self) -> tuple[layer_costs.Layer, ...]:
        """Return the cost of each layer, or of the network as one layer if the bundle has no layers."""
        return self.layers or layer_costs.parse_layers({"flops": self.flops})

    @property
    def register(self) -> tensor_register.TensorRegister:
        """Register of the network's tensors, with the type and module of each."""
        return tensor_register.register_of(self.network)

    def plain_state_with(self, model: Mapping[str, np.ndarray]) -> State:
        """Return a plain FedAvg state of the same network with other tensors."""
        return State(self.params, self.network, dict(model), self.flops, self.example_bytes, layers=self.layers)


@dataclass(frozen=True)
class FedAvgSums:
    """Sums of a round: sum_k n_k * x_k and sum_k n_k. Empty without arguments."""

    total: dict[str, exact_sums.ExactSum] = field(default_factory=dict)
    weights: exact_sums.ExactScalar = exact_sums.ExactScalar()

    @property
    def weight(self) -> float:
        """Total weight of the updates, sum_k n_k."""
        return float(self.weights)


def init(bundle: Bundle, params: Any, seed: int) -> State:
    """Return the first state, with the bundle's model.

    Raises:
        ModelError: If the bundle has no model.
    """
    if "model" not in bundle.files:
        raise ModelError("the bundle has no 'model': give the job a [model] table and run `fedquilt prepare`")
    table = {name: getattr(params, name) for name in type(params).__dataclass_fields__}
    network, model = dict(bundle.meta["network"]), dict(bundle.load("model"))
    if "register" in bundle.meta:
        network["register"] = msgspec.to_builtins(bundle.meta["register"])
    flops, example_bytes = float(bundle.meta.get("flops", 0)), int(bundle.meta.get("example_bytes", 0))
    found = layer_costs.parse_layers(bundle.meta) if "layers" in bundle.meta else ()
    return State(table, network, model, flops, example_bytes, layers=found)


def send(state: State, device: DeviceView) -> TaskSpec:
    """Return the task spec to train the whole model."""
    return training_task_spec(state, {"model": state.model})


def training_task_spec(
    state: State,
    bundles: Mapping[str, Tensors],
    *,
    trainings: float = 1.0,
    looks: float = 0.0,
    anchors: int = 0,
    moved: Tensors | None = None,
) -> TaskSpec:
    """Return the task spec to train the whole network by mini-batches, with its predicted cost.

    The predicted peak is that of one example at a time or, with trained batch norm, of a mini-batch.

    Args:
        state: State with the parameters, the network's table and the cost of a forward pass.
        bundles: Tensors to send, by name.
        trainings: Forward and backward passes over each example in an epoch.
        looks: Forward passes over each example in an epoch, in addition to `trainings`.
        anchors: Copies of the model in memory, in addition to those of plain SGD.
        moved: Trained tensors, or None if all are. The other tensors have no gradients and no moments.
    """
    size = tensors.total_bytes([state.model])
    moments = 2 if state.params.get("optimizer") == "adam" else int(state.params.get("momentum", 0) > 0)
    library = str(state.network.get("name", "")).partition("/")[0]
    convolutions = state.register.convolution_paths(state.model)
    moving = (1 + moments) * (size if moved is None else tensors.total_bytes([moved]))
    fixed = peak_memory.fixed_training_bytes(
        size, len(convolutions), moving, copies=peak_memory.COPIES + anchors, library=library
    )
    peak_bytes = fixed + minimum_batch(state, moved) * state.example_bytes
    costs, names = state.costs_by_layer(), state.model if moved is None else moved
    each = layer_costs.PassCost().add_scaled(layer_costs.training_cost(costs, names), trainings)
    each = each.add_scaled(layer_costs.forward_cost(costs), looks)
    steps = {
        name: round(trainings * count) for name, count in layer_costs.trained_tensor_bytes(state.model, names).items()
    }
    work = layer_costs.training_work(each, state.params, steps, size)
    kind = layer_costs.workload_kind(costs, convolutions)
    return TaskSpec(
        {**state.params, "network": tensor_register.without_register(state.network)},
        bundles,
        msgspec.structs.replace(work, peak_bytes=peak_bytes, workload=kind),
        check=evaluation_work(state),
    )


def evaluation_work(state: State) -> WorkEstimate:
    """Return the cost of one forward pass over as many examples as a device trains on."""
    kind = layer_costs.workload_kind(state.costs_by_layer(), state.register.convolution_paths(state.model))
    found = layer_costs.inference_work(
        layer_costs.forward_cost(state.costs_by_layer()), tensors.total_bytes([state.model])
    )
    return msgspec.structs.replace(found, workload=kind)


def minimum_batch(state: State, moved: Tensors | None = None) -> int:
    """Return the least number of examples in memory: a mini-batch with trained batch norm, else one.

    Args:
        state: State with the model and the batch size.
        moved: Trained tensors, or None if all are.
    """
    names = None if moved is None else moved.keys()
    return int(state.params.get("batch", 1)) if state.register.is_coupled(state.model, names) else 1


FIT = tuple(each.name for each in fields(Fit))


def fit_from_task(task: Task) -> Fit:
    """Return the training settings of a task, at the learning rate of its round."""
    given = {name: task.params[name] for name in FIT if name in task.params}
    return Fit(**{**given, "lr": learning_rate(task.params, task.round)})


def learning_rate(params: Mapping[str, Any], round: int) -> float:
    """Return the client's learning rate in a round: eta * decay^round."""
    return float(params["lr"]) * float(params.get("lr_decay", 1.0)) ** round


def work(task: Task, site: ClientContext, hooks: Hooks = Hooks()) -> ClientResult:
    """Train the received model on the device's examples."""
    return train_from(task, site, site.load("model"), hooks)


def train_from(task: Task, site: ClientContext, start: Tensors, hooks: Hooks = Hooks()) -> ClientResult:
    """Train from `start` and return the trained tensors as bundle "model", weighted by examples."""
    model, metrics = site.engine.train(
        task.params["network"], start, site.train, fit_from_task(task), site.rng, hooks=hooks, progress=site.progress
    )
    return ClientResult({"model": model}, weight=float(len(site.train)), metrics=metrics)


def check(task: Task, site: ClientContext) -> EvaluationSums:
    """Evaluate the received model on the held-out examples."""
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held)


def full_model_schema(state: Any) -> UpdateSchema:
    """Return the schema of an update with all tensors of the model."""
    return UpdateSchema({"model": tensors.tensor_shapes(state.model)})


def partial_model_schema(state: Any) -> UpdateSchema:
    """Return the schema of an update with any part of the model."""
    return UpdateSchema({"model": tensors.tensor_shapes(state.model)}, whole=False)


def validate_site_sums(state: State, total: FedAvgSums, weight: float) -> None:
    """Validate the sums of a site before they are merged.

    Raises:
        UpdateError: If the sums do not match the update's weight or the model, or if a number is out of range.
    """
    if total.weight != weight:
        raise UpdateError(f"the sum is of {total.weight:g} examples, in an update that weighs {weight:g}")
    exact_sums.require_valid_sums(total.total, state.model, weight)


def validate_update(state: State, update: DeviceUpdate) -> None:
    """Validate an update before it is added to the sums.

    Raises:
        UpdateError: If names, shapes or types differ from the model's, or if values are not finite.
    """
    tensors.require_addable(update.bundles.get("model", {}), state.model)


def fold(state: State, so_far: FedAvgSums | None, update: DeviceUpdate) -> FedAvgSums:
    """Add an update to the sums in place, weighted by its examples.

    Raises:
        UpdateError: If the update is invalid, as in `validate_update`.
    """
    validate_update(state, update)
    so_far = so_far or FedAvgSums()
    return FedAvgSums(
        exact_sums.add_arrays(so_far.total, update.bundles["model"], update.weight),
        so_far.weights.add_numbers(update.weight),
    )


def step(state: State, total: FedAvgSums | None) -> State:
    """Replace the model by the weighted mean, or keep the model if there are no updates."""
    if total is None or total.weight == 0:
        return state
    weight = total.weight
    model = {
        name: divide_sum(total.total.pop(name), weight).astype(state.model[name].dtype) for name in list(total.total)
    }
    return replace(state, model=model)


def weighted_mean(total: FedAvgSums) -> dict[str, np.ndarray]:
    """Return sum_k n_k x_k / sum_k n_k in float64. Counters are not divided."""
    return {name: divide_sum(each, total.weight) for name, each in total.total.items()}


def divide_sum(total: exact_sums.ExactSum, weight: float) -> np.ndarray:
    """Return a sum divided by its weight in float64, or a counter undivided."""
    return total.rounded_value() if total.is_counter else np.asarray(total.rounded_value() / weight)


def cast_like(model: Tensors, like: Tensors) -> dict[str, np.ndarray]:
    """Convert the tensors to the types of the tensors in `like`."""
    return {name: np.asarray(array).astype(like[name].dtype) for name, array in model.items()}


def trained_names(state: State) -> list[str]:
    """Return the names of the state's tensors that gradients change."""
    return state.register.parameters_of(state.model)


def require_unit_weight(update: DeviceUpdate) -> None:
    """Raise an error unless an update has weight 1, in methods without weighting.

    Raises:
        UpdateError: If the weight is not 1.
    """
    if update.weight != 1:
        raise UpdateError(f"{update.device} weighs {update.weight:g}: with this method every device weighs 1")


def reported_steps(update: DeviceUpdate) -> float:
    """Return the number of mini-batches that a device reports.

    Raises:
        UpdateError: If the update reports none.
    """
    steps = update.metrics.get("steps", 0.0)
    if not 1 <= steps < 2**53:
        raise UpdateError(f"{update.device} says that it took {steps:g} steps: this method has to know, 1 or more")
    return float(steps)


def result(state: State) -> Artefact:
    """Return the global model with the table of its network."""
    return weights_artefact(state.network, state.model)


def weights_artefact(network: Mapping[str, Any], model: Tensors, **meta: Any) -> Artefact:
    """Return a trained network as an artefact, with each tensor under all of its names."""
    return Artefact(
        "weights", {"network": tensor_register.without_register(network), **meta}, with_aliases(network, model)
    )


def with_aliases(network: Mapping[str, Any], model: Tensors) -> Tensors:
    """Return the model with each tensor under all of its names."""
    return tensor_register.register_of(network).with_aliases(model) if "register" in network else model


METHOD = Method(
    paper="arXiv 1602.05629",
    params=Params,
    state=State,
    engines=("torch", "numpy"),
    init=init,
    send=send,
    common_task=True,
    work=work,
    check=check,
    aggregation=Aggregation(
        fold,
        accumulator=lambda state: FedAvgSums,
        schema=full_model_schema,
        check_update=validate_update,
        check_sums=validate_site_sums,
    ),
    step=step,
    result=result,
    traits=Traits(replaces_private_state=True),
)
