"""Pure checks of a machine's facts, and of the operator's machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.tools.boards.doctor.machine_facts import HelperFault, MachineFacts

WRITTEN_S: Final = 1735689600.0  # 2025-01-01: no clock that is right is before this program was written
HOT_C: Final = 85.0  # boards slow down from about here on
SWAP_LEFT: Final = 0.1  # share of the swap
PYTHON: Final = {6: (3, 10), 7: (3, 12)}  # what NVIDIA's wheels for a JetPack are made for
SET_CLOCK: Final = "sudo timedatectl set-ntp true"
RESTART: Final = "sudo systemctl restart fedquilt-clocks"
FREE_MEMORY: Final = "ps -eo rss,comm --sort=-rss | head, and stop what is not needed"


def _check_python(machine: MachineFacts) -> Verdict:
    if machine.python is None:
        return None
    has = ".".join(map(str, machine.python))
    if machine.python < (3, 10):
        return error(f"this machine has Python {has}, and fedquilt needs 3.10 or newer", targets.OWN_PYTHON)
    made_for = PYTHON.get(machine.jetpack or 0)
    if made_for is not None and machine.python != made_for:
        wanted = ".".join(map(str, made_for))
        return Problem(
            f"NVIDIA's wheels for JetPack {machine.jetpack} are for Python {wanted}, and this is {has}: "
            "torch and onnxruntime with the GPU do not install here",
            f"/usr/bin/python{wanted} -m venv --system-site-packages ~/fedquilt",
        )
    return f"Python {has}" + (f" on JetPack {machine.jetpack}" if machine.jetpack else "")


def _check_word_size(machine: MachineFacts) -> Verdict:
    said = f"this Python has {machine.bits} bits: there are no wheels of onnxruntime and torch for it"
    return None if machine.bits == 64 else error(said)


def _check_clock(machine: MachineFacts) -> Verdict:
    said = f"the clock says {time.strftime('%Y-%m-%d %H:%M', time.gmtime(machine.clock_s))} UTC"
    if machine.clock_s < WRITTEN_S:
        return error(f"{said}, before this program was written: certificates look not yet valid")
    return said


def _check_memory(machine: MachineFacts) -> Verdict:
    if machine.memory_bytes is None:
        return error(f"{machine.root / 'proc/meminfo'} does not tell the memory: is {machine.root} a Linux that runs?")
    left = "" if machine.available_bytes is None else f", {machine.available_bytes / 1e6:.0f} MB of it left"
    return f"{machine.board}: {machine.memory_bytes / 1e6:.0f} MB of memory{left}"


def _check_swap(machine: MachineFacts) -> Verdict:
    if not machine.swap_bytes or machine.swap_free_bytes is None:
        return None
    if machine.swap_free_bytes < SWAP_LEFT * machine.swap_bytes:
        return Problem(
            f"{1 - machine.swap_free_bytes / machine.swap_bytes:.0%} of the {machine.swap_bytes / 1e6:.0f} MB of swap "
            "is in use: programs here need more memory than there is, and tasks will be slow"
        )
    return f"swap: {machine.swap_free_bytes / 1e6:.0f} of {machine.swap_bytes / 1e6:.0f} MB free"


def _check_swap_on_card(machine: MachineFacts) -> Verdict:
    if (swap := machine.swap_on_card) is None:
        return None
    return Problem(
        f"swap is on the SD card ({swap}): a task that swaps is slow, and wears the card out",
        f"sudo swapoff {swap}, and take it out of /etc/fstab (Raspberry Pi OS: sudo apt remove dphys-swapfile); "
        "zram or an NVMe disk are places for swap",
    )


def _check_control_group(machine: MachineFacts) -> Verdict:
    watched = "a task's memory is watched, not limited by the kernel"
    if machine.controllers is None:
        return f"no cgroup v2: {watched}"
    if "memory" not in machine.controllers:
        return Problem(f"this kernel's cgroup v2 has no memory controller: {watched}")
    return "cgroup v2 can limit memory"


def _check_delegation(machine: MachineFacts) -> Verdict:
    delegated = {"memory", "yes", "true", "1"} & set((machine.unit or {}).get("Delegate", "").split())
    if machine.unit is None or "memory" not in (machine.controllers or ()) or delegated:
        return None
    return Problem(
        "fedquilt-agent.service is not given its control group's memory (Delegate=memory): tasks have no limit of "
        "their own"
    )


def _check_power_sensors(machine: MachineFacts) -> Verdict:
    if machine.power_w is not None:
        return f"power: {machine.power_w:.2f} W"
    if not machine.tegra or machine.rail_fault is not None:  # most other boards have no meter
        return None
    return Problem(
        f"no power sensor of {machine.board} can be read (its INA3221, below {machine.root / 'sys/bus/i2c/drivers'}): "
        "energy will be unknown",
        "sudo apt install python3-pip && sudo pip3 install jetson-stats && sudo usermod -aG jtop fedquilt"
        + (", and on the operator's machine: fedquilt board flash ... --extras onnx jetson" if machine.flashed else ""),
    )


def _check_rails(machine: MachineFacts) -> Verdict:
    if machine.power_w is not None or machine.rail_fault is None:
        return None
    return Problem(f"the power of {machine.board} is not known: {machine.rail_fault}")


def _check_temperature(machine: MachineFacts) -> Verdict:
    if machine.temperature_c is not None:
        return f"the hottest zone is at {machine.temperature_c:.0f} C"
    if not machine.tegra:
        return None
    return Problem(
        f"no thermal zone answers below {machine.root / 'sys/class/thermal'}: nobody sees this board get hot"
    )


def _check_heat(machine: MachineFacts) -> Verdict:
    if machine.temperature_c is None or machine.temperature_c < HOT_C:
        return None
    return Problem(f"the hottest zone is at {machine.temperature_c:.0f} C: the board slows itself down", _cool(machine))


def _check_voltage(machine: MachineFacts) -> Verdict:
    said = "the firmware has seen too low a voltage since the board was started: it slows down, and may fail"
    return Problem(said) if machine.undervoltage else None


def _check_throttling(machine: MachineFacts) -> Verdict:
    said = f"the kernel slows clocks for heat now ({', '.join(machine.slowed)}): tasks take longer than predicted"
    return Problem(said, _cool(machine)) if machine.slowed else None


def _cool(machine: MachineFacts) -> str:
    return "give it air, or a lower power mode (nvpmodel)" if machine.tegra else "give it air"


def _check_over_current(machine: MachineFacts) -> Verdict:
    told = ", ".join(f"{name} {events} times" for name, events in machine.over_current.items() if events)
    if not told:
        return None
    return Problem(
        "the hardware has cut its clocks for too much current or too low a voltage since the board was started "
        f"({told}): what a task takes then is not that of its operating point"
    )


def _check_power_mode(machine: MachineFacts) -> Verdict:
    if not machine.tegra or machine.mode is not None:
        return f"power mode {machine.mode}" if machine.tegra else None
    if not machine.modes:
        return "this board tells no power modes"
    if machine.mode_hidden:
        return "nvpmodel's status is for root alone to read: the power mode is not known to this user"
    return Problem(
        f"nvpmodel's status ({machine.root / 'var/lib/nvpmodel/status'}) names a mode that its catalogue has not "
        f"({', '.join(machine.modes)}): speed and power are those of no known point"
    )


def _check_pinned_clocks(machine: MachineFacts) -> Verdict:
    fixed = {name: low for name, (low, high) in machine.limits.items() if low == high}
    held = isinstance(machine.helper, HelperStatus) and machine.helper.point is not None
    if not fixed or held or len(fixed) < len(machine.limits):
        return None
    told = ", ".join(f"{name} at {hz / 1e6:.0f} MHz" for name, hz in fixed.items())
    return Problem(
        f"every clock is pinned ({told}), as jetson_clocks does it: the board draws that power when it idles too, and "
        "no operating point can be compared with its own choice"
    )


def _check_clock_helper(helper: HelperStatus | HelperFault) -> Verdict:
    if isinstance(helper, HelperStatus):
        return "the clock helper answers"
    fix = "sudo usermod -aG fedquilt $USER, and log in again" if helper.kind == "not permitted" else RESTART
    return Problem(helper.sentence, fix)


def _check_restored_clocks(helper: HelperStatus | HelperFault) -> Verdict:
    owed = "; ".join(helper.owes) if isinstance(helper, HelperStatus) else ""
    return Problem(f"the clock helper could not put back the board's own settings: {owed}") if owed else None


def _check_hidden_clocks(machine: MachineFacts) -> Verdict:
    if not machine.hidden:
        return None
    names = ", ".join(machine.hidden)
    if not isinstance(machine.helper, HelperStatus):
        return f"the frequencies of {names} are for root alone to read: without the clock helper not known"
    listed = {clock.name for clock in machine.helper.clocks if clock.listed_hz}
    if unknown := [name for name in machine.hidden if name not in listed]:
        return Problem(
            f"the frequencies of {', '.join(unknown)} are known neither to this user nor to the clock helper: "
            "the board sets these clocks itself"
        )
    return f"the clock helper tells the frequencies of {names}, which this user may not read"


def _check_gpu(machine: MachineFacts) -> Verdict:
    if not machine.tegra or machine.gpu_listed:
        return "the GPU is among the devices with a clock (devfreq)" if machine.tegra else None
    return Problem(
        "the GPU is not among the devices with a clock (/sys/class/devfreq): its driver was not loaded, so nothing "
        "runs on it"
    )


DELEGATE: Final = (
    f"sudo mkdir -p /{machine_facts.UNIT}.d; "
    f"printf '[Service]\\nDelegate=memory\\n' | sudo tee /{machine_facts.UNIT}.d/memory.conf; "
    "sudo systemctl daemon-reload; sudo systemctl restart fedquilt-agent"
)
CGROUP: Final = "append cgroup_enable=memory cgroup_memory=1 to the one line of /boot/firmware/cmdline.txt, and reboot"
CURRENT: Final = (
    "a stronger supply and a shorter cable, or a lower power mode; `grep . /sys/class/hwmon/hwmon*/oc*_event_cnt`"
)
RAILS: Final = (
    "grep . /sys/class/hwmon/hwmon*/{in,curr}[123]_*; report board and output; a wall or USB-C meter helps meanwhile "
    "(`meter` in agent.toml)"
)
UNPIN: Final = "sudo jetson_clocks --restore, or reboot; and disable what pins them at boot"
KERNEL: Final = (
    "sudo dmesg | grep -iE 'nvgpu|ga10b|gv11b|gp10b'; after an upgrade of the kernel: "
    "sudo apt install --reinstall nvidia-l4t-kernel nvidia-l4t-kernel-dtbs, and reboot"
)

MACHINE: Final = tuple(
    Check(number, (needs,), find, fix)
    for number, needs, find, fix in (
        ("FQ101", "machine", _check_python, ""),
        ("FQ102", "machine", _check_word_size, "install the board's 64-bit system (`uname -m` then says aarch64)"),
        ("FQ110", "machine", _check_clock, SET_CLOCK),
        ("FQ120", "machine", _check_memory, "fedquilt doctor --root / on the board itself"),
        ("FQ130", "machine", _check_swap, FREE_MEMORY),
        ("FQ131", "machine", _check_swap_on_card, ""),
        ("FQ140", "machine", _check_control_group, CGROUP),
        ("FQ141", "machine", _check_delegation, DELEGATE),
        ("FQ150", "machine", _check_power_sensors, ""),
        ("FQ151", "machine", _check_temperature, "grep . /sys/class/thermal/thermal_zone*/temp"),
        ("FQ152", "machine", _check_heat, ""),
        ("FQ153", "machine", _check_voltage, "use the supply that was made for this board, and reboot"),
        ("FQ154", "machine", _check_throttling, ""),
        ("FQ155", "machine", _check_over_current, CURRENT),
        ("FQ156", "machine", _check_rails, RAILS),
        ("FQ160", "machine", _check_power_mode, "sudo nvpmodel -m 0"),
        ("FQ161", "machine", _check_pinned_clocks, UNPIN),
        ("FQ170", "helper", _check_clock_helper, ""),  # whether one is wanted, the agent's settings say
        ("FQ171", "helper", _check_restored_clocks, RESTART),
        ("FQ172", "machine", _check_hidden_clocks, f"{RESTART}, and see that it runs as root"),
        ("FQ173", "machine", _check_gpu, KERNEL),
    )
)


def _make_module_check(name: str, why: str) -> Callable[[], Verdict]:
    def check() -> Verdict:
        return f"{name} is installed" if find_spec(name) is not None else Problem(f"{name} is not installed: {why}")

    return check


def _check_ssh() -> Verdict:
    if shutil.which("ssh") is not None:
        return "there is an ssh program"
    return Problem("there is no ssh program: `fedquilt board flash --ssh` reaches no board, --rootfs and an archive do")


_RESOLVES = _make_module_check("packaging", "`fedquilt board flash` resolves wheels with it")
_DOWNLOADS = _make_module_check("pip", "`fedquilt board flash` downloads wheels with it")
_SIGNS = _make_module_check("cryptography", "`fedquilt identity` and `enrol` need it")
OPERATOR: Final = (
    Check("FQ601", (), _RESOLVES, "pip install 'fedquilt[flash]'"),
    Check("FQ602", (), _DOWNLOADS, "python3 -m ensurepip"),
    Check("FQ603", (), _SIGNS, "pip install 'fedquilt[identity]'"),
    Check("FQ604", (), _check_ssh, "sudo apt install openssh-client"),
)
