"""Detection of out-of-memory and GPU failures in errors of libraries, by type, number and text."""

from __future__ import annotations

import errno
from typing import Final

OUT_OF_MEMORY: Final = (
    "out of memory",  # torch.OutOfMemoryError ("CUDA out of memory"), CUDA itself, dlopen
    "defaultcpuallocator: can't allocate memory",  # torch
    "defaultcpuallocator: not enough memory",
    "nvml_success == r internal assert failed",  # torch on Tegra, which has no NVML to ask: pytorch issue 185240
    "nvmapmemalloc",  # Tegra's driver: "NvMapMemAllocInternalTagged: 1075072515 error 12"
    "nvmapmemhandlealloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "failed to allocate memory",  # ONNX Runtime's arena: "... for requested buffer of size"
    "is smaller than requested bytes of",  # likewise, with a limit
    "std::bad_alloc",
    "bad allocation",
    "cannot allocate memory",  # ENOMEM
)
"""Messages of libraries that get no memory, in small letters."""

GPU_FAILED: Final = ("cuda error", "cuda failure", "cudnn error", "cudnn_status", "cublas_status", "cuda driver error")
"""Messages of libraries whose GPU does not answer or has refused a kernel, in small letters."""


def is_out_of_memory_text(text: str) -> bool:
    text = text.lower()
    return any(sign in text for sign in OUT_OF_MEMORY)


def is_gpu_failure_text(text: str) -> bool:
    """Return whether an error text means a GPU failure. The process can no longer use the GPU."""
    text = text.lower()
    return any(sign in text for sign in GPU_FAILED)


def is_out_of_memory_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return is_out_of_memory_text(str(error))
