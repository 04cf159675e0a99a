"""Classification of task errors: codes for the coordinator, and messages."""

from __future__ import annotations

import errno
import os
import traceback
from typing import Any, Final

from fedquilt import core
from fedquilt.core import (
    DataError,
    DiskFullError,
    DivergedError,
    MemoryBudgetError,
    ModelError,
    StoreError,
    UpdateError,
    shorten_error,
)
from fedquilt.host.disk import FULL_DISK_ERRORS

OUT_OF_MEMORY: Final = (
    "out of memory",  # torch.OutOfMemoryError ("CUDA out of memory"), CUDA itself, dlopen
    "defaultcpuallocator: can't allocate memory",  # torch
    "defaultcpuallocator: not enough memory",
    "nvml_success == r internal assert failed",  # torch on Tegra, which has no NVML: pytorch issue 185240
    "nvmapmemalloc",  # Tegra's driver: "NvMapMemAllocInternalTagged: 1075072515 error 12"
    "nvmapmemhandlealloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "failed to allocate memory",  # ONNX Runtime's arena: "... for requested buffer of size"
    "is smaller than requested bytes of",  # ONNX Runtime's arena with a limit
    "std::bad_alloc",
    "bad allocation",
    "cannot allocate memory",  # ENOMEM
)
"""Lower-case texts of libraries whose allocation failed."""

GPU_FAILED: Final = ("cuda error", "cuda failure", "cudnn error", "cudnn_status", "cublas_status", "cuda driver error")
"""Lower-case texts of libraries whose GPU does not respond or has rejected a kernel."""


def is_out_of_memory_text(text: str) -> bool:
    text = text.lower()
    return any(sign in text for sign in OUT_OF_MEMORY)


def is_gpu_failure_text(text: str) -> bool:
    """Return whether an error text reports a GPU failure. Only a new process can use the GPU afterwards."""
    text = text.lower()
    return any(sign in text for sign in GPU_FAILED)


def is_out_of_memory_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return is_out_of_memory_text(str(error))


def claim_code_from_error(error: Exception) -> Any:
    """Return the `fedquilt.wire.RefusalCode` that a device claims for an error, by default "exception"."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS):
        return "full"
    if not isinstance(error, DataError | StoreError | core.JobError):  # fedquilt's own errors about a file
        if is_out_of_memory_error(error):
            return "memory"
        if is_gpu_failure_text(str(error)):
            return "failed"  # the next attempt has a new process
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (MemoryBudgetError, "budget"),
        (DataError, "data"),
        (ModelError, "model"),
        ((StoreError, OSError), "disk"),
        (core.JobError, "method"),
        (DivergedError, "diverged"),
        (UpdateError, "failed"),  # damaged bytes
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), "exception")


def describe_error(error: Exception) -> str:
    """Return a sentence about an error, with file and line for errors outside fedquilt."""
    text = shorten_error(str(error))
    if isinstance(error, core.FedquiltError):
        return text
    if is_out_of_memory_error(error):
        text = text or type(error).__name__
        return shorten_error(
            f"memory allocation failed ({text}): reduce the batch, or free memory on the device (the next attempt "
            "plans with less)"
        )
    return shorten_error(f"{type(error).__name__}{': ' if text else ''}{text} ({_source_location(error)})")


def _source_location(error: Exception) -> str:
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if "site-packages" not in frame.filename] or list(every)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "unknown location"
