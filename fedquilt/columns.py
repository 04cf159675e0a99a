"""Tables for a terminal: columns that fit its width, and colour on terminals only.

Output that is no terminal gets 80 columns, a wider terminal up to MOST.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

PLAIN: Final = 80
MOST: Final = 120
GAP: Final = "  "
LEAST: Final = 20  # columns kept for wrapped text, however wide the others are
COLOURS: Final = {"red": "31", "green": "32", "yellow": "33", "dim": "2"}


def width(out: TextIO | None = None) -> int:
    """Number of columns of a line."""
    if not (out or sys.stdout).isatty():
        return PLAIN
    return min(MOST, max(PLAIN, shutil.get_terminal_size((PLAIN, 24)).columns))


def fold(line: str, hang: int | None = None, out: TextIO | None = None) -> list[str]:
    """Break a sentence at the width of a terminal; whole in a file or pipe, where it may be searched for.

    Args:
        line: of any length.
        hang: Columns before each further line; None: two more than stand before the first.
        out: None: standard output.
    """
    if not (out or sys.stdout).isatty():
        return [line]
    wide = max(PLAIN, shutil.get_terminal_size((PLAIN, 24)).columns)
    before = len(line) - len(line.lstrip()) + 2 if hang is None else hang
    whole = textwrap.TextWrapper(wide, subsequent_indent=" " * before, break_on_hyphens=False, break_long_words=False)
    return whole.wrap(line) or [line]


def paint(text: str, colour: str | None, out: TextIO | None = None) -> str:
    """Colour a text with one of COLOURS; unchanged if the output is no terminal, or NO_COLOR is set."""
    if colour is None or not (out or sys.stdout).isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def table(
    rows: Sequence[Sequence[str]], align: str, wide: int | None = None, colours: Mapping[str, str] | None = None
) -> list[str]:
    """Format rows as lines.

    A wrapped last column gets the width that the others leave. A table without one that is too
    wide is split into blocks, one below another, each with the first column.

    Args:
        rows: Cells; every row has as many.
        align: For each column "<" (left), ">" (right) or "~" (left, wrapped; the last one only). A shorter one goes on
            with its last letter.
        wide: Largest width of a line; None: as `width`.
        colours: Colour by the text of a whole cell, on a terminal.
    """
    if not rows:
        return []
    wide = width() if wide is None else wide
    align = align.ljust(len(rows[0]), align[-1])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if align.endswith("~"):
        widths[-1] = max(LEAST, wide - sum(widths[:-1]) - len(GAP) * (len(widths) - 1))
        return [line for row in rows for line in _wrapped(row, align, widths, colours or {})]
    lines: list[str] = []
    for block in _blocks(widths, wide):
        if lines:
            lines.append("")
        lines += [GAP.join(_cell(row[i], align[i], widths[i], colours or {}) for i in block).rstrip() for row in rows]
    return lines


def _blocks(widths: Sequence[int], wide: int) -> list[list[int]]:
    """Groups of columns that stand beside each other, each with the first column."""
    blocks, used = [[0]], widths[0]
    for index, each in enumerate(widths[1:], 1):
        if used + len(GAP) + each > wide and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(index)
        used += len(GAP) + each
    return blocks


def _wrapped(row: Sequence[str], align: str, widths: Sequence[int], colours: Mapping[str, str]) -> list[str]:
    first = GAP.join(_cell(*each, colours) for each in zip(row[:-1], align, widths, strict=False))
    texts = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]
    blank = " " * sum(widths[:-1]) + GAP * (len(widths) - 2)
    return [f"{first if not at else blank}{GAP}{text}".rstrip() for at, text in enumerate(texts)]


def _cell(text: str, align: str, width: int, colours: Mapping[str, str]) -> str:
    padded = text.rjust(width) if align == ">" else text.ljust(width)
    return paint(padded, colours.get(text))
