"""Several meters of one board as one: the widest that answers is taken, in whatever order they are given."""

from __future__ import annotations

import array
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedquilt.core import Coverage, Power
from fedquilt.edge_agent.devices import linux, meters
from fedquilt.edge_agent.devices.meters import SILENCE_TIMEOUT_S, WidestRangeMeter


@dataclass
class Fixed:
    """A meter that always tells the same power; None: it is silent."""

    coverage: Coverage
    watts: float | None
    rails: dict[str, float] = field(default_factory=dict)

    def read(self, now_s: float) -> Power:
        return Power(self.watts, f"{self.coverage} meter", self.rails)


def test_a_rail_is_told_beside_and_never_as_the_board() -> None:
    told = WidestRangeMeter([Fixed("rail", 5.0)]).read(0.0)
    assert (told.total_w, told.rails_w) == (None, {"rail meter": 5.0})


def test_a_narrower_meter_stands_in_only_when_the_wider_one_has_been_silent_for_a_while() -> None:
    """At once it would look as if the board took 15 W all of a sudden."""
    board = Fixed("board", 60.0)
    both = WidestRangeMeter([Fixed("processor", 15.0), board])
    both.read(0.0)
    board.watts = None
    assert both.read(SILENCE_TIMEOUT_S).total_w is None
    assert both.read(SILENCE_TIMEOUT_S + 0.1).total_w == 15.0


@pytest.mark.parametrize("watts", [-5.0, float("nan"), float("inf"), 1e9])
def test_watts_that_no_board_draws_are_unknown(watts: float) -> None:
    board = Fixed("board", watts)
    board.rails = {"a": watts, "b": 2.0}
    told = WidestRangeMeter([board]).read(0.0)
    assert (told.total_w, told.rails_w) == (None, {"b": 2.0})


def test_a_meter_that_holds_up_the_agent_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    passing = iter([0.0, 0.5, 10.0, 13.0, 20.0, 23.0])
    meters = WidestRangeMeter([Fixed("board", 5.0)], lambda: next(passing))
    meters.read(0.0)
    assert caplog.messages == []
    meters.read(1.0)
    assert meters.read(2.0).total_w == 5.0
    (said,) = caplog.messages
    assert "meter Fixed took 3.0 s and blocked" in said
    assert "docs/add-a-sensor.md" in said


ANSWER = """\
 3V7_WL_SW_A current(0)=0.05855580A
   3V3_SYS_A current(1)=0.06148359A
   1V8_SYS_A current(2)=0.13272650A
  DDR_VDD2_A current(3)=0.13955800A
  DDR_VDDQ_A current(4)=0.00980400A
   1V1_SYS_A current(5)=0.19811380A
    0V8_SW_A current(6)=0.34157550A
  VDD_CORE_A current(7)=5.03652000A
   3V3_DAC_A current(17)=0.00006105A
   3V3_ADC_A current(18)=0.00054945A
   0V8_AON_A current(16)=0.00531135A
      HDMI_A current(22)=0.02161170A
 3V7_WL_SW_V volt(8)=3.61069200V
   3V3_SYS_V volt(9)=3.29982600V
   1V8_SYS_V volt(10)=1.81684800V
  DDR_VDD2_V volt(11)=1.10109800V
  DDR_VDDQ_V volt(12)=0.60366240V
   1V1_SYS_V volt(13)=1.10292900V
    0V8_SW_V volt(14)=0.80292960V
  VDD_CORE_V volt(15)=0.89369880V
   3V3_DAC_V volt(20)=3.29944700V
   3V3_ADC_V volt(21)=3.30402600V
   0V8_AON_V volt(19)=0.79618980V
      HDMI_V volt(23)=4.92450000V
     EXT5V_V volt(24)=4.92450000V
      BATT_V volt(25)=0.00341880V
"""


def test_each_rail_with_a_current_counts_and_none_else() -> None:
    """All four cores busy: 4.50 W in the cores, 5.91 W in all; the 5 V input and the clock's cell have no current."""
    found = meters.Pmic(lambda: ANSWER).read(1.0)
    assert found.rails_w["VDD_CORE"] == pytest.approx(5.03652 * 0.8936988)
    assert len(found.rails_w) == 12
    assert not {"EXT5V", "BATT"} & found.rails_w.keys()
    assert found.total_w == pytest.approx(sum(found.rails_w.values()))
    assert found.total_w == pytest.approx(5.75, abs=0.2)
    assert meters.Pmic.coverage == "processor"  # not the board: USB devices are not in it


@pytest.mark.parametrize(
    "answer", [None, "", 'error=1 error_msg="Command not registered"', "VDD_CORE_V volt(15)=0.75V"]
)
def test_a_firmware_without_that_answer_tells_no_power(answer: str | None) -> None:
    found = meters.Pmic(lambda: answer).read(1.0)
    assert (found.total_w, dict(found.rails_w)) == (None, {})


def test_the_mailbox_is_asked_as_vcgencmd_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ioctl(file: int, number: int, words: array.array[int]) -> int:
        data = words.tobytes()
        asked.append((number, words[0], words[2], words[3], data[24 : data.index(b"\0", 24)]))
        answer = ANSWER.encode()
        memoryview(words).cast("B")[24 : 24 + len(answer) + 1] = answer + b"\0"
        return 0

    monkeypatch.setattr(meters.fcntl, "ioctl", ioctl)
    mailbox = tmp_path / "dev/vcio"
    mailbox.parent.mkdir()
    assert meters.detect_pmic(tmp_path) is None  # no such file
    mailbox.touch()
    assert meters.run_firmware_command(mailbox, "pmic_read_adc") == ANSWER
    room = meters.TEXT_BYTES
    assert asked == [(0xC0086400, room + 28, 0x30080, room, b"pmic_read_adc")]


def test_a_plain_file_is_no_mailbox(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/vcio").touch()
    assert meters.detect_pmic(tmp_path) is None


def test_a_pi_5_is_measured_by_its_power_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8255488 kB\nMemAvailable: 7000000 kB\n")
    monkeypatch.setattr(meters, "run_firmware_command", lambda mailbox, question: ANSWER)
    for compatible, source in ((b"raspberrypi,5-model-b\0brcm,bcm2712\0", "pmic"), (b"acme,board\0", None)):
        (tmp_path / "proc/device-tree/compatible").write_bytes(compatible)
        device = linux.detect(tmp_path)
        assert device is not None
        assert device.read_sensors(1.0).energy_source == source
