"""Checks of an agent's home, data and memory budget."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import profiles
from fedquilt.core import FedquiltError
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.devices import linux
from fedquilt.edge_agent.engines import NEEDS
from fedquilt.edge_agent.settings import AgentSettings, parse_size
from fedquilt.edge_agent.task import memory_budget
from fedquilt.host import sysfs
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.checks import identity, power_mode
from fedquilt.tools.boards.doctor.checks.machine import FREE_MEMORY
from fedquilt.tools.boards.doctor.checks.packages import InstalledPackages, onnx_installation_command, read_packages
from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.tools.boards.doctor.machine_facts import Free, HelperFault, MachineFacts, free_bytes, nearest_existing

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


@dataclass(frozen=True)
class Facts:
    """Facts of a machine and its agent, by the names in `Check.needs`."""

    machine: MachineFacts
    packages: InstalledPackages = InstalledPackages()
    settings: AgentSettings | None = None
    path: Path | None = None  # of agent.toml
    free: Free = free_bytes

    @classmethod
    def read(cls, root: Path, clock_s: float, settings: AgentSettings | None, path: Path | None, free: Free) -> Facts:
        machine = machine_facts.read_machine(root, clock_s, time.monotonic())
        return cls(machine, read_packages(machine.paths), settings, path, free)

    @property
    def helper(self) -> HelperStatus | HelperFault | None:
        return self.machine.helper

    @property
    def clock_s(self) -> float:
        return self.machine.clock_s

    @property
    def certificate(self) -> identity.Certificate | None:
        """Return the device's certificate, or None if none is set or it cannot be read."""
        file = None if self.settings is None else self.settings.broker.cert
        try:
            return None if file is None else identity.load_certificate(file)
        except OSError:  # FQ304 tells
            return None

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory that the settings simulate, or else that of the machine."""
        try:
            simulated = None if self.settings is None else simulated_memory_bytes(self.settings)
        except FedquiltError:  # FQ308 tells
            simulated = None
        return simulated or self.machine.memory_bytes

    @property
    def budget_bytes(self) -> int | None:
        memory = self.memory_bytes
        return None if self.settings is None or memory is None else self.settings.task_budget_bytes(memory)


def simulated_memory_bytes(settings: AgentSettings) -> int | None:
    """Return the memory of the simulated board, or None for the machine itself.

    Raises:
        FedquiltError: If the board or the profile is unknown or cannot be read.
    """
    if settings.board != "auto":
        return devices.create_device(settings.board).memory_bytes
    if settings.profile is not None:
        profiles.find_board_profile(settings.profile)
    return None


# -- its folder -----------------------------------------------------------------------------------


def check_home(settings: AgentSettings) -> Verdict:
    home = Path(settings.home)
    place = nearest_existing(home)
    if not place.is_dir():
        return error(f"the agent's home {home} cannot be made: {place} is a file", f"mv {place} {place}.old")
    if not os.access(place, os.W_OK | os.X_OK):
        owner = place.stat().st_uid
        return error(
            f"the agent's home {home} cannot be written by this user ({place} is user {owner}'s)",
            f"sudo fedquilt doctor ..., or sudo chown -R $USER {place}",
        )
    return f"the agent's home {home} can be written"


def check_free_space(settings: AgentSettings, free: Free) -> Verdict:
    """Check that the agent's cache has room to grow to its configured size."""
    home = Path(settings.home)
    place = nearest_existing(home)
    left = free(place)
    cache = parse_size(settings.cache)
    blobs = (home / "blobs").rglob("*") if os.access(home / "blobs", os.R_OK | os.X_OK) else ()
    held = sum(one.stat().st_size for one in blobs if one.is_file())
    fix = f"sudo du -xh {place} | sort -h | tail; or a smaller `cache` in agent.toml"
    if left < LEAST_BYTES:
        return error(f"{left / 1e6:.0f} MB are free where {home} is: a round's blobs do not fit", fix)
    if left < cache - held:
        return Problem(
            f"{left / 1e6:.0f} MB are free where {home} is, and its cache may grow by {(cache - held) / 1e6:.0f} MB",
            fix,
        )
    return f"{left / 1e9:.1f} GB are free where {home} is"


def _check_board_and_profile_exist(settings: AgentSettings, path: Path) -> Verdict:
    if settings.board == "auto" and settings.profile is None:
        return None
    try:
        simulated_memory_bytes(settings)
    except FedquiltError as problem:
        if settings.profile is not None and not profiles.is_board_name(settings.profile):
            return error(str(problem), f"fedquilt board record --out {settings.profile}")
        return error(str(problem), f"correct {'profile' if settings.profile else 'board'} in {path}")
    return f"board {settings.board}, profile {settings.profile or 'of its kind'}"


def _check_shipped_profile(settings: AgentSettings, path: Path, machine: MachineFacts) -> Verdict:
    """Check that a profile for this Jetson ships, unless the settings name a profile or a board."""
    if settings.board != "auto" or not machine.tegra or settings.profile is not None:
        return None
    if (fits := linux.find_profile(machine.root)) is not None:
        return f"its profile is {fits.board}, which ships"
    named = ", ".join(sysfs.read_strings(sysfs.device_tree_folder(machine.root) / "compatible"))
    return Problem(
        f"no profile ships for this board ({named}): "
        "its speed and power are not known, and no operating point is chosen",
        f'sudo fedquilt board record --out own.toml, and profile = "own.toml" in {path}',
    )


def _check_profile_fits_board(settings: AgentSettings, path: Path, machine: MachineFacts) -> Verdict:
    if settings.board != "auto" or not machine.tegra or settings.profile is None:
        return None
    fits = linux.find_profile(machine.root)
    try:
        given = profiles.find_board_profile(settings.profile)
    except FedquiltError:
        return None  # FQ308 tells
    if fits is None or given.board == fits.board or given.board not in profiles.board_names():
        return None
    return Problem(
        f"the profile is that of {given.board}, and this board is {fits.board}: predicted times and joules are wrong",
        f'take `profile` out of {path}, or write profile = "{fits.board}"',
    )


# -- what it works with ---------------------------------------------------------------------------


def check_examples(settings: AgentSettings, path: Path) -> Verdict:
    if not settings.data:
        said = f"{path} has no [data]: this board declines every task that needs examples"
        return Problem(said, f"add [data] to {path}")
    spec = DataSpec.parse(settings.data)
    sources = [(spec.path, spec.download), *((source.path, source.download) for source in spec.sources)]
    places = [Path(place) for place, fetched in sources if place and not fetched]
    for place in places:
        if not os.access(place, os.R_OK):
            said = "cannot be read by this user" if sysfs.is_forbidden(place) else "are not there"
            return error(f"the examples at {place} {said} ([data] of {path})", f"ls -ld {place}")
        if _is_empty(place):
            said = f"the examples at {place} are none: it is empty ([data] of {path})"
            return error(said, f"ls -la {place}; mount or copy the board's data there")
    return f"the examples are there: {', '.join(map(str, places)) or spec.source_name}"


def _is_empty(place: Path) -> bool:
    if place.is_file():
        return place.stat().st_size == 0
    return not any(names for _, _, names in os.walk(place))


def _check_memory_budget(budget_bytes: int, memory_bytes: int, path: Path) -> Verdict:
    said = f"the budget is {budget_bytes / 1e6:.0f} MB of {memory_bytes / 1e6:.0f} MB of memory"
    fix = f'budget = "{memory_bytes // 2 // 10**6}MB" in {path}'
    if budget_bytes > memory_bytes:
        return error(f"{said}: more than there is; the kernel would kill what comes near it", fix)
    if budget_bytes > SYSTEM_SHARE * memory_bytes:
        return Problem(f"{said}: too little is left for the system", fix)
    return said


def _installed_engines(packages: InstalledPackages) -> list[str]:
    needs = {"numpy": ("numpy",), "torch": ("torch",), "onnx": ("onnxruntime", "onnxruntime-gpu")}
    return [name for name in NEEDS if any(each in packages.versions for each in needs.get(name, ()))]


def _check_engines_fit_budget(
    budget_bytes: int, path: Path, packages: InstalledPackages, machine: MachineFacts
) -> Verdict:
    known = _installed_engines(packages)
    if short := memory_budget.describe_engine_shortage(budget_bytes, known):
        return error(short, f'budget = "512MB" in {path}' if known else onnx_installation_command(machine))
    fit = [name for name in known if memory_budget.minimum_task_bytes(name, {}) < budget_bytes]
    return f"engines that fit the budget: {', '.join(fit)}"


def _check_other_engines(budget_bytes: int, path: Path, packages: InstalledPackages, machine: MachineFacts) -> Verdict:
    """Check that an engine other than numpy's is installed and fits the budget."""
    known = _installed_engines(packages)
    if [name for name in known if memory_budget.minimum_task_bytes(name, {}) < budget_bytes] != ["numpy"]:
        return None
    return Problem(
        "of the engines only numpy's can be used here: no stitching, no training of more than small networks",
        onnx_installation_command(machine) if known == ["numpy"] else f'budget = "512MB" in {path}',
    )


def _check_available_memory(settings: AgentSettings, budget_bytes: int, machine: MachineFacts) -> Verdict:
    if settings.board != "auto" or machine.available_bytes is None:
        return None
    said = f"{machine.available_bytes / 1e6:.0f} MB of memory are left now"
    if machine.available_bytes < LEFT_SHARE * budget_bytes:
        return Problem(f"{said}, and the budget is {budget_bytes / 1e6:.0f} MB: tasks that would need it are declined")
    return said


def _check_unit_limit(budget_bytes: int, machine: MachineFacts) -> Verdict:
    """Check that the unit's MemoryMax covers the memory budget."""
    most = machine_facts.parse_systemd_size((machine.unit or {}).get("MemoryMax", ""))
    if most is None:
        return None
    said = f"fedquilt-agent.service may take {most / 1e6:.0f} MB"
    if most < budget_bytes:
        less = f"less than the budget of {budget_bytes / 1e6:.0f} MB: the kernel would kill its tasks"
        return error(f"{said} (MemoryMax), {less}")
    return said


def _check_clock_helper(settings: AgentSettings, machine: MachineFacts) -> Verdict:
    """Check that a clock helper runs if the agent's policy needs one."""
    policy, real = settings.governor.policy, machine.tegra and settings.board == "auto"
    if not real or policy == "board" or machine.helper is not None:
        return None
    return Problem(f"[governor] policy is {policy!r}, and no clock helper runs here: the board decides")


HOME: Final = Check("FQ302", ("settings",), check_home)
AGENT: Final = (
    HOME,
    Check("FQ303", ("settings", "free"), check_free_space),
    *identity.IDENTITY,
    Check("FQ308", ("settings", "path"), _check_board_and_profile_exist),
    Check("FQ309", ("settings", "path"), check_examples),
    Check("FQ310", ("budget_bytes", "memory_bytes", "path"), _check_memory_budget),
    Check("FQ311", ("budget_bytes", "path", "packages", "machine"), _check_engines_fit_budget),
    Check("FQ312", ("budget_bytes", "path", "packages", "machine"), _check_other_engines),
    Check("FQ313", ("settings", "budget_bytes", "machine"), _check_available_memory, FREE_MEMORY),
    Check(
        "FQ314",
        ("budget_bytes", "machine"),
        _check_unit_limit,
        "fedquilt board flash again, which writes it by the budget",
    ),
    Check("FQ315", ("settings", "machine"), _check_clock_helper, "sudo systemctl enable --now fedquilt-clocks"),
    Check("FQ316", ("settings", "path", "machine"), _check_shipped_profile),
    Check("FQ317", ("settings", "path", "machine"), _check_profile_fits_board),
    Check("FQ162", ("settings", "machine"), power_mode.check_deadlines),
)
