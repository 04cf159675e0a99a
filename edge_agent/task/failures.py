"""Error of a task's work, as the code that the coordinator acts on and as a sentence."""

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
from fedquilt.disk import FULL
from fedquilt.edge_agent import exhausted


def code_of_error(error: Exception) -> Any:
    """Return the claim code of an error. `coordinator.refusals` says which codes recur with the same task."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL):
        return "full"
    if not isinstance(error, DataError | StoreError | core.JobError):  # these three are our own words, about a file
        if exhausted.is_of_memory(error):
            return "memory"
        if exhausted.tells_of_gpu(str(error)):
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
    """Return what the device reports of an error, with file and line if it is not fedquilt's own."""
    said = shorten_error(str(error))
    if isinstance(error, core.FedquiltError):
        return said
    if exhausted.is_of_memory(error):
        said = said or type(error).__name__
        return shorten_error(
            f"an allocation failed ({said}): the next try plans with less; ask for less, or free memory on the device"
        )
    return shorten_error(f"{type(error).__name__}{': ' if said else ''}{said} ({_place(error)})")


def _place(error: Exception) -> str:
    """File and line of an unexpected error, for the author of a method or network: "prox.py, line 24"."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if "site-packages" not in frame.filename] or list(every)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "place unknown"
