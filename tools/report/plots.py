"""Small plots as SVG text, written without a library: lines with a band, bars, dots.

A plot takes its ink from the text around it (`currentColor`), so that one picture serves light and dark pages;
`alone` makes a file of it that brings a ground of its own. There is no script in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f7fc8", "#e07b2e", "#2f9e6e", "#b05fb5", "#b89400", "#d64f5e", "#3fa3b5", "#8a8a8a")
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # when the colours have all been used
WIDTH, HEIGHT = 480.0, 290.0  # of a plot with axes, pixels
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 30.0, 44.0
LETTER, LINE = 6.8, 17.0  # a letter's width, a line's height
FONT = 'font-family="system-ui, sans-serif" font-size="11" fill="currentColor"'


@dataclass(frozen=True)
class Line:
    """One line: points by ascending x; with `low` and `high` the band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Bar:
    """One bar: its parts, one for each name of the plot; None: not known."""

    name: str
    parts: Sequence[float | None]


@dataclass(frozen=True)
class Dots:
    """One row of dots, and a stroke at their mean."""

    name: str
    values: Sequence[float]


def lines(
    found: Sequence[Line], title: str, x: str, y: str, *, level: float | None = None, most: float = math.inf
) -> str:
    """Lines over common axes, x from 0 on; a value that is not finite is left out.

    Args:
        level: where a dotted line is.
        most: where the upward axis ends at the latest, if no value is above.
    """
    found = [_finite(line) for line in found]
    across = [value for line in found for value in line.x]
    up = [value for line in found for values in (line.y, line.low, line.high) for value in values]
    if not across:
        return empty(title)
    xs, ys = ticks(min([0.0, *across]), max(across)), _range([*up, *([] if level is None else [level])], most)
    named = [line.name for line in found if line.name]
    rows = _wrapped(named)
    top = TOP + LINE * len(rows) + 4
    height = HEIGHT + LINE * len(rows)
    floor = height - BOTTOM

    def place(a: float, b: float) -> str:
        return f"{_at(a, xs, LEFT, WIDTH - RIGHT):.1f},{_at(b, ys, floor, top):.1f}"

    parts = [*_head(title, WIDTH, height), *_axes(xs, ys, x, y, top, floor), *_keys(rows, named)]
    for number, line in enumerate(found):
        ink = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        if line.low and line.high:
            edge = [place(a, b) for a, b in zip(line.x, line.high, strict=True)]
            edge += [place(a, b) for a, b in reversed(list(zip(line.x, line.low, strict=True)))]
            parts.append(f'<polygon points="{" ".join(edge)}" fill="{ink}" fill-opacity="0.16"/>')
        trace = [place(a, b) for a, b in zip(line.x, line.y, strict=True)]
        if len(trace) > 1:
            dashed = f' stroke-dasharray="{dash}"' if dash else ""
            parts.append(
                f'<polyline points="{" ".join(trace)}" fill="none" stroke="{ink}" stroke-width="1.8"{dashed}/>'
            )
        if len(trace) <= 40:
            tips = [f"{line.name + ': ' if line.name else ''}{short(b)} at {short(a)}" for a, b in _pairs(line)]
            radius = 2.4 if len(trace) > 1 else 5.0
            parts += [_dot(each, ink, tip, radius) for each, tip in zip(trace, tips, strict=True)]
    if level is not None:
        at = f"{_at(level, ys, floor, top):.1f}"
        parts.append(
            f'<path d="M{LEFT:.0f} {at}H{WIDTH - RIGHT:.0f}" stroke="currentColor" stroke-opacity="0.6" '
            'stroke-dasharray="2 3"/>'
        )
    return "\n".join([*parts, "</svg>"])


def bars(found: Sequence[Bar], title: str, x: str, parts: Sequence[str] = ("",)) -> str:
    """Horizontal bars, their parts one after another; what is not known says so. Widest at the total's largest."""
    sums = [sum(part or 0.0 for part in bar.parts) for bar in found]
    if not found or not any(math.isfinite(total) and total > 0 for total in sums):
        return empty(title)
    xs = ticks(0.0, max(sums))
    left = 16 + LETTER * min(26, max(len(bar.name) for bar in found))
    named = [name for name in parts if name]
    rows = _wrapped(named)
    top = TOP + LINE * len(rows)
    floor = top + LINE * len(found) + 4
    height = floor + BOTTOM
    out = [*_head(title, WIDTH, height), *_keys(rows, named), *_floor(xs, x, left, top, floor, WIDTH - RIGHT - 40)]
    for row, (bar, total) in enumerate(zip(found, sums, strict=True)):
        middle, at = top + LINE * row + 11, left
        out.append(f'<text x="{left - 6:.0f}" y="{middle + 2:.0f}" text-anchor="end">{escape(_cut(bar.name))}</text>')
        for number, part in enumerate(bar.parts):
            wide = _at(part or 0.0, xs, left, WIDTH - RIGHT - 40) - left
            tip = f"{bar.name}{', ' + parts[number] if parts[number] else ''}: {'?' if part is None else short(part)}"
            out.append(
                f'<rect x="{at:.1f}" y="{middle - 8:.0f}" width="{max(wide, 0):.1f}" height="13" '
                f'fill="{COLOURS[number % len(COLOURS)]}"><title>{escape(tip)}</title></rect>'
            )
            at += max(wide, 0)
        unknown = all(part is None for part in bar.parts)
        told = "not known" if unknown else short(total)
        out.append(f'<text x="{at + 4:.1f}" y="{middle + 2:.0f}">{told}</text>')
    return "\n".join([*out, "</svg>"])


def dots(found: Sequence[Dots], title: str, x: str, *, most: float = math.inf) -> str:
    """A row of dots for each name, a stroke and a figure at their mean. `most`: as of `lines`, of the axis across."""
    values = [value for row in found for value in row.values]
    if not values:
        return empty(title)
    xs = _range(values, most)
    left = 16 + LETTER * min(26, max(len(row.name) for row in found))
    floor = TOP + LINE * 1.3 * len(found) + 4
    right = WIDTH - RIGHT - 44
    out = [*_head(title, WIDTH, floor + BOTTOM), *_floor(xs, x, left, TOP, floor, right)]
    for number, row in enumerate(found):
        middle, ink = TOP + LINE * 1.3 * number + 12, COLOURS[number % len(COLOURS)]
        out.append(f'<text x="{left - 6:.0f}" y="{middle + 4:.0f}" text-anchor="end">{escape(_cut(row.name))}</text>')
        if not row.values:
            continue
        mean = sum(row.values) / len(row.values)
        at = _at(mean, xs, left, right)
        out.append(f'<path d="M{at:.1f} {middle - 8:.0f}v16" stroke="{ink}" stroke-width="2"/>')
        out += [
            _dot(f"{_at(value, xs, left, right):.1f},{middle:.1f}", ink, f"{row.name}: {short(value)}", 4.0)
            for value in row.values
        ]
        out.append(f'<text x="{right + 6:.0f}" y="{middle + 4:.0f}">{short(mean)}</text>')
    return "\n".join([*out, "</svg>"])


def empty(title: str) -> str:
    """A plot that has nothing to show says so."""
    say = f'<text x="{WIDTH / 2:.0f}" y="52" text-anchor="middle" fill-opacity="0.7">not known of this run</text>'
    return "\n".join([*_head(title, WIDTH, 76.0), say, "</svg>"])


def stacked(found: Sequence[str]) -> str:
    """Plots below each other, as one."""
    sizes = [re.search(r'viewBox="0 0 (\d+) (\d+)"', svg) for svg in found]
    heights = [int(size.group(2)) if size else 0 for size in sizes]
    wide = max((int(size.group(1)) for size in sizes if size), default=0)
    places = [sum(heights[:index]) for index in range(len(found))]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {sum(heights)}" width="{wide}" role="img" '
        'style="max-width:100%;height:auto">'
    )
    inner = [
        svg.replace("<svg ", f'<svg y="{place}" height="{height}" ', 1).replace("height:auto", "", 1)
        for svg, place, height in zip(found, places, heights, strict=True)
    ]
    return "\n".join([head, *inner, "</svg>"])


def alone(svg: str) -> str:
    """A plot as a file of its own: dark ink on a white ground, or the other way round where the reader likes dark."""
    style = (
        "<style>svg{color:#1c1c1c;background:#fff}"
        "@media(prefers-color-scheme:dark){svg{color:#e8e8e8;background:#16181c}}</style>"
    )
    return svg.replace(">", f">{style}", 1) + "\n"


# -- numbers --------------------------------------------------------------------------------------


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, evenly apart, from at most `low` to at least `high`; two or more."""
    if high <= low:
        low, high = (low - abs(low) / 2 or 0.0), (high + abs(high) / 2 or 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range(values: Sequence[float], most: float) -> list[float]:
    found = ticks(min(values), max(values))
    within = [value for value in found if value <= most]
    return within if len(within) > 1 and within[-1] >= max(values) else found


def short(value: float) -> str:
    """A number with no more digits than a label needs."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _finite(line: Line) -> Line:
    good = [i for i, (a, b) in enumerate(zip(line.x, line.y, strict=True)) if math.isfinite(a) and math.isfinite(b)]
    kept = [[values[i] for i in good] for values in (line.x, line.y)]
    band = [[values[i] for i in good] if values else [] for values in (line.low, line.high)]
    return Line(line.name, *kept, *band)


def _pairs(line: Line) -> list[tuple[float, float]]:
    return list(zip(line.x, line.y, strict=True))


def _at(value: float, scale: Sequence[float], start: float, end: float) -> float:
    return start + (value - scale[0]) / (scale[-1] - scale[0]) * (end - start)


# -- pieces ---------------------------------------------------------------------------------------


def _head(title: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{escape(title, quote=True)}" style="max-width:100%;height:auto" {FONT}>',
        f'<text x="12" y="18" font-size="13" font-weight="600">{escape(title)}</text>',
    ]


def _axes(xs: Sequence[float], ys: Sequence[float], x: str, y: str, top: float, floor: float) -> list[str]:
    out = _floor(xs, x, LEFT, top, floor, WIDTH - RIGHT)
    for value in ys:
        at = _at(value, ys, floor, top)
        out.append(f'<path d="M{LEFT:.0f} {at:.1f}H{WIDTH - RIGHT:.0f}" stroke="currentColor" stroke-opacity="0.14"/>')
        out.append(f'<text x="{LEFT - 6:.0f}" y="{at + 4:.1f}" text-anchor="end">{short(value)}</text>')
    middle = (top + floor) / 2
    turn = f'transform="rotate(-90 14 {middle:.0f})"'
    out.append(f'<text x="14" y="{middle:.0f}" text-anchor="middle" {turn}>{escape(y)}</text>')
    return out


def _floor(xs: Sequence[float], label: str, left: float, top: float, floor: float, right: float) -> list[str]:
    """The axis below, its numbers and the strokes above them."""
    out = []
    for value in xs:
        at = _at(value, xs, left, right)
        out.append(f'<path d="M{at:.1f} {top:.1f}V{floor:.1f}" stroke="currentColor" stroke-opacity="0.14"/>')
        out.append(f'<text x="{at:.1f}" y="{floor + 15:.1f}" text-anchor="middle">{short(value)}</text>')
    middle = (left + right) / 2
    out.append(f'<text x="{middle:.0f}" y="{floor + 33:.1f}" text-anchor="middle">{escape(label)}</text>')
    return out


def _wrapped(names: Sequence[str]) -> list[list[int]]:
    """The legend's entries by their numbers, as many in a line as fit."""
    rows: list[list[int]] = []
    room = 0.0
    for number, name in enumerate(names):
        wide = 34 + LETTER * len(name)
        if not rows or wide > room:
            rows.append([])
            room = WIDTH - 24
        rows[-1].append(number)
        room -= wide
    return rows


def _keys(rows: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    out = []
    for line, row in enumerate(rows):
        at, down = 12.0, TOP + LINE * line + 5
        for number in row:
            ink = COLOURS[number % len(COLOURS)]
            dash = DASHES[number // len(COLOURS) % len(DASHES)]
            dashed = f' stroke-dasharray="{dash}"' if dash else ""
            out.append(f'<path d="M{at:.0f} {down:.0f}h18" stroke="{ink}" stroke-width="3"{dashed}/>')
            out.append(f'<text x="{at + 22:.0f}" y="{down + 4:.0f}">{escape(names[number])}</text>')
            at += 34 + LETTER * len(names[number])
    return out


def _dot(place: str, ink: str, tip: str, radius: float = 2.4) -> str:
    x, y = place.split(",")
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{ink}"><title>{escape(tip)}</title></circle>'


def _cut(name: str, most: int = 26) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
