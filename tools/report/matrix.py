"""Table of every device in every round, with a colour and a tooltip per cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fedquilt.coordinator.rounds.selection import REASONS
from fedquilt.coordinator.views import event_messages
from fedquilt.coordinator.views.round_outcomes import DeviceOutcome

MOST_DEVICES, MOST_ROUNDS = 60, 120
MEANINGS: Final = {
    "answered": "update received",
    "asked": "selected, no update in time",
    "declined": "declined",
    "refused": "its update was refused",
    "drawn": "eligible, not drawn",
    **REASONS,
}
COLOURED: Final = {
    **{code: MEANINGS[code] for code in ("answered", "asked", "declined", "refused")},
    "barred": "not eligible: offline, busy, hot, ...",
    "drawn": MEANINGS["drawn"],
}


@dataclass(frozen=True)
class DeviceMatrix:
    keys: Sequence[tuple[str, str]]  # colours that occur, by their class, with their meaning
    heads: Sequence[tuple[str, int]]  # a round's number, and how many columns it stands over
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]  # device, and class and tooltip of each round
    notes: Sequence[str]


def format_reason(part: DeviceOutcome) -> str:
    return part.text if part.code == "declined" else MEANINGS.get(part.code, part.code)


def make_device_matrix(parts: Mapping[int, Mapping[str, DeviceOutcome]], final: int | None) -> DeviceMatrix:
    """Return the outcomes of devices in the latest rounds. `final` is the number of the final evaluation."""
    numbers = sorted(parts)[-MOST_ROUNDS:]
    known = sorted({name for number in numbers for name in parts[number]})
    names = known[:MOST_DEVICES]
    rows = [(name, [_make_cell(number, name, parts[number].get(name), final) for number in numbers]) for name in names]
    seen = {code for _, cells in rows for code, _ in cells}
    step = max(1, -(-len(numbers) // 12), 2 if max(numbers, default=0) > 9 and len(numbers) > 1 else 1)
    heads = [
        ("final" if numbers[i] == final else str(numbers[i] + 1), len(numbers[i : i + step]))
        for i in range(0, len(numbers), step)
    ]
    codes = Counter(part.code for devices in parts.values() for part in devices.values())
    told = ", ".join(f"{MEANINGS.get(code, code)}: {count}" for code, count in codes.most_common())
    hidden = [f"{len(known) - len(names)} more devices"] if len(known) > len(names) else []
    hidden += [f"{len(parts) - len(numbers)} earlier rounds"] if len(parts) > len(numbers) else []
    notes = [f"Over all rounds and devices: {told}."]
    notes += [f"{' and '.join(hidden)} are not shown.".capitalize()] if hidden else []
    return DeviceMatrix([(code, text) for code, text in COLOURED.items() if code in seen], heads, rows, notes)


def _make_cell(number: int, name: str, part: DeviceOutcome | None, final: int | None) -> tuple[str, str]:
    if part is None:
        return "", ""
    place = event_messages.format_round_name(number, final)
    return (part.code if part.code in COLOURED else "barred"), f"{place}, {name}: {part.text}"
