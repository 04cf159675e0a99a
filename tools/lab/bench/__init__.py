"""Benchmarks against baselines of the same run (`fedquilt lab bench WHAT`)."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from inspect import signature
from typing import Any

import msgspec

from fedquilt.console import progress


def run_and_print(what: str, format: str, given: Mapping[str, Any]) -> int:
    """Run one benchmark and print its result. Return 0, or 1 if a figure missed its limit.

    Args:
        what: Name of the benchmark's module.
        format: "text" or "json".
        given: Arguments of the benchmark's `measure`.
    """
    bench = importlib.import_module(f"fedquilt.tools.lab.bench.{what}")
    shows_progress = "show" in signature(bench.measure).parameters
    with contextlib.nullcontext() if shows_progress else progress.show_progress(f"bench {what}"):
        result = bench.measure(**given)
    progress.LINE.end_operation()
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        print("\n".join(bench.lines(result)))
    return 0 if all(figure["reached"] for figure in result["figures"].values()) else 1
