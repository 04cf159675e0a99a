"""Examination of a board, a coordinator or an operator's machine (`fedquilt doctor`).

Groups of checks run in parallel threads, because they wait for sensors, names and brokers. A group that exceeds the
time limit is a finding as well. The examination changes no settings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import FedquiltError, JobError
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.security import authenticated_link
from fedquilt.tools.boards.doctor import certificate, findings, folders, machine_facts
from fedquilt.tools.boards.doctor.checks import (
    agent,
    authentication,
    machine,
    operator_machine,
    packages,
    permissions,
)
from fedquilt.tools.boards.doctor.checks import broker as checks_broker
from fedquilt.tools.boards.doctor.checks.broker import ExaminationDeadline
from fedquilt.tools.boards.doctor.findings import EXIT, Finding, error, ok
from fedquilt.transport.mqtt.broker import Broker

LIMIT_S: Final = 9.0
SPARE_S: Final = 0.5  # for what a group still does after its last wait

Group = Callable[[], list[Finding]]


@dataclass(frozen=True)
class ExaminationTarget:
    """Subject of an examination: a board's agent, a coordinator, or this machine alone."""

    settings: Path | None = None
    home: Path | None = None
    broker: Mapping[str, Any] | None = None  # an agent.toml's [broker] table
    fleet: str = "fleet"
    root: Path = machine_facts.ROOT


@dataclass(frozen=True)
class ExaminationEnvironment:
    """Sources of an examination outside the examined files, replaceable in tests."""

    clock_s: Callable[[], float] = time.time
    free: folders.Free = folders.free_bytes
    operator: Group = field(default=operator_machine.check_operator_machine)


def main(wanted: ExaminationTarget, format: str) -> int:
    """Print the findings. Return the exit code: 0, 10 for warnings or 11 for errors.

    Raises:
        JobError: If agent settings and a coordinator's options are combined.
    """
    found = run_groups(select_groups(wanted))
    if format == "json":
        print(msgspec.json.encode(findings.to_report(found)).decode())
    else:
        print("\n".join(findings.format_findings(found)))
    return EXIT[findings.worst_severity(found)]


def select_groups(
    wanted: ExaminationTarget, around: ExaminationEnvironment = ExaminationEnvironment(), limit_s: float = LIMIT_S
) -> dict[str, Group]:
    """Return the groups of checks for a subject, by name.

    Raises:
        JobError: If agent settings and a coordinator's options are combined.
    """
    if wanted.settings is not None and (wanted.home is not None or wanted.broker is not None):
        raise JobError("an agent.toml says which broker: leave --home and --broker out, which are a coordinator's")
    timer = ExaminationDeadline(time.monotonic() + limit_s - SPARE_S)
    clock_s = around.clock_s()
    made: dict[str, Group] = {}
    if wanted.settings is None:
        made["machine"] = lambda: _check_machine(wanted, clock_s)
    else:
        try:
            settings = agents.load_settings(wanted.settings)
        except JobError as problem:
            said, mend = str(problem), f"correct {wanted.settings}"
            made["settings"] = lambda: [error("FQ301", said, mend)]
            made["machine"] = lambda: _check_machine(wanted, clock_s)
        else:
            path, settings = wanted.settings, agent.settings_under_root(settings, wanted.settings, wanted.root)
            made["machine"] = lambda: _check_agent(wanted, path, settings, clock_s, around)
            made["broker"] = lambda: _check_device_connection(settings, clock_s, timer)
    if wanted.home is not None:
        from fedquilt.tools.boards.doctor.checks.coordinator import check_coordinator  # here: boards do not have it

        home = wanted.home
        made["coordinator"] = lambda: check_coordinator(home, around.free)
    if wanted.broker is not None:
        table = wanted.broker
        made["broker"] = lambda: _check_coordinator_connection(table, wanted, clock_s, timer)
    if not (wanted.settings or wanted.home or wanted.broker or wanted.root != machine_facts.ROOT):
        made["operator"] = around.operator
    return made


def run_groups(groups: Mapping[str, Group], limit_s: float = LIMIT_S) -> list[Finding]:
    """Run all groups within `limit_s` and return their findings, sorted by number.

    A group that raises an exception or exceeds the limit is an error finding.
    """
    told: dict[str, list[Finding]] = {}

    def run_group(name: str, group: Group) -> None:
        try:
            told[name] = group()
        except FedquiltError as problem:
            told[name] = [error("FQ002", f"{name}: {problem}", "fedquilt -vv doctor ...")]
        except Exception as problem:  # whatever a strange machine makes of a check
            said = f"{name} could not be examined ({type(problem).__name__}: {problem})"
            told[name] = [error("FQ002", said, "fedquilt -vv doctor ..., and tell fedquilt's authors what it says")]

    threads = {name: threading.Thread(target=run_group, args=(name, one), daemon=True) for name, one in groups.items()}
    until_s = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    found = []
    for name, thread in threads.items():
        thread.join(max(until_s - time.monotonic(), 0.0))
        said = f"{name} was not examined within {limit_s:g} s: something there does not answer"
        found += told.get(name, [error("FQ001", said, "fedquilt -vv doctor ...")])
    return sorted(found, key=lambda one: one.number)


# -- groups ---------------------------------------------------------------------------------------


def _check_machine(wanted: ExaminationTarget, clock_s: float) -> list[Finding]:
    seen = machine_facts.read_machine(wanted.root, clock_s, time.monotonic())
    return [*machine.check_machine(seen), *packages.check_packages(seen, packages.read_packages(seen.paths))]


def _check_agent(
    wanted: ExaminationTarget, path: Path, settings: AgentSettings, clock_s: float, around: ExaminationEnvironment
) -> list[Finding]:
    seen = machine_facts.read_machine(wanted.root, clock_s, time.monotonic())
    installed = packages.read_packages(seen.paths)
    found = [*machine.check_machine(seen), *packages.check_packages(seen, installed)]
    return [*found, *agent.check_agent(settings, path, seen, installed, around.free)]


def _check_device_connection(settings: AgentSettings, clock_s: float, timer: ExaminationDeadline) -> list[Finding]:
    try:
        broker = Broker.from_url(**msgspec.structs.asdict(settings.broker))
    except FedquiltError:
        return []  # FQ304 tells
    found = checks_broker.check_connection(broker, clock_s, timer)
    if any(one.severity == "error" for one in found):
        return found
    if folders.is_locked(Path(settings.home)):
        # a broker with certificates would take this client for the agent and disconnect the agent
        said = f"{settings.device}'s agent runs here: its rights at {broker} are tried while it is stopped"
        return [*found, ok("FQ411", said)]
    with checks_broker.open_link(broker, f"{permissions.NOBODY}-{settings.device}", timer) as link:
        if isinstance(link, Finding):
            return [*found, link]
        found += checks_broker.check_packet_limit(broker, link)
        own = authentication.load_identity(broker)
        if isinstance(own, Finding):
            seen = permissions.try_device(link, settings.fleet, settings.device, timer)
            return [*found, *permissions.judge_device(seen, broker, settings.device), own]
        seen = permissions.try_device(
            link, settings.fleet, settings.device, timer, lambda: ("hello", authenticated_link.handshake_probe(own))
        )
        found += permissions.judge_device(seen, broker, settings.device)
        return [
            *found,
            authentication.check_handshake(link, own, settings.fleet, settings.device, seen.coordinator, timer),
        ]


def _check_coordinator_connection(
    table: Mapping[str, Any], wanted: ExaminationTarget, clock_s: float, timer: ExaminationDeadline
) -> list[Finding]:
    try:
        broker = Broker.from_url(**table)
    except FedquiltError as problem:
        return [error("FQ400", str(problem), "correct --broker and the files beside it")]
    found = checks_broker.check_connection(broker, clock_s, timer)
    if any(one.severity == "error" for one in found):
        return found
    held = None if broker.cert is None else certificate.load_certificate(broker.cert)
    watches = held is not None and held.unit == authenticated_link.OBSERVER
    if not watches and wanted.home is not None and folders.is_locked(wanted.home):
        said = f"a coordinator serves {wanted.home}: its rights at {broker} are tried while it is stopped"
        return [*found, ok("FQ413", said)]
    with checks_broker.open_link(
        broker, f"{permissions.NOBODY}-{'observer' if watches else 'coordinator'}", timer
    ) as link:
        if isinstance(link, Finding):
            return [*found, link]
        found += checks_broker.check_packet_limit(broker, link)
        if watches:
            seen, devices = permissions.try_observer(link, wanted.fleet, str(held and held.name), timer)
            return [*found, *permissions.judge_observer(seen, devices, broker)]
        own = authentication.load_identity(broker)
        found.append(own if isinstance(own, Finding) else authentication.check_coordinator_certificate(own, clock_s))
        return [*found, *permissions.judge_coordinator(permissions.try_coordinator(link, wanted.fleet, timer), broker)]
