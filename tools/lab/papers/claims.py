"""Claims over seeds, each judged by a confidence interval.

Each seed gives one value, such as the difference of two runs that differ in nothing else. The interval is the 95 %
confidence interval of the values' mean (Student's t). A claim holds if the whole interval is on the claimed side, and
is not shown if the interval crosses the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt.tools.experiments.tables import confidence_interval
from fedquilt.tools.report import thresholds


def judge_claim(
    values: Sequence[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    """Judge a claim about the mean over seeds of a paired difference or a ratio.

    Args:
        values: One value per seed.
        unit: Unit of the values.
        at_least: Claimed lower limit of the mean, or None if `at_most` is claimed.
        at_most: Claimed upper limit of the mean.

    Returns:
        "value", the mean, "low" and "high", its 95 % interval or None with one seed, "verdict" ("holds", "not shown",
        "against", or "one seed: no interval"), and "reached", whether the claim holds.
    """
    limit, side = (at_most, -1) if at_least is None else (at_least, 1)
    assert limit is not None
    assert values
    mean = round(statistics.fmean(values), 3) + 0.0  # not -0.0, which is printed with its sign
    found: dict[str, Any] = {"value": mean, "low": None, "high": None, "unit": unit}
    found["at_least" if side > 0 else "at_most"] = limit
    verdict = "one seed: no interval"
    if len(values) > 1:
        low, high = confidence_interval(values)
        found |= {"low": round(low, 3), "high": round(high, 3)}
        ends = sorted((side * (low - limit), side * (high - limit)))
        verdict = "holds" if ends[0] > 0 else "against" if ends[1] < 0 else "not shown"
    return {**found, "seeds": len(values), "verdict": verdict, "reached": verdict == "holds"}


def format_claim(found: Mapping[str, Any]) -> str:
    sign = "+" if found.get("at_least") == 0 else ""
    mean, unit = f"{found['value']:{sign}.2f}", f" {found['unit']}" if found["unit"] else ""
    if found["low"] is None:
        return f"{mean}{unit}, {found['verdict']}"
    return f"{mean} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]{unit}: {found['verdict']}"


def format_figures(result: Mapping[str, Any]) -> list[str]:
    found = []
    for name, each in result["figures"].items():
        if "verdict" not in each:
            found += thresholds.format_figures({"figures": {name: each}})
            continue
        limit = f"at most {each['at_most']:g}" if "at_most" in each else f"above {each['at_least']:g}"
        found.append(f"{'ok ' if each['reached'] else 'NOT'} {name:44} {format_claim(each)} (claimed: {limit})")
    return found
