"""pFedMe: personal models on the Moreau envelope of the global model.

Paper: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020
(arXiv 2006.08848), Algorithm 1. For every mini-batch D of a device, with w its copy of the global model,

    theta ~ argmin f_D(theta) + lambda/2 |theta - w|^2   by K gradient steps,     w <- w - eta lambda (w - theta)

and at the end of a round w <- (1 - beta) w + beta mean_k w_k. The personal model theta stays on the device, and
evaluation on the device uses theta.

Deviations: K is a number of steps, not a precision. theta continues from one mini-batch to the next, and starts a round
at w, as in the authors' code. Batch norm statistics are those of theta and are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt.arrays import tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.core import (
    ClientContext,
    ClientResult,
    DeviceUpdate,
    DeviceView,
    ForwardPass,
    Hooks,
    Step,
    Task,
    TaskSpec,
    Tensors,
)
from fedquilt.methods import ditto, fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = replace(fedavg.METHOD.traits, private_data="its personal model", training_passes="inner", model_copies=2)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters with `lr` as the rate of theta's steps, and those of the envelope."""

    pull: Annotated[float, Meta(gt=0)] = 15.0  # lambda: smaller values let theta move further from w
    inner: Annotated[int, Meta(ge=1)] = 5  # K: steps of theta on a mini-batch
    outer_lr: Annotated[float, Meta(gt=0)] = 0.005  # eta: of w
    beta: Annotated[float, Meta(gt=0)] = 1.0  # beta: step of the global model towards the mean; above 1 beyond it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_plain_steps("pFedMe requires steps of theta of equal length")
        if self.optimizer != "sgd" or self.momentum:
            raise ValueError("pFedMe finds theta by plain gradient steps: set optimizer = 'sgd' and momentum = 0")
        if self.lr * self.pull >= 2 or self.outer_lr * self.pull >= 2:
            raise ValueError("lr * pull and outer_lr * pull must be below 2, because theta or w diverges otherwise")


class MoreauEnvelope:
    """Hooks that train the personal model theta, and move the shared model w (an anchor) towards theta."""

    def __init__(self, pull: float, inner: int, outer_lr: float) -> None:
        self._pull, self._rate = pull, outer_lr * pull
        self._w: Mapping[str, Any] = {}  # set with the first mini-batch
        self.steps = (
            Step(penalty=self.penalty, before_step=self._step_w_towards_theta),
            *[Step(penalty=self.penalty)] * (inner - 1),
        )

    def penalty(self, forward: ForwardPass) -> Any:
        """Return the proximal term lambda/2 |theta - w|^2."""
        if not self._w:
            self._w = {name: forward.anchors["w"][name] for name, _ in forward.module.named_parameters()}
        values = dict(forward.module.named_parameters())
        return self._pull / 2 * sum((value - self._w[name]).square().sum() for name, value in values.items())

    def _step_w_towards_theta(self, module: Any) -> None:
        import torch

        with torch.no_grad():
            for name, value in module.named_parameters():
                if self._w:
                    self._w[name].sub_(self._rate * (self._w[name] - value))

    def final_anchor(self, theta: Tensors) -> dict[str, np.ndarray]:
        """Return the shared model after its last step towards `theta`. Buffers are those of `theta`."""
        w = {name: value.cpu().numpy() for name, value in self._w.items()}
        return {
            name: (w[name] - self._rate * (w[name] - array)).astype(array.dtype) if name in w else array
            for name, array in theta.items()
        }


def send(state: NetworkState, device: DeviceView) -> TaskSpec:
    """Return the task spec for K steps on each mini-batch, with one more copy of the model."""
    return local_training.training_task_spec(state, {"model": state.model}, TRAITS)


def work(task: Task, site: ClientContext) -> ClientResult:
    """Train both models together. The device sends the shared model and keeps the personal one."""
    received = site.load("model")
    envelope = MoreauEnvelope(task.params["pull"], task.params["inner"], task.params["outer_lr"])
    client_result = local_training.train_from(
        task, site, received, Hooks(steps=envelope.steps, anchors={"w": received})
    )
    theta = client_result.bundles["model"]
    return replace(client_result, bundles={"model": envelope.final_anchor(theta)}, weight=1.0, private_state=theta)


def validate_update(state: NetworkState, update: DeviceUpdate) -> None:
    """Raise UpdateError if an update is invalid for FedAvg, or if its weight is not 1."""
    local_training.require_unit_weight(update)
    fedavg.validate_update(state, update)


def fold(state: NetworkState, accumulator: WeightedSums | None, update: DeviceUpdate) -> WeightedSums:
    """Return the sums with an update added in place with weight 1. Raise UpdateError if it is invalid."""
    validate_update(state, update)
    return fedavg.fold(state, accumulator, update)


def step(state: NetworkState, total: WeightedSums | None) -> NetworkState:
    """Return the state with the global model moved by beta towards the mean of the devices' w."""
    if total is None or total.weight == 0:
        return state
    model, beta = total.mean(), state.params["beta"]
    for name in state.trained_names():
        model[name] = (1 - beta) * state.model[name] + beta * model[name]
    return replace(state, model=tensors.cast_like(model, state.model))


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2006.08848",
    params=Params,
    engines=("torch",),
    send=send,
    work=work,
    check=ditto.check,
    aggregation=replace(fedavg.METHOD.aggregation, fold=fold, check_update=validate_update),
    step=step,
    personal_model=ditto.personal,
)
