"""`fedquilt bench WHAT`: measurements anybody can repeat. Each is compared with something of the same run."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

WHAT = ("idle", "blobs")


def main(what: str, format: str) -> int:
    """Run one bench and print it; 0 when it reached its figures, 1 when not."""
    bench = importlib.import_module(f"fedquilt.tools.bench.{what}")
    result: dict[str, Any] = bench.measure()
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        print("\n".join(bench.lines(result)))
    return 0 if all(figure["reached"] for figure in result["figures"].values()) else 1


def figure(value: float, limit: float, unit: str) -> dict[str, Any]:
    """A measured value that should not exceed a limit."""
    return {"value": round(value, 3), "at_most": limit, "unit": unit, "reached": value <= limit}


def at_least(value: float, limit: float, unit: str) -> dict[str, Any]:
    """A measured value that should reach a limit."""
    return {"value": round(value, 3), "at_least": limit, "unit": unit, "reached": value >= limit}


def figure_lines(result: dict[str, Any]) -> list[str]:
    """The figures of a result, one a line."""
    return [
        f"{'ok ' if f['reached'] else 'NOT'} {name.replace('_', ' '):44} {f['value']:10.2f} {f['unit']}"
        f"   ({'at most' if 'at_most' in f else 'at least'} {f.get('at_most', f.get('at_least')):g})"
        for name, f in result["figures"].items()
    ]
