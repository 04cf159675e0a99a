"""Benchmarks against baselines of the same run (`fedquilt bench WHAT`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import msgspec

from fedquilt.console import progress

SIZES = {"stitch": (64,), "memory": (224,)}  # pixels, of the benches on images


def main(what: str, format: str, sizes: Sequence[int] = (), given: Mapping[str, Any] = {}) -> int:
    """Run one benchmark and print its result. Return 0, or 1 if a figure missed its limit.

    Args:
        what: Name of the benchmark's module.
        format: "text" or "json".
        sizes: Image sizes in pixels. With sizes the JSON is a list.
        given: Further arguments of the benchmark's `measure`.
    """
    bench = importlib.import_module(f"fedquilt.tools.lab.bench.{what}")
    sizes = sizes or SIZES.get(what, ())
    results: list[dict[str, Any]] = []
    turns = [{"size": size} for size in sizes] or [{}]
    for each in turns:
        shown = (
            nullcontext() if "show" in signature(bench.measure).parameters else progress.show_progress(f"bench {what}")
        )
        with shown:
            results.append(bench.measure(**each, **given))
        progress.LINE.end_operation()
        if format == "text":
            print("\n".join(bench.lines(results[-1])), flush=True)
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(results if sizes else results[0])).decode())
    reached = [figure["reached"] for result in results for figure in result["figures"].values()]
    return 0 if all(reached) else 1
