"""ONNX Runtime sessions for checked graphs, on CUDA where it works, else on the processor.

Both compute in 32 bits, so that scores are comparable between devices: NVIDIA's libraries do not use TF32, which keeps
ten bits of each factor. If CUDA cannot create a session, it is disabled for the rest of the process, which is reported
once. The runtime's own fall-back is off, because it writes to stdout and ignores memory limits. None of this has run on
a GPU: the code follows the documentation of ONNX Runtime.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from fedquilt.core import ModelError, shorten_error
from fedquilt.edge_agent.engines import failures
from fedquilt.onnx import graph_check
from fedquilt.onnx.graph_check import CheckedGraph

CPU: Final = ("CPUExecutionProvider",)
MAX_CHECKED_GRAPHS: Final = 4096  # number of unchanged graphs whose check is not repeated

_checked: OrderedDict[tuple[Path, int, int, int], CheckedGraph] = OrderedDict()


def check_graph(graph: Path) -> CheckedGraph:
    """Return the checked contents of a graph. Raise ModelError if missing, malformed or not permitted."""
    try:
        file_stat = graph.stat()
    except OSError:
        raise ModelError(f"graph {graph} is missing: send the model again") from None
    key = (graph, file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns)
    if key not in _checked:
        _checked[key] = _name_graph_in_error(graph.name[:12], lambda: graph_check.check_file(graph))
        while len(_checked) > MAX_CHECKED_GRAPHS:
            _checked.popitem(last=False)
    return _checked[key]


def create_session(graph: Path | bytes, options: Any = None, providers: Sequence[Any] = CPU) -> Any:
    """Return an `onnxruntime.InferenceSession` for a file, or for bytes with all weights inside."""
    if isinstance(graph, bytes):
        _name_graph_in_error("in memory", lambda: graph_check.check_bytes(graph))
        return ort.InferenceSession(graph, options, providers=list(providers), enable_fallback=0)
    check_graph(graph)
    return ort.InferenceSession(str(graph), options, providers=list(providers), enable_fallback=0)


def _name_graph_in_error(name: str, check: Callable[[], CheckedGraph]) -> CheckedGraph:
    try:
        return check()
    except ModelError as error:
        raise ModelError(f"graph {name} cannot be run: {error}") from None


CUDA: Final = "CUDAExecutionProvider"
NO_TF32: Final = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS and cuDNN when they are loaded


class ExecutionProviders:
    def __init__(self, available: Sequence[str], room_bytes: int) -> None:
        self._has_cuda = self.uses_gpu = CUDA in available
        self.note = ""  # message for the device's owner if CUDA does not work
        # cuDNN's algorithms are chosen by rule: timing each costs memory, and more time than a graph's few runs.
        self._cuda_options = {
            "gpu_mem_limit": str(max(room_bytes, 0)),
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": "HEURISTIC",
            "cudnn_conv_use_max_workspace": "0",
        }
        if self._has_cuda:
            os.environ.setdefault(NO_TF32, "0")

    @property
    def provider_name(self) -> str:
        """Where graphs run: "CUDA", "processor" if CUDA does not work, or "" if CUDA is not installed."""
        if not self._has_cuda:
            return ""
        return "CUDA" if self.uses_gpu else "processor"

    def create_session(self, create: Callable[[Sequence[Any]], Any]) -> Any:
        """Create a session on CUDA. If CUDA does not work, disable it and create the session on the processor."""
        if not self.uses_gpu:
            return create(CPU)
        try:
            session, reason = create([(CUDA, self._cuda_options), *CPU]), ""
        except Exception as error:
            if isinstance(error, ModelError) or _is_device_failure(error):
                raise
            session, reason = create(CPU), f" ({shorten_error(str(error)) or type(error).__name__})"
        if reason or CUDA not in session.get_providers():
            self.uses_gpu = False
            self.note = f"ONNX Runtime cannot use CUDA on this device{reason}: graphs run on the processor"
        return session


def _is_device_failure(error: Exception) -> bool:
    return failures.is_out_of_memory_error(error) or failures.is_gpu_failure_text(str(error))
