"""fedquilt's simulated fleet on a workload: `python ours.py FOLDER WORKERS [ENGINE]`; without ENGINE the job's."""

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

from fedquilt.coordinator import settings
from fedquilt.core import Examples
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.run import simulate
from fedquilt.tools.simulation.simulated_job import Simulation


def members(folder: Path, spec: dict[str, Any]) -> Iterator[Member]:
    """The clients, each read when it is asked for: nothing is held."""
    files = {folder / f"{name}.npy": np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"}
    places = {path: (file.offset, file.dtype, file.shape[1:]) for path, file in files.items()}
    del files  # read, not mapped: pages that are mapped would count as this process's own
    each = spec["each"]

    def rows(path: Path, first: int) -> np.ndarray:
        offset, dtype, shape = places[path]
        row = math.prod(shape)
        found = np.fromfile(path, dtype, each * row, offset=offset + first * row * dtype.itemsize)
        return found.reshape(each, *shape)

    for index in range(spec["clients"]):
        x, y = (rows(path, index * each) for path in places)
        yield Member(spec["name"].format(index), Examples(x, y), Examples(x[:0], y[:0]))


def main() -> None:
    """Run fedquilt's simulation on the command line's folder with its number of workers."""
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((folder / "spec.json").read_text())
    test = Examples(np.load(folder / "test_x.npy"), np.load(folder / "test_y.npy"))
    job = settings.parse({**spec["job"], **({"engine": sys.argv[3]} if sys.argv[3:] else {})})
    began_s, before_s = time.perf_counter(), time.time() - float(os.environ["BENCH_BEGAN"])
    told: dict[str, float] = {}

    def observe(simulation: Simulation, hands: Hands) -> None:
        if simulation.finished:
            told.update(hands.test(simulation) or {})

    outcome = simulate(
        job,
        folder / "bundle",
        members(folder, spec),
        workers=workers,
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
            }
        )
    )


if __name__ == "__main__":
    main()
