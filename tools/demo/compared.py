"""Comparison of the demo's result with its donors, each board alone, and a network trained from scratch by FedAvg."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import bundle, tensors
from fedquilt.coordinator.settings import Check, Cohort, Job
from fedquilt.core import Examples, FedquiltError
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.methods import fedstitch
from fedquilt.tools.experiments.baselines import Bench, last_of, pooled
from fedquilt.tools.experiments.single_run import play
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.agents import Plan

BUDGET_BYTES = 1 << 30  # of the evaluation, which runs here
SCRATCH: Final = {"name": "mlp", "inputs": 64, "hidden": [32], "classes": 10}
SCRATCH_COSTS: Final = {"flops": 4736.0, "example_bytes": 2944}  # forward, for one example: 2 (64 * 32 + 32 * 10)
SCRATCH_NAME: Final = "FedAvg from scratch"
SCRATCH_PARAMS: Final = {"lr": 0.2, "batch": 16}


class Network(msgspec.Struct, frozen=True):
    """One network, and what making it took on the boards."""

    name: str
    accuracy: float  # 0..1, on the test digits
    note: str = ""
    energy_j: float | None = None  # None: nothing ran on the boards, or it was not counted
    moved_bytes: int | None = None


class Device(msgspec.Struct, frozen=True):
    """One board: accuracies, 0..1, of the network that it stitches alone and of the federation's."""

    name: str
    examples: int  # that it scores and fits on
    held: int  # its own digits that nothing is fitted to
    alone: float  # on the test digits
    alone_own: float  # on its own held-out digits
    together_own: float


@dataclass(frozen=True)
class Compared:
    """All of it."""

    donors: Sequence[Network]  # as they are
    heads: Sequence[Network]  # with a new last layer
    devices: Sequence[Device]
    scratch: Network


def parts(members: Sequence[Member]) -> int:
    """Number of parts of a comparison, for `far`."""
    return len(members) + 3


def compare(
    plan: Plan, artefact: Any, members: Sequence[Member], test: Examples, rounds: int, far: Callable[[str], None]
) -> Compared:
    """Measure everything that the stitched network `artefact` has to beat.

    Args:
        plan: of the simulated fleet.
        artefact: result of the search.
        members: devices with their examples.
        test: examples that no device has.
        rounds: rounds for FedAvg, as many as the search took.
        far: called when each of the `parts` begins, with what it is.
    """
    opened = bundle.load(plan.bundle)
    folder = plan.bundle / "blobs"
    engine: Any = engines.make("onnx", BUDGET_BYTES)

    def bench(examples: Examples) -> Bench:
        return Bench(opened, lambda name: folder / opened.files[name].sha256, engine, pooled(members), examples)

    common = bench(test)
    single = msgspec.structs.replace(plan.job, cohort=Cohort())
    devices = []
    for member in members:
        far(f"{member.device} alone")
        own = fedstitch.result(last_of(single, plan.bundle, [member], fedstitch.METHOD, engine))
        private = bench(member.held)
        accuracies = common.accuracy_of(own), private.accuracy_of(own), private.accuracy_of(artefact)
        devices.append(Device(member.device, len(member.train), len(member.held), *accuracies))
    far("the donors as they are")
    donors = [Network(row.name, row.accuracy) for row in common.unmodified()]
    far("the donors with new heads")
    heads = [Network(row.name, row.accuracy) for row in common.heads()]
    far(f"{rounds} rounds of FedAvg")
    return Compared(donors, heads, devices, from_scratch(plan.job, rounds))


def from_scratch(job: Job, rounds: int) -> Network:
    """FedAvg on the same boards and shares: a small network trained from random weights.

    Raises:
        FedquiltError: the run has failed; says why.
    """
    wanted = Job(
        name="scratch",
        method="fedavg",
        rounds=rounds,
        engine="numpy",
        params=SCRATCH_PARAMS,
        data=job.data,
        fleet=job.fleet,
        check=Check(every=0),
    )
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as place:
        start = numpy_engine.init(SCRATCH, seed=0)
        first, weights = tensors.encode(start), sum(array.size for array in start.values())
        bundle.write(Path(place), {"network": SCRATCH, **SCRATCH_COSTS}, {"model": first})
        last = play(wanted, Path(place), lambda done: None, 1).marks[-1]
    if last.value is None:
        raise FedquiltError("FedAvg from scratch has no accuracy on the test digits")
    return Network(
        SCRATCH_NAME,
        last.value,
        f"{weights} weights, {rounds} rounds",
        last.energy_j,
        last.down_bytes + last.up_bytes,
    )


def mean_alone(devices: Sequence[Device]) -> float:
    """The accuracy that a board reaches alone, on average."""
    return float(np.mean([device.alone for device in devices]))
