"""Plots in one style, drawn by matplotlib as SVG text.

A plot takes its colour from the surrounding text (`currentColor`), so that one picture suits light and dark pages.
`render_file` adds a background. Text stays text, so it is searchable and accessible. matplotlib (the extra `report`)
is imported when a plot is rendered.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, Final, TypeAlias

from fedquilt.core import JobError
from fedquilt.formats import toml

# Okabe and Ito's palette for colour-blind readers, with a grey in place of black.
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a", "#f0e442")
DASHES: Final = ("-", (0, (6, 3)), (0, (2, 3)), (0, (8, 3, 2, 3)))  # the next style when all colours are used
INK: Final = "#010203"  # placeholder for the colour of the text around the picture
WIDTH, BODY = 390.0, 215.0  # pixels: width of a plot, height of an axis
LEFT, RIGHT, BOTTOM, TITLE = 52.0, 14.0, 44.0, 28.0
LETTER_WIDTH, LINE_HEIGHT = 6.2, 17.0  # pixels: an average letter's width, a line's height
MAX_NUMBERED_CLASSES = 12  # classes of a confusion matrix whose cells hold numbers
MAX_DOTS = 40  # points of a line that get a dot and a tooltip
FONTS: Final = "system-ui, sans-serif"

Axis: TypeAlias = Any  # an axis of matplotlib
AddTooltip: TypeAlias = Callable[[Any, str], None]  # adds a tooltip to an artist


@dataclass(frozen=True)
class PlotLine:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class PlotBar:
    """Bar of a plot, with a value per part. None means unknown."""

    name: str
    parts: Sequence[float | None]


@dataclass(frozen=True)
class DotRow:
    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Plot:
    """Plot that is not rendered yet. `draw` receives an axis and a function that adds tooltips."""

    title: str
    summary: str  # the plot in words, for readers who cannot see the plot
    draw: Callable[[Any, AddTooltip], None]
    body: float  # pixels: the axis's height
    left: float = LEFT  # pixels to the left of the axis
    right: float = RIGHT
    keys: tuple[str, ...] = ()  # entries of the legend, in the order of the colours
    below: float = 0.0  # pixels below the axis for long names, besides BOTTOM

    @property
    def height(self) -> float:
        legend = LINE_HEIGHT * len(_wrap_legend(self.keys)) + 6
        return TITLE + legend + self.body + (BOTTOM if self.body else 0) + self.below


def plot_lines(
    lines: Sequence[PlotLine], title: str, x: str, y: str, *, level: float | None = None, max_value: float = math.inf
) -> Plot:
    """Return a plot of lines over common axes. Points that are not finite are left out.

    `level` is the y of a dotted line, and `max_value` the end of the y axis, unless a value is larger.
    """
    lines = [_drop_infinite_points(line) for line in lines]
    xs = [value for line in lines for value in line.x]
    ys = [value for line in lines for values in (line.y, line.low, line.high) for value in values]
    if not xs:
        return make_empty_plot(title)

    def draw(axis: Any, add_tooltip: AddTooltip) -> None:
        for number, line in enumerate(lines):
            style = _line_style(number)
            ink = style["color"]
            if line.low and line.high:
                outline = [*line.x, *reversed(line.x)], [*line.low, *reversed(line.high)]
                axis.fill(*outline, facecolor=ink, alpha=0.16)
            if len(line.x) > 1:
                axis.plot(line.x, line.y, linewidth=1.8, **style)
            for a, b in zip(line.x, line.y, strict=True) if len(line.x) <= MAX_DOTS else ():
                (dot,) = axis.plot([a], [b], "o", color=ink, markersize=4.5 if len(line.x) > 1 else 9, clip_on=False)
                add_tooltip(dot, f"{line.name + ': ' if line.name else ''}{format_number(b)} at {format_number(a)}")
        if level is not None:
            axis.axhline(level, color=INK, alpha=0.6, linewidth=1, linestyle=":")
        integer = all(float(value).is_integer() for value in xs)
        _set_ticks(axis.xaxis, choose_ticks(min([0.0, *xs]), max(xs), integer=integer), max(xs))
        _set_ticks(axis.yaxis, _choose_axis_ticks([*ys, *([] if level is None else [level])], max_value))
        axis.set_xlabel(x)
        axis.set_ylabel(y)

    ends = [f"{line.name + ' ' if line.name else ''}ends at {format_number(line.y[-1])}" for line in lines if line.y]
    return Plot(
        title,
        f"{title}; {y} over {x}; {', '.join(ends)}",
        draw,
        BODY,
        keys=tuple(line.name for line in lines if line.name),
    )


def plot_bars(bars: Sequence[PlotBar], title: str, x: str, parts: Sequence[str] = ("",)) -> Plot:
    """Return a plot of horizontal bars, divided into parts and labelled with their sums."""
    sums = [sum(part or 0.0 for part in bar.parts) for bar in bars]
    if not any(part is not None and math.isfinite(part) for bar in bars for part in bar.parts):
        return make_empty_plot(title)
    totals = [
        "unknown" if all(part is None for part in bar.parts) else format_number(total)
        for bar, total in zip(bars, sums, strict=True)
    ]

    def draw(axis: Any, add_tooltip: AddTooltip) -> None:
        for row, (bar, total) in enumerate(zip(bars, totals, strict=True)):
            start = 0.0
            for number, part in enumerate(bar.parts):
                (rect,) = axis.barh(row, part or 0.0, left=start, height=0.76, color=COLOURS[number % len(COLOURS)])
                part_name = f", {parts[number]}" if parts[number] else ""
                add_tooltip(rect, f"{bar.name}{part_name}: {'unknown' if part is None else format_number(part)}")
                start += part or 0.0
            axis.annotate(total, (start, row), (4, 0), textcoords="offset points", va="center", annotation_clip=False)
        _label_rows(axis, [bar.name for bar in bars])
        _set_ticks(axis.xaxis, _choose_axis_ticks([0.0, *sums], math.inf))
        axis.set_xlabel(x)

    summary = ", ".join(f"{bar.name} {words}" for bar, words in zip(bars, totals, strict=True))
    left_px, right_px = _compute_label_width(bars), RIGHT + LETTER_WIDTH * max(map(len, totals))
    body, keys = LINE_HEIGHT * len(bars) + 4, tuple(filter(None, parts))
    return Plot(title, f"{title}; {x}; {summary}", draw, body, left_px, right_px, keys)


def plot_dots(rows: Sequence[DotRow], title: str, x: str, *, max_value: float = math.inf) -> Plot:
    """Return a plot with a row of dots per name, and a stroke at their mean.

    `max_value` is the end of the x axis, unless a value is larger.
    """
    values = [value for row in rows for value in row.values]
    if not values:
        return make_empty_plot(title)
    means = [sum(row.values) / len(row.values) if row.values else None for row in rows]

    def draw(axis: Any, add_tooltip: AddTooltip) -> None:
        for number, (row, mean) in enumerate(zip(rows, means, strict=True)):
            ink = COLOURS[number % len(COLOURS)]
            for value in row.values:
                (dot,) = axis.plot([value], [number], "o", color=ink, markersize=7, clip_on=False)
                add_tooltip(dot, f"{row.name}: {format_number(value)}")
            if mean is not None:
                axis.plot([mean, mean], [number - 0.36, number + 0.36], color=ink, linewidth=2)
                transform = axis.get_yaxis_transform()
                axis.text(1.02, number, format_number(mean), transform=transform, va="center")
        _label_rows(axis, [row.name for row in rows])
        _set_ticks(axis.xaxis, _choose_axis_ticks(values, max_value))
        axis.set_xlabel(x)

    pairs = zip(rows, means, strict=True)
    summary = ", ".join(
        f"{row.name} {'unknown' if mean is None else format_number(mean)} on average" for row, mean in pairs
    )
    body = LINE_HEIGHT * 1.3 * len(rows) + 4
    return Plot(title, f"{title}; {x}; {summary}", draw, body, _compute_label_width(rows), RIGHT + 44)


def plot_matrix(counts: Sequence[Sequence[int]], names: Sequence[str], title: str) -> Plot:
    """Return a plot of a confusion matrix, with a row per true class. Opacity is the share of the row."""
    count, side = len(names), WIDTH - _compute_label_width([PlotBar(name, ()) for name in names]) - RIGHT

    def draw(axis: Any, add_tooltip: AddTooltip) -> None:
        from matplotlib.patches import Rectangle

        for row, values in enumerate(counts):
            row_total = sum(values) or 1
            for column, value in enumerate(values):
                cell = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=COLOURS[0], alpha=0.9 * value / row_total)
                axis.add_patch(cell)
                add_tooltip(cell, f"{names[row]}, predicted {names[column]}: {value} of {sum(values)}")
                if value and count <= MAX_NUMBERED_CLASSES:
                    ink = "#ffffff" if value > row_total / 2 else INK
                    axis.text(column, row, str(value), ha="center", va="center", color=ink)
        axis.set_xlim(-0.5, count - 0.5)
        _label_rows(axis, names)
        axis.set_xticks(range(count), [_shorten_name(name) for name in names], rotation=90 if count > 4 else 0)
        axis.grid(False)
        axis.set_xlabel("predicted")

    correct = sum(values[row] for row, values in enumerate(counts))
    summary = f"{title}: {correct} of {sum(map(sum, counts))} examples are classified correctly"
    body = min(side, LINE_HEIGHT * 1.5 * count)
    below = LETTER_WIDTH * max(len(_shorten_name(name)) for name in names) if count > 4 else 0.0
    return Plot(title, summary, draw, body, WIDTH - RIGHT - side, below=below)


def make_empty_plot(title: str) -> Plot:
    def draw(axis: Any, add_tooltip: AddTooltip) -> None:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "unknown for this run", transform=axis.transAxes, ha="center", alpha=0.7)

    return Plot(title, f"{title}: unknown for this run", draw, 30.0)


def render_svg(*plots: Plot) -> str:
    heights = [plot.height for plot in plots]

    def draw(figure: Any, add_tooltip: AddTooltip) -> None:
        for plot, offset in zip(plots, accumulate(heights, initial=0.0), strict=False):
            _draw_plot(figure, plot, offset, sum(heights), add_tooltip)

    return _render_svg_element(WIDTH, sum(heights), "; ".join(plot.summary for plot in plots), draw)


def draw_on_axes(plot: Plot, axes: Any = None) -> Any:
    """Draw a plot on matplotlib's axes, by default those of a new figure, and return the axes."""
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    with make_plot_style(plot.title):
        if axes is None:
            axes = pyplot.subplots(layout="constrained")[1]
        plot.draw(axes, lambda artist, text: None)
        axes.set_title(plot.title)
        keys = [Line2D([], [], label=name, **_line_style(number)) for number, name in enumerate(plot.keys)]
        if keys:
            axes.legend(handles=keys, frameon=False)
    return axes


def choose_plot(plots: Mapping[str, Plot], x: str) -> Plot:
    if not plots:
        raise JobError("the run has fewer than two evaluations to plot: set [check] every = 1")
    if x not in plots:
        raise JobError(f"there is no plot over {x!r}{toml.describe_choices(x, plots)}")
    return plots[x]


def _line_style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


@dataclass(frozen=True)
class Picture:
    """Picture without axes that is not rendered yet, in pixels from the upper left."""

    width: float
    height: float
    summary: str  # for readers who cannot see the picture
    draw: Callable[[Any, AddTooltip], None]


def draw_picture(picture: Picture) -> Any:
    """Draw a picture on the axes of a new figure of matplotlib, and return the axes."""
    from matplotlib import pyplot

    with make_plot_style(picture.summary):
        figure = pyplot.figure(figsize=(picture.width / 72, picture.height / 72))
        return _fill_with_picture(figure, picture, lambda artist, text: None)


def _fill_with_picture(figure: Any, picture: Picture, add_tooltip: AddTooltip) -> Any:
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()
    picture.draw(axes, add_tooltip)
    return axes


def render_picture(picture: Picture) -> str:
    return _render_svg_element(
        picture.width, picture.height, picture.summary, lambda figure, tip: _fill_with_picture(figure, picture, tip)
    )


def render_file(*plots: Plot) -> str:
    return add_background(render_svg(*plots))


def add_background(picture: str) -> str:
    style = (
        "<style>svg{color:#1c1c1c;background:#fff}"
        "@media(prefers-color-scheme:dark){svg{color:#e8e8e8;background:#16181c}}</style>"
    )
    return picture.replace(">", f">{style}", 1) + "\n"


def _render_svg_element(width: float, height: float, summary: str, draw: Callable[[Any, AddTooltip], None]) -> str:
    file, tips = io.BytesIO(), dict[str, str]()

    def tip(artist: Any, text: str) -> None:
        artist.set_gid(f"tip{len(tips)}")
        tips[artist.get_gid()] = text

    with make_plot_style(summary):
        from matplotlib.figure import Figure

        canvas = Figure((width / 72, height / 72), facecolor="none")
        draw(canvas, tip)
        canvas.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue().decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", text).replace(" <", "<")
    used_ids = {*re.findall(r'(?:href="|url\()#([^")]+)', text), *tips}
    text = re.sub(r"<[a-zA-Z][^<>]*>", lambda found: _clean_tag(found[0], used_ids), text)
    text = re.sub(r"<g/>|<defs></defs>", "", text)
    text = re.sub(r'<g id="(tip\d+)">', lambda found: f"<g><title>{escape(tips[found[1]])}</title>", text)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(summary)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="max-width:100%;height:auto">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)


def _clean_tag(tag: str, used_ids: set[str]) -> str:
    # replaces colours and fonts, and removes unused ids
    tag = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used_ids else "", tag)
    tag = re.sub(r"(font-family: |font: [^;\"]*px )[^;\"]*", lambda found: found[1] + FONTS, tag)
    return tag.replace(INK, "currentColor")


@contextmanager
def make_plot_style(salt: str) -> Iterator[None]:
    """Set the style of all plots in the context. The same `salt` and content give the same bytes of SVG."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # matplotlib logs the creation of its font cache
    import matplotlib

    inked = {f"{name}.color": INK for name in ("text", "xtick", "ytick", "grid")}
    sizes = {f"{name}.labelsize": 11 for name in ("xtick", "ytick", "axes")} | {"font.size": 11}
    axes_style = {"axes.labelcolor": INK, "axes.axisbelow": True, "axes.grid": True, "grid.alpha": 0.14}
    spines = {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}
    tick_sizes = {f"{name}.{key}": 0 for name in ("xtick", "ytick") for key in ("major.size", "minor.size")}
    text = {
        "grid.linewidth": 1,
        "axes.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(inked | sizes | axes_style | spines | tick_sizes | text), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has the letters of an SVG
        yield


def _draw_plot(figure: Any, plot: Plot, offset: float, height: float, add_tooltip: AddTooltip) -> None:
    from matplotlib.lines import Line2D

    def from_top(pixels: float) -> float:
        return 1 - (offset + pixels) / height

    figure.text(12 / WIDTH, from_top(18), plot.title, size=13, weight=600)
    rows = _wrap_legend(plot.keys)
    for row, numbers in enumerate(rows):
        x = 12.0
        for number in numbers:
            y = from_top(TITLE + LINE_HEIGHT * row + 5)
            figure.add_artist(Line2D([x / WIDTH, (x + 18) / WIDTH], [y, y], linewidth=3, **_line_style(number)))
            figure.text((x + 22) / WIDTH, y, plot.keys[number], va="center")
            x += 36 + LETTER_WIDTH * len(plot.keys[number])
    top = TITLE + LINE_HEIGHT * len(rows) + 6
    axis = figure.add_axes(
        (plot.left / WIDTH, from_top(top + plot.body), 1 - (plot.left + plot.right) / WIDTH, plot.body / height)
    )
    plot.draw(axis, add_tooltip)


def choose_ticks(low: float, high: float, *, integer: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    if high <= low:
        low, high = (low - abs(low) / 2 or 0.0), (high + abs(high) / 2 or 1.0)
    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer).tick_values(low, high)
    return [float(value) for value in ticks]


def format_number(value: float) -> str:
    """Return a number with four digits, or from 1000 on without decimals."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _choose_axis_ticks(values: Sequence[float], max_value: float) -> list[float]:
    ticks = choose_ticks(min(values), max(values))
    ticks_within = [value for value in ticks if value <= max_value]
    return ticks_within if len(ticks_within) > 1 and ticks_within[-1] >= max(values) else ticks


def _set_ticks(axis: Any, ticks: Sequence[float], end: float | None = None) -> None:
    limit = ticks[-1] if end is None or end <= ticks[0] else end
    axis.set_ticks(
        [tick for tick in ticks if tick <= limit], labels=[format_number(tick) for tick in ticks if tick <= limit]
    )
    axis.axes.set(**{f"{axis.axis_name}lim": (ticks[0], limit)})


def _label_rows(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [_shorten_name(name) for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(False, axis="y")


def _compute_label_width(rows: Sequence[PlotBar | DotRow]) -> float:
    return 18 + LETTER_WIDTH * max(len(_shorten_name(row.name)) for row in rows)


def _drop_infinite_points(line: PlotLine) -> PlotLine:
    finite = [i for i, (a, b) in enumerate(zip(line.x, line.y, strict=True)) if math.isfinite(a) and math.isfinite(b)]
    points = [[values[i] for i in finite] for values in (line.x, line.y)]
    band = [[values[i] for i in finite] if values else [] for values in (line.low, line.high)]
    return PlotLine(line.name, *points, *band)


def _wrap_legend(names: Sequence[str]) -> list[list[int]]:
    rows: list[list[int]] = []
    remaining_width = 0.0
    for number, name in enumerate(names):
        entry_width = 36 + LETTER_WIDTH * len(name)
        if not rows or entry_width > remaining_width:
            rows.append([])
            remaining_width = WIDTH - 24
        rows[-1].append(number)
        remaining_width -= entry_width
    return rows


def _shorten_name(name: str, max_letters: int = 26) -> str:
    return name if len(name) <= max_letters else name[: max_letters - 1] + "…"
