"""FedTGP: as FedProto, with global prototypes that the server trains to lie apart.

Paper: Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and
Model Heterogeneity in Federated Learning, AAAI 2024 (arXiv 2401.03230), Algorithm 1. The global prototype of class c is
F(v_c), with a trained vector v_c and a network F of two layers that all classes share. With P a device's prototype of
class c and |.| the Euclidean distance, the server minimises by SGD

    -log( e^-(|P - F(v_c)| + margin) / (e^-(|P - F(v_c)| + margin) + sum_{c' != c} e^-|P - F(v_c')|) ).

The margin is the largest distance between two classes' means of the round's prototypes, at most `margin`.

Deviations: the server trains in 64 bits. In the authors' code the margin is the largest distance of a class to its
nearest class. On devices all is as in FedProto (`fedproto`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import _prototypes, _tier_networks, robust
from fedquilt.methods.robust import CollectedUpdates


@dataclass(frozen=True)
class Params(_prototypes.Params):
    """FedProto's parameters, and those of the server's training."""

    server_epochs: Annotated[int, Meta(ge=1)] = 100  # S: passes over the prototypes of a round
    server_batch: Annotated[int, Meta(ge=1)] = 10  # B: prototypes of a mini-batch
    server_lr: Annotated[float, Meta(gt=0)] = 0.01  # eta_S
    margin: Annotated[float, Meta(ge=0)] = 100.0  # tau: largest margin
    most: Annotated[int, Meta(ge=1)] = 256  # devices of a round whose prototypes are in memory at once


@dataclass(frozen=True)
class State(_prototypes.State):
    """FedProto's state with the vectors v and layers of the generator F, and log sentences on the round."""

    generator: dict[str, np.ndarray]  # "v" (classes, d), "w1" and "w2" (d, d), "b1" and "b2" (d,)
    seed: int
    log: tuple[str, ...] = ()


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with random vectors and layers."""
    initial, rng = _prototypes.init(bundle, params, seed), tensors.seeded_rng(seed, "fedtgp")
    classes, width = initial.prototypes.shape
    generator = {"v": rng.normal(size=(classes, width))}
    for name, shape in {"w1": (width, width), "b1": (width,), "w2": (width, width), "b2": (width,)}.items():
        generator[name] = rng.uniform(-(width**-0.5), width**-0.5, shape)
    return State(
        **vars(initial), generator={name: array.astype(np.float32) for name, array in generator.items()}, seed=seed
    )


def fold(state: State, collected: CollectedUpdates | None, update: core.DeviceUpdate) -> CollectedUpdates:
    """Return the collected updates with a device's prototypes added, for up to `most` devices."""
    _prototypes.validate_update(state, update)
    shapes = _prototypes.update_schema(state).bundles["prototypes"]
    return robust.collect_update(collected, update, "prototypes", shapes, state.params["most"], state.seed)


def step(state: State, total: CollectedUpdates | None) -> State:
    """Return the state with global prototypes trained on those of the devices."""
    if total is None:
        return state
    updates = [total.updates[device] for device in sorted(total.updates)]
    classes = np.concatenate([np.flatnonzero(bundle["examples"]) for bundle in updates])
    prototypes = np.concatenate([bundle["prototypes"][bundle["examples"] > 0] for bundle in updates]).astype(np.float64)
    margin = min(largest_gap(prototypes, classes), state.params["margin"])
    generator = {name: np.asarray(array, np.float64) for name, array in state.generator.items()}
    rng, size, rate = (
        tensors.seeded_rng(state.seed, total.round),
        state.params["server_batch"],
        state.params["server_lr"],
    )
    for _ in range(state.params["server_epochs"]):
        order = rng.permutation(len(prototypes))
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            gradients = contrastive_gradients(generator, prototypes[batch], classes[batch], margin)
            generator = {name: array - rate * gradients[name] for name, array in generator.items()}
    trained = {name: array.astype(np.float32) for name, array in generator.items()}
    return replace(
        state,
        generator=trained,
        prototypes=generate_prototypes(generator)[1].astype(np.float32),
        has_prototype=np.ones(len(state.has_prototype), np.uint8),
        log=tuple(total.left_out_note("devices' prototypes")),
    )


def largest_gap(prototypes: np.ndarray, classes: np.ndarray) -> float:
    """Return the largest distance between two classes' mean prototypes, or 0 with a single class."""
    mean_prototypes = np.stack([prototypes[classes == label].mean(axis=0) for label in np.unique(classes)])
    return float(np.linalg.norm(mean_prototypes[:, None] - mean_prototypes[None], axis=2).max())


def generate_prototypes(generator: core.Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Return the generator's hidden layer, (classes, d), and the global prototypes, (classes, d)."""
    hidden = np.maximum(generator["v"] @ generator["w1"].T + generator["b1"], 0)
    return hidden, hidden @ generator["w2"].T + generator["b2"]


def contrastive_gradients(
    generator: core.Tensors, prototypes: np.ndarray, classes: np.ndarray, margin: float
) -> dict[str, np.ndarray]:
    """Return the gradients, by name, of the mean loss of prototypes, (n, d), with classes, (n,)."""
    hidden, centers = generate_prototypes(generator)
    differences = centers[None] - prototypes[:, None]  # (n, classes, d)
    distances = np.sqrt(np.maximum(np.square(differences).sum(axis=2), 1e-12))
    own = np.eye(len(centers))[classes]
    scores = -distances - margin * own
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    slopes = (own - shares) / (len(classes) * distances)  # of the distances, divided by them
    by_center = (slopes[:, :, None] * differences).sum(axis=0)
    by_hidden = (by_center @ generator["w2"]) * (hidden > 0)
    return {
        "v": by_hidden @ generator["w1"],
        "w1": by_hidden.T @ generator["v"],
        "b1": by_hidden.sum(axis=0),
        "w2": by_center.T @ hidden,
        "b2": by_center.sum(axis=0),
    }


METHOD = core.Method(
    paper="arXiv 2401.03230",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=_prototypes.send,
    work=_prototypes.work,
    check=_tier_networks.check,
    aggregation=core.Aggregation(fold, schema=_prototypes.update_schema, check_update=_prototypes.validate_update),
    step=step,
    result=_tier_networks.result,
    explain=lambda state: state.log,
    traits=replace(_prototypes.TRAITS, per_device_data="prototypes of `most` devices, on which the global ones train"),
)
