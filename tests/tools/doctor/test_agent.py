"""One fault of an agent's settings, folder, identity or budget is planted, and that is what is found."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedquilt.tools.boards.doctor import agent
from fedquilt.tools.boards.doctor.agent import Certificate
from fedquilt.tools.boards.doctor.findings import to_finding
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, key_to_pem


def enrol(board: Any, name: str, begins_s: float) -> CertificateAuthority:
    authority = CertificateAuthority.create(board.root / "ca", "site", begins_s)
    key = ec.generate_private_key(ec.SECP256R1())
    with authority.register.transaction():
        issued = authority.sign_certificate(name, "device", key.public_key(), begins_s)
    board.write("etc/fedquilt/device.crt", issued.pem)
    board.write("etc/fedquilt/device.key", key_to_pem(key).decode()).chmod(0o600)
    files = {"cert": "/etc/fedquilt/device.crt", "key": "/etc/fedquilt/device.key"}
    ca = str(authority.folder / "ca.crt")
    board.table["broker"] = {"url": "mqtts://127.0.0.1:1", "ca": ca, **files}
    return authority


def test_settings_with_a_fault_are_one_finding_and_the_machine_is_still_examined(board: Any) -> None:
    board.table["budgit"] = "1GB"
    found = board.only("settings", "machine")
    assert (found.number, found.severity) == ("FQ301", "error")
    assert "budgit" in found.sentence


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"home": "/var/lib/taken/home"}, ("FQ302",)),  # a file is where it would be
        ({"budget": "30MB"}, ("FQ311", "error")),  # less than numpy's engine holds by itself
        ({"budget": "60MB"}, ("FQ312", "warning")),  # enough for numpy's alone
        ({"data": {"path": "/srv/elsewhere"}}, ("FQ309", "error")),
        ({"data": None}, ("FQ309", "warning")),
        ({"profile": "/etc/fedquilt/own.toml"}, ("FQ308",)),
        ({"board": "jetson-tx9"}, ("FQ308",)),
    ],
)
def test_one_setting_at_fault_is_the_one_finding(board: Any, changes: dict[str, Any], wanted: tuple[str, ...]) -> None:
    board.write("var/lib/taken", "")
    board.table = {key: value for key, value in {**board.table, **changes}.items() if value is not None}
    board.require(*wanted)


def test_a_full_disk_and_one_too_small_for_the_cache_are_found(board: Any) -> None:
    board.free = 50 * 10**6
    board.require("FQ303", "error")
    board.free = 10**9
    board.require("FQ303", "warning", "2000 MB")


def test_what_the_cache_holds_already_counts(board: Any) -> None:
    blob = board.write("var/lib/fedquilt/blobs/ab/abcd", "")
    os.truncate(blob, 10**9)
    board.free = 11 * 10**8
    assert board.examine("machine") == []


@pytest.mark.parametrize(("budget", "number", "severity"), [("9GB", "FQ310", "error"), ("7GB", "FQ310", "warning")])
def test_a_budget_beyond_the_memory_is_found(board: Any, budget: str, number: str, severity: str) -> None:
    board.table["budget"] = budget
    first, second = board.examine("machine")
    assert (first.number, first.severity) == (number, severity)
    assert (second.number, second.severity) == ("FQ313", "warning")


def test_a_unit_that_may_hold_less_than_the_budget_is_found(board: Any) -> None:
    board.table["budget"] = "1GB"
    board.write("etc/systemd/system/fedquilt-agent.service", "[Service]\nDelegate=yes\nMemoryMax=512M")
    board.require("FQ314", "error", "537 MB")


def test_a_profile_that_nobody_knows_is_found(board: Any) -> None:
    board.table["profile"] = "jetson-thor"
    board.require("FQ308", None, "did you mean", fix="correct profile in")
    board.table["profile"] = "jetson-orin-nano"
    assert board.examine("machine") == []


def test_an_identity_that_is_well_is_no_finding(board: Any) -> None:
    enrol(board, "orin-07", board.clock_s - DAY_S)
    assert board.examine("machine") == []


def test_a_certificate_of_another_device_is_found(board: Any) -> None:
    enrol(board, "orin-08", board.clock_s - DAY_S)
    board.require("FQ307", "error", "'orin-08'")


def test_a_certificate_that_has_ended_is_found(board: Any) -> None:
    enrol(board, "orin-07", board.clock_s - 400 * DAY_S)
    board.require("FQ306", "error", fix="identity enrol")


def test_a_certificate_that_ends_soon_or_begins_later_is_found() -> None:
    begins_s = agent.MIN_CLOCK_S + 100 * DAY_S
    held = Certificate("a.crt", "a", begins_s, begins_s + 60 * DAY_S)
    verdicts = [
        agent._check_certificate_validity(held, Path("agent.toml"), begins_s + day * DAY_S)
        for day in (-1, 1, 49, 51, 61)
    ]
    told = [to_finding("FQ306", verdict) for verdict in verdicts if verdict is not None]
    assert [one.severity for one in told] == ["error", "ok", "ok", "warning", "error"]
    assert "it is slow" in told[0].sentence


def test_a_clock_that_stood_at_1970_is_named_where_it_stood() -> None:
    now_s = agent.MIN_CLOCK_S + DAY_S
    good, of_1970 = Certificate("a.crt", "a", now_s - DAY_S, now_s + DAY_S), Certificate("a.crt", "a", -DAY_S, DAY_S)
    on_board, at_authority = (
        to_finding("FQ306", agent._check_certificate_validity(held, Path("agent.toml"), clock_s))
        for held, clock_s in ((good, 60.0), (of_1970, now_s))
    )
    assert (on_board.severity, at_authority.severity) == ("ok", "error")
    assert "cannot be judged while the clock shows 1970-01-01" in on_board.sentence
    assert "the authority's clock showed 1969-12-31" in at_authority.sentence
    assert at_authority.fix.startswith("set the clock of the authority's machine")


def test_a_key_that_others_can_read_is_found(board: Any) -> None:
    enrol(board, "orin-07", board.clock_s - DAY_S)
    key = board.root / "etc/fedquilt/device.key"
    key.chmod(0o644)
    board.require("FQ305", fix=f"^{re.escape(f'chmod 600 {key.resolve()}')}$")


def test_an_identity_that_was_never_got_is_found(board: Any) -> None:
    enrol(board, "orin-07", board.clock_s - DAY_S)
    (board.root / "etc/fedquilt/device.crt").unlink()
    board.table["enrol"] = {"url": "https://coordinator:8884"}
    board.require("FQ304", "error", fix=f"^{re.escape(f'sudo fedquilt identity enrol {board.settings}')}$")


def test_a_certificates_name_and_dates_are_read_without_a_library(board: Any) -> None:
    from cryptography import x509

    authority = enrol(board, "orin-07", board.clock_s - DAY_S)
    for file in (board.root / "etc/fedquilt/device.crt", authority.folder / "ca.crt"):
        known = x509.load_pem_x509_certificate(file.read_bytes())
        own = agent.load_certificate(str(file))
        begins, ends = known.not_valid_before_utc.timestamp(), known.not_valid_after_utc.timestamp()
        assert (own.begins_s, own.ends_s) == (begins, ends)
        assert own.name == known.subject.rfc4514_string().removeprefix("CN=")


def test_two_names_in_one_part_of_a_certificates_subject_are_read(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, "a"), x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "lab")]
    name = x509.Name([x509.RelativeDistinguishedName(parts)])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(1))
    file = tmp_path / "a.crt"
    file.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    found = agent.load_certificate(str(file))
    assert (found.name, found.unit) == ("a", "lab")


@pytest.mark.parametrize("cut", range(0, 900, 99))
def test_what_is_no_certificate_is_refused_in_one_way(board: Any, cut: int) -> None:
    enrol(board, "orin-07", board.clock_s)
    file = board.root / "etc/fedquilt/device.crt"
    text = file.read_bytes()[: -900 + cut]
    for data in (text, text[:40] + bytes(cut), bytes(cut)):
        file.write_bytes(data)
        with pytest.raises(OSError):
            agent.load_certificate(str(file))
