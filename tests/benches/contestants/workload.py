"""Workload of a contestant of `python -m tests.benches sim`, read with numpy and torch only.

These scripts run in environments of other simulators, without fedquilt.

A folder contains `spec.json`, examples in order of clients (`x.npy` (clients * n, 28, 28) uint8, `y.npy`), a test set,
the initial weights (`start.npz`, by torch's names) and the cohort of each round (`cohorts.npy`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")  # contestants use several cores by processes only


class ContestantWorkload:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.spec: dict[str, Any] = json.loads((self.folder / "spec.json").read_text())
        self.x, self.y = (np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
        self.cohorts = np.load(self.folder / "cohorts.npy")

    def client(self, index: int) -> tuple[Any, Any]:
        """Return a client's examples as tensors: x (n, 1, 28, 28) in 0..1, y (n,)."""
        return self._tensors(slice(index * self.spec["each"], (index + 1) * self.spec["each"]))

    def network(self, initial_weights: bool = True) -> Any:
        import torch
        from torch import nn

        if self.spec["network"]["name"] == "mlp":
            model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        else:
            model = nn.Sequential(
                nn.Conv2d(1, 16, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(32 * 7 * 7, 128),
                nn.ReLU(),
                nn.Linear(128, 10),
            )
        if initial_weights:
            start = np.load(self.folder / "start.npz")
            model.load_state_dict({name: torch.from_numpy(start[name]) for name in start.files})
        return model

    def accuracy(self, model: Any) -> float:
        import torch

        x, y = (np.load(self.folder / f"test_{name}.npy") for name in "xy")
        correct = 0
        model.eval()
        with torch.inference_mode():
            for start in range(0, len(y), 250):
                scores = model(torch.from_numpy(x[start : start + 250]).float().div(255).unsqueeze(1))
                correct += int((scores.argmax(dim=1).numpy() == y[start : start + 250]).sum())
        return correct / len(y)

    def _tensors(self, rows: slice) -> tuple[Any, Any]:
        import torch

        x = torch.from_numpy(np.array(self.x[rows])).float().div_(255).unsqueeze(1)
        return x, torch.from_numpy(np.array(self.y[rows], dtype=np.int64))


def print_result(start_s: float, rounds_s: list[float], accuracy: float, **measurements: float) -> None:
    """Print the timings and the accuracy as one line of JSON.

    `steady_cpu_s` is `processor_seconds` between the ends of the first and the last round.
    """
    print(json.dumps({"start_s": start_s, "rounds_s": rounds_s, "accuracy": accuracy, **measurements}), flush=True)


def seconds_since_start() -> float:
    return time.time() - float(os.environ["BENCH_BEGAN"])


def processor_seconds() -> float:
    """Return the processor time of this process and all its children."""
    import psutil  # the environments of other simulators may lack it

    process = psutil.Process()
    total_s = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the time of an ended process counts for its parent
            total_s += sum(child.cpu_times()[:4])
    return total_s


def read_arguments() -> tuple[ContestantWorkload, int]:
    return ContestantWorkload(sys.argv[1]), int(sys.argv[2])
