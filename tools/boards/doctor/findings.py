"""Checks and findings of an examination, with fixed numbers and commands that fix the problem."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from fedquilt.console import table

Severity = Literal["ok", "warning", "error"]

EXIT: Final[dict[Severity, int]] = {"ok": 0, "warning": 10, "error": 11}
VERBOSE: Final = "fedquilt -vv doctor ..."
GROUPS: Final = ("doctor", "machine", "packages", "agent", "broker", "coordinator", "operator")  # by the first digit


class Finding(msgspec.Struct, frozen=True):
    number: str  # such as "FQ110", whose first digit is the group
    severity: Severity
    sentence: str  # what, and where
    fix: str | None = None


class Problem(NamedTuple):
    """Problem that slows the machine or may cause a failure later, or an error that prevents operation."""

    sentence: str
    fix: str = ""  # "" for the fix of the check
    severity: Severity = "warning"


def error(sentence: str, fix: str = "") -> Problem:
    return Problem(sentence, fix, "error")


Verdict: TypeAlias = str | Problem | None
"""Sentence of a check without a problem, the problem, or None if the check does not apply."""


Numbered: TypeAlias = tuple[str, str | Problem]
"""Number and verdict of a check that is a step of a longer examination, as of a connection."""


class Check(NamedTuple):
    number: str
    needs: tuple[str, ...]  # facts, by name: without one of them the check does not apply
    find: Callable[..., Verdict]  # called with these facts
    fix: str = ""


def to_finding(number: str, verdict: str | Problem, fix: str = "") -> Finding:
    if isinstance(verdict, str):
        return Finding(number, "ok", verdict)
    return Finding(number, verdict.severity, verdict.sentence, verdict.fix or fix)


def run_checks(checks: Iterable[Check], facts: object) -> Iterator[Finding]:
    for check in checks:
        try:
            needed = [getattr(facts, name, None) for name in check.needs]
            verdict = check.find(*needed) if all(each is not None for each in needed) else None
        except Exception as problem:  # whatever a strange machine makes of a check
            verdict = error(f"this could not be examined ({type(problem).__name__}: {problem})", VERBOSE)
        if verdict is not None:
            yield to_finding(check.number, verdict, check.fix)


def worst_severity(found: Iterable[Finding]) -> Severity:
    return max((one.severity for one in found), key=tuple(EXIT).index, default="ok")


def to_report(found: Sequence[Finding]) -> dict[str, Any]:
    rows = [{**msgspec.to_builtins(one), "group": GROUPS[int(one.number[2])]} for one in found]
    return {"severity": worst_severity(found), "findings": rows}


def format_findings(found: Sequence[Finding], wide: int | None = None) -> list[str]:
    """Format the findings as lines of text, with fixes and a summary line."""
    wide = table.line_width() if wide is None and sys.stdout.isatty() else wide
    told = []
    for one in found:
        head = f"{one.severity:<8} {one.number}  "
        blank = " " * len(head)
        wrapped = [one.sentence]
        if wide is not None:
            wrapped = textwrap.wrap(one.sentence, wide - len(head), break_on_hyphens=False, break_long_words=False)
        told += [f"{blank if at else head}{text}" for at, text in enumerate(wrapped)]
        if one.fix is not None:
            told.append(f"{blank} fix: {one.fix}")
    counts = [(sum(one.severity == kind for one in found), kind) for kind in ("error", "warning")]
    parts = [f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in counts if count]
    return [*told, f"{len(found)} checks: {', '.join(parts) if parts else 'all is well'}"]
