"""Common code of methods whose devices share prototypes (mean features by class), not networks.

Features are the inputs of a network's last linear layer. All networks of a job have equally many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.formats import training_choices
from fedquilt.methods import _tier_networks, fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = core.Traits(
    sent_data="the mean features of each class",
    private_data="its network",
    tier_networks=True,
    prediction_tasks=("classes",),
    forward_passes=1,
    model_copies=1,
)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the weight of the prototypes."""

    penalty: Annotated[float, Meta(ge=0)] = 1.0  # lambda: pull of the features to the prototypes; 0 is Local

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(name == training_choices.MIXUP for name, _ in training_choices.parse_augmentations(self.augment)):
            raise ValueError("augment: mixup has two classes for an example, and a prototype is that of one class")


@dataclass(frozen=True)
class State:
    """Initial network of each memory tier ("" is the default network), and the global prototypes."""

    params: dict[str, Any]
    networks: dict[str, NetworkState]
    prototypes: np.ndarray  # (classes, d)
    has_prototype: np.ndarray  # (classes,) 1 for classes with a prototype, else 0


class PrototypeHooks:
    """Hooks that pull the features, inputs of the layer `head`, to the received prototype of their class."""

    def __init__(self, head: str, received: core.Tensors, strength: float) -> None:
        self._head, self._received, self._strength = head, received, strength
        self._features: Any = None  # (n, d) of the latest mini-batch
        self._tensors: dict[str, Any] = {}

    def prepare(self, module: Any) -> Any:
        """Add the hook that records features to the module, and return the module."""
        module.get_submodule(self._head).register_forward_pre_hook(self._record_features)
        return module

    def _record_features(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        self._features = inputs[0]

    def penalty(self, forward: core.ForwardPass) -> Any:
        """Return the weighted mean squared distance of features to their class prototype (FedProto, Eq. 7).

        An example whose class has no prototype counts 0.
        """
        import torch

        if not self._tensors:
            self._tensors = {name: torch.tensor(array).to(forward.y.device) for name, array in self._received.items()}
        distances = (self._features - self._tensors["prototypes"][forward.y]).square().mean(dim=1)
        return self._strength * (distances * self._tensors["has_prototype"][forward.y]).mean()


def init(bundle: core.Bundle, params: Any, seed: int) -> State:
    """Return the first state, without prototypes.

    Raises:
        ModelError: If a network has no last linear layer, or the last layers differ in shape.
    """
    networks = local_training.initial_states_by_tier(bundle, params)
    shapes = {tier or "[model]": head_shape(network) for tier, network in networks.items()}
    classes, features = shapes["[model]"]
    if len(set(shapes.values())) > 1:
        sizes = ", ".join(f"{tier}: {width}" for tier, (_, width) in shapes.items())
        raise core.ModelError(f"the last layers have unequal inputs or classes ({sizes}): make [model.tier] end alike")
    return State(networks[""].params, networks, np.zeros((classes, features), np.float32), np.zeros(classes, np.uint8))


def head_shape(network: NetworkState) -> tuple[int, int]:
    """Return the numbers of classes and of features of a network's last linear layer."""
    if (head := network.register.find_classifier()) is None:
        raise core.ModelError("this network has no last linear layer, whose inputs are the features of prototypes")
    network.register.require_plain_weight(head)
    classes, features = tensors.tensor_shapes(network.model)[f"{head}.weight"].shape
    return classes, features


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the network of the device's tier. Initial weights are sent once."""
    network = _tier_networks.find_network(state, device)
    prototypes = {"prototypes": state.prototypes, "has_prototype": state.has_prototype}
    bundles = {"own": network.model, "prototypes": prototypes}
    task_spec = local_training.training_task_spec(network, bundles, TRAITS)
    return replace(task_spec, params={**task_spec.params, "head": network.register.find_classifier()})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the device's network, and return the prototypes of its classes."""
    received, strength = site.load("prototypes"), task.params["penalty"]
    hooks = core.Hooks()
    if strength and received["has_prototype"].any():
        pull = PrototypeHooks(task.params["head"], received, strength)
        hooks = core.Hooks(prepare=pull.prepare, steps=(core.Step(penalty=pull.penalty),))
    client_result = local_training.train_from(task, site, _tier_networks.load_own_network(site), hooks)
    network = client_result.bundles["model"]
    return replace(
        client_result, bundles={"prototypes": compute_prototypes(task, site, network)}, private_state=network
    )


def compute_prototypes(task: core.Task, site: core.ClientContext, network: core.Tensors) -> dict[str, np.ndarray]:
    """Return arrays by name: "prototypes", mean features (classes, d), and "examples", counts (classes,)."""
    head = task.params["head"]
    features = _tier_networks.record_layer(task, site, network, site.train, head, lambda inputs, outputs: inputs)
    sums = np.zeros(site.load("prototypes")["prototypes"].shape)
    np.add.at(sums, site.train.y, features.astype(np.float64))
    counts = np.bincount(site.train.y, minlength=len(sums)).astype(np.int64)
    return {"prototypes": (sums / np.maximum(counts, 1)[:, None]).astype(np.float32), "examples": counts}


def update_schema(state: State) -> core.UpdateSchema:
    """Return the schema of an update: prototypes, and the number of examples of each class."""
    counts = tensors.TensorSpec(np.shape(state.has_prototype), np.dtype(np.int64))
    return core.UpdateSchema({"prototypes": {"prototypes": state.prototypes, "examples": counts}})


def validate_update(state: State, update: core.DeviceUpdate) -> None:
    """Raise UpdateError for wrong names, shapes or types, or unless counts of examples add up to a positive weight."""
    prototypes = update.bundles.get("prototypes", {})
    tensors.require_addable(prototypes, update_schema(state).bundles["prototypes"])
    if not 0 < update.weight == prototypes["examples"].sum():
        raise core.UpdateError(f"{update.device}: counts of examples do not add up to weight {update.weight:g}")
