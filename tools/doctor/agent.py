"""Checks of what an agent works with: its folder, data and budget; `identity` has what lets it in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import profiles
from fedquilt.core import FedquiltError
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices, sysfs
from fedquilt.edge_agent.devices import jetson
from fedquilt.edge_agent.engines import NEEDS
from fedquilt.edge_agent.settings import AgentSettings, size_bytes
from fedquilt.edge_agent.task import budget
from fedquilt.tools.doctor import facts, identity, modes
from fedquilt.tools.doctor.facts import Machine
from fedquilt.tools.doctor.findings import Finding, error, ok, there, warning
from fedquilt.tools.doctor.folders import Free, existing, free_bytes
from fedquilt.tools.doctor.packages import Packages

LEAST_BYTES: Final = 100 * 10**6  # of disk: less, and a task's blobs do not fit
SYSTEM_SHARE: Final = 0.8  # of memory: a budget above it leaves the system too little
LEFT_SHARE: Final = 0.8  # of the budget: less than that left, and tasks will be refused


def within(settings: AgentSettings, path: Path, root: Path) -> AgentSettings:
    """The settings as they are found from here: a mounted board's own paths begin at its root."""
    if root == facts.ROOT or root.resolve() not in path.resolve().parents:
        return settings
    base = root.resolve()

    def moved(name: str | None) -> str | None:
        if name is None or not os.path.isabs(name) or base in Path(name).parents:
            return name
        return str(base / name.lstrip("/"))

    broker = msgspec.structs.replace(settings.broker, **{p: moved(getattr(settings.broker, p)) for p in identity.PARTS})
    table = dict(settings.data)
    if isinstance(table.get("path"), str):
        table["path"] = moved(table["path"])
    return msgspec.structs.replace(
        settings, home=moved(settings.home), profile=moved(settings.profile), broker=broker, data=table
    )


def check(
    settings: AgentSettings, path: Path, machine: Machine, packages: Packages, free: Free = free_bytes
) -> list[Finding]:
    """All findings about the settings in the file `path`, on this machine."""
    home = Path(settings.home)
    found: list[Finding | None] = [folder(home), room(home, settings, free), examples(settings, path)]
    found += identity.check(settings, path, machine.clock_s)
    memory = machine.memory_bytes
    if settings.board != "auto" or settings.profile is not None:
        try:
            memory = _memory_bytes(settings) or memory
            found.append(ok("FQ308", f"board {settings.board}, profile {settings.profile or 'of its kind'}"))
        except FedquiltError as problem:
            file = settings.profile is not None and not profiles.is_name(settings.profile)
            wrong = "profile" if settings.profile else "board"
            mend = f"fedquilt record --out {settings.profile}" if file else f"correct {wrong} in {path}"
            found.append(error("FQ308", str(problem), mend))
    found.append(kind(settings, path, machine))
    if memory is not None:
        real = settings.board == "auto"
        found += [
            allowance(settings, path, memory),
            engines(settings.budget_bytes(memory), path, packages.versions),
            left(settings.budget_bytes(memory), machine.available_bytes) if real else None,
            unit(settings.budget_bytes(memory), machine.unit),
        ]
    found += [helper(settings, machine), modes.check(settings, machine)]
    return there(found)


# -- its folder -----------------------------------------------------------------------------------


def folder(home: Path) -> Finding:
    """Check that the agent's home can be written."""
    place = existing(home)
    if not place.is_dir():
        return error("FQ302", f"the agent's home {home} cannot be made: {place} is a file", f"mv {place} {place}.old")
    if not os.access(place, os.W_OK | os.X_OK):
        owner = place.stat().st_uid
        return error(
            "FQ302",
            f"the agent's home {home} cannot be written by this user ({place} is user {owner}'s)",
            f"sudo fedquilt doctor ..., or sudo chown -R $USER {place}",
        )
    return ok("FQ302", f"the agent's home {home} can be written")


def room(home: Path, settings: AgentSettings, free: Free) -> Finding:
    """Beside what is cached already, the cache may still grow to its size."""
    place = existing(home)
    left = free(place)
    cache = size_bytes(settings.cache)
    blobs = (home / "blobs").rglob("*") if os.access(home / "blobs", os.R_OK | os.X_OK) else ()
    held = sum(one.stat().st_size for one in blobs if one.is_file())
    mend = f"sudo du -xh {place} | sort -h | tail; or a smaller `cache` in agent.toml"
    if left < LEAST_BYTES:
        return error("FQ303", f"{left / 1e6:.0f} MB are free where {home} is: a round's blobs do not fit", mend)
    if left < cache - held:
        return warning(
            "FQ303",
            f"{left / 1e6:.0f} MB are free where {home} is, and its cache may grow by {(cache - held) / 1e6:.0f} MB",
            mend,
        )
    return ok("FQ303", f"{left / 1e9:.1f} GB are free where {home} is")


def kind(settings: AgentSettings, path: Path, machine: Machine) -> Finding | None:
    """Check that the board's speed and power are known by a profile of its own kind; None: nothing to report."""
    if settings.board != "auto" or not machine.tegra:
        return None
    fits = jetson.fitting(machine.root)
    if settings.profile is None:
        if fits is not None:
            return ok("FQ316", f"its profile is {fits.board}, which ships")
        named = ", ".join(sysfs.lines(sysfs.device_tree(machine.root) / "compatible"))
        return warning(
            "FQ316",
            f"no profile ships for this board ({named}): "
            "its speed and power are not known, and no operating point is chosen",
            f'sudo fedquilt record --out own.toml, and profile = "own.toml" in {path}',
        )
    try:
        given = profiles.find(settings.profile)
    except FedquiltError:
        return None  # FQ308 tells
    if fits is None or given.board == fits.board or given.board not in profiles.names():
        return None
    return warning(
        "FQ317",
        f"the profile is that of {given.board}, and this board is {fits.board}: predicted times and joules are wrong",
        f'take `profile` out of {path}, or write profile = "{fits.board}"',
    )


# -- what it works with ---------------------------------------------------------------------------


def examples(settings: AgentSettings, path: Path) -> Finding | None:
    """Check that the board's [data] can be read."""
    if not settings.data:
        return warning(
            "FQ309",
            f"{path} has no [data]: this board declines every task that needs examples",
            f"add [data] to {path}",
        )
    spec = DataSpec.parse(settings.data)
    sources = [(spec.path, spec.download), *((source.path, source.download) for source in spec.sources)]
    places = [Path(place) for place, fetched in sources if place and not fetched]
    for place in places:
        if not os.access(place, os.R_OK):
            said = "cannot be read by this user" if sysfs.hidden(place) else "are not there"
            return error("FQ309", f"the examples at {place} {said} ([data] of {path})", f"ls -ld {place}")
        if _empty(place):
            return error(
                "FQ309",
                f"the examples at {place} are none: it is empty ([data] of {path})",
                f"ls -la {place}; mount or copy the board's data there",
            )
    return ok("FQ309", f"the examples are there: {', '.join(map(str, places)) or spec.where}")


def _empty(place: Path) -> bool:
    """Whether a file has no bytes, or a folder no file in it or below that this user can see."""
    if place.is_file():
        return place.stat().st_size == 0
    return not any(names for _, _, names in os.walk(place))


def allowance(settings: AgentSettings, path: Path, memory_bytes: int) -> Finding:
    """Check the budget against the board's memory."""
    wanted = settings.budget_bytes(memory_bytes)
    said = f"the budget is {wanted / 1e6:.0f} MB of {memory_bytes / 1e6:.0f} MB of memory"
    mend = f'budget = "{memory_bytes // 2 // 10**6}MB" in {path}'
    if wanted > memory_bytes:
        return error("FQ310", f"{said}: more than there is; the kernel would kill what comes near it", mend)
    if wanted > SYSTEM_SHARE * memory_bytes:
        return warning("FQ310", f"{said}: too little is left for the system", mend)
    return ok("FQ310", said)


def engines(budget_bytes: int, path: Path, versions: Mapping[str, str]) -> Finding:
    """At least one engine other than numpy's is installed, and fits."""
    has = {"numpy": "numpy" in versions, "torch": "torch" in versions}
    has["onnx"] = "onnxruntime" in versions or "onnxruntime-gpu" in versions
    known = [name for name in NEEDS if has.get(name)]
    fit = [name for name in known if budget.least_bytes(name, {}) < budget_bytes]
    if short := budget.no_engine(budget_bytes, known):
        return error("FQ311", short, f'budget = "512MB" in {path}' if known else "pip install 'fedquilt[onnx]'")
    if set(fit) <= {"numpy"}:
        return warning(
            "FQ312",
            "of the engines only numpy's can be used here: no stitching, no training of more than small networks",
            "pip install 'fedquilt[onnx]'" if known == ["numpy"] else f'budget = "512MB" in {path}',
        )
    return ok("FQ311", f"engines that fit the budget: {', '.join(fit)}")


def left(budget_bytes: int, available_bytes: int | None) -> Finding | None:
    """Check the budget against the memory available now; None: nothing to report."""
    if available_bytes is None:
        return None
    if available_bytes < LEFT_SHARE * budget_bytes:
        return warning(
            "FQ313",
            f"{available_bytes / 1e6:.0f} MB of memory are left now, and the budget is {budget_bytes / 1e6:.0f} MB: "
            "tasks that would need it are declined",
            "ps -eo rss,comm --sort=-rss | head, and stop what is not needed",
        )
    return ok("FQ313", f"{available_bytes / 1e6:.0f} MB of memory are left now")


def unit(budget_bytes: int, written: Mapping[str, str] | None) -> Finding | None:
    """The unit's MemoryMax holds for the daemon and its task together."""
    most = facts.size_bytes((written or {}).get("MemoryMax", ""))
    if most is None:
        return None
    if most < budget_bytes:
        return error(
            "FQ314",
            f"fedquilt-agent.service may take {most / 1e6:.0f} MB (MemoryMax), less than the budget of "
            f"{budget_bytes / 1e6:.0f} MB: the kernel would kill its tasks",
            "fedquilt flash again, which writes it by the budget",
        )
    return ok("FQ314", f"fedquilt-agent.service may take {most / 1e6:.0f} MB")


def helper(settings: AgentSettings, machine: Machine) -> Finding | None:
    """Check that a clock helper runs if the agent's policy needs one; None: nothing to report."""
    if (
        not machine.tegra
        or settings.board != "auto"
        or settings.governor.policy == "board"
        or machine.helper is not None
    ):
        return None
    return warning(
        "FQ315",
        f"[governor] policy is {settings.governor.policy!r}, and no clock helper runs here: the board decides",
        "sudo systemctl enable --now fedquilt-clocks",
    )


def _memory_bytes(settings: AgentSettings) -> int | None:
    """Of the simulated board that the settings name; None for a real one, whose profile is read and checked.

    Raises:
        FedquiltError: there is no such board, or the profile is none.
    """
    if settings.board != "auto":
        return devices.make(settings.board).memory_bytes
    if settings.profile is not None:
        profiles.find(settings.profile)
    return None
