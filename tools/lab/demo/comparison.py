"""Comparison of the demo's network with donors, single boards and FedAvg from scratch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt.arrays import tensors
from fedquilt.coordinator.settings import CohortSettings, EvaluationSettings, JobSettings
from fedquilt.core import Examples, FedquiltError
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines.numpy import engine
from fedquilt.formats import job_bundle
from fedquilt.methods import fedstitch
from fedquilt.tools.experiments.baselines import BaselineSetup, pool_examples, run_to_last_state
from fedquilt.tools.experiments.single_run import run_seed
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.agents import FleetPlan

BUDGET_BYTES = 1 << 30  # of the evaluation, which runs here
SCRATCH: Final = {"name": "mlp", "inputs": 64, "hidden": [32], "classes": 10}
SCRATCH_COSTS: Final = {"flops": 4736.0, "example_bytes": 2944}  # forward, for one example: 2 (64 * 32 + 32 * 10)
SCRATCH_NAME: Final = "FedAvg from scratch"
SCRATCH_PARAMS: Final = {"lr": 0.2, "batch": 16}


class NetworkResult(msgspec.Struct, frozen=True):
    name: str
    accuracy: float  # 0..1, on the test digits
    note: str = ""
    energy_j: float | None = None  # None if nothing ran on the boards or energy was not measured
    moved_bytes: int | None = None


class DeviceAccuracy(msgspec.Struct, frozen=True):
    """Accuracy of the network that one device stitches alone."""

    name: str
    examples: int  # with those that nothing is fitted to
    alone: float  # on the test digits


@dataclass(frozen=True)
class DemoComparison:
    donors: Sequence[NetworkResult]  # as they are
    heads: Sequence[NetworkResult]  # with a new last layer
    devices: Sequence[DeviceAccuracy]
    scratch: NetworkResult


def count_parts(members: Sequence[DeviceData]) -> int:
    """Return how many times `compare_networks` calls `far`."""
    return len(members) + 3


def compare_networks(
    plan: FleetPlan,
    members: Sequence[DeviceData],
    test: Examples,
    rounds: int,
    far: Callable[[str], None],
) -> DemoComparison:
    """Measure all baselines of the stitched network.

    Args:
        plan: Plan of the simulated fleet.
        members: Devices with their examples.
        test: Examples that no device has.
        rounds: Number of rounds for FedAvg.
        far: Function called with a description when each part begins.
    """
    opened = job_bundle.load_bundle(plan.bundle)
    folder = plan.bundle / "blobs"
    engine: Any = engines.create_engine("onnx", BUDGET_BYTES)

    setup = BaselineSetup(opened, lambda name: folder / opened.files[name].sha256, engine, pool_examples(members), test)
    single = msgspec.structs.replace(plan.job, cohort=CohortSettings())
    devices = []
    for member in members:
        far(f"{member.device} alone")
        own = fedstitch.result(run_to_last_state(single, plan.bundle, [member], fedstitch.METHOD, engine))
        devices.append(DeviceAccuracy(member.device, len(member.train) + len(member.held), setup.compute_accuracy(own)))
    far("the donors as they are")
    donors = [NetworkResult(row.name, row.accuracy) for row in setup.evaluate_unmodified()]
    far("the donors with new heads")
    heads = [NetworkResult(row.name, row.accuracy) for row in setup.evaluate_new_heads()]
    far(f"{rounds} rounds of FedAvg")
    return DemoComparison(donors, heads, devices, train_from_scratch(plan.job, rounds))


def train_from_scratch(job: JobSettings, rounds: int) -> NetworkResult:
    """Train a small network from random weights with FedAvg on the same devices and examples.

    Raises:
        FedquiltError: If the run failed.
    """
    wanted = JobSettings(
        name="scratch",
        method="fedavg",
        rounds=rounds,
        engine="numpy",
        params=SCRATCH_PARAMS,
        data=job.data,
        fleet=job.fleet,
        check=EvaluationSettings(every=0),
    )
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as place:
        start = engine.init_tensors(SCRATCH, seed=0)
        first, weights = tensors.encode_tensors(start), sum(array.size for array in start.values())
        job_bundle.write_bundle(Path(place), {"network": SCRATCH, **SCRATCH_COSTS}, {"model": first})
        last = run_seed(wanted, Path(place), lambda done: None, 1).marks[-1]
    if last.value is None:
        raise FedquiltError("FedAvg from scratch has no accuracy on the test digits")
    return NetworkResult(
        SCRATCH_NAME,
        last.value,
        f"{weights} weights, {rounds} rounds",
        last.energy_j,
        last.down_bytes + last.up_bytes,
    )


def mean_accuracy_alone(devices: Sequence[DeviceAccuracy]) -> float:
    return float(np.mean([device.alone for device in devices]))
