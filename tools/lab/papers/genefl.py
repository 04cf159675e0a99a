"""Code of genefl.toml: new devices in a running job, and computed upload sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.arrays import tensors
from fedquilt.coordinator.settings import JobSettings
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.lab.papers.cells import ExecutionOptions, run_with_options
from fedquilt.tools.lab.papers.grid import Grid
from fedquilt.tools.report.thresholds import compare_at_most
from fedquilt.tools.simulation.scratch_folders import ScratchFolder
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend


def observe_run(folder: Path, how: ExecutionOptions, simulation: Simulation, hands: WorkBackend) -> dict[str, Any]:
    """Bring new devices online for the last two rounds, and return accuracies and sizes."""
    if not how.row.away:
        return {}
    new, left = list(simulation.members)[-how.row.away :], simulation.job.rounds - len(simulation.rounds)
    if left == 2:
        simulation.fleet.bring_online(new)
    if left == 1:  # newcomers train from this state
        state = simulation.state
        genes = [state.genes[state.assigned[name]] for name in new]
        begun = [tensors.total_bytes([state.first[layer] for layer in gene]) for gene in genes]
        return {"begun_bytes": statistics.fmean(begun), "genes": {str(k): list(g) for k, g in enumerate(state.genes)}}
    if not simulation.is_finished:
        return {}
    before, last = simulation.rounds[:-2], simulation.rounds[-1]
    return {
        "mean": _mean_accuracy(before[-1].devices_metrics.values()),
        "up_bytes": sum(each.up_bytes for each in before),
        "newcomers": _mean_accuracy(last.devices_metrics[name] for name in new),
    }


def _mean_accuracy(told: Iterable[Mapping[str, float]]) -> float:
    return statistics.fmean(each["held_correct"] / each["held_examples"] for each in told)


def train_from_scratch(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    """Train new devices from the weights in the bundle, each alone."""
    run = run_with_options(job, folder, how)
    return msgspec.structs.replace(run, marks=(), figures={"newcomers": run.marks[-1].mean})


def train_from_fedavg(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    """Run FedAvg on the known devices, then train new devices from its result, each alone."""
    last: list[dict[str, Any]] = []

    def store_model(simulation: Simulation, hands: WorkBackend) -> dict[str, Any]:
        last[:] = [simulation.state.model]
        return {}

    known = msgspec.structs.replace(how, row=msgspec.structs.replace(how.row, members=(0, how.row.members[0])))
    run_with_options(msgspec.structs.replace(job, method="fedavg"), folder, known, look=store_model)
    with ScratchFolder() as place:
        file = place / "weights.safetensors"
        file.write_bytes(tensors.encode_tensors(last[0]))
        prepare.prepare_bundle({"model": {**job.model, "weights": str(file)}}, place / "bundle")
        run = train_from_scratch(msgspec.structs.replace(job, rounds=1), place / "bundle", how)
    return msgspec.structs.replace(run, figures={**run.figures, "begun_bytes": tensors.total_bytes(last)})


def compute_sizes(
    table: str, grid: Grid, seeds: Sequence[int], rounds: int | None, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the result of "genefl-bytes", computed from torchvision's ResNet18 without any run."""
    from fedquilt.models.networks import register_trace, registry  # torch

    model, wider = (registry.build({"name": "torchvision/resnet18", "classes": classes}) for classes in (10, 100))
    held = {name: value.detach().numpy() for name, value in model.named_parameters()}
    assert len(register_trace.trace_register(model, (3, 32, 32)).parameters_by_layer()) == 21
    uploads = 100 * 10  # rounds, devices in each
    last = [held[f"layer4.{i}.conv{j}.weight"] for i in (0, 1) for j in (1, 2)]
    some = [held[f"{name}.weight"] for name in ("layer4.1.conv1", "layer4.1.conv2", "layer2.0.conv1")]
    ours = (
        uploads * sum(value.nbytes for value in held.values()) / 2**30,
        uploads * sum(value.detach().numpy().nbytes for value in wider.parameters()) / 2**30,
        sum(value.nbytes for value in last) / 2**20,
        sum(value.nbytes for value in some) / 2**20,
    )
    rows, figures = {}, {}
    for (name, row), value in zip(grid.rows.items(), ours, strict=True):
        rows[name] = {"rounds": 0, "values": {"size": [value]}, "paper": row.paper, "runs": []}
        figures[f"{name}, off by"] = compare_at_most(round(abs(value - row.paper["size"][0]), 3), 0.01, name[-3:])
    return {"table": table, "seeds": [], "columns": {"": rows}, "figures": figures, "told": {}}
