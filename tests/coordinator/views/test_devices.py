"""Boards as a table for people, and as rows for programs."""

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from fedquilt import cli
from fedquilt.coordinator.fleet.device_status import (
    CurrentTask,
    DeviceStatus,
    LatestDecline,
    TelemetrySample,
    TelemetryStore,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import devices

NOW = 1_800_000_000.0
RUN = "digits-20270115-080000-a1b2c3"
WORKING = DeviceStatus(
    "orin-07",
    online=True,
    since=NOW - 3 * 3600,
    seen=NOW,
    board="NVIDIA Jetson Orin Nano",
    version="0.1.0",
    budget_bytes=2_000_000_000,
    labels=("site=lab", "window"),
    mode="25W",
    doing=CurrentTask(RUN, 3, "working", NOW - 65, 0.45),
    skew_s=-7.04,
)
IDLE = DeviceStatus(
    "pi-01", online=True, since=NOW - 60, seen=NOW, board="Raspberry Pi 5", labels=("site=hall",), skew_s=0.2
)
GONE = DeviceStatus(
    "pi-02",
    since=NOW - 90000,
    seen=NOW - 90010,
    refusal=LatestDecline(
        NOW - 90020, "memory", "the task needs 12 MB more\x1b[2J than its budget" + " x" * 60, RUN, 3
    ),
)


def written(home: Path) -> Path:
    """The home, with three boards of which one tells its sensors."""
    Store(home).close()
    with TelemetryStore(home, writes=True) as store:
        reading = TelemetrySample(int(NOW) - 10, 12.34, 15.0, 61.2, 1_000_000_000, 310_000_000)
        store.write_telemetry([GONE, WORKING, IDLE], [("orin-07", reading)])
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A coordinator's folder."""
    return written(tmp_path)


def test_the_table_fits_eighty_columns_and_has_everything(home):
    assert devices.format_devices(devices.load_devices(home, NOW), NOW, width=80) == [
        "3 devices: 2 online, 1 of them working; 1 offline",
        "",
        "device   state     for     W  °C     memory  doing",
        "orin-07  working   3 h  12.3  61  0.31/2 GB  digits, round 4: 45 % 65 s",
        "  NVIDIA Jetson Orin Nano, mode 25W, agent 0.1.0, clock -7.0 s; site=lab window",
        "pi-01    idle     60 s     -   -          -",
        "  Raspberry Pi 5, clock right; site=hall",
        "pi-02    offline  25 h     -   -          -",
        "  unknown hardware, last message 25 h ago",
        "  refused digits, round 4, 25 h ago (memory): the task needs 12 MB more?[2J than",
        f"    its budget{' x' * 33}",
        f"   {' x' * 27}",
    ]


def test_an_evaluation_has_no_round_number(home):
    assert WORKING.doing is not None
    doing = replace(WORKING.doing, is_evaluation=True)
    rows = [devices.DeviceRow(replace(WORKING, doing=doing), TelemetrySample(0))]
    assert "digits, final evaluation: 45 % 65 s" in devices.format_devices(rows, NOW, width=80)[3]


def test_a_silent_board_says_since_when_and_is_a_state_of_its_own(home):
    silent = replace(WORKING, online=False, silent=True, since=NOW - 700.0, seen=NOW - 700.0, doing=None)
    quiet = replace(IDLE, quiet=True, seen=NOW - 40.0)
    with TelemetryStore(home, writes=True) as store:
        store.write_telemetry([silent, quiet], [])
    found = devices.load_devices(home, NOW)
    at = time.strftime("%H:%M", time.localtime(NOW - 700.0))
    told = devices.format_devices(found, NOW, width=80)
    assert told[0] == "3 devices: 1 online, 0 of them working; 1 offline, 1 silent"
    assert told[3].startswith("orin-07  silent   12 min")
    assert told[4] == f"  NVIDIA Jetson Orin Nano, mode 25W, agent 0.1.0, silent since {at}; site=lab …"
    assert told[6] == "  Raspberry Pi 5, clock right, last message 40 s ago; site=hall"
    assert [
        [each.board.device for each in devices.filter_devices(found, (), state)] for state in ("silent", "offline")
    ] == [["orin-07"], ["pi-02"]]


def test_a_board_that_serves_a_model_has_a_line_of_it(tmp_path):
    with TelemetryStore(tmp_path, writes=True) as store:
        known = {
            "a": TelemetrySample(int(NOW), served=1200, drift=0.414, accuracy=0.9),
            "b": TelemetrySample(int(NOW), served=3),
        }
        store.write_telemetry([DeviceStatus(name, online=True) for name in known], known.items())
    found = devices.load_devices(tmp_path, NOW)
    told = devices.format_devices(found, NOW, width=80)
    assert "  serves: 1200 answers, drift 0.41, accuracy 90 %" in told
    assert "  serves: 3 answers, drift not known yet" in told
    assert (found[0].to_dict()["drift"], found[0].to_dict()["accuracy"], found[0].to_dict()["served"]) == (
        0.414,
        0.9,
        1200,
    )


@pytest.mark.parametrize(
    ("task", "budget", "told"),
    [
        (285_000_000, 800_000_000, "285/800 MB"),
        (45_300_000, 300_000_000, "45/300 MB"),
        (2_040_000_000, 2_000_000_000, "2/2 GB"),
        (0, 512_000_000, "0/512 MB"),
        (1_100_000_000, 999_900_000, "1100/1000 MB"),
    ],
)
def test_memory_is_in_the_budgets_unit_and_no_power_of_ten(task, budget, told):
    board = msgspec.structs.replace(WORKING, budget_bytes=budget)
    reading = TelemetrySample(int(NOW), task_bytes=task)
    assert told in devices.format_devices([devices.DeviceRow(board, reading)], NOW, width=80)[3]


def test_without_a_coordinator_that_is_said(home):
    assert (
        "no coordinator is running for this home"
        in devices.format_devices(devices.load_devices(home, NOW), NOW, is_served=False)[1]
    )


def test_a_reading_that_is_old_is_not_shown(home):
    assert devices.load_devices(home, NOW + 3600)[0].reading == TelemetrySample(0)


@pytest.mark.parametrize(
    ("labels", "state", "found"),
    [
        ([], None, ["orin-07", "pi-01", "pi-02"]),
        (["site=lab", "window"], None, ["orin-07"]),
        (["!window"], "online", ["pi-01"]),
        ([], "offline", ["pi-02"]),
        ([], "refused", ["pi-02"]),
        ([], "working", ["orin-07"]),
        (["window"], "idle", []),
    ],
)
def test_boards_are_chosen_by_label_and_state(home, labels, state, found):
    chosen = devices.filter_devices(devices.load_devices(home, NOW), labels, state)
    assert [each.board.device for each in chosen] == found


def test_boards_are_chosen_by_name_and_told_as_json(home, capsys):
    words = ["orin-07", "--label", "window", "--state", "working"]
    assert cli.main(["devices", *words, "--home", str(home), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    known = {"device": "orin-07", "state": "working", "mode": "25W", "skew_s": -7.04, "labels": ["site=lab", "window"]}
    assert {key: row[key] for key in known} == known
    doing = {"job": RUN, "round": 3, "step": "working", "since": NOW - 65, "fraction": 0.45, "is_evaluation": False}
    assert row["doing"] == doing


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nobody"], "device 'nobody' is unknown"),
        (["--label", "Lab 1"], "'Lab 1' is not a label or !label"),
        (["--state", "asleep"], "'asleep' is unknown; there are: online, "),
    ],
)
def test_what_is_no_board_label_or_state_is_refused(home, words, says, capsys):
    try:
        code = cli.main(["devices", *words, "--home", str(home)])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_home_without_a_coordinator_has_no_boards_yet(tmp_path, capsys):
    Store(tmp_path).close()
    assert cli.main(["devices", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 devices")
    assert not (tmp_path / "boards.db").exists()


def test_watching_shows_each_change_once():
    looks = [[], [], [devices.DeviceRow(IDLE, TelemetrySample(0))], [devices.DeviceRow(IDLE, TelemetrySample(0))], []]
    shown = []

    class EndError(Exception):
        pass

    def look():
        if not looks:
            raise EndError
        return looks.pop(0)

    with pytest.raises(EndError):
        devices.watch_devices(shown.append, look, lambda seconds: None)
    assert shown == [[], [devices.DeviceRow(IDLE, TelemetrySample(0))], []]


def printed(home: Path) -> Any:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = cli.main(["devices", "--home", str(home)])
    return [code, out.getvalue(), error.getvalue()]


def test_a_home_that_is_shut_to_its_viewer_is_named(user):
    home = written(user.folder / "coordinator")
    user.shut(home)
    try:
        code, _, error = user.does(printed, home)
        assert code == 6
        assert f"cannot read {home}: Permission denied" in error
    finally:
        home.chmod(0o755)
