"""What an operator's agent.toml becomes on a board, its units, and the archive of all."""

from __future__ import annotations

import json
import re
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
from boards import JETSON, wheel
from flashed_sites import URL, exec_line, serving, told

import command_lines
from fedquilt.core import JobError
from fedquilt.edge_agent import settings as agents
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import bundle
from fedquilt.tools.boards.flash.bundle import BoardFiles

ENROL = '[enrol]\nurl = "https://hub.site:8884"\n'


def test_files_go_with_the_settings_that_name_them(site: Path) -> None:
    made = told(site, f'budget = "1GB"\n{URL}ca = "ca.crt"\ncert = "orin-1.crt"\nkey = "orin-1.key"\n')
    assert set(made.files) == {"agent.toml", "ca.crt", "device.crt", "device.key"}
    assert made.files["device.key"] == (site / "orin-1.key").read_bytes()
    table = toml.parse_toml(made.files["agent.toml"].decode(), "")
    known = agents.parse_settings(table)
    assert known.home == "/var/lib/fedquilt"
    assert (known.broker.ca, known.broker.cert) == ("/etc/fedquilt/ca.crt", "/etc/fedquilt/device.crt")
    assert known.broker.key == "/etc/fedquilt/device.key"
    assert (made.device, made.budget_bytes, made.can_enrol) == ("orin-1", 10**9, False)


def test_one_file_does_for_many_boards(site: Path) -> None:
    made = told(site, "", "orin-2")
    assert made.device == toml.parse_toml(made.files["agent.toml"].decode(), "")["device"] == "orin-2"


def test_everything_else_in_the_settings_stays(site: Path) -> None:
    text = """budget = "512MB"
[governor]
policy = "max"
max_w = 9.5
[data]
partition = "dirichlet"
groups = [[0, 1], [2]]
sources = [{ path = "/srv/a \\"b\\"", labels_from = 0 }, { path = "/srv/c", labels_from = 1 }]
"""
    text = text.replace('policy = "max"\n', "")
    made = told(site, text)
    before, after = toml.read_toml(site / "agent.toml"), toml.parse_toml(made.files["agent.toml"].decode(), "")
    assert after == {**before, "home": "/var/lib/fedquilt"}


def test_a_board_that_enrols_makes_its_own_key(site: Path) -> None:
    (site / "token").write_text("one-time\n")
    made = told(
        site, f'{URL}ca = "ca.crt"\ncert = "not-made-yet.crt"\nkey = "not-made-yet.key"\n{ENROL}', None, site / "token"
    )
    assert set(made.files) == {"agent.toml", "ca.crt", "token"}
    assert made.can_enrol
    known = agents.parse_settings(toml.parse_toml(made.files["agent.toml"].decode(), ""))
    assert (known.broker.cert, known.broker.key) == ("/etc/fedquilt/device.crt", "/etc/fedquilt/device.key")
    assert (known.enrol.url, known.enrol.token) == ("https://hub.site:8884", None)


def test_a_board_may_bring_its_certificate_and_renew_it(site: Path) -> None:
    made = told(site, f'{URL}ca = "ca.crt"\ncert = "orin-1.crt"\nkey = "orin-1.key"\n{ENROL}')
    assert {"device.crt", "device.key"} <= set(made.files)
    assert made.can_enrol


def test_a_password_is_a_secret_of_its_own(site: Path) -> None:
    made = told(site, '[broker]\nurl = "mqtt://orin@broker.site"\npassword_file = "pw"\n')
    assert made.files["password"] == b"secret\n"
    assert b'password_file = "/etc/fedquilt/password"' in made.files["agent.toml"]


def test_a_profile_that_was_recorded_goes_along(site: Path) -> None:
    ours = Path(bundle.__file__).parents[3] / "profiles" / "jetson-orin-nano.toml"
    shutil.copy(ours, site / "mine.toml")
    made = told(site, 'profile = "mine.toml"\n')
    assert made.files["profile.toml"] == ours.read_bytes()
    assert b'profile = "/etc/fedquilt/profile.toml"' in made.files["agent.toml"]
    (site / "mine.toml").write_text("board = 1")
    with pytest.raises(JobError):
        told(site, 'profile = "mine.toml"\n')


def test_a_profile_that_ships_is_named_and_not_copied(site: Path) -> None:
    made = told(site, 'profile = "jetson-orin-nano"\n')
    assert "profile.toml" not in made.files
    assert b'profile = "jetson-orin-nano"' in made.files["agent.toml"]
    with pytest.raises(JobError, match="'jetson-thor' is neither a file nor a shipped profile"):
        told(site, 'profile = "jetson-thor"\n')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{URL}ca = "none.crt"\n', r"none\.crt cannot be read"),
        (f'{URL}ca = "ca.crt"\ncert = "orin-1.crt"\n', "cert is given without key"),
        (f'{URL}ca = "ca.crt"\ncert = "ca.crt"\nkey = "orin-1.key"\n', "cannot be used together"),
        ('[data]\npath = "images"\n', r"'images' is not absolute.*/srv/"),
        ('[data]\nsources = [{ path = "a", labels_from = 0 }]\n', r"'a' is not absolute"),
        ('[models]\nfolder = "srv"\n', r"\[models\] folder 'srv' is not absolute.*/srv/models"),
        ('budget = "lots"\n', r"agent\.toml: budget: 'lots' is not a size"),
        ("colour = 1\n", r"agent\.toml: .*colour"),
        (f"{URL}{ENROL}", "has no ca"),
        ('profile = "none.toml"\n', r"none\.toml cannot be read"),
        ("[broker\n", "not TOML"),
    ],
)
def test_what_would_not_work_on_the_board_is_said_here(site: Path, text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        told(site, text)


def test_a_token_needs_to_know_where_it_is_taken(site: Path) -> None:
    (site / "token").write_text("t")
    with pytest.raises(JobError, match=r"under \[enrol\]"):
        told(site, URL, None, site / "token")


def test_another_file_is_no_token(site: Path) -> None:
    (site / "token").write_text('device = "orin-07"\n')
    with pytest.raises(JobError, match="contains no token: create one with `fedquilt identity token"):
        told(site, f'{URL}ca = "ca.crt"\n{ENROL}', None, site / "token")


def test_a_coordinators_units_say_what_its_settings_do(site: Path) -> None:
    made = serving(site, '[enrol]\nhosts = ["hub.site", "10.0.0.1"]\nport = 9000\n')
    units = bundle.render_units(made)
    assert {"fedquilt-serve.service", "fedquilt-enrol-serve.service", "fedquilt-setup.service"} <= set(units)
    assert not [name for name in units if name.startswith(("fedquilt-agent", "fedquilt-clocks", "fedquilt-enrol."))]
    options = command_lines.parsed([word for word in exec_line(units["fedquilt-serve.service"]) if word != "-v"])
    assert (options["home"], options["url"]) == (Path("/var/lib/fedquilt/runs"), "mqtts://broker.site:8883")
    assert (options["fleet"], options["ca"]) == ("site", Path("/etc/fedquilt/ca.crt"))
    assert options["key"] == Path("${CREDENTIALS_DIRECTORY}/coordinator.key")
    assert b"LoadCredential=coordinator.key:/etc/fedquilt/coordinator.key" in units["fedquilt-serve.service"]
    options = command_lines.parsed([w for w in exec_line(units["fedquilt-enrol-serve.service"]) if w != "-v"])
    assert (options["hosts"], options["listen"]) == (("hub.site", "10.0.0.1"), "0.0.0.0:9000")
    assert options["ca"] == Path("/var/lib/fedquilt-ca")
    assert made.files["coordinator.key"] == (site / "orin-1.key").read_bytes()
    assert {"etc/coordinator.key", "etc/device.key"} <= bundle.SECRET_FILES
    assert "fedquilt-enrol-serve.service" not in bundle.render_units(serving(site))
    assert "fedquilt-dash.service" not in units
    for text in units.values():
        assert not re.findall(rb"@[A-Z_]+@", text)


def test_a_coordinators_settings_that_cannot_work_are_refused(site: Path) -> None:
    for text, said in {
        '[enrol]\nhost = "hub"\n': r"coordinator\.toml.*host",
        '[enrol]\nhosts = ["hub; reboot"]\n': "is not a host name",
        "[enrol]\nport = 0\n": "port",
        '[dash]\nlisten = "8080"\n': "is not a valid address",
        '[dash]\nlisten = "0.0.0.0 --actions:80"\n': "is not a host name",
        '[dash]\nnames = ["hub.site; reboot"]\n': r"\[dash\] names.*is not a host name",
        "[governor]\n": "governor",
    }.items():
        with pytest.raises(JobError, match=said):
            serving(site, text)
    (site / "bare.toml").write_text('[broker]\nurl = "mqtts://broker.site:8883"\nca = "none.crt"\n')
    with pytest.raises(JobError, match=r"none\.crt"):
        bundle.read_coordinator_files(site / "bare.toml")
    for url in ("mqtts://broker.site:8883 --home /root", "mqtt://${HOME}"):
        (site / "bare.toml").write_text(f'[broker]\nurl = "{url}"\n')
        with pytest.raises(JobError, match=r"bare\.toml"):
            bundle.read_coordinator_files(site / "bare.toml")
    with pytest.raises(JobError, match="target has systemd 245, but a coordinator needs 247"):
        bundle.render_units(serving(site), systemd=245)


def test_a_dashboard_is_a_unit_where_it_is_asked_for(site: Path) -> None:
    made = serving(site, '[dash]\nlisten = "0.0.0.0:8000"\nactions = true\nnames = ["hub.site", "hub"]\n')
    command = exec_line(bundle.render_units(made)["fedquilt-dash.service"])
    options = command_lines.parsed([word for word in command if word != "-v"])
    assert (options["home"], options["listen"]) == (Path("/var/lib/fedquilt/runs"), "0.0.0.0:8000")
    assert (options["actions"], options["names"]) == (True, ("hub.site", "hub"))
    assert made.extras == ("identity", "web")
    plain = exec_line(bundle.render_units(serving(site, "[dash]\n"))["fedquilt-dash.service"])
    assert command_lines.parsed([word for word in plain if word != "-v"])["listen"] == "127.0.0.1:8080"


def test_a_coordinators_bundle_holds_its_key_for_root_alone(site: Path, tmp_path: Path) -> None:
    files = bundle.collect_files(serving(site), JETSON, [wheel(tmp_path, "toy")], "toy==1.0\n")
    bundle.write_archive(files, tmp_path / "a.tar", "fedquilt-coordinator")
    with tarfile.open(tmp_path / "a.tar") as archive:
        modes = {entry.name: entry.mode for entry in archive}
    assert modes["fedquilt-coordinator/etc/coordinator.key"] == 0o600
    assert modes["fedquilt-coordinator/units/fedquilt-serve.service"] == 0o644


# -- the archive ----------------------------------------------------------------------------------


def test_an_archive_is_the_same_for_the_same_board_and_its_readers_are_few(tmp_path: Path) -> None:
    house = [wheel(tmp_path, "toy")]
    files = bundle.collect_files(
        BoardFiles("orin-1", {"agent.toml": b"", "device.key": b"k"}, None), JETSON, house, "toy==1.0\n"
    )
    sizes = [bundle.write_archive(files, tmp_path / name, "fedquilt-orin-1") for name in ("a.tar", "b.tar")]
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert sizes[0] == (tmp_path / "a.tar").stat().st_size
    assert stat.S_IMODE((tmp_path / "a.tar").stat().st_mode) == 0o600
    with tarfile.open(tmp_path / "a.tar") as archive:
        modes = {entry.name: entry.mode for entry in archive}
        manifest = json.load(archive.extractfile("fedquilt-orin-1/bundle.json"))  # type: ignore[arg-type]
        assert archive.extractfile("fedquilt-orin-1/wheels/toy-1.0-py3-none-any.whl").read() == house[0].read_bytes()  # type: ignore[union-attr]
    assert modes["fedquilt-orin-1/etc/device.key"] == 0o600
    assert set(manifest["files"]) | {"bundle.json"} == {name.split("/", 1)[1] for name in modes}
    assert manifest["secret"] == ["etc/device.key"]
    assert manifest["unpacked_bytes"] > 0
