"""Fake boards made of files: the parts of /proc, /sys, /etc and /var that fedquilt uses.

    write_fake_board(root, "jetson-tx2", jetpack=4)

The files follow documented layouts (NVIDIA's developer guides, the kernel's ABI notes and public logs) and are not
copied from a board. All files are plain, so that a value written is the value read, without a reaction of a kernel. For
tests, `fedquilt lab bench` and trials of commands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedquilt.core import JobError
from fedquilt.profiles.board_layouts import BOARDS, UNCAPPED, BoardLayout, Rail

KERNEL = {
    4: "R32 (release), REVISION: 7.4",
    5: "R35 (release), REVISION: 4.1",
    6: "R36 (release), REVISION: 4.3",
    7: "R38 (release), REVISION: 2.0",
}
SOURCE = "SOURCE"  # file in the tree's root: where its layout comes from


def write_fake_board(root: Path, board: str, jetpack: int) -> None:
    """Write the files of a board below `root`, which stands for "/".

    Args:
        root: The folder, created if necessary.
        board: A key of `board_layouts.BOARDS`.
        jetpack: The JetPack version, 4 to 7, which determines the layouts of power monitor and GPU.

    Raises:
        JobError: If there is no such board, or the JetPack version does not run on it.
    """
    layout = BOARDS.get(board)
    if layout is None or jetpack not in layout.jetpacks:
        runs = ", ".join(f"{name} {'/'.join(map(str, one.jetpacks))}" for name, one in BOARDS.items())
        raise JobError(f"there is no fake {board!r} with JetPack {jetpack}; there are: {runs}")
    _write_identity(root, layout, jetpack)
    _write_processors(root, layout)
    _write_gpu(root, layout, jetpack)
    _write_memory_clock(root, layout, jetpack)
    for number, (address, rails) in enumerate(layout.rails.items()):
        (_write_iio_monitor if jetpack == 4 else _write_hwmon_monitor)(root, address, number, rails)
    if layout.input_w is not None:
        chip = {"name": "ina238", "power1_input": round(layout.input_w * 1e6)}
        _write_files(root, "sys/bus/i2c/drivers/ina2xx/2-0044/hwmon/hwmon9", chip)
        _link_relative(root / "sys/class/hwmon/hwmon9", root / "sys/bus/i2c/drivers/ina2xx/2-0044/hwmon/hwmon9")
    (root / SOURCE).write_text(f"{layout.source}\nReadings are made up unless the source has them.\n")
    for number, zone in enumerate(layout.zones):
        celsius = 100 if zone == "PMIC-Die" else 40 + number / 2  # that one always says 100
        _write_files(root, f"sys/class/thermal/thermal_zone{number}", {"type": zone, "temp": int(1000 * celsius)})
    _write_power_modes(root, layout, jetpack)
    (root / "sys/kernel/debug").chmod(0o700)  # the kernel's default, which only root may read


def _write_files(root: Path, folder: str, files: Mapping[str, object]) -> None:
    place = root / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name).write_text(f"{text}\n")


def _link_relative(link: Path, target: Path) -> None:
    # relative, so that the tree can be moved
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
    _write_files(root, "etc", {"nv_tegra_release": f"# {KERNEL[jetpack]}, GCID: 0, BOARD: t186ref, EABI: aarch64"})
    total = layout.memory_kib
    _write_files(
        root, "proc", {"meminfo": f"MemTotal: {total} kB\nMemFree: {total // 3} kB\nMemAvailable: {total // 2} kB"}
    )
    if jetpack >= 5:  # pressure is told from Linux 4.20
        pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0"
        _write_files(root, "proc/pressure", {"memory": pressure})
    if jetpack >= 6:  # Ubuntu 22.04 has cgroup v2 alone
        _write_files(root, "proc/self", {"cgroup": "0::/system.slice/fedquilt.service"})
        _write_files(
            root, "sys/fs/cgroup/system.slice/fedquilt.service", {"memory.max": "max", "memory.current": 30_000_000}
        )


def _write_processors(root: Path, layout: BoardLayout) -> None:
    system = "sys/devices/system/cpu"
    listed = " ".join(str(round(khz)) for khz in layout.cpu_khz)
    low, high = round(min(layout.cpu_khz)), round(max(layout.cpu_khz))
    for cores in layout.policies:
        policy = f"{system}/cpufreq/policy{cores[0]}"
        files = {
            "scaling_available_frequencies": listed,
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
    device, _, inside = layout.gpu[jetpack].partition("/devfreq/")
    name = inside or device.rsplit("/", 1)[-1]
    node = name.partition(".")[2] or name
    _write_devfreq(root, device, name, node, layout.gpu_mhz, "nvhost_podgov")
    _write_files(root, f"sys/devices/{device}", {"load": 0})
    host = {4: "13e10000.host1x", 5: "13e40000.host1x"}.get(jetpack, "platform/bus@0/13e00000.host1x")
    _write_devfreq(root, f"{host}/15340000.vic", "15340000.vic", "vic", (115.2, 435.2, 729.6), "wmark_active")


def _write_devfreq(root: Path, device: str, name: str, node: str, mhz: Sequence[float], governor: str) -> None:
    place = f"sys/devices/{device}/devfreq/{name}"
    files = {
        "available_frequencies": " ".join(str(_to_hz(one)) for one in mhz),
        "min_freq": _to_hz(min(mhz)),
        "max_freq": _to_hz(max(mhz)),
        "cur_freq": _to_hz(min(mhz)),
        "governor": governor,
        "available_governors": f"{governor} userspace powersave performance simple_ondemand",
    }
    _write_files(root, place, files)
    _link_relative(root / place / "device", root / "sys/devices" / device)
    (root / f"sys/devices/{device}/of_node").mkdir(exist_ok=True)
    (root / f"sys/devices/{device}/of_node/name").write_bytes(node.encode() + b"\0")
    _link_relative(root / "sys/class/devfreq" / name, root / place)


def _write_memory_clock(root: Path, layout: BoardLayout, jetpack: int) -> None:
    # nvpmodel writes the cap, 0 for none, and only root reads debugfs on a board
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
    place = f"sys/bus/i2c/drivers/ina3221/{address}/hwmon/hwmon{number + 1}"
    _write_files(root, place, files)
    _link_relative(root / f"sys/class/hwmon/hwmon{number + 1}", root / place)


def _write_power_modes(root: Path, layout: BoardLayout, jetpack: int) -> None:
    cores = [core for policy in layout.policies for core in policy]
    device, _, inside = layout.gpu[jetpack].partition("/devfreq/")
    gpu = f"sys/devices/{device}/devfreq/{inside or device.rsplit('/', 1)[-1]}"
    cap = "nvpmodel_clk_cap/emc" if jetpack >= 6 else "nvpmodel_emc_cap/emc_iso_cap"
    emc = "class/devfreq/bwmgr/max_freq" if jetpack >= 7 else f"kernel/{cap}"
    text = ["< PARAM TYPE=FILE NAME=CPU_ONLINE >"]
    text += [f"CORE_{core} /sys/devices/system/cpu/cpu{core}/online" for core in sorted(cores)]
    for policy in layout.policies:
        place = f"/sys/devices/system/cpu/cpu{policy[0]}/cpufreq/scaling"
        text += ["", f"< PARAM TYPE=CLOCK NAME=CPU_{policy[0]} >", f"FREQ_TABLE {place}_available_frequencies"]
        text += [f"MAX_FREQ {place}_max_freq", f"MIN_FREQ {place}_min_freq"]
    text += ["", "< PARAM TYPE=CLOCK NAME=GPU >", f"FREQ_TABLE /{gpu}/available_frequencies"]
    text += [f"MAX_FREQ /{gpu}/max_freq", f"MIN_FREQ /{gpu}/min_freq"]
    text += ["", "< PARAM TYPE=CLOCK NAME=EMC >", f"MAX_FREQ /sys/{emc}"]
    for number, mode in enumerate(layout.modes):
        text += ["", f"< POWER_MODEL ID={number} NAME={mode.name} >"]
        text += [f"CPU_ONLINE CORE_{core} {int(place < mode.cores)}" for place, core in enumerate(cores)]
        khz = mode.cpu if mode.cpu == UNCAPPED else round(mode.cpu * 1000)
        text += [f"CPU_{policy[0]} MAX_FREQ {khz}" for policy in layout.policies]
        text += [f"GPU MAX_FREQ {_to_hz(mode.gpu)}", f"EMC MAX_FREQ {0 if mode.emc == UNCAPPED else _to_hz(mode.emc)}"]
    text += ["", f"< PM_CONFIG DEFAULT={layout.default} >"]
    _write_files(root, "etc/nvpmodel", {"nvpmodel.conf": "\n".join(text)})
    _link_relative(root / "etc/nvpmodel.conf", root / "etc/nvpmodel/nvpmodel.conf")
    _write_files(root, "var/lib/nvpmodel", {"status": f"pmode:{layout.default:04d}"})
