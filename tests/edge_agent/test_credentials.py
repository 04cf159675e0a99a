"""Secrets from systemd take the place of files that only root reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent import credentials, settings


def told(**broker: str) -> settings.AgentSettings:
    return settings.parse({"device": "orin-1", "home": "/var/lib/fedquilt", "broker": broker})


def test_a_file_that_systemd_handed_over_is_taken_by_its_name(tmp_path: Path) -> None:
    """The others stay where they are."""
    (tmp_path / "device.key").write_text("key")
    before = told(ca="/etc/fedquilt/ca.crt", cert="/etc/fedquilt/device.crt", key="/etc/fedquilt/device.key")
    after = credentials.taken(before, tmp_path)
    assert after.broker.key == str(tmp_path / "device.key")
    assert (after.broker.ca, after.broker.cert) == (before.broker.ca, before.broker.cert)
    assert (after.device, after.home) == (before.device, before.home)


def test_a_password_too(tmp_path: Path) -> None:
    """Of a broker that asks for one."""
    (tmp_path / "password").write_text("secret")
    after = credentials.taken(told(password_file="/etc/fedquilt/password"), tmp_path)
    assert after.broker.password_file == str(tmp_path / "password")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """A credential has the name of one file: systemd's folder can hold no two."""
    (tmp_path / "x.pem").write_text("certificate")
    with pytest.raises(JobError, match=r"broker.ca /a/x\.pem and broker.cert /b/x\.pem have the same name"):
        credentials.taken(told(ca="/a/x.pem", cert="/b/x.pem"), tmp_path)
    both = credentials.taken(told(cert="/a/x.pem", key="/a/x.pem"), tmp_path)
    assert (both.broker.cert, both.broker.key) == (str(tmp_path / "x.pem"),) * 2
    (tmp_path / "x.pem").unlink()
    assert credentials.taken(told(ca="/a/x.pem", cert="/b/x.pem"), tmp_path).broker.ca == "/a/x.pem"


def test_without_such_a_folder_nothing_changes() -> None:
    """An agent started by hand."""
    before = told(key="/etc/fedquilt/device.key")
    assert credentials.taken(before, None) is before
