"""Report of a GPU check as JSON and as tables."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from fedquilt.console import table

Verdict: TypeAlias = Literal["ok", "skipped", "refused", "warning", "error"]
Row: TypeAlias = dict[str, Any]  # texts, numbers and None
EXIT: Final[dict[Verdict, int]] = {"ok": 0, "skipped": 10, "refused": 10, "warning": 10, "error": 11}
COLOURS: Final = {"ok": "green", "error": "red", "warning": "yellow", "refused": "yellow"}


class PartResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Verdict of one part with its reason. Tables show the keys of the first row."""

    verdict: Verdict
    sentence: str
    rows: tuple[Row, ...] = ()


class GpuReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Report of one check. Values of the environment that are unknown are None, with the reasons in `unknown`."""

    version: Literal[1] = 1
    fedquilt: str
    began: str  # UTC
    took_s: float
    environment: Row
    unknown: dict[str, str]
    parts: dict[str, PartResult]


def exit_code(report: GpuReport) -> int:
    return max(EXIT[part.verdict] for part in report.parts.values())


def format_report(report: GpuReport) -> list[str]:
    """Format the report as tables of at most 80 columns, or of a terminal's width."""
    facts = [(key.replace("_", " "), _text(value)) for key, value in report.environment.items()]
    verdicts = [(name, part.verdict, part.sentence) for name, part in report.parts.items()]
    said = [*table.format_table(facts, "<~"), "", *table.format_table(verdicts, "<<~", None, COLOURS)]
    for name, part in report.parts.items():
        if part.rows:
            head = [key.replace("_", " ") for key in part.rows[0]]
            rows = [head, *([_text(row[key]) for key in part.rows[0]] for row in part.rows)]
            align = "".join("<" if isinstance(value, str) else ">" for value in part.rows[0].values())
            said += ["", f"{name}:", *table.format_table(rows, align)]
    return said


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
