"""The fleet on loopback: made by the product's own commands, and ended with whatever it has started."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from command_lines import parsed
from fedquilt.core import JobError, LinkError
from fedquilt.edge_agent import settings
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import bundle
from tests.rehearsal import fleet as sites
from tests.rehearsal.fleet import LoopbackFleet

DATA = {"path": "/srv/x.npz", "share": 0, "shares": 1}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> LoopbackFleet:
    made = LoopbackFleet(tmp_path_factory.mktemp("site"), *sites.find_free_ports(2))
    made.issue_identities("board-1")
    return made


def test_it_is_founded_by_commands_that_an_operator_types(site: LoopbackFleet) -> None:
    typed = [line for line in site.log.read_text().splitlines() if line.startswith("$ ")]
    assert [" ".join(line.split()[2:4]) for line in typed] == [
        "identity init",
        "identity issue",
        "broker config",
        "identity issue",
        "identity token",
    ]
    for name in ("fedquilt-ca/ca.crt", "broker/acl", "broker/crl.pem", "coordinator.key", "board-1.token"):
        assert (site.folder / name).is_file()


def test_the_boards_settings_are_what_flash_takes(site: LoopbackFleet) -> None:
    path = site.folder / "agent.toml"
    path.write_text(toml.format_toml(site.agent_table("board-1", "1GB", DATA)))
    board = bundle.read_board_files(path, token=site.folder / "board-1.token")
    assert board.can_enrol
    told = settings.parse_settings(toml.parse_toml(board.files["agent.toml"].decode(), "agent.toml"))
    assert told.broker.url == site.url == f"mqtts://127.0.0.1:{site.broker}"
    assert told.data == DATA


def test_the_coordinators_options_are_ones(site: LoopbackFleet) -> None:
    options = parsed(["run", "job.toml", *site.coordinator_options()])
    assert options["url"] == site.url
    assert all((site.folder / path).is_file() for path in (options["ca"], options["cert"], options["key"]))


def test_the_broker_has_the_written_configuration_and_listens_on_loopback_alone(site: LoopbackFleet) -> None:
    program, option, path = site.write_broker_config()
    lines = Path(path).read_text().splitlines()
    written = (site.folder / "broker/fedquilt.conf").read_text().splitlines()
    assert (program, option) == ("mosquitto", "-c")
    assert f"listener {site.broker} 127.0.0.1" in lines
    assert {line for line in written if not line.startswith("listener")} <= set(lines)


def test_a_command_that_fails_is_told_by_its_last_words(site: LoopbackFleet) -> None:
    with pytest.raises(JobError, match=r"fedquilt identity init ended with \d+: fedquilt: .*fedquilt-ca"):
        site.run_fedquilt("identity", "init")


def test_a_server_is_waited_for_and_ended_with_all_it_has_started(tmp_path: Path) -> None:
    (port,) = sites.find_free_ports(1)
    code = (
        "import subprocess, socket, sys, time\n"
        "child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True)\n"
        f"with socket.create_server(('127.0.0.1', {port})): time.sleep(600)"
    )
    with sites.run_server([sys.executable, "-c", code], tmp_path, tmp_path / "log", port) as process:
        child = int(sites.last(tmp_path / "log"))
        assert process.poll() is None
    assert process.returncode is not None
    wait_until(lambda: _ended(child), "the end of its child")


def _ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_a_server_that_ends_is_told_by_its_last_words(tmp_path: Path) -> None:
    (port,) = sites.find_free_ports(1)
    words = [sys.executable, "-c", "print('address in use'); raise SystemExit(1)"]
    with (
        pytest.raises(LinkError, match=rf"does not listen on 127.0.0.1:{port}: address in use \(.*log\)"),
        sites.run_server(words, tmp_path, tmp_path / "log", port),
    ):
        pass


def test_free_ports_are_different_and_free() -> None:
    ports = sites.find_free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
