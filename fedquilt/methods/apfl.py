"""APFL: a device's personal model is a mixture of its own model and the global model.

Paper: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, 2020 (arXiv 2003.13461), Algorithm 1. On
every mini-batch a device steps with its copy w of the global model, with its own model v and, if `adaptive`, with the
mixing weight alpha:

    m = alpha v + (1 - alpha) w,   v <- v - eta alpha grad f(m),   alpha <- alpha - eta <v - w, grad f(m)>,
    w <- w - eta grad f(w),

all from the values before the mini-batch, and alpha limited to 0..1. The server averages the w. The own model and alpha
stay on the device, and evaluation on the device uses m with the received w.

Deviations: the mean is weighted by examples, as in FedAvg. The mixture is the last one, not the mean over all steps of
the paper's theorem. alpha changes on every mini-batch, as in the paper's equation. The authors' code changes alpha once
in a round, with a small decay. The first v is the first w that the device receives. v has batch norm statistics of its
own, which are those of the mixture. Momentum and weight decay of v are those of the mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = replace(fedavg.METHOD.traits, private_data="its own model and alpha", training_passes=2, model_copies=3)
ALPHA = "/alpha"  # name of alpha among the private tensors; a network's tensor has no slash


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of the mixture."""

    alpha: Annotated[float, Meta(ge=0, le=1)] = 0.5  # alpha: share of the own model, at first if adaptive; 0 is FedAvg
    adaptive: bool = True  # a device learns its alpha

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_plain_steps("APFL scales each step of the mixture by alpha")
        if self.optimizer != "sgd":
            raise ValueError("APFL scales each step of the mixture by alpha: it requires sgd")


class MixtureHooks:
    """Hooks with two steps on each mini-batch: of the mixture m, then of the shared model w.

    The first step moves the own model v (anchor "own") and the weight alpha, the second moves w (anchor "shared").
    """

    def __init__(self, alpha: float, rate: float) -> None:
        self.alpha, self._rate = alpha, rate
        self.anchors: Mapping[str, Any] = {}  # set with the first mini-batch
        self._slope: Any = 0.0  # <v - w, grad f(m)> of the current mini-batch
        self._is_mixture = True
        self.steps = (
            core.Step(penalty=self._keep_anchors, before_step=self._load_mixture),
            core.Step(before_step=self._load_shared),
        )

    def correct(self, gradient: Any, value: Any, anchors: Mapping[str, Any]) -> Any:
        """Return the gradient. In the first step, add its product with own - shared to the gradient of alpha."""
        if self._is_mixture:
            self._slope = self._slope + ((anchors["own"] - anchors["shared"]) * gradient).sum()
        return gradient

    def _keep_anchors(self, forward: core.ForwardPass) -> Any:
        self.anchors = forward.anchors
        return 0.0 * forward.scores.sum()

    def _load_mixture(self, module: Any) -> None:
        self._is_mixture, self._slope = True, 0.0
        for own, shared, value, is_trained in self._pairs(module):
            shared.copy_(value)
            value.copy_(self.alpha * own + (1 - self.alpha) * shared if is_trained else own)

    def _load_shared(self, module: Any) -> None:
        self._is_mixture = False
        for own, shared, value, is_trained in self._pairs(module):
            mixture = self.alpha * own + (1 - self.alpha) * shared
            own.copy_(own + self.alpha * (value - mixture) if is_trained else value)
            value.copy_(shared)
        if self._rate:
            self.alpha = min(max(self.alpha - self._rate * float(self._slope), 0.0), 1.0)

    def _pairs(self, module: Any) -> list[tuple[Any, Any, Any, bool]]:
        """Return own, shared and module value of each tensor, and whether the tensor is trained."""
        from fedquilt.models.networks import traces

        trained, state = dict(module.named_parameters()), traces.state_without_aliases(module)
        own, shared = (self.anchors.get(anchor, {}) for anchor in ("own", "shared"))
        return [(own[name], shared[name], state[name].detach(), name in trained) for name in own]


def load_own_model(task: core.Task, site: core.ClientContext) -> tuple[core.Tensors, float]:
    """Return the own model and its weight, at first the received model and the parameter `alpha`."""
    received = site.load("model")
    own = {name: array for name, array in site.private_state.items() if name != ALPHA} or received
    tensors.require_matching(own, received)
    return own, float(site.private_state[ALPHA]) if site.private_state else task.params["alpha"]


def send(state: NetworkState, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the shared and the own model on each mini-batch."""
    task_spec = local_training.training_task_spec(state, {"model": state.model}, TRAITS)
    return replace(task_spec, params={**task_spec.params, "trained": state.trained_names()})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the shared model w, the own model v and alpha. The device sends w and keeps the others."""
    received, (own, alpha) = site.load("model"), load_own_model(task, site)
    rate = local_training.fit_from_task(task).lr if task.params["adaptive"] else 0.0
    mixture = MixtureHooks(alpha, rate)
    hooks = core.Hooks(mixture.correct, {"own": own, "shared": received}, steps=mixture.steps)
    client_result = local_training.train_from(task, site, personal(task, site), hooks)
    last_own = {name: value.cpu().numpy() for name, value in mixture.anchors["own"].items()}
    private_state = {**tensors.cast_like(last_own, received), ALPHA: np.array(mixture.alpha)}
    return replace(client_result, private_state=private_state)


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the mixture on the held-out examples."""
    return site.engine.evaluate(task.params["network"], personal(task, site), site.held_out)


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the mixture of own and received model, with the batch norm statistics of the mixture."""
    (own, alpha), received = load_own_model(task, site), site.load("model")
    share, rest = np.float32(alpha), np.float32(1 - alpha)
    return {**own, **{name: share * own[name] + rest * received[name] for name in task.params["trained"]}}


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2003.13461",
    params=Params,
    engines=("torch",),
    send=send,
    work=work,
    check=check,
    personal_model=personal,
)
