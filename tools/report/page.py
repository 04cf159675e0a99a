"""Pages of HTML from the templates beside this file: each is one file without script, font or picture from elsewhere.

Values are escaped by the templates; only plots, which are made here, are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedquilt.tools.report.plots import Plot, svg


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()  # columns of sentences: they wrap and start at the left


@dataclass(frozen=True)
class Section:
    """A headed part of a page, in this order; what is empty is left out."""

    before: Sequence[str] = ()  # sentences
    plots: Sequence[Any] = ()  # of `drawn`
    notes: Sequence[str] = ()
    table: Table | None = None


def drawn(*plots: Plot) -> list[Any]:
    """Plots as markup that templates take as it is."""
    return [markup(svg(plot)) for plot in plots]


def markup(picture: str) -> Any:
    """An SVG element that was made here, as what templates do not escape."""
    from markupsafe import Markup

    return Markup(picture)  # noqa: S704  # every text in it is escaped by `plots`


def render(template: str, **values: Any) -> str:
    """A page by its template's name."""
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
