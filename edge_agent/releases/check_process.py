"""Main program of a model check, which measures accuracy, latency and memory within the budget.

    python -m fedquilt.edge_agent.releases.check_process PARENT

The process reads `CheckRequest`s as JSON lines from stdin, like a task's process. The process may be killed at any
moment. Its output is in the request's folder `out` and counts once the agent has copied it from there.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    MemoryBudgetError,
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
from fedquilt.edge_agent.task import main as task
from fedquilt.edge_agent.task import main as task_process
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.process import serve_requests
from fedquilt.edge_agent.task.protocol import (
    DONE,
    TENSORRT,
    TENSORRT_S,
    TIMED,
    CheckRequest,
    Event,
    ProgressReport,
    SplitModelFiles,
    WorkResult,
)
from fedquilt.formats import personal_models
from fedquilt.host.disk import disk_errors
from fedquilt.onnx import weights
from fedquilt.onnx.graph_check import Shape, check_file, format_shape

AT_ONCE: Final = 64  # examples prepared at once: limits the memory of their float32 copies
WARM: Final = 3  # answers before the ones that are timed
TIMED_LEAST, TIMED_MOST = 5, 100_000  # answers that are timed
TIMED_EXAMPLES: Final = 8  # different ones, as a network with branches takes longer for some
SIDES: Final = (224, 32, 28, 64, 96, 128, 160, 192, 256, 299, 320, 384, 416, 448, 480, 512, 640, 48, 16, 8, 4, 1)
"""Sizes that are tried for all axes without a declared one, the usual sides of images first."""
CHANNELS: Final = (3, 1)
VECTOR_MOST: Final = 4096  # largest size that is tried for the only axis of an example
GUESS_MOST: Final = 1 << 22  # most numbers of a guessed example
MIXED: Final = 0.05  # change of a score within a batch, as a share of the range of the scores, that is still rounding
TENSORRT_BATCH: Final = 16  # most examples at once that an engine is built for
TIED: Final = (  # becomes a program that ends with this process
    "import os, sys; from fedquilt.edge_agent.task.process import exit_with_parent; "
    "exit_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)

Say = Callable[[Event], None]


class LoadedModel(NamedTuple):
    engine: Any
    path: Path
    about: ExportedModel
    shape: Shape  # of one example

    def compute_scores(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs (n, outputs) for stored examples (n, ...)."""
        made = self.about.prepare_inputs(x)
        exported_model.require_shape(made, self.shape)
        return self.run_prepared(made)

    def run_prepared(self, made: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.engine.run(self.path, made)
        if found.ndim != 2:
            raise ModelError(
                f"it answers with an array of shape {found.shape[1:]} to each example, not with scores of classes: "
                "roll out a network whose output has the axes (examples, classes)"
            )
        exported_model.require_scores(found)
        return found


def run_check(order: CheckRequest, say: Say = lambda event: None, load: Any = examples.load_share) -> WorkResult:
    began_s, told = time.perf_counter(), dict[str, float]()
    try:
        engine = engines.create_engine(order.engine, order.budget_bytes)
        notes = []
        if order.parted is not None and (note := assemble_network(order.parted, Path(order.model), order.budget_bytes)):
            notes.append(note)
        memory_budget.reset_peak(os.getpid())
        bare = memory_budget.resident_bytes(os.getpid())
        model = _load_model(engine, Path(order.model))
        shares = _load_examples(order, model.about, load)
        held = _choose_evaluated(shares)
        if held is None:
            notes.append("accuracy was not measured: this device has no [data]")
        else:
            _require_matching_data(model, held, order)
            notes += _add_class_priors(model, shares, order)
            told |= _measure_accuracy(model, held, notes)
        chosen = _choose_examples(model, held, order.input_shape, notes)
        one = chosen[:1]
        say(ProgressReport(TIMED))
        told["latency_s"], count = _measure_latency(model, chosen, order.timed_s)
        say(ProgressReport(DONE))
        peak = memory_budget.read_peak_bytes(os.getpid())
        if bare is None or peak is None or 2 * peak - bare <= order.budget_bytes or model.engine.batch(model.path) > 1:
            _require_independent_answers(model, one, held)
        else:
            notes.append("answers of a batch were not compared: the budget has no room for a second example")
        if held is not None and order.before is not None and "accuracy" in told:
            told |= _measure_accuracy_before(engine, order, Path(order.before), load, notes)
        engine.close()
        if order.trtexec is not None:
            notes += _build_tensorrt_engine(order, model, one)
        return WorkResult(
            metrics=told,
            note=shorten_error("; ".join(notes)),
            examples=count,
            wall_s=time.perf_counter() - began_s,
            peak_bytes=peak,
        )
    except Exception as error:
        return task.failure_outcome(error)


def _load_examples(order: CheckRequest, about: ExportedModel, load: Any) -> tuple[Examples, Examples] | None:
    if not order.data:
        return None
    found: tuple[Examples, Examples] = load(reading_settings.spec_with_settings(about.reading, order.data))
    return found


def _choose_evaluated(shares: tuple[Examples, Examples] | None) -> Examples | None:
    return None if shares is None else shares[1] if len(shares[1]) else shares[0]


def _add_class_priors(model: LoadedModel, shares: tuple[Examples, Examples] | None, order: CheckRequest) -> list[str]:
    """Add class priors to an assembled model if they help on held-out examples. Return notes."""
    task = None if order.parted is None else personal_models.read_task(Path(order.parted.shared))
    if order.parted is None or task is None or task.class_shares is None or shares is None:
        return []
    train, held = shares
    choice = _evaluate_scores(model, held, ClassPrior(train.y, task.class_shares)).strengths
    if choice is None or not (strength := choice.choose_strength()):
        return [f"class priors do not help on {len(held)} held-out examples"]
    assemble_network(order.parted, model.path, order.budget_bytes, strength * choice.log_ratios)
    model.engine.close()  # it has the graph without them
    return [f"class priors of this device count {strength:g} times"]


def _load_model(engine: Any, path: Path) -> LoadedModel:
    return LoadedModel(engine, path, exported_model.read_metadata(engine.read_metadata(path)), engine.input_shape(path))


def _require_matching_data(model: LoadedModel, held: Examples, order: CheckRequest) -> None:
    spec = msgspec.convert(order.data, DataSpec)
    own, theirs = spec.labels, model.about.labels
    if own and theirs is not None and tuple(own) != theirs:
        raise ModelError(
            f"its labels are {_format_labels(theirs)}, and those of the data here are {_format_labels(own)}"
        )
    if model.about.task not in (None, spec.task):
        raise ModelError(f"it predicts {model.about.task}, and the data here are for {spec.task}")
    outputs = model.compute_scores(held.x[:1]).shape[1]
    evaluation_sums.require_targets(held, outputs, spec.task)


def _format_labels(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")


def _measure_accuracy(model: LoadedModel, held: Examples, notes: list[str]) -> dict[str, float]:
    task = model.about.task or "classes"
    if task == "regression":
        notes.append("accuracy was not measured: it predicts numbers, of which none is right or wrong")
        return {}
    found = metrics.main_metric(_evaluate_scores(model, held).sums())
    assert found is not None
    return {"accuracy": found[1], "examples": float(len(held))}


def _evaluate_scores(
    model: LoadedModel, held: Examples, prior: ClassPrior | None = None
) -> evaluation_sums.EvaluationAccumulator:
    batches = (
        (model.compute_scores(held.x[first : first + AT_ONCE]), held.y[first : first + AT_ONCE])
        for first in range(0, len(held), AT_ONCE)
    )
    return evaluation_sums.evaluate_scores(model.about.task or "classes", batches, prior)


def _measure_accuracy_before(
    engine: Any, order: CheckRequest, path: Path, load: Any, notes: list[str]
) -> dict[str, float]:
    try:
        model = _load_model(engine, path)
        held = _choose_evaluated(_load_examples(order, model.about, load))
        assert held is not None
        found = _measure_accuracy(model, held, notes)
    except (FedquiltError, OSError) as error:
        notes.append(f"accuracy of what runs now was not measured: {error}")
        return {}
    return {"accuracy_before": found["accuracy"]} if "accuracy" in found else {}


def _choose_examples(
    model: LoadedModel, held: Examples | None, shape: tuple[int, ...] | None, notes: list[str]
) -> np.ndarray:
    if held is not None:
        return model.about.prepare_inputs(held.x[:TIMED_EXAMPLES])
    failed = ""
    for guess in [shape] if shape is not None else _guess_shapes(model.shape):
        if shape is None and math.prod(guess) > GUESS_MOST:
            continue
        one = _random_example(guess, model.engine.input_type(model.path))
        if shape is not None or guess == model.shape:
            return one
        try:
            model.engine.run(model.path, one)
        except (ModelError, MemoryBudgetError) as error:
            failed = failed or f" ({guess}: {error})"
            continue
        notes.append(f"it was run on an example of the shape {guess}, a guess: its graph does not state it")
        return one
    raise ModelError(
        f"it was not run: its graph takes examples of shape {format_shape(model.shape)} and ran on none that was "
        f"guessed{failed}: roll it out with --input-shape, such as --input-shape 3,224,224"
    )


def _random_example(shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
    draws = np.random.default_rng(0)
    made = draws.random((1, *shape), np.float32) if kind.kind == "f" else draws.integers(0, 2, (1, *shape))
    return made.astype(kind)


def _guess_shapes(shape: Shape) -> Iterator[tuple[int, ...]]:
    if shape is None or None not in shape:
        yield from [] if shape is None else [tuple(size or 0 for size in shape)]
        return
    vector = range(1, VECTOR_MOST + 1) if len(shape) == 1 else ()
    for side in (*SIDES, *vector):
        tried = tuple(side if size is None else size for size in shape)
        if len(shape) == 3 and shape[0] is None:  # of an image, whose channels are the first axis or the last
            yield from ((channels, *tried[1:]) for channels in CHANNELS)
            yield from ((*tried[:2], channels) for channels in CHANNELS if shape[2] is None)
        yield tried


def _measure_latency(model: LoadedModel, chosen: np.ndarray, timed_s: float) -> tuple[float, int]:
    """Return the mean of the examples' median seconds, and the number of answers."""
    for _ in range(WARM):
        model.run_prepared(chosen[:1])
    found: list[list[float]] = [[] for _ in chosen]
    count, end_s = 0, time.perf_counter() + timed_s
    while count < max(TIMED_LEAST, len(chosen)) or (time.perf_counter() < end_s and count < TIMED_MOST):
        place = count % len(chosen)
        began_s = time.perf_counter()
        model.run_prepared(chosen[place : place + 1])
        found[place].append(time.perf_counter() - began_s)
        count += 1
    return statistics.fmean(map(statistics.median, found)), count


def _require_independent_answers(model: LoadedModel, one: np.ndarray, held: Examples | None) -> None:
    """Raise ModelError if the answer to an example changes with the other example of a batch."""
    other = np.zeros_like(one) if held is None else model.about.prepare_inputs(held.x[-1:])
    both = np.concatenate([one, np.zeros_like(one) if np.array_equal(one, other) else other])
    together = model.engine.run_together(model.path, both)
    if together is None:
        return
    alone = model.engine.run(model.path, both[:1]), model.engine.run(model.path, both[1:])
    expected = np.concatenate(alone)
    known = np.isfinite(expected)
    same = together.shape == expected.shape and np.array_equal(np.isfinite(together), known)
    if same and known.any():
        # a common offset of all scores decides nothing
        most = MIXED * np.ptp(expected[known]) + 1e-4 * np.abs(expected[known]).max()
        same = bool(np.abs(together[known] - expected[known]).max() <= most)
    if not same:
        raise ModelError(
            "its answer to one example depends on the other examples of a batch: export it in evaluation mode and "
            "without operations over the first axis, or with a first axis of 1"
        )


# -- TensorRT -------------------------------------------------------------------------------------


def _build_tensorrt_engine(order: CheckRequest, model: LoadedModel, one: np.ndarray) -> list[str]:
    assert order.trtexec is not None
    part = Path(order.out) / f"{TENSORRT}.part"
    command = [
        sys.executable,
        "-c",
        TIED,
        str(os.getpid()),
        order.trtexec,
        f"--onnx={model.path}",
        f"--saveEngine={part}",
    ]
    name, shape = model.engine.input_name(model.path), "x".join(map(str, one.shape[1:]))
    declared = check_file(model.path).inputs[0].shape
    if not declared or None in declared:  # trtexec refuses shapes for a graph that declares them all
        most = 1 if declared and declared[0] == 1 else TENSORRT_BATCH
        sizes = (("min", 1), ("opt", 1), ("max", most))
        command += [f"--{which}Shapes={name}:{size}x{shape}" for which, size in sizes]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TENSORRT_S,
        )
        if done.returncode:
            words = done.stdout.decode(errors="replace").strip().splitlines()
            said = shorten_error(words[-1]) if words else "no output"
            return [f"trtexec ended with code {done.returncode}: {said}"]
        os.replace(part, part.with_name(TENSORRT))
    except subprocess.TimeoutExpired:
        return [f"trtexec was ended after {TENSORRT_S:g} s, without an engine"]
    except OSError as error:
        return [f"trtexec built no engine: {error.strerror}"]
    finally:
        part.unlink(missing_ok=True)
    return []


# -- the process ----------------------------------------------------------------------------------


def main() -> None:
    serve_requests(CheckRequest, run_check)


if __name__ == "__main__":
    main()


NONE: Final = Examples(np.empty((0,), np.float32), np.empty((0,), np.int64))


def assemble_network(
    order: SplitModelFiles, model: Path, budget_bytes: int, class_priors: np.ndarray | None = None
) -> str:
    """Write the device's ONNX file from shared and private parts. Return a note on the network, or ""."""
    task = personal_models.read_task(Path(order.shared))
    if task is None:
        raise ModelError("what was sent does not say of which run it is: roll out the run again")
    parts = personal_models.read_personal(Path(order.shared))
    lacking = weights.missing_tensors(parts.graph.data)
    found, note = dict[str, np.ndarray](), ""
    if (priors := lacking.pop(personal_models.CLASS_PRIORS, None)) is not None:
        added = np.zeros(priors.shape) if class_priors is None else class_priors
        found[personal_models.CLASS_PRIORS] = added.astype(priors.dtype)
    if lacking:
        own, note = _compute_own_tensors(order, task, parts, model, budget_bytes)
        found |= own
    tensors.require_finite(found)
    with disk_errors(f"write {model}", "free some space"), model.open("wb") as file:
        file.writelines(weights.fill_graph(parts.graph.data, found))
    return note


def _compute_own_tensors(
    order: SplitModelFiles, task: Task, parts: personal_models.PersonalParts, model: Path, budget_bytes: int
) -> tuple[Tensors, str]:
    method = methods.load(task.method)
    if method.personal_model is None:
        raise JobError(f"method {task.method!r} does not say how a board puts its network together")
    local, lost = task_process.load_private_state(order.private, order.private_sha256, order.lost, task.job)
    task_process.require_fresh_state_allowed(method, task.method, lost)
    site = ClientContext(
        device=order.device,
        budget_bytes=budget_bytes,
        engine=None,
        rng=tensors.seeded_rng(task.seed),
        train=NONE,
        held_out=NONE,
        private_state=compression.method_state(local),
        lost_state_reason=lost,
        cache_folder=model.parent,
        load=lambda name: _require_bundle(parts, name),
        path=lambda name: Path(name),
    )
    found = method.personal_model(task, site)
    if lost:
        return found, f"{lost}: the network is that of a board which has not taken part"
    return (
        found,
        "" if site.private_state else f"nothing of {task.job} is kept here: the network is that of a newcomer to it",
    )


def _require_bundle(parts: personal_models.PersonalParts, name: str) -> Tensors:
    if name not in parts.bundles:
        raise ModelError(f"what was sent has no bundle {name!r}; it has: {', '.join(sorted(parts.bundles)) or 'none'}")
    return parts.bundles[name]
