"""Pure checks of a machine's facts. None if a check does not apply or finds no problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.doctor import conditions, machine_facts
from fedquilt.tools.boards.doctor.findings import Finding, drop_missing, error, ok, warning
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts

WRITTEN_S: Final = 1735689600.0  # 2025-01-01: no clock that is right is before this program was written
HOT_C: Final = 85.0  # boards slow down from about here on
SWAP_LEFT: Final = 0.1  # share of the swap
PYTHON: Final = {6: (3, 10), 7: (3, 12)}  # what NVIDIA's wheels for a JetPack are made for


def check_machine(machine: MachineFacts) -> list[Finding]:
    return [*drop_missing(one(machine) for one in CHECKS), *conditions.check_conditions(machine.conditions)]


def check_python(machine: MachineFacts) -> Finding | None:
    if machine.python is None:
        return None
    has = ".".join(map(str, machine.python))
    if machine.python < (3, 10):
        return error("FQ101", f"this machine has Python {has}, and fedquilt needs 3.10 or newer", targets.OWN_PYTHON)
    made_for = PYTHON.get(machine.jetpack or 0)
    if made_for is not None and machine.python != made_for:
        wanted = ".".join(map(str, made_for))
        return warning(
            "FQ101",
            f"NVIDIA's wheels for JetPack {machine.jetpack} are for Python {wanted}, and this is {has}: "
            "torch and onnxruntime with the GPU do not install here",
            f"/usr/bin/python{wanted} -m venv --system-site-packages ~/fedquilt",
        )
    return ok("FQ101", f"Python {has}" + (f" on JetPack {machine.jetpack}" if machine.jetpack else ""))


def check_word_size(machine: MachineFacts) -> Finding | None:
    if machine.bits == 64:
        return None
    return error(
        "FQ102",
        f"this Python has {machine.bits} bits: there are no wheels of onnxruntime and torch for it",
        "install the board's 64-bit system (`uname -m` then says aarch64)",
    )


def check_clock(machine: MachineFacts) -> Finding:
    shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(machine.clock_s))
    if machine.clock_s < WRITTEN_S:
        return error(
            "FQ110",
            f"the clock says {shown} UTC, before this program was written: certificates look not yet valid",
            "sudo timedatectl set-ntp true",
        )
    return ok("FQ110", f"the clock says {shown} UTC")


def check_memory(machine: MachineFacts) -> Finding:
    if machine.memory_bytes is None:
        return error(
            "FQ120",
            f"{machine.root / 'proc/meminfo'} does not tell the memory: is {machine.root} a Linux that runs?",
            "fedquilt doctor --root / on the board itself",
        )
    left = "" if machine.available_bytes is None else f", {machine.available_bytes / 1e6:.0f} MB of it left"
    return ok("FQ120", f"{machine.board}: {machine.memory_bytes / 1e6:.0f} MB of memory{left}")


def check_swap(machine: MachineFacts) -> Finding | None:
    if not machine.swap_bytes or machine.swap_free_bytes is None:
        return None
    if machine.swap_free_bytes < SWAP_LEFT * machine.swap_bytes:
        used = 1 - machine.swap_free_bytes / machine.swap_bytes
        return warning(
            "FQ130",
            f"{used:.0%} of the {machine.swap_bytes / 1e6:.0f} MB of swap is in use: programs here need more memory "
            "than there is, and tasks will be slow",
            "ps -eo rss,comm --sort=-rss | head, and stop what is not needed",
        )
    return ok("FQ130", f"swap: {machine.swap_free_bytes / 1e6:.0f} of {machine.swap_bytes / 1e6:.0f} MB free")


def check_control_group(machine: MachineFacts) -> Finding:
    """Check that the kernel can limit a task's memory."""
    unit = machine.unit
    if machine.controllers is None:
        return ok("FQ140", "no cgroup v2: a task's memory is watched, not limited by the kernel")
    if "memory" not in machine.controllers:
        return warning(
            "FQ140",
            "this kernel's cgroup v2 has no memory controller: a task's memory is watched, not limited by the kernel",
            "append cgroup_enable=memory cgroup_memory=1 to the one line of /boot/firmware/cmdline.txt, and reboot",
        )
    if unit is not None and not {"memory", "yes", "true", "1"} & set(unit.get("Delegate", "").split()):
        return warning(
            "FQ141",
            "fedquilt-agent.service is not given its control group's memory (Delegate=memory): tasks have no limit "
            "of their own",
            f"sudo mkdir -p /{machine_facts.UNIT}.d; "
            f"printf '[Service]\\nDelegate=memory\\n' | sudo tee /{machine_facts.UNIT}.d/memory.conf; "
            "sudo systemctl daemon-reload; sudo systemctl restart fedquilt-agent",
        )
    return ok("FQ140", "cgroup v2 can limit memory")


def check_power_sensors(machine: MachineFacts) -> Finding | None:
    if machine.power_w is not None:
        return ok("FQ150", f"power: {machine.power_w:.2f} W")
    if not machine.tegra:
        return None  # most other boards have no meter
    if machine.rail_fault is not None:
        return warning(
            "FQ156",
            f"the power of {machine.board} is not known: {machine.rail_fault}",
            "grep . /sys/class/hwmon/hwmon*/{in,curr}[123]_*; report board and output; a wall or USB-C meter helps "
            "meanwhile (`meter` in agent.toml)",
        )
    return warning(
        "FQ150",
        f"no power sensor of {machine.board} can be read (its INA3221, below {machine.root / 'sys/bus/i2c/drivers'}): "
        "energy will be unknown",
        "sudo apt install python3-pip && sudo pip3 install jetson-stats && sudo usermod -aG jtop fedquilt"
        + (", and on the operator's machine: fedquilt board flash ... --extras onnx jetson" if machine.flashed else ""),
    )


def check_temperature(machine: MachineFacts) -> Finding | None:
    if machine.temperature_c is None:
        if not machine.tegra:
            return None
        return warning(
            "FQ151",
            f"no thermal zone answers below {machine.root / 'sys/class/thermal'}: nobody sees this board get hot",
            "grep . /sys/class/thermal/thermal_zone*/temp",
        )
    if machine.temperature_c >= HOT_C:
        return warning(
            "FQ152",
            f"the hottest zone is at {machine.temperature_c:.0f} C: the board slows itself down",
            "give it air, or `sudo jetson_clocks --fan`" if machine.tegra else "give it air",
        )
    return ok("FQ151", f"the hottest zone is at {machine.temperature_c:.0f} C")


def check_voltage(machine: MachineFacts) -> Finding | None:
    if not machine.undervoltage:
        return None
    return warning(
        "FQ153",
        "the firmware has seen too low a voltage since the board was started: it slows down, and may fail",
        "use the supply that was made for this board, and reboot",
    )


def check_power_mode(machine: MachineFacts) -> Finding | None:
    if not machine.tegra:
        return None
    if machine.mode is not None:
        return ok("FQ160", f"power mode {machine.mode}")
    if not machine.modes:
        return ok("FQ160", "this board tells no power modes")
    if machine.mode_hidden:
        return ok("FQ160", "nvpmodel's status is for root alone to read: the power mode is not known to this user")
    return warning(
        "FQ160",
        f"nvpmodel's status ({machine.root / 'var/lib/nvpmodel/status'}) names a mode that its catalogue has not "
        f"({', '.join(machine.modes)}): speed and power are those of no known point",
        "sudo nvpmodel -m 0",
    )


def check_clock_helper(machine: MachineFacts) -> Finding | None:
    if machine.helper is None:
        return None  # whether one is wanted, the agent's settings say
    if isinstance(machine.helper, HelperStatus):
        if machine.helper.owes:
            return warning(
                "FQ171",
                f"the clock helper could not put back the board's own settings: {'; '.join(machine.helper.owes)}",
                "sudo systemctl restart fedquilt-clocks",
            )
        return ok("FQ170", "the clock helper answers")
    if machine.helper.kind == "not permitted":
        return warning("FQ170", machine.helper.sentence, "sudo usermod -aG fedquilt $USER, and log in again")
    return warning("FQ170", machine.helper.sentence, "sudo systemctl restart fedquilt-clocks")


def check_hidden_clocks(machine: MachineFacts) -> Finding | None:
    """Check that the clock helper reports the clock frequencies that only root may read."""
    if not machine.hidden:
        return None
    names = ", ".join(machine.hidden)
    if not isinstance(machine.helper, HelperStatus):
        return ok("FQ172", f"the frequencies of {names} are for root alone to read: without the clock helper not known")
    listed = {clock.name for clock in machine.helper.clocks if clock.listed_hz}
    if unknown := [name for name in machine.hidden if name not in listed]:
        return warning(
            "FQ172",
            f"the frequencies of {', '.join(unknown)} are known neither to this user nor to the clock helper: "
            "the board sets these clocks itself",
            "sudo systemctl restart fedquilt-clocks, and see that it runs as root",
        )
    return ok("FQ172", f"the clock helper tells the frequencies of {names}, which this user may not read")


CHECKS: Final[Sequence[Callable[[MachineFacts], Finding | None]]] = (
    check_python,
    check_word_size,
    check_clock,
    check_memory,
    check_swap,
    check_control_group,
    check_power_sensors,
    check_temperature,
    check_voltage,
    check_power_mode,
    check_clock_helper,
    check_hidden_clocks,
)
