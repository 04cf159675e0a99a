"""Tasks of a GPU check, run by the agent's own worker in its own task process."""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from fedquilt import models
from fedquilt.arrays import tensors
from fedquilt.core import Examples, ModelError, Task, Tensors, WorkEstimate
from fedquilt.costs import peak_memory
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import COMMAND, WATCH_S, ChildWorker
from fedquilt.models.networks import registry
from fedquilt.tools.boards.gpu_check.report import Row

ON_CPU: Final = ("env", "CUDA_VISIBLE_DEVICES=", *COMMAND)
AMPLE_BYTES: Final = 1 << 40  # budget of tasks that should not be limited
TASK_S: Final = 120.0
OVER: Final = 1.3  # factor on the free memory of a discrete GPU
# Elsewhere a limit is exceeded, and never the board's memory.
SHARED_LIMIT_BYTES, SHARED_WORK_BYTES = 300 * 10**6, 10**9
SEED: Final = 0


class Workload(NamedTuple):
    """Network and sizes of the tasks."""

    network: Mapping[str, Any]
    pixels: int
    batches: tuple[int, int]
    examples: int  # of the compared tasks

    def draw(self, count: int) -> Examples:
        draws = np.random.default_rng(SEED)
        x = draws.integers(0, 256, (count, self.pixels, self.pixels, 3), np.uint8)
        return Examples(x, draws.integers(0, 10, count))

    def start(self) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in registry.load_network(self.network).state_dict().items()}

    def properties(self) -> peak_memory.TrainingProperties:
        import torch

        example = torch.zeros(2, 3, self.pixels, self.pixels)
        return peak_memory.measure_training(registry.load_network(self.network), example)[0]


RESNET: Final = {
    "name": "resnet20-cifar",
    "classes": 10,
    "input": {"channels": 3, "size": 32, "mean": [0.5], "std": [0.25]},
}
SMALL: Final = models.residual(3, 16, 10, width=16, mean=(0.5,), std=(0.25,))  # as a processor is slower
ON_GPU, WITHOUT_GPU = Workload(RESNET, 32, (32, 256), 128), Workload(SMALL, 16, (16, 64), 64)


class TaskBench:
    """Requests and results of tasks in a scratch folder."""

    def __init__(self, folder: Path, work: Workload) -> None:
        self.work, self._folder, self._count = work, folder, 0
        self.start = work.start()
        (folder / "model").write_bytes(tensors.encode_tensors(self.start))

    def worker(self, command: tuple[str, ...] = COMMAND) -> contextlib.closing[ChildWorker]:
        nowhere = memory_budget.MemoryLimit(self._folder)  # control groups are the agent's, not those of this check
        return contextlib.closing(ChildWorker(math.inf, command, nowhere))

    def run(
        self,
        worker: ChildWorker,
        examples: int,
        batch: int,
        *,
        action: Literal["check", "work"] = "work",
        epochs: int = 1,
        budget_bytes: int = AMPLE_BYTES,
    ) -> tuple[WorkResult, Path]:
        """Run a FedAvg task. Return its result, and the folder of its files."""
        data, out = self._folder / f"{examples}.npz", self._folder / f"out{self._count}"
        self._count += 1
        if not data.exists():
            drawn = self.work.draw(examples)
            np.savez(data, x=drawn.x, y=drawn.y)
        out.mkdir()
        task = Task(
            job="check-gpu",
            round=0,
            attempt=0,
            method="fedavg",
            engine="torch",
            params={"epochs": epochs, "batch": batch, "lr": 0.01, "network": dict(self.work.network)},
            bundles={},
            work=WorkEstimate(),
            seed=SEED,
            deadline_s=TASK_S,
            actions=(action,),
        )
        request = WorkRequest(
            task=task,
            device="check-gpu",
            budget_bytes=budget_bytes,
            plan_bytes=AMPLE_BYTES,
            data={"path": str(data), "held": 0.0 if action == "work" else 0.5},  # an evaluation is of held-out ones
            bundles={"model": str(self._folder / "model")},
            private=None,
            cache=str(self._folder / "cache"),
            out=str(out),
        )
        worker.start(request, time.monotonic())
        end_s = time.monotonic() + TASK_S
        while (now_s := time.monotonic()) < end_s:
            for event in worker.poll_events(now_s):
                if isinstance(event, WorkResult):
                    return event, out
            select.select(worker.fds(), [], [], WATCH_S)
        worker.kill()
        return WorkResult(code="failed", reason=f"the task had not ended after {TASK_S:g} s"), out


def measure_memory(bench: TaskBench) -> Iterator[Row]:
    """Yield the peaks of training and inference at both batch sizes, each in a fresh process without a GPU.

    On a GPU one process trains and then evaluates. Another process repeats both within budgets of their predictions
    with the margin of plans, as cuDNN takes more if there is more.

    Raises:
        ModelError: If a task without a limit fails.
    """
    properties = bench.work.properties()
    for batch in bench.work.batches:
        budgets: dict[str, tuple[int, int]] = {}  # and predictions, of what ran on a GPU
        with bench.worker() as worker:
            for work in ("training", "inference"):
                found = _run_measured(bench, worker, work, batch, AMPLE_BYTES)
                if found.code != "ok" or found.base_bytes is None:
                    raise ModelError(f"{work}, batch {batch}: {found.reason or 'this kernel reports no peak'}")
                predicted = found.planned_bytes
                if predicted is None:
                    predicted = peak_memory.evaluation_bytes(properties, batch) + peak_memory.FIRST_USE_BYTES["torch"]
                    predicted += peak_memory.GPU_KERNELS_BYTES if found.runs_on == "CUDA" else 0
                yield memory_row(work, batch, "ample", found, predicted)
                if found.runs_on == "CUDA":
                    budgets[work] = found.base_bytes + int(peak_memory.MARGIN * predicted), predicted
                else:
                    worker.kill()  # freed memory of the training would serve the inference
        with bench.worker() as worker:
            for work, (budget_bytes, predicted) in budgets.items():
                found = _run_measured(bench, worker, work, batch, budget_bytes)
                yield memory_row(work, batch, "plan", found, predicted)


def _run_measured(bench: TaskBench, worker: ChildWorker, work: str, batch: int, budget_bytes: int) -> WorkResult:
    if work == "inference":
        return bench.run(worker, 2 * batch, batch, action="check", budget_bytes=budget_bytes)[0]
    return bench.run(worker, batch, batch, epochs=4, budget_bytes=budget_bytes)[0]


def memory_row(work: str, batch: int, budget: str, found: WorkResult, predicted: int | None) -> Row:
    """Return predicted and measured peak above the idle engine, on processor and GPU together."""
    known = found.peak_bytes is not None and found.base_bytes is not None
    above = found.peak_bytes - found.base_bytes if known else None  # type: ignore[operator]
    return {
        "work": f"{work}, {batch}",
        "on": found.runs_on or ("processor" if found.code == "ok" else None),
        "budget": budget,
        "ended": found.code,
        "idle_mb": None if found.base_bytes is None else found.base_bytes / 1e6,
        "plan_mb": None if predicted is None else predicted / 1e6,
        "peak_mb": None if above is None else above / 1e6,
        "ratio": above / predicted if above is not None and predicted else None,
        **({} if found.code == "ok" else {"reason": found.reason}),
    }


def check_results(bench: TaskBench, worker: ChildWorker, free_bytes: int | None) -> Row:
    """Compare updates of GPU and CPU and of two runs, then exceed the memory.

    Args:
        bench: Requests of tasks.
        worker: Worker that uses the GPU, if any.
        free_bytes: Free memory of a GPU with memory of its own, or None for other devices.

    Raises:
        ModelError: If a task fails that should not.
    """
    first, found = _train(bench, worker)
    again, latest = _train(bench, worker)
    on_cpu: Tensors | None = None
    if found.runs_on == "CUDA":
        with bench.worker(ON_CPU) as other:
            on_cpu, elsewhere = _train(bench, other)
        if elsewhere.runs_on == "CUDA":
            raise ModelError("a task without visible GPUs ran on CUDA all the same")
    each_bytes = bench.work.properties().kept_bytes
    work_bytes = SHARED_WORK_BYTES if free_bytes is None else OVER * free_bytes
    idle_bytes = latest.base_bytes or worker.resident_bytes
    budget_bytes = idle_bytes + SHARED_LIMIT_BYTES if free_bytes is None else AMPLE_BYTES
    examples = math.ceil(work_bytes / each_bytes)
    refused, _ = bench.run(worker, examples, examples, epochs=20, budget_bytes=budget_bytes)
    after, _ = bench.run(worker, bench.work.examples, bench.work.batches[0])
    return {
        "on": found.runs_on or "processor",
        "too_large": refused.code,
        "next_task": after.code,
        "steps": round(found.metrics["steps"]),
        "to_cpu": None if on_cpu is None else largest_difference(first, on_cpu, bench.start),
        "to_repetition": largest_difference(again, first, bench.start),
    }


def _train(bench: TaskBench, worker: ChildWorker) -> tuple[Tensors, WorkResult]:
    outcome, out = bench.run(worker, bench.work.examples, bench.work.batches[0])
    if outcome.code != "ok":
        raise ModelError(f"a FedAvg task failed ({outcome.code}): {outcome.reason}")
    return tensors.read_tensors(out / outcome.bundles["model"].sha256), outcome


def largest_difference(one: Tensors, other: Tensors, start: Tensors) -> float:
    """Return the largest difference, relative to the largest change from `start` to `other`."""
    floats = [name for name, value in other.items() if value.dtype.kind == "f"]
    change = max(float(np.max(np.abs(other[name] - start[name]), initial=0.0)) for name in floats)
    apart = max(float(np.max(np.abs(one[name] - other[name]), initial=0.0)) for name in floats)
    return apart / change if change else apart
