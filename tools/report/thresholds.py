"""Measured values compared with limits."""

from __future__ import annotations

from typing import Any


def compare_at_most(value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 3), "at_most": limit, "unit": unit, "reached": value <= limit}


def compare_at_least(value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 3), "at_least": limit, "unit": unit, "reached": value >= limit}


def format_figures(result: dict[str, Any]) -> list[str]:
    return [
        f"{'ok ' if f['reached'] else 'NOT'} {name.replace('_', ' '):44} {f['value']:10.2f} {f['unit']}"
        f"   ({'at most' if 'at_most' in f else 'at least'} {f.get('at_most', f.get('at_least')):g})"
        for name, f in result["figures"].items()
    ]
