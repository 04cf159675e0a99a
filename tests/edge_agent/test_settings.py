"""agent.toml, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent import settings
from fedquilt.edge_agent.power.governor import GovernorPolicy

GOOD = """
device = "orin-07"
home = "state"
budget = "1GB"
[broker]
url = "mqtts://broker.example"
ca = "ca.crt"
[data]
path = "images"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(text)
    return path


def test_paths_are_taken_from_the_files_own_folder(tmp_path: Path) -> None:
    loaded = settings.load_settings(write(tmp_path, GOOD))
    assert loaded.home == str(tmp_path / "state")
    assert loaded.broker.ca == str(tmp_path / "ca.crt")
    assert loaded.data == {"path": str(tmp_path / "images")}


def test_the_governor_saves_energy_unless_told_otherwise(tmp_path: Path) -> None:
    assert settings.load_settings(write(tmp_path, GOOD)).governor == GovernorPolicy("energy")
    told = settings.load_settings(
        write(tmp_path, f"profile = 'mine.toml'\n{GOOD}[governor]\npolicy = 'max'\nmax_w = 9\n")
    )
    assert told.governor == GovernorPolicy("max", 9.0)
    assert told.profile == str(tmp_path / "mine.toml")


def test_a_profile_is_a_name_or_a_file(tmp_path: Path) -> None:
    shipped = settings.load_settings(write(tmp_path, f"profile = 'jetson-tx2'\n{GOOD}"))
    assert shipped.profile == "jetson-tx2"
    (tmp_path / "own").write_text("")
    assert settings.load_settings(write(tmp_path, f"profile = 'own'\n{GOOD}")).profile == str(tmp_path / "own")


def test_a_job_in_place_of_settings_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"agent\.toml: this file is a job, not a board's settings"):
        settings.load_settings(write(tmp_path, "name = 'a'\nmethod = 'fedavg'\n"))


def test_labels_are_words_and_what_is_none_is_named(tmp_path: Path) -> None:
    assert settings.load_settings(write(tmp_path, 'labels = ["site=lab", "window"]\n' + GOOD)).labels == (
        "site=lab",
        "window",
    )
    with pytest.raises(JobError, match=r"agent\.toml: labels: 'Site lab' is not a label"):
        settings.load_settings(write(tmp_path, 'labels = ["Site lab"]\n' + GOOD))


def test_the_budget_is_half_of_the_board_unless_given() -> None:
    """Half of 8 GB; or what was said."""
    table = {"device": "d", "home": "h"}
    assert settings.parse_settings(table).task_budget_bytes(8 * 10**9) == 4 * 10**9
    assert settings.parse_settings({**table, "budget": "512MB"}).task_budget_bytes(8 * 10**9) == 512 * 10**6


def test_a_size_without_its_unit_is_refused_with_the_mend() -> None:
    """Who writes 128 means megabytes, and would get bytes: a board that declines everything."""
    for text in ("128", "1.5"):
        with pytest.raises(JobError, match=f"'{text}' has no unit: write \"{text}MB\""):
            settings.parse_size(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512 * 10**6),
        ("1.5 GiB", 3 << 29),
        ("64k", 64_000),
        ("10 B", 10),
        ("0", 0),
        ("2kib", 2048),
        ("5TB", 5 * 10**12),
        ("1TiB", 1 << 40),
        ("9007199254740993B", 9007199254740993),  # the first whole number that no float can hold
        ("1.001kB", 1001),
        ("0.3333 kB", 333),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    """Powers of 1000, or of 1024 with an i."""
    assert settings.parse_size(text) == size


@pytest.mark.parametrize("text", ["9" * 400 + "MB", "0." + "1" * 5000 + "GB"], ids=len)
def test_a_size_of_hundreds_of_digits_is_none(text: str) -> None:
    with pytest.raises(JobError, match="is not a size"):
        settings.parse_size(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("home = 'h'", ("agent.toml", "device")),
        ("device = 'Has Blanks'\nhome = 'h'", ("device = ",)),
        (
            "device = 'd'\nhome = 'h'\nbudgett = '1GB'",
            ("budgett'; did you mean 'budget'? Keys of an agent's settings: device, home",),
        ),
        ("device = 'd'\nhome = 'h'\nbudget = '0MB'", ("budget: '0MB' is too small",)),
        (
            "device = 'd'\nhome = 'h'\nbudget = '1 parsec'",
            ("budget: '1 parsec' is not a size", "512MB", "units: B, kB, MB, GB, TB, KiB"),
        ),
        ("device = 'd'\nhome = 'h'\nwarm_s = -1", ("warm_s = ",)),
        ("device = 'd'\nhome = 'h'\n[broker]\nhost = 'x'", ("host", "keys of [broker]: url")),
        ("device = 'd'\nhome = 'h'\nbroker = 3", ("broker = ",)),
        (
            "device = 'd'\nhome = 'h'\n[governor]\npolicy = 'fast'",
            ("[governor] policy = ", "there are: board, energy, max, paper"),
        ),
        ("device = 'd'\nhome = 'h'\n[governor]\nmax_w = -0.1", ("[governor] max_w = ",)),
        ("device = 'd'\nhome = 'h'\n[data]\nshare = 1", ("[data]", "path")),
        ("device = ", ("agent.toml is not TOML",)),
    ],
)
def test_a_wrong_file_is_named_with_its_key_and_what_is_expected(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(JobError) as caught:
        settings.load_settings(write(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read .*none.toml: No such file"):
        settings.load_settings(tmp_path / "none.toml")


def test_a_vocabularys_path_is_taken_from_the_settings_own_folder(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    text = '[data]\npath = "notes.csv"\n\n[data.text]\nvocabulary = "v.txt"\n'
    path.write_text(f'device = "a"\nhome = "home"\nbudget = "1GB"\n\n[broker]\nurl = "mqtt://b"\n\n{text}')
    assert settings.load_settings(path).data["text"] == {"vocabulary": str(tmp_path / "v.txt")}


def test_the_folder_of_models_is_beside_the_file_and_its_hook_is_a_command(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('device = "d"\nhome = "h"\n[models]\nfolder = "srv"\nhook = ["systemctl", "reload", "triton"]\n')
    found = settings.load_settings(file).models
    assert (found.folder, found.hook) == (str(tmp_path / "srv"), ("systemctl", "reload", "triton"))
    file.write_text('device = "d"\nhome = "h"\n[models]\nhook = "systemctl reload triton"\n')
    with pytest.raises(JobError, match="hook"):
        settings.load_settings(file)


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    return tmp_path


def broker_settings(**broker: str) -> settings.AgentSettings:
    return settings.parse_settings({"device": "orin-1", "home": "/var/lib/fedquilt", "broker": broker})


def test_a_file_that_systemd_handed_over_is_taken_by_its_name(credentials: Path) -> None:
    (credentials / "device.key").write_text("key")
    before = broker_settings(ca="/etc/fedquilt/ca.crt", cert="/etc/fedquilt/device.crt", key="/etc/fedquilt/device.key")
    after = settings.apply_systemd_credentials(before)
    assert after.broker.key == str(credentials / "device.key")
    assert (after.broker.ca, after.broker.cert) == (before.broker.ca, before.broker.cert)
    assert (after.device, after.home) == (before.device, before.home)


def test_a_password_from_systemd_is_taken_too(credentials: Path) -> None:
    (credentials / "password").write_text("secret")
    after = settings.apply_systemd_credentials(broker_settings(password_file="/etc/fedquilt/password"))
    assert after.broker.password_file == str(credentials / "password")


def test_two_files_of_one_name_are_refused(credentials: Path) -> None:
    (credentials / "x.pem").write_text("certificate")
    with pytest.raises(JobError, match=r"broker.ca /a/x\.pem and broker.cert /b/x\.pem have the same file name"):
        settings.apply_systemd_credentials(broker_settings(ca="/a/x.pem", cert="/b/x.pem"))
    both = settings.apply_systemd_credentials(broker_settings(cert="/a/x.pem", key="/a/x.pem"))
    assert (both.broker.cert, both.broker.key) == (str(credentials / "x.pem"),) * 2
    (credentials / "x.pem").unlink()
    assert settings.apply_systemd_credentials(broker_settings(ca="/a/x.pem", cert="/b/x.pem")).broker.ca == "/a/x.pem"


def test_without_a_folder_of_systemd_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    before = broker_settings(key="/etc/fedquilt/device.key")
    assert settings.apply_systemd_credentials(before) is before
