"""`fedquilt bench WHAT`: measurements anybody can repeat. Each is compared with something of the same run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import msgspec

from fedquilt import progress

SIZES = {"stitch": (64,), "memory": (224,)}  # pixels, of the benches on images


def main(what: str, format: str, sizes: Sequence[int] = (), given: Mapping[str, Any] = {}) -> int:
    """Run one bench and print it; 0 when it reached its figures, 1 when not.

    One on images is run for each size, and its JSON is a list. `given` is what else its `measure` takes.
    """
    bench = importlib.import_module(f"fedquilt.tools.bench.{what}")
    sizes = sizes or SIZES.get(what, ())
    results: list[dict[str, Any]] = []
    turns = [{"size": size} for size in sizes] or [{}]
    for each in turns:
        shown = nullcontext() if "show" in signature(bench.measure).parameters else progress.during(f"bench {what}")
        with shown:
            results.append(bench.measure(**each, **given))
        progress.LINE.end()
        if format == "text":
            print("\n".join(bench.lines(results[-1])), flush=True)
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(results if sizes else results[0])).decode())
    reached = [figure["reached"] for result in results for figure in result["figures"].values()]
    return 0 if all(reached) else 1
