"""Examination of a board, a coordinator or an operator's machine (`fedquilt doctor`).

Groups of checks run in parallel threads, because they wait for sensors, names and brokers. A group that exceeds the
time limit is a finding as well. The examination changes no settings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import FedquiltError, JobError
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.tools.boards.doctor import agent, broker, findings, machine, machine_facts
from fedquilt.tools.boards.doctor.agent import Facts
from fedquilt.tools.boards.doctor.broker import ExaminationDeadline
from fedquilt.tools.boards.doctor.findings import EXIT, Check, Finding, Numbered, error, to_finding

LIMIT_S: Final = 9.0
SPARE_S: Final = 0.5  # for what a group still does after its last wait
TABLE: Final[tuple[Check, ...]] = (*machine.MACHINE, *machine.PACKAGES, *agent.AGENT)
"""All checks of a board's facts. The checks of connections and of a coordinator's folder are steps, not rows."""

Group = Callable[[], Iterable[Finding]]


@dataclass(frozen=True)
class ExaminationTarget:
    settings: Path | None = None
    home: Path | None = None
    broker: Mapping[str, Any] | None = None  # an agent.toml's [broker] table
    fleet: str = "fleet"
    root: Path = machine_facts.ROOT


def print_findings(wanted: ExaminationTarget, format: str) -> int:
    found = run_groups(select_groups(wanted))
    if format == "json":
        print(msgspec.json.encode(findings.to_report(found)).decode())
    else:
        print("\n".join(findings.format_findings(found)))
    return EXIT[findings.worst_severity(found)]


def select_groups(
    wanted: ExaminationTarget,
    *,
    clock_s: float | None = None,
    free: machine_facts.Free = machine_facts.free_bytes,
    limit_s: float = LIMIT_S,
) -> dict[str, Group]:
    """Return the groups of checks for a subject, by name."""
    if wanted.settings is not None and (wanted.home is not None or wanted.broker is not None):
        raise JobError("an agent.toml says which broker: leave --home and --broker out, which are a coordinator's")
    timer = ExaminationDeadline(time.monotonic() + limit_s - SPARE_S)
    now_s = time.time() if clock_s is None else clock_s
    made: dict[str, Group] = {}
    settings: AgentSettings | None = None
    if wanted.settings is not None:
        try:
            loaded = agents.load_settings(wanted.settings)
        except JobError as problem:
            wrong = to_finding("FQ301", error(str(problem), f"correct {wanted.settings}"))
            made["settings"] = lambda: [wrong]
        else:
            settings = agent.settings_under_root(loaded, wanted.settings, wanted.root)
            made["broker"] = _group(broker.check_broker_for_device, settings, now_s, timer)
    made["machine"] = lambda: findings.run_checks(
        TABLE, Facts.read(wanted.root, now_s, settings, wanted.settings, free)
    )
    if wanted.home is not None:
        from fedquilt.tools.boards.doctor.coordinator import check_coordinator  # here: boards do not have it

        made["coordinator"] = _group(check_coordinator, wanted.home, free)
    if wanted.broker is not None:
        made["broker"] = _group(
            broker.check_broker_for_coordinator, wanted.broker, wanted.home, wanted.fleet, now_s, timer
        )
    if not (wanted.settings or wanted.home or wanted.broker or wanted.root != machine_facts.ROOT):
        made["operator"] = lambda: findings.run_checks(machine.OPERATOR, None)
    return made


def _group(steps: Callable[..., Iterable[Numbered]], *given: Any) -> Group:
    return lambda: (to_finding(number, verdict) for number, verdict in steps(*given))


def run_groups(groups: Mapping[str, Group], limit_s: float = LIMIT_S) -> list[Finding]:
    """Run all groups within `limit_s` and return their findings, sorted by number.

    A group that raises an exception or exceeds the limit keeps its findings until then, and that is an error finding.
    """
    told: dict[str, list[Finding]] = {name: [] for name in groups}

    def run_group(name: str, group: Group) -> None:
        try:
            for one in group():
                told[name].append(one)  # one by one: what was found before an exception counts
        except FedquiltError as problem:
            told[name].append(to_finding("FQ002", error(f"{name}: {problem}", findings.VERBOSE)))
        except Exception as problem:  # whatever a strange machine makes of a check
            said = f"{name} could not be examined ({type(problem).__name__}: {problem})"
            fix = f"{findings.VERBOSE}, and tell fedquilt's authors what it says"
            told[name].append(to_finding("FQ002", error(said, fix)))

    threads = {name: threading.Thread(target=run_group, args=(name, one), daemon=True) for name, one in groups.items()}
    until_s = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    found = []
    for name, thread in threads.items():
        thread.join(max(until_s - time.monotonic(), 0.0))
        found += told[name]
        if thread.is_alive():
            said = f"{name} was not examined within {limit_s:g} s: something there does not answer"
            found.append(to_finding("FQ001", error(said, findings.VERBOSE)))
    return sorted(found, key=lambda one: one.number)
