"""Who has how many examples of which class: as a picture, as a table and as JSON. Reads labels, no inputs.

The picture is one SVG element without script, style sheet or font of its own: a file by itself, or a
part of an HTML page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedquilt import columns, disk
from fedquilt.coordinator.settings import Job
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.simulation.agents import Plan

DARK, PALE, INK, FAINT = "#1f5fa8", "#8fb4dc", "#222222", "#d9d9d9"
WIDE, NARROW, ROOM = 32.0, 6.0, 960.0  # pixels: a device's column at most, at least; all columns where they fit
BARS, LETTER, LINE = 40.0, 6.6, 16.0  # pixels: the tallest bar, a letter's width, a line's height
NOTE = "area: examples of a class; dark: to train on; pale: held out; bars: all of a device"
FEW = 20  # classes that have a column each in the table

Radius: TypeAlias = Callable[[int], float]  # pixels of a dot for so many examples


@dataclass(frozen=True)
class Counts:
    """How many examples of each class each device has: to train on, and held out."""

    devices: tuple[str, ...]
    classes: tuple[str, ...]
    train: np.ndarray  # (devices, classes)
    held: np.ndarray  # likewise


def of_job(job: Job, devices: int | None = None) -> Counts:
    """The shares that `fedquilt fleet` gives its devices, by default as many as the job says.

    Raises:
        JobError: the job has no [data], or a wrong one.
        DataError: it cannot be read, or not be shared out as it says.
    """
    tables = Plan(job, Path(), Path(), devices).agents()
    train, held = examples.label_counts(DataSpec.parse(tables[0]["data"]))
    kinds = train.shape[1]
    classes = job.labels if len(job.labels) >= kinds else tuple(map(str, range(kinds)))
    return Counts(tuple(table["device"] for table in tables), classes[:kinds], train, held)


def main(job: Job, devices: int | None, out: Path | None, format: str) -> int:
    """The verb `fedquilt partition`."""
    counts = of_job(job, devices)
    if out is not None:
        disk.write(out, svg(counts, job.name))
    if format == "json":
        print(msgspec.json.encode(table(counts)).decode())
    else:
        print("\n".join([*lines(counts), *([f"drawn in {out}"] if out is not None else [])]))
    return 0


def table(counts: Counts) -> dict[str, Any]:
    """For programs: every count."""
    rows = zip(counts.devices, counts.train.tolist(), counts.held.tolist(), strict=True)
    return {
        "classes": list(counts.classes),
        "devices": [{"device": device, "train": train, "held": held} for device, train, held in rows],
    }


def lines(counts: Counts) -> list[str]:
    """For people: a line for each device with its counts, held-out ones among them, and a line for all."""
    every = counts.train + counts.held
    few = len(counts.classes) <= FEW
    head = ["device", "examples", "held out", *(counts.classes if few else ["classes", "largest class"])]
    rows = [head]
    for name, own, held in zip(counts.devices, every, counts.held, strict=True):
        most = int(own.argmax())
        shape = [f"{np.count_nonzero(own)}", f"{counts.classes[most]} ({own[most] / own.sum():.0%})"]
        rows.append([name, f"{own.sum()}", f"{held.sum()}", *([f"{n or '.'}" for n in own] if few else shape)])
    sizes = every.sum(axis=1)
    return [
        *columns.table(rows, "<>"),
        f"{len(counts.devices)} devices with {sizes.min()} to {sizes.max()} examples, {sizes.sum()} in all, of "
        f"{np.count_nonzero(every.sum(axis=0))} classes; {counts.held.sum()} are held out",
    ]


# -- the picture ----------------------------------------------------------------------------------


def svg(counts: Counts, title: str = "") -> str:
    """One dot for each device (across) and class (down), its area as the number of examples; below, all of a device.

    The dark part is to train on, the pale rim held out. Pointing at a dot shows its numbers.
    """
    every = counts.train + counts.held
    cell = min(WIDE, max(NARROW, ROOM / max(1, len(counts.devices))))
    left = 12 + LETTER * max(map(len, ("class", *counts.classes)), default=0)
    top, tall = 3.5 * LINE + WIDE, max(cell, LINE - 2)
    floor = top + tall * len(counts.classes) + 12 + BARS  # where the bars stand
    below = 12 + LETTER * max(map(len, counts.devices), default=0)
    width, height = max(left + cell * len(counts.devices) + 12, 24 + LETTER * len(NOTE)), floor + below
    largest = int(every.max(initial=1))

    def radius(count: int) -> float:
        return max(0.8, (cell / 2 - 0.5) * math.sqrt(count / largest)) if count else 0.0

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" style="max-width:100%;height:auto" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="12" y="{LINE:.0f}" font-size="13">{escape(title or "examples by device and class")}</text>',
        *_legend(largest, radius),
    ]
    for row, name in enumerate(counts.classes):
        y = top + tall * (row + 0.5)
        parts.append(_text(left - 6, y + 4, name, 'text-anchor="end"'))
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{left + cell * len(counts.devices):.1f}" stroke="{FAINT}"/>')
    step = math.ceil(12 / cell)  # names lie sideways, so many devices apart that none covers another
    for column, name in enumerate(counts.devices):
        x = left + cell * (column + 0.5)
        parts += _dots(counts, column, x, top, tall, radius)
        parts += _bar(counts, column, x, floor, 0.7 * cell)
        if column % step == 0:
            parts.append(
                _text(x + 4, floor + 6, name, f'text-anchor="end" transform="rotate(-90 {x + 4:.1f} {floor + 6:.1f})"')
            )
    return "\n".join([*parts, "</svg>\n"])


def _legend(largest: int, radius: Radius) -> list[str]:
    """What is drawn, and dots of the largest count and of a quarter of it."""
    parts, x, y = [_text(12, 2.2 * LINE, NOTE)], 12.0, 2.8 * LINE + WIDE / 2
    for count in sorted({largest, max(1, largest // 4)}, reverse=True):
        parts.append(f'<circle cx="{x + radius(count):.1f}" cy="{y:.1f}" r="{radius(count):.1f}" fill="{DARK}"/>')
        x += 2 * radius(count) + 5
        parts.append(_text(x, y + 4, f"{count}"))
        x += LETTER * len(str(count)) + 14
    return parts


def _dots(counts: Counts, column: int, x: float, top: float, tall: float, radius: Radius) -> list[str]:
    parts = []
    for row, (train, held) in enumerate(zip(counts.train[column], counts.held[column], strict=True)):
        if train + held:
            at = f'cx="{x:.1f}" cy="{top + tall * (row + 0.5):.1f}"'
            told = f"{counts.devices[column]}, class {counts.classes[row]}: {train} to train on, {held} held out"
            dark = f'<circle {at} r="{radius(train):.1f}" fill="{DARK}"/>' if train else ""
            pale = f'<circle {at} r="{radius(train + held):.1f}" fill="{PALE}"/>' if held else ""
            parts.append(f"<g><title>{escape(told)}</title>{pale}{dark}</g>")
    return parts


def _bar(counts: Counts, column: int, x: float, floor: float, wide: float) -> list[str]:
    largest = max(1, int((counts.train + counts.held).sum(axis=1).max(initial=1)))
    train, held = int(counts.train[column].sum()), int(counts.held[column].sum())
    tall, dark = (BARS * count / largest for count in (train + held, train))
    told = f"<title>{escape(counts.devices[column])}: {train} to train on, {held} held out</title>"
    shape = f'x="{x - wide / 2:.1f}" width="{wide:.1f}"'
    return [
        f'<g>{told}<rect {shape} y="{floor - tall:.1f}" height="{tall:.1f}" fill="{PALE}"/>'
        f'<rect {shape} y="{floor - dark:.1f}" height="{dark:.1f}" fill="{DARK}"/></g>'
    ]


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{" " * bool(more)}{more}>{escape(text)}</text>'
