"""Checks of an agent's home, data and memory budget. None if a check does not apply."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import profiles
from fedquilt.core import FedquiltError
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.devices import jetson
from fedquilt.edge_agent.engines import NEEDS
from fedquilt.edge_agent.settings import AgentSettings, parse_size
from fedquilt.edge_agent.task import memory_budget
from fedquilt.host import sysfs
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.checks import identity, power_mode
from fedquilt.tools.boards.doctor.checks.packages import InstalledPackages
from fedquilt.tools.boards.doctor.findings import Finding, drop_missing, error, ok, warning
from fedquilt.tools.boards.doctor.folders import Free, free_bytes, nearest_existing
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts

LEAST_BYTES: Final = 100 * 10**6  # of disk: less, and a task's blobs do not fit
SYSTEM_SHARE: Final = 0.8  # of memory: a budget above it leaves the system too little
LEFT_SHARE: Final = 0.8  # of the budget: less than that left, and tasks will be refused


def settings_under_root(settings: AgentSettings, path: Path, root: Path) -> AgentSettings:
    """Return the settings with a mounted board's absolute paths moved under its root."""
    if root == machine_facts.ROOT or root.resolve() not in path.resolve().parents:
        return settings
    base = root.resolve()

    def path_under_root(name: str | None) -> str | None:
        if name is None or not os.path.isabs(name) or base in Path(name).parents:
            return name
        return str(base / name.lstrip("/"))

    broker = msgspec.structs.replace(
        settings.broker, **{p: path_under_root(getattr(settings.broker, p)) for p in identity.PARTS}
    )
    table = dict(settings.data)
    if isinstance(table.get("path"), str):
        table["path"] = path_under_root(table["path"])
    return msgspec.structs.replace(
        settings,
        home=path_under_root(settings.home),
        profile=path_under_root(settings.profile),
        broker=broker,
        data=table,
    )


def check_agent(
    settings: AgentSettings, path: Path, machine: MachineFacts, packages: InstalledPackages, free: Free = free_bytes
) -> list[Finding]:
    home = Path(settings.home)
    found: list[Finding | None] = [
        check_home(home),
        check_free_space(home, settings, free),
        check_examples(settings, path),
    ]
    found += identity.check_identity(settings, path, machine.clock_s)
    memory = machine.memory_bytes
    if settings.board != "auto" or settings.profile is not None:
        try:
            memory = _simulated_memory_bytes(settings) or memory
            found.append(ok("FQ308", f"board {settings.board}, profile {settings.profile or 'of its kind'}"))
        except FedquiltError as problem:
            file = settings.profile is not None and not profiles.is_board_name(settings.profile)
            wrong = "profile" if settings.profile else "board"
            mend = f"fedquilt board record --out {settings.profile}" if file else f"correct {wrong} in {path}"
            found.append(error("FQ308", str(problem), mend))
    found.append(check_profile(settings, path, machine))
    if memory is not None:
        real = settings.board == "auto"
        found += [
            check_budget(settings, path, memory),
            check_engines(settings.task_budget_bytes(memory), path, packages.versions),
            check_available_memory(settings.task_budget_bytes(memory), machine.available_bytes) if real else None,
            check_unit_limit(settings.task_budget_bytes(memory), machine.unit),
        ]
    found += [check_clock_helper(settings, machine), power_mode.check_deadlines(settings, machine)]
    return drop_missing(found)


# -- its folder -----------------------------------------------------------------------------------


def check_home(home: Path) -> Finding:
    place = nearest_existing(home)
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


def check_free_space(home: Path, settings: AgentSettings, free: Free) -> Finding:
    """Check that the agent's cache has room to grow to its configured size."""
    place = nearest_existing(home)
    left = free(place)
    cache = parse_size(settings.cache)
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


def check_profile(settings: AgentSettings, path: Path, machine: MachineFacts) -> Finding | None:
    if settings.board != "auto" or not machine.tegra:
        return None
    fits = jetson.find_profile(machine.root)
    if settings.profile is None:
        if fits is not None:
            return ok("FQ316", f"its profile is {fits.board}, which ships")
        named = ", ".join(sysfs.read_strings(sysfs.device_tree_folder(machine.root) / "compatible"))
        return warning(
            "FQ316",
            f"no profile ships for this board ({named}): "
            "its speed and power are not known, and no operating point is chosen",
            f'sudo fedquilt board record --out own.toml, and profile = "own.toml" in {path}',
        )
    try:
        given = profiles.find_board_profile(settings.profile)
    except FedquiltError:
        return None  # FQ308 tells
    if fits is None or given.board == fits.board or given.board not in profiles.board_names():
        return None
    return warning(
        "FQ317",
        f"the profile is that of {given.board}, and this board is {fits.board}: predicted times and joules are wrong",
        f'take `profile` out of {path}, or write profile = "{fits.board}"',
    )


# -- what it works with ---------------------------------------------------------------------------


def check_examples(settings: AgentSettings, path: Path) -> Finding | None:
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
            said = "cannot be read by this user" if sysfs.is_forbidden(place) else "are not there"
            return error("FQ309", f"the examples at {place} {said} ([data] of {path})", f"ls -ld {place}")
        if _is_empty(place):
            return error(
                "FQ309",
                f"the examples at {place} are none: it is empty ([data] of {path})",
                f"ls -la {place}; mount or copy the board's data there",
            )
    return ok("FQ309", f"the examples are there: {', '.join(map(str, places)) or spec.source_name}")


def _is_empty(place: Path) -> bool:
    if place.is_file():
        return place.stat().st_size == 0
    return not any(names for _, _, names in os.walk(place))


def check_budget(settings: AgentSettings, path: Path, memory_bytes: int) -> Finding:
    wanted = settings.task_budget_bytes(memory_bytes)
    said = f"the budget is {wanted / 1e6:.0f} MB of {memory_bytes / 1e6:.0f} MB of memory"
    mend = f'budget = "{memory_bytes // 2 // 10**6}MB" in {path}'
    if wanted > memory_bytes:
        return error("FQ310", f"{said}: more than there is; the kernel would kill what comes near it", mend)
    if wanted > SYSTEM_SHARE * memory_bytes:
        return warning("FQ310", f"{said}: too little is left for the system", mend)
    return ok("FQ310", said)


def check_engines(budget_bytes: int, path: Path, versions: Mapping[str, str]) -> Finding:
    """Check that an engine other than numpy's is installed and fits the budget."""
    has = {"numpy": "numpy" in versions, "torch": "torch" in versions}
    has["onnx"] = "onnxruntime" in versions or "onnxruntime-gpu" in versions
    known = [name for name in NEEDS if has.get(name)]
    fit = [name for name in known if memory_budget.minimum_task_bytes(name, {}) < budget_bytes]
    if short := memory_budget.describe_engine_shortage(budget_bytes, known):
        return error("FQ311", short, f'budget = "512MB" in {path}' if known else "pip install 'fedquilt[onnx]'")
    if set(fit) <= {"numpy"}:
        return warning(
            "FQ312",
            "of the engines only numpy's can be used here: no stitching, no training of more than small networks",
            "pip install 'fedquilt[onnx]'" if known == ["numpy"] else f'budget = "512MB" in {path}',
        )
    return ok("FQ311", f"engines that fit the budget: {', '.join(fit)}")


def check_available_memory(budget_bytes: int, available_bytes: int | None) -> Finding | None:
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


def check_unit_limit(budget_bytes: int, written: Mapping[str, str] | None) -> Finding | None:
    """Check that the unit's MemoryMax covers the memory budget."""
    most = machine_facts.parse_systemd_size((written or {}).get("MemoryMax", ""))
    if most is None:
        return None
    if most < budget_bytes:
        return error(
            "FQ314",
            f"fedquilt-agent.service may take {most / 1e6:.0f} MB (MemoryMax), less than the budget of "
            f"{budget_bytes / 1e6:.0f} MB: the kernel would kill its tasks",
            "fedquilt board flash again, which writes it by the budget",
        )
    return ok("FQ314", f"fedquilt-agent.service may take {most / 1e6:.0f} MB")


def check_clock_helper(settings: AgentSettings, machine: MachineFacts) -> Finding | None:
    """Check that a clock helper runs if the agent's policy needs one."""
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


def _simulated_memory_bytes(settings: AgentSettings) -> int | None:
    if settings.board != "auto":
        return devices.create_device(settings.board).memory_bytes
    if settings.profile is not None:
        profiles.find_board_profile(settings.profile)
    return None
