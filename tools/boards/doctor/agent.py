"""Checks of an agent's credentials, certificate, power mode, home, data and memory budget."""

from __future__ import annotations

import os
import ssl
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from fedquilt import profiles
from fedquilt.core import FedquiltError
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import agent_state, devices
from fedquilt.edge_agent.clocks import controls, owner_limits
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.clocks.controls import ClockControls, PowerMode, is_same_mode
from fedquilt.edge_agent.devices import linux
from fedquilt.edge_agent.engines import NEEDS
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, estimate_points
from fedquilt.edge_agent.settings import AgentSettings, parse_size
from fedquilt.edge_agent.task import memory_budget
from fedquilt.host import sysfs
from fedquilt.security import enrolment
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.tools.boards.doctor.machine import (
    FREE_MEMORY,
    InstalledPackages,
    onnx_installation_command,
    read_packages,
)
from fedquilt.tools.boards.doctor.machine_facts import Free, HelperFault, MachineFacts, free_bytes, nearest_existing
from fedquilt.transport.mqtt.broker import Broker

PARTS: Final = ("ca", "cert", "key", "password_file")


class Certificate(NamedTuple):
    file: str
    name: str | None  # the subject's common name
    begins_s: float
    ends_s: float
    unit: str | None = None  # the subject's organisational unit


def load_certificate(file: str) -> Certificate:
    """Load the first certificate of a PEM file, with Python's own ssl alone, and without verification."""
    told: dict[str, Any] = _test_decode_cert(file)  # boards may not have the cryptography library
    subject: dict[str, str] = {}
    for key, value in (each for names in told["subject"] for each in names):
        subject.setdefault(key, value)
    begins_s, ends_s = (ssl.cert_time_to_seconds(told[key]) for key in ("notBefore", "notAfter"))
    return Certificate(file, subject.get("commonName"), begins_s, ends_s, subject.get("organizationalUnitName"))


def _check_credentials(settings: AgentSettings, path: Path) -> Verdict:
    try:
        return f"[broker] can be used: {Broker.from_url(**msgspec.structs.asdict(settings.broker))}"
    except FedquiltError as problem:
        files = [Path(name) for part in PARTS if (name := getattr(settings.broker, part)) is not None]
        if any(sysfs.is_forbidden(one) for one in files):
            return error(str(problem), f"sudo fedquilt doctor {path}")
        if settings.enrol.url is not None and not all(sysfs.is_visible(one) for one in files):
            return error(str(problem), f"sudo fedquilt identity enrol {path}")
        return error(str(problem), f"correct [broker] in {path}")


def _check_secret_modes(settings: AgentSettings) -> Verdict:
    for name in (settings.broker.key, settings.broker.password_file, settings.enrol.token):
        try:
            mode = os.stat(name).st_mode if name is not None else 0
        except OSError:
            continue
        if mode & 0o077:
            return Problem(f"{name} can be read by other users (mode {mode & 0o777:04o})", f"chmod 600 {name}")
    return None


def _check_validity(held: Certificate, path: Path, clock_s: float) -> Verdict:
    certificate, ends, renew = (
        f"certificate {held.file}",
        format_day(held.ends_s),
        f"sudo fedquilt identity enrol {path}",
    )
    if clock_s < held.begins_s:
        return error(
            f"{certificate} begins on {format_day(held.begins_s)}, and the clock says {format_day(clock_s)}: "
            "it is behind",
            "sudo timedatectl set-ntp true",
        )
    if clock_s >= held.ends_s:
        return error(f"{certificate} ended on {ends}: the broker will refuse it", renew)
    if clock_s >= held.ends_s - (held.ends_s - held.begins_s) * enrolment.RENEWAL_SHARE / 2:
        return Problem(f"{certificate} ends on {ends} and was not renewed in time", renew)
    return f"{certificate} is valid until {ends}"


def _check_certificate_name(held: Certificate, settings: AgentSettings) -> Verdict:
    if held.name == settings.device:
        return f"the certificate names {settings.device}"
    return error(
        f"certificate {held.file} is of {held.name!r}, and this device is {settings.device!r}: "
        "the broker keeps it to the other's branch",
        f"fedquilt identity token {settings.device} on the authority's machine, then enrol this board anew",
    )


def format_day(clock_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(clock_s))


IDENTITY: Final = (
    Check("FQ304", ("settings", "path"), _check_credentials),
    Check("FQ305", ("settings",), _check_secret_modes),
    Check("FQ306", ("certificate", "path", "clock_s"), _check_validity),
    Check("FQ307", ("certificate", "settings"), _check_certificate_name),
)


def check_deadlines(settings: AgentSettings, machine: MachineFacts) -> Verdict:
    """Check that the power mode meets the latest deadlines, or return None without data.

    A task's work and the time that it had are the agent's own record, beside what it has learned of its speed.
    """
    levers = controls.discover_controls(machine.root)
    mode = next((each for each in levers.modes if is_same_mode(each.name, machine.mode)), None)
    if not machine.tegra or settings.board != "auto" or mode is None:
        return None
    try:
        board = (
            linux.find_profile(machine.root)
            if settings.profile is None
            else profiles.find_board_profile(settings.profile)
        )
        known = agent_state.read_learned_costs(Path(settings.home))
    except FedquiltError:  # the profile is FQ308's; of a home of another user nothing is known
        return None
    met = False
    for workload, learned in known.items():
        latest = learned.latest
        takes_s = (
            None
            if board is None or latest is None
            else _estimate_shortest_duration_s(board, levers, mode, learned, latest)
        )
        if board is None or latest is None or takes_s is None or latest.left_s <= 0:
            continue
        met = True
        if takes_s > latest.left_s:
            others = {
                each: _estimate_shortest_duration_s(board, levers, each, learned, latest) for each in levers.modes
            }
            enough = {each: told_s for each, told_s in others.items() if told_s is not None and told_s <= latest.left_s}
            return _describe_slow_mode(mode, workload, takes_s, latest.left_s, enough)
    return f"power mode {mode.name} is fast enough for the latest deadlines" if met else None


def _describe_slow_mode(
    mode: PowerMode, workload: str, takes_s: float, left_s: float, enough: dict[PowerMode, float]
) -> Problem:
    said = (
        f"in power mode {mode.name} the latest task ({workload}) takes {takes_s:.1f} s at the highest clocks that the "
        f"mode permits, and had {left_s:.1f} s until its deadline"
    )
    if not enough:
        return Problem(f"{said}; no mode is fast enough", "a longer deadline_s under [cohort] of the job")
    least = max(enough, key=lambda each: enough[each])  # the slowest one that will do draws the least
    return Problem(f"{said}; in {least.name} it takes {enough[least]:.1f} s", f"sudo nvpmodel -m {least.id}")


def _estimate_shortest_duration_s(
    board: profiles.BoardProfile, levers: ClockControls, mode: PowerMode, learned: LearnedModel, latest: LatestTask
) -> float | None:
    most = owner_limits.permitted_hz(levers, owner_limits.control_limits(levers, mode))
    points = owner_limits.permitted_points(board.operating_points(), levers, mode, most)
    told = [each.seconds for each in estimate_points(learned, points, latest.work) if each is not None]
    return min(told, default=None)


LEAST_BYTES: Final = 100 * 10**6  # of disk: less, and a task's blobs do not fit
SYSTEM_SHARE: Final = 0.8  # of memory: a budget above it leaves the system too little
LEFT_SHARE: Final = 0.8  # of the budget: less than that left, and tasks will be refused


def settings_under_root(settings: AgentSettings, path: Path, root: Path) -> AgentSettings:
    if root == machine_facts.ROOT or root.resolve() not in path.resolve().parents:
        return settings
    base = root.resolve()

    def path_under_root(name: str | None) -> str | None:
        if name is None or not os.path.isabs(name) or base in Path(name).parents:
            return name
        return str(base / name.lstrip("/"))

    broker = msgspec.structs.replace(
        settings.broker, **{p: path_under_root(getattr(settings.broker, p)) for p in PARTS}
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
    def certificate(self) -> Certificate | None:
        """Return the device's certificate, or None if none is set or it cannot be read."""
        file = None if self.settings is None else self.settings.broker.cert
        try:
            return None if file is None else load_certificate(file)
        except OSError:  # FQ304 tells
            return None

    @property
    def memory_bytes(self) -> int | None:
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
    """Return the memory of the simulated board, or None for the machine itself."""
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
    most = machine_facts.parse_systemd_size((machine.unit or {}).get("MemoryMax", ""))
    if most is None:
        return None
    said = f"fedquilt-agent.service may take {most / 1e6:.0f} MB"
    if most < budget_bytes:
        less = f"less than the budget of {budget_bytes / 1e6:.0f} MB: the kernel would kill its tasks"
        return error(f"{said} (MemoryMax), {less}")
    return said


def _check_clock_helper(settings: AgentSettings, machine: MachineFacts) -> Verdict:
    policy, real = settings.governor.policy, machine.tegra and settings.board == "auto"
    if not real or policy == "board" or machine.helper is not None:
        return None
    return Problem(f"[governor] policy is {policy!r}, and no clock helper runs here: the board decides")


HOME: Final = Check("FQ302", ("settings",), check_home)
AGENT: Final = (
    HOME,
    Check("FQ303", ("settings", "free"), check_free_space),
    *IDENTITY,
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
    Check("FQ162", ("settings", "machine"), check_deadlines),
)
