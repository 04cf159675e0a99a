"""Plot of an ablation: accuracy of every run by partition, and the cost of a device's round.

Imports matplotlib: the extra `report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.ticker
import numpy as np

from fedquilt.tools.lab.bench.ablation.rows import VARIANTS, AblationRow
from fedquilt.tools.report import plots

STITCHED, OTHER, PALE = *plots.COLOURS[:2], "#9fc4ea"
ROW, LABEL, DOTS, BARS = 20, 150, 220, 140  # pixels: a row's height; widths of names, a panel of dots, one of bars


def draw_plot(rows: Sequence[AblationRow], file: Path) -> None:
    """Write the plot in the format of the file's suffix."""
    names = list(dict.fromkeys(row.name for row in rows if row.part in VARIANTS))
    searched = len(names)
    names += list(dict.fromkeys(row.name for row in rows if row.part not in VARIANTS))
    conditions = list(dict.fromkeys(row.condition for row in rows))
    gap = 0.6 if 0 < searched < len(names) else 0.0
    places = {name: i + gap * (i >= searched) for i, name in enumerate(names)}
    widths = [DOTS] * len(conditions) + [BARS] * (2 if searched else 0)
    with plots.make_plot_style("ablation"):
        figure = plots.make_figure(LABEL + sum(widths), 75 + ROW * (len(names) + 1))
        figure.set(layout_engine="constrained", facecolor="white")
        axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        low = 100 * min(row.accuracy for row in rows)
        for axis, condition in zip(axes, conditions, strict=False):
            _draw_accuracies(axis, [row for row in rows if row.condition == condition], places)
            axis.set(title=condition, xlim=(max(0.0, low - 4), 101))
        if searched:
            _draw_bars(axes[-2], rows, places, {"task_s": ("", STITCHED)}, 1.0, "processor seconds")
            axes[-2].set_title("one device's round")
            columns = {"down_bytes": ("down", STITCHED), "up_bytes": ("up", PALE)}
            _draw_bars(axes[-1], rows, places, columns, 1e-3, "kB")
            axes[-1].set_title("sent in it")
            axes[-1].legend(frameon=False, loc="lower right")
        axes[0].set_yticks(list(places.values()), [name.strip() for name in places])
        axes[0].set_ylim(max(places.values()) + 0.7, -0.7)
        figure.savefig(file, dpi=150)


def _draw_accuracies(axis: plots.Axis, rows: Sequence[AblationRow], places: dict[str, float]) -> None:
    for name, place in places.items():
        group = [row for row in rows if row.name == name]
        if not group:
            continue
        colour = STITCHED if group[0].part in VARIANTS else OTHER
        values = [100 * row.accuracy for row in group]
        mean = float(np.mean(values))
        axis.plot([mean, mean], [place - 0.32, place + 0.32], color=colour, linewidth=1.6)
        axis.plot(values, [place] * len(values), "o", color=colour, markersize=5, alpha=0.6, markeredgewidth=0)
        axis.text(1.02, place, f"{mean:.1f}", transform=axis.get_yaxis_transform(), va="center", color=colour)
        if group[0].part == "default":
            axis.axvline(mean, color=colour, linewidth=0.8, linestyle=":", zorder=0)
    _label_axis(axis, "test accuracy, %")


def _draw_bars(
    axis: plots.Axis,
    rows: Sequence[AblationRow],
    places: dict[str, float],
    columns: dict[str, tuple[str, str]],
    scale: float,
    unit: str,
) -> None:
    height = 0.62 / len(columns)
    known = list(dict.fromkeys(row.name for row in rows if row.part in VARIANTS))
    for i, (column, (label, colour)) in enumerate(columns.items()):
        means = [scale * float(np.mean([getattr(row, column) for row in rows if row.name == name])) for name in known]
        at = [places[name] + (i - (len(columns) - 1) / 2) * height for name in known]
        axis.barh(at, means, height, color=colour, label=label)
    _label_axis(axis, unit)
    axis.set_xlim(left=0)


def _label_axis(axis: plots.Axis, label: str) -> None:
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axis.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
