"""systemd units in a bundle."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from flashed_sites import URL, exec_line, serving, told

import command_lines
from fedquilt.core import JobError
from fedquilt.edge_agent import settings as agents
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import bundle
from fedquilt.tools.boards.flash.bundle import BoardFiles


def unit(board: BoardFiles, name: str = "fedquilt-agent.service") -> list[str]:
    return bundle.render_units(board)[name].decode().splitlines()


def test_the_agents_memory_is_its_budget_and_what_the_daemon_takes() -> None:
    assert f"MemoryMax={10**9 + bundle.DAEMON_BYTES}" in unit(BoardFiles("d", {}, 10**9))
    assert "MemoryMax=75%" in unit(BoardFiles("d", {}, None))


def test_the_clock_helper_reads_the_owners_bounds() -> None:
    (line,) = (
        each for each in unit(BoardFiles("d", {}, None), "fedquilt-clocks.service") if each.startswith("ExecStart=")
    )
    assert line.endswith("board clocks serve /etc/fedquilt/agent.toml")


def test_secrets_reach_the_agent_as_credentials() -> None:
    keyed = unit(BoardFiles("d", {"device.key": b"", "password": b""}, None))
    assert "LoadCredential=device.key:/etc/fedquilt/device.key" in keyed
    assert "LoadCredential=password:/etc/fedquilt/password" in keyed
    (start,) = [line for line in keyed if line.startswith("ExecStart=")]
    assert start == (
        "ExecStart=/opt/fedquilt/current/bin/python /opt/fedquilt/current/launch.py /var/lib/fedquilt-agent "
        "-v agent /etc/fedquilt/agent.toml"
    )
    assert {"User=fedquilt", "UMask=0077", "StateDirectory=fedquilt fedquilt-agent", "StateDirectoryMode=0700"} <= {
        *keyed
    }
    plain = unit(BoardFiles("d", {}, None))
    assert not [line for line in plain if "redential" in line]


def test_a_board_that_enrols_starts_its_agent_when_it_has() -> None:
    enrols, other = BoardFiles("d", {"token": b""}, None, can_enrol=True), BoardFiles("d", {}, None)
    assert "ConditionPathExists=/etc/fedquilt/device.crt" in unit(enrols)
    assert "LoadCredential=device.key:/etc/fedquilt/device.key" in unit(enrols)
    start = exec_line(bundle.render_units(enrols)["fedquilt-enrol.service"])
    assert start == ["-v", "identity", "enrol", "/etc/fedquilt/agent.toml", "--wait"]
    setup = unit(enrols, "fedquilt-setup.service")
    assert any(line.endswith("systemd-sysusers /opt/fedquilt/current/sysusers.conf") for line in setup)
    assert "ExecStartPost=+/bin/systemctl start --no-block fedquilt-agent.service" in unit(
        enrols, "fedquilt-enrol.service"
    )
    assert set(bundle.render_units(enrols)) - set(bundle.render_units(other)) == {
        "fedquilt-enrol.service",
        "fedquilt-enrol.timer",
    }
    assert "ConditionPathExists" not in "\n".join(unit(other))
    for text in (*bundle.render_units(enrols).values(), *bundle.render_units(other).values()):
        assert not [word for word in (b"@MEM", b"@ARG", b"@CRED", b"@COND", b"@LIM") if word in text]


def test_a_model_runner_is_a_unit_where_the_settings_ask_for_it(site: Path) -> None:
    made = told(site, f'{URL}ca = "ca.crt"\n[models]\nserve = "127.0.0.1:8090"\n')
    assert made.extras == ("identity", "images", "onnx")
    units = bundle.render_units(made)
    options = command_lines.parsed([word for word in exec_line(units["fedquilt-serve-model.service"]) if word != "-v"])
    assert (options["models"], options["listen"]) == (Path(bundle.MODELS_FOLDER), "127.0.0.1:8090")
    assert "User=fedquilt-runner" in unit(made, "fedquilt-serve-model.service")
    assert f"PathExists={bundle.MODELS_FOLDER}/current" in unit(made, "fedquilt-serve-model.path")
    for text in units.values():
        assert not re.findall(rb"@[A-Z_]+@", text)
    assert (
        agents.parse_settings(toml.parse_toml(made.files["agent.toml"].decode(), "")).models.folder
        == bundle.MODELS_FOLDER
    )
    assert f"ReadWritePaths=-{bundle.MODELS_FOLDER}" in unit(made)
    (line,) = [line for line in unit(made, "fedquilt-setup.service") if bundle.MODELS_FOLDER in line]
    assert "install -d -o fedquilt -g fedquilt-runner -m 3770" in line
    (rights,) = [one for one in unit(made, "fedquilt-setup.service") if one.startswith("CapabilityBoundingSet=")]
    assert "CAP_FSETID" in rights  # without it the kernel drops the mode's 2, and no model would be its group's
    assert not [name for name in bundle.render_units(told(site, URL)) if "model" in name]


def test_the_agent_may_write_the_folder_of_models_that_its_owner_names(site: Path) -> None:
    units = bundle.render_units(told(site, f'{URL}[models]\nfolder = "/srv/models/"\n'))
    assert b"ReadWritePaths=-/srv/models\n" in units["fedquilt-agent.service"]
    setup = units["fedquilt-setup.service"].decode()
    assert "test -d /srv/models || install -d -o fedquilt -g fedquilt -m 0750 /srv/models'" in setup
    assert "ReadWritePaths=-/srv\n" in setup
    plain = bundle.render_units(told(site, URL))
    assert b"ReadWritePaths" not in plain["fedquilt-agent.service"]
    assert plain["fedquilt-setup.service"].count(b"ExecStart=") == 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('folder = "models"', "not absolute"),
        ('folder = "/srv/my models"', "contains"),
        ('folder = "/srv/%i"', "contains"),
        ('folder = "/srv/$(reboot)"', "contains"),
        ('folder = "/home/me/models"', "is hidden from the services"),
        ('folder = "/srv/../etc/cron.d"', "is hidden from the services"),
        ('folder = "/models"', "is hidden from the services"),
        ('serve = "127.0.0.1:8080"\nfolder = "/var/lib/fedquilt/models"', "cannot read"),
        ('serve = "8080"', "is not a valid address"),
        ('serve = "0.0.0.0:8080"', "not a loopback address"),
        ('serve = "127.0.0.1 --listen-anywhere:8080"', "not a loopback address"),
    ],
)
def test_a_folder_or_address_that_no_unit_can_have_is_refused(site: Path, table: str, said: str) -> None:
    with pytest.raises(JobError, match=rf"agent\.toml.*\[models\].*{said}|agent\.toml.*{said}"):
        told(site, f"{URL}[models]\n{table}\n")


def test_a_coordinator_s_places_of_blobs_are_options_of_its_service(site: Path) -> None:
    made = serving(site, '[blobs]\nhttp = "0.0.0.0:8443"\nurl = "https://hub.site:8443"\n')
    told = " ".join(made.serve)
    assert "--blobs-http 0.0.0.0:8443 --blobs-url https://hub.site:8443" in told
    with pytest.raises(JobError, match="--blobs-url"):
        serving(site, '[blobs]\nhttp = "0.0.0.0:8443"\n')
    with pytest.raises(JobError, match=r"\[blobs\] http"):
        serving(site, '[blobs]\nhttp = "0.0.0.0:8443 $(id)"\n')


@pytest.mark.parametrize("role", ["agent", "runner", "coordinator"])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, site: Path, role: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt install systemd")
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    agent = BoardFiles("d", {"device.key": b"", "token": b""}, 10**9, can_enrol=True)
    runner = told(site, f'{URL}[models]\nserve = "127.0.0.1:8080"\n')
    made = bundle.render_units({"agent": agent, "runner": runner}.get(role) or serving(site, "[enrol]\n[dash]\n"))
    programs = ("opt/fedquilt/current/bin/python", "bin/systemd-sysusers", "bin/systemctl", "usr/bin/touch")
    for name in programs:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name, text in made.items():
        (folder / name).write_bytes(text)
    for target in (
        "multi-user",
        "timers",
        "paths",
        "sysinit",
        "basic",
        "shutdown",
        "local-fs",
        "network",
        "network-online",
        "umount",
        "time-sync",
        "time-set",
    ):
        (folder / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    for slice in ("-", "system"):
        (folder / f"{slice}.slice").write_text("[Unit]\nDefaultDependencies=no\n")
    checked = subprocess.run(
        ["systemd-analyze", "verify", f"--root={tmp_path}", "--man=no", *made], capture_output=True, text=True
    )
    complaints = [line for line in checked.stderr.splitlines() if "fedquilt" in line]
    assert complaints == []
    assert checked.returncode == 0, checked.stderr
    for name in made:
        if name.endswith(".service"):
            rated = subprocess.run(
                ["systemd-analyze", "security", "--offline=true", f"--root={tmp_path}", "--threshold=25", name],
                capture_output=True,
                text=True,
            )
            assert rated.returncode == 0, rated.stdout[-200:] + rated.stderr


def test_an_older_systemd_gets_secrets_as_copies_of_the_users_own() -> None:
    secret = BoardFiles("b", {"agent.toml": b"", "device.key": b"k", "password": b"p"}, 10**9)
    new, old = (bundle.render_units(secret, systemd)["fedquilt-agent.service"].decode() for systemd in (249, 245))
    assert "LoadCredential=device.key" in new
    assert "/run/fedquilt-agent" not in new
    assert "LoadCredential" not in old
    assert "Environment=CREDENTIALS_DIRECTORY=/run/fedquilt-agent\n" in old
    assert "RuntimeDirectoryMode=0700" in old
    for name in ("device.key", "password"):
        copy = (
            f"ExecStartPre=+/usr/bin/install -o fedquilt -g fedquilt -m 0400 /etc/fedquilt/{name} /run/fedquilt-agent/"
        )
        assert copy in old
