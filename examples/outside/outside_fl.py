"""A method, a network and a data set that live outside fedquilt's checkout.

Paper: Hsu et al., Measuring the Effects of Non-Identical Data Distribution (arXiv 1909.06335): FedAvgM, federated
averaging with momentum on the server. Deviations: none; the server's learning rate is 1.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt.arrays import tensors
from fedquilt.data.spec import DataSpec
from fedquilt.methods import fedavg
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(fedavg.Params):
    beta: Annotated[float, Meta(ge=0, lt=1)] = 0.7  # server momentum; 0 is FedAvg


@dataclass(frozen=True)
class State(NetworkState):
    velocity: dict[str, np.ndarray]


def init(bundle, params, seed):
    start = fedavg.init(bundle, params, seed)
    return State(**vars(start), velocity={name: np.zeros_like(value) for name, value in start.model.items()})


def step(state, total):
    beta, averaged = state.params["beta"], fedavg.step(state, total).model

    def speed(before, old, new):  # counters, which are integers, have no momentum
        return np.asarray(new - old if old.dtype.kind in "iu" else beta * before + new - old, old.dtype)

    velocity = tensors.map_arrays(speed, state.velocity, state.model, averaged)
    model = tensors.map_arrays(lambda old, change: np.asarray(old + change), state.model, velocity)
    return replace(state, model=dict(model), velocity=dict(velocity))


METHOD = replace(fedavg.METHOD, paper="arXiv 1909.06335", params=Params, state=State, init=init, step=step)


def network(inputs: int, classes: int, width: int = 16):
    from torch import nn  # here, so that the coordinator, which has the method, needs no torch

    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes))


def moons(spec: DataSpec):
    rng = np.random.default_rng(len(spec.split))
    y = rng.integers(0, 2, 400)
    angle = np.pi * (rng.random(400) + y)
    x = np.stack([np.cos(angle) + y, np.sin(angle) + y / 2], axis=1) + rng.normal(0, 0.1, (400, 2))
    return x.astype(np.float32), y
