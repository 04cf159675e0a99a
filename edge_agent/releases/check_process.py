"""Main program of a model check, which measures accuracy, latency and memory within the budget.

    python -m fedquilt.edge_agent.releases.check_process PARENT

The process reads `CheckRequest`s as JSON lines from stdin, like a task's process. The process may be killed at any
moment. A model that it assembles counts once the agent has copied it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from fedquilt import compression, methods, metrics
from fedquilt.arrays import tensors
from fedquilt.core import (
    ClassPrior,
    ClientContext,
    Examples,
    FedquiltError,
    JobError,
    ModelError,
    Task,
    Tensors,
    shorten_error,
)
from fedquilt.data import examples, reading_settings
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines import evaluation_sums, exported_model
from fedquilt.edge_agent.engines.exported_model import ExportedModel
from fedquilt.edge_agent.task import main as task_process
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.process import serve_requests
from fedquilt.edge_agent.task.protocol import (
    TIMING_ENDED,
    TIMING_STARTED,
    CheckRequest,
    EngineLoaded,
    ProcessEvent,
    ProgressReport,
    SplitModelFiles,
    WorkResult,
)
from fedquilt.formats import personal_models
from fedquilt.host.disk import disk_errors
from fedquilt.onnx import weights
from fedquilt.onnx.graph_check import Shape, format_shape

BATCH_EXAMPLES: Final = 64  # examples prepared at once: limits the memory of their float32 copies
WARM_UP_RUNS: Final = 3  # untimed answers at the beginning
MIN_TIMED_RUNS, MAX_TIMED_RUNS = 5, 100_000  # timed answers
TIMED_EXAMPLES: Final = 8  # distinct examples, because the latency of a network with branches varies
ROUNDING_TOLERANCE: Final = 0.05  # tolerated rounding of a score within a batch, as a fraction of the range of scores

SendEvent = Callable[[ProcessEvent], None]


class LoadedModel(NamedTuple):
    engine: Any
    path: Path
    metadata: ExportedModel
    shape: Shape  # shape of one example

    def compute_scores(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs (n, outputs) for stored examples (n, ...)."""
        inputs = self.metadata.prepare_inputs(x)
        exported_model.require_shape(inputs, self.shape)
        return self.run_prepared(inputs)

    def run_prepared(self, inputs: np.ndarray) -> np.ndarray:
        scores: np.ndarray = self.engine.run(self.path, inputs)
        if scores.ndim != 2:
            raise ModelError(
                f"model output for an example has shape {scores.shape[1:]}, not one score per class: "
                "roll out a network whose output has the axes (examples, classes)"
            )
        exported_model.require_scores(scores)
        return scores


def run_check(
    request: CheckRequest, send_event: SendEvent = lambda event: None, load: Any = examples.load_share
) -> WorkResult:
    """Check a model, and return its accuracy and latency as metrics. An exception becomes a failed result."""
    started_s, metrics = time.perf_counter(), dict[str, float]()
    try:
        engine = engines.create_engine(request.engine, request.budget_bytes)
        notes = []
        if request.split_model is not None and (
            note := assemble_network(request.split_model, Path(request.model), request.budget_bytes)
        ):
            notes.append(note)
        memory_budget.reset_peak(os.getpid())
        base_bytes = memory_budget.resident_bytes(os.getpid())
        if base_bytes is not None:
            send_event(EngineLoaded(base_bytes))
        model = _load_model(engine, Path(request.model))
        splits = _load_examples(request, model.metadata, load)
        held_out = _choose_evaluated(splits)
        if held_out is None:
            notes.append("accuracy was not measured: this device has no [data]")
        else:
            _require_matching_data(model, held_out, request)
            notes += _add_class_priors(model, splits, request)
            metrics |= _measure_accuracy(model, held_out, notes)
        timed_examples = _choose_examples(model, held_out, request.input_shape)
        first_example = timed_examples[:1]
        send_event(ProgressReport(TIMING_STARTED))
        metrics["latency_s"], count = _measure_latency(model, timed_examples, request.timing_s)
        send_event(ProgressReport(TIMING_ENDED))
        peak_bytes = memory_budget.read_peak_bytes(os.getpid())
        if (
            base_bytes is None
            or peak_bytes is None
            or 2 * peak_bytes - base_bytes <= request.budget_bytes
            or model.engine.batch(model.path) > 1
        ):
            _require_independent_answers(model, first_example, held_out)
        else:
            notes.append("outputs of a batch were not compared: the budget is too small for a second example")
        if held_out is not None and request.current_model is not None and "accuracy" in metrics:
            accuracy_before = _measure_current_model(engine, request, Path(request.current_model), load, notes)
            metrics |= {} if accuracy_before is None else {"accuracy_before": accuracy_before}
        engine.close()
        return WorkResult(
            metrics=metrics,
            note=shorten_error("; ".join(notes)),
            examples=count,
            wall_s=time.perf_counter() - started_s,
            peak_bytes=peak_bytes,
        )
    except Exception as error:
        return task_process.failure_outcome(error)


def _load_examples(request: CheckRequest, metadata: ExportedModel, load: Any) -> tuple[Examples, Examples] | None:
    if not request.data:
        return None
    splits: tuple[Examples, Examples] = load(reading_settings.spec_with_settings(metadata.reading, request.data))
    return splits


def _choose_evaluated(splits: tuple[Examples, Examples] | None) -> Examples | None:
    return None if splits is None else splits[1] if len(splits[1]) else splits[0]


def _add_class_priors(model: LoadedModel, splits: tuple[Examples, Examples] | None, request: CheckRequest) -> list[str]:
    """Add class priors to an assembled model if they help on held-out examples. Return notes."""
    task = None if request.split_model is None else personal_models.read_task(Path(request.split_model.shared))
    if request.split_model is None or task is None or task.class_shares is None or splits is None:
        return []
    train, held_out = splits
    choice = _evaluate_scores(model, held_out, ClassPrior(train.y, task.class_shares)).strengths
    if choice is None or not (strength := choice.choose_strength()):
        return [f"class priors do not help on {len(held_out)} held-out examples"]
    assemble_network(request.split_model, model.path, request.budget_bytes, strength * choice.log_ratios)
    model.engine.close()  # the loaded graph has no class priors
    return [f"class priors of this device are applied with strength {strength:g}"]


def _load_model(engine: Any, path: Path) -> LoadedModel:
    return LoadedModel(engine, path, exported_model.read_metadata(engine.read_metadata(path)), engine.input_shape(path))


def _require_matching_data(model: LoadedModel, held_out: Examples, request: CheckRequest) -> None:
    spec = msgspec.convert(request.data, DataSpec)
    device_labels, model_labels = spec.labels, model.metadata.labels
    if device_labels and model_labels is not None and tuple(device_labels) != model_labels:
        raise ModelError(
            f"model labels {_format_labels(model_labels)} differ from the labels of this device's data "
            f"{_format_labels(device_labels)}"
        )
    if model.metadata.task not in (None, spec.task):
        raise ModelError(f"model predicts {model.metadata.task}, the data of this device are for {spec.task}")
    outputs = model.compute_scores(held_out.x[:1]).shape[1]
    evaluation_sums.require_targets(held_out, outputs, spec.task)


def _format_labels(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")


def _measure_accuracy(model: LoadedModel, held_out: Examples, notes: list[str]) -> dict[str, float]:
    """Return accuracy and number of examples. For regression, return {} and add a note."""
    task = model.metadata.task or "classes"
    if task == "regression":
        notes.append("accuracy was not measured: the model predicts numbers (regression)")
        return {}
    metric = metrics.main_metric(_evaluate_scores(model, held_out).sums())
    assert metric is not None
    return {"accuracy": metric[1], "examples": float(len(held_out))}


def _evaluate_scores(
    model: LoadedModel, held_out: Examples, prior: ClassPrior | None = None
) -> evaluation_sums.EvaluationAccumulator:
    batches = (
        (model.compute_scores(held_out.x[start : start + BATCH_EXAMPLES]), held_out.y[start : start + BATCH_EXAMPLES])
        for start in range(0, len(held_out), BATCH_EXAMPLES)
    )
    return evaluation_sums.evaluate_scores(model.metadata.task or "classes", batches, prior)


def _measure_current_model(
    engine: Any, request: CheckRequest, current_model: Path, load: Any, notes: list[str]
) -> float | None:
    """Return the accuracy of the model in use, or None and add a note if it cannot be measured."""
    try:
        model = _load_model(engine, current_model)
        held_out = _choose_evaluated(_load_examples(request, model.metadata, load))
        assert held_out is not None
        accuracy = _measure_accuracy(model, held_out, notes)
    except (FedquiltError, OSError) as error:
        notes.append(f"accuracy of the model in use was not measured: {error}")
        return None
    return accuracy.get("accuracy")


def _choose_examples(model: LoadedModel, held_out: Examples | None, shape: tuple[int, ...] | None) -> np.ndarray:
    if held_out is not None:
        return model.metadata.prepare_inputs(held_out.x[:TIMED_EXAMPLES])
    if shape is None and model.shape is not None:
        sizes = tuple(size for size in model.shape if size is not None)
        shape = sizes if len(sizes) == len(model.shape) else None
    if shape is None:
        raise ModelError(
            f"model takes examples of shape {format_shape(model.shape)}, and this device has no [data]: roll it out "
            "with --input-shape, such as --input-shape 3,224,224"
        )
    return _random_example(shape, model.engine.input_type(model.path))


def _random_example(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    rng = np.random.default_rng(0)
    example = rng.random((1, *shape), np.float32) if dtype.kind == "f" else rng.integers(0, 2, (1, *shape))
    return example.astype(dtype)


def _measure_latency(model: LoadedModel, examples: np.ndarray, timing_s: float) -> tuple[float, int]:
    """Return the examples' mean latency in seconds, and the number of runs.

    The latency of an example is the median of its runs.
    """
    for _ in range(WARM_UP_RUNS):
        model.run_prepared(examples[:1])
    durations_s: list[list[float]] = [[] for _ in examples]
    count, end_s = 0, time.perf_counter() + timing_s
    while count < max(MIN_TIMED_RUNS, len(examples)) or (time.perf_counter() < end_s and count < MAX_TIMED_RUNS):
        index = count % len(examples)
        started_s = time.perf_counter()
        model.run_prepared(examples[index : index + 1])
        durations_s[index].append(time.perf_counter() - started_s)
        count += 1
    return statistics.fmean(map(statistics.median, durations_s)), count


def _require_independent_answers(model: LoadedModel, example: np.ndarray, held_out: Examples | None) -> None:
    """Raise ModelError if the output for an example depends on the other examples of its batch."""
    other_example = np.zeros_like(example) if held_out is None else model.metadata.prepare_inputs(held_out.x[-1:])
    batch = np.concatenate(
        [example, np.zeros_like(example) if np.array_equal(example, other_example) else other_example]
    )
    batch_scores = model.engine.run_together(model.path, batch)
    if batch_scores is None:
        return
    single = model.engine.run(model.path, batch[:1]), model.engine.run(model.path, batch[1:])
    expected = np.concatenate(single)
    finite = np.isfinite(expected)
    are_equal = batch_scores.shape == expected.shape and np.array_equal(np.isfinite(batch_scores), finite)
    if are_equal and finite.any():
        # a common offset of all scores does not change the prediction
        tolerance = ROUNDING_TOLERANCE * np.ptp(expected[finite]) + 1e-4 * np.abs(expected[finite]).max()
        are_equal = bool(np.abs(batch_scores[finite] - expected[finite]).max() <= tolerance)
    if not are_equal:
        raise ModelError(
            "model output for one example depends on the other examples of a batch: export the model in evaluation "
            "mode and without operations over the first axis, or with a first axis of 1"
        )


# -- the process ----------------------------------------------------------------------------------


def main() -> None:
    serve_requests(CheckRequest, run_check)


if __name__ == "__main__":
    main()


NO_EXAMPLES: Final = Examples(np.empty((0,), np.float32), np.empty((0,), np.int64))


def assemble_network(
    files: SplitModelFiles, model: Path, budget_bytes: int, class_priors: np.ndarray | None = None
) -> str:
    """Write the ONNX file `model` from shared parts and this device's private state.

    If private state is missing, the network is that of a new device. Return a note about this, or "".
    """
    task = personal_models.read_task(Path(files.shared))
    if task is None:
        raise ModelError(f"release file {files.shared} does not name its run: roll out the run again")
    parts = personal_models.read_personal(Path(files.shared))
    missing = weights.missing_tensors(parts.graph.data)
    own_tensors, note = dict[str, np.ndarray](), ""
    if (priors := missing.pop(personal_models.CLASS_PRIORS, None)) is not None:
        prior_values = np.zeros(priors.shape) if class_priors is None else class_priors
        own_tensors[personal_models.CLASS_PRIORS] = prior_values.astype(priors.dtype)
    if missing:
        computed, note = _compute_own_tensors(files, task, parts, model, budget_bytes)
        own_tensors |= computed
    tensors.require_finite(own_tensors)
    with disk_errors(f"write {model}", "free some space"), model.open("wb") as file:
        file.writelines(weights.fill_graph(parts.graph.data, own_tensors))
    return note


def _compute_own_tensors(
    files: SplitModelFiles, task: Task, parts: personal_models.PersonalParts, model: Path, budget_bytes: int
) -> tuple[Tensors, str]:
    method = methods.load(task.method)
    if method.personal_model is None:
        raise JobError(f"method {task.method!r} does not define how a device assembles its network")
    local, lost_reason = task_process.load_private_state(
        files.private_state, files.private_sha256, files.lost_reason, task.job
    )
    task_process.require_fresh_state_allowed(method, task.method, lost_reason)
    context = ClientContext(
        device=files.device,
        budget_bytes=budget_bytes,
        engine=None,
        rng=tensors.seeded_rng(task.seed),
        train=NO_EXAMPLES,
        held_out=NO_EXAMPLES,
        private_state=compression.remove_residuals(local),
        lost_state_reason=lost_reason,
        cache_folder=model.parent,
        load=lambda name: _require_bundle(parts, name),
        path=lambda name: Path(name),
    )
    own_tensors = method.personal_model(task, context)
    if lost_reason:
        return own_tensors, f"{lost_reason}: the network is that of a new device"
    if not context.private_state:
        return own_tensors, f"this device has no private state of {task.job}: the network is that of a new device"
    return own_tensors, ""


def _require_bundle(parts: personal_models.PersonalParts, name: str) -> Tensors:
    if name not in parts.bundles:
        raise ModelError(f"release has no bundle {name!r}: choose one of {', '.join(sorted(parts.bundles)) or 'none'}")
    return parts.bundles[name]
