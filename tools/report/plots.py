"""Plots in one style, drawn by matplotlib as SVG text: lines with a band, bars, dots, and whatever a caller draws.

A plot takes its ink from the text around it (`currentColor`), so that one picture serves light and dark pages;
`alone` makes a file that brings its own background. Text stays text, so it can be searched and read aloud.
matplotlib (the extra `report`) is imported when a plot is rendered, not before.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, Final, TypeAlias

COLOURS: Final = ("#2f7fc8", "#e07b2e", "#2f9e6e", "#b05fb5", "#b89400", "#d64f5e", "#3fa3b5", "#8a8a8a")
DASHES: Final = ("-", (0, (6, 3)), (0, (2, 3)), (0, (8, 3, 2, 3)))  # once all colours are used
INK: Final = "#010203"  # stands for the colour of the text around the picture
WIDTH, BODY = 390.0, 215.0  # pixels: a plot, and the inside of one with two axes
LEFT, RIGHT, BOTTOM, TITLE = 52.0, 14.0, 44.0, 28.0
LETTER, LINE = 6.2, 17.0  # pixels: an average letter's width, a line's height
MOST_DOTS = 40  # points of a line that get a dot and a tooltip
FONTS: Final = "system-ui, sans-serif"

Axis: TypeAlias = Any  # matplotlib's
Tip: TypeAlias = Callable[[Any, str], None]  # gives an artist a tooltip


@dataclass(frozen=True)
class Line:
    """One line: points by ascending x; `low` and `high` are the band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Bar:
    """One bar with a part for each name of the plot; None: not known."""

    name: str
    parts: Sequence[float | None]


@dataclass(frozen=True)
class Dots:
    """One row of dots, with a stroke at their mean."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Plot:
    """A plot that is not rendered yet: `draw` gets its axis and a function that gives an artist a tooltip."""

    title: str
    summary: str  # the plot in words, for who cannot see it
    draw: Callable[[Any, Tip], None]
    body: float  # pixels: the axis's height
    left: float = LEFT  # pixels to the left of the axis
    right: float = RIGHT
    keys: tuple[str, ...] = ()  # the legend's entries, in the order of the colours

    @property
    def height(self) -> float:
        """Height of the plot in pixels, with title and keys."""
        return TITLE + LINE * len(_wrapped(self.keys)) + 6 + self.body + (BOTTOM if self.body else 0)


# -- kinds of plots -------------------------------------------------------------------------------


def lines(
    found: Sequence[Line], title: str, x: str, y: str, *, level: float | None = None, most: float = math.inf
) -> Plot:
    """Lines over common axes, x from 0; values that are not finite are left out.

    `level` is the height of a dotted horizontal line, `most` the end of the upward axis, unless a value lies above.
    """
    found = [_finite(line) for line in found]
    across = [value for line in found for value in line.x]
    up = [value for line in found for values in (line.y, line.low, line.high) for value in values]
    if not across:
        return empty(title)

    def draw(axis: Any, tip: Tip) -> None:
        for number, line in enumerate(found):
            ink, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
            if line.low and line.high:
                edge = [*line.x, *reversed(line.x)], [*line.low, *reversed(line.high)]
                axis.fill(*edge, facecolor=ink, alpha=0.16)
            if len(line.x) > 1:
                axis.plot(line.x, line.y, color=ink, linewidth=1.8, linestyle=dash)
            for a, b in zip(line.x, line.y, strict=True) if len(line.x) <= MOST_DOTS else ():
                (dot,) = axis.plot([a], [b], "o", color=ink, markersize=4.5 if len(line.x) > 1 else 9, clip_on=False)
                tip(dot, f"{line.name + ': ' if line.name else ''}{short(b)} at {short(a)}")
        if level is not None:
            axis.axhline(level, color=INK, alpha=0.6, linewidth=1, linestyle=":")
        whole = all(float(value).is_integer() for value in across)
        _scaled(axis.xaxis, ticks(min([0.0, *across]), max(across), whole=whole), max(across))
        _scaled(axis.yaxis, _range([*up, *([] if level is None else [level])], most))
        axis.set_xlabel(x)
        axis.set_ylabel(y)

    ends = [f"{line.name + ' ' if line.name else ''}ends at {short(line.y[-1])}" for line in found if line.y]
    return Plot(title, f"{title}; {y} over {x}; {', '.join(ends)}", draw, BODY, keys=_named(found))


def bars(
    found: Sequence[Bar],
    title: str,
    x: str,
    parts: Sequence[str] = ("",),
    *,
    most: float = math.inf,
    level: float | None = None,
    colours: Sequence[str] = (),
) -> Plot:
    """Horizontal bars, their parts end to end, their sums as figures; what is not known says so.

    `most` is the end of the axis across, as in `lines`, `level` the place of a dotted vertical line, and `colours`
    has one for each bar of a single part; () makes all alike.
    """
    sums = [sum(part or 0.0 for part in bar.parts) for bar in found]
    if not found or not any(math.isfinite(total) and total > 0 for total in sums):
        return empty(title)
    told = [_told(bar, total) for bar, total in zip(found, sums, strict=True)]

    def draw(axis: Any, tip: Tip) -> None:
        for row, (bar, words) in enumerate(zip(found, told, strict=True)):
            at = 0.0
            for number, part in enumerate(bar.parts):
                ink = colours[row] if colours else COLOURS[number % len(COLOURS)]
                (rect,) = axis.barh(row, part or 0.0, left=at, height=0.76, color=ink)
                of = f", {parts[number]}" if parts[number] else ""
                tip(rect, f"{bar.name}{of}: {'not known' if part is None else short(part)}")
                at += part or 0.0
            axis.annotate(words, (at, row), (4, 0), textcoords="offset points", va="center", annotation_clip=False)
        if level is not None:
            axis.axvline(level, color=INK, alpha=0.6, linewidth=1, linestyle=":")
        _rows(axis, [bar.name for bar in found])
        _scaled(axis.xaxis, _range([0.0, *sums, *([] if level is None else [level])], most))
        axis.set_xlabel(x)

    listed = ", ".join(f"{bar.name} {words}" for bar, words in zip(found, told, strict=True))
    right = RIGHT + LETTER * max(map(len, told))
    body = LINE * len(found) + 4
    return Plot(title, f"{title}; {x}; {listed}", draw, body, _room(found), right, tuple(filter(None, parts)))


def dots(found: Sequence[Dots], title: str, x: str, *, most: float = math.inf) -> Plot:
    """A row of dots for each name, with a stroke and a figure at their mean. `most`: as of `bars`."""
    values = [value for row in found for value in row.values]
    if not values:
        return empty(title)
    means = [sum(row.values) / len(row.values) if row.values else None for row in found]

    def draw(axis: Any, tip: Tip) -> None:
        for number, (row, mean) in enumerate(zip(found, means, strict=True)):
            ink = COLOURS[number % len(COLOURS)]
            for value in row.values:
                (dot,) = axis.plot([value], [number], "o", color=ink, markersize=7, clip_on=False)
                tip(dot, f"{row.name}: {short(value)}")
            if mean is not None:
                axis.plot([mean, mean], [number - 0.36, number + 0.36], color=ink, linewidth=2)
                beside = axis.get_yaxis_transform()
                axis.text(1.02, number, short(mean), transform=beside, va="center")
        _rows(axis, [row.name for row in found])
        _scaled(axis.xaxis, _range(values, most))
        axis.set_xlabel(x)

    pairs = zip(found, means, strict=True)
    told = ", ".join(f"{row.name} {'not known' if mean is None else short(mean)} on average" for row, mean in pairs)
    return Plot(title, f"{title}; {x}; {told}", draw, LINE * 1.3 * len(found) + 4, _room(found), RIGHT + 44)


def empty(title: str) -> Plot:
    """A plot without data, which says so."""

    def draw(axis: Any, tip: Tip) -> None:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "not known of this run", transform=axis.transAxes, ha="center", alpha=0.7)

    return Plot(title, f"{title}: not known of this run", draw, 30.0)


# -- rendering ------------------------------------------------------------------------------------


def svg(*found: Plot) -> str:
    """Render plots, one below the other, as one SVG element."""
    heights = [plot.height for plot in found]

    def draw(figure: Any, tip: Tip) -> None:
        for plot, offset in zip(found, accumulate(heights, initial=0.0), strict=False):
            _place(figure, plot, offset, sum(heights), tip)

    return _rendered(WIDTH, sum(heights), "; ".join(plot.summary for plot in found), draw)


def picture(width: float, height: float, summary: str, draw: Callable[[Any, Tip], None]) -> str:
    """SVG element of `width` x `height` pixels that is no plot with axes.

    `summary` describes the picture for readers who cannot see it. `draw` is called with an axis in pixels from the
    upper left, without frame or ticks, and a function that gives an artist a tooltip.
    """

    def fill(figure: Any, tip: Tip) -> None:
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set(xlim=(0, width), ylim=(height, 0))
        axis.set_axis_off()
        draw(axis, tip)

    return _rendered(width, height, summary, fill)


def alone(*found: Plot) -> str:
    """Plots as a file: dark ink on white, or the other way round where the reader prefers dark."""
    return with_ground(svg(*found))


def with_ground(picture: str) -> str:
    """An SVG element as a file with a background of its own, light or dark as the reader prefers."""
    style = (
        "<style>svg{color:#1c1c1c;background:#fff}"
        "@media(prefers-color-scheme:dark){svg{color:#e8e8e8;background:#16181c}}</style>"
    )
    return picture.replace(">", f">{style}", 1) + "\n"


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many pixels."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces its font cache
    from matplotlib.figure import Figure

    return Figure((width / 72, height / 72), facecolor="none")


def _rendered(width: float, height: float, summary: str, draw: Callable[[Any, Tip], None]) -> str:
    """SVG element of what `draw` puts on a figure, with a label for screen readers."""
    file, tips = io.BytesIO(), dict[str, str]()

    def tip(artist: Any, text: str) -> None:
        artist.set_gid(f"tip{len(tips)}")
        tips[artist.get_gid()] = text

    with style(summary):
        canvas = figure(width, height)
        draw(canvas, tip)
        canvas.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue().decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", text).replace(" <", "<")
    used = {*re.findall(r'(?:href="|url\()#([^")]+)', text), *tips}
    text = re.sub(r"<[a-zA-Z][^<>]*>", lambda found: _tag(found[0], used), text)
    text = re.sub(r"<g/>|<defs></defs>", "", text)
    text = re.sub(r'<g id="(tip\d+)">', lambda found: f"<g><title>{escape(tips[found[1]])}</title>", text)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(summary)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="max-width:100%;height:auto">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)


def _tag(tag: str, used: set[str]) -> str:
    """An element's tag with the page's ink and fonts in place of matplotlib's, without an id that nothing refers to."""
    tag = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", tag)
    tag = re.sub(r"(font-family: |font: [^;\"]*px )[^;\"]*", lambda found: found[1] + FONTS, tag)
    return tag.replace(INK, "currentColor")


def style(salt: str) -> Any:
    """The one style of everything drawn, as a context; the same `salt` and content give the same bytes of SVG."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    inked = {f"{name}.color": INK for name in ("text", "xtick", "ytick", "grid")}
    sizes = {f"{name}.labelsize": 11 for name in ("xtick", "ytick", "axes")} | {"font.size": 11}
    more = {"axes.labelcolor": INK, "grid.alpha": 0.14, "grid.linewidth": 1, "axes.axisbelow": True, "axes.grid": True}
    spines = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
    marks = {f"{name}.{key}": 0 for name in ("xtick", "ytick") for key in ("major.size", "minor.size")}
    text = {"axes.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": salt, "text.parse_math": False}
    return matplotlib.rc_context(inked | sizes | more | spines | marks | text)


def _place(figure: Any, plot: Plot, offset: float, height: float, tip: Tip) -> None:
    """Put a plot's title, legend and axis so many pixels below the upper edge."""
    from matplotlib.lines import Line2D

    def down(pixels: float) -> float:
        return 1 - (offset + pixels) / height

    figure.text(12 / WIDTH, down(18), plot.title, size=13, weight=600)
    rows = _wrapped(plot.keys)
    for row, numbers in enumerate(rows):
        at = 12.0
        for number in numbers:
            y, ink, dash = down(TITLE + LINE * row + 5), COLOURS[number % len(COLOURS)], DASHES[number // 8 % 4]
            figure.add_artist(Line2D([at / WIDTH, (at + 18) / WIDTH], [y, y], color=ink, linewidth=3, linestyle=dash))
            figure.text((at + 22) / WIDTH, y, plot.keys[number], va="center")
            at += 36 + LETTER * len(plot.keys[number])
    top = TITLE + LINE * len(rows) + 6
    axis = figure.add_axes(
        (plot.left / WIDTH, down(top + plot.body), 1 - (plot.left + plot.right) / WIDTH, plot.body / height)
    )
    plot.draw(axis, tip)


# -- pieces ---------------------------------------------------------------------------------------


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers, evenly apart, from at most `low` to at least `high`; `whole`: integers only."""
    from matplotlib.ticker import MaxNLocator

    if high <= low:
        low, high = (low - abs(low) / 2 or 0.0), (high + abs(high) / 2 or 1.0)
    found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    return [float(value) for value in found]


def short(value: float) -> str:
    """A number with no more digits than a label needs."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _range(values: Sequence[float], most: float) -> list[float]:
    found = ticks(min(values), max(values))
    within = [value for value in found if value <= most]
    return within if len(within) > 1 and within[-1] >= max(values) else found


def _scaled(axis: Any, marks: Sequence[float], end: float | None = None) -> None:
    """Set an axis's numbers; it ends at `end`, or at the last number."""
    last = marks[-1] if end is None or end <= marks[0] else end
    axis.set_ticks([mark for mark in marks if mark <= last], labels=[short(mark) for mark in marks if mark <= last])
    axis.axes.set(**{f"{axis.axis_name}lim": (marks[0], last)})


def _rows(axis: Any, names: Sequence[str]) -> None:
    """Name an axis's rows, the first on top."""
    axis.set_yticks(range(len(names)), [_cut(name) for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(False, axis="y")


def _told(bar: Bar, total: float) -> str:
    return "not known" if all(part is None for part in bar.parts) else short(total)


def _room(rows: Sequence[Bar | Dots]) -> float:
    """Pixels for the longest name."""
    return 18 + LETTER * max(len(_cut(row.name)) for row in rows)


def _named(found: Sequence[Line]) -> tuple[str, ...]:
    return tuple(line.name for line in found if line.name)


def _finite(line: Line) -> Line:
    good = [i for i, (a, b) in enumerate(zip(line.x, line.y, strict=True)) if math.isfinite(a) and math.isfinite(b)]
    kept = [[values[i] for i in good] for values in (line.x, line.y)]
    band = [[values[i] for i in good] if values else [] for values in (line.low, line.high)]
    return Line(line.name, *kept, *band)


def _wrapped(names: Sequence[str]) -> list[list[int]]:
    """The legend's entries by number, as many in a line as fit."""
    rows: list[list[int]] = []
    room = 0.0
    for number, name in enumerate(names):
        wide = 36 + LETTER * len(name)
        if not rows or wide > room:
            rows.append([])
            room = WIDTH - 24
        rows[-1].append(number)
        room -= wide
    return rows


def _cut(name: str, most: int = 26) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
