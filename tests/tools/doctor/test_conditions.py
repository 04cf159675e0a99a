"""One condition that slows a board or falsifies its figures is planted in a board made of files, and that is found."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from ordinary import User

from fedquilt.core import OperatingPoint
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.agent import Facts
from fedquilt.tools.boards.doctor.findings import Finding, run_checks
from fedquilt.tools.boards.doctor.machine import InstalledPackages
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts
from tests import fake_boards

OC = "sys/class/hwmon/hwmon9"


def check(seen: MachineFacts, held: InstalledPackages = InstalledPackages()) -> list[Finding]:
    return list(run_checks(doctor.CHECKS, Facts(seen, held)))


def pin(root: Path, top: bool = True) -> None:
    for low, high in (("scaling_min_freq", "scaling_max_freq"), ("min_freq", "max_freq")):
        for place in root.glob("sys/devices/**/" + low):
            (place if top else place.with_name(high)).write_text((place.with_name(high) if top else place).read_text())


def test_clocks_that_are_pinned_are_found(board: Any) -> None:
    pin(board.root)
    board.require("FQ161", "warning", "policy0 at 1510 MHz", fix="jetson_clocks --restore")
    seen = machine_facts.read_machine(board.root, board.clock_s, 0.0)
    point = OperatingPoint(name="15W")
    held = dataclasses.replace(seen, helper=HelperStatus(clocks=(), point=point))
    assert "FQ161" not in [one.number for one in check(held)]


def test_one_clock_that_is_pinned_is_the_owners_choice(board: Any) -> None:
    (gpu,) = board.root.glob("sys/class/devfreq/*.gpu")
    (gpu / "min_freq").write_text((gpu / "max_freq").read_text())
    assert board.examine("machine") == []


@pytest.mark.parametrize("kind", ["cpu-throttle-alert", "thermal-cpufreq-0", "thermal-devfreq-0"])
def test_a_board_that_is_slowed_for_heat_is_found(board: Any, kind: str) -> None:
    for number, (name, state) in enumerate((("pwm-fan", 3), (kind, 0))):
        board.write(f"sys/class/thermal/cooling_device{number}/type", name)
        board.write(f"sys/class/thermal/cooling_device{number}/cur_state", state)
    assert board.examine("machine") == []
    board.write("sys/class/thermal/cooling_device1/cur_state", 1)
    board.require("FQ154", None, kind)
    assert "pwm-fan" not in board.only().sentence


def test_over_current_is_found_by_its_counters(board: Any) -> None:
    for number in (1, 2, 3):
        board.write(f"{OC}/oc{number}_event_cnt", 0)
    assert board.examine("machine") == []
    board.write(f"{OC}/oc3_event_cnt", 7)
    board.require("FQ155", None, "oc3 7 times")


def test_a_gpu_that_is_gone_from_devfreq_is_found(board: Any) -> None:
    (gpu,) = board.root.glob("sys/class/devfreq/*.gpu")
    gpu.unlink()
    assert "FQ173" in [one.number for one in board.examine("machine")]


@pytest.mark.parametrize(
    ("swaps", "kind", "found"),
    [
        ("/dev/mmcblk0p3 partition 1000 0 -2", "SD", "/dev/mmcblk0p3"),
        ("/var/swap file 1000 0 -2", "SD", "/var/swap"),
        ("/var/swap file 1000 0 -2", "MMC", None),  # soldered eMMC has the same name
        ("/dev/zram0 partition 1000 0 5", "SD", None),
    ],
)
def test_swap_on_a_card_is_found(board: Any, swaps: str, kind: str, found: str | None) -> None:
    board.write("proc/swaps", f"Filename Type Size Used Priority\n{swaps}")
    board.write("proc/mounts", "/dev/mmcblk0p1 / ext4 rw 0 0\nproc /proc proc rw 0 0")
    board.write("sys/block/mmcblk0/device/type", kind)
    told = [one for one in board.examine("machine") if one.number == "FQ131"]
    assert [found in one.sentence for one in told if found] == ([True] if found else [])


def finds(root: Path) -> list[str]:
    seen = machine_facts.read_machine(root, 1.8e9, 0.0)
    return [one.number for one in check(seen) if one.severity != "ok" and one.number > "FQ150"]


def test_all_is_read_as_an_ordinary_user(user: User) -> None:
    root = user.folder / "board"
    fake_boards.write_fake_board(root, "jetson-orin-nano", 6)
    user.shut(root / "sys/kernel/debug")
    pin(root)
    for name, text in ((f"{OC}/oc1_event_cnt", "2"), ("sys/class/thermal/cooling_device0/type", "cpu-throttle-alert")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "sys/class/thermal/cooling_device0/cur_state").write_text("1")
    assert sorted(user.does(finds, root)) == ["FQ154", "FQ155", "FQ161"]


# -- what beside it is of another board or time ---------------------------------------------------


@pytest.mark.parametrize(
    ("core", "numpy", "found"), [("core", "2.2.6", True), ("_core", "2.2.6", False), ("core", "1.26.4", False)]
)
def test_numpy_2_beside_a_torch_compiled_with_numpy_1_is_found(board: Any, core: str, numpy: str, found: bool) -> None:
    board.package("numpy", numpy)
    (board.root / "usr/lib/python3/dist-packages/numpy-1.26.4.dist-info/METADATA").unlink()
    board.package("numpy", numpy)
    board.package("torch", "2.8.0", **{"version.py": "cuda = '12.6'"})
    board.write("usr/lib/python3/dist-packages/torch/lib/libtorch_python.so", f"numpy.{core}._multiarray_umath")
    told = board.examine("machine")
    assert [one.number for one in told] == (["FQ206"] if found else []), told


def test_mends_of_a_flashed_board_ask_for_no_pip(board: Any) -> None:
    (board.root / "opt/fedquilt/current").mkdir(parents=True)
    (board.root / "usr/lib/python3/dist-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so").unlink()
    fix = board.only().fix or ""
    assert "fedquilt board flash agent.toml --ssh USER@BOARD --target jetpack6-gpu --extras gpu" in fix
    assert "pip" not in fix
    seen = machine_facts.read_machine(board.root, board.clock_s, 0.0)
    for versions in ({"torch": "2.9"}, {"onnxruntime": "1", "onnxruntime-gpu": "1"}, {"torch": "1", "numpy": "2.0"}):
        held = InstalledPackages(versions, torch_numpy=1)
        assert not [one for one in check(seen, held) if one.number[2] == "2" and "pip install" in (one.fix or "")]


def test_a_board_with_numpys_engine_alone_is_told_how_it_gets_another(board: Any) -> None:
    site = board.root / "usr/lib/python3/dist-packages"
    for folder in [*site.glob("onnxruntime*"), *site.glob("torch*")]:
        shutil.rmtree(folder)
    warning = board.only()
    assert warning.number == "FQ312"
    assert (warning.fix or "").startswith("pip install onnxruntime-gpu --index-url ")
    (board.root / "opt/fedquilt/current").mkdir(parents=True)
    assert "fedquilt board flash agent.toml" in (board.only().fix or "")
    for folder in site.glob("numpy*"):
        shutil.rmtree(folder)
    fault = board.only()
    assert (fault.number, fault.severity) == ("FQ311", "error")
    assert "fedquilt board flash agent.toml" in (fault.fix or "")


def test_a_board_without_a_profile_and_with_anothers_are_found(board: Any) -> None:
    board.table["profile"] = "jetson-tx2"
    board.require("FQ317", fix="jetson-orin-nano")
    del board.table["profile"]
    (board.root / "sys/firmware/devicetree/base/compatible").write_bytes(b"acme,carrier\0nvidia,tegra234\0")
    found = next(one for one in board.examine("machine") if one.number == "FQ316")
    assert "fedquilt board record" in (found.fix or "")


def test_a_folder_of_examples_that_is_empty_is_found(board: Any) -> None:
    (board.root / "srv/images/a/0.pgm").unlink()
    board.require("FQ309", "error", "is empty")
    board.table["data"] = {"path": "/srv/none.npz"}
    (board.root / "srv/none.npz").touch()
    board.require("FQ309")
