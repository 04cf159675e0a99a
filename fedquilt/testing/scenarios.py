"""Scenarios of conformance checks: toy data for a method, and one complete run.

A method that trains gets a small network and devices with points. A method that runs blocks gets toy donors. A method
that depends on a device's memory is run a second time, on a network of three stages and devices of three tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import Aggregation, Bundle, ClientContext, ClientResult, DeviceUpdate, Examples, Method, Profile
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.testing.toy_networks import (
    SMALL,
    build_donors,
    image_members,
    point_members,
    toy_bundle,
    with_loaded_tensors,
)
from fedquilt.testing.toy_networks import run_method as run_of
from fedquilt.tools.artefacts import prepare as artefacts
from fedquilt.tools.simulation import DeviceData

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
    "gru": {"name": "gru", "channels": 8, "steps": 8, "classes": 3, "width": 4},  # several tensors for each layer
    "numbers": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 2, "task": "regression"},
    "labels": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3, "task": "labels"},
}


class CheckSkipped(Exception):
    """Exception of a check that does not apply to a method or lacks a package."""


def depends_on_memory(name: str) -> bool:
    """Return whether a method has a parameter with a value for each of the five memory tiers."""
    defaults = [field.default for field in fields(methods.load(name).params)]
    return any(isinstance(default, tuple) and len(default) == 5 for default in defaults)


def make_torch_engine() -> Any:
    """Return a torch engine with an unlimited memory budget.

    Raises:
        CheckSkipped: If torch is not installed.
    """
    try:
        from fedquilt.edge_agent.engines.torch.engine import TorchEngine
    except ImportError as error:
        raise CheckSkipped(f"this needs torch: {error}") from None
    return TorchEngine(AMPLE, base_bytes=0)


def training_params(params: type) -> dict[str, Any]:
    """Return the entries of TRAINING that are parameters of a method."""
    there = {field.name for field in fields(params)}
    return {key: value for key, value in TRAINING.items() if key in there}


@dataclass(frozen=True)
class Scenario:
    """Method with toy data, devices and parameters for a run."""

    name: str
    method: Method
    bundle: Bundle
    engine: Any
    devices: list[DeviceData]
    given: Mapping[str, Any]
    rounds: int
    budgets: tuple[str, ...] = BUDGETS[:1]  # of the devices, in turn

    @property
    def params(self) -> Any:
        """Parameters of the method for this scene."""
        return self.method.params(**self.given)

    def run_rounds(
        self, *, method: Method | None = None, devices: list[DeviceData] | None = None, rounds: int = 0, **table: Any
    ) -> list[Any]:
        """Run the method and return its states before the first round and after each round."""
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


def make_scene(name: str) -> Scenario:
    """Return the smallest scenario for a method. The suffix MIXED selects a mixed fleet.

    Raises:
        JobError: If there is no such method.
        CheckSkipped: If the method requires torch and torch is not installed.
    """
    plain = name.removesuffix(MIXED)
    method = methods.load(plain)
    if "onnx" in method.engines:
        bundle, runner = build_donors()
        there = {field.name for field in fields(method.params)}
        small = {key: value for key, value in SMALL.items() if key in there}
        return Scenario(plain, method, bundle, runner, image_members(), small, rounds=1000)  # ends by itself
    if "numpy" in method.engines:
        engine: Any = NumpyEngine(AMPLE, base_bytes=0)
    else:
        engine = make_torch_engine()
    params = training_params(method.params)
    if name.endswith(MIXED):
        return Scenario(plain, method, deep_bundle(), engine, point_members(), params, ROUNDS, BUDGETS)
    return Scenario(plain, method, toy_bundle(), engine, point_members(), params, ROUNDS)


def device_profile(budget_bytes: int) -> Profile:
    """Return the profile of a device with a memory budget."""
    return Profile(
        device="a", board="b", memory_bytes=budget_bytes, budget_bytes=budget_bytes, engines=("torch",), versions={}
    )


def deep_bundle() -> Bundle:
    """Return the bundle of a network with three hidden layers before the classifier."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    network = {"name": "mlp", "inputs": 6, "hidden": [5, 4, 4], "classes": 3}
    module = registry.load_network(network)
    model = {key: value.numpy() for key, value in module.state_dict().items()}
    return toy_bundle(network, model, dependency_trace.trace_mask_plan(module))


# (round, device) -> the state that an update was folded into, and the update: it is folded when it arrives, by
# itself, so that it can be refused, and again when its round is committed
Folded = dict[tuple[int, str], tuple[Any, DeviceUpdate]]


@cache
def record_run(
    name: str,
) -> tuple[Scenario, list[Any], list[tuple[Any, DeviceUpdate]], list[tuple[ClientContext, ClientResult]]]:
    """Run a scenario and record all values of the run. Runs are cached by name.

    Returns:
        The scenario, the states, each update with the state into which it was folded, and the site and answer of each
        task.
    """
    folded: Folded = {}
    worked: list[tuple[ClientContext, ClientResult]] = []
    here = make_scene(name)

    def fold(state: Any, so_far: Any, update: DeviceUpdate) -> Any:
        folded[update.round, update.device] = (state, update)
        return here.method.aggregation.fold(state, so_far, update)

    def work(task: Any, site: ClientContext) -> ClientResult:
        answer = here.method.work(task, site)
        worked.append((with_loaded_tensors(task, site), answer))
        return answer

    states = here.run_rounds(method=replace(here.method, aggregation=Aggregation(fold), work=work))
    return here, states, [folded[key] for key in sorted(folded)], worked


def packed_states(run: list[Any]) -> list[bytes]:
    return [tensors.pack_state(state) for state in run]


def prepare_bundle(network: dict[str, Any], folder: Path) -> Bundle:
    """Return the bundle of a network, as made by `fedquilt prepare`."""
    job = {"model": {key: value for key, value in network.items() if key != "input"}, "input": network.get("input")}
    bundle = artefacts.prepare_bundle({key: value for key, value in job.items() if value}, folder / "bundle")
    return replace(bundle, meta={**bundle.meta, "pretrained": True})  # some methods hold still what is not


def with_targets(examples: Examples, task: str) -> Examples:
    """Return the examples with targets for a task kind, derived from their classes."""
    if task == "regression":
        return Examples(examples.x, np.stack([examples.y, -examples.y], axis=1).astype(np.float32))
    if task == "labels":
        return Examples(examples.x, (examples.y[:, None] >= np.arange(3)).astype(np.uint8))
    return examples


def as_images(examples: Examples) -> Examples:
    """Return points of six values as images of 8 x 8 pixels."""
    pixels = np.zeros((len(examples), 64), np.float32)
    pixels[:, : examples.x.shape[1]] = examples.x
    return Examples(pixels.reshape(-1, 8, 8), examples.y)
