"""Grid of images in one SVG, with column titles and notes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedquilt.tools.report import plots

CELL, GAP, TOP = 112, 12, 40  # pixels


def render_grid(titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], notes: Sequence[Sequence[str]]) -> str:
    """Render images as a grid in a standalone SVG."""
    step = CELL + GAP

    def draw(axis: plots.Axis, tip: plots.Tip) -> None:
        for column, title in enumerate(titles):
            middle = GAP + step * column + CELL / 2
            axis.text(middle, TOP - 4, _wrap_title(title), ha="center", va="bottom")
            for number, (row, told) in enumerate(zip(rows, notes, strict=True)):
                image, (x, y) = row[column], (GAP + step * column, TOP + (step + 14) * number)
                values = (
                    np.clip(image, 0, 1).reshape(image.shape[:2]) if image.shape[2:] != (3,) else np.clip(image, 0, 1)
                )
                place = (x, x + CELL, y + CELL, y)
                drawn = axis.imshow(values, "gray", vmin=0, vmax=1, extent=place, interpolation="none", aspect="auto")
                tip(drawn, f"{title} {told[column]}".strip())
                axis.text(middle, y + CELL + 12, told[column], ha="center")

    size = GAP + step * len(titles), TOP + (step + 14) * len(rows)
    words = f"{len(rows)} images and what was reconstructed of them: {', '.join(titles)}"
    return plots.add_background(plots.render_picture(plots.Picture(*size, words, draw)))


def _wrap_title(title: str) -> str:
    return title.replace(", ", "\n", 1) if ", " in title else title.replace(": ", "\n", 1)
