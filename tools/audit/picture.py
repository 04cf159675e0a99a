"""Pictures beside each other in one SVG, each with a title over its column and a note under it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedquilt.tools.report import plots

CELL, GAP, TOP = 112, 12, 40  # pixels


def sheet(titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], notes: Sequence[Sequence[str]]) -> str:
    """The sheet as SVG text, a file of its own.

    Args:
        titles: one for each column.
        rows: images (h, w), (h, w, 1) or (h, w, 3) of 0..1; values beyond are cut off.
        notes: one for each image.
    """
    step = CELL + GAP

    def draw(axis: plots.Axis, tip: plots.Tip) -> None:
        for column, title in enumerate(titles):
            middle = GAP + step * column + CELL / 2
            axis.text(middle, TOP - 4, _wrapped(title), ha="center", va="bottom")
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
    return plots.with_ground(plots.picture(*size, words, draw))


def _wrapped(title: str) -> str:
    """A title in at most two lines."""
    return title.replace(", ", "\n", 1) if ", " in title else title.replace(": ", "\n", 1)
