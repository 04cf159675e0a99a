"""Fedquilt's simulated fleet on a workload: `python fedquilt_app.py FOLDER WORKERS [ENGINE [CARRIER]]`.

Without ENGINE the devices have the job's, and without CARRIER (as of `fedquilt fleet --engine`) a pool does their work.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import Examples, evaluation
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.run import simulate
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend


def read_members(folder: Path, spec: dict[str, Any]) -> Iterator[DeviceData]:
    """Yield the clients, each read from disk on demand."""
    files = {folder / f"{name}.npy": np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"}
    places = {path: (file.offset, file.dtype, file.shape[1:]) for path, file in files.items()}
    del files  # read, not mapped: pages that are mapped would count as this process's own
    each = spec["each"]

    def read_rows(path: Path, first: int) -> np.ndarray:
        offset, dtype, shape = places[path]
        row = math.prod(shape)
        found = np.fromfile(path, dtype, each * row, offset=offset + first * row * dtype.itemsize)
        return found.reshape(each, *shape)

    for index in range(spec["clients"]):
        x, y = (read_rows(path, index * each) for path in places)
        yield DeviceData(spec["name"].format(index), Examples(x, y), Examples(x[:0], y[:0]))


def main() -> None:
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((folder / "spec.json").read_text())
    test = Examples(np.load(folder / "test_x.npy"), np.load(folder / "test_y.npy"))
    job = settings.parse_job({**spec["job"], **({"engine": sys.argv[3]} if sys.argv[3:] else {})})
    carrier = sys.argv[4] if sys.argv[4:] else "pool"
    began_s, before_s = time.perf_counter(), time.time() - float(os.environ["BENCH_BEGAN"])
    told: dict[str, float] = {}
    spent_s: list[float] = []  # of this process before the first round, and after each

    def observe(simulation: Simulation, hands: WorkBackend) -> None:
        spent_s.append(time.process_time())
        if simulation.is_finished:
            told.update(evaluation.compute_metrics(found) if (found := hands.evaluate_test_set(simulation)) else {})

    outcome = simulate(
        job,
        folder / "bundle",
        read_members(folder, spec),
        workers=workers,
        engine=carrier,
        together=True,
        test=test,
        observe=observe,
    )
    print(
        json.dumps(
            {
                "start_s": before_s + outcome.start_s,
                "rounds_s": [round.wall_s for round in outcome.rounds],
                "accuracy": told["accuracy"],
                "run_s": time.perf_counter() - began_s,
                "coordinator_s": spent_s[len(outcome.rounds)]
                - spent_s[1],  # of its processor, in all rounds but the first
                "sha256": hashlib.sha256(tensors.encode_tensors(outcome.artefact.tensors)).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main()
