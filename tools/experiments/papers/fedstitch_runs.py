"""Runs of fedstitch.toml: searches, training, costs of the paper's schedule, and task memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.coordinator import cohort
from fedquilt.coordinator.settings import Check, Job
from fedquilt.core import EvaluationSums, Examples, Fit, Hooks, ModelError, Tensors, Trainer
from fedquilt.data import images
from fedquilt.edge_agent.settings import parse_size
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.artefacts import batchnorm
from fedquilt.tools.experiments import single_run
from fedquilt.tools.experiments.papers.cells import How, run_with_options
from fedquilt.tools.experiments.single_run import Run
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.run import run_rounds as play_all
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Round, Simulation
from fedquilt.tools.simulation.task_process import TaskProcess

EPOCHS: Final = 10  # epochs in each of the paper's rounds
SEARCHERS: Final = 2  # number of devices that search alone


def unfolded(job: Mapping[str, Any], seen: Examples) -> Tensors:
    """Return a donor's weights. Folded batch normalisation is restored with statistics of `seen`."""
    import torch

    from fedquilt.models.networks import registry

    model = registry.load_network({"name": job["model"]["name"]}, job["model"]["weights"])
    if batchnorm.is_folded(model):
        given = images.prepare_images(seen.x, msgspec.convert(job["input"], images.Input))
        batchnorm.restore_statistics(model, torch.from_numpy(given))
    return {name: value.numpy() for name, value in model.state_dict().items()}


def searched(job: Job, folder: Path, how: How) -> Run:
    return run_with_options(job, folder, how, workers=1, together=True)


def alone(job: Job, folder: Path, how: How) -> Run:
    """Run FedStitch on SEARCHERS devices, each alone. Their runs are in `figures` under "alone"."""
    every = [member.device for member in single_run.load_devices(job, folder)[0]]
    names = cohort.select_cohort(job.seed, 0, every, SEARCHERS)
    runs = [
        run_with_options(
            job, folder, how, workers=1, pick=lambda members, name=name: [m for m in members if m.device == name]
        )
        for name in names
    ]
    return msgspec.structs.replace(runs[-1], figures={"alone": [msgspec.to_builtins(run) for run in runs]})


def trained(job: Job, folder: Path, how: How) -> Run:
    """Run a training method. The costs of the paper's schedule are in `figures` under "planned"."""
    run = run_with_options(job, folder, how, workers=1)
    rounds = int(how.row.paper["rounds"][0])
    planned = msgspec.structs.replace(job, rounds=rounds, params={**job.params, "epochs": EPOCHS})
    return msgspec.structs.replace(run, figures={"planned": measure_schedule(planned, folder)})


def measure_schedule(given: Job, folder: Path) -> dict[str, float]:
    """Return simulated seconds and joules of a whole job, run without training.

    The cost of a task on a simulated board depends on its work and the number of examples, never on values.
    Selection, declines and bytes are therefore as in a real run, while the weights stay unchanged.

    Raises:
        JobError: If the run has failed.
        ModelError: If a board's profile has no power, so that its energy is unknown.
    """
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    unchecked = msgspec.structs.replace(given, check=Check())
    rounds: list[Round] = []

    def observe(simulation: Simulation, hands: Hands) -> None:
        rounds[:] = simulation.rounds

    members, engine = single_run.load_devices(given, folder)[0], Still(TorchEngine(ROOM_BYTES))
    for _ in iterate_states(unchecked, folder, members, engine=engine, observe=observe):
        pass
    joules = [round.energy_j for round in rounds if round.energy_j is not None]
    if len(joules) < len(rounds):
        raise ModelError("a simulated board does not tell what it spends: the schedule's joules are not known")
    return {
        "rounds": given.rounds,
        "seconds": sum(round.duration_s for round in rounds),
        "energy_j": sum(joules),
    }


class Still:
    """Engine that trains without any step and evaluates the first example only."""

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
        return dict(start), {"loss": 0.0, "steps": 0.0}

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        return self._engine.evaluate(network, model, Examples(examples.x[:1], examples.y[:1]), hooks=hooks)


def measure_peak_bytes(folder: Path, given: Job, budget: str) -> int | None:
    """Return the peak memory of a task process in one round of training or a whole search.

    The device is alone in its job and has the first share of the examples. The result is None if it declines because
    the budget is too small.

    Raises:
        ModelError: If a task failed, or the kernel reports no peaks.
    """
    alone = msgspec.structs.replace(
        given,
        cohort=msgspec.structs.replace(given.cohort, size=0, attempts=1),
        check=Check(),
        fleet=msgspec.structs.replace(given.fleet, budgets=(budget,)),
    )
    member, engine = single_run.load_devices(given, folder)[0][0], methods.load(given.method).engines[0]
    peaks: list[int] = []
    with Scratch() as scratch:
        own = scratch / "own.npz"
        np.savez(own, x_train=member.train.x, y_train=member.train.y)
        data = {"path": str(own)}
        with (
            TaskProcess(given.method, engine, parse_size(budget), data, Path, scratch) as process,
            Simulation(alone, folder, {member.device: 0}, scratch / "home", engine=engine) as simulation,
        ):

            def run_requests(asked: Sequence[tuple[Simulation, Order]]) -> list[Outcome]:
                outcomes = [process.run_request(order) for _, order in asked]
                for outcome in outcomes:
                    if outcome.code != "ok":
                        raise ModelError(f"a task of {given.method} in {budget}: {outcome.reason}")
                    if outcome.peak_bytes is None:
                        raise ModelError("this kernel does not tell what a process has held at most")
                    peaks.append(outcome.peak_bytes)
                return outcomes

            for each in play_all([simulation], run_requests):
                if "epochs" in given.params and each.rounds:
                    break
    return max(peaks, default=None)
