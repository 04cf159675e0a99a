"""One fault of the machine or its packages is planted in a board made of files, and that is what is found."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedquilt.edge_agent.clocks.client import HelperResponse, HelperStatus
from fedquilt.testing import boards
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.checks import machine
from fedquilt.tools.boards.doctor.checks.agent import Facts
from fedquilt.tools.boards.doctor.checks.packages import InstalledPackages
from fedquilt.tools.boards.doctor.findings import Finding, run_checks
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts


def check(seen: MachineFacts, versions: Mapping[str, str] = {}) -> list[Finding]:
    return list(run_checks(doctor.TABLE, Facts(seen, InstalledPackages(versions))))


def test_a_healthy_board_has_no_finding(board: Any) -> None:
    """Machine, packages and agent; its broker has tests of its own."""
    assert board.examine("machine") == []


@pytest.mark.parametrize(("name", "jetpack"), [("jetson-tx2", 4), ("jetson-agx-orin", 5), ("jetson-nano", 4)])
def test_other_healthy_boards_have_none_either(tmp_path: Path, name: str, jetpack: int) -> None:
    """With cgroup v1, and no wheels with the GPU for any Python that fedquilt runs on."""
    boards.write_fake_board(tmp_path, name, jetpack)
    seen = dataclasses.replace(machine_facts.read_machine(tmp_path, 1.8e9, 0.0), python=(3, 10))
    found = check(seen, {"onnxruntime": "1.23.2"})
    assert [one for one in found if one.severity != "ok"] == []
    assert seen.jetpack == jetpack


def test_a_clock_that_says_1970_is_found(board: Any) -> None:
    """An error: TLS would call every certificate not yet valid."""
    board.clock_s = 3600.0
    found = board.only()
    assert (found.number, found.severity) == ("FQ110", "error")
    assert "1970-01-01 01:00" in found.sentence
    assert found.fix == "sudo timedatectl set-ntp true"


def test_a_python_that_is_too_old_is_found_with_what_to_do(board: Any) -> None:
    """JetPack 5's."""
    (board.root / "usr/bin/python3.10").rename(board.root / "usr/bin/python3.8")
    board.write("etc/nv_tegra_release", "# R35 (release), REVISION: 4.1")
    found = board.only()
    assert (found.number, found.severity) == ("FQ101", "error")
    assert "Python 3.8" in found.sentence
    assert "--target jetpack5 --python /opt" in (found.fix or "")


def test_a_python_that_nvidias_wheels_are_not_for_is_found(board: Any) -> None:
    """3.11 on JetPack 6, whose wheels are cp310."""
    board.write("usr/bin/python3.11", "")
    found = board.only()
    assert (found.number, found.severity) == ("FQ101", "warning")
    assert "Python 3.10" in found.sentence


def test_a_32_bit_python_is_found() -> None:
    """No wheels of onnxruntime or torch are made for it."""
    found = [one for one in check(MachineFacts(1.8e9, bits=32, memory_bytes=10**9)) if one.severity != "ok"]
    assert [one.number for one in found] == ["FQ102"]


def test_an_onnxruntime_without_the_gpu_is_found_on_a_board_with_one(board: Any) -> None:
    """The fix is NVIDIA's index for JetPack 6, which PyPI does not replace."""
    (board.root / "usr/lib/python3/dist-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so").unlink()
    found = board.only()
    assert found.number == "FQ202"
    assert "jp6" in (found.fix or "")


def test_two_onnxruntimes_at_once_are_found(board: Any) -> None:
    """Each has overwritten some of the other's files."""
    board.package("onnxruntime", "1.23.2")
    assert board.only().number == "FQ201"


def test_a_torch_for_the_cpu_alone_is_found_on_a_board_with_a_gpu(board: Any) -> None:
    """By torch/version.py, which is not run."""
    board.package("torch", "2.9.0+cpu", **{"version.py": "cuda: Optional[str] = None"})
    assert board.only().number == "FQ203"


def test_a_torch_for_a_cuda_that_the_jetpack_has_not_is_found(board: Any) -> None:
    """PyPI's wheels are for CUDA 13, JetPack 6's driver for 12."""
    board.package("torch", "2.14.1", **{"version.py": "cuda: Optional[str] = '13.0'"})
    found = board.only()
    assert found.number == "FQ204"
    assert "CUDA 13.0" in found.sentence
    assert "CUDA 12" in found.sentence


def test_a_swap_that_is_full_is_found(board: Any) -> None:
    """With the share that is in use."""
    text = (board.root / "proc/meminfo").read_text()
    board.write("proc/meminfo", f"{text}SwapTotal: 4000000 kB\nSwapFree: 100000 kB")
    found = board.only()
    assert found.number == "FQ130"
    assert "98%" in found.sentence


def test_a_kernel_without_the_memory_controller_is_found(board: Any) -> None:
    """As Raspberry Pi OS comes."""
    board.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io pids")
    found = board.only()
    assert found.number == "FQ140"
    assert "cgroup_enable=memory" in (found.fix or "")


def test_a_unit_that_does_not_hand_its_memory_down_is_found(board: Any) -> None:
    """Without Delegate= a task's process has no limit of its own; a drop-in mends it."""
    board.write("etc/systemd/system/fedquilt-agent.service", "[Service]\n# Delegate=memory\nMemoryMax=75%")
    found = board.only()
    assert found.number == "FQ141"
    assert "fedquilt-agent.service.d/memory.conf" in (found.fix or "")
    board.write("etc/systemd/system/fedquilt-agent.service.d/memory.conf", "[Service]\nDelegate=memory")
    assert board.examine("machine") == []


def test_power_sensors_that_do_not_answer_are_found(board: Any) -> None:
    """An INA3221 whose files cannot be read: energy would be unknown."""
    for file in board.root.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/curr*_input"):
        file.write_text("")
    found = board.only()
    assert found.number == "FQ150"
    assert "jetson-stats" in (found.fix or "")


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("curr1_input", "-40", "VDD_IN reads -0.20 W, below 0"),
        ("curr1_input", "0", "the total of 0.00 W is implausible"),
        ("curr1_input", "", "VDD_IN does not answer"),
        ("in1_label", "NC", "VDD_IN is missing"),
        ("curr1_input", "100", "the parts of the rail VDD_IN add up to"),
    ],
)
def test_rails_whose_total_cannot_be_right_are_found(board: Any, file: str, value: str, said: str) -> None:
    """Negative, stuck at 0, silent, missing, less than its parts: a finding, and no power."""
    for path in board.root.glob(f"sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/{file}"):
        path.write_text(value)
    found = board.only()
    assert found.number == "FQ156"
    assert said in found.sentence
    assert "wall" in (found.fix or "")


def test_a_board_that_is_too_hot_or_does_not_say_is_found(board: Any) -> None:
    """92 C; then no zone at all."""
    for zone in board.root.glob("sys/class/thermal/thermal_zone*/temp"):
        zone.write_text("92000")
    assert board.only().number == "FQ152"
    for zone in board.root.glob("sys/class/thermal/thermal_zone*/temp"):
        zone.unlink()
    assert board.only().number == "FQ151"


def test_a_supply_that_is_too_weak_is_found(tmp_path: Path) -> None:
    """As the Raspberry Pi's firmware tells the kernel."""
    for name, text in (("name", "rpi_volt"), ("in0_lcrit_alarm", "1")):
        place = tmp_path / "sys/class/hwmon/hwmon0"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{text}\n")
    seen = machine_facts.read_machine(tmp_path, 1.8e9, 0.0)
    assert "FQ153" in [one.number for one in check(seen)]
    assert "FQ120" in [one.number for one in check(seen) if one.severity == "error"]  # no /proc there


def test_a_power_mode_that_the_catalogue_has_not_is_found(board: Any) -> None:
    """The modes there are, are named."""
    board.write("var/lib/nvpmodel/status", "pmode:0009")
    found = board.only()
    assert found.number == "FQ160"
    assert "15W" in found.sentence


def test_a_clock_helper_that_is_wanted_and_absent_is_found(board: Any) -> None:
    """It is, unless the board's own governor is to decide."""
    board.table["governor"] = {"policy": "energy"}
    found = board.only()
    assert found.number == "FQ315"
    assert found.fix == "sudo systemctl enable --now fedquilt-clocks"


def test_a_clock_helper_is_asked_what_it_owes(tmp_path: Path) -> None:
    """A live one with debts, one that is dead, and one that is well."""
    place = tmp_path / "s"

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
            seen = MachineFacts(1.8e9, memory_bytes=10**9, helper=machine_facts._read_helper_status(place))
            thread.join()
        return [one.number for one in check(seen) if one.severity != "ok"]

    assert told(HelperStatus(clocks=())) == []
    assert told(HelperStatus(clocks=(), owes=("the GPU's limit",))) == ["FQ171"]
    dead = MachineFacts(
        1.8e9, memory_bytes=10**9, helper=machine_facts._read_helper_status(place)
    )  # its socket is left, nobody listens
    assert [one.number for one in check(dead) if one.severity != "ok"] == ["FQ170"]
    assert "systemctl restart" in str([one.fix for one in check(dead) if one.number == "FQ170"])
    refused = MachineFacts(1.8e9, memory_bytes=10**9, helper=machine_facts.HelperFault("not permitted", "no"))
    assert "usermod" in str([one.fix for one in check(refused) if one.number == "FQ170"])


@pytest.mark.parametrize("there", [True, False])
def test_what_flash_and_the_authority_need_is_looked_for(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three packages and one program."""
    monkeypatch.setattr(machine, "find_spec", lambda name: there or None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: there or None)
    told = [(one.number, one.severity) for one in run_checks(machine.OPERATOR, None)]
    assert told == [(f"FQ60{n}", "ok" if there else "warning") for n in (1, 2, 3, 4)]


def test_sizes_are_read_as_systemd_writes_them() -> None:
    """Powers of 1024; per cent and infinity are no sizes."""
    assert [machine_facts.parse_systemd_size(text) for text in ("512", "2K", "3M", "75%", "infinity", "")] == [
        512,
        2048,
        3 * 2**20,
        None,
        None,
        None,
    ]
