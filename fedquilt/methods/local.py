"""Local: every device trains its own model by itself, and nothing is shared.

No paper: the baseline that a federation has to beat. It is FedAvg without the mean: in a round a device trains
as FedAvg's do, from its own last model. An update carries metrics and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedquilt import tensors
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    Contribution,
    EvaluationSums,
    Expected,
    Site,
    Task,
    Tensors,
    UpdateError,
    expects,
)
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class State(fedavg.State):
    """First model of all devices as `model`, which never changes."""

    rounds: int = 0  # rounds that had training


def init(bundle: Bundle, params: Any, seed: int) -> State:
    """Start from the bundle's model."""
    return State(**vars(fedavg.init(bundle, params, seed)))


def work(task: Task, site: Site) -> Answer:
    """Train the device's own model further; no tensors are sent."""
    answer = fedavg.trained(task, site, personal(task, site))
    return replace(answer, bundles={}, local=answer.bundles["model"])


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the device's own model."""
    return site.engine.evaluate(task.params["network"], personal(task, site), site.held)


def personal(task: Task, site: Site) -> Tensors:
    """The device's model, or the job's first before it has trained."""
    first = site.load("model")
    if site.local:
        tensors.require_like(site.local, first)
    return site.local or first


@expects(lambda state: Expected({}))
def fold(state: State, so_far: int | None, update: Contribution) -> int:
    """Count an answer.

    Raises:
        UpdateError: it carries tensors.
    """
    if update.bundles:
        raise UpdateError(f"{update.device} sent {', '.join(sorted(update.bundles))}: with this method nothing travels")
    return (so_far or 0) + 1


def step(state: State, total: int | None) -> State:
    """Count the round if anybody trained."""
    return replace(state, rounds=state.rounds + 1) if total else state


def result(state: State) -> Artefact:
    """Return the job's first model. The devices' models never leave them."""
    return fedavg.weights_artefact(state.network, state.model, private=sorted(state.model))


METHOD = replace(
    fedavg.METHOD,
    paper="no paper: the baseline of all",
    state=State,
    init=init,
    work=work,
    check=check,
    fold=fold,
    step=step,
    result=result,
    personal=personal,
    anew=False,  # the own model is what a device trains for
)
