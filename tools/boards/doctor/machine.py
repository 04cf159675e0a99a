"""Checks of a machine's facts, of its Python packages and of the operator's machine.

Packages are checked by their files, because importing torch is too slow.
"""

from __future__ import annotations

import ast
import mmap
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.tools.boards.doctor.machine_facts import HelperFault, MachineFacts
from fedquilt.tools.boards.targets import NUMPY_2, NVIDIA_JP6, TARGETS

CUDA_BY_JETPACK: Final = {5: 11, 6: 12, 7: 13}  # JetPack -> major version of CUDA
FLASH_COMMAND: Final = "on the operator's machine: fedquilt board flash agent.toml --ssh USER@BOARD --target TARGET"


@dataclass(frozen=True)
class InstalledPackages:
    versions: Mapping[str, str] = field(default_factory=dict)  # canonical name -> version
    torch_cuda: str | None = None  # version of CUDA, or None for CPU builds
    onnx_cuda: bool = False  # onnxruntime has its CUDA provider
    torch_numpy: int | None = None  # major version of NumPy that torch was compiled with


def read_packages(paths: Sequence[Path]) -> InstalledPackages:
    """Return the packages installed in these folders. Of packages with the same name, the first counts."""
    versions: dict[str, str] = {}
    for package in metadata.distributions(path=[str(path) for path in paths]):
        name = _package_name(package).lower().replace("_", "-")
        if name:
            versions.setdefault(name, package.version)
    torch, onnx = (_find_folder(paths, name) for name in ("torch", "onnxruntime"))
    return InstalledPackages(
        versions=versions,
        torch_cuda=_read_string_constant(torch / "version.py", "cuda") if torch else None,
        onnx_cuda=bool(onnx and (onnx / "capi/libonnxruntime_providers_cuda.so").is_file()),
        torch_numpy=_find_required_numpy_version(torch / "lib/libtorch_python.so") if torch else None,
    )


def _package_name(package: metadata.Distribution) -> str:
    # "" for the folder of an interrupted installation
    try:
        return package.metadata["Name"] if "Name" in package.metadata else ""  # noqa: SIM401  (it has no get)
    except OSError:  # raised by importlib_metadata, where Python's own module returns ""
        return ""


def is_gpu_expected(machine: MachineFacts) -> bool:
    return machine.has_gpu and (not machine.is_tegra or (machine.jetpack or 0) >= 6)


def _check_onnx_conflict(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    plain, gpu = (packages.versions.get(name) for name in ("onnxruntime", "onnxruntime-gpu"))
    if plain is not None and gpu is not None:
        return Problem(
            f"onnxruntime {plain} and onnxruntime-gpu {gpu} are both installed, and overwrite each other's files",
            _installation_command(
                machine, "gpu" if machine.has_gpu else "onnx", uninstalled="onnxruntime onnxruntime-gpu"
            ),
        )
    if plain is None and gpu is None:
        return None
    return f"onnxruntime {gpu or plain}" + (", with CUDA" if packages.onnx_cuda else ", on the CPU")


def _check_onnx_gpu(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    versions = [packages.versions[name] for name in ("onnxruntime", "onnxruntime-gpu") if name in packages.versions]
    if len(versions) != 1 or packages.onnx_cuda or not is_gpu_expected(machine):
        return None
    sentence = f"onnxruntime {versions[0]} runs on the CPU only, although there is a GPU: stitching is slow"
    return Problem(sentence, _installation_command(machine, "gpu", uninstalled="onnxruntime"))


def _check_torch_gpu(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    if (version := packages.versions.get("torch")) is None:
        return None
    if is_gpu_expected(machine) and packages.torch_cuda is None:
        sentence = f"torch {version} runs on the CPU only, although there is a GPU: training is slow"
        return Problem(sentence, _installation_command(machine, "train"))
    return f"torch {version}" + (f", CUDA {packages.torch_cuda}" if packages.torch_cuda else ", on the CPU")


def _check_torch_cuda_version(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    driver_cuda, torch_cuda = CUDA_BY_JETPACK.get(machine.jetpack or 0), packages.torch_cuda
    if driver_cuda is None or not torch_cuda or torch_cuda.split(".")[0] == str(driver_cuda):
        return None
    return Problem(
        f"torch {packages.versions.get('torch')} is for CUDA {torch_cuda}, but JetPack {machine.jetpack} has CUDA "
        f"{driver_cuda}: torch will not find the GPU",
        _installation_command(machine, "train"),
    )


def _check_numpy_fits_torch(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    numpy, torch_version = packages.versions.get("numpy"), packages.versions.get("torch")
    if numpy is None or torch_version is None or packages.torch_numpy != 1 or int(numpy.split(".")[0]) < 2:
        return None
    return error(
        f"torch {torch_version} was compiled with NumPy 1 and does not work with numpy {numpy}: every task with torch "
        "fails",
        f"{FLASH_COMMAND}, with PIP_CONSTRAINT naming a file that contains numpy<2"
        if machine.is_flashed
        else "pip install 'numpy<2'",
    )


PACKAGES: Final = tuple(
    Check(number, ("machine", "packages"), find)
    for number, find in (
        ("FQ201", _check_onnx_conflict),
        ("FQ202", _check_onnx_gpu),
        ("FQ203", _check_torch_gpu),
        ("FQ204", _check_torch_cuda_version),
        ("FQ206", _check_numpy_fits_torch),
    )
)


def onnx_installation_command(machine: MachineFacts) -> str:
    return _installation_command(machine, "gpu" if is_gpu_expected(machine) else "onnx")


def _installation_command(machine: MachineFacts, extra: str, uninstalled: str = "") -> str:
    # a flashed board does not have pip
    is_jetpack6 = machine.jetpack == 6
    if machine.is_flashed:
        extras = {"gpu": "gpu", "train": "gpu train" if machine.has_gpu else "onnx train", "onnx": "onnx"}[extra]
        target = "jetpack6-gpu" if is_jetpack6 else f"jetpack{machine.jetpack}"
        target_settings = TARGETS.get(target)
        python = "" if target_settings is None or target_settings.python else " --python PATH"
        return f"{FLASH_COMMAND.replace('TARGET', target if target_settings else 'TARGET')}{python} --extras {extras}"
    requirement = {"gpu": "onnxruntime-gpu", "train": "--force-reinstall torch torchvision", "onnx": "onnxruntime"}[
        extra
    ]
    index = f" --index-url {NVIDIA_JP6}" if is_jetpack6 and extra != "onnx" else ""
    return (f"pip uninstall -y {uninstalled} && " if uninstalled else "") + f"pip install {requirement}{index}"


# -- reading --------------------------------------------------------------------------------------


def _find_folder(paths: Sequence[Path], name: str) -> Path | None:
    return next((path / name for path in paths if (path / name).is_dir()), None)


def _read_string_constant(path: Path, name: str) -> str | None:
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return None
    for statement in body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if isinstance(target, ast.Name) and target.id == name:
            value = statement.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _find_required_numpy_version(library: Path) -> int | None:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(NUMPY_2) >= 0:
                return 2
            return 1 if text.find(NUMPY_2.replace(b"_core", b"core")) >= 0 else None
    except (OSError, ValueError):
        return None


MIN_CLOCK_S: Final = 1735689600.0  # 2025-01-01. An earlier clock is wrong
HOT_C: Final = 85.0  # boards throttle above about this temperature
MIN_FREE_SWAP_SHARE: Final = 0.1
PYTHON_BY_JETPACK: Final = {6: (3, 10), 7: (3, 12)}  # JetPack -> Python of NVIDIA's wheels
SET_CLOCK_FIX: Final = "sudo timedatectl set-ntp true"
RESTART_FIX: Final = "sudo systemctl restart fedquilt-clocks"
FREE_MEMORY_FIX: Final = "ps -eo rss,comm --sort=-rss | head, and stop what is not needed"


def _check_python(machine: MachineFacts) -> Verdict:
    if machine.python_version is None:
        return None
    version = ".".join(map(str, machine.python_version))
    if machine.python_version < (3, 10):
        return error(f"this machine has Python {version}, but fedquilt needs 3.10 or newer", targets.OWN_PYTHON)
    required_version = PYTHON_BY_JETPACK.get(machine.jetpack or 0)
    if required_version is not None and machine.python_version != required_version:
        required = ".".join(map(str, required_version))
        return Problem(
            f"NVIDIA's wheels for JetPack {machine.jetpack} are for Python {required}, but this is {version}: torch "
            "and onnxruntime with GPU cannot be installed",
            f"/usr/bin/python{required} -m venv --system-site-packages ~/fedquilt",
        )
    return f"Python {version}" + (f" on JetPack {machine.jetpack}" if machine.jetpack else "")


def _check_word_size(machine: MachineFacts) -> Verdict:
    sentence = f"this Python has {machine.python_bits} bits: there are no wheels of onnxruntime and torch for it"
    return None if machine.python_bits == 64 else error(sentence)


def _check_wall_clock(machine: MachineFacts) -> Verdict:
    sentence = f"the clock shows {time.strftime('%Y-%m-%d %H:%M', time.gmtime(machine.clock_s))} UTC"
    if machine.clock_s < MIN_CLOCK_S:
        return error(f"{sentence}, a time in the past: certificates are refused as not yet valid")
    return sentence


def _check_memory(machine: MachineFacts) -> Verdict:
    if machine.memory_bytes is None:
        return error(f"{machine.root / 'proc/meminfo'} has no MemTotal: {machine.root} is not a running Linux system")
    available = "" if machine.available_bytes is None else f", {machine.available_bytes / 1e6:.0f} MB of it available"
    return f"{machine.board}: {machine.memory_bytes / 1e6:.0f} MB of memory{available}"


def _check_swap(machine: MachineFacts) -> Verdict:
    if not machine.swap_bytes or machine.swap_free_bytes is None:
        return None
    if machine.swap_free_bytes < MIN_FREE_SWAP_SHARE * machine.swap_bytes:
        return Problem(
            f"{1 - machine.swap_free_bytes / machine.swap_bytes:.0%} of the {machine.swap_bytes / 1e6:.0f} MB of swap "
            "is in use: programs need more memory than the machine has, and tasks will be slow"
        )
    return f"swap: {machine.swap_free_bytes / 1e6:.0f} of {machine.swap_bytes / 1e6:.0f} MB free"


def _check_swap_on_card(machine: MachineFacts) -> Verdict:
    if (swap := machine.swap_on_card) is None:
        return None
    return Problem(
        f"swap is on the SD card ({swap}): swapping is slow and wears the card out",
        f"sudo swapoff {swap}, and remove it from /etc/fstab (Raspberry Pi OS: sudo apt remove dphys-swapfile); "
        "use zram or an NVMe disk for swap",
    )


def _check_control_group(machine: MachineFacts) -> Verdict:
    consequence = "the agent watches a task's memory, but the kernel does not limit it"
    if machine.controllers is None:
        return f"no cgroup v2: {consequence}"
    if "memory" not in machine.controllers:
        return Problem(f"this kernel's cgroup v2 has no memory controller: {consequence}")
    return "cgroup v2 can limit memory"


def _check_delegation(machine: MachineFacts) -> Verdict:
    delegated = {"memory", "yes", "true", "1"} & set((machine.unit or {}).get("Delegate", "").split())
    if machine.unit is None or "memory" not in (machine.controllers or ()) or delegated:
        return None
    return Problem(
        "fedquilt-agent.service has no Delegate=memory: the kernel limits the memory of the agent, but not of a task"
    )


def _check_power_sensors(machine: MachineFacts) -> Verdict:
    if machine.power_w is not None:
        return f"power: {machine.power_w:.2f} W"
    if not machine.is_tegra or machine.rail_fault is not None:  # most other boards have no meter
        return None
    return Problem(
        f"no power sensor of {machine.board} can be read (INA3221 below {machine.root / 'sys/bus/i2c/drivers'}): "
        "energy will be unknown",
        "sudo apt install python3-pip && sudo pip3 install jetson-stats && sudo usermod -aG jtop fedquilt"
        + (
            ", and on the operator's machine: fedquilt board flash ... --extras onnx jetson"
            if machine.is_flashed
            else ""
        ),
    )


def _check_rails(machine: MachineFacts) -> Verdict:
    if machine.power_w is not None or machine.rail_fault is None:
        return None
    return Problem(f"the power of {machine.board} is unknown: {machine.rail_fault}")


def _check_temperature(machine: MachineFacts) -> Verdict:
    if machine.temperature_c is not None:
        return f"the hottest zone is at {machine.temperature_c:.0f} C"
    if not machine.is_tegra:
        return None
    return Problem(f"no thermal zone in {machine.root / 'sys/class/thermal'} can be read: overheating goes unnoticed")


def _check_overheating(machine: MachineFacts) -> Verdict:
    if machine.temperature_c is None or machine.temperature_c < HOT_C:
        return None
    sentence = f"the hottest zone is at {machine.temperature_c:.0f} C: the board lowers its clocks"
    return Problem(sentence, _cooling_fix(machine))


def _check_voltage(machine: MachineFacts) -> Verdict:
    sentence = "the supply voltage was too low at least once since the start: the board lowers its clocks, or fails"
    return Problem(sentence) if machine.undervoltage else None


def _check_throttling(machine: MachineFacts) -> Verdict:
    names = ", ".join(machine.throttling_devices)
    sentence = f"the kernel lowers clocks because of heat ({names}): tasks take longer than predicted"
    return Problem(sentence, _cooling_fix(machine)) if machine.throttling_devices else None


def _cooling_fix(machine: MachineFacts) -> str:
    return "improve cooling" + (", or set a lower power mode (nvpmodel)" if machine.is_tegra else "")


def _check_over_current(machine: MachineFacts) -> Verdict:
    counts = ", ".join(f"{name} {events} times" for name, events in machine.over_current.items() if events)
    if not counts:
        return None
    return Problem(
        f"the hardware lowered clocks since the start because of over-current or low voltage ({counts}): times and "
        "energy then differ from those of the operating point"
    )


def _check_power_mode(machine: MachineFacts) -> Verdict:
    if not machine.is_tegra or machine.power_mode is not None:
        return f"power mode {machine.power_mode}" if machine.is_tegra else None
    if not machine.power_modes:
        return "this board lists no power modes"
    if machine.is_mode_hidden:
        return "the power mode is unknown: only root can read nvpmodel's status"
    return Problem(
        f"{machine.root / 'var/lib/nvpmodel/status'} names none of the board's power modes "
        f"({', '.join(machine.power_modes)}): speed and power are unknown"
    )


def _check_clocks_pinned_by_others(machine: MachineFacts) -> Verdict:
    pinned = {name: low for name, (low, high) in machine.clock_limits.items() if low == high}
    is_pinned_by_helper = isinstance(machine.helper, HelperStatus) and machine.helper.point is not None
    if not pinned or is_pinned_by_helper or len(pinned) < len(machine.clock_limits):
        return None
    clocks = ", ".join(f"{name} at {hz / 1e6:.0f} MHz" for name, hz in pinned.items())
    return Problem(
        f"every clock is pinned ({clocks}), probably by jetson_clocks: the board draws this power when idle too, and "
        "operating points cannot be compared with its default clocks"
    )


def _check_clock_helper(helper: HelperStatus | HelperFault) -> Verdict:
    if isinstance(helper, HelperStatus):
        return "the clock helper is running"
    fix = "sudo usermod -aG fedquilt $USER, and log in again" if helper.kind == "not permitted" else RESTART_FIX
    return Problem(helper.sentence, fix)


def _check_restored_clocks(helper: HelperStatus | HelperFault) -> Verdict:
    unrestored = "; ".join(helper.unrestored_settings) if isinstance(helper, HelperStatus) else ""
    return Problem(f"the clock helper could not restore the board's settings: {unrestored}") if unrestored else None


def _check_unreadable_clocks(machine: MachineFacts) -> Verdict:
    if not machine.hidden_clocks:
        return None
    names = ", ".join(machine.hidden_clocks)
    if not isinstance(machine.helper, HelperStatus):
        return f"the frequencies of {names} are unknown: only root or the clock helper can read them"
    readable_clocks = {clock.name for clock in machine.helper.clocks if clock.listed_hz}
    if unknown := [name for name in machine.hidden_clocks if name not in readable_clocks]:
        return Problem(
            f"the frequencies of {', '.join(unknown)} can be read neither by this user nor by the clock helper: "
            "these clocks cannot be pinned"
        )
    return f"the clock helper reports the frequencies of {names}, which this user cannot read"


def _check_gpu_driver(machine: MachineFacts) -> Verdict:
    if not machine.is_tegra or machine.gpu_listed:
        return "the kernel lists the GPU (/sys/class/devfreq)" if machine.is_tegra else None
    return Problem("the kernel does not list the GPU (/sys/class/devfreq): its driver is not loaded, so it is unusable")


DELEGATE_FIX: Final = (
    f"sudo mkdir -p /{machine_facts.UNIT}.d; "
    f"printf '[Service]\\nDelegate=memory\\n' | sudo tee /{machine_facts.UNIT}.d/memory.conf; "
    "sudo systemctl daemon-reload; sudo systemctl restart fedquilt-agent"
)
CGROUP_FIX: Final = (
    "append cgroup_enable=memory cgroup_memory=1 to the single line of /boot/firmware/cmdline.txt, and reboot"
)
CURRENT_FIX: Final = (
    "a stronger supply and a shorter cable, or a lower power mode; `grep . /sys/class/hwmon/hwmon*/oc*_event_cnt`"
)
RAILS_FIX: Final = (
    "grep . /sys/class/hwmon/hwmon*/{in,curr}[123]_*; report board and output; until then use a wall or USB-C meter "
    "(`meter` in agent.toml)"
)
UNPIN_FIX: Final = "sudo jetson_clocks --restore, or reboot; and disable the service that pins clocks at boot"
KERNEL_FIX: Final = (
    "sudo dmesg | grep -iE 'nvgpu|ga10b|gv11b|gp10b'; after an upgrade of the kernel: "
    "sudo apt install --reinstall nvidia-l4t-kernel nvidia-l4t-kernel-dtbs, and reboot"
)

MACHINE: Final = tuple(
    Check(number, (needs,), find, fix)
    for number, needs, find, fix in (
        ("FQ101", "machine", _check_python, ""),
        ("FQ102", "machine", _check_word_size, "install the board's 64-bit system (`uname -m` then prints aarch64)"),
        ("FQ110", "machine", _check_wall_clock, SET_CLOCK_FIX),
        ("FQ120", "machine", _check_memory, "fedquilt doctor --root / on the board itself"),
        ("FQ130", "machine", _check_swap, FREE_MEMORY_FIX),
        ("FQ131", "machine", _check_swap_on_card, ""),
        ("FQ140", "machine", _check_control_group, CGROUP_FIX),
        ("FQ141", "machine", _check_delegation, DELEGATE_FIX),
        ("FQ150", "machine", _check_power_sensors, ""),
        ("FQ151", "machine", _check_temperature, "grep . /sys/class/thermal/thermal_zone*/temp"),
        ("FQ152", "machine", _check_overheating, ""),
        ("FQ153", "machine", _check_voltage, "use the power supply recommended for this board, and reboot"),
        ("FQ154", "machine", _check_throttling, ""),
        ("FQ155", "machine", _check_over_current, CURRENT_FIX),
        ("FQ156", "machine", _check_rails, RAILS_FIX),
        ("FQ160", "machine", _check_power_mode, "sudo nvpmodel -m 0"),
        ("FQ161", "machine", _check_clocks_pinned_by_others, UNPIN_FIX),
        ("FQ170", "helper", _check_clock_helper, ""),  # FQ315 checks whether the settings need a helper
        ("FQ171", "helper", _check_restored_clocks, RESTART_FIX),
        ("FQ172", "machine", _check_unreadable_clocks, f"{RESTART_FIX}, and check that it runs as root"),
        ("FQ173", "machine", _check_gpu_driver, KERNEL_FIX),
    )
)


def _make_module_check(name: str, reason: str) -> Callable[[], Verdict]:
    def check() -> Verdict:
        return f"{name} is installed" if find_spec(name) is not None else Problem(f"{name} is not installed: {reason}")

    return check


def _check_ssh() -> Verdict:
    if shutil.which("ssh") is not None:
        return "ssh is installed"
    return Problem("ssh is not installed: `fedquilt board flash` works only with --rootfs or an archive")


_check_packaging = _make_module_check("packaging", "`fedquilt board flash` needs it")
_check_pip = _make_module_check("pip", "`fedquilt board flash` needs it")
_check_cryptography = _make_module_check("cryptography", "`fedquilt identity` needs it")
OPERATOR: Final = (
    Check("FQ601", (), _check_packaging, "pip install 'fedquilt[flash]'"),
    Check("FQ602", (), _check_pip, "python3 -m ensurepip"),
    Check("FQ603", (), _check_cryptography, "pip install 'fedquilt[identity]'"),
    Check("FQ604", (), _check_ssh, "sudo apt install openssh-client"),
)
