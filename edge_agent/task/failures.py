"""Conversion of a task's error into a claim code for the coordinator and a sentence."""

from __future__ import annotations

import os
import traceback
from typing import Any

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
from fedquilt.edge_agent.engines import out_of_memory
from fedquilt.host.disk import FULL


def claim_code_from_error(error: Exception) -> Any:
    """Return the claim code of an error, "exception" if no other code fits."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL):
        return "full"
    if not isinstance(error, DataError | StoreError | core.JobError):  # these three are our own words, about a file
        if out_of_memory.is_out_of_memory_error(error):
            return "memory"
        if out_of_memory.is_gpu_failure_text(str(error)):
            return "failed"  # the next attempt has a new process
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (MemoryBudgetError, "budget"),
        (DataError, "data"),
        (ModelError, "model"),
        ((StoreError, OSError), "disk"),
        (core.JobError, "method"),
        (DivergedError, "diverged"),
        (UpdateError, "failed"),  # bytes that are damaged
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), "exception")


def describe_error(error: Exception) -> str:
    """Return a sentence about an error, with file and line for errors outside fedquilt."""
    said = shorten_error(str(error))
    if isinstance(error, core.FedquiltError):
        return said
    if out_of_memory.is_out_of_memory_error(error):
        said = said or type(error).__name__
        return shorten_error(
            f"an allocation failed ({said}): the next try plans with less; ask for less, or free memory on the device"
        )
    return shorten_error(f"{type(error).__name__}{': ' if said else ''}{said} ({_source_location(error)})")


def _source_location(error: Exception) -> str:
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if "site-packages" not in frame.filename] or list(every)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "place unknown"
