"""Pictures beside each other in one SVG, each a PNG within it: needs no library for images."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np

CELL, GAP, TOP = 112, 12, 40  # pixels


def png(image: np.ndarray) -> bytes:
    """An image (h, w), (h, w, 1) or (h, w, 3) of 0..1 as a PNG file; what is beyond is cut off."""
    values = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    values = values[..., None] if values.ndim == 2 else values
    height, width, channels = values.shape
    lines = b"".join(b"\0" + row.tobytes() for row in values)  # filter 0: as they are
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def sheet(titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], notes: Sequence[Sequence[str]]) -> str:
    """An SVG: a title over each column, a note under each picture."""
    step = CELL + GAP
    width, height = GAP + step * len(titles), TOP + (step + 14) * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, title in enumerate(titles):
        for line, words in enumerate(_two(title)):
            parts.append(f'<text x="{GAP + step * column + CELL // 2}" y="{14 + 13 * line}">{escape(words)}</text>')
    for number, (row, told) in enumerate(zip(rows, notes, strict=True)):
        for column, (image, note) in enumerate(zip(row, told, strict=True)):
            x, y = GAP + step * column, TOP + (step + 14) * number
            data = base64.b64encode(png(image)).decode()
            parts.append(
                f'<image x="{x}" y="{y}" width="{CELL}" height="{CELL}" style="image-rendering:pixelated" '
                f'href="data:image/png;base64,{data}"/>'
            )
            parts.append(f'<text x="{x + CELL // 2}" y="{y + CELL + 12}">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _two(title: str) -> tuple[str, ...]:
    """A title in at most two lines."""
    first, sign, rest = title.partition(", ")
    if not sign:
        first, sign, rest = title.partition(": ")
    return (first, rest) if sign else (title,)
