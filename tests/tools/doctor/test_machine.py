"""One fault of the machine or its packages is planted in a board made of files, and that is what is found."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedquilt.edge_agent.clocks.client import HelperResponse, HelperStatus
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import machine, machine_facts
from fedquilt.tools.boards.doctor.agent import Facts
from fedquilt.tools.boards.doctor.findings import Finding, run_checks
from fedquilt.tools.boards.doctor.machine import InstalledPackages
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts
from tests import fake_boards


def check(seen: MachineFacts, versions: Mapping[str, str] = {}) -> list[Finding]:
    return list(run_checks(doctor.CHECKS, Facts(seen, InstalledPackages(versions))))


def test_a_healthy_board_has_no_finding(board: Any) -> None:
    assert board.examine("machine") == []


@pytest.mark.parametrize(("name", "jetpack"), [("jetson-tx2", 4), ("jetson-agx-orin", 5), ("jetson-nano", 4)])
def test_other_healthy_boards_have_none_either(tmp_path: Path, name: str, jetpack: int) -> None:
    fake_boards.write_fake_board(tmp_path, name, jetpack)
    seen = dataclasses.replace(machine_facts.read_machine(tmp_path, 1.8e9, 0.0), python_version=(3, 10))
    found = check(seen, {"onnxruntime": "1.23.2"})
    assert [one for one in found if one.severity != "ok"] == []
    assert seen.jetpack == jetpack


def overwrite(board: Any, files: str, text: str) -> None:
    for file in board.root.glob(files):
        file.write_text(text)


def package_torch(board: Any, version: str, cuda: str | None) -> None:
    board.package("torch", version, **{"version.py": f"cuda: Optional[str] = {cuda!r}"})


SENSORS, ZONES = "sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/curr*_input", "sys/class/thermal/thermal_zone*/temp"
CUDA = "usr/lib/python3/dist-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so"


@pytest.mark.parametrize(
    ("wanted", "fix", "plant"),
    [
        (
            ("FQ110", "error", "1970-01-01 01:00"),
            "^sudo timedatectl set-ntp true$",
            lambda b: setattr(b, "clock_s", 3600.0),
        ),
        # JetPack 6's wheels are for cp310, those of PyPI for CUDA 13 and JetPack 6's driver for 12
        (("FQ101", "warning", "Python 3.10"), "", lambda b: b.write("usr/bin/python3.11", "")),
        (("FQ202",), "jp6", lambda b: (b.root / CUDA).unlink()),
        (("FQ201",), "", lambda b: b.package("onnxruntime", "1.23.2")),  # beside the one with the GPU
        (("FQ203",), "", lambda b: package_torch(b, "2.9.0+cpu", None)),
        (("FQ204", None, "CUDA 13.0", "CUDA 12"), "", lambda b: package_torch(b, "2.14.1", "13.0")),
        # as Raspberry Pi OS comes
        (("FQ140",), "cgroup_enable=memory", lambda b: b.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io")),
        (("FQ150",), "jetson-stats", lambda b: overwrite(b, SENSORS, "")),
        (("FQ152",), "", lambda b: overwrite(b, ZONES, "92000")),
        (("FQ151",), "", lambda b: [file.unlink() for file in b.root.glob(ZONES)]),
        (("FQ160", None, "15W"), "", lambda b: b.write("var/lib/nvpmodel/status", "pmode:0009")),  # names the others
        (
            ("FQ315",),
            "^sudo systemctl enable --now fedquilt-clocks$",
            lambda b: b.table.update(governor={"policy": "energy"}),
        ),
    ],
)
def test_one_planted_condition_is_the_one_finding(
    board: Any, wanted: tuple[str, ...], fix: str, plant: Callable[[Any], object]
) -> None:
    plant(board)
    board.require(*wanted, fix=fix)


def test_a_python_that_is_too_old_is_found_with_what_to_do(board: Any) -> None:
    (board.root / "usr/bin/python3.10").rename(board.root / "usr/bin/python3.8")
    board.write("etc/nv_tegra_release", "# R35 (release), REVISION: 4.1")
    board.require("FQ101", "error", "Python 3.8", fix="--target jetpack5 --python /opt")


def test_a_swap_that_is_full_is_found(board: Any) -> None:
    text = (board.root / "proc/meminfo").read_text()
    board.write("proc/meminfo", f"{text}SwapTotal: 4000000 kB\nSwapFree: 100000 kB")
    board.require("FQ130", None, "98%")


def test_a_32_bit_python_is_found() -> None:
    found = [one for one in check(MachineFacts(1.8e9, python_bits=32, memory_bytes=10**9)) if one.severity != "ok"]
    assert [one.number for one in found] == ["FQ102"]


def test_a_unit_that_does_not_hand_its_memory_down_is_found(board: Any) -> None:
    board.write("etc/systemd/system/fedquilt-agent.service", "[Service]\n# Delegate=memory\nMemoryMax=75%")
    board.require("FQ141", fix="fedquilt-agent.service.d/memory.conf")
    board.write("etc/systemd/system/fedquilt-agent.service.d/memory.conf", "[Service]\nDelegate=memory")
    assert board.examine("machine") == []


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("curr1_input", "-40", "VDD_IN reads -0.20 W, below 0"),
        ("curr1_input", "0", "the total of 0.00 W is implausible"),
        ("curr1_input", "", "VDD_IN cannot be read"),
        ("in1_label", "NC", "VDD_IN is missing"),
        ("curr1_input", "100", "less than its parts with"),
    ],
)
def test_rails_whose_total_cannot_be_right_are_found(board: Any, file: str, value: str, said: str) -> None:
    overwrite(board, f"sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/{file}", value)
    board.require("FQ156", None, said, fix="wall")


def test_a_supply_that_is_too_weak_is_found(tmp_path: Path) -> None:
    for name, text in (("name", "rpi_volt"), ("in0_lcrit_alarm", "1")):
        place = tmp_path / "sys/class/hwmon/hwmon0"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{text}\n")
    seen = machine_facts.read_machine(tmp_path, 1.8e9, 0.0)
    assert "FQ153" in [one.number for one in check(seen)]
    assert "FQ120" in [one.number for one in check(seen) if one.severity == "error"]  # no /proc there


def test_a_clock_helper_is_asked_what_it_owes(tmp_path: Path) -> None:
    place = tmp_path / "s"

    def seen(helper: Any) -> list[Finding]:
        facts = MachineFacts(1.8e9, memory_bytes=10**9, helper=helper)
        return [one for one in check(facts) if one.severity != "ok"]

    def told(status: HelperStatus) -> list[str]:
        with socket.socket(socket.AF_UNIX) as server:
            place.unlink(missing_ok=True)
            server.bind(str(place))
            server.listen()

            def serve() -> None:
                line, _ = server.accept()
                with line:
                    line.recv(4096)
                    line.sendall(msgspec.json.encode(HelperResponse(status=status)) + b"\n")

            thread = threading.Thread(target=serve)
            thread.start()
            found = seen(machine_facts._read_helper_status(place))
            thread.join()
        return [one.number for one in found]

    assert told(HelperStatus(clocks=())) == []
    assert told(HelperStatus(clocks=(), unrestored_settings=("the GPU's limit",))) == ["FQ171"]
    (dead,) = seen(machine_facts._read_helper_status(place))  # its socket is left, nobody listens
    assert dead.number == "FQ170"
    assert "systemctl restart" in str(dead.fix)
    (refused,) = (one for one in seen(machine_facts.HelperFault("not permitted", "no")) if one.number == "FQ170")
    assert "usermod" in str(refused.fix)


@pytest.mark.parametrize("there", [True, False])
def test_what_flash_and_the_authority_need_is_looked_for(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: there or None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: there or None)
    told = [(one.number, one.severity) for one in run_checks(machine.OPERATOR, None)]
    assert told == [(f"FQ60{n}", "ok" if there else "warning") for n in (1, 2, 3, 4)]


def test_sizes_are_read_as_systemd_writes_them() -> None:
    sizes = {"512": 512, "2K": 2048, "3M": 3 * 2**20, "75%": None, "infinity": None, "": None}
    assert {text: machine_facts.parse_systemd_size(text) for text in sizes} == sizes
