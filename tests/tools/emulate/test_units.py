"""Services as their units say, without systemd: the product's own units, and what a service tells of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedquilt import systemd
from fedquilt.core import JobError
from fedquilt.tools.boards.flash import bundle
from fedquilt.tools.emulate import units
from fedquilt.tools.emulate.guest import Guest

ENROLS = bundle.BoardFiles("b", {"agent.toml": b""}, 1_000_000_000, True)


class Here(Guest):
    """A root whose programs are this machine's, run as this user."""

    def command_inside(self, command: Sequence[str], user: int = 0, group: int = 0, folder: str = "/") -> list[str]:
        return list(command)

    def read_ids(self, name: str) -> tuple[int, int]:
        return os.getuid(), os.getgid()


@pytest.fixture
def board(tmp_path: Path) -> Here:
    """With /run, an identity and no units."""
    (tmp_path / "run").mkdir()
    (tmp_path / "etc/fedquilt").mkdir(parents=True)
    (tmp_path / "etc/fedquilt/device.key").write_text("secret")
    return Here(tmp_path)


def flashed(name: str) -> units.UnitService:
    return units.parse(name, bundle.render_units(ENROLS)[f"{name}.service"].decode())


def test_the_agents_own_unit_is_understood() -> None:
    """Its command, user, folders, environment, credentials and condition, as flash writes them."""
    agent = flashed("fedquilt-agent")
    assert agent.words == (
        *("/opt/fedquilt/current/bin/python", "/opt/fedquilt/current/launch.py", "/var/lib/fedquilt-agent"),
        *("-v", "agent", "/etc/fedquilt/agent.toml"),
    )
    assert (agent.kind, agent.user, agent.folder, agent.umask) == ("notify", "fedquilt", "/", 0o077)
    assert (agent.state, agent.state_mode) == ("fedquilt fedquilt-agent", 0o700)
    assert agent.environment == {"HOME": "/var/lib/fedquilt", "PYTHONDONTWRITEBYTECODE": "1"}
    assert agent.credentials == {"device.key": "/etc/fedquilt/device.key"}
    assert agent.wanted == ("/etc/fedquilt/device.crt",)


def test_the_services_before_it_are_understood() -> None:
    """Both run as root and end."""
    setup, enrol = flashed("fedquilt-setup"), flashed("fedquilt-enrol")
    assert setup.words == ("systemd-sysusers", "/opt/fedquilt/current/sysusers.conf")
    assert enrol.words[3:] == ("-v", "identity", "enrol", "/etc/fedquilt/agent.toml", "--wait")
    assert (setup.user, enrol.user, enrol.kind) == ("root", "root", "oneshot")


def test_comments_prefixes_and_the_last_of_several_lines() -> None:
    """As systemd reads them."""
    text = "[Service]\n# ExecStart=no\n;ExecStart=no\nExecStart=-/bin/first\nExecStart=+/bin/second 'two words'\n"
    assert units.parse("x", text).words == ("/bin/second", "two words")
    with pytest.raises(JobError, match="x has no ExecStart: flash"):
        units.parse("x", "[Service]\nType=oneshot\n")


def test_a_unit_that_is_not_there_is_named(board: Here) -> None:
    """By its path in the root file system."""
    with pytest.raises(JobError, match=r"etc/systemd/system/none\.service cannot be read: No such file"):
        units.read(board, "none")
    (board.root / units.UNITS).mkdir(parents=True)
    (board.root / units.UNITS / "one.service").write_text("ExecStart=/bin/true\n")
    assert units.read(board, "one").words == ("/bin/true",)


def test_a_condition_that_is_not_met_starts_nothing(board: Here, tmp_path: Path) -> None:
    """The agent waits for its certificate, as it would on a board."""
    with (tmp_path / "log").open("wb") as log:
        with pytest.raises(JobError, match=r"would not start: /etc/fedquilt/device\.crt is not there"):
            units.start(board, flashed("fedquilt-agent"), log)
        unless = units.parse("x", "ExecStart=/bin/true\nConditionPathExists=!/etc/fedquilt/device.key\n")
        with pytest.raises(JobError, match=r"!/etc/fedquilt/device\.key is there"):
            units.start(board, unless, log)


def test_a_service_gets_its_credentials_state_environment_and_umask(board: Here, tmp_path: Path) -> None:
    """A copy that only its user reads; a second start replaces it."""
    code = "import os; print(*sorted(os.environ)); print(os.umask(0))"
    service = units.UnitService(
        "x",
        (sys.executable, "-c", code),
        umask=0o077,
        state="things",
        state_mode=0o700,
        environment={"ONE": "1"},
        credentials={"device.key": "/etc/fedquilt/device.key"},
    )
    for _ in range(2):
        with (tmp_path / "log").open("wb") as log:
            assert units.start(board, service, log, "/run/notify").wait() == 0
    names, umask = (tmp_path / "log").read_text().splitlines()
    assert {"CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "ONE", "PATH", "QEMU_CPU"} <= set(names.split())
    assert int(umask) == 0o077
    copied = board.root / "run/credentials/x.service/device.key"
    assert (copied.read_text(), copied.stat().st_mode & 0o777) == ("secret", 0o400)
    assert (board.root / "var/lib/things").stat().st_mode & 0o777 == 0o700


def test_what_a_service_tells_of_itself_is_heard(board: Here) -> None:
    """Also where the root file system's path is longer than a socket's may be."""
    deep = Here(board.root / ("x" * 100))
    (deep.root / "run").mkdir(parents=True)
    notices = units.StatusNotices(deep)
    heard = os.open(deep.root / "run", os.O_PATH)
    code = (
        "import sys; from fedquilt.systemd import send_notification; [send_notification(word, sys.argv[1]) for "
        "word in sys.argv[2:]]"
    )
    said = ("READY=1\nWATCHDOG=1\nSTATUS=asks for a", "STATUS=online as b")
    try:
        subprocess.run([sys.executable, "-c", code, f"/proc/self/fd/{heard}/{notices.inside[5:]}", *said],
                       pass_fds=[heard], check=True)  # fmt: skip
        assert notices.wait(lambda told: told.get("STATUS", "").startswith("online"), 20, lambda: True)
        assert notices.said == {"READY": "1", "WATCHDOG": "1", "STATUS": "online as b"}
    finally:
        os.close(heard)
        notices.close()
    assert not (deep.root / units.NOTIFY).exists()


def test_nobody_is_waited_for_who_is_gone_or_late(board: Here) -> None:
    """A dead service tells nothing more."""
    notices = units.StatusNotices(board)
    try:
        systemd.send_notification("STATUS=asks", str(board.root / units.NOTIFY))
        assert not notices.wait(lambda told: False, 60.0, lambda: "STATUS" not in notices.said)
        assert notices.said == {"STATUS": "asks"}
        assert not notices.wait(lambda told: False, 0.0, lambda: True)
    finally:
        notices.close()
