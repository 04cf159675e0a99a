"""Transitions between the phases of a job, enforced for every event.

An event that the table does not allow is an error. The log was written by other rules then, and no state derived from
it can be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

Phase: TypeAlias = Literal["new", "selecting", "open", "closing", "done", "failed", "stopped"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

_STAYS: Final[Mapping[Phase, tuple[Phase, ...]]] = {"open": ("open",)}
# A job that was stopped or failed between two messages of one turn still records the second one: the work counts
# when the job is resumed.
_ARRIVES: Final[Mapping[Phase, tuple[Phase, ...]]] = {**_STAYS, "stopped": ("stopped",), "failed": ("failed",)}

TRANSITIONS: Final[Mapping[str, Mapping[Phase, tuple[Phase, ...]]]] = {
    "Noted": {"new": ("new",), "stopped": ("stopped",), "failed": ("failed",)},  # of a run that waits to begin
    "Started": {"new": ("selecting",), "stopped": ("stopped",), "failed": ("failed",)},  # stopped before it had begun
    "Surveyed": {"selecting": ("selecting",), "open": ("open",)},
    "Asked": {"selecting": ("open",), "open": ("open",)},
    "Declined": _ARRIVES,
    "Answered": _ARRIVES,
    "Rejected": _ARRIVES,
    "Lost": {**_ARRIVES, "closing": ("open",)},
    "Folded": {**_STAYS, "closing": ("closing",)},
    "Extended": _STAYS,
    "Reopened": _STAYS,
    "Restarted": {"selecting": ("selecting",), **_STAYS},
    "Closed": {"open": ("closing",)},
    "Committed": {"closing": ("selecting",)},
    "Ended": {
        "new": ("failed", "stopped"),
        "selecting": ("done", "failed", "stopped"),
        "open": ("failed", "stopped"),
        "closing": ("failed", "stopped"),
        "failed": ("failed", "stopped"),  # resumed, and ended again before it could continue
        "stopped": ("failed", "stopped"),
    },
    "Resumed": {"failed": ("selecting", "open"), "stopped": ("selecting", "open")},
}
"""Name of a fact's class -> phase before it -> phases that it may lead to."""


def next_phases(fact: str, phase: Phase) -> tuple[Phase, ...]:
    """Return the phases that an event may lead to from `phase`, or () if it is not allowed there."""
    return TRANSITIONS[fact].get(phase, ())


def format_diagram() -> str:
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for fact, moves in TRANSITIONS.items():
        for before, afters in moves.items():
            for after in afters:
                arrows.setdefault((before, after), []).append(fact)
    order = sorted(arrows, key=lambda pair: (PHASES.index(pair[0]), PHASES.index(pair[1])))
    lines = [f"    {before} --> {after}: {', '.join(arrows[before, after])}" for before, after in order]
    return "\n".join(["stateDiagram-v2", "    [*] --> new", *lines, "    done --> [*]"])
