"""Measured values beside the limits that they should keep."""

from __future__ import annotations

from typing import Any


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
