"""Federated averaging.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017 (arXiv 1602.05629), Algorithm 1.

Deviations: integer tensors (batch norm's `num_batches_tracked`) are counters and not averaged; the
largest is kept. The sum runs in float64, in sorted order of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import tensors
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    Contribution,
    DeviceView,
    Fit,
    Method,
    ModelError,
    Order,
    Site,
    Task,
    Work,
)


@dataclass(frozen=True)
class Params:
    """Hyper-parameters of the client's SGD."""

    epochs: Annotated[int, Meta(ge=1)] = 1  # E: passes over the device's own examples in a round
    batch: Annotated[int, Meta(ge=1)] = 32  # B: mini-batch size
    lr: Annotated[float, Meta(gt=0)] = 0.05  # eta: learning rate
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip: Annotated[float, Meta(ge=0)] = 0.0  # largest gradient norm; 0: no clipping


@dataclass(frozen=True)
class State:
    """The global model, and what it is a model of."""

    params: dict[str, Any]
    network: dict[str, Any]
    model: dict[str, np.ndarray]
    flops: float  # of one forward pass of one example


@dataclass(frozen=True)
class Sum:
    """sum_k n_k * x_k and sum_k n_k of a round."""

    total: Mapping[str, np.ndarray]
    weight: float


def init(bundle: Bundle, params: Any, seed: int) -> State:
    if "model" not in bundle.files:
        raise ModelError("the bundle has no 'model': give the job a [model] table and run `fedquilt prepare`")
    table = {name: getattr(params, name) for name in type(params).__dataclass_fields__}
    return State(table, dict(bundle.meta["network"]), dict(bundle.load("model")), float(bundle.meta.get("flops", 0)))


def send(state: State, device: DeviceView) -> Order:
    size = tensors.total_bytes([state.model])
    # weights, gradients, momentum and the copy that is sent; activations are the engine's to bound
    per_example = 3 * state.flops * state.params["epochs"]  # a backward pass takes about two forward ones
    work = Work(flops_per_example=per_example, read_bytes=3 * size, peak_bytes=4 * size)
    return Order({**state.params, "network": state.network}, {"model": state.model}, work)


def fit_of(task: Task) -> Fit:
    """The SGD settings in a task's params."""
    return Fit(**{name: task.params[name] for name in Fit.__dataclass_fields__})


def work(task: Task, site: Site, correct: Callable[[Any, Any, Any], Any] | None = None) -> Answer:
    model, metrics = site.engine.train(
        task.params["network"],
        site.load("model"),
        site.train,
        fit_of(task),
        site.rng,
        correct=correct,
        progress=site.progress,
    )
    return Answer({"model": model}, weight=float(len(site.train)), metrics=metrics)


def check(task: Task, site: Site) -> Mapping[str, float]:
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held)


def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    model = update.bundles.get("model", {})
    tensors.require_like(model, state.model)
    share = {k: v if v.dtype.kind in "iu" else v.astype(np.float64) * update.weight for k, v in model.items()}
    if so_far is None:
        return Sum(share, update.weight)
    return Sum(tensors.combine(_join, so_far.total, share), so_far.weight + update.weight)


def step(state: State, total: Sum | None) -> State:
    if total is None or total.weight == 0:
        return state
    model = {
        name: (array if array.dtype.kind in "iu" else array / total.weight).astype(state.model[name].dtype)
        for name, array in total.total.items()
    }
    return replace(state, model=model)


def result(state: State) -> Artefact:
    return Artefact("weights", {"network": state.network}, state.model)


def _join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a, b) if a.dtype.kind in "iu" else a + b


METHOD = Method(
    paper="arXiv 1602.05629",
    params=Params,
    state=State,
    engines=("torch", "numpy"),
    init=init,
    send=send,
    work=work,
    check=check,
    fold=fold,
    step=step,
    result=result,
)
