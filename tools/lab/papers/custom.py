"""Functions named by the tables of papers.

`observe` names a function (folder, options, simulation, backend), called before the first round, after each round
and at the end, which returns values for `SeedRun.figures`. `play` names a function (job, folder, options) that runs a
row and returns a `SeedRun`. `by` names a function (job, examples) that computes starting weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator.settings import EvaluationSettings, JobSettings
from fedquilt.core import EvaluationSums, Examples, Hooks, ModelError, Tensors, Trainer, evaluation
from fedquilt.data import examples, inputs
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.settings import parse_size
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.formats import job_bundle
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import single_run
from fedquilt.tools.experiments.evaluation import Evaluator, load_test_set
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.lab.papers.cells import ExecutionOptions, run_with_options
from fedquilt.tools.simulation.pool import ScratchFolder
from fedquilt.tools.simulation.run import WorkBackend, iterate_states, run_rounds
from fedquilt.tools.simulation.simulated_job import UNLIMITED_BYTES, SimulatedRound, Simulation
from fedquilt.tools.simulation.task_process import TaskProcess

if TYPE_CHECKING:
    import torch
    from torch import nn

BUDGETS: Final = ("1GB", "2GB", "4GB")  # of sub-models
WHOLE_NETWORK_METHODS: Final = ("fedavg", "fedepth")  # these send the whole network to each device
PAPER_EPOCHS: Final = 10  # in each round of FedStitch's paper
PAPER_BATCH: Final = 128  # determines the memory of tasks, and so which devices can take part


def observe_gates(
    folder: Path, options: ExecutionOptions, simulation: Simulation, backend: WorkBackend
) -> dict[str, Any]:
    """Return sizes in bytes, uploads in % of the shared part and FedSDG's gates, or {} before the end."""
    if not simulation.is_finished:
        return {}
    tasks = sum(len(each.devices) for each in simulation.rounds)
    shared = tensors.total_bytes([simulation.state.model])
    figures: dict[str, Any] = {
        "shared_bytes": shared,
        "model_bytes": tensors.total_bytes([job_bundle.load_bundle(folder).load("model")]),
        "sent": 100 * sum(each.up_bytes for each in simulation.rounds) / (tasks * shared),
    }
    gates = {
        device: [value for key, value in sorted(metrics.items()) if key.startswith("gate.")]
        for device, metrics in simulation.rounds[-1].devices_metrics.items()
    }
    if openness := [value for values in gates.values() for value in values]:
        figures |= {"gates": gates, "least_gate": min(openness), "most_gate": max(openness)}
    return figures


def observe_submodels(
    folder: Path, options: ExecutionOptions, simulation: Simulation, backend: WorkBackend
) -> dict[str, Any]:
    """Return the accuracy of the sub-model for each memory budget, or {} before the last round."""
    if not simulation.is_finished or simulation.job.method in WHOLE_NETWORK_METHODS:
        return {}
    state, rounds = simulation.state, simulation.completed_rounds
    with Evaluator(simulation.job, folder) as judge:
        scores = {each: judge.score(state, rounds, budget_bytes=parse_size(each)) for each in BUDGETS}
    return {each: score.value for each, score in scores.items() if score is not None}


def observe_newcomers(
    folder: Path, options: ExecutionOptions, simulation: Simulation, backend: WorkBackend
) -> dict[str, Any]:
    """Bring GENE-FL's new devices online for the last two rounds, and return accuracies and sizes.

    In other rounds, and without devices that are offline at first, return {}.
    """
    if not options.row.away:
        return {}
    newcomers = list(simulation.held_out_counts)[-options.row.away :]
    remaining_rounds = simulation.job.rounds - len(simulation.rounds)
    if remaining_rounds == 2:
        simulation.fleet.bring_online(newcomers)
    if remaining_rounds == 1:  # newcomers train from this state
        state = simulation.state
        genes = [state.genes[state.assigned[name]] for name in newcomers]
        initial_bytes = [tensors.total_bytes([state.initial_layers[layer] for layer in gene]) for gene in genes]
        return {
            "begun_bytes": statistics.fmean(initial_bytes),
            "genes": {str(k): list(g) for k, g in enumerate(state.genes)},
        }
    if not simulation.is_finished:
        return {}
    earlier_rounds, last_round = simulation.rounds[:-2], simulation.rounds[-1]
    return {
        "mean": _mean_accuracy(earlier_rounds[-1].devices_metrics.values()),
        "up_bytes": sum(each.up_bytes for each in earlier_rounds),
        "newcomers": _mean_accuracy(last_round.devices_metrics[name] for name in newcomers),
    }


def _mean_accuracy(device_metrics: Iterable[Mapping[str, float]]) -> float:
    return statistics.fmean(metrics["held_correct"] / metrics["held_examples"] for metrics in device_metrics)


def observe_test_share(
    folder: Path, options: ExecutionOptions, simulation: Simulation, backend: WorkBackend
) -> dict[str, Any]:
    """Return the accuracy or R² on the test set as "test", or {} before the last round."""
    sums = backend.evaluate_test_set(simulation) if simulation.is_finished else None
    if sums is None:
        return {}
    return {"test": evaluation.compute_metrics(sums)["r2" if sums.task == "regression" else "accuracy"]}


def fit_linear(job: JobSettings, folder: Path, options: ExecutionOptions) -> SeedRun:
    from sklearn import linear_model

    return _fit_central(job, linear_model.Ridge() if _is_regression(job) else linear_model.LogisticRegression())


def fit_forest(job: JobSettings, folder: Path, options: ExecutionOptions) -> SeedRun:
    from sklearn import ensemble

    forest = ensemble.RandomForestRegressor if _is_regression(job) else ensemble.RandomForestClassifier
    return _fit_central(job, forest(random_state=job.seed))


def _is_regression(job: JobSettings) -> bool:
    return bool(job.model.get("task") == "regression")


def _fit_central(job: JobSettings, model: Any) -> SeedRun:
    from sklearn import pipeline, preprocessing

    train, test = examples.load_split(DataSpec.parse(job.data)), load_test_set(job)
    x_train, x_test = train.x.reshape(len(train), -1), test.x.reshape(len(test), -1)
    y_train, y_test = train.y.ravel(), test.y.ravel()
    score = pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(x_train, y_train).score(x_test, y_test)
    return SeedRun(
        method=job.method,
        seed=job.seed,
        params={},
        devices=0,
        tested=len(test),
        marks=(),
        figures={"test": float(score)},
    )


def train_from_scratch(job: JobSettings, folder: Path, options: ExecutionOptions) -> SeedRun:
    """Train each new device alone, from the bundle's weights, and return the mean accuracy as "newcomers"."""
    run = run_with_options(job, folder, options)
    return msgspec.structs.replace(run, marks=(), figures={"newcomers": run.marks[-1].mean})


def train_from_fedavg(job: JobSettings, folder: Path, options: ExecutionOptions) -> SeedRun:
    """Run FedAvg on the known devices, then train new devices from its result, each alone."""
    last_model: list[dict[str, Any]] = []

    def store_model(simulation: Simulation, backend: WorkBackend) -> dict[str, Any]:
        last_model[:] = [simulation.state.model]
        return {}

    known_devices = msgspec.structs.replace(
        options, row=msgspec.structs.replace(options.row, members=(0, options.row.members[0]))
    )
    run_with_options(msgspec.structs.replace(job, method="fedavg"), folder, known_devices, observe_run=store_model)
    with ScratchFolder() as folder_of_weights:
        file = folder_of_weights / "weights.safetensors"
        file.write_bytes(tensors.encode_tensors(last_model[0]))
        prepare.prepare_bundle({"model": {**job.model, "weights": str(file)}}, folder_of_weights / "bundle")
        run = train_from_scratch(msgspec.structs.replace(job, rounds=1), folder_of_weights / "bundle", options)
    return msgspec.structs.replace(run, figures={**run.figures, "begun_bytes": tensors.total_bytes(last_model)})


def run_with_costs(job: JobSettings, folder: Path, options: ExecutionOptions) -> SeedRun:
    """Run a job, and add the costs of the paper's own schedule and the memory of its tasks.

    The schedule has the rounds of the row's `paper`, or else is the run itself. Memory counts only devices whose budget
    permits a task.
    """
    run = run_with_options(job, folder, options)
    costs: Mapping[str, Any] = {"planned_s": run.marks[-1].seconds, "planned_j": run.marks[-1].energy_j}
    memory_job = job
    if "rounds" in options.row.paper:
        rounds = int(options.row.paper["rounds"][0])
        params = {**job.params, "epochs": PAPER_EPOCHS}
        costs = measure_schedule(msgspec.structs.replace(job, rounds=rounds, params=params), folder)
        memory_job = msgspec.structs.replace(job, params={**job.params, "epochs": 1, "batch": PAPER_BATCH})
    budgets = job.fleet.budgets
    peaks = {budget: measure_peak_bytes(folder, memory_job, budget) for budget in dict.fromkeys(budgets)}
    known_peaks = [peak for peak in map(peaks.__getitem__, budgets) if peak is not None]
    memory = {"takes_part": len(known_peaks) / len(budgets)}
    memory |= {"peak_bytes": statistics.fmean(known_peaks), "most_bytes": max(known_peaks)} if known_peaks else {}
    return msgspec.structs.replace(run, figures={**costs, **memory})


def measure_schedule(job: JobSettings, folder: Path) -> dict[str, float]:
    """Return simulated seconds and joules of a whole job, run without training.

    The cost of a task on a simulated board depends on its work and the number of examples, never on values.
    Selection, declines and bytes are therefore as in a real run, while the weights stay unchanged. Raise ModelError if
    a board's profile has no power.
    """
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    unchecked = msgspec.structs.replace(job, check=EvaluationSettings())
    rounds: list[SimulatedRound] = []

    def observe(simulation: Simulation, backend: WorkBackend) -> None:
        rounds[:] = simulation.rounds

    members, engine = single_run.load_devices(job, folder)[0], FrozenEngine(TorchEngine(UNLIMITED_BYTES))
    for _ in iterate_states(unchecked, folder, members, engine=engine, observe=observe):
        pass
    joules = [round.energy_j for round in rounds if round.energy_j is not None]
    if len(joules) < len(rounds):
        raise ModelError("energy of the schedule is unknown: choose [fleet] boards whose profiles have a power")
    return {"planned_s": sum(round.duration_s for round in rounds), "planned_j": sum(joules)}


class FrozenEngine:
    """Engine that trains without any step and evaluates the first example only."""

    def __init__(self, engine: Trainer) -> None:
        self.name, self._engine = engine.name, engine

    def train(self, network: Mapping[str, Any], start: Tensors, *_: Any, **__: Any) -> tuple[Tensors, dict[str, float]]:
        return dict(start), {"loss": 0.0, "steps": 0.0}

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        return self._engine.evaluate(network, model, Examples(examples.x[:1], examples.y[:1]), hooks=hooks)


def measure_peak_bytes(folder: Path, job: JobSettings, budget: str) -> int | None:
    """Return the peak memory of a task process in one round of training or a whole search.

    The device is alone in its job and has the first share of the examples. Return None if it declines because the
    budget is too small. Raise ModelError if a task fails.
    """
    single_job = msgspec.structs.replace(
        job,
        cohort=msgspec.structs.replace(job.cohort, size=0, attempts=1),
        check=EvaluationSettings(),
        fleet=msgspec.structs.replace(job.fleet, budgets=(budget,)),
    )
    member, engine = single_run.load_devices(job, folder)[0][0], methods.load(job.method).engines[0]
    peaks: list[int] = []
    with ScratchFolder() as scratch:
        examples_path = scratch / "own.npz"
        np.savez(examples_path, x_train=member.train.x, y_train=member.train.y)
        data = {"path": str(examples_path)}
        with (
            TaskProcess(job.method, engine, parse_size(budget), data, Path, scratch) as process,
            Simulation(single_job, folder, {member.device: 0}, scratch / "home", engine=engine) as simulation,
        ):

            def run_requests(requests: Sequence[WorkRequest]) -> list[WorkResult]:
                results = [process.run_request(request) for request in requests]
                for result in results:
                    if result.code != "ok":
                        raise ModelError(f"task of {job.method} failed with budget {budget}: {result.reason}")
                    if result.peak_bytes is None:
                        raise ModelError("this kernel does not report the peak memory of a process")
                    peaks.append(result.peak_bytes)
                return results

            for each in run_rounds(simulation, run_requests):
                if "epochs" in job.params and each.rounds:
                    break
    return max(peaks, default=None)


def restore_batchnorm(job: Mapping[str, Any], examples: Examples) -> Tensors:
    """Return a donor's weights. Folded batch normalisation is restored with statistics of `examples`."""
    import torch

    from fedquilt.models.networks import registry

    model = registry.load_network({"name": job["model"]["name"]}, job["model"]["weights"])
    if is_folded(model):
        images = inputs.prepare_images(examples.x, msgspec.convert(job["input"], inputs.ImageInput))
        set_statistics_from_inputs(model, torch.from_numpy(images))
    return {name: value.numpy() for name, value in model.state_dict().items()}


def is_folded(model: nn.Module) -> bool:
    """Return whether all batch-norm layers of a model have mean 0 and variance 1."""
    layers = [layer for layer in model.modules() if _is_batch_norm(layer)]
    return bool(layers) and all(
        not layer.running_mean.any() and bool((layer.running_var == 1).all()) for layer in layers
    )


def set_statistics_from_inputs(model: nn.Module, x: torch.Tensor) -> None:
    """Set all batch-norm statistics to those of the inputs `x`, in place, with unchanged outputs.

    Weight and bias of the layers change so that they cancel the statistics. A network with folded batch normalisation
    has mean 0 and variance 1, and would otherwise normalise in training mode.
    """
    import torch

    layers = [layer for layer in model.modules() if _is_batch_norm(layer)]
    handles = [layer.register_forward_pre_hook(_adopt_statistics_keeping_output) for layer in layers]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for handle in handles:
            handle.remove()


def _is_batch_norm(layer: Any) -> bool:
    from torch import nn

    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None and layer.affine


def _adopt_statistics_keeping_output(layer: Any, inputs: tuple[Any, ...]) -> None:
    # w (z - m) / sqrt(v + eps) + b must stay the same function of the input z when m and v become those of z, so that
    # weight w and bias b change too
    z = inputs[0]
    axes = [axis for axis in range(z.ndim) if axis != 1]
    mean, variance = z.mean(dim=axes), z.var(dim=axes, unbiased=False)
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    layer.bias.copy_(layer.bias + scale * (mean - layer.running_mean))
    layer.weight.copy_(scale * (variance + layer.eps).sqrt())
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
