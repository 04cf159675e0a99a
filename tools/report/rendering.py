"""HTML pages from templates, each a single file without external scripts, fonts or pictures.

Templates escape all values except plots, which are generated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedquilt.tools.report.plots import Plot, render_svg


@dataclass(frozen=True)
class HtmlTable:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[str] = ()  # columns of sentences, which are wrapped and aligned left


@dataclass(frozen=True)
class PageSection:
    introduction: Sequence[str] = ()  # sentences
    plots: Sequence[Any] = ()  # from `render_plots`
    notes: Sequence[str] = ()
    table: HtmlTable | None = None
    switch: Sequence[tuple[str, Any]] = ()  # name and plot of alternatives, of which the page shows one at a time


def render_plots(*plots: Plot) -> list[Any]:
    return [make_safe_markup(render_svg(plot)) for plot in plots]


def make_safe_markup(picture: str) -> Any:
    """Return an SVG element from `plots` as markup that templates do not escape."""
    from markupsafe import Markup

    return Markup(picture)  # noqa: S704  # every text in it is escaped by `plots`


def render_page(template: str, **values: Any) -> str:
    return str(_make_template_environment().get_template(template).render(**values))


@cache
def _make_template_environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
