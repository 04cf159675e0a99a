"""Labels of devices, and selections of devices by label.

A label is a word: "site=lab", or a group name such as "window". A device has the labels in its agent.toml. A selection
is a list of words that must all hold: a label of the device, "!window" for an absent label, or alternatives such as
"site=lab|site=hall".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final, get_args

from fedquilt.core import DeviceLabel, JobError

MOST: Final = 32  # labels of one board, and words of one selection
_LABEL: Final = re.compile(get_args(DeviceLabel)[1].pattern)
_FORM: Final = (
    "a label is a word as site=lab or window: up to 64 of a-z, 0-9, '.', '_' and '-', beginning with one of a-z, 0-9, "
    "and behind '=' capitals too"
)


def split_words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def parse_labels(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the labels of a device, sorted and without duplicates."""
    labels = sorted(set(texts))
    for label in labels:
        if not _LABEL.match(label):
            raise JobError(f"{label[:100]!r} is no label: {_FORM}")
    if len(labels) > MOST:
        raise JobError(f"{len(labels)} labels, and a board has {MOST} at the most")
    keys = [label.partition("=")[0] for label in labels]
    if repeated_key := next((key for key in keys if keys.count(key) > 1), None):
        repeated = [label for label in labels if label.partition("=")[0] == repeated_key]
        raise JobError(f"label {repeated_key!r} stands twice: {', '.join(repeated)}")
    return tuple(labels)


def require_valid_selection(selection: Sequence[str]) -> None:
    if len(selection) > MOST:
        raise JobError(f"{len(selection)} words, and a selection has {MOST} at the most")
    for term in selection:
        for part in term.split("|"):
            if not _LABEL.match(part.removeprefix("!")):
                raise JobError(f"{term[:100]!r} selects no boards: {_FORM}, with ! before it for boards without it")


def is_selected(selection: Iterable[str], has: Collection[str]) -> bool:
    return all(
        any((part[1:] not in has) if part.startswith("!") else (part in has) for part in term.split("|"))
        for term in selection
    )
