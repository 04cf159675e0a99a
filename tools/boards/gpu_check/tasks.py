"""Tasks of a GPU check in the agent's own task process, and rates of the engines and of bare loops.

The bare loops do the same work in turn in one process, with the default settings of their libraries and batches that a
plain script would choose. The ONNX engine protects the board: its batches are smaller, its threads do not wait by
spinning, and freed memory returns to the system.
"""

from __future__ import annotations

import contextlib
import math
import select
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from fedquilt import models
from fedquilt.arrays import tensors
from fedquilt.core import Examples, Fit, ModelError, Task, Tensors, WorkEstimate
from fedquilt.costs import peak_memory
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import CHECK_S, COMMAND, ChildWorker
from fedquilt.models.networks import registry

Row: TypeAlias = dict[str, Any]
ON_CPU: Final = ("env", "CUDA_VISIBLE_DEVICES=", *COMMAND)
AMPLE_BYTES: Final = 1 << 40  # budget of tasks that should not be limited
TASK_S: Final = 120.0
EXCESS_FACTOR: Final = 1.3  # relative to the free memory of a discrete GPU
# Elsewhere a limit is exceeded, and never the board's memory.
SHARED_LIMIT_BYTES, SHARED_WORK_BYTES = 300 * 10**6, 10**9
SEED: Final = 0


class Workload(NamedTuple):
    network: Mapping[str, Any]
    pixels: int
    batches: tuple[int, int]
    examples: int  # of the compared tasks

    def draw_examples(self, count: int) -> Examples:
        draws = np.random.default_rng(SEED)
        x = draws.integers(0, 256, (count, self.pixels, self.pixels, 3), np.uint8)
        return Examples(x, draws.integers(0, 10, count))

    def initial_weights(self) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in registry.load_network(self.network).state_dict().items()}

    def measure_properties(self) -> peak_memory.TrainingProperties:
        import torch

        example = torch.zeros(2, 3, self.pixels, self.pixels)
        return peak_memory.measure_training(registry.load_network(self.network), example)[0]


RESNET: Final = {
    "name": "resnet20-cifar",
    "classes": 10,
    "input": {"channels": 3, "size": 32, "mean": [0.5], "std": [0.25]},
}
SMALL: Final = models.residual(3, 16, 10, width=16, mean=(0.5,), std=(0.25,))  # small, for processors
ON_GPU, WITHOUT_GPU = Workload(RESNET, 32, (32, 256), 128), Workload(SMALL, 16, (16, 64), 64)


class TaskBench:
    def __init__(self, folder: Path, work: Workload) -> None:
        self.workload, self._folder, self._count = work, folder, 0
        self.start = work.initial_weights()
        (folder / "model").write_bytes(tensors.encode_tensors(self.start))

    def worker(self, command: tuple[str, ...] = COMMAND) -> contextlib.closing[ChildWorker]:
        no_limit = memory_budget.MemoryLimit(self._folder)  # control groups are the agent's, not those of this check
        return contextlib.closing(ChildWorker(math.inf, command, no_limit))

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
        """Run a task in the worker. Return its result, also of a failed or late task, and its output folder."""
        data, out = self._folder / f"{examples}.npz", self._folder / f"out{self._count}"
        self._count += 1
        if not data.exists():
            drawn_examples = self.workload.draw_examples(examples)
            np.savez(data, x=drawn_examples.x, y=drawn_examples.y)
        out.mkdir()
        task = Task(
            job="check-gpu",
            round=0,
            attempt=0,
            method="fedavg",
            engine="torch",
            params={"epochs": epochs, "batch": batch, "lr": 0.01, "network": dict(self.workload.network)},
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
            data={"path": str(data), "held": 0.0 if action == "work" else 0.5},  # evaluations use held-out examples
            bundles={"model": str(self._folder / "model")},
            private_state=None,
            cache_folder=str(self._folder / "cache"),
            output_folder=str(out),
        )
        worker.start(request, time.monotonic())
        deadline_s = time.monotonic() + TASK_S
        while (now_s := time.monotonic()) < deadline_s:
            for event in worker.poll_events(now_s):
                if isinstance(event, WorkResult):
                    return event, out
            select.select(worker.fds(), [], [], CHECK_S)
        worker.kill()
        return WorkResult(code="failed", reason=f"the task had not ended after {TASK_S:g} s"), out


def measure_memory(bench: TaskBench) -> Iterator[Row]:
    """Yield memory peaks of training and inference at both batch sizes, or raise ModelError.

    Without a GPU, each task has its own process. On a GPU one process trains and then evaluates. Another process
    repeats both within the predicted memory and a margin, because cuDNN uses more memory if more is free.
    """
    properties = bench.workload.measure_properties()
    for batch in bench.workload.batches:
        budgets: dict[str, tuple[int, int]] = {}  # work -> budget and prediction in bytes, for a GPU
        with bench.worker() as worker:
            for work in ("training", "inference"):
                result = _run_measured(bench, worker, work, batch, AMPLE_BYTES)
                if result.code != "ok" or result.base_bytes is None:
                    raise ModelError(f"{work}, batch {batch}: {result.reason or 'this kernel reports no peak'}")
                predicted = result.planned_bytes
                if predicted is None:
                    predicted = peak_memory.evaluation_bytes(properties, batch) + peak_memory.FIRST_USE_BYTES["torch"]
                    predicted += peak_memory.GPU_KERNELS_BYTES if result.runs_on == "CUDA" else 0
                yield memory_row(work, batch, "ample", result, predicted)
                if result.runs_on == "CUDA":
                    budgets[work] = result.base_bytes + int(peak_memory.PREDICTION_MARGIN * predicted), predicted
                else:
                    worker.kill()  # the inference would reuse freed memory of the training
        with bench.worker() as worker:
            for work, (budget_bytes, predicted) in budgets.items():
                result = _run_measured(bench, worker, work, batch, budget_bytes)
                yield memory_row(work, batch, "plan", result, predicted)


def _run_measured(bench: TaskBench, worker: ChildWorker, work: str, batch: int, budget_bytes: int) -> WorkResult:
    if work == "inference":
        return bench.run(worker, 2 * batch, batch, action="check", budget_bytes=budget_bytes)[0]
    return bench.run(worker, batch, batch, epochs=4, budget_bytes=budget_bytes)[0]


def memory_row(work: str, batch: int, budget: str, result: WorkResult, predicted: int | None) -> Row:
    """Return a task's predicted and measured memory peak in MB, above that of the idle engine."""
    is_measured = result.peak_bytes is not None and result.base_bytes is not None
    peak_above_idle_bytes = result.peak_bytes - result.base_bytes if is_measured else None  # type: ignore[operator]
    return {
        "work": f"{work}, {batch}",
        "on": result.runs_on or ("processor" if result.code == "ok" else None),
        "budget": budget,
        "ended": result.code,
        "idle_mb": None if result.base_bytes is None else result.base_bytes / 1e6,
        "plan_mb": None if predicted is None else predicted / 1e6,
        "peak_mb": None if peak_above_idle_bytes is None else peak_above_idle_bytes / 1e6,
        "ratio": peak_above_idle_bytes / predicted if peak_above_idle_bytes is not None and predicted else None,
        **({} if result.code == "ok" else {"reason": result.reason}),
    }


def check_results(bench: TaskBench, worker: ChildWorker, free_bytes: int | None) -> Row:
    """Compare updates of two runs and of GPU and CPU, then exceed the memory and run another task.

    `free_bytes` is the free memory of a discrete GPU, or None if it shares the board's memory. Raise ModelError if a
    task of the comparison fails.
    """
    first_update, first_result = _train(bench, worker)
    second_update, second_result = _train(bench, worker)
    cpu_update: Tensors | None = None
    if first_result.runs_on == "CUDA":
        with bench.worker(ON_CPU) as cpu_worker:
            cpu_update, cpu_result = _train(bench, cpu_worker)
        if cpu_result.runs_on == "CUDA":
            raise ModelError("a task with CUDA_VISIBLE_DEVICES= ran on CUDA nevertheless")
    example_bytes = bench.workload.measure_properties().kept_bytes
    work_bytes = SHARED_WORK_BYTES if free_bytes is None else EXCESS_FACTOR * free_bytes
    idle_bytes = second_result.base_bytes or worker.resident_bytes
    budget_bytes = idle_bytes + SHARED_LIMIT_BYTES if free_bytes is None else AMPLE_BYTES
    examples = math.ceil(work_bytes / example_bytes)
    refused_result, _ = bench.run(worker, examples, examples, epochs=20, budget_bytes=budget_bytes)
    next_result, _ = bench.run(worker, bench.workload.examples, bench.workload.batches[0])
    return {
        "on": first_result.runs_on or "processor",
        "too_large": refused_result.code,
        "next_task": next_result.code,
        "steps": round(first_result.metrics["steps"]),
        "to_cpu": None if cpu_update is None else largest_difference(first_update, cpu_update, bench.start),
        "to_repetition": largest_difference(second_update, first_update, bench.start),
    }


def _train(bench: TaskBench, worker: ChildWorker) -> tuple[Tensors, WorkResult]:
    outcome, out = bench.run(worker, bench.workload.examples, bench.workload.batches[0])
    if outcome.code != "ok":
        raise ModelError(f"a FedAvg task failed ({outcome.code}): {outcome.reason}")
    return tensors.read_tensors(out / outcome.bundles["model"].sha256), outcome


def largest_difference(update: Tensors, reference: Tensors, start: Tensors) -> float:
    """Return the largest difference of floats, relative to the largest change from `start` to `reference`."""
    floats = [name for name, value in reference.items() if value.dtype.kind == "f"]
    change = max(float(np.max(np.abs(reference[name] - start[name]), initial=0.0)) for name in floats)
    difference = max(float(np.max(np.abs(update[name] - reference[name]), initial=0.0)) for name in floats)
    return difference / change if change else difference


PAIR_COUNT: Final = 5
MIN_RUN_S: Final = 1.0
MAX_REPETITIONS: Final = 500
MAX_COPIES: Final = 50
BARE_BATCH: Final = {"cpu": 64, "cuda": 256}

Work = Callable[[], object]


def measure_torch_rates(work: Workload) -> Iterator[Row]:
    """Yield the rates of the torch engine and of a bare loop: training at both batch sizes, and inference."""
    engine: Any = engines.create_engine("torch", AMPLE_BYTES)
    start, device = work.initial_weights(), "cpu" if engine.gpu is None else "cuda"
    for batch in work.batches:
        arguments = work.network, start, work.draw_examples(4 * batch)
        fit = Fit(
            epochs=count_repetitions(partial(train_bare, *arguments, Fit(batch=batch), device)), batch=batch, lr=1e-3
        )
        engine_run = partial(engine.train, *arguments, fit, np.random.default_rng(SEED))
        labels = f"training, {batch}", engine.runs_on, "steps/s"
        yield compare_rates(labels, 4 * fit.epochs, engine_run, partial(train_bare, *arguments, fit, device))
    run_examples = work.draw_examples(16 * work.batches[1])
    copies = min(count_repetitions(partial(_classify_bare, work.network, start, run_examples, device)), MAX_COPIES)
    arguments = work.network, start, work.draw_examples(copies * len(run_examples))
    bare_run = partial(_classify_bare, *arguments, device)
    yield compare_rates(
        ("inference", engine.runs_on, "images/s"), len(arguments[2]), partial(engine.evaluate, *arguments), bare_run
    )


def measure_onnx_rates(graph: Path, shape: tuple[int, ...], pairs: int = PAIR_COUNT, least_s: float = MIN_RUN_S) -> Row:
    """Return the rates of the ONNX engine and of a bare loop, for examples of this shape."""
    import onnxruntime as ort

    engine: Any = engines.create_engine("onnx", AMPLE_BYTES)
    x = np.random.default_rng(SEED).standard_normal((256, *shape), np.float32)
    engine.run(graph, x[:1])
    on_gpu = engine.runs_on not in ("", "processor")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if on_gpu else ["CPUExecutionProvider"]
    session = ort.InferenceSession(str(graph), providers=providers)
    size = BARE_BATCH["cuda" if on_gpu else "cpu"]

    def run_bare() -> None:
        for start in range(0, len(x), size):
            session.run(None, {"x": x[start : start + size]})

    times = count_repetitions(run_bare, least_s)
    labels = "ONNX inference", engine.runs_on, "images/s"
    engine_run, bare_run = (partial(_repeat, run, times) for run in (partial(engine.run, graph, x), run_bare))
    return compare_rates(labels, times * len(x), engine_run, bare_run, pairs)


def _repeat(run: Work, times: int) -> None:
    for _ in range(times):
        run()


def count_repetitions(run: Work, min_s: float = MIN_RUN_S) -> int:
    """Time the second of two runs, and return how many fill `min_s`, from 1 to MAX_REPETITIONS."""
    run()  # the first run loads libraries
    began_s = time.perf_counter()
    run()
    return min(max(math.ceil(min_s / max(time.perf_counter() - began_s, 1e-6)), 1), MAX_REPETITIONS)


def compare_rates(labels: tuple[str, str, str], items: int, engine: Work, bare: Work, pairs: int = PAIR_COUNT) -> Row:
    """Time the functions in pairs, in alternating order, and return the rates (`items` per second).

    `labels` are the names of work, processor and unit. The ratio is the median of the pairs.
    """
    rates: dict[Work, list[float]] = {engine: [], bare: []}
    engine()
    for pair in range(pairs):
        for run in (engine, bare) if pair % 2 else (bare, engine):
            began_s = time.perf_counter()
            run()
            rates[run].append(items / (time.perf_counter() - began_s))
    ratios = [engine_rate / bare_rate for engine_rate, bare_rate in zip(rates[engine], rates[bare], strict=True)]
    return {
        "work": labels[0],
        "on": labels[1] or "processor",
        "unit": labels[2],
        "engine": statistics.median(rates[engine]),
        "bare_loop": statistics.median(rates[bare]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def _load_bare(network: Mapping[str, Any], start: Tensors, examples: Examples, device: str) -> tuple[Any, Any, Any]:
    import torch

    from fedquilt.models.networks import registry

    model = registry.load_network(network)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in start.items()})
    return model.to(device), torch.from_numpy(examples.x), torch.from_numpy(examples.y)


def train_bare(network: Mapping[str, Any], start: Tensors, examples: Examples, fit: Fit, device: str) -> Tensors:
    import torch

    from fedquilt.edge_agent.engines.torch.engine import deterministic_torch

    model, x, y = _load_bare(network, start, examples, device)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=fit.lr)
    with deterministic_torch(SEED):  # the engine is deterministic, too
        for rows in [rows for _ in range(fit.epochs) for rows in torch.randperm(len(x)).split(fit.batch)]:
            optimizer.zero_grad()
            scores = model(_normalise(x[rows].to(device)))
            torch.nn.functional.cross_entropy(scores, y[rows].to(device)).backward()
            optimizer.step()
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}


def _classify_bare(network: Mapping[str, Any], start: Tensors, examples: Examples, device: str) -> float:
    import torch

    from fedquilt.edge_agent.engines.torch.engine import deterministic_torch

    model, x, y = _load_bare(network, start, examples, device)
    loss, correct_count = torch.zeros((), device=device), torch.zeros((), device=device)
    with deterministic_torch(SEED), torch.inference_mode():
        for rows in torch.arange(len(x)).split(BARE_BATCH[device]):
            scores, targets = model.eval()(_normalise(x[rows].to(device))), y[rows].to(device)
            loss += torch.nn.functional.cross_entropy(scores, targets, reduction="sum")
            correct_count += (scores.argmax(dim=1) == targets).sum()
    return float(loss) + float(correct_count)


def _normalise(pixels: Any) -> Any:
    return ((pixels.float() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2)
