"""Benchmarks against baselines of the same run (`fedquilt lab bench WHAT`)."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

import msgspec

from fedquilt.console import progress
from fedquilt.tools.report.thresholds import MOST_OTHERS, LoadMeter

BUSY: Final = 12  # exit code of a benchmark whose machine was busy


def run_and_print(what: str, format: str, given: Mapping[str, Any]) -> int:
    """Run one benchmark, and print each measurement and the result.

    Return 0, 1 if a figure missed its limit, or BUSY if other processes disturbed a benchmark of times.
    """
    bench = importlib.import_module(f"fedquilt.tools.lab.bench.{what}")
    options = signature(bench.measure).parameters
    load, others = LoadMeter(), 0.0

    def report(row: str) -> None:
        nonlocal others
        others = max(others, share := load.measure_share())
        show = progress.LINE.print_to_stdout if format == "text" else progress.LINE.print_lines
        show(f"{row} (other processes: {share:.0%} of the processors)")

    with contextlib.nullcontext() if "show" in options else progress.show_progress(f"bench {what}"):
        result = bench.measure(**given, **({"report": report} if "report" in options else {}))
    progress.LINE.end_operation()
    if "report" in options:
        result["others_share"] = round(others, 3)
    if busy := others > MOST_OTHERS:
        for figure in result["figures"].values():
            figure["reached"] = None
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        print("\n".join(bench.lines(result)))
    if busy:
        why = f"other processes used up to {others:.0%} of the processors during a measurement"
        progress.LINE.print_lines(f"not measured: {why}. Repeat the benchmark while they are stopped.")
        return BUSY
    return 0 if all(figure["reached"] for figure in result["figures"].values()) else 1
