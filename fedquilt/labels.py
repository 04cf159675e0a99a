"""Labels of boards, and the words by which jobs and commands select boards.

A label is a word: "site=lab", or the name of a group alone, "window". A board has those that its agent.toml lists.
A selection is a list of words that all have to hold: a label that the board has, "!window" for one that it has not,
and "site=lab|site=hall" where one of several is enough.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final, get_args

from fedquilt.core import JobError, Word

MOST: Final = 32  # labels of one board, and words of one selection
_LABEL: Final = re.compile(get_args(Word)[1].pattern)
_FORM: Final = (
    "a label is a word as site=lab or window: up to 64 of a-z, 0-9, '.', '_' and '-', beginning with one of a-z, 0-9, "
    "and behind '=' capitals too"
)


def words(text: str) -> list[str]:
    """Words of a text that separates them by spaces or commas, as a table's cell does."""
    return text.replace(",", " ").split()


def parse(given: Iterable[str]) -> tuple[str, ...]:
    """Check the labels of one board; returns them sorted, each once.

    Raises:
        JobError: a word that is no label, a key with two values, or more than MOST labels.
    """
    found = sorted(set(given))
    for word in found:
        if not _LABEL.match(word):
            raise JobError(f"{word[:100]!r} is no label: {_FORM}")
    if len(found) > MOST:
        raise JobError(f"{len(found)} labels, and a board has {MOST} at the most")
    keys = [word.partition("=")[0] for word in found]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise JobError(f"label {twice!r} stands twice: {', '.join(w for w in found if w.partition('=')[0] == twice)}")
    return tuple(found)


def require_selection(wanted: Sequence[str]) -> None:
    """Check the words of a selection.

    Raises:
        JobError: a word that none could be, or more than MOST words.
    """
    if len(wanted) > MOST:
        raise JobError(f"{len(wanted)} words, and a selection has {MOST} at the most")
    for word in wanted:
        for part in word.split("|"):
            if not _LABEL.match(part.removeprefix("!")):
                raise JobError(f"{word[:100]!r} selects no boards: {_FORM}, with ! before it for boards without it")


def selects(wanted: Iterable[str], has: Collection[str]) -> bool:
    """Whether a board with the labels `has` is one of a selection's."""
    return all(
        any((part[1:] not in has) if part.startswith("!") else (part in has) for part in word.split("|"))
        for word in wanted
    )
