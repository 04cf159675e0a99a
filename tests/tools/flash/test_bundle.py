"""What an operator's agent.toml becomes on a board, its units, and the archive of all."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from boards import JETSON, wheel

import command_lines
from fedquilt import config, profiles
from fedquilt.core import JobError
from fedquilt.edge_agent import settings as agents
from fedquilt.tools.flash import bundle, coordinator
from fedquilt.tools.flash.bundle import Board, board
from fedquilt.tools.flash.coordinator import Coordinator

URL = '[broker]\nurl = "mqtts://broker.site:8883"\n'
ENROL = '[enrol]\nurl = "https://hub.site:8884"\n'


@pytest.fixture
def site(tmp_path: Path, authority) -> Path:
    """An operator's folder: the broker's CA, a board's certificate and key, a password."""
    folder = tmp_path / "site"
    folder.mkdir()
    cert, key = authority.issue("orin-1")
    for source, name in ((authority.ca, "ca.crt"), (cert, "orin-1.crt"), (key, "orin-1.key")):
        shutil.copy(source, folder / name)
    (folder / "pw").write_text("secret\n")
    return folder


def told(site: Path, text: str, *given: object) -> Board:
    (site / "agent.toml").write_text('device = "orin-1"\nhome = "agent-home"\n' + text)
    return board(site / "agent.toml", *given)


def test_files_go_with_the_settings_that_name_them(site: Path) -> None:
    """And on the board they have names of their own; the board's settings are read by its agent as meant."""
    made = told(site, f'budget = "1GB"\n{URL}ca = "ca.crt"\ncert = "orin-1.crt"\nkey = "orin-1.key"\n')
    assert set(made.files) == {"agent.toml", "ca.crt", "device.crt", "device.key"}
    assert made.files["device.key"] == (site / "orin-1.key").read_bytes()
    table = config.parse(made.files["agent.toml"].decode(), "")
    known = agents.parse(table)
    assert known.home == "/var/lib/fedquilt"
    assert (known.broker.ca, known.broker.cert) == ("/etc/fedquilt/ca.crt", "/etc/fedquilt/device.crt")
    assert known.broker.key == "/etc/fedquilt/device.key"
    assert (made.device, made.budget_bytes, made.enrols) == ("orin-1", 10**9, False)


def test_one_file_does_for_many_boards(site: Path) -> None:
    """Each under its own name."""
    made = told(site, "", "orin-2")
    assert made.device == config.parse(made.files["agent.toml"].decode(), "")["device"] == "orin-2"


def test_everything_else_in_the_settings_stays(site: Path) -> None:
    """Mixtures of data too, whose sources are tables in a list."""
    text = """budget = "512MB"
[governor]
policy = "max"
margin = 0.2
[data]
partition = "dirichlet"
groups = [[0, 1], [2]]
sources = [{ path = "/srv/a \\"b\\"", labels_from = 0 }, { path = "/srv/c", labels_from = 1 }]
"""
    text = text.replace('policy = "max"\n', "")
    made = told(site, text)
    before, after = config.read(site / "agent.toml"), config.parse(made.files["agent.toml"].decode(), "")
    assert after == {**before, "home": "/var/lib/fedquilt"}


def test_a_board_that_enrols_makes_its_own_key(site: Path) -> None:
    """It gets the authority, a token and the names of files that will be there."""
    (site / "token").write_text("one-time\n")
    made = told(
        site, f'{URL}ca = "ca.crt"\ncert = "not-made-yet.crt"\nkey = "not-made-yet.key"\n{ENROL}', None, site / "token"
    )
    assert set(made.files) == {"agent.toml", "ca.crt", "token"}
    assert made.enrols
    known = agents.parse(config.parse(made.files["agent.toml"].decode(), ""))
    assert (known.broker.cert, known.broker.key) == ("/etc/fedquilt/device.crt", "/etc/fedquilt/device.key")
    assert (known.enrol.url, known.enrol.token) == ("https://hub.site:8884", None)


def test_a_board_may_bring_its_certificate_and_renew_it(site: Path) -> None:
    """The way of a factory."""
    made = told(site, f'{URL}ca = "ca.crt"\ncert = "orin-1.crt"\nkey = "orin-1.key"\n{ENROL}')
    assert {"device.crt", "device.key"} <= set(made.files)
    assert made.enrols


def test_a_password_is_a_secret_of_its_own(site: Path) -> None:
    """For brokers that ask for one."""
    made = told(site, '[broker]\nurl = "mqtt://orin@broker.site"\npassword_file = "pw"\n')
    assert made.files["password"] == b"secret\n"
    assert b'password_file = "/etc/fedquilt/password"' in made.files["agent.toml"]


def test_a_profile_that_was_recorded_goes_along(site: Path) -> None:
    """Whole, or not at all."""
    ours = Path(bundle.__file__).parents[2] / "profiles" / "jetson-orin-nano.toml"
    shutil.copy(ours, site / "mine.toml")
    made = told(site, 'profile = "mine.toml"\n')
    assert made.files["profile.toml"] == ours.read_bytes()
    assert b'profile = "/etc/fedquilt/profile.toml"' in made.files["agent.toml"]
    (site / "mine.toml").write_text("board = 1")
    with pytest.raises(JobError):
        told(site, 'profile = "mine.toml"\n')


def test_a_profile_that_ships_is_named_and_not_copied(site: Path) -> None:
    """The agent brings it along; one that does not ship is found out here."""
    made = told(site, 'profile = "jetson-orin-nano"\n')
    assert "profile.toml" not in made.files
    assert b'profile = "jetson-orin-nano"' in made.files["agent.toml"]
    with pytest.raises(JobError, match="'jetson-thor' is no file, and none that ships"):
        told(site, 'profile = "jetson-thor"\n')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{URL}ca = "none.crt"\n', r"none\.crt cannot be read"),
        (f'{URL}ca = "ca.crt"\ncert = "orin-1.crt"\n', "a certificate needs its key"),
        (f'{URL}ca = "ca.crt"\ncert = "ca.crt"\nkey = "orin-1.key"\n', "cannot be used together"),
        ('[data]\npath = "images"\n', r"'images' is on the board.*/srv/images"),
        ('[data]\nsources = [{ path = "a", labels_from = 0 }]\n', r"'a' is on the board"),
        ('[models]\nfolder = "srv"\n', r"\[models\] folder 'srv' is on the board.*/srv/srv"),
        ('budget = "lots"\n', r"agent\.toml: budget: 'lots' is no size"),
        ("colour = 1\n", r"agent\.toml: .*colour"),
        (f"{URL}{ENROL}", "needs a ca"),
        ('profile = "none.toml"\n', r"none\.toml cannot be read"),
        ("[broker\n", "not TOML"),
    ],
)
def test_what_would_not_work_on_the_board_is_said_here(site: Path, text: str, says: str) -> None:
    """Before anything is built."""
    with pytest.raises(JobError, match=says):
        told(site, text)


def test_a_token_needs_to_know_where_it_is_taken(site: Path) -> None:
    """The mend is a table in agent.toml."""
    (site / "token").write_text("t")
    with pytest.raises(JobError, match=r"under \[enrol\]"):
        told(site, URL, None, site / "token")


# -- units ----------------------------------------------------------------------------------------


def unit(board: Board, name: str = "fedquilt-agent.service") -> list[str]:
    return bundle.units(board)[name].decode().splitlines()


def test_the_agents_memory_is_its_budget_and_what_the_daemon_takes() -> None:
    """Without a budget, which is then half of the board's memory, three quarters."""
    assert f"MemoryMax={10**9 + bundle.DAEMON_BYTES}" in unit(Board("d", {}, 10**9))
    assert "MemoryMax=75%" in unit(Board("d", {}, None))


def test_the_owners_bounds_reach_the_clock_helper(tmp_path: Path) -> None:
    """Watts and degrees under [governor], and the profile by which watts are judged; nothing where nothing is set."""

    def start(more: str) -> str:
        path = tmp_path / "agent.toml"
        path.write_text(f'device = "d"\nhome = "/h"\n{more}')
        (line,) = (
            each for each in unit(bundle.board(path), "fedquilt-clocks.service") if each.startswith("ExecStart=")
        )
        return line.partition("clocks serve ")[2]

    assert start("") == "--group fedquilt"
    assert start("[governor]\nmax_w = 12.5\nmax_c = 70") == "--group fedquilt --max-w 12.5 --hottest 70"
    assert start("[governor]\nmax_c = 95") == "--group fedquilt"  # the helper's own limit is lower
    shipped = start('profile = "jetson-orin-nx"\n[governor]\nmax_w = 15')
    assert shipped == "--group fedquilt --max-w 15 --profile jetson-orin-nx"
    (tmp_path / "own.toml").write_bytes((Path(profiles.__file__).parent / "jetson-orin-nx.toml").read_bytes())
    recorded = start('profile = "own.toml"\n[governor]\nmax_w = 15')
    assert recorded == "--group fedquilt --max-w 15 --profile /etc/fedquilt/profile.toml"


def test_secrets_reach_the_agent_as_credentials() -> None:
    """None without one: systemd would look for it in vain."""
    keyed = unit(Board("d", {"device.key": b"", "password": b""}, None))
    assert "LoadCredential=device.key:/etc/fedquilt/device.key" in keyed
    assert "LoadCredential=password:/etc/fedquilt/password" in keyed
    (start,) = [line for line in keyed if line.startswith("ExecStart=")]
    assert start.endswith("agent /etc/fedquilt/agent.toml --credentials ${CREDENTIALS_DIRECTORY}")
    plain = unit(Board("d", {}, None))
    assert not [line for line in plain if "redential" in line.split("=")[0] or "--credentials" in line]


def test_a_board_that_enrols_starts_its_agent_when_it_has() -> None:
    """The unit for that is there for no other board; nowhere is a word left to fill in."""
    enrols, other = Board("d", {"token": b""}, None, enrols=True), Board("d", {}, None)
    assert "ConditionPathExists=/etc/fedquilt/device.crt" in unit(enrols)
    assert "LoadCredential=device.key:/etc/fedquilt/device.key" in unit(enrols)
    assert "ExecStartPost=+systemctl start --no-block fedquilt-agent.service" in unit(enrols, "fedquilt-enrol.service")
    assert set(bundle.units(enrols)) - set(bundle.units(other)) == {"fedquilt-enrol.service", "fedquilt-enrol.timer"}
    assert "ConditionPathExists" not in "\n".join(unit(other))
    for text in (*bundle.units(enrols).values(), *bundle.units(other).values()):
        assert not [word for word in (b"@MEM", b"@ARG", b"@CRED", b"@COND", b"@LIM") if word in text]


def test_a_model_runner_is_a_unit_where_the_settings_ask_for_it(site: Path) -> None:
    """A user of its own answers with what lies in a folder that it and the agent may write; its packages come along."""
    made = told(site, f'{URL}ca = "ca.crt"\n[models]\nserve = "127.0.0.1:8090"\n')
    assert made.extras == ("identity", "images", "onnx")
    units = bundle.units(made)
    options = command_lines.parsed([word for word in exec_line(units["fedquilt-serve-model.service"]) if word != "-v"])
    assert (options["models"], options["http"]) == (Path(bundle.MODELS), "127.0.0.1:8090")
    assert "User=fedquilt-runner" in unit(made, "fedquilt-serve-model.service")
    assert f"PathExists={bundle.MODELS}/current" in unit(made, "fedquilt-serve-model.path")
    for text in units.values():
        assert not re.findall(rb"@[A-Z_]+@", text)
    assert agents.parse(config.parse(made.files["agent.toml"].decode(), "")).models.folder == bundle.MODELS
    assert f"ReadWritePaths=-{bundle.MODELS}" in unit(made)
    (line,) = [line for line in unit(made, "fedquilt-setup.service") if bundle.MODELS in line]
    assert "install -d -o fedquilt -g fedquilt-runner -m 3770" in line
    (rights,) = [one for one in unit(made, "fedquilt-setup.service") if one.startswith("CapabilityBoundingSet=")]
    assert "CAP_FSETID" in rights  # without it the kernel drops the mode's 2, and no model would be its group's
    assert not [name for name in bundle.units(told(site, URL)) if "model" in name]


def test_the_agent_may_write_the_folder_of_models_that_its_owner_names(site: Path) -> None:
    """It is made before the agent starts if it is not there; without one nothing more is writable."""
    units = bundle.units(told(site, f'{URL}[models]\nfolder = "/srv/models/"\n'))
    assert b"ReadWritePaths=-/srv/models\n" in units["fedquilt-agent.service"]
    setup = units["fedquilt-setup.service"].decode()
    assert "test -d /srv/models || install -d -o fedquilt -g fedquilt -m 0750 /srv/models'" in setup
    assert "ReadWritePaths=-/srv\n" in setup
    plain = bundle.units(told(site, URL))
    assert b"ReadWritePaths" not in plain["fedquilt-agent.service"]
    assert plain["fedquilt-setup.service"].count(b"ExecStart=") == 1


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('folder = "models"', "whole path"),
        ('folder = "/srv/my models"', "has no place"),
        ('folder = "/srv/%i"', "has no place"),
        ('folder = "/srv/$(reboot)"', "has no place"),
        ('folder = "/home/me/models"', "the services see none there"),
        ('folder = "/srv/../etc/cron.d"', "the services see none there"),
        ('folder = "/models"', "the services see none there"),
        ('serve = "127.0.0.1:8080"\nfolder = "/var/lib/fedquilt/models"', "may not enter"),
        ('serve = "8080"', "is no address"),
        ('serve = "0.0.0.0:8080"', "answers its own board alone"),
        ('serve = "127.0.0.1 --listen-anywhere:8080"', "answers its own board alone"),
    ],
)
def test_a_folder_or_address_that_no_unit_can_have_is_refused(site: Path, table: str, said: str) -> None:
    with pytest.raises(JobError, match=rf"agent\.toml.*\[models\].*{said}|agent\.toml.*{said}"):
        told(site, f"{URL}[models]\n{table}\n")


def serving(site: Path, text: str = "") -> Coordinator:
    """A coordinator's settings, read."""
    files = 'ca = "ca.crt"\ncert = "orin-1.crt"\nkey = "orin-1.key"\n'
    (site / "coordinator.toml").write_text(f'fleet = "site"\n{URL}{files}{text}')
    return coordinator.read(site / "coordinator.toml")


def test_a_coordinator_s_places_of_blobs_are_options_of_its_service(site: Path) -> None:
    made = serving(site, '[blobs]\nhttp = "0.0.0.0:8443"\nurl = "https://hub.site:8443"\ns3 = "https://s.site/b"\n')
    told = " ".join(made.serve)
    assert "--blobs-http 0.0.0.0:8443 --blobs-url https://hub.site:8443 --blobs-s3 https://s.site/b" in told
    with pytest.raises(JobError, match="--blobs-url"):
        serving(site, '[blobs]\nhttp = "0.0.0.0:8443"\n')
    with pytest.raises(JobError, match=r"\[blobs\] s3"):
        serving(site, '[blobs]\ns3 = "https://s.site/b $(id)"\n')


@pytest.mark.parametrize("role", ["agent", "runner", "coordinator"])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, site: Path, role: str) -> None:
    """Every directive is one, every value is understood; and no unit is more exposed than it says in docs/boards.md."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt install systemd")
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    agent = Board("d", {"device.key": b"", "token": b""}, 10**9, enrols=True)
    runner = told(site, f'{URL}[models]\nserve = "127.0.0.1:8080"\n')
    made = bundle.units({"agent": agent, "runner": runner}.get(role) or serving(site, "[enrol]\n[dash]\n"))
    programs = ("opt/fedquilt/current/bin/python", "usr/bin/systemd-sysusers", "usr/bin/systemctl", "usr/bin/touch")
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


# -- a coordinator's machine ----------------------------------------------------------------------


def exec_line(text: bytes) -> list[str]:
    """The words of a unit's command behind the interpreter's."""
    (line,) = [line for line in text.decode().splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line)
    return words[words.index("fedquilt.cli") + 1 :]


def test_a_coordinators_units_say_what_its_settings_do(site: Path) -> None:
    """Their commands are ones of fedquilt; the key is root's, and reaches the service as a credential."""
    made = serving(site, '[enrol]\nhosts = ["hub.site", "10.0.0.1"]\nport = 9000\n')
    units = bundle.units(made)
    assert {"fedquilt-serve.service", "fedquilt-enrol-serve.service", "fedquilt-setup.service"} <= set(units)
    assert not [name for name in units if name.startswith(("fedquilt-agent", "fedquilt-clocks", "fedquilt-enrol."))]
    options = command_lines.parsed([word for word in exec_line(units["fedquilt-serve.service"]) if word != "-v"])
    assert (options["home"], options["broker"]) == (Path("/var/lib/fedquilt/runs"), "mqtts://broker.site:8883")
    assert (options["fleet"], options["ca"]) == ("site", Path("/etc/fedquilt/ca.crt"))
    assert options["key"] == Path("${CREDENTIALS_DIRECTORY}/coordinator.key")
    assert b"LoadCredential=coordinator.key:/etc/fedquilt/coordinator.key" in units["fedquilt-serve.service"]
    options = command_lines.parsed([w for w in exec_line(units["fedquilt-enrol-serve.service"]) if w != "-v"])
    assert (options["hosts"], options["port"]) == (("hub.site", "10.0.0.1"), 9000)
    assert options["ca"] == Path("/var/lib/fedquilt-ca")
    assert made.files["coordinator.key"] == (site / "orin-1.key").read_bytes()
    assert {"etc/coordinator.key", "etc/device.key"} <= bundle.SECRET
    assert "fedquilt-enrol-serve.service" not in bundle.units(serving(site))
    assert "fedquilt-dash.service" not in units
    for text in units.values():
        assert not re.findall(rb"@[A-Z_]+@", text)


def test_a_coordinators_settings_that_cannot_work_are_refused(site: Path) -> None:
    """With the file and the key that is wrong; its systemd has to know credentials."""
    for text, said in {
        '[enrol]\nhost = "hub"\n': r"coordinator\.toml.*host",
        '[enrol]\nhosts = ["hub; reboot"]\n': "is no name of a host",
        "[enrol]\nport = 0\n": "port",
        '[dash]\nlisten = "8080"\n': "is no address to serve at",
        '[dash]\nlisten = "0.0.0.0 --actions:80"\n': "is no name of a host",
        '[dash]\nnames = ["hub.site; reboot"]\n': r"\[dash\] names.*is no name of a host",
        "[governor]\n": "governor",
    }.items():
        with pytest.raises(JobError, match=said):
            serving(site, text)
    (site / "bare.toml").write_text('[broker]\nurl = "mqtts://broker.site:8883"\nca = "none.crt"\n')
    with pytest.raises(JobError, match=r"none\.crt"):
        coordinator.read(site / "bare.toml")
    for url in ("mqtts://broker.site:8883 --home /root", "mqtt://${HOME}"):
        (site / "bare.toml").write_text(f'[broker]\nurl = "{url}"\n')
        with pytest.raises(JobError, match=r"bare\.toml"):
            coordinator.read(site / "bare.toml")
    with pytest.raises(JobError, match="systemd 247"):
        bundle.units(serving(site), systemd=245)


def test_a_dashboard_is_a_unit_where_it_is_asked_for(site: Path) -> None:
    """Its command is one of fedquilt's, on the home that the coordinator has, and its packages come along."""
    made = serving(site, '[dash]\nlisten = "0.0.0.0:8000"\nactions = true\nnames = ["hub.site", "hub"]\n')
    command = exec_line(bundle.units(made)["fedquilt-dash.service"])
    options = command_lines.parsed([word for word in command if word != "-v"])
    assert (options["home"], options["listen"]) == (Path("/var/lib/fedquilt/runs"), "0.0.0.0:8000")
    assert (options["actions"], options["names"]) == (True, ("hub.site", "hub"))
    assert made.extras == ("identity", "web")
    plain = exec_line(bundle.units(serving(site, "[dash]\n"))["fedquilt-dash.service"])
    assert command_lines.parsed([word for word in plain if word != "-v"])["listen"] == "127.0.0.1:8080"


def test_a_coordinators_bundle_holds_its_key_for_root_alone(site: Path, tmp_path: Path) -> None:
    files = bundle.contents(serving(site), JETSON, [wheel(tmp_path, "toy")], "toy==1.0\n")
    bundle.pack(files, tmp_path / "a.tar", "fedquilt-coordinator")
    with tarfile.open(tmp_path / "a.tar") as archive:
        modes = {entry.name: entry.mode for entry in archive}
    assert modes["fedquilt-coordinator/etc/coordinator.key"] == 0o600
    assert modes["fedquilt-coordinator/units/fedquilt-serve.service"] == 0o644


# -- the archive ----------------------------------------------------------------------------------


def test_an_archive_is_the_same_for_the_same_board_and_its_readers_are_few(tmp_path: Path) -> None:
    """Its secrets stay so when it is unpacked."""
    house = [wheel(tmp_path, "toy")]
    files = bundle.contents(Board("orin-1", {"agent.toml": b"", "device.key": b"k"}, None), JETSON, house, "toy==1.0\n")
    sizes = [bundle.pack(files, tmp_path / name, "fedquilt-orin-1") for name in ("a.tar", "b.tar")]
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


def test_the_software_has_one_name_whatever_the_settings(tmp_path: Path) -> None:
    """So that a new agent.toml does not unpack everything again."""
    house = [wheel(tmp_path, "toy")]

    def id(board: Board, **others: bool) -> str:
        return json.loads(bundle.contents(board, JETSON, house, "", **others)["bundle.json"])["id"]

    assert id(Board("a", {}, None)) == id(Board("b", {"agent.toml": b"x"}, 5))
    assert id(Board("a", {}, None)) != id(Board("a", {}, None), system_packages=True)
