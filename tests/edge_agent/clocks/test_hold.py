"""Holding a point and putting back what was there: on fake boards, some of which do not do as they are told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fedquilt.core import ClockError, OperatingPoint, StoreError
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from tests.fake_boards import write_fake_board

SLOW = OperatingPoint(name="slow", cpu_hz=345.6e6, gpu_hz=318.75e6, emc_hz=204e6, busy_w=3.0)
POLICY = "sys/devices/system/cpu/cpufreq/policy0"
GPU = "sys/class/devfreq/17000000.gp10b"
RATE = "sys/kernel/debug/bpmp/debug/clk/emc/rate"

# sets a mode: notes its id, and gives cores and limits as the mode does
NVPMODEL = """#!/bin/sh
root=$(dirname "$0")/../..
case "$1" in
  -q) echo "NVPM WARN: fan mode is not set!"; echo "NV Power Mode: $(cat $root/mode)"; echo 0 ;;
  -m) echo "$2" >> $root/asked
      if [ -e $root/stubborn ]; then echo "NVPM WARN: Reboot required for changing to this power mode: $2"; read a; exit
      fi
      case "$2" in 0) echo MAXN > $root/mode ; k=2035200 ;; 1) echo MAXQ > $root/mode ; k=1267200 ;; esac
      echo $k > $root/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq
      echo 1300500000 > $root/sys/class/devfreq/17000000.gp10b/max_freq
      echo 114750000 > $root/sys/class/devfreq/17000000.gp10b/min_freq ;;
esac
"""


class Board:
    """A TX2 made of files, and a clamp on it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state = folder / "root", folder / "state"
        write_fake_board(self.root, "jetson-tx2", 4)
        self.boot("one")
        self.before = self.settings()

    def clamp(self, **given: object) -> ClockPin:
        return ClockPin(self.root, self.state, **given)  # type: ignore[arg-type]

    def settings(self) -> object:
        """How the board is set; the memory's rate is the board's own while its lock is open."""
        found = controls.discover_controls(self.root).read_state(None)
        return [msgspec.structs.replace(one, rate=one.rate if one.lock else None) for one in found.controls]

    def read(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def boot(self, id: str) -> None:
        self.write("proc/sys/kernel/random/boot_id", id)

    def heat(self, celsius: float) -> None:
        self.write("sys/class/thermal/thermal_zone1/temp", str(int(celsius * 1000)))

    def nvpmodel(self) -> None:
        self.write("usr/sbin/nvpmodel", NVPMODEL)
        (self.root / "usr/sbin/nvpmodel").chmod(0o755)
        self.write("mode", "MAXN")


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def putting(change: Callable[[Path, str], str | None]) -> Callable[[Path, str], None]:
    """A kernel that takes for `value` what `change` says; None: as it was told."""

    def put(path: Path, value: str) -> None:
        changed = change(path, value)
        path.write_text(f"{value if changed is None else changed}\n")

    return put


def test_a_point_is_held_and_given_back(board: Board):
    clamp = board.clamp()
    assert clamp.pin(SLOW) == SLOW
    assert board.read(f"{POLICY}/scaling_min_freq") == board.read(f"{POLICY}/scaling_max_freq") == "345600"
    assert board.read(f"{GPU}/min_freq") == board.read(f"{GPU}/max_freq") == "318750000"
    assert (board.read(RATE), clamp.point) == ("204000000", SLOW)
    assert list(board.state.iterdir()) == [board.state / "clocks.json"]
    assert clamp.restore() == []
    assert (board.settings(), clamp.point, list(board.state.iterdir())) == (board.before, None, [])


def test_what_the_next_point_does_not_name_goes_back_to_the_board(board: Board):
    clamp = board.clamp()
    clamp.pin(SLOW)
    clamp.pin(OperatingPoint(name="cpu", cpu_hz=499.2e6))
    assert board.read(f"{POLICY}/scaling_max_freq") == "499200"
    assert board.read(f"{GPU}/min_freq") != board.read(f"{GPU}/max_freq")
    assert clamp.restore() == []
    assert board.settings() == board.before


def test_the_journal_is_on_disk_before_the_first_change(board: Board):
    seen: list[bytes] = []
    path = board.state / "clocks.json"
    clamp = board.clamp(write_file=putting(lambda *_: seen.append(path.read_bytes())))
    clamp.pin(SLOW)
    assert set(seen) == {path.read_bytes()}
    assert msgspec.json.decode(seen[0])["boot"] == "one"


def test_no_clock_is_touched_without_a_journal(board: Board):
    clamp = board.clamp()
    (board.state / "clocks.json").mkdir()
    with pytest.raises(ClockError, match="clocks stay unchanged"):
        clamp.pin(SLOW)
    assert board.settings() == board.before
    with pytest.raises(StoreError, match="for the clocks' journal cannot be made"):
        ClockPin(board.root, board.root / "proc/meminfo/state")


def test_one_that_was_killed_is_made_up_for_by_the_next(board: Board):
    board.clamp().pin(SLOW)
    assert board.settings() != board.before
    assert board.clamp().restore_after_crash() == []
    assert (board.settings(), list(board.state.iterdir())) == (board.before, [])
    assert board.clamp().restore_after_crash() == []


def test_a_killed_one_may_leave_any_file_without_a_value(board: Board):
    written: list[Path] = []
    clamp = board.clamp(write_file=putting(lambda path, _: written.append(path)))
    clamp.pin(SLOW)
    assert clamp.restore() == []
    assert len(set(written)) == 9
    for path in sorted(set(written)):
        board.clamp().pin(SLOW)
        path.write_text("")
        assert board.clamp().restore_after_crash() == []
        assert (board.settings(), list(board.state.iterdir())) == (board.before, []), path


def test_a_journal_of_an_earlier_start_of_the_board_sets_no_clock(board: Board):
    board.clamp().pin(SLOW)
    board.boot("two")
    before = board.settings()
    assert board.clamp().restore_after_crash() == []
    assert (board.settings(), list(board.state.iterdir())) == (before, [])


@pytest.mark.parametrize("rubbish", [b"", b"\xff\0", b"[1,2", b'{"boot":1,"settings":{}}', b'{"settings":{"x":1}}'])
def test_a_journal_that_cannot_be_read_is_put_aside_and_told(board: Board, rubbish: bytes):
    clamp = board.clamp()
    (board.state / "clocks.json").write_bytes(rubbish)
    (sentence,) = clamp.restore_after_crash()
    assert "cannot be read" in sentence
    assert clamp.pin(SLOW) == SLOW


def test_a_list_that_lies_is_found_out_and_everything_restored(board: Board):
    """It lists 499.2 MHz, but the kernel makes 806.4 of it: told, with what it says, and nothing stays held."""
    lie = putting(lambda path, value: "806400" if "policy0" in str(path) and value == "499200" else None)
    clamp = board.clamp(write_file=lie)
    with pytest.raises(ClockError, match=r"scaling_max_freq was set to 499200 and is 806400.*own settings"):
        clamp.pin(msgspec.structs.replace(SLOW, cpu_hz=499.2e6))
    assert (clamp.point, board.settings()) == (None, board.before)


@pytest.mark.parametrize("fails", [f"{POLICY}/scaling_max_freq", f"{GPU}/min_freq", RATE])
def test_a_file_that_takes_nothing_is_named_and_everything_restored(board: Board, fails: str):
    left = [1]

    def refuse(path: Path, value: str) -> None:
        if str(path).endswith(fails) and left and left.pop():
            raise OSError(errno.EINVAL, "Invalid argument")

    clamp = board.clamp(write_file=putting(refuse))
    with pytest.raises(ClockError, match=r"refused .*: Invalid argument; the board's own settings are restored"):
        clamp.pin(SLOW)
    assert board.settings() == board.before


def test_what_cannot_be_put_back_is_owed_until_it_can(board: Board):
    capped: list[str] = []
    cap = putting(lambda path, value: capped[0] if capped and path.name == "max_freq" else None)
    clamp = board.clamp(write_file=cap)
    clamp.pin(SLOW)
    capped.append("586500000")
    (sentence,) = clamp.restore()
    assert "max_freq was set to 1300500000 and is 586500000" in sentence
    assert clamp.needs_restore
    capped.clear()
    assert clamp.restore() == []
    assert (clamp.needs_restore, board.settings()) == (False, board.before)


def test_cores_that_are_turned_off_during_a_hold_are_restored_once_they_are_on(board: Board):
    cores = [f"sys/devices/system/cpu/cpu{core}/online" for core in (1, 2)]
    clamp = board.clamp()
    clamp.pin(SLOW)
    for core in cores:
        board.write(core, "0")
    for one in (clamp, board.clamp()):
        (said,) = one.restore() if one is clamp else one.restore_after_crash()
        assert said == "policy1 has all cores off: the helper restores its limits when a core is on again"
        assert (board.state / "clocks.json").exists()
    board.write(cores[0], "1")
    assert clamp.restore() == []
    assert (board.settings(), list(board.state.iterdir())) == (board.before, [])


def test_what_is_owed_is_remembered_through_another_hold(board: Board):
    broken = [True]
    keep = putting(lambda path, value: board.read(f"{GPU}/max_freq") if broken[0] and path.name == "max_freq" else None)
    clamp = board.clamp()
    clamp.pin(SLOW)
    clamp._write_file = keep
    assert clamp.restore()
    broken[0] = False
    clamp.pin(SLOW)
    assert clamp.restore() == []
    assert board.settings() == board.before


def test_a_memory_clock_that_rounds_up_is_told_as_it_became(board: Board):
    """Orin: 1600 asked for (its mode has it), 2133 there; the point says so."""
    rates = board.root / "sys/kernel/debug/bpmp/debug/emc/possible_rates"
    rates.parent.mkdir()
    rates.write_text("204000 1600000 2133000 (kHz)\n")
    clamp = board.clamp(write_file=putting(lambda path, value: "2133000000" if path.name == "rate" else None))
    became = clamp.pin(OperatingPoint(name="x", emc_hz=1.6e9))
    assert (became.emc_hz, became.cpu_hz) == (2.133e9, None)
    down = board.clamp(write_file=putting(lambda path, value: "204000000" if path.name == "rate" else None))
    with pytest.raises(ClockError, match="rate was set to 1600000000 and is 204000000"):
        down.pin(OperatingPoint(name="x", emc_hz=1.6e9))


def test_a_memory_clock_that_was_locked_is_locked_again(board: Board):
    board.write("sys/kernel/debug/bpmp/debug/clk/emc/mrq_rate_locked", "1")
    before = board.settings()
    clamp = board.clamp()
    clamp.pin(SLOW)
    assert board.read(RATE) == "204000000"
    assert clamp.restore() == []
    assert (board.settings(), board.read(RATE)) == (before, "1866000000")


def test_an_unlisted_frequency_changes_nothing(board: Board):
    with pytest.raises(ClockError, match="has no 777 MHz"):
        board.clamp().pin(msgspec.structs.replace(SLOW, gpu_hz=777e6))
    assert (board.settings(), list(board.state.iterdir())) == (board.before, [])


def test_a_lever_whose_setting_cannot_be_read_is_not_held(board: Board):
    board.write(f"{POLICY}/scaling_min_freq", "<unsupported>")
    with pytest.raises(ClockError, match=r"policy0 cannot be pinned: .*scaling_min_freq cannot be read"):
        board.clamp().pin(SLOW)


def test_nothing_is_held_on_a_board_that_is_too_hot(board: Board):
    """Above the limit it is refused; past it while holding, let go; held again only once it is 5 degrees cooler."""
    clamp = board.clamp(max_temperature_c=80.0)
    board.heat(80.5)
    with pytest.raises(ClockError, match=r"at 80\.5 C, clocks are pinned only up to 80 C"):
        clamp.pin(SLOW)
    board.heat(79.0)
    clamp.pin(SLOW)
    assert clamp.unpin_if_required() is None
    board.heat(81.0)
    assert clamp.unpin_if_required() == "clocks unpinned: the hottest zone is at 81 C, the limit is 80 C"
    assert (clamp.point, board.settings()) == (None, board.before)
    board.heat(76.0)
    assert clamp.unpin_if_required() is None
    with pytest.raises(ClockError, match="pinned only up to 75 C"):
        clamp.pin(SLOW)
    board.heat(74.0)
    assert clamp.unpin_if_required() is None
    board.heat(79.0)
    assert clamp.pin(SLOW) == SLOW


# -- modes ----------------------------------------------------------------------------------------


def test_a_point_may_name_a_mode_and_the_mode_is_put_back(board: Board):
    board.nvpmodel()
    number = controls.discover_controls(board.root).find_mode("MAXQ")
    assert number is not None
    conf = board.root / "etc/nvpmodel.conf"
    conf.write_text(conf.read_text().replace(f"ID={number.id} NAME=MAXQ", "ID=1 NAME=MAXQ"))
    clamp = board.clamp()
    clamp.pin(OperatingPoint(name="MAXQ", gpu_hz=318.75e6))
    assert (board.read("mode"), board.read(f"{GPU}/min_freq")) == ("MAXQ", "318750000")
    assert board.read(f"{POLICY}/scaling_max_freq") == "1267200"
    clamp.pin(OperatingPoint(name="MAXQ"))
    assert board.read(f"{GPU}/max_freq") == "1300500000", "the mode's own limit, not the point's before"
    assert clamp.restore() == []
    assert (board.read("mode"), board.settings()) == ("MAXN", board.before)
    assert board.read("asked").split() == ["1", "1", "0"]


def test_a_mode_outlives_a_restart_of_the_board_and_is_put_back_all_the_same(board: Board):
    board.nvpmodel()
    conf = board.root / "etc/nvpmodel.conf"
    conf.write_text("< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=MAXQ >\n")
    board.clamp().pin(OperatingPoint(name="MAXQ"))
    board.boot("two")
    assert board.clamp().restore_after_crash() == []
    assert board.read("mode") == "MAXN"


def test_a_mode_that_needs_a_restart_is_refused(board: Board):
    board.nvpmodel()
    conf = board.root / "etc/nvpmodel.conf"
    conf.write_text(
        "< POWER_MODEL ID=0 NAME=MAXN >\nTPC TPC_PG_MASK 0\n< POWER_MODEL ID=1 NAME=MAXQ >\nTPC TPC_PG_MASK 8\n"
    )
    with pytest.raises(ClockError, match="needs a restart of the board: run `sudo nvpmodel -m 1`"):
        board.clamp().pin(OperatingPoint(name="MAXQ"))
    assert not (board.root / "asked").exists()
    conf.write_text("< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=MAXQ >\n")
    board.write("stubborn", "")
    with pytest.raises(ClockError, match="did not set mode MAXQ: the mode needs a restart of the board"):
        board.clamp().pin(OperatingPoint(name="MAXQ"))
    assert (board.read("mode"), board.settings()) == ("MAXN", board.before)


def test_a_mode_without_nvpmodel_is_refused(board: Board):
    with pytest.raises(ClockError, match="did not set mode MAXQ"):
        board.clamp().pin(OperatingPoint(name="MAXQ"))


def test_a_file_is_never_made(board: Board):
    gone = board.root / POLICY / "scaling_min_freq"

    def put(path: Path, value: str) -> None:
        if path == gone and gone.exists():
            gone.unlink()
        number = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(number, value.encode())
        os.close(number)

    with pytest.raises(ClockError, match="scaling_min_freq refused 345600: No such file"):
        board.clamp(write_file=put).pin(SLOW)
    assert not gone.exists()
