"""Terminal tables that fit the width, with colours on terminals only.

Output to a file or a pipe is 80 columns wide.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final, TextIO

MIN_COLUMNS: Final = 80
MAX_COLUMNS: Final = 120
GAP: Final = "  "
MIN_WRAPPED_COLUMNS: Final = 20  # width of wrapped text, however wide the other columns are
COLOURS: Final = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}


def line_width(out: TextIO | None = None) -> int:
    """Return the columns of a terminal, within MIN_COLUMNS and MAX_COLUMNS, or 80 for files and pipes."""
    if not (out or sys.stdout).isatty():
        return MIN_COLUMNS
    return min(MAX_COLUMNS, max(MIN_COLUMNS, shutil.get_terminal_size((MIN_COLUMNS, 24)).columns))


def fold_line(line: str, hang: int | None = None, out: TextIO | None = None) -> list[str]:
    """Return a sentence as lines of a terminal's width, or as one line for files and pipes.

    Args:
        line: Sentence of any length.
        hang: Indentation of further lines, or None for two more columns than the first line's.
        out: Output stream, or None for standard output.
    """
    if not (out or sys.stdout).isatty():
        return [line]
    width = max(MIN_COLUMNS, shutil.get_terminal_size((MIN_COLUMNS, 24)).columns)
    indent = len(line) - len(line.lstrip()) + 2 if hang is None else hang
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )
    return wrapper.wrap(line) or [line]


def colour_text(text: str, colour: str | None, out: TextIO | None = None) -> str:
    """Return a text with a colour, or unchanged if the output is not a terminal or NO_COLOR is set."""
    if colour is None or not (out or sys.stdout).isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def format_table(
    rows: Sequence[Sequence[str]], align: str, max_width: int | None = None, colours: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines of a table.

    A wrapped last column gets the width left by the other columns. A table that is too wide and has no wrapped column
    is split into blocks, each with the first column.

    Args:
        rows: Cells of each row.
        align: Alignment by column: "<" (left), ">" (right) or "~" (left and wrapped, for the last column). The last
            letter also applies to further columns.
        max_width: Maximum width of a line, or None for `line_width`.
        colours: Colour by the text of a whole cell, on a terminal.
    """
    if not rows:
        return []
    max_width = line_width() if max_width is None else max_width
    align = align.ljust(len(rows[0]), align[-1])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if align.endswith("~"):
        widths[-1] = max(MIN_WRAPPED_COLUMNS, max_width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1))
        return [line for row in rows for line in _wrap_row(row, align, widths, colours or {})]
    lines: list[str] = []
    for block in _group_columns(widths, max_width):
        if lines:
            lines.append("")
        lines += [
            GAP.join(_format_cell(row[i], align[i], widths[i], colours or {}) for i in block).rstrip() for row in rows
        ]
    return lines


def format_markdown(lines: Iterable[str]) -> list[str]:
    """Return the terminal lines of a Markdown page: headings, paragraphs, lists, code and tables without markup."""
    output: list[str] = []
    for kind, group in groupby("\n".join(lines).splitlines(), _markdown_kind):
        part = "\n".join(group)
        if kind == "code":
            output += part.splitlines()
            continue
        part = _remove_inline_markup(part)
        if kind == "table":
            rows = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in part.splitlines() if set(line) - set("|-")]
            pairs = [(name, "; ".join(filter(None, cells))) for name, *cells in rows]
            output += format_table([(name, text.replace("\\|", "|")) for name, text in pairs], "<~")
        elif kind == "text":
            for item in re.split(r"\n(?=- )", part):
                hang = "  " * item.startswith("- ")
                output += textwrap.wrap(" ".join(item.split()), line_width(), subsequent_indent=hang)
        else:
            output += [colour_text(line.lstrip("# "), "bold") if line else "" for line in part.split("\n")]
    return output


def _markdown_kind(line: str) -> str:
    if line.startswith("    "):
        return "code"
    return {"": "blank", "|": "table", "#": "heading"}.get(line[:1], "text")


_LINK: Final = r"\[((?:`[^`]*`|[^]`])+)\]\([^)]+\)"
_CODE_OR_EMPHASIS: Final = re.compile(
    r"`([^`]+)`|\*\*(?=\S)([^*]+)(?<=\S)\*\*|(?<![\w*])\*(?=\S)([^*]+)(?<=\S)\*(?![\w*])"
)


def _remove_inline_markup(text: str) -> str:
    """Remove the markup of links, code and emphasis."""
    text = re.sub(_LINK, r"\1", re.sub(rf" \({_LINK}\)", "", text))
    return _CODE_OR_EMPHASIS.sub(lambda match: next(filter(None, match.groups())), text)


def _group_columns(widths: Sequence[int], total_width: int) -> list[list[int]]:
    blocks, used_width = [[0]], widths[0]
    for index, width in enumerate(widths[1:], 1):
        if used_width + len(GAP) + width > total_width and len(blocks[-1]) > 1:
            blocks.append([0])
            used_width = widths[0]
        blocks[-1].append(index)
        used_width += len(GAP) + width
    return blocks


def _wrap_row(row: Sequence[str], align: str, widths: Sequence[int], colours: Mapping[str, str]) -> list[str]:
    prefix = GAP.join(_format_cell(*cell, colours) for cell in zip(row[:-1], align, widths, strict=False))
    texts = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]
    blank = " " * sum(widths[:-1]) + GAP * (len(widths) - 2)
    return [f"{prefix if not index else blank}{GAP}{text}".rstrip() for index, text in enumerate(texts)]


def _format_cell(text: str, align: str, width: int, colours: Mapping[str, str]) -> str:
    padded = text.rjust(width) if align == ">" else text.ljust(width)
    return colour_text(padded, colours.get(text))
