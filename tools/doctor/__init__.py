"""`fedquilt doctor`: what is wrong on this board, coordinator or operator's machine, and the command that mends it.

Groups of checks run beside each other, each in a thread of its own, as they wait for sensors, names and brokers;
what has not answered in time is a finding as well. It sets and mends nothing.
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
from fedquilt.tools.doctor import (
    agent,
    certificate,
    coordinator,
    facts,
    findings,
    folders,
    machine,
    operator,
    packages,
    reach,
    rights,
    signing,
)
from fedquilt.tools.doctor.findings import EXIT, Finding, error, ok
from fedquilt.tools.doctor.reach import Timer
from fedquilt.transport import sealed
from fedquilt.transport.broker import Broker

LIMIT_S: Final = 9.0
SPARE_S: Final = 0.5  # for what a group still does after its last wait

Group = Callable[[], list[Finding]]


@dataclass(frozen=True)
class Wanted:
    """Subject of the examination: a board's agent, a coordinator by its folder and broker, or this machine alone."""

    settings: Path | None = None
    home: Path | None = None
    broker: Mapping[str, Any] | None = None  # an agent.toml's [broker] table
    fleet: str = "fleet"
    root: Path = facts.ROOT


@dataclass(frozen=True)
class Around:
    """Where an examination gets what is not in files; tests give others."""

    clock_s: Callable[[], float] = time.time
    free: folders.Free = folders.free_bytes
    operator: Group = field(default=operator.check)


def main(wanted: Wanted, format: str) -> int:
    """Print the findings; the exit code says the worst: 0, 10 (warning), 11 (error).

    Raises:
        JobError: what cannot be examined together.
    """
    found = examine(groups(wanted))
    if format == "json":
        print(msgspec.json.encode(findings.table(found)).decode())
    else:
        print("\n".join(findings.lines(found)))
    return EXIT[findings.worst(found)]


def groups(wanted: Wanted, around: Around = Around(), limit_s: float = LIMIT_S) -> dict[str, Group]:
    """What there is to examine: name -> checks.

    Raises:
        JobError: what cannot be examined together.
    """
    if wanted.settings is not None and (wanted.home is not None or wanted.broker is not None):
        raise JobError("an agent.toml says which broker: leave --home and --broker out, which are a coordinator's")
    timer = Timer(time.monotonic() + limit_s - SPARE_S)
    clock_s = around.clock_s()
    made: dict[str, Group] = {}
    if wanted.settings is None:
        made["machine"] = lambda: _machine(wanted, clock_s)
    else:
        try:
            settings = agents.load(wanted.settings)
        except JobError as problem:
            said, mend = str(problem), f"correct {wanted.settings}"
            made["settings"] = lambda: [error("FQ301", said, mend)]
            made["machine"] = lambda: _machine(wanted, clock_s)
        else:
            path, settings = wanted.settings, agent.within(settings, wanted.settings, wanted.root)
            made["machine"] = lambda: _agent(wanted, path, settings, clock_s, around)
            made["broker"] = lambda: _device(settings, clock_s, timer)
    if wanted.home is not None:
        home = wanted.home
        made["coordinator"] = lambda: coordinator.check(home, around.free)
    if wanted.broker is not None:
        table = wanted.broker
        made["broker"] = lambda: _coordinators(table, wanted, clock_s, timer)
    if not (wanted.settings or wanted.home or wanted.broker or wanted.root != facts.ROOT):
        made["operator"] = around.operator
    return made


def examine(groups: Mapping[str, Group], limit_s: float = LIMIT_S) -> list[Finding]:
    """All findings, in the order of their numbers, within `limit_s`; a group that fails is a finding, and no more."""
    told: dict[str, list[Finding]] = {}

    def run(name: str, group: Group) -> None:
        try:
            told[name] = group()
        except FedquiltError as problem:
            told[name] = [error("FQ002", f"{name}: {problem}", "fedquilt -vv doctor ...")]
        except Exception as problem:  # whatever a strange machine makes of a check
            said = f"{name} could not be examined ({type(problem).__name__}: {problem})"
            told[name] = [error("FQ002", said, "fedquilt -vv doctor ..., and tell fedquilt's authors what it says")]

    threads = {name: threading.Thread(target=run, args=(name, one), daemon=True) for name, one in groups.items()}
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


def _machine(wanted: Wanted, clock_s: float) -> list[Finding]:
    seen = facts.look(wanted.root, clock_s, time.monotonic())
    return [*machine.check(seen), *packages.check(seen, packages.look(seen.paths))]


def _agent(wanted: Wanted, path: Path, settings: AgentSettings, clock_s: float, around: Around) -> list[Finding]:
    seen = facts.look(wanted.root, clock_s, time.monotonic())
    installed = packages.look(seen.paths)
    found = [*machine.check(seen), *packages.check(seen, installed)]
    return [*found, *agent.check(settings, path, seen, installed, around.free)]


def _device(settings: AgentSettings, clock_s: float, timer: Timer) -> list[Finding]:
    """The way to the broker, and the device's rights there."""
    try:
        broker = Broker.parse(**msgspec.structs.asdict(settings.broker))
    except FedquiltError:
        return []  # FQ304 tells
    found = reach.way(broker, clock_s, timer)
    if any(one.severity == "error" for one in found):
        return found
    if folders.runs(Path(settings.home)):
        # a broker that goes by certificates knows us as the agent, and would cut it off
        said = f"{settings.device}'s agent runs here: its rights at {broker} are tried while it is stopped"
        return [*found, ok("FQ411", said)]
    with reach.spoken(broker, f"{rights.NOBODY}-{settings.device}", timer) as link:
        if isinstance(link, Finding):
            return [*found, link]
        found += reach.limits(broker, link)
        own = signing.identity(broker)
        if isinstance(own, Finding):
            seen = rights.device(link, settings.fleet, settings.device, timer)
            return [*found, *rights.judge_device(seen, broker, settings.device), own]
        seen = rights.device(link, settings.fleet, settings.device, timer, lambda: ("hello", sealed.beginning(own)))
        found += rights.judge_device(seen, broker, settings.device)
        return [*found, signing.device(link, own, settings.fleet, settings.device, seen.coordinator, timer)]


def _coordinators(table: Mapping[str, Any], wanted: Wanted, clock_s: float, timer: Timer) -> list[Finding]:
    """The way to the broker, and there the rights of the coordinator, or of an observer by its certificate."""
    try:
        broker = Broker.parse(**table)
    except FedquiltError as problem:
        return [error("FQ400", str(problem), "correct --broker and the files beside it")]
    found = reach.way(broker, clock_s, timer)
    if any(one.severity == "error" for one in found):
        return found
    held = None if broker.cert is None else certificate.load(broker.cert)
    watches = held is not None and held.unit == sealed.OBSERVER
    if not watches and wanted.home is not None and folders.runs(wanted.home):
        said = f"a coordinator serves {wanted.home}: its rights at {broker} are tried while it is stopped"
        return [*found, ok("FQ413", said)]
    with reach.spoken(broker, f"{rights.NOBODY}-{'observer' if watches else 'coordinator'}", timer) as link:
        if isinstance(link, Finding):
            return [*found, link]
        found += reach.limits(broker, link)
        if watches:
            seen, devices = rights.observer(link, wanted.fleet, str(held and held.name), timer)
            return [*found, *rights.judge_observer(seen, devices, broker)]
        own = signing.identity(broker)
        found.append(own if isinstance(own, Finding) else signing.coordinator(own, clock_s))
        return [*found, *rights.judge_coordinator(rights.coordinator(link, wanted.fleet, timer), broker)]
