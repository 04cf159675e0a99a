"""Code of fedsdg.toml: gates of FedSDG, single-device runs, and the picture of the gates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.arrays import tensors
from fedquilt.coordinator.settings import JobSettings
from fedquilt.formats import job_bundle
from fedquilt.tools.experiments import single_run
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.lab.papers.cells import ExecutionOptions, run_with_options
from fedquilt.tools.report import plots
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend


def observe_run(folder: Path, how: ExecutionOptions, simulation: Simulation, hands: WorkBackend) -> dict[str, Any]:
    """Return after the last round the sizes, the uploads in % of the shared part, and the gates."""
    if not simulation.is_finished:
        return {}
    tasks = sum(len(each.devices) for each in simulation.rounds)
    shared = tensors.total_bytes([simulation.state.model])
    found: dict[str, Any] = {
        "shared_bytes": shared,
        "model_bytes": tensors.total_bytes([job_bundle.load_bundle(folder).load("model")]),
        "sent": 100 * sum(each.up_bytes for each in simulation.rounds) / (tasks * shared),
    }
    gates = {
        device: [value for key, value in sorted(metrics.items()) if key.startswith("gate.")]
        for device, metrics in simulation.rounds[-1].devices_metrics.items()
    }
    if known := [value for values in gates.values() for value in values]:
        found |= {"gates": gates, "least_gate": min(known), "most_gate": max(known)}
    return found


def run_each_device(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    """Run a job for each device alone. The accuracy is over the held-out examples of all devices."""
    members = how.select_devices(single_run.load_devices(job, folder)[0])
    runs = [
        run_with_options(job, folder, how, pick=lambda every, i=i: how.select_devices(every)[i : i + 1])
        for i in range(len(members))
    ]
    right = sum((run.marks[-1].held or 0.0) * len(member.held) for run, member in zip(runs, members, strict=True))
    accuracy = right / sum(len(member.held) for member in members)
    return SeedRun(
        method=job.method,
        seed=job.seed,
        params=job.params,
        devices=len(runs),
        tested=0,
        marks=(),
        figures={"held": accuracy, "up_bytes": 0},
    )


def picture(result: Mapping[str, Any]) -> str:
    runs = [run for rows in result["columns"].values() for run in rows["fedsdg"]["runs"]]
    gates = [values for run in runs for values in run["figures"]["gates"].values()]
    rows = [plots.DotRow(f"block {index}", values) for index, values in enumerate(zip(*gates, strict=True))]
    return plots.render_file(plots.plot_dots(rows, "How far each device's gates are open", "m"))
