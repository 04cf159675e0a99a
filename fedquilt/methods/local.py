"""Local: each device trains its own model, and nothing is shared.

No paper: the baseline that a federation has to beat. In a round a device trains as in FedAvg, but from its own previous
model, and the server computes no mean. An update has metrics and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class State(NetworkState):
    """Initial model of all devices as `model`, which never changes."""

    rounds: int = 0  # rounds that had training


def init(bundle: core.Bundle, params: Any, seed: int) -> State:
    """Return the first state, with the bundle's model."""
    return State(**vars(fedavg.init(bundle, params, seed)))


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the device's own model, and return a result without tensors to send."""
    client_result = local_training.train_from(task, site, personal(task, site))
    return replace(client_result, bundles={}, private_state=client_result.bundles["model"])


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's own model on the held-out examples."""
    return site.engine.evaluate(task.params["network"], personal(task, site), site.held_out)


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the device's model, or the job's initial model before training."""
    initial_model = site.load("model")
    if site.private_state:
        tensors.require_matching(site.private_state, initial_model)
    return site.private_state or initial_model


def fold(state: State, accumulator: int | None, update: core.DeviceUpdate) -> int:
    """Return the number of updates in the round.

    Raises:
        UpdateError: If the update contains tensors.
    """
    if update.bundles:
        bundles = ", ".join(sorted(update.bundles))
        raise core.UpdateError(f"{update.device} sent the bundles {bundles}, but the method 'local' sends none")
    return (accumulator or 0) + 1


def step(state: State, total: int | None) -> State:
    """Return the state with one more round, if any device trained."""
    return replace(state, rounds=state.rounds + 1) if total else state


def result(state: State) -> core.Artefact:
    """Return the job's initial model. The devices' models never leave them."""
    return local_training.weights_artefact(state.network, state.model, private=sorted(state.model))


METHOD = replace(
    fedavg.METHOD,
    paper="no paper: the baseline of all",
    state=State,
    init=init,
    work=work,
    check=check,
    aggregation=core.Aggregation(fold, schema=lambda state: core.UpdateSchema({})),
    step=step,
    result=result,
    personal_model=personal,
    traits=core.Traits(  # a device's own model is the purpose of the training
        sent_data="nothing", private_data="its model", replaces_private_state=False
    ),
)
