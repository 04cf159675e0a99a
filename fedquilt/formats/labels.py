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

MAX_LABELS: Final = 32  # limit on labels of a device, and on words of a selection
_LABEL: Final = re.compile(get_args(DeviceLabel)[1].pattern)
_FORM: Final = (
    "write a label such as site=lab or window, with up to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or "
    "digit, and capitals only after '='"
)


def split_words(text: str) -> list[str]:
    """Return the words of a text, which are separated by commas or white space."""
    return text.replace(",", " ").split()


def parse_labels(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the labels of a device, sorted and without duplicates, or raise JobError.

    Labels are invalid if malformed, if there are more than MAX_LABELS, or if two have the same key before "=".
    """
    labels = sorted(set(texts))
    for label in labels:
        if not _LABEL.match(label):
            raise JobError(f"{label[:100]!r} is not a label: {_FORM}")
    if len(labels) > MAX_LABELS:
        raise JobError(f"{len(labels)} labels are too many: set at most {MAX_LABELS}")
    keys = [label.partition("=")[0] for label in labels]
    if repeated_key := next((key for key in keys if keys.count(key) > 1), None):
        repeated = [label for label in labels if label.partition("=")[0] == repeated_key]
        raise JobError(f"label {repeated_key!r} is set twice ({', '.join(repeated)}): keep one")
    return tuple(labels)


def require_valid_selection(selection: Sequence[str]) -> None:
    """Raise JobError if a selection has a malformed word or more than MAX_LABELS words."""
    if len(selection) > MAX_LABELS:
        raise JobError(f"a selection has {len(selection)} words: write at most {MAX_LABELS}")
    for term in selection:
        for part in term.split("|"):
            if not _LABEL.match(part.removeprefix("!")):
                raise JobError(f"{term[:100]!r} is not a label or !label: {_FORM}; !label excludes devices with it")


def is_selected(selection: Iterable[str], labels: Collection[str]) -> bool:
    """Return whether all words of a selection hold for a device with these labels."""
    return all(
        any((part[1:] not in labels) if part.startswith("!") else (part in labels) for part in term.split("|"))
        for term in selection
    )
