"""Per-FedAvg: a model from which one step on a device's own examples leads to a good one for it.

Paper: Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning: A Meta-Learning Approach, NeurIPS 2020
(arXiv 2002.07948), Algorithm 1 in its first-order form, Per-FedAvg (FO), section 5:

    u <- w - alpha grad f(w; D),   w <- w - beta grad f(u; D')

A device is evaluated with the received model after steps at rate alpha on its own examples.

Deviations: D and D' are one mini-batch, the paper draws two: so a device with a single mini-batch can take part, and
alpha = 0 is FedAvg. The Hessian is left out, as FO does. The mean is weighted by examples, as FedAvg's.
Weight decay applies in both steps. Adapting takes whole passes (`adapt_epochs`), the paper one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from fedquilt.core import Answer, DeviceView, EvaluationSums, Hooks, Order, Site, Step, Task, same_for_all
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters with `lr` as beta, the rate of w, and those of the adapting step."""

    alpha: Annotated[float, Meta(ge=0)] = 0.01  # alpha: rate of the step that adapts; 0 is FedAvg
    adapt_epochs: Annotated[int, Meta(ge=0)] = 1  # passes over a device's examples before it is evaluated

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "sgd" or self.momentum or self.clip:
            raise ValueError("a step is taken back and another taken: Per-FedAvg wants sgd, no momentum and no clip")


class Ahead:
    """Two steps on a mini-batch: one of alpha from w to u, then from u to w less beta times the gradient there.

    The way back is added to the second step's gradient: (u - w) / beta. The anchor "w" belongs to this
    method, and holds the value of each tensor before the first step.
    """

    def __init__(self, alpha: float, beta: float) -> None:
        self._beta, self._ahead = beta, False
        self.steps = (Step(rate=lambda name: alpha / beta, begin=self._first), Step(begin=self._second))

    def correct(self, gradient: Any, value: Any, at: Mapping[str, Any]) -> Any:
        """Gradient of the current step; the second includes the way back to w."""
        if self._ahead:
            return gradient + (value - at["w"]) / self._beta
        at["w"].copy_(value)
        return gradient

    def _first(self, module: Any) -> None:
        self._ahead = False

    def _second(self, module: Any) -> None:
        self._ahead = True


@same_for_all
def send(state: fedavg.State, device: DeviceView) -> Order:
    """Order training at twice FedAvg's cost, with one more copy of the model."""
    return fedavg.training_order(state, {"model": state.model}, trainings=2, anchors=2)


def work(task: Task, site: Site) -> Answer:
    """Take both steps on every mini-batch; with alpha = 0 train as FedAvg."""
    if not task.params["alpha"]:
        return fedavg.work(task, site)
    received, ahead = site.load("model"), Ahead(task.params["alpha"], fedavg.fit_of(task).lr)
    return fedavg.trained(task, site, received, Hooks(ahead.correct, {"w": received}, steps=ahead.steps))


def check(task: Task, site: Site) -> EvaluationSums:
    """Adapt the received model on the device's examples, then evaluate it on the held-out share."""
    model, alpha, epochs = site.load("model"), task.params["alpha"], task.params["adapt_epochs"]
    if alpha and epochs and len(site.train):
        fit = replace(fedavg.fit_of(task), lr=alpha, epochs=epochs)
        model, _ = site.engine.train(task.params["network"], model, site.train, fit, site.rng, progress=site.progress)
    return site.engine.evaluate(task.params["network"], model, site.held)


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2002.07948",
    params=Params,
    engines=("torch",),
    send=send,
    work=work,
    check=check,
)
