"""FedMD: devices with networks of their own learn from their mean scores of public examples.

Paper: Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019 (arXiv 1910.03581), Algorithm 1.
The public examples (`[public]` of the job) are on all devices. In a round a device

1. digests: trains its network to give the consensus, the mean scores, on the public examples,
2. revisits: trains on its own examples,
3. communicates: sends its scores of the public examples.

The server takes the plain mean of the scores as the next consensus. The networks stay on their devices. Devices of a
memory tier can have a network of their own (`[model.tier]`).

Deviations: labels of public examples are not used, so that there is no first training on them. A round uses all public
examples, not a random part. The paper does not state the loss of the first step. It is the mean squared error of the
scores here, and the mean absolute error in the authors' code. The paper's round begins with the last step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import _tier_networks, fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = core.Traits(
    sent_data="its scores of the public examples",
    private_data="its network",
    tier_networks=True,
    prediction_tasks=("classes",),
)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters for a device's own examples, and the training on public ones."""

    digest_epochs: Annotated[int, Meta(ge=1)] = 1  # passes over the public examples in a round


@dataclass(frozen=True)
class State:
    """Initial network of each memory tier ("" is the default network), public examples and consensus."""

    params: dict[str, Any]
    networks: dict[str, NetworkState]
    public: np.ndarray  # (n, ...) as stored
    scores: np.ndarray  # (n, classes) consensus
    has_scores: bool = False  # False before the first round with updates


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, without consensus.

    Raises:
        ModelError: If the bundle has no public examples.
    """
    if "public" not in bundle.files:
        raise core.ModelError("the bundle has no public examples: add a [public] table and run `fedquilt prepare`")
    networks, public = local_training.initial_states_by_tier(bundle, params), bundle.load("public")["x"]
    classes = int(bundle.meta.get("outputs") or networks[""].network["classes"])
    return State(networks[""].params, networks, public, np.zeros((len(public), classes), np.float32))


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec for the network of the device's tier. Public examples and initial weights are sent once."""
    network = _tier_networks.find_network(state, device)
    bundles: dict[str, core.Tensors] = {"own": network.model, "public": {"x": state.public}}
    bundles |= {"scores": {"scores": state.scores}} if state.has_scores else {}
    task_spec = local_training.training_task_spec(network, bundles, TRAITS)
    return replace(task_spec, work=task_spec.work.add(public_work(network, len(state.public), state.has_scores)))


def public_work(network: NetworkState, examples: int, has_scores: bool) -> core.WorkEstimate:
    """Return the cost of scoring the public examples, and with `has_scores` of training on them."""
    work = local_training.evaluation_work(network).total_for_examples(examples)
    if not has_scores:
        return work
    digestion = replace(network, params={**network.params, "epochs": network.params["digest_epochs"]})
    return work.add(local_training.training_work(digestion).total_for_examples(examples))


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the device's network on the consensus and on its own examples, and return its scores."""
    network, public = _tier_networks.load_own_network(site), site.load("public")["x"]
    if "scores" in task.bundles:
        network = digest(task, site, network, core.Examples(public, site.load("scores")["scores"]))
    client_result = local_training.train_from(task, site, network)
    network = client_result.bundles["model"]
    unlabelled = core.Examples(public, np.zeros(len(public), np.int64))
    scores = _tier_networks.record_layer(task, site, network, unlabelled, "", lambda inputs, outputs: outputs)
    return replace(client_result, bundles={"scores": {"scores": scores}}, weight=1.0, private_state=network)


def digest(task: core.Task, site: core.ClientContext, start: core.Tensors, public: core.Examples) -> core.Tensors:
    """Return the network after training by regression to the consensus, the targets of the public examples."""
    fit = local_training.fit_from_task(task)
    fit = replace(fit, epochs=task.params["digest_epochs"], loss="mse", augment=())
    table = {**task.params["network"], "task": "regression"}
    network, _ = site.engine.train(table, start, public, fit, site.rng, progress=lambda share: site.progress(0.0))
    return network


def validate_update(state: State, update: core.DeviceUpdate) -> None:
    """Raise UpdateError for a weight other than 1, or wrong names, shapes, types or values of scores."""
    local_training.require_unit_weight(update)
    tensors.require_addable(update.bundles.get("scores", {}), {"scores": state.scores})


def fold(state: State, accumulator: WeightedSums | None, update: core.DeviceUpdate) -> WeightedSums:
    """Return the sums with a device's scores added in place. Raise UpdateError if they are invalid."""
    validate_update(state, update)
    accumulator = accumulator or WeightedSums()
    total = exact_sums.add_arrays(accumulator.total, update.bundles["scores"])
    return WeightedSums(total, accumulator.weights.add_numbers(1.0))


def step(state: State, total: WeightedSums | None) -> State:
    """Return the state with the mean scores as consensus, or the same state if there are no updates."""
    if total is None or total.weight == 0:
        return state
    return replace(state, scores=total.mean()["scores"].astype(np.float32), has_scores=True)


METHOD = core.Method(
    paper="arXiv 1910.03581",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    work=work,
    check=_tier_networks.check,
    aggregation=core.Aggregation(
        fold,
        accumulator=lambda state: WeightedSums,
        schema=lambda state: core.UpdateSchema({"scores": {"scores": state.scores}}),
        check_update=validate_update,
    ),
    step=step,
    result=_tier_networks.result,
    traits=TRAITS,
)
