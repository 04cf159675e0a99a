"""ONNX graphs, run with ONNX Runtime within a memory budget. Imports onnxruntime.

Each graph is checked before a session is created (`execution_providers`). Graphs and their weights are stored under
their sha256 (`fedquilt.models.stitching.onnx.blocks`), and the runtime maps the weights instead of copying them.
Depending on the room, a session is:

- roomy: all graph optimizations and pre-packed weights. While loading, the session needs about three times the weights,
  and up to twice the activations. Such sessions mostly run faster.
- tight: operations are fused, nothing is pre-packed, weights stay in the page cache, and each value is allocated
  separately, because one block for all values has gaps (up to 1.3 times the activations).

Examples run in micro-batches that fit beside weights, examples and outputs. Recently used sessions are kept in half of
the budget. The runtime's arena is off: it would keep the activations of each session and measured no faster.

All sizes follow from the budget and constants, never from the present size of the process. The size of micro-batches
decides the last bits of a result, which must be the same in every run.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from fedquilt.core import ClassPrior, DataError, EvaluationSums, MemoryBudgetError, ModelError, shorten_error
from fedquilt.costs import peak_memory
from fedquilt.edge_agent.engines import evaluation_sums, execution_providers
from fedquilt.edge_agent.engines.execution_providers import ExecutionProviders
from fedquilt.host import process_resources
from fedquilt.onnx.graph_check import CheckedGraph, Shape

BASE_BYTES = peak_memory.task_process_bytes("onnx", 0)  # resident size without weights and activations
LOADING_FACTOR = 3.5  # memory of an optimized session while loading, over its weights: 3.3 measured
LOADED_FACTOR = 2.0  # the same after loading: 1.8 measured
OPTIMIZED_ACTIVATION_FACTOR = 2  # memory of activations in an optimized session, which changes their layout
LARGEST_BATCH = 16  # larger batches are slower: activations fall out of the cache
COMMON_BATCH = 4  # kept sessions are dropped to allow at least this batch
SESSION_SHARE = 0.5  # fraction of the memory for idle sessions, and for loading an optimized session
MAPPED_SHARE = 128  # allocations above this fraction of the budget return to the system when freed
MAX_MAPPED_BYTES = 32 << 20  # glibc's largest threshold
MAX_MAPPED_PIECES, TRIM_BYTES = 1 << 16, 128 << 10  # glibc's defaults: mapped allocations, and free end of the heap
TRIMMED_BELOW_BYTES = 512 << 20  # with more room, freed pieces are kept: returning them costs page faults
AMPLE_BYTES = 2 << 30  # with more room, large ones too: a MobileNet's blocks at 224 pixels then run twice as fast
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # glibc's malloc.h
ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"  # run option that returns free memory of a GPU's arena
ERRORS_ONLY = 3  # severity from which the runtime writes to stderr
FLOAT = "tensor(float)"
TYPES = {  # ONNX Runtime's names of types -> numpy's
    FLOAT: "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
FATAL_ONLY = 4  # severity for sessions, because onnxruntime 1.23 also writes the errors that it raises


class MemoryPlan(NamedTuple):
    is_roomy: bool
    session_bytes: int  # memory of the session between runs
    example_bytes: int | None  # memory of one example's activations, or None if the graph does not declare shapes
    takes_single_examples: bool  # whether the graph takes one example at a time


class LoadedGraph(NamedTuple):
    session: Any
    plan: MemoryPlan
    output_shapes: dict[tuple[int, ...], tuple[int, ...]]  # shape of an example -> measured shape of its output


class OnnxEngine:
    """Runner of ONNX graphs, as in `fedquilt.core.Runner`.

    The constructor decides for the whole process which freed allocations return to the system.
    """

    name = "onnx"

    def __init__(
        self, budget_bytes: int, *, base_bytes: int = BASE_BYTES, threads: int = 0, micro_batch: int | None = None
    ) -> None:
        self._budget_bytes, self._room_bytes = budget_bytes, budget_bytes - base_bytes
        self._threads, self._micro_batch = threads, micro_batch
        self._graphs: OrderedDict[Path, LoadedGraph] = OrderedDict()
        _configure_malloc(budget_bytes, keep=self._room_bytes >= AMPLE_BYTES)
        ort.set_default_logger_severity(ERRORS_ONLY)
        self._providers = ExecutionProviders(ort.get_available_providers(), self._room_bytes)

    @property
    def note(self) -> str:
        """Message for the device's owner, or "". Its reader resets it to ""."""
        return self._providers.note

    @note.setter
    def note(self, text: str) -> None:
        self._providers.note = text

    @property
    def runs_on(self) -> str:
        return self._providers.provider_name

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        loaded = self._load_graph(graph)
        plan = loaded.plan
        with _translate_errors(graph):
            shape = _output_shape(loaded, x)
        size = self._batch_size(plan, 0, 0)
        io_bytes = 0
        if len(x) > size:  # examples and outputs need memory in addition to the micro-batch
            io_bytes = x.nbytes + 4 * len(x) * math.prod(shape)
            size = self._batch_size(plan, io_bytes, 0)
        self.make_room(io_bytes + min(size, len(x)) * (plan.example_bytes or 0), graph)
        y = np.empty((len(x), *shape), np.float32)
        with _translate_errors(graph):
            for start in range(0, len(x), size):
                self._run_batch(graph, _cast_examples(loaded.session, x[start : start + size]), y[start : start + size])
        return y

    def evaluate_scores(
        self, batches: Iterable[tuple[np.ndarray, np.ndarray]], prior: ClassPrior | None = None
    ) -> EvaluationSums:
        return evaluation_sums.evaluate_scores("classes", batches, prior).sums()

    def run_together(self, graph: Path, x: np.ndarray) -> np.ndarray | None:
        """Return the output of one batch with all examples, or None if the graph accepts one example only."""
        shape = execution_providers.check_graph(graph).inputs[0].shape
        session = self._load_graph(graph).session
        if shape and shape[0] == 1:
            return None
        try:
            with _translate_errors(graph):
                output = session.run(None, {session.get_inputs()[0].name: _cast_examples(session, x)})[0]
        except (ModelError, MemoryBudgetError):
            return None
        return np.asarray(output, np.float32)

    @property
    def available_bytes(self) -> int:
        return self._room_bytes

    def batch(self, graph: Path, caller_bytes: int = 0, caller_bytes_per_example: int = 0) -> int:
        """Return how many examples fit in one batch, and close sessions to make room for the batch.

        `caller_bytes` and `caller_bytes_per_example` are the caller's own memory at the same time.
        """
        plan = self._load_graph(graph).plan
        size = self._batch_size(plan, caller_bytes, caller_bytes_per_example)
        self.make_room(
            caller_bytes + size * ((plan.example_bytes or 0) + caller_bytes_per_example), graph, caller_bytes
        )
        return size

    def _batch_size(self, plan: MemoryPlan, around_bytes: int, example_bytes: int) -> int:
        if self._micro_batch is not None:
            return self._micro_batch
        if plan.example_bytes is None or plan.takes_single_examples:
            return 1
        example_size = max(plan.example_bytes + example_bytes, 1)
        free = self._room_bytes - around_bytes
        size_beside_all = int(free - max(plan.session_bytes, SESSION_SHARE * self._room_bytes)) // example_size
        size_alone = min(int(free - plan.session_bytes) // example_size, COMMON_BATCH)
        return int(np.clip(max(size_beside_all, size_alone), 1, LARGEST_BATCH))

    def make_room(self, size_bytes: int, needed_graph: Path | None = None, in_use: int = 0) -> None:
        """Close sessions, the longest unused first, until `size_bytes` more bytes fit. Keep `needed_graph`.

        `in_use` is the part of `size_bytes` that is already allocated. Freed memory returns to the system if the budget
        is small or would be exceeded otherwise.
        """
        session_bytes = sum(loaded.plan.session_bytes for loaded in self._graphs.values())
        for unused_graph in [path for path in self._graphs if path != needed_graph]:
            if session_bytes + size_bytes <= self._room_bytes:
                break
            session_bytes -= self._graphs.pop(unused_graph).plan.session_bytes
        if self._room_bytes < TRIMMED_BELOW_BYTES or (
            session_bytes + size_bytes > SESSION_SHARE * self._room_bytes
            and not self._fits_beside_all(size_bytes - in_use)
        ):
            with contextlib.suppress(AttributeError):  # glibc by itself returns only the end of the heap
                ctypes.CDLL(None).malloc_trim(0)

    def _fits_beside_all(self, size: int) -> bool:
        resident = process_resources.resident_bytes(os.getpid())
        return resident is not None and resident + size <= self._budget_bytes

    def read_metadata(self, graph: Path) -> Mapping[str, str]:
        return execution_providers.check_graph(graph).metadata

    def input_shape(self, graph: Path) -> Shape:
        return execution_providers.check_graph(graph).input_shape

    def output_count(self, graph: Path) -> int | None:
        """Return the declared number of outputs of an example, or None if undeclared or of more than one axis."""
        shape = execution_providers.check_graph(graph).outputs[0].shape
        return shape[1] if shape is not None and len(shape) == 2 else None

    def input_type(self, graph: Path) -> np.dtype[Any]:
        return _input_type(self._load_graph(graph).session)

    def memory_plan(self, graph: Path) -> MemoryPlan:
        return self._plan_memory(graph, execution_providers.check_graph(graph))

    def loaded_graphs(self) -> tuple[Path, ...]:
        """Return the loaded graphs, the least recently used first."""
        return tuple(self._graphs)

    def close(self) -> None:
        self._graphs.clear()

    def _load_graph(self, graph: Path) -> LoadedGraph:
        if graph in self._graphs:
            self._graphs.move_to_end(graph)
            return self._graphs[graph]
        plan = self._plan_memory(graph, execution_providers.check_graph(graph))
        session_bytes = plan.session_bytes + sum(
            loaded_graph.plan.session_bytes for loaded_graph in self._graphs.values()
        )
        while self._graphs and session_bytes > SESSION_SHARE * self._room_bytes:
            session_bytes -= self._graphs.popitem(last=False)[1].plan.session_bytes
        with _translate_errors(graph):
            session = self._create_session(graph, roomy=plan.is_roomy)
        self._graphs[graph] = loaded = LoadedGraph(session, plan, {})
        return loaded

    def _plan_memory(self, graph: Path, checked: CheckedGraph) -> MemoryPlan:
        weights, activation_bytes = checked.weight_bytes, checked.activation_bytes
        if "weight_bytes" not in checked.metadata:  # not exported by fedquilt
            weights = max(weights, graph.stat().st_size)
        required_bytes = peak_memory.inference_bytes(weights, activation_bytes or 0, 1)
        if required_bytes > self._room_bytes:
            raise MemoryBudgetError(
                f"graph {graph.name[:12]} needs {required_bytes / 1e6:.0f} MB for its weights and one example, the "
                f"budget has {max(self._room_bytes, 0) / 1e6:.0f} MB left: raise budget, or leave out that block"
            )
        free = (1 - SESSION_SHARE) * self._room_bytes
        is_roomy = (
            LOADING_FACTOR * weights + peak_memory.SESSION_BYTES <= SESSION_SHARE * self._room_bytes
            and OPTIMIZED_ACTIVATION_FACTOR * COMMON_BATCH * (activation_bytes or 0) <= free / 2
        )
        session_bytes = int(LOADED_FACTOR * weights if is_roomy else weights) + peak_memory.SESSION_BYTES
        shape = checked.inputs[0].shape
        takes_single_examples = bool(shape and shape[0] == 1)
        return MemoryPlan(
            is_roomy,
            session_bytes,
            activation_bytes
            if activation_bytes is None
            else activation_bytes * (OPTIMIZED_ACTIVATION_FACTOR if is_roomy else 1),
            takes_single_examples,
        )

    def _create_session(self, graph: Path, *, roomy: bool) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = FATAL_ONLY
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # a spinning thread blocks a core that other work of the device needs
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if roomy else level.ORT_ENABLE_EXTENDED
        if not roomy:
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.enable_mem_pattern = False
        return self._providers.create_session(partial(execution_providers.create_session, graph, options))

    def _run_batch(self, graph: Path, x: np.ndarray, y: np.ndarray) -> None:
        # The output is written into `y`, because `run` would hold two copies.
        loaded = self._load_graph(graph)
        session = loaded.session
        bound = session.io_binding()
        bound.bind_cpu_input(session.get_inputs()[0].name, x)
        output = session.get_outputs()[0]
        if output.type == FLOAT:
            bound.bind_output(output.name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
        else:
            bound.bind_output(output.name, "cpu")
        options = None
        if self._providers.uses_gpu and not loaded.plan.is_roomy:
            options = ort.RunOptions()
            options.add_run_config_entry(ARENA_SHRINKAGE, "gpu:0")
        session.run_with_iobinding(bound, options)
        if output.type != FLOAT:
            (y[...],) = bound.copy_outputs_to_cpu()


def _output_shape(loaded: LoadedGraph, x: np.ndarray) -> tuple[int, ...]:
    """Return the output shape of one example, measured on the first if the graph does not declare it."""
    session = loaded.session
    declared_shape = session.get_outputs()[0].shape[1:]
    if declared_shape and all(isinstance(size, int) for size in declared_shape):
        return tuple(declared_shape)
    if x.shape[1:] not in loaded.output_shapes:
        measured_shape = np.shape(session.run(None, {session.get_inputs()[0].name: _cast_examples(session, x[:1])})[0])
        if measured_shape[:1] != (1,):
            raise ModelError(
                f"the network's output for one example has shape {measured_shape}: export the network with the "
                "examples as first axis of the output"
            )
        loaded.output_shapes[x.shape[1:]] = measured_shape[1:]
    return loaded.output_shapes[x.shape[1:]]


def _input_type(session: Any) -> np.dtype[Any]:
    return np.dtype(TYPES[session.get_inputs()[0].type])


def _cast_examples(session: Any, x: np.ndarray) -> np.ndarray:
    """Return the examples in the graph's input type. Raise DataError if an integer type loses values."""
    input_type = _input_type(session)
    with np.errstate(invalid="ignore", over="ignore"):  # lossy conversions are detected below
        cast = np.ascontiguousarray(x, input_type)
    if input_type.kind not in "f" and not np.array_equal(cast, x):
        raise DataError(
            f"the network takes {input_type}, and values of this device's examples are not integers in that range"
        )
    return cast


def _configure_malloc(budget_bytes: int, *, keep: bool) -> None:
    # By default glibc keeps freed pieces of up to 32 MB, with 1.7 times the peaks.
    with contextlib.suppress(AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, min(budget_bytes // MAPPED_SHARE, MAX_MAPPED_BYTES))
        library.mallopt(M_ARENA_MAX, 1)
        library.mallopt(M_MMAP_MAX, 0 if keep else MAX_MAPPED_PIECES)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keep else TRIM_BYTES)


@contextlib.contextmanager
def _translate_errors(graph: Path) -> Iterator[None]:
    try:
        yield
    except (DataError, ModelError, MemoryBudgetError):
        raise
    except MemoryError:
        raise MemoryBudgetError(f"graph {graph.name[:12]} ran out of memory") from None
    except Exception as error:
        reason = shorten_error(str(error)) or type(error).__name__
        if "bad_alloc" in reason or "Failed to allocate" in reason:
            raise MemoryBudgetError(f"graph {graph.name[:12]} ran out of memory: {reason}") from None
        raise ModelError(f"graph {graph.name[:12]} cannot be run: {reason}") from None
