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
    sentence: str
    fix: str | None = None


class Problem(NamedTuple):
    """Verdict of a check: a warning (slow operation, later failures), or an error that prevents operation."""

    sentence: str
    fix: str = ""  # "" for the fix of the check
    severity: Severity = "warning"


def error(sentence: str, fix: str = "") -> Problem:
    return Problem(sentence, fix, "error")


Verdict: TypeAlias = str | Problem | None
"""Sentence of a check without a problem, the problem, or None if the check does not apply."""


Numbered: TypeAlias = tuple[str, str | Problem]
"""Number and verdict of one step of a longer examination, such as that of a connection."""


class Check(NamedTuple):
    number: str
    needs: tuple[str, ...]  # names of facts. The check does not apply if one is None
    find: Callable[..., Verdict]  # arguments: facts of `needs`
    fix: str = ""


def to_finding(number: str, verdict: str | Problem, fix: str = "") -> Finding:
    if isinstance(verdict, str):
        return Finding(number, "ok", verdict)
    return Finding(number, verdict.severity, verdict.sentence, verdict.fix or fix)


def run_checks(checks: Iterable[Check], facts: object) -> Iterator[Finding]:
    for check in checks:
        try:
            needed_facts = [getattr(facts, name, None) for name in check.needs]
            verdict = check.find(*needed_facts) if all(fact is not None for fact in needed_facts) else None
        except Exception as problem:  # checks may fail in any way on unusual machines
            verdict = error(f"check {check.number} failed ({type(problem).__name__}: {problem})", VERBOSE)
        if verdict is not None:
            yield to_finding(check.number, verdict, check.fix)


def worst_severity(all_findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in all_findings), key=tuple(EXIT).index, default="ok")


def to_report(all_findings: Sequence[Finding]) -> dict[str, Any]:
    rows = [{**msgspec.to_builtins(finding), "group": GROUPS[int(finding.number[2])]} for finding in all_findings]
    return {"severity": worst_severity(all_findings), "findings": rows}


def format_findings(all_findings: Sequence[Finding], width: int | None = None) -> list[str]:
    """Return the findings as lines of text, with fixes and a summary line. `width` None is the terminal's."""
    width = table.line_width() if width is None and sys.stdout.isatty() else width
    lines = []
    for finding in all_findings:
        head = f"{finding.severity:<8} {finding.number}  "
        blank = " " * len(head)
        wrapped = [finding.sentence]
        if width is not None:
            wrapped = textwrap.wrap(finding.sentence, width - len(head), break_on_hyphens=False, break_long_words=False)
        lines += [f"{blank if line_number else head}{text}" for line_number, text in enumerate(wrapped)]
        if finding.fix is not None:
            lines.append(f"{blank} fix: {finding.fix}")
    counts = [
        (sum(finding.severity == severity for finding in all_findings), severity) for severity in ("error", "warning")
    ]
    parts = [f"{count} {severity}{'s' if count > 1 else ''}" for count, severity in counts if count]
    return [*lines, f"{len(all_findings)} checks: {', '.join(parts) if parts else 'no problems'}"]
