"""Secrets from systemd take the place of files that only root reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent import settings


@pytest.fixture(autouse=True)
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that systemd names."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))


def told(**broker: str) -> settings.AgentSettings:
    return settings.parse_settings({"device": "orin-1", "home": "/var/lib/fedquilt", "broker": broker})


def test_a_file_that_systemd_handed_over_is_taken_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "device.key").write_text("key")
    before = told(ca="/etc/fedquilt/ca.crt", cert="/etc/fedquilt/device.crt", key="/etc/fedquilt/device.key")
    after = settings.apply_systemd_credentials(before)
    assert after.broker.key == str(tmp_path / "device.key")
    assert (after.broker.ca, after.broker.cert) == (before.broker.ca, before.broker.cert)
    assert (after.device, after.home) == (before.device, before.home)


def test_a_password_too(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    after = settings.apply_systemd_credentials(told(password_file="/etc/fedquilt/password"))
    assert after.broker.password_file == str(tmp_path / "password")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("certificate")
    with pytest.raises(JobError, match=r"broker.ca /a/x\.pem and broker.cert /b/x\.pem have the same name"):
        settings.apply_systemd_credentials(told(ca="/a/x.pem", cert="/b/x.pem"))
    both = settings.apply_systemd_credentials(told(cert="/a/x.pem", key="/a/x.pem"))
    assert (both.broker.cert, both.broker.key) == (str(tmp_path / "x.pem"),) * 2
    (tmp_path / "x.pem").unlink()
    assert settings.apply_systemd_credentials(told(ca="/a/x.pem", cert="/b/x.pem")).broker.ca == "/a/x.pem"


def test_without_such_a_folder_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    before = told(key="/etc/fedquilt/device.key")
    assert settings.apply_systemd_credentials(before) is before
