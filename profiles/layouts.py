"""The fake boards' figures: what differs from one Jetson to the next. `fake_boards` makes files of them.

Frequencies and modes are those of public tables, addresses, labels and zones those of NVIDIA's guides
and public logs; the readings are made up, each in the order of magnitude of an idle board.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

Rail = tuple[str, int, int]  # label, mV, mA
UNCAPPED = -1
XAVIER_ZONES = ("CPU-therm", "GPU-therm", "AUX-therm", "AO-therm", "PMIC-Die", "thermal-fan-est")
ORIN_ZONES = ("cpu-thermal", "gpu-thermal", "cv0-thermal", "soc0-thermal", "soc1-thermal", "soc2-thermal", "tj-thermal")


def steps(first: float, last: float, by: float, *more: float) -> tuple[float, ...]:
    """`first` to `last` by steps, and more."""
    return (*(first + by * k for k in range(round((last - first) / by) + 1)), *more)


@dataclass(frozen=True)
class Mode:
    """One nvpmodel mode: cores that are on, and caps in MHz (-1: none)."""

    name: str
    cores: int
    cpu: float = UNCAPPED
    gpu: float = UNCAPPED
    emc: float = UNCAPPED


@dataclass(frozen=True)
class Layout:
    """What differs between boards. Frequencies in MHz, CPU's in kHz."""

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
    modes: tuple[Mode, ...]
    default: int = 0


XAVIER_CPU = steps(115200, 1881600, 76800, 1907200)
ORIN_GPU = {5: "17000000.ga10b", 6: "platform/bus@0/17000000.gpu"}
THREE = (("VDD_IN", 5000, 1200), ("VDD_CPU_GPU_CV", 5000, 400), ("VDD_SOC", 5000, 300))

ORIN_NANO = Layout(
    model="NVIDIA Jetson Orin Nano Developer Kit",
    compatible=("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    memory_kib=7801856,
    jetpacks=(5, 6),
    policies=((0, 1, 2, 3), (4, 5)),
    cpu_khz=steps(115200, 1497600, 76800, 1510400),
    gpu=ORIN_GPU,
    gpu_mhz=(306, 408, 510, 612, 624.75),
    emc_mhz=2133,
    rails={"1-0040": THREE},
    zones=ORIN_ZONES,
    modes=(Mode("15W", 6, emc=2133), Mode("7W", 4, 960, 408, 2133)),
)

BOARDS: Mapping[str, Layout] = {
    "jetson-nano": Layout(
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
        gpu_mhz=steps(76.8, 921.6, 76.8),
        emc_mhz=1600,
        rails={"6-0040": (("POM_5V_IN", 5000, 580), ("POM_5V_GPU", 5000, 8), ("POM_5V_CPU", 5000, 120))},
        zones=("AO-therm", "CPU-therm", "GPU-therm", "PLL-therm", "PMIC-Die", "thermal-fan-est"),
        modes=(Mode("MAXN", 4), Mode("5W", 2, 918, 640, 1600)),
    ),
    "jetson-tx2": Layout(
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
        modes=(
            Mode("MAXN", 6),
            Mode("MAXQ", 4, 1200, 850, 1331),
            Mode("MAXP_CORE_ALL", 6, 1400, 1120, 1600),
            Mode("MAXP_CORE_ARM", 4, 2000, 1120, 1600),
        ),
    ),
    "jetson-xavier-nx": Layout(
        model="NVIDIA Jetson Xavier NX Developer Kit",
        compatible=("nvidia,p3509-0000+p3668-0000", "nvidia,p3668-0000", "nvidia,tegra194"),
        memory_kib=7951360,
        jetpacks=(4, 5),
        policies=((0, 1), (2, 3), (4, 5)),
        cpu_khz=XAVIER_CPU,
        gpu={4: "17000000.gv11b", 5: "17000000.gv11b"},
        gpu_mhz=(114.75, 204, 306, 408, 510, 599.25, *steps(701.25, 1109.25, 51)),
        emc_mhz=1866,
        rails={"7-0040": THREE},
        zones=XAVIER_ZONES,
        modes=(
            Mode("15W_2CORE", 2, 1907, 1109, 1600),
            Mode("15W_4CORE", 4, 1421, 1109, 1600),
            Mode("15W_6CORE", 6, 1421, 1109, 1600),
            Mode("10W_2CORE", 2, 1498, 803, 1600),
            Mode("10W_4CORE", 4, 1190, 803, 1600),
            Mode("20W_6CORE", 6, 1421, 1109, 1866),
        ),
        default=2,
    ),
    "jetson-agx-xavier": Layout(
        model="Jetson-AGX",
        compatible=("nvidia,galen", "nvidia,p2972-0000", "nvidia,tegra194"),
        memory_kib=32692224,
        jetpacks=(4, 5),
        policies=((0, 1), (2, 3), (4, 5), (6, 7)),
        cpu_khz=steps(115200, 2188800, 76800, 2265600),
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
        modes=(
            Mode("MAXN", 8),
            Mode("MODE_10W", 2, 1200, 520, 1066),
            Mode("MODE_15W", 4, 1200, 670, 1331),
            Mode("MODE_30W_ALL", 8, 1200, 900, 1600),
        ),
    ),
    "jetson-orin-nano": ORIN_NANO,
    "jetson-orin-nano-super": replace(
        ORIN_NANO,
        model="NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        compatible=("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
        jetpacks=(6,),
        cpu_khz=steps(115200, 1728000, 76800),
        gpu_mhz=steps(306, 1020, 102),
        emc_mhz=3199,
        modes=(Mode("15W", 6, 1498, 612, 2133), Mode("25W", 6, 1344, 918, 3199), Mode("MAXN_SUPER", 6)),
        default=1,
    ),
    "jetson-orin-nx": replace(
        ORIN_NANO,
        model="NVIDIA Orin NX Developer Kit",
        compatible=("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
        memory_kib=15990784,
        policies=((0, 1, 2, 3), (4, 5, 6, 7)),
        cpu_khz=steps(115200, 1958400, 76800, 1984000),
        gpu_mhz=steps(306, 918, 102),
        emc_mhz=3199,
        modes=(
            Mode("MAXN", 8),
            Mode("10W", 4, 1190, 612, 2133),
            Mode("15W", 4, 1651, 612, 3199),
            Mode("25W", 8, 1498, 408, 3199),
        ),
    ),
    "jetson-agx-orin": replace(
        ORIN_NANO,
        model="NVIDIA Jetson AGX Orin Developer Kit",
        compatible=("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
        memory_kib=64349184,
        policies=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)),
        cpu_khz=steps(115200, 2188800, 76800, 2201600),
        gpu_mhz=steps(306, 1224, 102, 1300.5),
        emc_mhz=3199,
        rails={
            "1-0040": (("VDD_GPU_SOC", 19000, 160), ("VDD_CPU_CV", 19000, 20), ("VIN_SYS_5V0", 5000, 700)),
            "1-0041": (("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 100), ("NC", 0, 0)),
        },
        modes=(
            Mode("MAXN", 12),
            Mode("MODE_15W", 4, 1114, 408, 2133),
            Mode("MODE_30W", 8, 1728, 612, 3199),
            Mode("MODE_50W", 12, 1498, 816, 3199),
        ),
        default=2,
    ),
}
