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
from fedquilt.tools.boards.doctor.findings import EXIT, Check, Finding, Numbered, error, to_finding

TIME_LIMIT_S: Final = 9.0
SPARE_TIME_S: Final = 0.5  # time after a group's last wait
CHECKS: Final[tuple[Check, ...]] = (*machine.MACHINE, *machine.PACKAGES, *agent.AGENT)
"""All checks of a board's facts. The checks of connections and of a coordinator's folder are steps, not rows."""

Group = Callable[[], Iterable[Finding]]


@dataclass(frozen=True)
class ExaminationTarget:
    settings: Path | None = None
    home: Path | None = None
    broker: Mapping[str, Any] | None = None  # an agent.toml's [broker] table
    fleet: str = "fleet"
    root: Path = machine_facts.ROOT


def print_findings(target: ExaminationTarget, format: str) -> int:
    """Examine the target and print the findings. Return exit code 0, 10 (warnings) or 11 (errors)."""
    results = run_groups(select_groups(target))
    if format == "json":
        print(msgspec.json.encode(findings.to_report(results)).decode())
    else:
        print("\n".join(findings.format_findings(results)))
    return EXIT[findings.worst_severity(results)]


def select_groups(
    target: ExaminationTarget,
    *,
    clock_s: float | None = None,
    free: machine_facts.FreeBytes = machine_facts.free_bytes,
    limit_s: float = TIME_LIMIT_S,
) -> dict[str, Group]:
    """Return the named groups of checks of a target. Raise JobError for conflicting options.

    `clock_s` is the wall-clock time (default now). The checks of the broker end within `limit_s` from now.
    """
    if target.settings is not None and (target.home is not None or target.broker is not None):
        raise JobError(f"{target.settings} names the broker already: leave out --home and --broker of coordinators")
    deadline_s = time.monotonic() + limit_s - SPARE_TIME_S
    now_s = time.time() if clock_s is None else clock_s
    groups: dict[str, Group] = {}
    settings: AgentSettings | None = None
    if target.settings is not None:
        try:
            loaded = agents.load_settings(target.settings)
        except JobError as problem:
            finding = to_finding("FQ301", error(str(problem), f"correct {target.settings}"))
            groups["settings"] = lambda: [finding]
        else:
            settings = agent.settings_under_root(loaded, target.settings, target.root)
            groups["broker"] = _group(broker.check_broker_for_device, settings, now_s, deadline_s)
    groups["machine"] = lambda: findings.run_checks(
        CHECKS, Facts.read(target.root, now_s, settings, target.settings, free)
    )
    if target.home is not None:
        from fedquilt.tools.boards.doctor.coordinator import check_coordinator  # not installed on boards

        groups["coordinator"] = _group(check_coordinator, target.home, free)
    if target.broker is not None:
        groups["broker"] = _group(
            broker.check_broker_for_coordinator, target.broker, target.home, target.fleet, now_s, deadline_s
        )
    if not (target.settings or target.home or target.broker or target.root != machine_facts.ROOT):
        groups["operator"] = lambda: findings.run_checks(machine.OPERATOR, None)
    return groups


def _group(steps: Callable[..., Iterable[Numbered]], *arguments: Any) -> Group:
    return lambda: (to_finding(number, verdict) for number, verdict in steps(*arguments))


def run_groups(groups: Mapping[str, Group], limit_s: float = TIME_LIMIT_S) -> list[Finding]:
    """Run all groups within `limit_s` and return their findings, sorted by number.

    A group that raises an exception or exceeds the limit adds an error finding to its findings until then.
    """
    findings_by_group: dict[str, list[Finding]] = {name: [] for name in groups}

    def run_group(name: str, group: Group) -> None:
        try:
            for finding in group():
                findings_by_group[name].append(finding)  # findings before an exception are kept
        except FedquiltError as problem:
            findings_by_group[name].append(to_finding("FQ002", error(f"{name}: {problem}", findings.VERBOSE)))
        except Exception as problem:  # checks may fail in any way on unusual machines
            sentence = f"{name} could not be examined ({type(problem).__name__}: {problem})"
            fix = f"{findings.VERBOSE}, and report its output to fedquilt's authors"
            findings_by_group[name].append(to_finding("FQ002", error(sentence, fix)))

    threads = {
        name: threading.Thread(target=run_group, args=(name, check_group), daemon=True)
        for name, check_group in groups.items()
    }
    deadline_s = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    all_findings = []
    for name, thread in threads.items():
        thread.join(max(deadline_s - time.monotonic(), 0.0))
        all_findings += findings_by_group[name]
        if thread.is_alive():
            sentence = f"{name} was not examined within {limit_s:g} s: a file, sensor or server does not respond"
            all_findings.append(to_finding("FQ001", error(sentence, findings.VERBOSE)))
    return sorted(all_findings, key=lambda check_group: check_group.number)
