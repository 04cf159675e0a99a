"""Findings of an examination: one for each check, with a fixed number, and the command that mends it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from fedquilt import columns

Severity = Literal["ok", "warning", "error"]

EXIT: Final[dict[Severity, int]] = {"ok": 0, "warning": 10, "error": 11}
GROUPS: Final = {
    "0": "doctor",
    "1": "machine",
    "2": "packages",
    "3": "agent",
    "4": "broker",
    "5": "coordinator",
    "6": "operator",
}


class Finding(msgspec.Struct, frozen=True):
    """One check's result. `mend` is a command where one mends it, else what to do; None where all is well."""

    number: str  # "FQ110": the first digit is the group
    severity: Severity
    sentence: str  # what, and where
    mend: str | None = None

    @property
    def group(self) -> str:
        """Heading of the finding's number."""
        return GROUPS[self.number[2]]


def ok(number: str, sentence: str) -> Finding:
    """Finding that all is well."""
    return Finding(number, "ok", sentence)


def warning(number: str, sentence: str, mend: str) -> Finding:
    """It works, but worse than it could, or not for long."""
    return Finding(number, "warning", sentence, mend)


def error(number: str, sentence: str, mend: str) -> Finding:
    """It will not work."""
    return Finding(number, "error", sentence, mend)


def there(found: Iterable[Finding | None]) -> list[Finding]:
    """Without the checks that had nothing to look at here."""
    return [one for one in found if one is not None]


def worst(found: Iterable[Finding]) -> Severity:
    """Most severe of these findings."""
    severities = {one.severity for one in found}
    return "error" if "error" in severities else "warning" if "warning" in severities else "ok"


def table(found: Sequence[Finding]) -> dict[str, Any]:
    """Object that `--format json` prints: `severity` is the worst of all."""
    rows = [{**msgspec.to_builtins(one), "group": one.group} for one in found]
    return {"severity": worst(found), "findings": rows}


def lines(found: Sequence[Finding], wide: int | None = None) -> list[str]:
    """For people: what is well in one sentence each, what is not with its mend, and the sum.

    Args:
        found: of all checks.
        wide: the most columns of a sentence's lines; a mend stays in one line, so that it can be copied. None: those of
            the terminal; where there is none, every sentence is one line.
    """
    wide = columns.width() if wide is None and sys.stdout.isatty() else wide
    told = []
    for one in found:
        head = f"{one.severity:<8} {one.number}  "
        blank = " " * len(head)
        wrapped = [one.sentence]
        if wide is not None:
            wrapped = textwrap.wrap(one.sentence, wide - len(head), break_on_hyphens=False, break_long_words=False) or [
                ""
            ]
        told += [f"{blank if at else head}{text}" for at, text in enumerate(wrapped)]
        if one.mend is not None:
            told.append(f"{blank} mend: {one.mend}")
    counts = [(sum(one.severity == kind for one in found), kind) for kind in ("error", "warning")]
    parts = [f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in counts if count]
    return [*told, f"{len(found)} checks: {', '.join(parts) if parts else 'all is well'}"]
