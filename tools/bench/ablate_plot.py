"""The picture of an ablation: accuracy of every run, a panel for each partition, and what a device's round takes.

Imports matplotlib: the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedquilt.tools.bench.ablate_rows import VARIANTS, Row

STITCHED, PALE, OTHER, FAINT = "#1f5fa8", "#8fb4dc", "#c4581d", "#d9d9d9"
ROW_INCHES, LABEL_INCHES, DOTS_INCHES, BARS_INCHES = 0.27, 2.0, 3.0, 1.9


def draw(rows: Sequence[Row], file: Path) -> None:
    """Write the picture; its format follows the file's ending."""
    names = list(dict.fromkeys(row.name for row in rows if row.part in VARIANTS))
    searched = len(names)
    names += list(dict.fromkeys(row.name for row in rows if row.part not in VARIANTS))
    conditions = list(dict.fromkeys(row.condition for row in rows))
    gap = 0.6 if 0 < searched < len(names) else 0.0
    places = {name: i + gap * (i >= searched) for i, name in enumerate(names)}
    widths = [DOTS_INCHES] * len(conditions) + [BARS_INCHES] * (2 if searched else 0)
    size = (LABEL_INCHES + sum(widths), 1.0 + ROW_INCHES * (len(names) + 1))
    figure = Figure(size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    low = 100 * min(row.accuracy for row in rows)
    for axis, condition in zip(axes, conditions, strict=False):
        _accuracy(axis, [row for row in rows if row.condition == condition], places)
        axis.set_title(condition, fontsize=10)
        axis.set_xlim(max(0.0, low - 4), 101)
    if searched:
        _bars(axes[-2], rows, places, {"task_s": ("", STITCHED)}, 1.0, "processor seconds")
        axes[-2].set_title("one device's round", fontsize=10)
        columns = {"down_bytes": ("down", STITCHED), "up_bytes": ("up", PALE)}
        _bars(axes[-1], rows, places, columns, 1e-3, "kB")
        axes[-1].set_title("sent in it", fontsize=10)
        axes[-1].legend(fontsize=8, frameon=False, loc="lower right")
    axes[0].set_yticks(list(places.values()), [name.strip() for name in places], fontsize=9)
    axes[0].set_ylim(max(places.values()) + 0.7, -0.7)
    figure.savefig(file, dpi=150)


def _accuracy(axis: Any, rows: Sequence[Row], places: dict[str, float]) -> None:
    """A dot for every seed, the mean as a line and in figures; the default's mean goes through the whole panel."""
    for name, place in places.items():
        group = [row for row in rows if row.name == name]
        if not group:
            continue
        colour = STITCHED if group[0].part in VARIANTS else OTHER
        values = [100 * row.accuracy for row in group]
        mean = float(np.mean(values))
        axis.plot([mean, mean], [place - 0.32, place + 0.32], color=colour, linewidth=1.4)
        axis.plot(values, [place] * len(values), "o", color=colour, markersize=5, alpha=0.6, markeredgewidth=0)
        beside = axis.get_yaxis_transform()
        axis.text(1.02, place, f"{mean:.1f}", transform=beside, fontsize=8, va="center", color=colour)
        if group[0].part == "default":
            axis.axvline(mean, color=colour, linewidth=0.8, linestyle=":", zorder=0)
    _plain(axis, list(places.values()), "test accuracy, %")


def _bars(
    axis: Any,
    rows: Sequence[Row],
    places: dict[str, float],
    columns: dict[str, tuple[str, str]],
    scale: float,
    unit: str,
) -> None:
    """The mean of all runs of a search, of each column with its label and colour."""
    height = 0.62 / len(columns)
    known = list(dict.fromkeys(row.name for row in rows if row.part in VARIANTS))
    for i, (column, (label, colour)) in enumerate(columns.items()):
        means = [scale * float(np.mean([getattr(row, column) for row in rows if row.name == name])) for name in known]
        at = [places[name] + (i - (len(columns) - 1) / 2) * height for name in known]
        axis.barh(at, means, height, color=colour, label=label)
    _plain(axis, [places[name] for name in known], unit)
    axis.set_xlim(left=0)


def _plain(axis: Any, places: Sequence[float], label: str) -> None:
    axis.hlines(places, 0, 1, transform=axis.get_yaxis_transform(), color=FAINT, linewidth=0.5, zorder=0)
    axis.set_xlabel(label, fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
