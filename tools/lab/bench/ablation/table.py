"""Table of an ablation, and verdicts on stitching and weighted voting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedquilt.tools.lab.bench.ablation.rows import COMPARISONS, AblationRow

MEANS = ("rounds", "task_s", "wall_s", "down_bytes", "up_bytes", "scored")
HEAD = f"{'':34} {'%':>5} {'sd':>5} {'rounds':>7} {'scored':>7} {'cpu s':>8} {'down kB':>8} {'up kB':>8} {'run s':>7}"


def summarise_rows(rows: Sequence[AblationRow]) -> list[dict[str, Any]]:
    """Return means over seeds by partition and name. "sd" of the accuracy is None for one seed."""
    groups: dict[tuple[str, str], list[AblationRow]] = {}
    for row in rows:
        groups.setdefault((row.condition, row.name), []).append(row)
    return [
        {
            "condition": condition,
            "name": name,
            "part": group[0].part,
            "runs": len(group),
            "tested": group[0].tested,
            "accuracy": float(np.mean([row.accuracy for row in group])),
            "sd": _standard_deviation([row.accuracy for row in group]),
            **{column: _mean([getattr(row, column) for row in group]) for column in MEANS},
        }
        for (condition, name), group in groups.items()
    ]


def format_table(rows: Sequence[AblationRow]) -> list[str]:
    """Format the table and the verdicts, partition by partition."""
    found, sentences = [], verdicts_by_condition(rows)
    for condition, group in _group_by_condition(summarise_rows(rows)).items():
        first = group[0]
        found.append(
            f"\n{condition}: accuracy on {first['tested']} test images, mean and sd of {_format_seed_count(group)}"
        )
        found.append(HEAD)
        found += [_format_row(each) for each in group]
        found += sentences[condition]
    found += [
        "",
        "rounds: of a search; scored: blocks, by a device that is asked in every one of them",
        "cpu s, down, up: of one device in one round; run s: of the whole run, with others beside it",
        "differences: points of accuracy, mean ± sd over seeds",
    ]
    return found


def verdicts_by_condition(rows: Sequence[AblationRow]) -> dict[str, list[str]]:
    conditions = dict.fromkeys(row.condition for row in rows)
    return {name: format_verdicts([row for row in rows if row.condition == name]) for name in conditions}


def format_verdicts(rows: Sequence[AblationRow]) -> list[str]:
    """Format the differences to the baselines in points (mean and sd over equal seeds)."""
    stitched = _accuracies_by_seed(rows, "part", "default")
    found: list[str] = []
    won: list[str] = []
    lost: list[str] = []
    for name in dict.fromkeys(row.name for row in rows if row.part in COMPARISONS):
        points = _differences(stitched, _accuracies_by_seed(rows, "name", name))
        if points:
            gained = float(np.mean(points)) > 0
            (won if gained else lost).append(
                f"{name} {_format_points(points if gained else [-each for each in points])}"
            )
    if won:
        found.append(f"Stitching beats, by so many points: {'; '.join(won)}.")
    if lost:
        found.append(f"Stitching does not beat, short by so many points: {'; '.join(lost)}.")
    points = _differences(stitched, _accuracies_by_seed(rows, "part", "plain-vote"))
    if points:
        found.append(_compare_votes(points))
    return found


def _compare_votes(points: Sequence[float]) -> str:
    if not any(points):
        return "Weighted and plain voting come to the same accuracy with every seed."
    spread = _standard_deviation(points)
    verb = "beats" if np.mean(points) > 0 else "does not beat"
    doubt = ", which is within the spread over seeds" if spread is not None and abs(np.mean(points)) <= spread else ""
    return f"Weighted voting {verb} plain voting ({_format_points(points, '+.1f')} points{doubt})."


def _format_points(points: Sequence[float], kind: str = ".1f") -> str:
    spread = _standard_deviation(points)
    return f"{np.mean(points):{kind}}" + ("" if spread is None else f" ± {spread:.1f}")


def _accuracies_by_seed(rows: Iterable[AblationRow], column: str, value: str) -> Mapping[int, float]:
    return {row.seed: 100 * row.accuracy for row in rows if getattr(row, column) == value}


def _differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def _format_row(each: Mapping[str, Any]) -> str:
    down, up = (None if each[name] is None else each[name] / 1e3 for name in ("down_bytes", "up_bytes"))
    sd = None if each["sd"] is None else 100 * each["sd"]
    return (
        f"{each['name']:34} {100 * each['accuracy']:5.1f} {_format_cell(sd, 5, 1)} {_format_cell(each['rounds'], 7)} "
        f"{_format_cell(each['scored'], 7)} {_format_cell(each['task_s'], 8, 3)} {_format_cell(down, 8, 1)} "
        f"{_format_cell(up, 8, 1)} "
        f"{each['wall_s']:7.1f}"
    )


def _format_cell(value: float | None, width: int, digits: int = 0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _format_seed_count(group: Sequence[Mapping[str, Any]]) -> str:
    runs = max(each["runs"] for each in group)
    return f"{runs} seeds" if runs > 1 else "one seed"


def _group_by_condition(found: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        groups.setdefault(each["condition"], []).append(each)
    return groups


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _standard_deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
