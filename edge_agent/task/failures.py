"""Error of a task's work, as the code that the coordinator acts on and as a sentence."""

from __future__ import annotations

import os
import traceback
from typing import Any

from fedquilt import core
from fedquilt.core import DataError, MemoryBudgetError, ModelError, StoreError
from fedquilt.edge_agent import exhausted


def code(error: Exception) -> Any:
    """Claim code of an error, on which the coordinator acts."""
    if exhausted.is_of_memory(error) and not isinstance(error, DataError | StoreError | core.JobError):
        return "memory"  # these three are our own words, about a file
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (MemoryBudgetError, "memory"),
        (DataError, "data"),
        (ModelError, "model"),
        ((StoreError, OSError), "disk"),
        (core.JobError, "method"),
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), "failed")


def sentence(error: Exception) -> str:
    """What the device reports of an error: ours as they are, any other with the file and line that raised it."""
    if isinstance(error, core.FedquiltError):
        return str(error)
    if exhausted.is_of_memory(error):
        said = " ".join(str(error).split())[:300] or type(error).__name__
        return (
            f"an allocation failed ({said}): the next try plans with less; ask for less, or free memory on the device"
        )
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} ({_place(error)})" if said else f"{type(error).__name__} ({_place(error)})"


def _place(error: Exception) -> str:
    """File and line of an unexpected error, for the author of a method or network: "prox.py, line 24"."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if "site-packages" not in frame.filename] or list(every)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "place unknown"
