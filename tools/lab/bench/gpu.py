"""Benchmark of training on this machine's GPU: rate compared with a plain loop, and memory.

Each network is trained by the agent's own task process with method fedavg, in a short and a long task. The difference
gives the rate without the fixed cost of a task. The baseline trains the same number of mini-batches in this process
with plain torch. Memory is the peak of another short task in a fresh process, resident and on the GPU together, above
that of the process with its engine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import JobError
from fedquilt.tools.lab.bench import footprint
from fedquilt.tools.report.thresholds import compare_at_least, compare_at_most, format_figures

NETWORKS: Final = ("cnn", "resnet20", "mobilenet_v2")
BATCH: Final = 32
SHORT, LONG, TURNS = 4, 24, 3  # epochs of a task, and how often both are run
RATE, LOWEST, HIGHEST = 0.95, 0.9, 1.3


def measure(networks: Sequence[str] = NETWORKS, *, device: str = "cuda", turns: int = TURNS) -> dict[str, Any]:
    """Measure the training rates of task and bare loop, and predicted and measured peaks in MB.

    Args:
        networks: Names in `footprint.NETWORKS`.
        device: Torch device of the bare loop. The task's engine uses the GPU if torch finds one.
        turns: Number of timings, of which the median counts.

    Raises:
        JobError: If torch finds no GPU.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise JobError("bench gpu wants a GPU, and torch finds none here: run it on a board with torch for its CUDA")
    rows, figures = [], {}
    for name in networks:
        with tempfile.TemporaryDirectory() as folder:
            subject = footprint.build_subject(name, Path(folder))
            times = [(_measure_task_s(subject), _measure_bare_s(subject, device)) for _ in range(turns)]
            peak, base = footprint.train(subject, BATCH, footprint.PLENTY_BYTES)
        images = (LONG - SHORT) * footprint.COUNT
        ours, bare = (images / statistics.median(column) for column in zip(*times, strict=True))
        foreseen, seen = subject.training_bytes(BATCH), peak - base
        rows.append(
            {"network": name, "ours": ours, "bare": bare, "predicted_mb": foreseen / 1e6, "true_mb": seen / 1e6}
        )
        figures[f"{name}_over_the_bare_loop"] = compare_at_least(ours / bare, RATE, "times")
        figures[f"{name}_predicted_over_true"] = compare_at_least(foreseen / seen, LOWEST, "times")
        figures[f"{name}_predicted_over_true_memory"] = compare_at_most(foreseen / seen, HIGHEST, "times")
    where = torch.cuda.get_device_name(0) if device == "cuda" else device
    return {"bench": "gpu", "device": where, "batch": BATCH, "rows": rows, "figures": figures}


def lines(result: dict[str, Any]) -> list[str]:
    told = [f"{result['device']}, mini-batches of {result['batch']}: images a second, and MB above the bare process"]
    told.append(f"{'':16}{'ours':>10}{'bare loop':>12}{'predicted':>12}{'true':>10}")
    for row in result["rows"]:
        told.append(
            f"{row['network']:16}{row['ours']:10.0f}{row['bare']:12.0f}{row['predicted_mb']:12.1f}{row['true_mb']:10.1f}"
        )
    return [*told, *format_figures(result)]


def _measure_task_s(subject: footprint.MemorySubject) -> float:
    with footprint.task_process(subject, footprint.COUNT, footprint.PLENTY_BYTES) as process:
        took = [
            process.run_task(footprint.training(subject, BATCH, epochs), number)[0].wall_s
            for number, epochs in enumerate((SHORT, SHORT, LONG))  # the first one warms up
        ]
    return took[2] - took[1]


def _measure_bare_s(subject: footprint.MemorySubject, device: str) -> float:
    import torch
    from torch import nn

    from fedquilt.models.networks import registry

    with np.load(subject.folder / "images.npz") as stored:
        x, y = stored["x_train"][: footprint.COUNT], stored["y_train"][: footprint.COUNT]
    model = registry.build(subject.table).to(device).train()
    moves = torch.optim.SGD(model.parameters(), lr=1e-4)
    draws = np.random.default_rng(0)

    def epochs(count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            order = draws.permutation(len(x))
            for first in range(0, len(x), BATCH):
                rows = order[first : first + BATCH]
                images = torch.from_numpy(x[rows]).to(device).permute(0, 3, 1, 2).float() / 255
                moves.zero_grad()
                nn.functional.cross_entropy(model(images), torch.from_numpy(y[rows]).to(device)).backward()
                moves.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    epochs(SHORT)
    return epochs(LONG) - epochs(SHORT)
