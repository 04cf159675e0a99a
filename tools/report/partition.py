"""Number of examples per device and class, as a picture, a table and JSON.

The picture is one SVG element: a file by itself, or a part of an HTML page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedquilt.console import progress, table
from fedquilt.coordinator.settings import JobSettings
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.host import disk
from fedquilt.tools.report import plots
from fedquilt.tools.simulation.agents import FleetPlan

TRAIN_COLOUR, HELD_OUT_COLOUR = "#2f6fb8", "#9fc4ea"
# in pixels; columns shrink to fit MAX_TOTAL_WIDTH
MAX_COLUMN_WIDTH, MIN_COLUMN_WIDTH, MAX_TOTAL_WIDTH = 32.0, 6.0, 960.0
MAX_BAR_HEIGHT, LETTER_WIDTH, LINE_HEIGHT = 40.0, 6.6, 16.0
NOTE = "area: examples of a class; dark: to train on; pale: held out; bars: all of a device"
MAX_TOOLTIPS = 3000  # dots that have tooltips
MAX_CLASS_COLUMNS = 20  # with more classes, the table has no column for each class

Radius: TypeAlias = Callable[[int], float]  # number of examples -> pixels
DotPosition: TypeAlias = Callable[[int, int], tuple[float, float]]  # row and column -> x and y


@dataclass(frozen=True)
class ClassCounts:
    devices: tuple[str, ...]
    classes: tuple[str, ...]
    train: np.ndarray  # (devices, classes)
    held: np.ndarray  # held-out examples (devices, classes)
    domains: tuple[str, ...] = ()  # domain of each device, or () without domains


def count_examples(job: JobSettings, devices: int | None = None) -> ClassCounts:
    """Return the example counts of `devices` simulated devices, by default as many as the job has."""
    tables = FleetPlan(job, Path(), Path(), devices).make_agent_tables()
    train, held = examples.count_labels(DataSpec.parse(tables[0]["data"]))
    kinds = train.shape[1]
    spec = DataSpec.parse(job.data)
    names = spec.labels or job.labels
    classes = tuple(names) if len(names) >= kinds else tuple(map(str, range(kinds)))
    if spec.task != "classes":
        classes = ("all",)
    domains = []
    for agent in tables:
        agent_spec = DataSpec.parse(agent["data"])
        if agent_spec.domains:
            values = agent_spec.domains.values_of_share(agent_spec.share)
            domains.append(", ".join(f"{name} {value:g}" for name, value in values.items()))
    return ClassCounts(tuple(table["device"] for table in tables), classes[:kinds], train, held, tuple(domains))


def print_counts(job: JobSettings, devices: int | None, out: Path | None, format: str) -> int:
    counts = count_examples(job, devices)
    if out is not None:
        disk.write_output(out, plots.add_background(plots.render_picture(draw_counts(counts, job.name))))
    if format == "json":
        domains = counts.domains or (None,) * len(counts.devices)
        rows = [
            {"device": name, "train": train, "held": held, "domain": domain}
            for name, train, held, domain in zip(
                counts.devices, counts.train.tolist(), counts.held.tolist(), domains, strict=True
            )
        ]
        result = {"classes": list(counts.classes), "devices": rows}
        progress.LINE.print_to_stdout(msgspec.json.encode(result).decode())
    else:
        progress.LINE.print_to_stdout(*format_counts(counts), *([f"drawn in {out}"] if out is not None else []))
    return 0


def format_counts(counts: ClassCounts) -> list[str]:
    """Return a table of the examples of each device, and a last line with totals.

    More than MAX_CLASS_COLUMNS classes are summarised in two columns.
    """
    totals = counts.train + counts.held
    has_class_columns = len(counts.classes) <= MAX_CLASS_COLUMNS
    head = ["device", "examples", "held out", *(counts.classes if has_class_columns else ["classes", "largest class"])]
    rows = [head]
    for name, device_counts, held_out in zip(counts.devices, totals, counts.held, strict=True):
        largest = int(device_counts.argmax())
        shape = [
            f"{np.count_nonzero(device_counts)}",
            f"{counts.classes[largest]} ({device_counts[largest] / device_counts.sum():.0%})",
        ]
        rows.append(
            [
                name,
                f"{device_counts.sum()}",
                f"{held_out.sum()}",
                *([f"{n or '.'}" for n in device_counts] if has_class_columns else shape),
            ]
        )
    sizes = totals.sum(axis=1)
    for row, domain in zip(rows, ("domain", *counts.domains), strict=False):
        row += [domain] if counts.domains else []
    return [
        *table.format_table(rows, "<>"),
        f"{len(counts.devices)} devices with {sizes.min()} to {sizes.max()} examples, {sizes.sum()} in all, of "
        f"{np.count_nonzero(totals.sum(axis=0))} classes; {counts.held.sum()} are held out",
    ]


def draw_counts(counts: ClassCounts, title: str = "") -> plots.Picture:
    """Return a picture with a dot per device and class, and a bar per device.

    A dot's area is the number of examples, with a dark part for training and a pale rim for held-out ones.
    """
    totals = counts.train + counts.held
    cell = min(MAX_COLUMN_WIDTH, max(MIN_COLUMN_WIDTH, MAX_TOTAL_WIDTH / max(1, len(counts.devices))))
    left_px = 12 + LETTER_WIDTH * max(map(len, ("class", *counts.classes)), default=0)
    top, row_height = 3.5 * LINE_HEIGHT + MAX_COLUMN_WIDTH, max(cell, LINE_HEIGHT - 2)
    floor = top + row_height * len(counts.classes) + 12 + MAX_BAR_HEIGHT  # y of the lower end of the bars
    pairs = zip(counts.devices, counts.domains or ("",) * len(counts.devices), strict=True)
    names = [", ".join(filter(None, pair)) for pair in pairs]
    names_height = 12 + LETTER_WIDTH * max(map(len, names), default=0)
    width, height = max(left_px + cell * len(counts.devices) + 12, 24 + LETTER_WIDTH * len(NOTE)), floor + names_height
    largest = int(totals.max(initial=1))

    def radius(count: int) -> float:
        return max(0.8, (cell / 2 - 0.5) * math.sqrt(count / largest)) if count else 0.0

    def draw(axis: Any, add_tooltip: plots.AddTooltip) -> None:
        axis.text(12, LINE_HEIGHT, title or "examples by device and class", size=13, weight=600)
        axis.text(12, 2.2 * LINE_HEIGHT, NOTE)
        _draw_legend(axis, largest, radius)
        for row, name in enumerate(counts.classes):
            y = top + row_height * (row + 0.5)
            axis.text(left_px - 6, y, name, ha="right", va="center")
            axis.plot([left_px, left_px + cell * len(counts.devices)], [y, y], color=plots.INK, alpha=0.14, linewidth=1)
        step = math.ceil(12 / cell)  # rotated names need this distance to be legible
        _draw_dots(
            axis,
            add_tooltip,
            counts,
            lambda row, column: (left_px + cell * (column + 0.5), top + row_height * (row + 0.5)),
            radius,
        )
        for column, name in enumerate(names):
            x = left_px + cell * (column + 0.5)
            _draw_bar(axis, add_tooltip, counts, column, x, floor, 0.7 * cell)
            if column % step == 0:
                axis.text(x, floor + 6, name, rotation=90, ha="center", va="top")

    summary = f"{title or 'examples by device and class'}: {format_counts(counts)[-1]}"
    return plots.Picture(width, height, summary, draw)


def _draw_legend(axis: Any, largest: int, radius: Radius) -> None:
    from matplotlib.patches import Circle

    x, y = 12.0, 2.8 * LINE_HEIGHT + MAX_COLUMN_WIDTH / 2
    for count in sorted({largest, max(1, largest // 4)}, reverse=True):
        axis.add_patch(Circle((x + radius(count), y), radius(count), color=TRAIN_COLOUR, linewidth=0))
        x += 2 * radius(count) + 5
        axis.text(x, y, f"{count}", va="center")
        x += LETTER_WIDTH * len(str(count)) + 14


def _draw_dots(
    axis: Any, add_tooltip: plots.AddTooltip, counts: ClassCounts, dot_position: DotPosition, radius: Radius
) -> None:
    # more than MAX_TOOLTIPS dots have no tooltips
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle

    dots_by_colour: dict[str, list[Any]] = {HELD_OUT_COLOUR: [], TRAIN_COLOUR: []}
    for column, row in np.argwhere(counts.train + counts.held).tolist():
        train, held_out = int(counts.train[column, row]), int(counts.held[column, row])
        text = f"{counts.devices[column]}, class {counts.classes[row]}: {train} to train on, {held_out} held out"
        sizes = {HELD_OUT_COLOUR: train + held_out if held_out else 0, TRAIN_COLOUR: train}
        for ink in (ink for ink, count in sizes.items() if count):
            dots_by_colour[ink].append(
                (Circle(dot_position(row, column), radius(sizes[ink]), color=ink, linewidth=0), text)
            )
    for ink, dots in dots_by_colour.items():
        if sum(map(len, dots_by_colour.values())) > MAX_TOOLTIPS:
            axis.add_collection(PatchCollection([dot for dot, _ in dots], color=ink, linewidth=0))
            continue
        for dot, text in dots:
            axis.add_patch(dot)
            add_tooltip(dot, text)


def _draw_bar(
    axis: Any, add_tooltip: plots.AddTooltip, counts: ClassCounts, column: int, x: float, floor: float, width: float
) -> None:
    from matplotlib.patches import Rectangle

    largest = max(1, int((counts.train + counts.held).sum(axis=1).max(initial=1)))
    train, held_out = int(counts.train[column].sum()), int(counts.held[column].sum())
    for ink, count in ((HELD_OUT_COLOUR, train + held_out), (TRAIN_COLOUR, train)):
        height = MAX_BAR_HEIGHT * count / largest
        bar = axis.add_patch(Rectangle((x - width / 2, floor - height), width, height, color=ink, linewidth=0))
        add_tooltip(bar, f"{counts.devices[column]}: {train} to train on, {held_out} held out")
