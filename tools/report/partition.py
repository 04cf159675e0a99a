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

DARK, PALE = "#2f6fb8", "#9fc4ea"
WIDE, NARROW, ROOM = 32.0, 6.0, 960.0  # pixels: a device's column at most, at least; all columns where they fit
BARS, LETTER, LINE = 40.0, 6.6, 16.0  # pixels: the tallest bar, a letter's width, a line's height
NOTE = "area: examples of a class; dark: to train on; pale: held out; bars: all of a device"
MOST_TIPS = 3000  # dots that have tooltips
FEW = 20  # classes that have a column each in the table

Radius: TypeAlias = Callable[[int], float]  # pixels of a dot for so many examples
Place: TypeAlias = Callable[[int, int], tuple[float, float]]  # of a dot, for its row and column


@dataclass(frozen=True)
class ClassCounts:
    devices: tuple[str, ...]
    classes: tuple[str, ...]
    train: np.ndarray  # (devices, classes)
    held: np.ndarray  # likewise
    domains: tuple[str, ...] = ()  # of each device; (): none has any


def count_examples(job: JobSettings, devices: int | None = None) -> ClassCounts:
    """Return the example counts of the devices of `fedquilt simulate`, by default as many as in the job."""
    tables = FleetPlan(job, Path(), Path(), devices).make_agent_tables()
    train, held = examples.count_labels(DataSpec.parse(tables[0]["data"]))
    kinds = train.shape[1]
    spec = DataSpec.parse(job.data)
    known = spec.labels or job.labels
    classes = tuple(known) if len(known) >= kinds else tuple(map(str, range(kinds)))
    if spec.task != "classes":
        classes = ("all",)
    domains = []
    for agent in tables:
        each = DataSpec.parse(agent["data"])
        if each.domains:
            values = each.domains.values_of_share(each.share)
            domains.append(", ".join(f"{name} {value:g}" for name, value in values.items()))
    return ClassCounts(tuple(table["device"] for table in tables), classes[:kinds], train, held, tuple(domains))


def print_counts(job: JobSettings, devices: int | None, out: Path | None, format: str) -> int:
    """Print the example counts of a job's devices, and draw them into `out` if given. Return 0."""
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

    More than FEW classes are summarised in two columns.
    """
    every = counts.train + counts.held
    few = len(counts.classes) <= FEW
    head = ["device", "examples", "held out", *(counts.classes if few else ["classes", "largest class"])]
    rows = [head]
    for name, own, held in zip(counts.devices, every, counts.held, strict=True):
        most = int(own.argmax())
        shape = [f"{np.count_nonzero(own)}", f"{counts.classes[most]} ({own[most] / own.sum():.0%})"]
        rows.append([name, f"{own.sum()}", f"{held.sum()}", *([f"{n or '.'}" for n in own] if few else shape)])
    sizes = every.sum(axis=1)
    for row, domain in zip(rows, ("domain", *counts.domains), strict=False):
        row += [domain] if counts.domains else []
    return [
        *table.format_table(rows, "<>"),
        f"{len(counts.devices)} devices with {sizes.min()} to {sizes.max()} examples, {sizes.sum()} in all, of "
        f"{np.count_nonzero(every.sum(axis=0))} classes; {counts.held.sum()} are held out",
    ]


def draw_counts(counts: ClassCounts, title: str = "") -> plots.Picture:
    """Return a picture with a dot per device and class, and a bar per device.

    The area of a dot is the number of examples. The dark part is for training, the pale rim is held out. Dots have
    tooltips with their numbers.
    """
    every = counts.train + counts.held
    cell = min(WIDE, max(NARROW, ROOM / max(1, len(counts.devices))))
    left = 12 + LETTER * max(map(len, ("class", *counts.classes)), default=0)
    top, tall = 3.5 * LINE + WIDE, max(cell, LINE - 2)
    floor = top + tall * len(counts.classes) + 12 + BARS  # where the bars stand
    pairs = zip(counts.devices, counts.domains or ("",) * len(counts.devices), strict=True)
    names = [", ".join(filter(None, pair)) for pair in pairs]
    below = 12 + LETTER * max(map(len, names), default=0)
    width, height = max(left + cell * len(counts.devices) + 12, 24 + LETTER * len(NOTE)), floor + below
    largest = int(every.max(initial=1))

    def radius(count: int) -> float:
        return max(0.8, (cell / 2 - 0.5) * math.sqrt(count / largest)) if count else 0.0

    def draw(axis: Any, tip: plots.Tip) -> None:
        axis.text(12, LINE, title or "examples by device and class", size=13, weight=600)
        axis.text(12, 2.2 * LINE, NOTE)
        _draw_legend(axis, largest, radius)
        for row, name in enumerate(counts.classes):
            y = top + tall * (row + 0.5)
            axis.text(left - 6, y, name, ha="right", va="center")
            axis.plot([left, left + cell * len(counts.devices)], [y, y], color=plots.INK, alpha=0.14, linewidth=1)
        step = math.ceil(12 / cell)  # rotated names need this distance to be legible
        _draw_dots(
            axis, tip, counts, lambda row, column: (left + cell * (column + 0.5), top + tall * (row + 0.5)), radius
        )
        for column, name in enumerate(names):
            x = left + cell * (column + 0.5)
            _draw_bar(axis, tip, counts, column, x, floor, 0.7 * cell)
            if column % step == 0:
                axis.text(x, floor + 6, name, rotation=90, ha="center", va="top")

    words = f"{title or 'examples by device and class'}: {format_counts(counts)[-1]}"
    return plots.Picture(width, height, words, draw)


def _draw_legend(axis: Any, largest: int, radius: Radius) -> None:
    from matplotlib.patches import Circle

    x, y = 12.0, 2.8 * LINE + WIDE / 2
    for count in sorted({largest, max(1, largest // 4)}, reverse=True):
        axis.add_patch(Circle((x + radius(count), y), radius(count), color=DARK, linewidth=0))
        x += 2 * radius(count) + 5
        axis.text(x, y, f"{count}", va="center")
        x += LETTER * len(str(count)) + 14


def _draw_dots(axis: Any, tip: plots.Tip, counts: ClassCounts, place: Place, radius: Radius) -> None:
    # dots have no tooltips if there are more than MOST_TIPS
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle

    made: dict[str, list[Any]] = {PALE: [], DARK: []}
    for column, row in np.argwhere(counts.train + counts.held).tolist():
        train, held = int(counts.train[column, row]), int(counts.held[column, row])
        told = f"{counts.devices[column]}, class {counts.classes[row]}: {train} to train on, {held} held out"
        sizes = {PALE: train + held if held else 0, DARK: train}
        for ink in (ink for ink, count in sizes.items() if count):
            made[ink].append((Circle(place(row, column), radius(sizes[ink]), color=ink, linewidth=0), told))
    for ink, dots in made.items():
        if sum(map(len, made.values())) > MOST_TIPS:
            axis.add_collection(PatchCollection([dot for dot, _ in dots], color=ink, linewidth=0))
            continue
        for dot, told in dots:
            axis.add_patch(dot)
            tip(dot, told)


def _draw_bar(axis: Any, tip: plots.Tip, counts: ClassCounts, column: int, x: float, floor: float, wide: float) -> None:
    from matplotlib.patches import Rectangle

    largest = max(1, int((counts.train + counts.held).sum(axis=1).max(initial=1)))
    train, held = int(counts.train[column].sum()), int(counts.held[column].sum())
    for ink, count in ((PALE, train + held), (DARK, train)):
        tall = BARS * count / largest
        bar = axis.add_patch(Rectangle((x - wide / 2, floor - tall), wide, tall, color=ink, linewidth=0))
        tip(bar, f"{counts.devices[column]}: {train} to train on, {held} held out")
