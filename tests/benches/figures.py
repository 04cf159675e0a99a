"""Comparison of measured values with limits."""

from __future__ import annotations

from typing import Any, Final

VERDICTS: Final = {True: "ok ", False: "NOT", None: "?  "}  # None if the machine was busy


def compare_at_most(value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 3), "at_most": limit, "unit": unit, "reached": value <= limit}


def compare_at_least(value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 3), "at_least": limit, "unit": unit, "reached": value >= limit}


def format_figures(result: dict[str, Any]) -> list[str]:
    """Return a line for each of "figures", the results of `compare_at_most` or `compare_at_least`."""
    return [
        f"{VERDICTS[f['reached']]} {name.replace('_', ' '):44} {f['value']:10.2f} {f['unit']}"
        f"   ({'at most' if 'at_most' in f else 'at least'} {f.get('at_most', f.get('at_least')):g})"
        for name, f in result["figures"].items()
    ]
