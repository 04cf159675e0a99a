"""Fake boards made of files: the parts of /proc, /sys, /etc and /var that fedquilt uses.

    write_fake_board(root, "jetson-tx2", jetpack=4)

The files follow documented layouts (NVIDIA's developer guides, the kernel's ABI notes and public logs) and are not
copied from a board. All files are regular: a written value is read back, and nothing reacts as a
kernel would.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedquilt.core import JobError

KERNEL_RELEASES = {
    4: "R32 (release), REVISION: 7.4",
    5: "R35 (release), REVISION: 4.1",
    6: "R36 (release), REVISION: 4.3",
    7: "R38 (release), REVISION: 2.0",
}
SOURCE = "SOURCE"  # file in the root that names the source of the layout


def write_fake_board(root: Path, board: str, jetpack: int) -> None:
    """Write the files of a board below `root`, which stands for "/".

    Args:
        root: The folder, created if necessary.
        board: A key of `BOARDS`.
        jetpack: The JetPack version, 4 to 7, which determines the layouts of power monitor and GPU.

    Raises:
        JobError: If there is no such board, or the JetPack version does not run on it.
    """
    layout = BOARDS.get(board)
    if layout is None or jetpack not in layout.jetpacks:
        runs = ", ".join(f"{name} {'/'.join(map(str, board_layout.jetpacks))}" for name, board_layout in BOARDS.items())
        raise JobError(f"fake board {board!r} with JetPack {jetpack} does not exist: choose one of {runs}")
    _write_identity(root, layout, jetpack)
    _write_processors(root, layout)
    _write_gpu(root, layout, jetpack)
    _write_fake_memory_clock(root, layout, jetpack)
    for number, (address, rails) in enumerate(layout.rails.items()):
        (_write_iio_monitor if jetpack == 4 else _write_hwmon_monitor)(root, address, number, rails)
    if layout.input_w is not None:
        chip = {"name": "ina238", "power1_input": round(layout.input_w * 1e6)}
        _write_files(root, "sys/bus/i2c/drivers/ina2xx/2-0044/hwmon/hwmon9", chip)
        _link_relative(root / "sys/class/hwmon/hwmon9", root / "sys/bus/i2c/drivers/ina2xx/2-0044/hwmon/hwmon9")
    (root / SOURCE).write_text(f"{layout.source}\nReadings are made up unless the source has them.\n")
    for number, zone in enumerate(layout.zones):
        celsius = 100 if zone == "PMIC-Die" else 40 + number / 2  # PMIC-Die always reads 100
        _write_files(root, f"sys/class/thermal/thermal_zone{number}", {"type": zone, "temp": int(1000 * celsius)})
    _write_power_modes(root, layout, jetpack)
    (root / "sys/kernel/debug").chmod(0o700)  # the kernel's default, which only root may read


def _write_files(root: Path, folder: str, files: Mapping[str, object]) -> None:
    directory = root / folder
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n")


def _link_relative(link: Path, target: Path) -> None:
    # Relative links permit moving the tree.
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))


def _to_hz(mhz: float) -> int:
    return UNCAPPED if mhz == UNCAPPED else round(mhz * 1e6)


def _write_identity(root: Path, layout: BoardLayout, jetpack: int) -> None:
    tree = root / "sys/firmware/devicetree/base"
    tree.mkdir(parents=True, exist_ok=True)
    _link_relative(root / "proc/device-tree", tree)
    (tree / "model").write_bytes(layout.model.encode() + b"\0")
    (tree / "compatible").write_bytes(b"".join(name.encode() + b"\0" for name in layout.compatible))
    _write_files(
        root, "etc", {"nv_tegra_release": f"# {KERNEL_RELEASES[jetpack]}, GCID: 0, BOARD: t186ref, EABI: aarch64"}
    )
    total = layout.memory_kib
    _write_files(
        root, "proc", {"meminfo": f"MemTotal: {total} kB\nMemFree: {total // 3} kB\nMemAvailable: {total // 2} kB"}
    )
    if jetpack >= 5:  # Linux 4.20 and later have pressure files
        pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0"
        _write_files(root, "proc/pressure", {"memory": pressure})
    if jetpack >= 6:  # Ubuntu 22.04 has cgroup v2 alone
        _write_files(root, "proc/self", {"cgroup": "0::/system.slice/fedquilt.service"})
        _write_files(
            root, "sys/fs/cgroup/system.slice/fedquilt.service", {"memory.max": "max", "memory.current": 30_000_000}
        )


def _write_processors(root: Path, layout: BoardLayout) -> None:
    system = "sys/devices/system/cpu"
    frequencies = " ".join(str(round(khz)) for khz in layout.cpu_khz)
    low, high = round(min(layout.cpu_khz)), round(max(layout.cpu_khz))
    for cores in layout.policies:
        policy = f"{system}/cpufreq/policy{cores[0]}"
        files = {
            "scaling_available_frequencies": frequencies,
            "scaling_min_freq": low,
            "scaling_max_freq": high,
            "scaling_cur_freq": low,
            "cpuinfo_min_freq": low,
            "cpuinfo_max_freq": high,
            "scaling_governor": "schedutil",
            "scaling_available_governors": "conservative ondemand userspace powersave performance schedutil",
            "related_cpus": " ".join(map(str, cores)),
            "affected_cpus": " ".join(map(str, cores)),
        }
        _write_files(root, policy, files)
        for core in cores:
            _write_files(root, f"{system}/cpu{core}", {"online": 1})
            _link_relative(root / f"{system}/cpu{core}/cpufreq", root / policy)


def _write_gpu(root: Path, layout: BoardLayout, jetpack: int) -> None:
    device, _, devfreq_name = layout.gpu[jetpack].partition("/devfreq/")
    name = devfreq_name or device.rsplit("/", 1)[-1]
    node = name.partition(".")[2] or name
    _write_devfreq(root, device, name, node, layout.gpu_mhz, "nvhost_podgov")
    _write_files(root, f"sys/devices/{device}", {"load": 0})
    host = {4: "13e10000.host1x", 5: "13e40000.host1x"}.get(jetpack, "platform/bus@0/13e00000.host1x")
    _write_devfreq(root, f"{host}/15340000.vic", "15340000.vic", "vic", (115.2, 435.2, 729.6), "wmark_active")


def _write_devfreq(root: Path, device: str, name: str, node: str, mhz: Sequence[float], governor: str) -> None:
    directory = f"sys/devices/{device}/devfreq/{name}"
    files = {
        "available_frequencies": " ".join(str(_to_hz(frequency_mhz)) for frequency_mhz in mhz),
        "min_freq": _to_hz(min(mhz)),
        "max_freq": _to_hz(max(mhz)),
        "cur_freq": _to_hz(min(mhz)),
        "governor": governor,
        "available_governors": f"{governor} userspace powersave performance simple_ondemand",
    }
    _write_files(root, directory, files)
    _link_relative(root / directory / "device", root / "sys/devices" / device)
    (root / f"sys/devices/{device}/of_node").mkdir(exist_ok=True)
    (root / f"sys/devices/{device}/of_node/name").write_bytes(node.encode() + b"\0")
    _link_relative(root / "sys/class/devfreq" / name, root / directory)


def _write_fake_memory_clock(root: Path, layout: BoardLayout, jetpack: int) -> None:
    # nvpmodel writes a cap, or 0 for no cap. On a board only root can read debugfs.
    if jetpack >= 7:
        _write_devfreq(root, "platform/bwmgr", "bwmgr", "bwmgr", (204, layout.emc_mhz), "userspace")
        (root / "sys/kernel/debug").mkdir(parents=True, exist_ok=True)
        return
    if jetpack >= 6:
        _write_files(root, "sys/kernel/nvpmodel_clk_cap", {"emc": 0})
    else:
        _write_files(root, "sys/kernel/nvpmodel_emc_cap", {"emc_iso_cap": 0})
    rate = _to_hz(layout.emc_mhz)
    if "nvidia,tegra210" in layout.compatible:
        _write_files(
            root, "sys/kernel/debug/clk/override.emc", {"clk_rate": rate, "clk_update_rate": rate, "clk_state": 0}
        )
    else:
        files = {"rate": rate, "min_rate": _to_hz(204), "max_rate": rate, "mrq_rate_locked": 0, "state": 0}
        _write_files(root, "sys/kernel/debug/bpmp/debug/clk/emc", files)


def _write_iio_monitor(root: Path, address: str, number: int, rails: Sequence[Rail]) -> None:
    files: dict[str, object] = {"name": "ina3221x"}
    for channel, (label, mv, ma) in enumerate(rails):
        files[f"rail_name_{channel}"] = label
        files[f"in_voltage{channel}_input"] = mv
        files[f"in_current{channel}_input"] = ma
        files[f"in_power{channel}_input"] = mv * ma // 1000
    _write_files(root, f"sys/bus/i2c/drivers/ina3221x/{address}/iio:device{number}", files)


def _write_hwmon_monitor(root: Path, address: str, number: int, rails: Sequence[Rail]) -> None:
    files: dict[str, object] = {"name": "ina3221"}
    for channel, (label, mv, ma) in enumerate(rails, start=1):
        files |= {f"in{channel}_label": label, f"in{channel}_input": mv, f"in{channel}_enable": 1}
        files |= {f"curr{channel}_input": ma, f"in{channel + 3}_input": ma // 200}  # 4 to 6: the shunts' own voltages
    files |= {"in7_label": "sum of shunt voltages", "in7_input": sum(rail[2] for rail in rails) // 200}
    directory = f"sys/bus/i2c/drivers/ina3221/{address}/hwmon/hwmon{number + 1}"
    _write_files(root, directory, files)
    _link_relative(root / f"sys/class/hwmon/hwmon{number + 1}", root / directory)


def _write_power_modes(root: Path, layout: BoardLayout, jetpack: int) -> None:
    cores = [core for policy in layout.policies for core in policy]
    device, _, devfreq_name = layout.gpu[jetpack].partition("/devfreq/")
    gpu = f"sys/devices/{device}/devfreq/{devfreq_name or device.rsplit('/', 1)[-1]}"
    cap = "nvpmodel_clk_cap/emc" if jetpack >= 6 else "nvpmodel_emc_cap/emc_iso_cap"
    emc = "class/devfreq/bwmgr/max_freq" if jetpack >= 7 else f"kernel/{cap}"
    text = ["< PARAM TYPE=FILE NAME=CPU_ONLINE >"]
    text += [f"CORE_{core} /sys/devices/system/cpu/cpu{core}/online" for core in sorted(cores)]
    for policy in layout.policies:
        prefix = f"/sys/devices/system/cpu/cpu{policy[0]}/cpufreq/scaling"
        text += ["", f"< PARAM TYPE=CLOCK NAME=CPU_{policy[0]} >", f"FREQ_TABLE {prefix}_available_frequencies"]
        text += [f"MAX_FREQ {prefix}_max_freq", f"MIN_FREQ {prefix}_min_freq"]
    text += ["", "< PARAM TYPE=CLOCK NAME=GPU >", f"FREQ_TABLE /{gpu}/available_frequencies"]
    text += [f"MAX_FREQ /{gpu}/max_freq", f"MIN_FREQ /{gpu}/min_freq"]
    text += ["", "< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ /sys/{emc}"]
    for number, mode in enumerate(layout.modes):
        text += ["", f"< POWER_MODEL ID={number} NAME={mode.name} >"]
        text += [f"CPU_ONLINE CORE_{core} {int(position < mode.cores)}" for position, core in enumerate(cores)]
        khz = mode.cpu if mode.cpu == UNCAPPED else round(mode.cpu * 1000)
        text += [f"CPU_{policy[0]} MAX_FREQ {khz}" for policy in layout.policies]
        text += [f"GPU MAX_FREQ {_to_hz(mode.gpu)}", f"EMC MAX_FREQ {0 if mode.emc == UNCAPPED else _to_hz(mode.emc)}"]
    text += ["", f"< PM_CONFIG DEFAULT={layout.default} >"]
    _write_files(root, "etc/nvpmodel", {"nvpmodel.conf": "\n".join(text)})
    _link_relative(root / "etc/nvpmodel.conf", root / "etc/nvpmodel/nvpmodel.conf")
    _write_files(root, "var/lib/nvpmodel", {"status": f"pmode:{layout.default:04d}"})


Rail = tuple[str, int, int]  # label, mV, mA
UNCAPPED = -1
XAVIER_ZONES = ("CPU-therm", "GPU-therm", "AUX-therm", "AO-therm", "PMIC-Die", "thermal-fan-est")
ORIN_ZONES = ("cpu-thermal", "gpu-thermal", "cv0-thermal", "soc0-thermal", "soc1-thermal", "soc2-thermal", "tj-thermal")


def frequency_steps(start: float, end: float, step: float, *extra: float) -> tuple[float, ...]:
    """Return the frequencies from `start` to `end` in equal steps, followed by `extra`."""
    return (*(start + step * k for k in range(round((end - start) / step) + 1)), *extra)


@dataclass(frozen=True)
class NvpmodelMode:
    """Mode of nvpmodel. Clock limits are in MHz, or -1 for no limit."""

    name: str
    cores: int
    cpu: float = UNCAPPED
    gpu: float = UNCAPPED
    emc: float = UNCAPPED


@dataclass(frozen=True)
class BoardLayout:
    """Hardware of a board model. Frequencies are in MHz, those of the CPU in kHz."""

    model: str
    compatible: tuple[str, ...]
    memory_kib: int
    jetpacks: tuple[int, ...]
    policies: tuple[tuple[int, ...], ...]  # cores that share a clock
    cpu_khz: tuple[float, ...]
    gpu: Mapping[int, str]  # by JetPack: the device's folder under /sys/devices
    gpu_mhz: tuple[float, ...]
    emc_mhz: float
    rails: Mapping[str, tuple[Rail, ...]]  # by I2C address; "" is a channel without a label
    zones: tuple[str, ...]
    modes: tuple[NvpmodelMode, ...]
    source: str  # document with rails, addresses, clocks and modes
    default: int = 0
    input_w: float | None = None  # at VIN, where an INA238 measures it


XAVIER_CPU = frequency_steps(115200, 1881600, 76800, 1907200)
ORIN_GPU = {5: "17000000.ga10b", 6: "platform/bus@0/17000000.gpu"}
THREE_RAILS = (("VDD_IN", 5000, 1200), ("VDD_CPU_GPU_CV", 5000, 400), ("VDD_SOC", 5000, 300))

ORIN_SOURCE = "NVIDIA, Jetson Linux R35, R36 guide for Orin: rails at 0x40"

ORIN_NANO = BoardLayout(
    model="NVIDIA Jetson Orin Nano Developer Kit",
    compatible=("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    memory_kib=7801856,
    jetpacks=(5, 6),
    policies=((0, 1, 2, 3), (4, 5)),
    cpu_khz=frequency_steps(115200, 1497600, 76800, 1510400),
    gpu=ORIN_GPU,
    gpu_mhz=(306, 408, 510, 612, 624.75),
    emc_mhz=2133,
    rails={"1-0040": THREE_RAILS},
    zones=ORIN_ZONES,
    source=f"{ORIN_SOURCE}; nvpmodel_p3767_0003.conf (LineageOS, device concord)",
    modes=(NvpmodelMode("15W", 6, emc=2133), NvpmodelMode("7W", 4, 960, 408, 2133)),
)

AGX_ORIN_SOURCE = f"{ORIN_SOURCE}, 0x41, VDDQ_VDD2_1V8AO included in VIN_SYS_5V0"

BOARDS: dict[str, BoardLayout] = {
    "jetson-nano": BoardLayout(
        model="NVIDIA Jetson Nano Developer Kit",
        compatible=("nvidia,p3450-0000", "nvidia,jetson-nano", "nvidia,tegra210"),
        memory_kib=4059136,
        jetpacks=(4,),
        policies=((0, 1, 2, 3),),
        cpu_khz=(
            *(102000, 204000, 307200, 403200, 518400, 614400, 710400, 825600, 921600),
            *(1036800, 1132800, 1224000, 1326000, 1428000, 1479000),
        ),
        gpu={4: "gpu.0/devfreq/57000000.gpu"},
        gpu_mhz=frequency_steps(76.8, 921.6, 76.8),
        emc_mhz=1600,
        rails={"6-0040": (("POM_5V_IN", 5000, 580), ("POM_5V_GPU", 5000, 8), ("POM_5V_CPU", 5000, 120))},
        zones=("AO-therm", "CPU-therm", "GPU-therm", "PLL-therm", "PMIC-Die", "thermal-fan-est"),
        source="NVIDIA, Jetson Linux R32.7 guide for Nano: rails at 0x40; "
        "nvpmodel_t210_jetson-nano.conf (jetson_stats, tests)",
        modes=(NvpmodelMode("MAXN", 4), NvpmodelMode("5W", 2, 918, 640, 1600)),
    ),
    "jetson-tx2": BoardLayout(
        model="quill",
        compatible=("nvidia,quill", "nvidia,p2597-0000+p3310-1000", "nvidia,tegra186"),
        memory_kib=8042496,
        jetpacks=(4,),
        policies=((0, 3, 4, 5), (1, 2)),  # A57, Denver
        cpu_khz=(
            *(345600, 499200, 652800, 806400, 960000, 1113600),
            *(1267200, 1420800, 1574400, 1728000, 1881600, 2035200),
        ),
        gpu={4: "17000000.gp10b"},
        gpu_mhz=(
            *(140.25, 229.5, 318.75, 408, 497.25, 586.5, 675.75, 765),
            *(854.25, 943.5, 1032.75, 1122, 1211.25, 1300.5),
        ),
        emc_mhz=1866,
        rails={
            "0-0040": (("VDD_SYS_GPU", 19000, 60), ("VDD_SYS_SOC", 19000, 40), ("VDD_4V0_WIFI", 4790, 4)),
            "0-0041": (("VDD_IN", 19000, 200), ("VDD_SYS_CPU", 19000, 50), ("VDD_SYS_DDR", 19000, 45)),
        },
        zones=("BCPU-therm", "MCPU-therm", "GPU-therm", "PLL-therm", "Tboard_tegra", "Tdiode_tegra", "PMIC-Die"),
        source="NVIDIA, Jetson Linux R32.7 guide for TX2: rails at 0x40, 0x41; nvpmodel_t186.conf "
        "(LineageOS, device quill)",
        modes=(
            NvpmodelMode("MAXN", 6),
            NvpmodelMode("MAXQ", 4, 1200, 850, 1331.2),
            NvpmodelMode("MAXP_CORE_ALL", 6, 1400, 1120, 1600),
            NvpmodelMode("MAXP_CORE_ARM", 4, 2000, 1120, 1600),
        ),
    ),
    "jetson-xavier-nx": BoardLayout(
        model="NVIDIA Jetson Xavier NX Developer Kit",
        compatible=("nvidia,p3509-0000+p3668-0000", "nvidia,p3668-0000", "nvidia,tegra194"),
        memory_kib=7951360,
        jetpacks=(4, 5),
        policies=((0, 1), (2, 3), (4, 5)),
        cpu_khz=XAVIER_CPU,
        gpu={4: "17000000.gv11b", 5: "17000000.gv11b"},
        gpu_mhz=(114.75, 204, 306, 408, 510, 599.25, *frequency_steps(701.25, 1109.25, 51)),
        emc_mhz=1866,
        rails={"7-0040": THREE_RAILS},
        zones=XAVIER_ZONES,
        source="NVIDIA, Jetson Linux R32.7, R35 guide for Xavier: rails at 0x40; "
        "nvpmodel_t194_p3668.conf (LineageOS, device galen)",
        modes=(
            NvpmodelMode("MODE_15W_2CORE", 2, 1907.2, 1109.25, 1600),
            NvpmodelMode("MODE_15W_4CORE", 4, 1420.8, 1109.25, 1600),
            NvpmodelMode("MODE_15W_6CORE", 6, 1420.8, 1109.25, 1600),
            NvpmodelMode("MODE_10W_2CORE", 2, 1497.6, 803.25, 1600),
            NvpmodelMode("MODE_10W_4CORE", 4, 1190.4, 803.25, 1600),
            NvpmodelMode("MODE_20W_6CORE", 6, 1420.8, 1109.25, 1866),
        ),
        default=2,
    ),
    "jetson-agx-xavier": BoardLayout(
        model="Jetson-AGX",
        compatible=("nvidia,galen", "nvidia,p2972-0000", "nvidia,tegra194"),
        memory_kib=32692224,
        jetpacks=(4, 5),
        policies=((0, 1), (2, 3), (4, 5), (6, 7)),
        cpu_khz=frequency_steps(115200, 2188800, 76800, 2265600),
        gpu={4: "17000000.gv11b", 5: "17000000.gv11b"},
        gpu_mhz=(
            *(114.75, 216.75, 318.75, 420.75, 522.75, 624.75, 675.75),
            *(828.75, 905.25, 1032.75, 1198.5, 1236.75, 1338.75, 1377),
        ),
        emc_mhz=2133,
        rails={
            "1-0040": (("GPU", 19000, 120), ("CPU", 19000, 60), ("SOC", 19000, 130)),
            "1-0041": (("CV", 19000, 0), ("VDDRQ", 19000, 40), ("SYS5V", 19000, 90)),
        },
        zones=XAVIER_ZONES,
        source="NVIDIA, Jetson Linux R32.7, R35 guide for Xavier; design guide DG-09840, 5.6.2: rails at 0x40, 0x41; "
        "nvpmodel_t194.conf (LineageOS, device galen)",
        modes=(
            NvpmodelMode("MAXN", 8),
            NvpmodelMode("MODE_10W", 2, 1200, 520, 1065.6),
            NvpmodelMode("MODE_15W", 4, 1200, 670, 1331.2),
            NvpmodelMode("MODE_30W_ALL", 8, 1200, 900, 1600),
        ),
    ),
    "jetson-orin-nano": ORIN_NANO,
    "jetson-orin-nano-super": replace(
        ORIN_NANO,
        model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        compatible=("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
        jetpacks=(6,),
        cpu_khz=frequency_steps(115200, 1728000, 76800),
        gpu_mhz=frequency_steps(306, 1020, 102),
        emc_mhz=3199,
        source="NVIDIA, Jetson Linux R36.4 guide for Orin: rails at 0x40; nvpmodel_p3767_0003_super.conf (public copy)",
        modes=(
            NvpmodelMode("15W", 6, 1497.6, 612, 2133),
            NvpmodelMode("25W", 6, 1344, 918, 3199),
            NvpmodelMode("MAXN_SUPER", 6),
        ),
        default=1,
    ),
    "jetson-orin-nx": replace(
        ORIN_NANO,
        model="NVIDIA Orin NX Developer Kit",
        compatible=("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
        memory_kib=15990784,
        policies=((0, 1, 2, 3), (4, 5, 6, 7)),
        cpu_khz=frequency_steps(115200, 1958400, 76800, 1984000),
        gpu_mhz=frequency_steps(306, 918, 102),
        emc_mhz=3199,
        source=f"{ORIN_SOURCE}; nvpmodel_p3767_0000.conf (LineageOS, concord)",
        modes=(
            NvpmodelMode("MAXN", 8),
            NvpmodelMode("10W", 4, 1190.4, 612, 2133),
            NvpmodelMode("15W", 4, 1651.2, 612),
            NvpmodelMode("25W", 8, 1497.6, 408),
        ),
    ),
    "jetson-agx-orin": replace(
        ORIN_NANO,
        model="NVIDIA Jetson AGX Orin Developer Kit",
        compatible=("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
        memory_kib=64349184,
        policies=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
        cpu_khz=frequency_steps(115200, 2188800, 76800, 2201600),
        gpu_mhz=frequency_steps(306, 1224, 102, 1300.5),
        emc_mhz=3199,
        rails={
            "1-0040": (("VDD_GPU_SOC", 19000, 160), ("VDD_CPU_CV", 19000, 20), ("VIN_SYS_5V0", 5000, 700)),
            "1-0041": (("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 100), ("NC", 0, 0)),
        },
        source=f"{AGX_ORIN_SOURCE}; nvpmodel_p3701_0000.conf (LineageOS, device concord)",
        modes=(
            NvpmodelMode("MAXN", 12),
            NvpmodelMode("MODE_15W", 4, 1113.6, 408, 2133),
            NvpmodelMode("MODE_30W", 8, 1728, 612),
            NvpmodelMode("MODE_50W", 12, 1497.6, 816),
        ),
        default=2,
    ),
}

BOARDS |= {  # modules of the same families
    "jetson-orin-nano-4gb": replace(
        ORIN_NANO,
        model="NVIDIA Jetson Orin Nano Developer Kit",
        compatible=("nvidia,p3768-0000+p3767-0004", "nvidia,p3767-0004", "nvidia,tegra234"),
        memory_kib=3900928,
        source=f"{ORIN_SOURCE}; nvpmodel_p3767_0004.conf (LineageOS, concord)",
        modes=(
            NvpmodelMode("10W", 6),
            NvpmodelMode("7W_AI", 4, 806.4, 408, 2133),
            NvpmodelMode("7W_CPU", 4, 960, 306, 2133),
        ),
    ),
    "jetson-orin-nx-8gb": replace(
        BOARDS["jetson-orin-nx"],
        compatible=("nvidia,p3768-0000+p3767-0001", "nvidia,p3767-0001", "nvidia,tegra234"),
        memory_kib=7801856,
        policies=((0, 1, 2, 3), (4, 5)),
        gpu_mhz=frequency_steps(306, 714, 102, 765),
        source=f"{ORIN_SOURCE}; nvpmodel_p3767_0001.conf (LineageOS, concord)",
        modes=(
            NvpmodelMode("MAXN", 6),
            NvpmodelMode("10W", 4, 1190.4, 612, 2133),
            NvpmodelMode("15W", 4, 1420.8, 612),
            NvpmodelMode("20W", 6, 1497.6, 408),
        ),
        default=2,
    ),
    "jetson-orin-nx-super": replace(
        BOARDS["jetson-orin-nx"],
        model="NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super",
        compatible=("nvidia,p3768-0000+p3767-0000-super", "nvidia,p3767-0000", "nvidia,tegra234"),
        jetpacks=(6,),
        gpu_mhz=frequency_steps(306, 1122, 102, 1173),
        source="NVIDIA, Jetson Linux R36.4 guide for Orin: rails at 0x40; nvpmodel_p3767_0000_super.conf (public copy)",
        modes=(
            NvpmodelMode("MAXN_SUPER", 8),
            NvpmodelMode("10W", 4, 1190.4, 612, 2133),
            NvpmodelMode("15W", 4, 1420.8, 612),
            NvpmodelMode("25W", 8, 1497.6, 408),
            NvpmodelMode("40W", 8, 1497.6, 1173),
        ),
        default=4,
    ),
    "jetson-agx-orin-32gb": replace(
        BOARDS["jetson-agx-orin"],
        compatible=("nvidia,p3737-0000+p3701-0004", "nvidia,p3701-0004", "nvidia,tegra234"),
        memory_kib=31268864,
        policies=((0, 1, 2, 3), (4, 5, 6, 7)),
        gpu_mhz=frequency_steps(306, 918, 102, 930),
        source=f"{AGX_ORIN_SOURCE}; nvpmodel_p3701_0004.conf (LineageOS, device concord); GPU top: not checked",
        modes=(
            NvpmodelMode("MAXN", 8),
            NvpmodelMode("MODE_15W", 4, 1113.6, 408, 2133),
            NvpmodelMode("MODE_30W", 8, 1728, 612),
            NvpmodelMode("MODE_40W", 8, 1497.6, 816),
        ),
    ),
    "jetson-agx-orin-industrial": replace(
        BOARDS["jetson-agx-orin"],
        model="NVIDIA Jetson AGX Orin Industrial",
        compatible=("nvidia,p3737-0000+p3701-0008", "nvidia,p3701-0008", "nvidia,tegra234"),
        jetpacks=(6,),
        cpu_khz=frequency_steps(115200, 1958400, 76800, 2000000),
        gpu_mhz=frequency_steps(306, 1122, 102, 1200),
        source=f"{AGX_ORIN_SOURCE}; tops of CPU and GPU not checked; its nvpmodel.conf was not seen",
        modes=(NvpmodelMode("MAXN", 12),),
        default=0,
    ),
    "jetson-agx-thor": BoardLayout(
        model="NVIDIA Jetson AGX Thor Developer Kit",
        compatible=("nvidia,p4071-0000+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"),
        memory_kib=128785408,
        jetpacks=(7,),
        policies=tuple((core,) for core in range(14)),
        cpu_khz=(1_000_000, 1_500_000, 2_000_000, 2_601_000),
        gpu={7: "platform/bus@0/d0b0000000.pcie/gpu-gpc-0"},
        gpu_mhz=(315, 630, 945, 1260, 1575),
        emc_mhz=4266,
        rails={"2-0040": (("VDD_GPU", 20000, 0), ("VDD_CPU_SOC_MSS", 20000, 325), ("VIN_SYS_5V0", 5000, 1304))},
        zones=("cpu-thermal", "gpu-thermal", "soc012-thermal", "soc345-thermal", "tj-thermal"),
        source="jetson_stats, issue 711 (names) and pull request 900 (INA238); public logs of an idle board "
        "(rails, VIN, zones); RidgeRun's module overview (tops); made up: addresses, clocks below the tops, and "
        "nvpmodel.conf but for MAXN",
        modes=(NvpmodelMode("MAXN", 14),),
        input_w=23.0,
    ),
}
