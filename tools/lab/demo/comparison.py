"""Comparison of the demo's network with donors, single boards and FedAvg from scratch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt.coordinator.settings import CohortSettings, EvaluationSettings, JobSettings
from fedquilt.core import Artefact, Examples, FedquiltError
from fedquilt.edge_agent import engines
from fedquilt.formats import job_bundle
from fedquilt.methods import fedstitch
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.stitched_network import DonorPool, StitchedNetwork
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import tables
from fedquilt.tools.experiments.baselines import BaselineSetup, pool_examples, run_to_last_state
from fedquilt.tools.experiments.single_run import run_seed
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.agents import FleetPlan

BUDGET_BYTES = 1 << 30  # of the evaluation, which runs here
PIXELS: Final = 64  # of a digit, the inputs of FedAvg's network
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


class DonorContribution(msgspec.Struct, frozen=True):
    """What a donor knows and adds to the network. Accuracies are on the test digits.

    Attributes:
        labels: Labels that the donor was trained on.
        unmodified: Accuracy as it is.
        head: Accuracy with a new last layer.
        depths: Accuracy with a new last layer on all its depths.
        without: Accuracy of the network without the donor's blocks, or None if no block is left.
        gain: 95 % interval of what the network gains by the donor, paired by test digits.
    """

    name: str
    labels: tuple[str, ...]
    unmodified: float
    head: float
    depths: float
    without: float | None
    gain: tuple[float, float] | None


@dataclass(frozen=True)
class DemoComparison:
    donors: Sequence[DonorContribution]
    lead: tuple[float, float]  # 95 % interval over `best_donor`, paired by test digits
    devices: Sequence[DeviceAccuracy]
    scratch: NetworkResult

    @property
    def best_donor(self) -> DonorContribution:
        return max(self.donors, key=lambda donor: donor.head)  # chosen on the test digits, which favours the donor


def count_parts(members: Sequence[DeviceData]) -> int:
    """Return how many times `compare_networks` calls `far`."""
    return len(members) + 2


def compare_networks(
    plan: FleetPlan,
    members: Sequence[DeviceData],
    test: Examples,
    rounds: int,
    artefact: Artefact,
    far: Callable[[str], None],
) -> DemoComparison:
    """Measure all baselines of the stitched network."""
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
    far("what each donor contributes")
    network = stitched_network.from_artefact(artefact.meta, artefact.tensors)
    correct = setup.mark_correct(network)
    heads = setup.evaluate_new_heads()
    donors = measure_contributions(setup, network, correct, {row.name: row.accuracy for row in heads})
    best = max(heads, key=lambda row: row.accuracy)
    far(f"{rounds} rounds of FedAvg")
    scratch = train_from_scratch(plan.job, rounds, count_weights(network, setup.stock))
    return DemoComparison(donors, _paired_interval(correct, best.correct), devices, scratch)


def measure_contributions(
    setup: BaselineSetup, network: StitchedNetwork, correct: np.ndarray, heads: Mapping[str, float]
) -> list[DonorContribution]:
    unmodified = {row.name: row.accuracy for row in setup.evaluate_unmodified()}
    found = []
    for name, donor in setup.stock.donors.items():
        depths = tuple(donor.blocks[: index + 1] for index in range(len(donor.blocks) - 1))
        labels = zip(setup.stock.labels, donor.align or (), strict=True)
        left = tuple(path for path in network.taps if set(path).isdisjoint(donor.blocks))
        others = setup.mark_correct(setup.fit_new_head(replace(network, taps=left))) if left else None
        found.append(
            DonorContribution(
                name,
                tuple(label for label, classes in labels if classes),
                unmodified[name],
                heads[name],
                float(setup.mark_correct(setup.fit_new_head(StitchedNetwork(depths, {}))).mean()),
                None if others is None else float(others.mean()),
                None if others is None else _paired_interval(correct, others),
            )
        )
    return found


def count_weights(network: StitchedNetwork, stock: DonorPool) -> int:
    """Return the number of weights of a stitched network. Blocks that several paths share count once."""
    used = {block for path in network.taps for block in path}
    own = (*network.junctions.values(), network.head or {})
    return sum(stock.blocks[block].weight_bytes // 4 for block in used) + sum(
        array.size for arrays in own for array in arrays.values()
    )


def _paired_interval(correct: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    return tables.confidence_interval((correct.astype(float) - other.astype(float)).tolist())


def train_from_scratch(job: JobSettings, rounds: int, size: int) -> NetworkResult:
    """Train a network of about `size` weights with FedAvg, from random weights, on the same devices and examples."""
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
    labels = len(job.labels)
    hidden = max(1, round((size - labels) / (PIXELS + 1 + labels)))
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as place:
        model = {"name": "mlp", "inputs": PIXELS, "hidden": [hidden], "classes": labels}
        prepare.prepare_bundle({"model": model}, Path(place))
        last = run_seed(wanted, Path(place), lambda done: None, 1).marks[-1]
    if last.value is None:
        raise FedquiltError("FedAvg from scratch has no accuracy on the test digits")
    return NetworkResult(
        SCRATCH_NAME,
        last.value,
        f"{hidden * (PIXELS + 1 + labels) + labels} weights, {rounds} rounds",
        last.energy_j,
        last.down_bytes + last.up_bytes,
    )


def mean_accuracy_alone(devices: Sequence[DeviceAccuracy]) -> float:
    return float(np.mean([device.alone for device in devices]))
