"""The runs behind the table `fedstitch`: networks, a run of one arm, the paper's schedule, and a task's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Check, Job
from fedquilt.core import Examples, Fit, Hooks, ModelError, Tensors, Trainer
from fedquilt.data import examples as shares
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.settings import size_bytes
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.artefacts import batchnorm, prepare
from fedquilt.tools.experiments import single_run
from fedquilt.tools.experiments.papers import common
from fedquilt.tools.simulation.run import play as play_all
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Simulation
from fedquilt.tools.simulation.task_process import TaskProcess

BOARD: Final = "jetson-tx2"
DEVICES: Final = 20
ASKED: Final = 4
BUDGETS: Final = ("1GB", "2GB", "4GB") * 3 + ("8GB",)  # 30, 30, 30 and 10 % of devices
IMAGES: Final = 5000  # of all devices
TESTED: Final = 1000
INPUT: Final = {"channels": 3, "size": 64, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
SCRATCH: Final = {"name": "resnet20-cifar", "classes": 10, "input": {**INPUT, "size": 32}}
LABELS: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DONORS: Final = ("mobilenet_v2", "squeezenet1_1")
CLASSES: Final = 1000  # of the donors' weights
SEEN: Final = 256  # images without labels that give a folded network its statistics


@dataclass(frozen=True)
class Arm:
    """One row: a method, what it begins with, and how the paper has it trained."""

    method: str
    start: str  # "donors": blocks; "scratch": random weights; else the donor of this name with a new head
    group: int  # the paper's; 0: FedStitch itself
    rounds: int
    params: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1  # rounds from one evaluation to the next
    alone: int = 0  # so many devices, each by itself; 0: all together
    paper: tuple[float, float] | None = None  # its accuracy on CIFAR-10 in %: IID, and Dirichlet 1
    paper_rounds: int | None = None  # with the paper's PAPER_EPOCHS; None: nothing is trained

    @property
    def trains(self) -> bool:
        return self.start != "donors"


def prepared(arms: Mapping[str, Arm], data: Path, seeds: Sequence[int], folder: Path) -> dict[tuple[str, int], Path]:
    """The bundles that the arms begin with, by `Arm.start` and seed: heads and random weights are drawn from it.

    Raises:
        DataError: images or weights are not in the folder `data`.
    """
    found: dict[tuple[str, int], Path] = {}
    for start in dict.fromkeys(arm.start for arm in arms.values()):
        table: dict[str, Any] = {"input": INPUT}
        if start == "donors":
            table["labels"] = LABELS
            table["donors"] = [
                {"name": name, "network": {"name": f"torchvision/{name}"}, "weights": str(common.weights(data, name))}
                for name in DONORS
            ]
            prepare.prepare(table, folder / start)
            found |= dict.fromkeys(((start, seed) for seed in seeds), folder / start)
            continue
        if start == "scratch":
            table = {"model": SCRATCH}
        else:
            file = str(trainable(data, start, folder))
            network = {"name": f"torchvision/{start}", "classes": len(LABELS)}
            table["model"] = {**network, "weights": file, "weights_classes": CLASSES}
        for seed in seeds:
            found[start, seed] = folder / f"{start}-{seed}"
            prepare.prepare({**table, "model": {**table["model"], "seed": seed}}, found[start, seed])
    return found


def trainable(data: Path, architecture: str, folder: Path) -> Path:
    """The donor's weights, with statistics in its normalisations if they were folded away."""
    import torch
    from safetensors.torch import save_file

    from fedquilt.data import images
    from fedquilt.models.networks import registry

    file = common.weights(data, architecture)
    model = registry.load({"name": f"torchvision/{architecture}"}, file)
    if not batchnorm.folded(model):
        return file
    some = shares.load_all(DataSpec(**common.cifar(data), limit=SEEN))
    batchnorm.unfold(model, torch.from_numpy(images.prepare(some.x, msgspec.convert(INPUT, images.Input))))
    save_file(model.state_dict(), folder / f"{architecture}.safetensors")
    return folder / f"{architecture}.safetensors"


def job(arm: Arm, data: Path, partition: Mapping[str, Any], seed: int, rounds: int, **changes: Any) -> Job:
    """The arm as a job; `changes` are of its parameters."""
    method, asked = methods.load(arm.method), 1 if arm.alone else ASKED
    return settings.parse(
        {
            "name": "reproduce",
            "method": arm.method,
            "rounds": rounds,
            "seed": seed,
            "params": {**arm.params, **changes},
            "cohort": {"size": asked, **common.UNHURRIED},
            "check": {"every": 0 if method.check is None else arm.every},
            "fleet": {"devices": DEVICES, "boards": [BOARD], "budgets": list(BUDGETS)},
            "data": {**common.cifar(data), **partition, "limit": IMAGES, "seed": seed},
            "test": {"limit": TESTED},
        }
    )


def play(folder: Path, given: Job, alone: str, planned: Job | None) -> dict[str, Any]:
    """One run: what was seen at its evaluations, and what the job `planned` takes (`schedule`).

    Args:
        alone: the one device that takes part; "": all.
        planned: None: there is no such job.
    """
    import torch

    torch.set_num_threads(1)  # others run beside it
    run = single_run.play(given, folder, lambda done: None, alone=alone)
    found: dict[str, Any] = {"marks": [msgspec.to_builtins(mark) for mark in run.marks]}
    if planned is not None:
        found["planned"] = schedule(planned, folder)
    return found


def schedule(given: Job, folder: Path) -> dict[str, float]:
    """Seconds and joules of a whole job on its boards, each round of which is played; only the arithmetic is left out.

    What a task takes on a simulated board follows from its work and the number of examples, never from values. So the
    coordinator's rounds come and go as they would, with who is asked, who declines and what is sent, and no weight is
    moved. It is no statement about accuracy.

    Raises:
        JobError: the run has failed; says why.
        ModelError: a board does not tell its joules.
    """
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    unchecked = msgspec.structs.replace(given, check=Check())
    members, engine = single_run.shares(given, folder)[0], Still(TorchEngine(ROOM_BYTES))
    rounds = common.federated(unchecked, folder, members, engine).rounds
    joules = [round.energy_j for round in rounds if round.energy_j is not None]
    if len(joules) < len(rounds):
        raise ModelError(f"the simulated {BOARD} does not tell what it spends: the schedule's joules are not known")
    return {
        "rounds": given.rounds,
        "seconds": sum(round.duration_s for round in rounds),
        "energy_j": sum(joules),
    }


class Still:
    """An engine that looks at one example, and whose training leaves the weights as they are."""

    def __init__(self, engine: Trainer) -> None:
        self.name, self._engine = engine.name, engine

    def train(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> tuple[Tensors, dict[str, float]]:
        """See `fedquilt.core.Trainer`; no step is taken."""
        return dict(start), {"loss": 0.0, "steps": 0.0}

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> dict[str, float]:
        """See `fedquilt.core.Trainer`; of the first example alone."""
        return self._engine.evaluate(network, model, Examples(examples.x[:1], examples.y[:1]), hooks=hooks)


def peak_bytes(arm: Arm, folder: Path, given: Job, budget: str) -> int | None:
    """The most that the task process of a device holds, whose budget is this: a round of training, a whole search.

    It is alone in its job, with the first share of the examples, and its orders are carried out by the agent's own
    task process. None: it declines, since its budget does not hold the work.

    Raises:
        ModelError: a task failed, or this kernel tells no peaks.
    """
    alone = msgspec.structs.replace(
        given,
        cohort=msgspec.structs.replace(given.cohort, size=0, attempts=1),
        check=Check(),
        fleet=msgspec.structs.replace(given.fleet, budgets=(budget,)),
    )
    member, engine = single_run.shares(given, folder)[0][0], methods.load(arm.method).engines[0]
    peaks: list[int] = []
    with Scratch() as scratch:
        own = scratch / "own.npz"
        np.savez(own, x_train=member.train.x, y_train=member.train.y)
        data = {"path": str(own)}
        with (
            TaskProcess(arm.method, engine, size_bytes(budget), data, Path, scratch) as process,
            Simulation(alone, folder, {member.device: 0}, scratch / "home", engine=engine) as simulation,
        ):

            def carry(asked: Sequence[tuple[Simulation, Order]]) -> list[Outcome]:
                outcomes = [process.ask(order) for _, order in asked]
                for outcome in outcomes:
                    if outcome.code != "ok":
                        raise ModelError(f"a task of {arm.method} in {budget}: {outcome.reason}")
                    if outcome.peak_bytes is None:
                        raise ModelError("this kernel does not tell what a process has held at most")
                    peaks.append(outcome.peak_bytes)
                return outcomes

            for each in play_all([simulation], carry):
                if arm.trains and each.rounds:
                    break
    return max(peaks, default=None)
