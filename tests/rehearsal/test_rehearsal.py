"""What surrounds a board rehearsal; the rehearsal itself needs root and minutes: docs/boards.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest

import command_lines
from fedquilt import wire
from fedquilt.core import JobError, Profile
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import bundle
from fedquilt.transport.link import Message
from tests.rehearsal import __main__ as rehearsal
from tests.rehearsal import container, enclosure, layouts, releases
from tests.rehearsal.fleet import DeviceListener, ReceivedMessages
from tests.rehearsal.layouts import EVERY
from tests.rehearsal.releases import HOME, PHASED, flash_options

ROOT = Path(__file__).parents[2]
ORIN = ("jetson-orin-nx", 6)


# -- which boards ---------------------------------------------------------------------------------


def test_all_boards_come_up_unless_some_are_named() -> None:
    assert sorted(rehearsal.select_layouts([])) == sorted(EVERY)
    assert rehearsal.select_layouts([])[0] == rehearsal.FIRST
    assert len(EVERY) >= 12
    assert rehearsal.select_layouts(["jetson-agx-orin", "jetson-tx2:4"]) == [
        ("jetson-agx-orin", 5),
        ("jetson-agx-orin", 6),
        ("jetson-tx2", 4),
    ]
    with pytest.raises(JobError, match=r"no board 'jetson-tx2:6' to rehearse; there are: .*jetson-tx2:4"):
        rehearsal.select_layouts(["jetson-tx2:6"])


def test_a_board_that_is_unknown_ends_it_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsal.main(["--boards", "jetson-tx3", "--out", str(tmp_path / "out")]) == 2
    assert "no board 'jetson-tx3'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- a board's files ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", EVERY)
def test_a_board_is_laid_with_its_debugfs_shut_and_its_disk_in_the_root(tmp_path: Path, layout: layouts.Layout) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    files = layouts.write_layout(layout, tmp_path / "tree", root)
    assert (files / "kernel/debug").stat().st_mode & 0o777 == 0o700
    assert list((files / "fs/cgroup").iterdir()) == []
    assert f"R{ {4: 32, 5: 35, 6: 36, 7: 38}[layout[1]] } " in (root / "etc/nv_tegra_release").read_text()
    assert (root / "etc/nvpmodel.conf").read_text().startswith("< PARAM")
    wanted = layouts.read_expected_profile(tmp_path / "tree")
    assert wanted.board == layouts.BOARDS[layout[0]].model
    assert len(wanted.points) > 3
    assert wanted.power_w is not None
    layouts.write_layout(("jetson-tx2", 4), tmp_path / "tree", root)
    assert "R32 " in (root / "etc/nv_tegra_release").read_text()
    assert layouts.read_expected_profile(tmp_path / "tree").board == "quill"


def profile(wanted: layouts.ExpectedProfile, points: int | None = None) -> Profile:
    return Profile(
        device="b",
        board=wanted.board,
        memory_bytes=1,
        budget_bytes=1,
        engines=(),
        versions={},
        points=wanted.points[:points],
        provenance=wanted.provenance,
    )


def test_an_agent_that_knows_less_of_its_board_than_root_does_is_found_out(tmp_path: Path) -> None:
    layouts.write_layout(ORIN, tmp_path / "tree", tmp_path / "root")
    wanted = layouts.read_expected_profile(tmp_path / "tree")
    told = wire.Telemetry(power_w=wanted.power_w, temperature_c=wanted.temperature_c)
    assert layouts.find_differences(wanted, profile(wanted), told) == []
    few = layouts.find_differences(wanted, profile(wanted, 3), told)
    assert few == [f"it tells 3 of {len(wanted.points)} operating points"]
    assert layouts.find_differences(wanted, profile(wanted), None) == ["it tells no readings"]
    cold = wire.Telemetry(power_w=wanted.power_w)
    (said,) = layouts.find_differences(wanted, profile(wanted), cold)
    assert said.startswith("it tells None degrees where the board has 4")


def test_clocks_that_are_not_put_back_are_seen(tmp_path: Path) -> None:
    layouts.write_layout(ORIN, tmp_path / "tree", tmp_path / "root")
    before = layouts.read_clock_files(tmp_path / "tree")
    assert any(name.endswith("policy0/scaling_max_freq") for name in before)
    assert any(name.endswith("mrq_rate_locked") for name in before)
    assert not any(name.endswith("/rate") for name in before)
    (tmp_path / "tree/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq").write_text("1")
    assert layouts.read_clock_files(tmp_path / "tree") != before


# -- what a device says ---------------------------------------------------------------------------


def said(leaf: str, message: wire.WireMessage, device: str = "b") -> Message:
    return Message(wire.Topics("fleet").device_topic(device, "up", leaf), wire.encode(message), False)


def test_a_start_of_the_agent_is_known_by_its_name() -> None:
    heard = ReceivedMessages()
    for message in (
        said("presence", wire.Presence(online=True, boot="one", seq=1)),
        said("telemetry", wire.Telemetry(power_w=2.0)),
        said("presence", wire.Presence(online=True, boot="other", seq=1), device="c"),
        Message(wire.Topics("fleet").device_topic("b", "up", "profile"), b"garbage", False),
        Message("elsewhere", b"", False),
    ):
        heard = heard.with_message(message, "b")
    assert (heard.online, heard.telemetry, heard.begun) == ("one", wire.Telemetry(power_w=2.0), frozenset({"one"}))
    heard = heard.with_message(said("presence", wire.Presence(online=False, boot="one")), "b")
    assert heard.online == ""
    heard = heard.with_message(said("presence", wire.Presence(online=True, boot="two", seq=1)), "b")
    assert (heard.online, heard.telemetry, heard.begun) == ("two", None, frozenset({"one", "two"}))


def test_a_listener_that_was_closed_hears_again_what_it_had_heard_and_more() -> None:
    links: list[mock.Mock] = []

    def connect() -> mock.Mock:
        said = wire.Presence(online=True, boot=f"b{len(links)}")
        topic = wire.Topics("fleet").device_topic("d", "up", "presence")
        links.append(mock.Mock(receive=lambda: [Message(topic, wire.encode(said), False)]))
        return links[-1]

    listener = DeviceListener(connect, "fleet", "d")
    listener.receive(0.0)
    listener.close()
    links[0].close.assert_called_once()
    listener.close()
    assert listener.receive(0.0).begun == {"b0", "b1"}
    links[1].subscribe.assert_called_once_with([wire.Topics("fleet").device_topic("d", "up", "+")])


# -- the container and its enclosure --------------------------------------------------------------


def test_a_container_is_booted_as_its_command_says(tmp_path: Path) -> None:
    words = container.boot_command(tmp_path / "root", tmp_path / "sys", "n", (tmp_path / "a b/cgroup.procs",))
    assert words[:2] == ["sh", "-c"]
    assert words[2] == f"echo 0 > '{tmp_path}/a b/cgroup.procs' || true\nexec \"$@\""
    assert f"--bind={tmp_path}/sys:/run/board/sys" in words
    assert words[-1].splitlines()[-1] == "exec /lib/systemd/systemd"


def test_a_coordinators_machine_has_no_boards_files_and_groups_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = container.boot_command(tmp_path / "root", None, "n")
    assert not [word for word in words if word.startswith("--bind")]
    assert words[-1] == "exec /lib/systemd/systemd"
    monkeypatch.setattr(enclosure, "find_own_groups", lambda told: [tmp_path / enclosure.OURS])
    assert enclosure.container_group_files() == [tmp_path / "boards/cgroup.procs"]
    assert enclosure.container_group_files(enclosure.HUB) == [tmp_path / "hub/cgroup.procs"]


@pytest.mark.parametrize(
    "words",
    [
        ("rollout", "model", "first", *PHASED, "--home", HOME),
        ("rollout", "model", "second", "--min-gain", "50pt", *PHASED, "--home", HOME),
        ("rollout", "back", "model", "--home", HOME),
        ("rollout", "agent", "agents.tar", *PHASED, "--home", HOME),
        ("rollout", "back", "agent", "--home", HOME),
        ("rollout", "build", "agents.tar", *flash_options()),
        (
            "board",
            "flash",
            "coordinator.toml",
            "--role",
            "coordinator",
            *flash_options(),
            "--rootfs",
            "hub",
        ),
    ],
)
def test_what_an_operator_types_are_commands(words: tuple[str, ...]) -> None:
    given = command_lines.parsed(list(words))
    if "--phases" in words:
        assert 0 < given["phases"][0] < given["phases"][1] <= 1


def test_a_rehearsed_board_is_flashed_with_a_runner_and_a_hook(tmp_path: Path) -> None:
    models = {"serve": "127.0.0.1:8080", "hook": list(releases.HOOK)}
    (tmp_path / "agent.toml").write_text(toml.format_toml({"device": "d", "home": "h", "models": models}))
    assert bundle.read_board_files(tmp_path / "agent.toml").models == releases.MODELS


def test_a_units_properties_are_read() -> None:
    shown = "MainPID=44\nNRestarts=1\nEnvironment=HOME=/var/lib/fedquilt\nbare\n"
    assert container.parse_properties(shown) == {
        "MainPID": "44",
        "NRestarts": "1",
        "Environment": "HOME=/var/lib/fedquilt",
    }


def test_the_first_process_with_numbers_of_its_own_is_found(tmp_path: Path) -> None:
    for number, parent, space in ((7, 1, "a"), (8, 7, "a"), (9, 7, "b"), (10, 1, "b")):
        folder = tmp_path / str(number)
        (folder / "ns").mkdir(parents=True)
        (folder / "stat").write_text(f"{number} (a) b) S {parent} 0 0")
        (folder / "ns/pid").symlink_to(f"pid:[{space}]")
    assert container.find_container_process(7, tmp_path) == 9
    assert container.find_container_process(10, tmp_path) == 0


def test_the_groups_that_systemd_uses_are_found(tmp_path: Path) -> None:
    for name in ("unified", "systemd", "memory"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    told = "9:name=systemd:/a/b\n4:memory:/x\n0::/c\n"
    assert enclosure.find_own_groups(told, tmp_path) == [tmp_path / "systemd/a/b", tmp_path / "unified/c"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "cgroup.procs").touch()
    assert enclosure.find_own_groups("0::/user.slice\n", alone) == [alone / "user.slice"]
    assert enclosure.find_own_groups("0::/\n", tmp_path / "none") == []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="an enclosure needs root")

# A process within says its own number by the outside's reckoning, has a descendant of its own, and hangs.
HANGS = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    subprocess.run(["mount", "-t", "tmpfs", "inside", sys.argv[1]], check=True)
    subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
    try:
        print("up", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("told", flush=True)
        sys.exit(7)
    """
)


def sleeping(seconds: str) -> bool:
    words = b"\0".join((b"sleep", seconds.encode(), b""))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == words:
                return True
        except OSError:  # it has just ended
            continue
    return False


def inhabited(group: Path) -> bool:
    try:
        return any(path.read_text() for path in group.rglob("cgroup.procs"))
    except OSError:  # the group is being removed
        return True


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_an_enclosure(tmp_path: Path, number: signal.Signals) -> None:
    seconds = f"{10_000 + os.getpid()}.{number.value}"
    code = "import sys; from tests.rehearsal import enclosure; sys.exit(enclosure.run_enclosed(sys.argv[1:]))"
    inside = [sys.executable, "-c", HANGS, str(tmp_path), seconds]
    words = [sys.executable, "-c", code, *inside]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert container.wait_until(lambda: sleeping(seconds), 30)
        assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
        process.send_signal(number)
        ended = process.wait(60)
        said = process.stdout.read()
    assert container.wait_until(lambda: not sleeping(seconds), 30)
    assert (ended, said) == ((-9, "") if number == signal.SIGKILL else (7, "told\n"))
    parents = enclosure.find_own_groups(Path("/proc/self/cgroup").read_text())
    groups = [parent / f"{enclosure.GROUP}{process.pid}" for parent in parents]
    # The kernel takes the killed processes down one after the other: a group is empty when the last of them is gone.
    assert container.wait_until(lambda: not any(inhabited(group) for group in groups), 30)
    with enclosure.use_own_groups():  # empty groups are left by kill -9; the next enclosure removes them
        pass
    assert [group for group in groups if group.exists()] == []
