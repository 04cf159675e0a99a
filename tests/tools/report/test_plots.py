"""Plots are well-formed pictures that show what they were given."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from fedquilt.tools.report import plots

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in parsed(svg).iter(f"{SVG}text")]


def corners(shape: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, each.split(","))) for each in shape.attrib["points"].split()]


def test_a_line_goes_through_its_points() -> None:
    """Ends on the ticks lie on the frame: (0, 0) at the left below, (10, 100) at the right above."""
    svg = plots.lines([plots.Line("a", [0, 5, 10], [0, 50, 100])], "Title", "x", "y")
    (line,) = parsed(svg).iter(f"{SVG}polyline")
    (left, below), (middle, half), (right, above) = corners(line)
    assert (left, right) == (plots.LEFT, plots.WIDTH - plots.RIGHT)
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((below + above) / 2, abs=0.1)
    assert below > above
    assert {"Title", "x", "y", "a", "0", "100"} <= set(texts(svg))


def test_a_band_lies_around_its_line() -> None:
    """Up along the upper edge and back along the lower one."""
    line = plots.Line("a", [0, 1], [50, 50], [40, 40], [60, 60])
    (band,) = parsed(plots.lines([line], "t", "x", "y")).iter(f"{SVG}polygon")
    heights = [y for _, y in corners(band)]
    assert heights[0] == heights[1] < heights[2] == heights[3]


def test_values_that_are_no_numbers_are_left_out() -> None:
    """Not drawn at 0, and nothing of them is in the picture."""
    svg = plots.lines([plots.Line("a", [0, 1, 2], [1.0, math.nan, 3.0])], "t", "x", "y")
    (line,) = parsed(svg).iter(f"{SVG}polyline")
    assert len(corners(line)) == 2
    assert "nan" not in svg


def test_one_point_is_a_dot_and_no_line() -> None:
    """With its numbers when pointed at."""
    svg = plots.lines([plots.Line("a", [3], [4])], "t", "x", "y")
    assert not list(parsed(svg).iter(f"{SVG}polyline"))
    assert "a: 4 at 3" in svg


def test_nothing_to_show_says_so() -> None:
    """No lines, bars that are all unknown, no dots."""
    for svg in (
        plots.lines([], "t", "x", "y"),
        plots.bars([plots.Bar("a", [None])], "t", "x"),
        plots.dots([plots.Dots("a", [])], "t", "x"),
    ):
        assert "not known of this run" in texts(svg)


def test_bars_are_as_long_as_their_parts_and_the_unknown_has_none() -> None:
    """Three to one; a device without a meter has no bar but words."""
    svg = plots.bars([plots.Bar("a", [3.0, 1.0]), plots.Bar("b", [None, None])], "t", "J", ("idle", "work"))
    widths = [float(rect.attrib["width"]) for rect in parsed(svg).iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert widths[2:] == [0.0, 0.0]
    assert "not known" in texts(svg)
    assert "a, idle: 3" in svg


def test_dots_have_a_stroke_at_their_mean() -> None:
    """And the mean in figures."""
    svg = plots.dots([plots.Dots("a", [1.0, 2.0, 6.0])], "t", "x")
    assert len(list(parsed(svg).iter(f"{SVG}circle"))) == 3
    assert "3" in texts(svg)


def test_an_axis_of_percent_ends_at_a_hundred() -> None:
    """One seed alone has its axis around it, of dots as of lines."""
    alone = plots.dots([plots.Dots("a", [70.13])], "Title", "%", most=100.0)
    assert ">100<" in alone or ">80<" in alone
    assert ">120<" not in alone
    assert ">120<" in plots.dots([plots.Dots("a", [70.13])], "Title", "s")


def test_names_cannot_break_out_of_the_picture() -> None:
    """Angle brackets and quotes are text."""
    name = '"><script>alert(1)</script>'
    for svg in (
        plots.lines([plots.Line(name, [1], [1])], name, name, name),
        plots.bars([plots.Bar(name, [1.0])], name, name, (name,)),
        plots.dots([plots.Dots(name, [1.0])], name, name),
    ):
        assert not [each for each in parsed(svg).iter() if "script" in each.tag]


def test_a_picture_alone_is_a_file_with_a_ground_of_its_own() -> None:
    """Well-formed, and the same picture."""
    svg = plots.lines([plots.Line("a", [0, 1], [0, 1])], "t", "x", "y")
    file = plots.alone(svg)
    assert "prefers-color-scheme" in file
    assert len(list(parsed(file).iter(f"{SVG}polyline"))) == 1


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
    """A single value gets room on both sides."""
    assert plots.ticks(low, high) == pytest.approx(expected)


def test_an_axis_of_per_cent_ends_at_100() -> None:
    """Of one value of 96 the ticks would go on; where values are above, they do."""
    assert "120" not in texts(plots.lines([plots.Line("", [1], [96])], "t", "x", "y", most=100.0))
    assert "125" in texts(plots.lines([plots.Line("", [1, 2], [0, 110])], "t", "x", "y", most=100.0))


def test_numbers_have_no_more_digits_than_a_label_needs() -> None:
    """Four at most."""
    assert (plots.short(1234.5), plots.short(0.123456)) == ("1234", "0.1235")


def test_plots_are_stacked_below_each_other() -> None:
    """As high as all together, the second where the first ends; what is drawn is the same."""
    found = [plots.lines([plots.Line("a", [1], [2])], "one", "x", "y"), plots.empty("two")]
    root = ElementTree.fromstring(plots.stacked(found))
    heights = [float(ElementTree.fromstring(svg).attrib["viewBox"].split()[3]) for svg in found]
    assert root.attrib["viewBox"].split()[3] == f"{sum(heights):.0f}"
    assert [float(each.attrib["y"]) for each in root] == [0, heights[0]]
    assert {"one", "two"} <= set(texts(plots.stacked(found)))


def test_a_line_of_one_point_is_a_larger_dot() -> None:
    """So that it is seen among lines."""
    drawn = plots.lines([plots.Line("a", [1], [2]), plots.Line("b", [1, 2], [2, 3])], "t", "x", "y")
    assert sorted(each.attrib["r"] for each in ElementTree.fromstring(drawn).iter() if "r" in each.attrib) == [
        "2.4",
        "2.4",
        "5.0",
    ]
