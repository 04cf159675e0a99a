"""Errors of libraries that ran out of memory, or whose GPU is gone: known by their types, numbers and texts."""

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


def tells_of_memory(text: str) -> bool:
    """Whether an error's text, or the last words of a process, mean that memory ran out."""
    text = text.lower()
    return any(sign in text for sign in OUT_OF_MEMORY)


def tells_of_gpu(text: str) -> bool:
    """Whether an error's text means that the GPU failed, after which its process can use it no more."""
    text = text.lower()
    return any(sign in text for sign in GPU_FAILED)


def is_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: by its type or number, else by its text."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return tells_of_memory(str(error))
