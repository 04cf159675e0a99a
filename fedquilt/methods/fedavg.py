"""FedAvg: the server averages the devices' models, weighted by their examples.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017 (arXiv 1602.05629), Algorithm 1.

Deviations: integer tensors (batch norm's `num_batches_tracked`) are counters. The largest value is kept instead of the
mean, so that a counter grows in every round by the largest number of steps of a device. Updates are rejected if their
tensors have other types than the model's, or are too large to be summed. The sum is exact
(`fedquilt.arrays.exact_sums`) and does not depend on the order of the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.formats import training_choices
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

Batch: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]  # a larger value is a typing error


@dataclass(frozen=True)
class Params:
    """Hyper-parameters of the client's training."""

    epochs: Annotated[int, Meta(ge=1)] = 1  # E: passes over the device's own examples in a round
    batch: Batch = 32  # B: mini-batch size; a device with fewer examples takes all of them in one step
    lr: Annotated[float, Meta(gt=0)] = 0.05  # eta: learning rate
    optimizer: core.Choice = "sgd"  # its state is reset in every round
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # of sgd, and of torch's optimizers with momentum
    nesterov: bool = False
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip: Annotated[float, Meta(ge=0)] = 0.0  # largest gradient norm; 0: no clipping
    mixed: bool = False  # 16-bit arithmetic on GPUs that support it; weights and sent tensors stay 32-bit
    loss: core.Choice = ""  # name or table (docs/training.md); "": default of the network's task
    schedule: core.Choice = "constant"  # of the learning rate over the job
    augment: tuple[core.Choice, ...] = ()  # random changes of training examples, in order
    accumulate: Annotated[int, Meta(ge=1)] = 1  # parts of a mini-batch whose gradients are added up, to save memory
    ema: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share that the weights' moving average keeps at a step; 0: none

    def __post_init__(self) -> None:
        training_choices.require_valid_choices(self)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true requires a momentum above 0")

    def require_plain_steps(self, reason: str) -> None:
        """Raise ValueError if the learning rate changes within rounds, or a moving average (`ema`) is sent."""
        if training_choices.parse_schedule(self.schedule).over == "steps":
            raise ValueError(f'schedule over "steps" is not possible, because {reason}: set over = "rounds"')
        if self.ema:
            raise ValueError(f"ema = {self.ema:g} is not possible, because {reason}: set ema = 0")


def init(bundle: core.Bundle, params: Any, seed: int) -> NetworkState:
    """Return the first state, with the bundle's model."""
    return local_training.initial_state(bundle, params)


def send(state: NetworkState, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the whole model."""
    return local_training.training_task_spec(state, {"model": state.model})


def work(task: core.Task, site: core.ClientContext, hooks: core.Hooks = core.Hooks()) -> core.ClientResult:
    """Train the received model on the device's examples (ClientUpdate)."""
    return local_training.train_from(task, site, site.load("model"), hooks)


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the received model on the held-out examples."""
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held_out)


def validate_site_sums(state: NetworkState, total: WeightedSums, weight: float) -> None:
    """Raise UpdateError if a site's sums are impossible for the total weight of its devices."""
    if total.weight != weight:
        raise core.UpdateError(f"the site's sums have the weight {total.weight:g}, but its update {weight:g}")
    exact_sums.require_valid_sums(total.total, state.model, weight)


def validate_update(state: NetworkState, update: core.DeviceUpdate) -> None:
    """Raise UpdateError if names, shapes or types differ from the model's, or if values are not finite."""
    tensors.require_addable(update.bundles.get("model", {}), state.model)


def fold(state: NetworkState, accumulator: WeightedSums | None, update: core.DeviceUpdate) -> WeightedSums:
    """Return the sums with an update added in place, weighted by examples. Raise UpdateError if invalid."""
    validate_update(state, update)
    accumulator = accumulator or WeightedSums()
    return WeightedSums(
        exact_sums.add_arrays(accumulator.total, update.bundles["model"], update.weight),
        accumulator.weights.add_numbers(update.weight),
    )


def step(state: NetworkState, total: WeightedSums | None) -> NetworkState:
    """Return the state with the weighted mean of the models, or the same state if there are no updates."""
    if total is None or total.weight == 0:
        return state
    sums, weight = total.total, total.weight
    model = {name: sums.pop(name).mean(weight).astype(state.model[name].dtype) for name in list(sums)}
    return replace(state, model=model)


def result(state: NetworkState) -> core.Artefact:
    """Return the global model with the table of its network."""
    return local_training.weights_artefact(state.network, state.model)


METHOD = core.Method(
    paper="arXiv 1602.05629",
    params=Params,
    state=NetworkState,
    engines=("torch", "numpy"),
    init=init,
    send=send,
    common_task=True,
    work=work,
    check=check,
    aggregation=core.Aggregation(
        fold,
        accumulator=lambda state: WeightedSums,
        schema=local_training.full_model_schema,
        check_update=validate_update,
        check_sums=validate_site_sums,
        change=core.StateChange(
            local_training.rebase_model,
            norm=local_training.change_norm,
            add_noise=WeightedSums.with_noise,
            unprotected_names=local_training.unprotected_names,
        ),
    ),
    step=step,
    result=result,
    traits=core.Traits(replaces_private_state=True),
)
