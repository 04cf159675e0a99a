"""FedALA: before it trains, a device blends its own model with the global model by learned weights.

Paper: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023
(arXiv 2212.01197), Algorithm 1. With own the device's model of its previous round and W a weight in 0..1 for each value
of the last `layers` layers,

    start = own + (received - own) * W,   W <- clip(W - eta (received - own) * grad f(start))   on a sample of examples.

The other layers start as received. Then the device trains from this start, and the server averages the models. W starts
as ones, is learned by several passes before a device's second round, and by one pass before later rounds.

Deviations: the first learning of W takes `first_passes`, until the loss settles in the paper. The sample is drawn anew
in each round. Layers are counted from the classifier, tensors in the authors' code. Batch norm statistics are the
received ones, and those of layers below do not change while W is learned. A device is evaluated with its model after
training, as in the paper. The authors' code evaluates the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg, ft_part
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = replace(fedavg.METHOD.traits, private_data="its model and the weights W", model_copies=4)
WEIGHT = "/weight/"  # before a tensor's name: its W among the private tensors


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of the blending."""

    layers: Annotated[int, Meta(ge=1)] = 1  # p: last layers that are blended
    eta: Annotated[float, Meta(gt=0)] = 1.0  # eta: learning rate of W
    sample: Annotated[float, Meta(gt=0, le=1)] = 0.8  # s: share of the examples on which W is learned
    first_passes: Annotated[int, Meta(ge=1)] = 10  # passes over the sample before a device's second round


class BlendingHooks:
    """Hooks for learning the blending weights W. After each step, the module contains the new blend."""

    def __init__(self, eta: float, rate: float, names: list[str]) -> None:
        self._eta, self._rate, self.weights = eta, rate, dict[str, Any]()
        self.steps = (core.Step(rate=lambda name: float(name in names), penalty=self._keep_weights),)

    def correct(self, gradient: Any, value: Any, anchors: Mapping[str, Any]) -> Any:
        """Update the anchor "weights" (W), and return the gradient that moves the model to the new blend."""
        difference = anchors["received"] - anchors["own"]
        anchors["weights"].copy_((anchors["weights"] - self._eta * gradient * difference).clamp(0, 1))
        return (value - anchors["own"] - difference * anchors["weights"]) / self._rate

    def _keep_weights(self, forward: core.ForwardPass) -> Any:
        self.weights = dict(forward.anchors["weights"])
        return 0.0 * forward.scores.sum()


def init(bundle: core.Bundle, params: Params, seed: int) -> NetworkState:
    """Return FedAvg's first state. Raise ModelError if the network has no last linear layer."""
    initial = fedavg.init(bundle, params, seed)
    ft_part.last_layer_tensors(initial, params.layers)  # raises ModelError
    return initial


def send(state: NetworkState, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train, whose cost includes the passes that learn the blending weights."""
    task_spec = local_training.training_task_spec(state, {"model": state.model}, TRAITS)
    last, passes = ft_part.last_layer_tensors(state, state.params["layers"]), 0
    if device.rounds:
        passes = 1 if len(device.rounds) > 1 else state.params["first_passes"]
    blended = [name for name in state.trained_names() if name in last]
    one_pass = replace(state, params={**state.params, "epochs": 1})
    work = task_spec.work
    for _ in range(math.ceil(passes * state.params["sample"])):
        work = work.add(local_training.training_work(one_pass, trained_tensors={n: state.model[n] for n in blended}))
    return replace(task_spec, params={**task_spec.params, "blended": blended}, work=work)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Learn the blending weights, then train from the blend. The device keeps the weights and the model."""
    start, weights = site.load("model"), dict[str, np.ndarray]()
    if site.private_state:
        own = load_own_model(site)
        weights = learn_weights(task, site, own, start)
        start = {**start, **blend(own, start, weights)}
    client_result = local_training.train_from(task, site, start)
    stored_weights = {f"{WEIGHT}{name}": array for name, array in weights.items()}
    return replace(client_result, private_state={**client_result.bundles["model"], **stored_weights})


def blend(own: core.Tensors, received: core.Tensors, weights: core.Tensors) -> dict[str, np.ndarray]:
    """Return own + (received - own) * weights, for the tensors that have weights."""
    return {name: own[name] + (received[name] - own[name]) * weights[name] for name in weights}


def learn_weights(
    task: core.Task, site: core.ClientContext, own: core.Tensors, received: core.Tensors
) -> dict[str, np.ndarray]:
    """Return the blending weights after passes over a random sample of the device's examples."""
    params, blended = task.params, task.params["blended"]
    weights = {name: site.private_state.get(f"{WEIGHT}{name}", np.ones_like(received[name])) for name in blended}
    passes = 1 if any(name.startswith(WEIGHT) for name in site.private_state) else params["first_passes"]
    rows = site.rng.permutation(len(site.train))[: math.ceil(params["sample"] * len(site.train))]
    sample = core.Examples(site.train.x[rows], site.train.y[rows])
    fit = core.Fit(epochs=passes, batch=params["batch"], lr=local_training.fit_from_task(task).lr, loss=params["loss"])
    blending = BlendingHooks(params["eta"], fit.lr, blended)
    anchors = {"own": own, "received": received, "weights": {**{n: np.ones_like(a) for n, a in own.items()}, **weights}}
    start = {**received, **blend(own, received, weights)}
    hooks = core.Hooks(blending.correct, anchors, steps=blending.steps)
    site.engine.train(
        params["network"], start, sample, fit, site.rng, hooks=hooks, progress=lambda fraction: site.progress(0.0)
    )
    return {name: blending.weights[name].cpu().numpy() for name in blended}


def load_own_model(site: core.ClientContext) -> core.Tensors:
    """Return the device's model, or the received model before the first training."""
    received = site.load("model")
    own = {name: array for name, array in site.private_state.items() if not name.startswith(WEIGHT)} or received
    tensors.require_matching(own, received)
    return own


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's model on the held-out examples."""
    return site.engine.evaluate(task.params["network"], load_own_model(site), site.held_out)


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2212.01197",
    params=Params,
    engines=("torch",),
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    personal_model=lambda task, site: load_own_model(site),
)
