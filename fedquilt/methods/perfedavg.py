"""Per-FedAvg: a meta-learned model that a device adapts with a step on its own examples.

Paper: Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning: A Meta-Learning Approach, NeurIPS 2020
(arXiv 2002.07948), Algorithm 1 in its first-order form, Per-FedAvg (FO), section 5:

    u <- w - alpha grad f_D(w),   w <- w - beta grad f_D'(u)

A device is evaluated with the received model after steps with rate alpha on its own examples.

Deviations: D and D' are the same mini-batch (the paper draws two), so that a device with a single mini-batch can take
part, and alpha = 0 is FedAvg. The Hessian is left out, as in FO. The mean is weighted by examples, as in FedAvg. Weight
decay applies in both steps. The adaptation consists of whole passes (`adapt_epochs`), in the paper of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from fedquilt.core import ClientContext, ClientResult, DeviceView, EvaluationSums, Hooks, Step, Task, TaskSpec, Tensors
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = replace(fedavg.METHOD.traits, training_passes=2, model_copies=2)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters with `lr` as beta, and those of the adaptation step."""

    alpha: Annotated[float, Meta(ge=0)] = 0.01  # alpha: rate of the step that adapts; 0 is FedAvg
    adapt_epochs: Annotated[int, Meta(ge=0)] = 1  # passes over a device's examples before it is evaluated

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_plain_steps("Per-FedAvg reverses a step by its length")
        if self.optimizer != "sgd" or self.momentum or self.clip:
            raise ValueError("Per-FedAvg reverses its first step: set optimizer = 'sgd', momentum = 0 and clip = 0")


class MetaStep:
    """Two steps on each mini-batch: from the model w to the adapted u, then from w by the gradient at u.

    The optimizer applies the second step at u. Its gradient therefore contains (u - w) / beta, which undoes the first
    step. The anchor "w" has the values before the first step. Source: Per-FedAvg, section 5.
    """

    def __init__(self, alpha: float, beta: float) -> None:
        self._beta, self._is_second_step = beta, False
        self.steps = (
            Step(rate=lambda name: alpha / beta, before_step=self._begin_first_step),
            Step(before_step=self._begin_second_step),
        )

    def correct(self, gradient: Any, value: Any, anchors: Mapping[str, Any]) -> Any:
        """Return the gradient. In the second step, add a term that undoes the first step."""
        if self._is_second_step:
            return gradient + (value - anchors["w"]) / self._beta
        anchors["w"].copy_(value)
        return gradient

    def _begin_first_step(self, module: Any) -> None:
        self._is_second_step = False

    def _begin_second_step(self, module: Any) -> None:
        self._is_second_step = True


def send(state: NetworkState, device: DeviceView) -> TaskSpec:
    """Return the task spec to train. A task costs twice that of FedAvg, and one more copy of the model."""
    return with_adaptation(local_training.training_task_spec(state, {"model": state.model}, TRAITS), state)


def with_adaptation(task_spec: TaskSpec, state: NetworkState) -> TaskSpec:
    """Return the task spec with the adaptation's cost in its evaluation."""
    epochs = state.params["adapt_epochs"]
    if not epochs or not state.params["alpha"] or task_spec.check is None:
        return task_spec
    adaptation = local_training.training_work(replace(state, params={**state.params, "epochs": epochs}))
    return replace(task_spec, check=task_spec.check.add(adaptation))


def work(task: Task, site: ClientContext) -> ClientResult:
    """Train with both steps on every mini-batch, or as in FedAvg if alpha is 0."""
    if not task.params["alpha"]:
        return fedavg.work(task, site)
    received, meta_step = site.load("model"), MetaStep(task.params["alpha"], local_training.fit_from_task(task).lr)
    return local_training.train_from(
        task, site, received, Hooks(meta_step.correct, {"w": received}, steps=meta_step.steps)
    )


def adapt(task: Task, site: ClientContext, model: Tensors) -> Tensors:
    """Return a model after `adapt_epochs` passes over the device's examples with the learning rate `alpha`."""
    alpha, epochs = task.params["alpha"], task.params["adapt_epochs"]
    if not (alpha and epochs and len(site.train)):
        return model
    fit = replace(local_training.fit_from_task(task), lr=alpha, epochs=epochs, momentum=0.0, nesterov=False)
    return site.engine.train(task.params["network"], model, site.train, fit, site.rng, progress=site.progress)[0]


def check(task: Task, site: ClientContext) -> EvaluationSums:
    """Evaluate the received model, adapted to the device's examples, on the held-out examples."""
    return site.engine.evaluate(task.params["network"], adapt(task, site, site.load("model")), site.held_out)


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2002.07948",
    params=Params,
    engines=("torch",),
    send=send,
    work=work,
    check=check,
)
