"""Federated averaging.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017 (arXiv 1602.05629), Algorithm 1.

Deviations: integer tensors (batch norm's `num_batches_tracked`, an int64 array of shape ()) are counters and not
averaged: the largest is kept, so that a counter grows in every round by the steps of the device that took the most.
An update whose tensors have other types than those sent, or are too large to add up, is refused. The sum is exact
(`fedquilt.exact`): its bits do not depend on the order of the devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import exact, footprint, layer_costs, tensor_register, tensors
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    Contribution,
    DeviceView,
    EvaluationSums,
    Expected,
    Fit,
    Hooks,
    Method,
    ModelError,
    Order,
    Site,
    Task,
    Tensors,
    UpdateError,
    Work,
    adds_up,
    checked_by,
    expects,
    same_for_all,
)

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
    """Global model with its network's table, parameters and cost."""

    params: dict[str, Any]
    network: dict[str, Any]
    model: dict[str, np.ndarray]
    flops: float  # of one forward pass of one example
    example_bytes: int  # bytes of one example in training at the least, beside the weights; 0: not in the bundle
    layers: tuple[layer_costs.Layer, ...] = field(default=(), kw_only=True)  # their costs; (): not in the bundle

    def costs(self) -> tuple[layer_costs.Layer, ...]:
        """Costs of the layers; of a bundle that has none, one layer that stands for all."""
        return self.layers or layer_costs.parse({"flops": self.flops})

    @property
    def register(self) -> tensor_register.Register:
        """Register of the network's tensors, with the type and module of each."""
        return tensor_register.register_of(self.network)

    def of(self, model: Mapping[str, np.ndarray]) -> State:
        """The same network's plain state with other tensors: for size and cost."""
        return State(self.params, self.network, dict(model), self.flops, self.example_bytes, layers=self.layers)


@dataclass(frozen=True)
class Sum:
    """Sums of a round: sum_k n_k * x_k and sum_k n_k; of nobody without arguments."""

    total: dict[str, exact.Total] = field(default_factory=dict)
    weights: exact.Number = exact.Number()

    @property
    def weight(self) -> float:
        """sum_k n_k."""
        return float(self.weights)


def init(bundle: Bundle, params: Any, seed: int) -> State:
    """Start from the bundle's model.

    Raises:
        ModelError: the bundle has none.
    """
    if "model" not in bundle.files:
        raise ModelError("the bundle has no 'model': give the job a [model] table and run `fedquilt prepare`")
    table = {name: getattr(params, name) for name in type(params).__dataclass_fields__}
    network, model = dict(bundle.meta["network"]), dict(bundle.load("model"))
    if "register" in bundle.meta:
        network["register"] = msgspec.to_builtins(bundle.meta["register"])
    flops, example_bytes = float(bundle.meta.get("flops", 0)), int(bundle.meta.get("example_bytes", 0))
    found = layer_costs.parse(bundle.meta) if "layers" in bundle.meta else ()
    return State(table, network, model, flops, example_bytes, layers=found)


@same_for_all
def send(state: State, device: DeviceView) -> Order:
    """Order training of the whole model."""
    return training_order(state, {"model": state.model})


def training_order(
    state: State,
    bundles: Mapping[str, Tensors],
    *,
    trainings: float = 1.0,
    looks: float = 0.0,
    anchors: int = 0,
    moved: Tensors | None = None,
) -> Order:
    """Return the order to train the whole network by mini-batches, with its predicted cost.

    Args:
        state: gives the parameters, the network's table and the cost of a forward pass.
        bundles: tensors to send, by name.
        trainings: how often an example is trained on in an epoch: forward, and backward through what `moved` needs.
        looks: forward passes besides.
        anchors: copies of the model held besides those of plain SGD. The predicted peak is that of one example at a
            time, and an engine with more room takes more; with trained batch normalisation it is that of a mini-batch.
        moved: the trained tensors, if not all: the others have no gradients and no moments.
    """
    size = tensors.total_bytes([state.model])
    moments = 2 if state.params.get("optimizer") == "adam" else int(state.params.get("momentum", 0) > 0)
    library = str(state.network.get("name", "")).partition("/")[0]
    convolutions = state.register.convolutions(state.model)
    moving = (1 + moments) * (size if moved is None else tensors.total_bytes([moved]))
    fixed = footprint.fixed_bytes(size, len(convolutions), moving, copies=footprint.COPIES + anchors, library=library)
    peak_bytes = fixed + at_once(state, moved) * state.example_bytes
    costs, names = state.costs(), state.model if moved is None else moved
    each = layer_costs.Pass().plus(layer_costs.training(costs, names), trainings)
    each = each.plus(layer_costs.forward(costs), looks)
    steps = {name: round(trainings * count) for name, count in layer_costs.learned(state.model, names).items()}
    work = layer_costs.work(each, state.params, steps, size)
    kind = layer_costs.kind(costs, convolutions)
    return Order(
        {**state.params, "network": tensor_register.without_register(state.network)},
        bundles,
        msgspec.structs.replace(work, peak_bytes=peak_bytes, workload=kind),
        check=look(state),
    )


def look(state: State) -> Work:
    """Cost of running the network once over as many examples as a device trains on."""
    kind = layer_costs.kind(state.costs(), state.register.convolutions(state.model))
    found = layer_costs.looked(layer_costs.forward(state.costs()), tensors.total_bytes([state.model]))
    return msgspec.structs.replace(found, workload=kind)


def at_once(state: State, moved: Tensors | None = None) -> int:
    """Least number of examples a device holds at once: a whole mini-batch with trained batch norm, else one.

    Args:
        state: with the model and the batch size.
        moved: as for `training_order`.
    """
    names = None if moved is None else moved.keys()
    return int(state.params.get("batch", 1)) if state.register.is_coupled(state.model, names) else 1


FIT = tuple(each.name for each in fields(Fit))


def fit_of(task: Task) -> Fit:
    """Training settings from a task's params, at the round's learning rate."""
    given = {name: task.params[name] for name in FIT if name in task.params}
    return Fit(**{**given, "lr": rate_of(task.params, task.round)})


def rate_of(params: Mapping[str, Any], round: int) -> float:
    """The client's learning rate in a round: eta * decay^round."""
    return float(params["lr"]) * float(params.get("lr_decay", 1.0)) ** round


def work(task: Task, site: Site, hooks: Hooks = Hooks()) -> Answer:
    """Train the received model on the device's examples."""
    return trained(task, site, site.load("model"), hooks)


def trained(task: Task, site: Site, start: Tensors, hooks: Hooks = Hooks()) -> Answer:
    """Train from `start` as the task says; the trained tensors are bundle "model", weighted by examples."""
    model, metrics = site.engine.train(
        task.params["network"], start, site.train, fit_of(task), site.rng, hooks=hooks, progress=site.progress
    )
    return Answer({"model": model}, weight=float(len(site.train)), metrics=metrics)


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the received model on the held-out share."""
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held)


def whole(state: Any) -> Expected:
    """All of the state's model: what most methods' folds take."""
    return Expected({"model": tensors.shapes(state.model)})


def part(state: Any) -> Expected:
    """Any part of the state's model."""
    return Expected({"model": tensors.shapes(state.model)}, whole=False)


def sound(state: State, total: Sum, weight: float) -> None:
    """Check a site's sum before it is merged.

    Raises:
        UpdateError: it has another weight than its update, other tensors than the model, or a number out of range.
    """
    if total.weight != weight:
        raise UpdateError(f"the sum is of {total.weight:g} examples, in an update that weighs {weight:g}")
    exact.require(total.total, state.model, weight)


def require(state: State, update: Contribution) -> None:
    """Check an update before it is added to the sums.

    Raises:
        UpdateError: names, shapes or types differ from the model's, or values are not finite.
    """
    tensors.require_same(update.bundles.get("model", {}), state.model)


@adds_up(Sum, sound)
@expects(whole)
@checked_by(require)
def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    """Add an update to the sums, weighted by its examples, in place; errors as of `require`."""
    require(state, update)
    so_far = so_far or Sum()
    return Sum(exact.plus(so_far.total, update.bundles["model"], update.weight), so_far.weights.plus(update.weight))


def step(state: State, total: Sum | None) -> State:
    """Replace the model by the weighted mean; unchanged if nobody answered."""
    if total is None or total.weight == 0:
        return state
    weight = total.weight
    model = {name: divided(total.total.pop(name), weight).astype(state.model[name].dtype) for name in list(total.total)}
    return replace(state, model=model)


def mean(total: Sum) -> dict[str, np.ndarray]:
    """Mean sum_k n_k * x_k / sum_k n_k in float64; counters as they are."""
    return {name: divided(each, total.weight) for name, each in total.total.items()}


def divided(total: exact.Total, weight: float) -> np.ndarray:
    """A sum divided by its weight, in float64; a counter as it is."""
    return total.value() if total.counter else np.asarray(total.value() / weight)


def cast(model: Tensors, like: Tensors) -> dict[str, np.ndarray]:
    """Convert the tensors to the types of `like`."""
    return {name: np.asarray(array).astype(like[name].dtype) for name, array in model.items()}


def trained_names(state: State) -> list[str]:
    """Return the names of the state's tensors that gradients change."""
    return state.register.parameters_of(state.model)


def require_one(update: Contribution) -> None:
    """Check the weight of an update, for methods in which every device counts as much.

    Raises:
        UpdateError: it is not 1, so that a site's sum would weigh something else than its updates.
    """
    if update.weight != 1:
        raise UpdateError(f"{update.device} weighs {update.weight:g}: with this method every device weighs 1")


def steps_of(update: Contribution) -> float:
    """Number of mini-batches a device took.

    Raises:
        UpdateError: the update does not report it.
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
    work=work,
    check=check,
    fold=fold,
    step=step,
    result=result,
    anew=True,
)
