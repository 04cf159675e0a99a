"""Plots are well-formed pictures of what they were given."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from fedquilt.tools.report import plots
from fedquilt.tools.report.plots import DotRow, PlotBar, PlotLine, render_svg

pytest.importorskip("matplotlib", reason="plots are drawn by matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
FIRST, SECOND = plots.COLOURS[:2]


def texts(picture: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def tips(picture: str) -> list[str]:
    return [str(each.text) for each in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def shapes(picture: str, style: str) -> list[list[tuple[float, float]]]:
    paths = (path for path in ElementTree.fromstring(picture).iter(f"{SVG}path") if style in path.get("style", ""))
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d", ""))] for path in paths
    ]


def width(shape: list[tuple[float, float]]) -> float:
    across = [x for x, _ in shape]
    return max(across) - min(across)


def test_a_line_goes_through_its_points() -> None:
    """(0, 0) lies at the axis's lower left, (10, 100) at its upper right, the middle between them."""
    drawn = render_svg(plots.plot_lines([PlotLine("a", [0, 5, 10], [0, 50, 100])], "Title", "x", "y"))
    (line,) = [shape for shape in shapes(drawn, f"stroke: {FIRST}; stroke-width: 1.8") if len(shape) == 3]
    (left, below), (middle, half), (right, above) = line
    assert (left, right) == (plots.LEFT, plots.WIDTH - plots.RIGHT)
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert (half, below - above) == (pytest.approx((below + above) / 2, abs=0.1), pytest.approx(plots.BODY, abs=0.1))
    assert {"Title", "x", "y", "a", "0", "100"} <= set(texts(drawn))


def test_a_band_lies_around_its_line() -> None:
    plot = plots.plot_lines([PlotLine("a", [0, 1], [50, 50], [40, 40], [60, 60])], "t", "x", "y", max_value=100.0)
    (band,) = shapes(render_svg(plot), f"fill: {FIRST}; opacity: 0.16")
    (line,) = shapes(render_svg(plot), f"stroke: {FIRST}; stroke-width: 1.8")
    heights = {y for _, y in band}
    assert min(heights) < line[0][1] < max(heights)


def test_values_that_are_no_numbers_are_left_out() -> None:
    """They are not drawn at 0, and nothing of them is in the picture."""
    drawn = render_svg(plots.plot_lines([PlotLine("a", [0, 1, 2], [1.0, math.nan, 3.0])], "t", "x", "y"))
    assert [len(shape) for shape in shapes(drawn, "stroke-width: 1.8")] == [2]
    assert "nan" not in drawn
    assert tips(drawn) == ["a: 1 at 0", "a: 3 at 2"]


def test_one_point_is_a_dot_and_no_line() -> None:
    drawn = render_svg(plots.plot_lines([PlotLine("a", [3], [4])], "t", "x", "y"))
    assert shapes(drawn, "stroke-width: 1.8") == []
    assert tips(drawn) == ["a: 4 at 3"]


def test_nothing_to_show_says_so() -> None:
    for plot in (
        plots.plot_lines([], "t", "x", "y"),
        plots.plot_bars([PlotBar("a", [None])], "t", "x"),
        plots.plot_dots([DotRow("a", [])], "t", "x"),
    ):
        assert "unknown for this run" in texts(render_svg(plot))


def test_a_sum_of_zero_is_known() -> None:
    drawn = render_svg(plots.plot_bars([PlotBar("a", [0.0]), PlotBar("b", [0.0])], "t", "%"))
    assert texts(drawn).count("0") >= 2
    assert "unknown for this run" not in texts(drawn)


def test_bars_are_as_long_as_their_parts_and_the_unknown_has_none() -> None:
    drawn = render_svg(
        plots.plot_bars([PlotBar("a", [3.0, 1.0]), PlotBar("b", [None, None])], "t", "J", ("idle", "work"))
    )
    three, nothing = (width(shape) for shape in shapes(drawn, f"fill: {FIRST}"))
    one, _ = (width(shape) for shape in shapes(drawn, f"fill: {SECOND}"))
    assert three == pytest.approx(3 * one, abs=0.2)
    assert nothing == 0
    assert {"unknown", "4", "idle", "work"} <= set(texts(drawn))
    assert "a, idle: 3" in tips(drawn)
    assert "b, idle: unknown" in tips(drawn)


def test_dots_have_a_figure_and_a_stroke_at_their_mean() -> None:
    drawn = render_svg(plots.plot_dots([DotRow("a", [1.0, 2.0, 6.0])], "t", "x"))
    assert tips(drawn) == ["a: 1", "a: 2", "a: 6"]
    assert len(shapes(drawn, f"stroke: {FIRST}; stroke-width: 2")) == 1
    assert "3" in texts(drawn)


def test_an_axis_of_per_cent_ends_at_100() -> None:
    """Of a single value of 96 the ticks would go on; where values lie above, they do."""
    one = plots.plot_lines([PlotLine("", [1], [96])], "t", "x", "y", max_value=100.0)
    assert "120" not in texts(render_svg(one))
    above = plots.plot_lines([PlotLine("", [1, 2], [0, 110])], "t", "x", "y", max_value=100.0)
    assert "125" in texts(render_svg(above))
    dots = [plots.plot_dots([DotRow("a", [70.13])], "t", "%", max_value=most) for most in (100.0, math.inf)]
    assert ["120" in texts(render_svg(each)) for each in dots] == [False, True]


def test_names_are_text_and_nothing_else() -> None:
    for name in (
        '"><script>alert(1)</script>',
        "$x^2$ $",
        'a style="font-family: b',
        '<g id="tip0">',
        "font: 9px x",
        "<!-- y -->",
    ):
        for plot in (
            plots.plot_lines([PlotLine(name, [1], [1])], name, name, name),
            plots.plot_bars([PlotBar(name, [1.0])], name, name, (name,)),
            plots.plot_dots([DotRow(name, [1.0])], name, name),
        ):
            drawn = render_svg(plot)
            assert not [each for each in ElementTree.fromstring(drawn).iter() if "script" in each.tag]
            assert any(text.startswith(name[:20]) for text in texts(drawn))
            assert any(tip.startswith(name) for tip in tips(drawn))


def test_a_picture_takes_its_ink_from_the_page_and_tells_what_it_shows() -> None:
    plot = plots.plot_lines([PlotLine("a", [0, 1], [0, 72.5])], "Accuracy", "rounds", "%")
    drawn = render_svg(plot)
    assert "currentColor" in drawn
    assert not re.search("#000000|#ffffff|DejaVu", drawn)
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == "Accuracy; % over rounds; a ends at 72.5"
    assert root.get("role") == "img"
    assert set(re.findall(r"https?://[^\"'<> ]+", drawn)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert render_svg(plot) == drawn


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (3.0, 17.0, [0, 5, 10, 15, 20]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
        (5.0, 5.0, [2, 3, 4, 5, 6, 7, 8]),
        (0.0, 0.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert plots.choose_ticks(low, high) == pytest.approx(expected)


def test_rounds_are_counted_in_whole_numbers() -> None:
    assert (
        "0.5"
        not in texts(render_svg(plots.plot_lines([PlotLine("a", [0, 1, 2], [0, 1, 2.5])], "t", "rounds", "y")))[:5]
    )


def test_numbers_have_no_more_digits_than_a_label_needs() -> None:
    assert (plots.format_number(1234.5), plots.format_number(0.123456)) == ("1234", "0.1235")
