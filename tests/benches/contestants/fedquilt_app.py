"""Fedquilt's simulated fleet on a workload: `python fedquilt_app.py FOLDER WORKERS [ENGINE]`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from workload import print_result, processor_seconds

from fedquilt.coordinator import settings
from fedquilt.core import Examples, evaluation
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.run import WorkBackend, simulate
from fedquilt.tools.simulation.simulated_job import Simulation


def read_members(folder: Path, spec: dict[str, Any]) -> Iterator[DeviceData]:
    files = {folder / f"{name}.npy": np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"}
    array_locations = {path: (file.offset, file.dtype, file.shape[1:]) for path, file in files.items()}
    del files  # read, not mapped: mapped pages would count as memory of this process
    examples_per_client = spec["each"]

    def read_rows(path: Path, first_row: int) -> np.ndarray:
        offset, dtype, shape = array_locations[path]
        row = math.prod(shape)
        values = np.fromfile(path, dtype, examples_per_client * row, offset=offset + first_row * row * dtype.itemsize)
        return values.reshape(examples_per_client, *shape)

    for index in range(spec["clients"]):
        x, y = (read_rows(path, index * examples_per_client) for path in array_locations)
        yield DeviceData(spec["name"].format(index), Examples(x, y), Examples(x[:0], y[:0]))


def main() -> None:
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((folder / "spec.json").read_text())
    test = Examples(np.load(folder / "test_x.npy"), np.load(folder / "test_y.npy"))
    job = settings.parse_job({**spec["job"], **({"engine": sys.argv[3]} if sys.argv[3:] else {})})
    import_s = time.time() - float(os.environ["BENCH_BEGAN"])
    accuracy_metrics: dict[str, float] = {}
    rounds_cpu_s: list[float] = []

    def observe(simulation: Simulation, backend: WorkBackend) -> None:
        if len(simulation.rounds) in (1, job.rounds):
            rounds_cpu_s.append(processor_seconds())
        if simulation.is_finished:
            accuracy_metrics.update(
                evaluation.compute_metrics(sums) if (sums := backend.evaluate_test_set(simulation)) else {}
            )

    outcome = simulate(
        job,
        folder / "bundle",
        read_members(folder, spec),
        workers=workers,
        engine="pool",
        batched=True,
        test=test,
        observe=observe,
    )
    print_result(
        import_s + outcome.start_s,
        [round.wall_s for round in outcome.rounds],
        accuracy_metrics["accuracy"],
        steady_cpu_s=rounds_cpu_s[-1] - rounds_cpu_s[0],
    )


if __name__ == "__main__":
    main()
