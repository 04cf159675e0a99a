"""What became of every device in every round, as a picture: a square each, its colour the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Final

from fedquilt.coordinator.eligibility import REASONS
from fedquilt.coordinator.views.why import Part

MOST_DEVICES, MOST_ROUNDS = 60, 120
CELL, LETTER, LINE = 12, 7.0, 17
MEANINGS: Final = {
    "answered": "answered",
    "asked": "asked, no answer in time",
    "declined": "declined",
    "refused": "its update was refused",
    "drawn": "could have been asked, not drawn",
    **REASONS,
}
INKS: Final = {"answered": "#2f9e6e", "asked": "#e0a32e", "declined": "#e07b2e", "refused": "#d64f5e"}
BARRED: Final = "#7a7fb8"  # could not be asked


def reason(part: Part) -> str:
    """Why not, without what differs from round to round."""
    return part.text if part.code == "declined" else MEANINGS.get(part.code, part.code)


def svg(parts: Mapping[int, Mapping[str, Part]]) -> str:
    """Devices down, rounds across; of too many the first devices and the last rounds. Pointing at one tells it."""
    numbers = sorted(parts)[-MOST_ROUNDS:]
    known = sorted({name for number in numbers for name in parts[number]})
    names = known[:MOST_DEVICES]
    left = 12 + LETTER * max(map(len, names), default=0)
    seen = Counter(_key(parts[number][name]) for number in numbers for name in names if name in parts[number])
    keys = [key for key in (*INKS, "barred", "drawn") if seen[key]]
    top = 8 + LINE * len(keys)
    width, height = max(left + CELL * len(numbers) + 12, 330.0), top + CELL * len(names) + 26
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        'role="img" aria-label="who took part in which round" font-family="system-ui, sans-serif" font-size="11" '
        'fill="currentColor">'
    ]
    for row, key in enumerate(keys):
        told = "could not be asked: offline, busy, hot, ..." if key == "barred" else MEANINGS[key]
        out.append(f'<rect x="12" y="{4 + LINE * row}" width="10" height="10" {_ink(key)}/>')
        out.append(f'<text x="28" y="{13 + LINE * row}">{escape(told)}</text>')
    for row, name in enumerate(names):
        out.append(f'<text x="{left - 6:.1f}" y="{top + CELL * row + 9}" text-anchor="end">{escape(name)}</text>')
        for column, number in enumerate(numbers):
            part = parts[number].get(name)
            if part is None:
                continue
            at = f'x="{left + CELL * column:.1f}" y="{top + CELL * row}"'
            tip = escape(f"round {number}, {name}: {part.text}")
            out.append(
                f'<rect {at} width="{CELL - 1}" height="{CELL - 1}" {_ink(_key(part))}><title>{tip}</title></rect>'
            )
    under = top + CELL * len(names) + 14
    every = max(1, -(-len(numbers) // 12))
    for column in range(0, len(numbers), every):
        out.append(f'<text x="{left + CELL * column:.1f}" y="{under}">{numbers[column]}</text>')
    hidden = [f"{len(known) - len(names)} devices more"] if len(known) > len(names) else []
    hidden += [f"{len(parts) - len(numbers)} rounds before"] if len(parts) > len(numbers) else []
    if hidden:
        out.append(f'<text x="{left:.1f}" y="{under + 12}" fill-opacity="0.7">{" and ".join(hidden)}, not drawn</text>')
        out[0] = out[0].replace(f"0 0 {width:.0f} {height:.0f}", f"0 0 {width:.0f} {height + 12:.0f}")
    return "\n".join([*out, "</svg>"])


def _key(part: Part) -> str:
    return part.code if part.code in INKS or part.code == "drawn" else "barred"


def _ink(key: str) -> str:
    if key == "drawn":
        return 'fill="currentColor" fill-opacity="0.16"'
    return f'fill="{INKS.get(key, BARRED)}"'
