"""Scenes for conformance tests: toys that fit a method, and one whole run of it.

A method that trains gets a small network and devices with points; one that runs blocks gets toy donors. One that
depends on a device's memory is run a second time, on a network of three stages and devices of three tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt import methods, tensors
from fedquilt.core import Answer, Bundle, Contribution, Examples, Method, Profile, Site
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.testing.toys import SMALL, build, learners, members, remembered, toy_bundle
from fedquilt.testing.toys import play as run_of
from fedquilt.tools.artefacts import prepare as artefacts
from fedquilt.tools.simulation import Member

ROUNDS = 4
TRAINING = {"epochs": 2, "batch": 8, "lr": 0.1}
AMPLE = 1 << 40
MIXED = "-mixed"  # suffix of a method's name: run on a fleet of several tiers
BUDGETS = ("512MB", "2GB", "8GB")
PICTURES = {"channels": 1, "size": 8}
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3},
    "batch norm": {
        "name": "residual",
        "channels": 1,
        "classes": 3,
        "width": 4,
        "input": PICTURES,
    },  # counters: int64 ()
    "no axes": {"name": "rezero", "inputs": 64, "classes": 3, "width": 6, "blocks": 2},  # parameters of shape ()
    "gru": {"name": "gru", "channels": 8, "steps": 8, "classes": 3, "width": 4},  # tensors of a layer beside each other
    "numbers": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 2, "task": "regression"},
    "labels": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3, "task": "labels"},
}


class Skipped(Exception):
    """A check that does not apply to a method, or lacks a package; the message says why."""


def by_memory(name: str) -> bool:
    """Whether a method has a parameter with a value for each of the five tiers."""
    defaults = [field.default for field in fields(methods.load(name).params)]
    return any(isinstance(default, tuple) and len(default) == 5 for default in defaults)


def torch_engine() -> Any:
    """Torch engine with room for everything.

    Raises:
        Skipped: torch is not installed.
    """
    try:
        from fedquilt.edge_agent.engines.torch_engine import TorchEngine
    except ImportError as error:
        raise Skipped(f"this needs torch: {error}") from None
    return TorchEngine(AMPLE, base_bytes=0)


def known(params: type) -> dict[str, Any]:
    """TRAINING, reduced to the parameters that a method has."""
    there = {field.name for field in fields(params)}
    return {key: value for key, value in TRAINING.items() if key in there}


@dataclass(frozen=True)
class Scene:
    """Method with the toys for its run."""

    name: str
    method: Method
    bundle: Bundle
    engine: Any
    devices: list[Member]
    given: Mapping[str, Any]
    rounds: int
    budgets: tuple[str, ...] = BUDGETS[:1]  # of the devices, in turn

    @property
    def params(self) -> Any:
        """Parameters of the method for this scene."""
        return self.method.params(**self.given)

    def play(
        self, *, method: Method | None = None, devices: list[Member] | None = None, rounds: int = 0, **table: Any
    ) -> list[Any]:
        """Run the method; returns the states before the first round and after each."""
        return run_of(
            self.name,
            self.bundle,
            self.devices if devices is None else devices,
            self.given,
            engine=self.engine,
            method=method or self.method,
            seed=3,
            rounds=rounds or self.rounds,
            fleet={"budgets": list(self.budgets)},
            **table,
        )


def scene(name: str) -> Scene:
    """Method on toys that fit it, as small as possible; with the suffix MIXED on a mixed fleet.

    Raises:
        JobError: there is no such method.
        Skipped: it needs torch, which is not installed.
    """
    plain = name.removesuffix(MIXED)
    method = methods.load(plain)
    if "onnx" in method.engines:
        bundle, runner = build()
        there = {field.name for field in fields(method.params)}
        small = {key: value for key, value in SMALL.items() if key in there}
        return Scene(plain, method, bundle, runner, members(), small, rounds=1000)  # ends by itself
    if "numpy" in method.engines:
        engine: Any = NumpyEngine(AMPLE, base_bytes=0)
    else:
        engine = torch_engine()
    params = known(method.params)
    if name.endswith(MIXED):
        return Scene(plain, method, deep(), engine, learners(), params, ROUNDS, BUDGETS)
    return Scene(plain, method, toy_bundle(), engine, learners(), params, ROUNDS)


def profile(budget_bytes: int) -> Profile:
    """Profile of a device with that much memory."""
    return Profile(
        device="a", board="b", memory_bytes=budget_bytes, budget_bytes=budget_bytes, engines=("torch",), versions={}
    )


def deep() -> Bundle:
    """Bundle of a network with three layers of neurons before the classifier."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import trace

    network = {"name": "mlp", "inputs": 6, "hidden": [5, 4, 4], "classes": 3}
    module = registry.load(network)
    model = {key: value.numpy() for key, value in module.state_dict().items()}
    return toy_bundle(network, model, trace.trace_plan(module))


# (round, device) -> the state that an update was folded into, and the update: it is folded when it arrives, by
# itself, so that it can be refused, and again when its round is committed
Folded = dict[tuple[int, str], tuple[Any, Contribution]]


@cache
def played(name: str) -> tuple[Scene, list[Any], list[tuple[Any, Contribution]], list[tuple[Site, Answer]]]:
    """One run: its states, each update with the state it was folded into, and each task's site and answer."""
    folded: Folded = {}
    worked: list[tuple[Site, Answer]] = []
    here = scene(name)

    def fold(state: Any, so_far: Any, update: Contribution) -> Any:
        folded[update.round, update.device] = (state, update)
        return here.method.fold(state, so_far, update)

    def work(task: Any, site: Site) -> Answer:
        answer = here.method.work(task, site)
        worked.append((remembered(task, site), answer))
        return answer

    states = here.play(method=replace(here.method, fold=fold, work=work))
    return here, states, [folded[key] for key in sorted(folded)], worked


def packed(run: list[Any]) -> list[bytes]:
    """Packed states of a run, as bytes."""
    return [tensors.pack(state) for state in run]


def prepared(network: dict[str, Any], folder: Path) -> Bundle:
    """Bundle of a network, as `fedquilt prepare` makes it."""
    job = {"model": {key: value for key, value in network.items() if key != "input"}, "input": network.get("input")}
    bundle = artefacts.prepare({key: value for key, value in job.items() if value}, folder / "bundle")
    return replace(bundle, meta={**bundle.meta, "pretrained": True})  # some methods hold still what is not


def asked(examples: Examples, task: str) -> Examples:
    """Examples with targets of another task, made from their classes."""
    if task == "regression":
        return Examples(examples.x, np.stack([examples.y, -examples.y], axis=1).astype(np.float32))
    if task == "labels":
        return Examples(examples.x, (examples.y[:, None] >= np.arange(3)).astype(np.uint8))
    return examples


def pictured(examples: Examples) -> Examples:
    """Points of six values as pictures of 8 x 8 pixels."""
    pixels = np.zeros((len(examples), 64), np.float32)
    pixels[:, : examples.x.shape[1]] = examples.x
    return Examples(pixels.reshape(-1, 8, 8), examples.y)
