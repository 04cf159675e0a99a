"""Findings of an examination, with fixed numbers and commands that fix the problem."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from fedquilt.console import table

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
    """Result of one check. `mend` is a command or instruction, or None without a problem."""

    number: str  # such as "FQ110", whose first digit is the group
    severity: Severity
    sentence: str  # what, and where
    mend: str | None = None

    @property
    def group(self) -> str:
        return GROUPS[self.number[2]]


def ok(number: str, sentence: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(number, "ok", sentence)


def warning(number: str, sentence: str, mend: str) -> Finding:
    """Return a finding on a problem that slows the machine or may cause a failure later."""
    return Finding(number, "warning", sentence, mend)


def error(number: str, sentence: str, mend: str) -> Finding:
    """Return a finding on a problem that prevents operation."""
    return Finding(number, "error", sentence, mend)


def drop_missing(found: Iterable[Finding | None]) -> list[Finding]:
    return [one for one in found if one is not None]


def worst_severity(found: Iterable[Finding]) -> Severity:
    severities = {one.severity for one in found}
    return "error" if "error" in severities else "warning" if "warning" in severities else "ok"


def to_report(found: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as the object for `--format json`, with the worst severity."""
    rows = [{**msgspec.to_builtins(one), "group": one.group} for one in found]
    return {"severity": worst_severity(found), "findings": rows}


def format_findings(found: Sequence[Finding], wide: int | None = None) -> list[str]:
    """Format the findings as lines of text, with fixes and a summary line.

    Args:
        found: Findings of all checks.
        wide: Maximum columns of wrapped lines, or None for the width of the terminal. Fixes stay on one line for
        copying.
    """
    wide = table.line_width() if wide is None and sys.stdout.isatty() else wide
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
