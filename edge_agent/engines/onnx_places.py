"""Where ONNX Runtime runs a graph: with TensorRT, with CUDA or on the processor, whichever of them works first.

All of them answer in 32 bits, so that scores mean the same on every board: TensorRT is asked for neither float16 nor
int8, and NVIDIA's libraries for no TF32, whose products have ten bits. What fails to make a session is left out from
then on, and said once. The runtime's own fall-back is off: it writes to stdout and forgets the limits of memory.

TensorRT builds an engine of each graph, which takes many times longer than a run, so it is used only where the board's
owner gives its engines room on the disk. They lie in the folder of the job's files and are deleted with it, the oldest
first as soon as there are too many. None of this has run on a GPU: it follows the runtime's documentation.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fedquilt.core import ModelError, shorten_error
from fedquilt.edge_agent import exhausted
from fedquilt.edge_agent.engines.onnx_session import CPU

CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
NAMES: Final = {TENSORRT: "TensorRT", CUDA: "CUDA"}  # the first is tried first
ENGINES: Final = "tensorrt"  # folder, in that of the job's files
WORKSPACE: Final = 0.5  # share of the engine's room that TensorRT may take while it builds and runs
_TRT: Final = re.compile(r"tensorrt|\btrt", re.IGNORECASE)  # in its errors: "TensorRT EP failed", "TRTKernel_graph_0"
NO_TF32: Final = "NVIDIA_TF32_OVERRIDE"  # read by cuBLAS, cuDNN and TensorRT when they begin


class Places:
    """Providers of this process, in the order in which they are tried.

    Args:
        available: providers that this ONNX Runtime was built with.
        room_bytes: most memory that one session may take on a GPU.
    """

    def __init__(self, available: Sequence[str], room_bytes: int) -> None:
        self._working = [name for name in NAMES if name in available]
        self._had = bool(self._working)
        self._room_bytes = max(room_bytes, 0)
        self._engines: tuple[Path, int] | None = None
        self.note = ""  # what failed, for the board's owner
        if self._had:
            os.environ.setdefault(NO_TF32, "0")

    def use_tensorrt(self, cache: Path, most_bytes: int) -> None:
        """Keep TensorRT's engines in a folder of `cache`, `most_bytes` of them; with 0 bytes it is not used."""
        self._engines = (cache / ENGINES, most_bytes) if most_bytes > 0 else None
        self._drop_engines()

    @property
    def on_gpu(self) -> bool:
        """Whether sessions begin on a GPU."""
        return bool(self._chosen())

    @property
    def runs_on(self) -> str:
        """Where graphs run now, in a word; "": this ONNX Runtime knows processors alone."""
        if not self._had:
            return ""
        return NAMES[self._chosen()[0]] if self._chosen() else "processor"

    def session(self, make: Callable[[Sequence[Any]], Any]) -> Any:
        """Make a session with the first provider that works.

        Raises:
            Exception: that of `make` for the processor, whose graph it then is; and what tells of memory or of a GPU
                that is gone, which the agent answers with less work or another process.
        """
        wanted, failed = self._chosen(), []
        for place in range(len(wanted) + 1):
            try:
                made = make([*((name, self._options(name)) for name in wanted[place:]), *CPU])
                break
            except Exception as error:
                if place == len(wanted) or isinstance(error, ModelError) or _of_the_board(error):
                    raise
                failed.append((wanted[place], _error_in_brackets(error)))
        failed += [(name, "") for name in wanted[place:] if name not in made.get_providers()]
        for name, reason in failed:
            self._leave(name, reason)
        self._drop_engines()
        return made

    def tensorrt_failed(self, error: Exception) -> bool:
        """Whether TensorRT has failed in a run, by its error; it is left out then."""
        if TENSORRT not in self._chosen() or _of_the_board(error) or not _TRT.search(str(error)):
            return False
        self._leave(TENSORRT, _error_in_brackets(error))
        return True

    def _chosen(self) -> list[str]:
        return [name for name in self._working if name != TENSORRT or self._engines is not None]

    def _leave(self, name: str, reason: str) -> None:
        self._working.remove(name)
        said = f"ONNX Runtime has {NAMES[name]} and cannot use it here{reason}: graphs run on {self._then()}"
        self.note = f"{self.note}; {said}" if self.note else said

    def _then(self) -> str:
        return NAMES[self._chosen()[0]] if self._chosen() else "the processor"

    def _options(self, name: str) -> dict[str, str]:
        """Options of a provider; each session's memory there is within the room of all.

        cuDNN's algorithms are chosen by rule: timing each would take more memory, and longer than a graph's few runs.
        """
        if name == CUDA:
            return {
                "gpu_mem_limit": str(self._room_bytes),
                "arena_extend_strategy": "kSameAsRequested",
                "cudnn_conv_algo_search": "HEURISTIC",
                "cudnn_conv_use_max_workspace": "0",
            }
        assert self._engines is not None, "TensorRT is chosen only with a folder"
        return {
            "trt_max_workspace_size": str(int(WORKSPACE * self._room_bytes)),
            "trt_fp16_enable": "0",
            "trt_int8_enable": "0",
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(self._engines[0]),
        }

    def _drop_engines(self) -> None:
        """Delete the oldest engines until the others are within their bytes."""
        if self._engines is None:
            return
        folder, most_bytes = self._engines
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(((file.stat(), file) for file in folder.iterdir()), key=lambda each: each[0].st_mtime_ns)
        held = sum(each.st_size for each, _ in found)
        for each, file in found:
            if held <= most_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
            held -= each.st_size


def _of_the_board(error: Exception) -> bool:
    """Whether memory ran out or a GPU is gone: no provider's own failure."""
    return exhausted.is_of_memory(error) or exhausted.tells_of_gpu(str(error))


def _error_in_brackets(error: Exception) -> str:
    """Return an error's text in brackets, or its type if it has none."""
    return f" ({shorten_error(str(error)) or type(error).__name__})"
