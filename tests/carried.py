"""A small job of each method, to be run on several carriers, and what its log says afterwards.

Methods are found by their files, so that a new one is among them without an edit.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.models.partial import masks
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation import agents, run
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import Simulation

DIGITS = demo.HERE / "digits.npz"
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [6, 5], "classes": 10}
UNITS = masks.MaskPlan(
    {"1": 6, "3": 5},
    {},
    {
        "1.weight": masks.TensorGroups((6, 64), ("1",)),
        "1.bias": masks.TensorGroups((6,), ("1",)),
        "3.weight": masks.TensorGroups((5, 6), ("3",), ("1",)),
        "3.bias": masks.TensorGroups((5,), ("3",)),
        "5.weight": masks.TensorGroups((10, 5), (), ("3",)),
    },
)
TRAINING = {"epochs": 2, "batch": 16, "lr": 0.1}
SAMPLES = ("samples", "fit_samples", "head_samples")
SEARCH = {"rounds": 3, "subrounds": 1, "expansions": 2, "depth": 4, **dict.fromkeys(SAMPLES, 12)}


class Outcome(NamedTuple):
    asked: list[tuple[int, tuple[str, ...]]]
    answered: list[tuple[int, str, int, int]]  # and its bytes down and up
    states: list[str]  # sha256 after each round
    ended: str


def run_and_collect(home: Path, run: str) -> Outcome:
    with Store(home) as store:
        events = [event for _, _, event in store.read_events(run)]
    usage = [(f.round, f.update.device, f.update.usage) for f in events if isinstance(f, UpdateAccepted)]
    return Outcome(
        [(event.round, event.devices) for event in events if isinstance(event, CohortSelected)],
        sorted((number, device, used.down_bytes, used.up_bytes) for number, device, used in usage),
        [event.state.sha256 for event in events if isinstance(event, RoundCommitted)],
        next(event.status for event in events if isinstance(event, JobEnded)),
    )


def choose_engine(name: str) -> str:
    able = [engine for engine in ("numpy", "onnx", "torch") if engine in methods.load(name).engines]
    there = [engine for engine in able if engine in engines.available_engines()]
    if not there:
        pytest.skip(f"{name} needs one of these engines: {', '.join(able)}")
    return there[0]


def plan(name: str, place: Path) -> agents.FleetPlan:
    method = methods.load(name)
    known = {field.name for field in fields(method.params)}
    stitches = "onnx" in method.engines
    params = {key: value for key, value in (SEARCH if stitches else TRAINING).items() if key in known}
    made = demo.HERE / "bundle"
    if not stitches:
        made = place / "bundle"
        model = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
        units = tensors.encode_tensors({"json": masks.plan_to_array(UNITS)})
        job_bundle.write_bundle(made, {"network": NETWORK, "flops": 1e6}, {"model": model, "masks": units})
    table = {
        "name": "carried",
        "method": name,
        "engine": choose_engine(name),
        "rounds": 3,
        "seed": 3,
        "params": params,
        "cohort": {"size": 2},
        "fleet": {"devices": 4, "boards": ["jetson-tx2", "raspberry-pi-5"], "budgets": ["1GB", "2GB"]},
        "data": {"path": str(DIGITS), "partition": "dirichlet", "alpha": 1.0, "limit": 240},
    }
    return agents.FleetPlan(settings.parse_job(table), made, place / "linked")


def simulated(given: agents.FleetPlan, hands: WorkBackend, home: Path) -> Outcome:
    held = {member.device: len(member.held_out) for member in given.load_devices()[0]}
    with Simulation(given.job, given.bundle, held, home) as simulation:
        for _ in run.run_rounds(simulation, hands):
            pass
        name = simulation.run
    return run_and_collect(home, name)
