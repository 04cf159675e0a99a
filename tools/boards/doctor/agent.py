"""Checks of an agent's credentials, certificate, power mode, home, data and memory budget."""

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
from fedquilt.edge_agent import agent_state, devices
from fedquilt.edge_agent.clocks import controls, owner_limits
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.clocks.controls import ClockControls, PowerMode, is_same_mode
from fedquilt.edge_agent.devices import linux
from fedquilt.edge_agent.engines import NEEDS
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, estimate_points
from fedquilt.edge_agent.settings import AgentSettings, parse_size
from fedquilt.edge_agent.task import data_check, memory_budget
from fedquilt.host import sysfs
from fedquilt.security import enrolment
from fedquilt.security.certificates import ENROL_AGAIN_FIX, Certificate, find_name_problem, load_certificate
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.tools.boards.doctor.machine import (
    FREE_MEMORY_FIX,
    MIN_CLOCK_S,
    InstalledPackages,
    onnx_installation_command,
    read_packages,
)
from fedquilt.tools.boards.doctor.machine_facts import (
    FreeBytes,
    HelperFault,
    MachineFacts,
    free_bytes,
    nearest_existing,
)
from fedquilt.transport.mqtt.broker import Broker

CREDENTIAL_FIELDS: Final = ("ca", "cert", "key", "password_file")


def _check_credentials(settings: AgentSettings, path: Path) -> Verdict:
    try:
        return f"[broker] can be used: {Broker.from_url(**msgspec.structs.asdict(settings.broker))}"
    except FedquiltError as problem:
        files = [Path(name) for part in CREDENTIAL_FIELDS if (name := getattr(settings.broker, part)) is not None]
        if any(sysfs.is_forbidden(file) for file in files):
            return error(str(problem), f"sudo fedquilt doctor {path}")
        if settings.enrol.url is not None and not all(sysfs.is_visible(file) for file in files):
            return error(str(problem), f"sudo fedquilt identity enrol {path}")
        return error(str(problem), f"correct [broker] in {path}")


def _check_secret_file_modes(settings: AgentSettings) -> Verdict:
    for name in (settings.broker.key, settings.broker.password_file, settings.enrol.token):
        try:
            mode = os.stat(name).st_mode if name is not None else 0
        except OSError:
            continue
        if mode & 0o077:
            return Problem(f"{name} can be read by other users (mode {mode & 0o777:04o})", f"chmod 600 {name}")
    return None


def _check_certificate_validity(device_certificate: Certificate, path: Path, clock_s: float) -> Verdict:
    begins_s, ends_s = device_certificate.begins_s, device_certificate.ends_s
    label = f"certificate {device_certificate.file}"
    end_day = format_day(ends_s)
    renew_fix = f"sudo fedquilt identity enrol {path}"
    if clock_s < MIN_CLOCK_S:  # the check of the clock reports it, and the broker judges the certificate by its own
        return f"{label} ends on {end_day}, which cannot be judged while the clock shows {format_day(clock_s)}"
    if ends_s < MIN_CLOCK_S:
        return error(
            f"{label} was issued while the authority's clock showed {format_day(begins_s)}: the broker will refuse it",
            f"set the clock of the authority's machine, then {ENROL_AGAIN_FIX.format(device=device_certificate.name)}",
        )
    if clock_s < begins_s:
        return error(
            f"{label} is valid from {format_day(begins_s)}, but the clock shows {format_day(clock_s)}: it is slow",
            "sudo timedatectl set-ntp true",
        )
    if clock_s >= ends_s:
        return error(f"{label} ended on {end_day}: the broker will refuse it", renew_fix)
    if clock_s >= ends_s - (ends_s - begins_s) * enrolment.RENEWAL_SHARE / 2:
        return Problem(f"{label} ends on {end_day} and was not renewed in time", renew_fix)
    return f"{label} is valid until {end_day}"


def _check_certificate_name(certificate: Certificate, settings: AgentSettings) -> Verdict:
    if (problem := find_name_problem(certificate, settings.device)) is None:
        return f"the certificate names {settings.device}"
    return error(problem, ENROL_AGAIN_FIX.format(device=settings.device))


def format_day(clock_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(clock_s))


IDENTITY: Final = (
    Check("FQ304", ("settings", "path"), _check_credentials),
    Check("FQ305", ("settings",), _check_secret_file_modes),
    Check("FQ306", ("certificate", "path", "clock_s"), _check_certificate_validity),
    Check("FQ307", ("certificate", "settings"), _check_certificate_name),
)


def check_deadlines(settings: AgentSettings, machine: MachineFacts) -> Verdict:
    """Check that tasks like the latest ones meet their deadlines, or return None without data.

    Durations are predicted from the costs that the agent has learned on this device.
    """
    clocks = controls.discover_controls(machine.root)
    mode = next((other_mode for other_mode in clocks.modes if is_same_mode(other_mode.name, machine.power_mode)), None)
    if not machine.is_tegra or settings.board != "auto" or mode is None:
        return None
    try:
        board = (
            linux.find_profile(machine.root)
            if settings.profile is None
            else profiles.find_board_profile(settings.profile)
        )
        learned_costs = agent_state.read_learned_costs(Path(settings.home))
    except FedquiltError:  # FQ308 reports profiles; homes of other users are unreadable
        return None
    has_data = False
    for workload, learned in learned_costs.items():
        latest = learned.latest
        needed_s = (
            None
            if board is None or latest is None
            else _estimate_shortest_duration_s(board, clocks, mode, learned, latest)
        )
        if board is None or latest is None or needed_s is None or latest.time_left_s <= 0:
            continue
        has_data = True
        if needed_s > latest.time_left_s:
            times_s = {
                other_mode: _estimate_shortest_duration_s(board, clocks, other_mode, learned, latest)
                for other_mode in clocks.modes
            }
            enough_modes = {
                other_mode: duration_s
                for other_mode, duration_s in times_s.items()
                if duration_s is not None and duration_s <= latest.time_left_s
            }
            return _describe_slow_mode(mode, workload, needed_s, latest.time_left_s, enough_modes)
    return f"power mode {mode.name} is fast enough for the latest deadlines" if has_data else None


def _describe_slow_mode(
    mode: PowerMode, workload: str, duration_s: float, available_s: float, modes: dict[PowerMode, float]
) -> Problem:
    sentence = (
        f"in power mode {mode.name} the latest task ({workload}) takes {duration_s:.1f} s at the highest "
        f"clocks that the mode permits, but had {available_s:.1f} s until its deadline"
    )
    if not modes:
        return Problem(f"{sentence}; no mode is fast enough", "increase [cohort] deadline_s in the job")
    # the slowest sufficient mode needs the least power
    slowest = max(modes, key=lambda candidate: modes[candidate])
    return Problem(f"{sentence}; in {slowest.name} it takes {modes[slowest]:.1f} s", f"sudo nvpmodel -m {slowest.id}")


def _estimate_shortest_duration_s(
    board: profiles.BoardProfile, clocks: ClockControls, mode: PowerMode, learned: LearnedModel, latest: LatestTask
) -> float | None:
    max_hz = owner_limits.permitted_hz(clocks, owner_limits.control_limits(clocks, mode))
    points = owner_limits.permitted_points(board.operating_points(), clocks, mode, max_hz)
    durations_s = [
        estimate.seconds for estimate in estimate_points(learned, points, latest.work) if estimate is not None
    ]
    return min(durations_s, default=None)


MIN_FREE_BYTES: Final = 100 * 10**6  # below, the blobs of a task do not fit on the disk
MAX_BUDGET_SHARE: Final = 0.8  # of memory. The system needs the rest
MIN_AVAILABLE_SHARE: Final = 0.8  # of the budget. With less memory tasks are declined


def settings_under_root(settings: AgentSettings, path: Path, root: Path) -> AgentSettings:
    """Return settings with absolute paths moved below `root`, unless their file `path` is elsewhere."""
    if root == machine_facts.ROOT or root.resolve() not in path.resolve().parents:
        return settings
    base = root.resolve()

    def path_under_root(name: str | None) -> str | None:
        if name is None or not os.path.isabs(name) or base in Path(name).parents:
            return name
        return str(base / name.lstrip("/"))

    broker = msgspec.structs.replace(
        settings.broker, **{p: path_under_root(getattr(settings.broker, p)) for p in CREDENTIAL_FIELDS}
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
    free: FreeBytes = free_bytes

    @classmethod
    def read(
        cls, root: Path, clock_s: float, settings: AgentSettings | None, path: Path | None, free: FreeBytes
    ) -> Facts:
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
        file = None if self.settings is None else self.settings.broker.cert
        try:
            return None if file is None else load_certificate(file)
        except OSError:  # FQ304 reports the error
            return None

    @property
    def memory_bytes(self) -> int | None:
        try:
            simulated = None if self.settings is None else simulated_memory_bytes(self.settings)
        except FedquiltError:  # FQ308 reports the error
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


# -- home -----------------------------------------------------------------------------------------


def check_home(settings: AgentSettings) -> Verdict:
    home = Path(settings.home)
    existing = nearest_existing(home)
    if not existing.is_dir():
        return error(f"agent's home {home} cannot be created: {existing} is a file", f"mv {existing} {existing}.old")
    if not os.access(existing, os.W_OK | os.X_OK):
        owner = existing.stat().st_uid
        return error(
            f"agent's home {home} is not writable by this user ({existing} belongs to user {owner})",
            f"sudo fedquilt doctor ..., or sudo chown -R $USER {existing}",
        )
    return f"agent's home {home} is writable"


def check_free_space(settings: AgentSettings, free: FreeBytes) -> Verdict:
    home = Path(settings.home)
    existing = nearest_existing(home)
    free_space = free(existing)
    cache = parse_size(settings.cache)
    blobs = (home / "blobs").rglob("*") if os.access(home / "blobs", os.R_OK | os.X_OK) else ()
    cached_bytes = sum(path.stat().st_size for path in blobs if path.is_file())
    fix = f"sudo du -xh {existing} | sort -h | tail; or a smaller `cache` in agent.toml"
    sentence = f"the disk of {home} has {free_space / 1e6:.0f} MB free"
    if free_space < MIN_FREE_BYTES:
        return error(f"{sentence}: a round's blobs do not fit", fix)
    if free_space < cache - cached_bytes:
        return Problem(f"{sentence}, but the cache may grow by {(cache - cached_bytes) / 1e6:.0f} MB", fix)
    return sentence


def _check_board_and_profile_exist(settings: AgentSettings, path: Path) -> Verdict:
    if settings.board == "auto" and settings.profile is None:
        return None
    try:
        simulated_memory_bytes(settings)
    except FedquiltError as problem:
        if settings.profile is not None and not profiles.is_board_name(settings.profile):
            return error(str(problem), f"fedquilt board record --out {settings.profile}")
        return error(str(problem), f"correct {'profile' if settings.profile else 'board'} in {path}")
    return f"board {settings.board}, profile {settings.profile or 'of this kind of board'}"


def _check_shipped_profile(settings: AgentSettings, path: Path, machine: MachineFacts) -> Verdict:
    if settings.board != "auto" or not machine.is_tegra or settings.profile is not None:
        return None
    if (shipped := linux.find_profile(machine.root)) is not None:
        return f"profile {shipped.board} of fedquilt describes this board"
    compatible = ", ".join(sysfs.read_strings(sysfs.device_tree_folder(machine.root) / "compatible"))
    return Problem(
        f"no profile describes this board ({compatible}): its speed and power are unknown, clocks are not pinned",
        f'sudo fedquilt board record --out own.toml, and profile = "own.toml" in {path}',
    )


def _check_profile_fits_board(settings: AgentSettings, path: Path, machine: MachineFacts) -> Verdict:
    if settings.board != "auto" or not machine.is_tegra or settings.profile is None:
        return None
    shipped = linux.find_profile(machine.root)
    try:
        profile = profiles.find_board_profile(settings.profile)
    except FedquiltError:
        return None  # FQ308 reports the error
    if shipped is None or profile.board == shipped.board or profile.board not in profiles.board_names():
        return None
    return Problem(
        f"the profile is of {profile.board}, but this board is {shipped.board}: predicted times and joules are wrong",
        f'remove `profile` from {path}, or write profile = "{shipped.board}"',
    )


# -- data and memory ------------------------------------------------------------------------------


def check_examples(settings: AgentSettings, path: Path) -> Verdict:
    if not settings.data:
        problem = f"{path} has no [data]: this board declines every task that needs examples"
        return Problem(problem, f"add [data] to {path}")
    spec = DataSpec.parse(settings.data)
    if problem := spec.find_path_problem():
        return error(problem, f"correct [data] of {path}, or mount the board's data there")
    paths = spec.list_paths()
    for data_path in filter(_is_empty, paths):
        problem = f"data {data_path} is empty ([data] of {path})"
        return error(problem, f"ls -la {data_path}; mount or copy the board's data there")
    if problem := data_check.find_data_problem(settings.data):
        return error(f"the examples cannot be used: {problem}", f"correct [data] of {path}")
    return f"data found: {', '.join(map(str, paths)) or spec.source_name}"


def _is_empty(path: Path) -> bool:
    if path.is_file():
        return path.stat().st_size == 0
    return not any(names for _, _, names in os.walk(path))


def _check_memory_budget(budget_bytes: int, memory_bytes: int, path: Path) -> Verdict:
    sentence = f"memory budget is {budget_bytes / 1e6:.0f} of {memory_bytes / 1e6:.0f} MB"
    fix = f'budget = "{memory_bytes // 2 // 10**6}MB" in {path}'
    if budget_bytes > memory_bytes:
        return error(f"{sentence}: the kernel kills tasks that need more memory than the board has", fix)
    if budget_bytes > MAX_BUDGET_SHARE * memory_bytes:
        return Problem(f"{sentence}: too little memory is left for the system", fix)
    return sentence


def _installed_engines(packages: InstalledPackages) -> list[str]:
    needs = {"numpy": ("numpy",), "torch": ("torch",), "onnx": ("onnxruntime", "onnxruntime-gpu")}
    return [name for name in NEEDS if any(package in packages.versions for package in needs.get(name, ()))]


def _check_engines_fit_budget(
    budget_bytes: int, path: Path, packages: InstalledPackages, machine: MachineFacts
) -> Verdict:
    engines = _installed_engines(packages)
    if shortage := memory_budget.describe_engine_shortage(budget_bytes, engines):
        return error(shortage, f'budget = "512MB" in {path}' if engines else onnx_installation_command(machine))
    fitting = [name for name in engines if memory_budget.minimum_task_bytes(name, {}) < budget_bytes]
    return f"engines that fit the budget: {', '.join(fitting)}"


def _check_engine_besides_numpy(
    budget_bytes: int, path: Path, packages: InstalledPackages, machine: MachineFacts
) -> Verdict:
    engines = _installed_engines(packages)
    if [name for name in engines if memory_budget.minimum_task_bytes(name, {}) < budget_bytes] != ["numpy"]:
        return None
    return Problem(
        "only the numpy engine is usable: no stitching, and only small networks can be trained",
        onnx_installation_command(machine) if engines == ["numpy"] else f'budget = "512MB" in {path}',
    )


def _check_available_memory(settings: AgentSettings, budget_bytes: int, machine: MachineFacts) -> Verdict:
    if settings.board != "auto" or machine.available_bytes is None:
        return None
    sentence = f"{machine.available_bytes / 1e6:.0f} MB of memory are available now"
    if machine.available_bytes < MIN_AVAILABLE_SHARE * budget_bytes:
        return Problem(f"{sentence}, less than the budget of {budget_bytes / 1e6:.0f} MB: larger tasks are declined")
    return sentence


def _check_unit_limit(budget_bytes: int, machine: MachineFacts) -> Verdict:
    limit_bytes = machine_facts.parse_systemd_size((machine.unit or {}).get("MemoryMax", ""))
    if limit_bytes is None:
        return None
    sentence = f"fedquilt-agent.service is limited to {limit_bytes / 1e6:.0f} MB (MemoryMax)"
    if limit_bytes < budget_bytes:
        return error(f"{sentence}, less than the budget of {budget_bytes / 1e6:.0f} MB: the kernel kills large tasks")
    return sentence


def _check_clock_helper(settings: AgentSettings, machine: MachineFacts) -> Verdict:
    policy, is_jetson = settings.governor.policy, machine.is_tegra and settings.board == "auto"
    if not is_jetson or policy == "board" or machine.helper is not None:
        return None
    return Problem(f"[governor] policy is {policy!r}, but no clock helper is running: clocks are not pinned")


HOME: Final = Check("FQ302", ("settings",), check_home)
EXAMPLES: Final = Check("FQ309", ("settings", "path"), check_examples)
AGENT: Final = (
    HOME,
    Check("FQ303", ("settings", "free"), check_free_space),
    *IDENTITY,
    Check("FQ308", ("settings", "path"), _check_board_and_profile_exist),
    EXAMPLES,
    Check("FQ310", ("budget_bytes", "memory_bytes", "path"), _check_memory_budget),
    Check("FQ311", ("budget_bytes", "path", "packages", "machine"), _check_engines_fit_budget),
    Check("FQ312", ("budget_bytes", "path", "packages", "machine"), _check_engine_besides_numpy),
    Check("FQ313", ("settings", "budget_bytes", "machine"), _check_available_memory, FREE_MEMORY_FIX),
    Check("FQ314", ("budget_bytes", "machine"), _check_unit_limit, "fedquilt board flash again, which sets MemoryMax"),
    Check("FQ315", ("settings", "machine"), _check_clock_helper, "sudo systemctl enable --now fedquilt-clocks"),
    Check("FQ316", ("settings", "path", "machine"), _check_shipped_profile),
    Check("FQ317", ("settings", "path", "machine"), _check_profile_fits_board),
    Check("FQ162", ("settings", "machine"), check_deadlines),
)
