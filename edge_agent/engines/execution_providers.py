"""ONNX Runtime sessions for checked graphs, and choice of the execution provider.

The provider is TensorRT, CUDA or the CPU, whichever works first.

All providers compute in 32 bits, so that scores are comparable between devices: TensorRT uses neither float16 nor int8,
and NVIDIA's libraries do not use TF32, which keeps ten bits of each factor. A provider that cannot create a session is
disabled for the rest of the process and reported once. The runtime's own fall-back is off, because it writes to stdout
and ignores memory limits.

TensorRT builds an engine for each graph, which takes many times longer than a run. TensorRT is therefore used only if
the settings give its engines disk space. Engines are stored with the job's files and deleted with them, oldest first if
space is short. None of this has run on a GPU: the code follows the documentation of ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import os
import re
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
TENSORRT: Final = "TensorrtExecutionProvider"
NAMES: Final = {TENSORRT: "TensorRT", CUDA: "CUDA"}  # tried in this order
ENGINES: Final = "tensorrt"  # name of the folder within the job's files
WORKSPACE_SHARE: Final = 0.5  # fraction of the engine's memory that TensorRT may use to build and run
_TRT: Final = re.compile(r"tensorrt|\btrt", re.IGNORECASE)  # in error texts: "TensorRT EP failed", "TRTKernel_graph_0"
NO_TF32: Final = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS, cuDNN and TensorRT when they are loaded


class ExecutionProviders:
    def __init__(self, available: Sequence[str], room_bytes: int) -> None:
        self._usable = [name for name in NAMES if name in available]
        self._has_gpu_provider = bool(self._usable)
        self._room_bytes = max(room_bytes, 0)
        self._engines: tuple[Path, int] | None = None
        self.note = ""  # message for the device's owner about disabled providers
        if self._has_gpu_provider:
            os.environ.setdefault(NO_TF32, "0")

    def use_tensorrt(self, cache: Path, max_bytes: int) -> None:
        """Enable TensorRT with at most this many bytes of engines in `cache`, or disable it with 0."""
        self._engines = (cache / ENGINES, max_bytes) if max_bytes > 0 else None
        self._delete_oldest_engines()

    @property
    def uses_gpu(self) -> bool:
        return bool(self._enabled_providers())

    @property
    def provider_name(self) -> str:
        """First provider to try, "processor" if all GPU providers are disabled, or "" if none is installed."""
        if not self._has_gpu_provider:
            return ""
        return NAMES[self._enabled_providers()[0]] if self._enabled_providers() else "processor"

    def create_session(self, create: Callable[[Sequence[Any]], Any]) -> Any:
        """Create a session with the first provider that works. Providers that fail are disabled."""
        providers, failed = self._enabled_providers(), []
        for index in range(len(providers) + 1):
            try:
                session = create([*((name, self._provider_options(name)) for name in providers[index:]), *CPU])
                break
            except Exception as error:
                if index == len(providers) or isinstance(error, ModelError) or _is_device_failure(error):
                    raise
                failed.append((providers[index], _error_in_brackets(error)))
        failed += [(name, "") for name in providers[index:] if name not in session.get_providers()]
        for name, reason in failed:
            self._disable_provider(name, reason)
        self._delete_oldest_engines()
        return session

    def disable_tensorrt_after(self, error: Exception) -> bool:
        """Disable TensorRT if the error of a run comes from it. Return whether it was disabled."""
        if TENSORRT not in self._enabled_providers() or _is_device_failure(error) or not _TRT.search(str(error)):
            return False
        self._disable_provider(TENSORRT, _error_in_brackets(error))
        return True

    def _enabled_providers(self) -> list[str]:
        return [name for name in self._usable if name != TENSORRT or self._engines is not None]

    def _disable_provider(self, name: str, reason: str) -> None:
        self._usable.remove(name)
        fallback = NAMES[self._enabled_providers()[0]] if self._enabled_providers() else "the processor"
        text = f"ONNX Runtime cannot use {NAMES[name]} on this device{reason}: graphs run on {fallback}"
        self.note = f"{self.note}; {text}" if self.note else text

    def _provider_options(self, name: str) -> dict[str, str]:
        # cuDNN's algorithms are chosen by rule: timing each costs memory, and more time than a graph's few runs.
        if name == CUDA:
            return {
                "gpu_mem_limit": str(self._room_bytes),
                "arena_extend_strategy": "kSameAsRequested",
                "cudnn_conv_algo_search": "HEURISTIC",
                "cudnn_conv_use_max_workspace": "0",
            }
        assert self._engines is not None, "TensorRT is chosen only with a folder"
        return {
            "trt_max_workspace_size": str(int(WORKSPACE_SHARE * self._room_bytes)),
            "trt_fp16_enable": "0",
            "trt_int8_enable": "0",
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(self._engines[0]),
        }

    def _delete_oldest_engines(self) -> None:
        if self._engines is None:
            return
        folder, max_bytes = self._engines
        folder.mkdir(parents=True, exist_ok=True)
        engines = sorted(((file.stat(), file) for file in folder.iterdir()), key=lambda entry: entry[0].st_mtime_ns)
        total_bytes = sum(file_stat.st_size for file_stat, _ in engines)
        for file_stat, file in engines:
            if total_bytes <= max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
            total_bytes -= file_stat.st_size


def _is_device_failure(error: Exception) -> bool:
    return failures.is_out_of_memory_error(error) or failures.is_gpu_failure_text(str(error))


def _error_in_brackets(error: Exception) -> str:
    return f" ({shorten_error(str(error)) or type(error).__name__})"
