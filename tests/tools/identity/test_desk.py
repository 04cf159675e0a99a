"""Who gets a certificate: tokens that serve once, boards that lose an answer, renewal and its refusals."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedquilt.core import JobError, SiteRight
from fedquilt.edge_agent.enrolment import create_signing_request
from fedquilt.security.enrolment import SigningRequest
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority
from fedquilt.tools.identity.endpoint import EnrolmentService
from fedquilt.tools.identity.register import CertificateRegister, IssuedCertificate

NOW_S = 1_800_000_000.0


class Office:
    def __init__(self, folder: Path) -> None:
        self.now_s = NOW_S
        self.authority = CertificateAuthority.create(folder, "site", NOW_S)
        self.desk = EnrolmentService(self.authority, clock=lambda: self.now_s)

    def token(self, pattern: str) -> str:
        return self.authority.register.create_token(pattern, DAY_S, self.now_s)

    def enrol(self, device: str, token: str | None, key: ec.EllipticCurvePrivateKey | None = None) -> IssuedCertificate:
        return self.desk.enrol_device(SigningRequest(device, create_signing_request(key or new_key(), device), token))

    def revoked(self) -> set[str]:
        crl = x509.load_pem_x509_crl((self.authority.folder / "crl.pem").read_bytes())
        return {f"{one.serial_number:x}" for one in crl}


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path / "ca")


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def test_a_token_serves_one_board_once(office: Office) -> None:
    token, key = office.token("orin-*"), new_key()
    made = office.enrol("orin-7", token, key)
    cert = x509.load_pem_x509_certificate(made.pem.encode())
    assert cert.public_key() == key.public_key()
    assert cert.subject.rfc4514_string() == "CN=orin-7"
    for device in ("orin-7", "orin-8"):
        with pytest.raises(JobError, match="token was used"):
            office.enrol(device, token)
    assert len(office.authority.register.list_certificates()) == 1


def test_a_board_that_lost_the_answer_gets_the_same_certificate_again(office: Office) -> None:
    token, key = office.token("orin-7"), new_key()
    assert office.enrol("orin-7", token, key) == office.enrol("orin-7", token, key)
    office.now_s += DAY_S
    with pytest.raises(JobError, match="expired at 2027-01-16"):
        office.enrol("orin-7", token, key)


def test_tokens_that_are_unknown_late_missing_or_for_others_are_refused(office: Office) -> None:
    token = office.token("orin-?")
    for device, given, said in (
        ("orin-7", "guess", "is unknown"),
        ("orin-7", None, "token is missing"),
        ("orin-10", token, r"for orin-\?, not for orin-10"),
    ):
        with pytest.raises(JobError, match=said):
            office.enrol(device, given)
    with pytest.raises(JobError, match="signing request is damaged"):
        office.desk.enrol_device(SigningRequest("orin-7", "text", token))
    assert office.enrol("orin-7", token).name == "orin-7"


def test_without_a_token_nobody_learns_whose_a_name_is(office: Office) -> None:
    key = new_key()
    office.enrol("orin-7", office.token("orin-7"), key)
    office.authority.revoke_name("orin-7", NOW_S)
    office.authority.issue_with_new_key("watcher", "observer", NOW_S)
    office.authority.issue_with_new_key("plant", "site", NOW_S, site_right=SiteRight(("cam-*",), 4))
    for device, said in (
        ("watcher", "rename the device"),
        ("cam-9", "belongs to site plant"),
        ("orin-7", "this key of orin-7 was revoked"),
    ):
        with pytest.raises(JobError, match="token is unknown"):
            office.enrol(device, "guess", key)
        token = office.token(device)
        with pytest.raises(JobError, match=said):
            office.enrol(device, token, key)
        assert office.authority.register.is_redeemable(token, NOW_S)


@pytest.mark.parametrize("pattern", ["", "Orin", "a b", "x" * 65, "../x", "[ab]"])
def test_a_pattern_that_matches_no_id_makes_no_token(office: Office, pattern: str) -> None:
    with pytest.raises(JobError, match=r"orin-\*"):
        office.token(pattern)


def test_tokens_are_nowhere_on_disk(office: Office) -> None:
    token = office.token("orin-7")
    office.enrol("orin-7", token)
    for path in office.authority.folder.iterdir():
        assert token.encode() not in path.read_bytes()
    with sqlite3.connect(office.authority.folder / "register.db") as db:
        assert len(db.execute("SELECT digest FROM token").fetchone()[0]) == 64
    db.close()


def test_a_flashed_board_with_its_own_token_takes_its_name_back(office: Office) -> None:
    first = office.enrol("orin-7", office.token("orin-7"))
    with pytest.raises(JobError, match="enrolled with another key"):
        office.enrol("orin-7", office.token("orin-*"))
    second = office.enrol("orin-7", office.token("orin-7"))
    assert office.revoked() == {first.serial} != {second.serial}


def test_the_answer_says_whether_another_certificate_of_the_device_is_revoked(office: Office) -> None:
    for is_other_revoked in (False, True):
        token = office.token("orin-7")
        status, answer = office.desk.make_response(lambda token=token: office.enrol("orin-7", token), "a board")  # type: ignore[misc]
        assert (status, answer.is_other_revoked) == (200, is_other_revoked)


def test_renewal_takes_a_valid_certificate_and_is_only_done_when_due(office: Office) -> None:
    key = new_key()
    first = office.enrol("orin-7", office.token("orin-7"), key)
    request = SigningRequest("orin-7", create_signing_request(key, "orin-7"))
    office.now_s += 243 * DAY_S
    assert office.desk.renew_certificate(request, first.serial) == first
    office.now_s += DAY_S
    second = office.desk.renew_certificate(request, first.serial)
    assert second.ends_s == office.now_s + 365 * DAY_S
    assert (
        office.desk.renew_certificate(request, first.serial)
        == office.desk.renew_certificate(request, second.serial)
        == second
    )


def test_renewal_is_refused_without_a_certificate_for_others_and_when_revoked(office: Office) -> None:
    key = new_key()
    held = office.enrol("orin-7", office.token("orin-7"), key)
    server, _ = office.authority.issue_with_new_key("broker", "server", NOW_S, hosts=["site"])
    own = SigningRequest("orin-7", create_signing_request(key, "orin-7"))
    other = SigningRequest("orin-8", create_signing_request(key, "orin-8"))
    rekeyed = SigningRequest("orin-7", create_signing_request(new_key(), "orin-7"))
    for request, serial, said in (
        (own, None, "without a device's certificate"),
        (own, "beef", "without a device's certificate"),
        (own, server.serial, "without a device's certificate"),
        (other, held.serial, "orin-7 cannot renew the certificate of orin-8"),
        (rekeyed, held.serial, "has a new key"),
    ):
        with pytest.raises(JobError, match=said):
            office.desk.renew_certificate(request, serial)
    office.now_s += 366 * DAY_S
    with pytest.raises(JobError, match="expired at 2028-01-15"):
        office.desk.renew_certificate(own, held.serial)
    office.now_s = NOW_S
    office.authority.revoke_name("orin-7", NOW_S)
    with pytest.raises(JobError, match="was revoked at 2027-01-15"):
        office.desk.renew_certificate(own, held.serial)
    with pytest.raises(JobError, match="this key of orin-7 was revoked"):
        office.enrol("orin-7", office.token("orin-7"), key)
    assert office.enrol("orin-7", office.token("orin-7")).revoked_s is None


def test_a_request_carried_by_hand_is_signed_for_the_device_that_the_operator_names(office: Office) -> None:
    csr = create_signing_request(new_key(), "orin-7")
    with pytest.raises(JobError, match="not of orin-8"):
        office.desk.sign_request(csr, "orin-8")
    assert office.desk.sign_request(csr, "orin-7").kind == "device"


def test_the_log_says_who_and_why_and_no_secret(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    token = office.token("orin-7")
    with caplog.at_level(logging.DEBUG):
        office.enrol("orin-7", token)
        status, said = office.desk.make_response(lambda: office.enrol("orin-7", token), "orin-7 at 10.0.0.7")
    assert (status, said.certificate) == (403, None)
    assert "token was used" in said.reason
    assert "enrolled orin-7" in caplog.text
    assert "refused orin-7 at 10.0.0.7: token was used" in caplog.text
    assert token not in caplog.text + said.reason


def test_a_register_that_cannot_be_read_is_answered_and_logged(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key()
    held = office.enrol("orin-7", office.token("orin-7"), key)
    with sqlite3.connect(office.authority.folder / "register.db") as db:
        db.execute("DROP TABLE certificate")
    db.close()
    request = SigningRequest("orin-7", create_signing_request(key, "orin-7"))
    status, said = office.desk.make_response(
        lambda: office.desk.renew_certificate(request, held.serial), "orin-7 at 10.0.0.7"
    )
    assert (status, said.certificate) == (500, None)
    assert "enrolment server failed" in said.reason
    assert "orin-7 at 10.0.0.7 got no certificate: register of certificates" in caplog.text


WRITES = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0.1) as db:
    db.execute("begin immediate")
"""


def test_a_register_opened_twice_in_a_process_is_still_locked_for_others(office: Office) -> None:
    path = office.authority.folder / "register.db"
    with office.authority.register.transaction():
        CertificateRegister(path).close()
        tried = subprocess.run([sys.executable, "-c", WRITES, path], capture_output=True, text=True)
    assert "database is locked" in tried.stderr
