"""The authority: what it signs, what it never signs, and what it leaves on disk."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from fedquilt.core import JobError, SiteRight, StoreError
from fedquilt.edge_agent.enrolment import create_signing_request
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, parse_signing_request

NOW_S = 1_800_000_000.0


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "ca", "site", NOW_S)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def verify(authority: CertificateAuthority, cert: Path, purpose: str, at_s: float) -> subprocess.CompletedProcess[str]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("the openssl program is not installed: apt install openssl")
    command = [program, "verify", "-CAfile", str(authority.folder / "ca.crt"), "-purpose", purpose]
    return subprocess.run([*command, "-attime", str(int(at_s)), str(cert)], capture_output=True, text=True)


def test_secrets_are_readable_by_their_owner_alone(authority: CertificateAuthority) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in [authority.folder, *authority.folder.iterdir()]}
    assert modes == {"ca": 0o700, "ca.key": 0o600, "register.db": 0o600, "ca.crt": 0o644, "crl.pem": 0o644}


def test_an_authority_is_never_made_over_another(authority: CertificateAuthority) -> None:
    with pytest.raises(JobError, match="has an authority already"):
        CertificateAuthority.create(authority.folder, "other", NOW_S)
    assert CertificateAuthority(authority.folder).cert == authority.cert


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError):
        CertificateAuthority.create(tmp_path / "ca", name, NOW_S)
    assert not (tmp_path / "ca").exists()


def test_a_missing_damaged_or_mixed_up_authority_says_so(authority: CertificateAuthority, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="identity init"):
        CertificateAuthority(tmp_path)
    other = CertificateAuthority.create(tmp_path / "other", "other", NOW_S)
    shutil.copy(other.folder / "ca.crt", authority.folder / "ca.crt")
    with pytest.raises(StoreError, match="do not match"):
        CertificateAuthority(authority.folder)
    (authority.folder / "ca.key").write_text("nothing")
    with pytest.raises(StoreError, match="damaged"):
        CertificateAuthority(authority.folder)


def test_a_server_is_trusted_by_a_clock_that_says_1970(authority: CertificateAuthority, tmp_path: Path) -> None:
    issued, _ = authority.issue_with_new_key("broker", "server", NOW_S, hosts=["broker.site", "10.0.0.1"])
    (tmp_path / "broker.crt").write_text(issued.pem)
    for at_s in (DAY_S, NOW_S):
        assert verify(authority, tmp_path / "broker.crt", "sslserver", at_s).returncode == 0
    assert "expired" in verify(authority, tmp_path / "broker.crt", "sslserver", NOW_S + 731 * DAY_S).stderr
    names = x509.load_pem_x509_certificate(issued.pem.encode()).extensions
    hosts = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one.value) for one in hosts] == ["broker.site", "10.0.0.1"]


def test_a_devices_certificate_cannot_pose_as_a_server_nor_a_servers_as_a_device(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    server, _ = authority.issue_with_new_key("broker", "server", NOW_S, hosts=["broker.site"])
    device = authority.sign_certificate("orin-7", "device", new_key().public_key(), NOW_S)
    for one, purpose, right in (
        (device, "sslclient", True),
        (device, "sslserver", False),
        (server, "sslserver", True),
        (server, "sslclient", False),
    ):
        (tmp_path / "one.crt").write_text(one.pem)
        assert (verify(authority, tmp_path / "one.crt", purpose, NOW_S).returncode == 0) is right, (one.name, purpose)


def test_a_devices_certificate_begins_a_day_before_and_never_outlives_the_authority(
    authority: CertificateAuthority,
) -> None:
    issued = authority.sign_certificate("orin-7", "device", new_key().public_key(), NOW_S, days=99999)
    cert = x509.load_pem_x509_certificate(issued.pem.encode())
    assert cert.not_valid_before_utc.timestamp() == NOW_S - DAY_S
    assert cert.not_valid_after_utc == authority.cert.not_valid_after_utc


def request(name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def test_requests_that_are_broken_for_others_or_of_other_kinds_are_refused(authority: CertificateAuthority) -> None:
    good = create_signing_request(new_key(), "orin-7")
    lines = good.splitlines()
    swapped = create_signing_request(new_key(), "orin-7").splitlines()
    forged = "\n".join([*lines[:-3], *swapped[-3:]])
    der = base64.b64decode("".join(lines[1:-1]))
    assert b"\x02\x01\x00" in der[:12]  # the version
    later = base64.encodebytes(der.replace(b"\x02\x01\x00", b"\x02\x01\x05", 1)).decode()
    cases = (
        ("text", "orin-7", "signing request is damaged"),
        (f"{lines[0]}\n{later}{lines[-1]}\n", "orin-7", "signing request is damaged"),
        (good, "orin-8", "of 'orin-7', not of orin-8"),
        (request("orin-7", rsa.generate_private_key(65537, 2048)), "orin-7", "no ECDSA P-256 key"),
        (request("orin-7", ec.generate_private_key(ec.SECP384R1())), "orin-7", "no ECDSA P-256 key"),
        (forged, "orin-7", "was modified|is damaged"),
    )
    for pem, device, said in cases:
        with pytest.raises(JobError, match=said):
            parse_signing_request(pem, device)
    assert authority.register.list_certificates() == []


def test_a_name_is_a_devices_or_a_servers_never_both(authority: CertificateAuthority) -> None:
    authority.sign_certificate("orin-7", "device", new_key().public_key(), NOW_S)
    with pytest.raises(JobError, match="device's name"):
        authority.issue_with_new_key("orin-7", "observer", NOW_S)
    authority.issue_with_new_key("watcher", "observer", NOW_S)
    for name in ("watcher", "coordinator"):
        with pytest.raises(JobError, match="rename the device"):
            authority.require_enrollable(name, new_key().public_key(), NOW_S)


@pytest.mark.parametrize("host", ["", "a b", "-x", "x/y", "*"])
def test_a_host_that_is_none_is_refused(authority: CertificateAuthority, host: str) -> None:
    with pytest.raises(JobError, match="neither a host name"):
        authority.issue_with_new_key("broker", "server", NOW_S, hosts=[host])
    assert authority.register.list_certificates() == []


def test_revoking_lists_what_is_still_valid_and_forgets_tokens(authority: CertificateAuthority) -> None:
    old = authority.sign_certificate("orin-7", "device", new_key().public_key(), NOW_S - 400 * DAY_S)
    new = authority.sign_certificate("orin-7", "device", new_key().public_key(), NOW_S)
    token = authority.register.create_token("orin-7", 60.0, NOW_S)
    assert [one.serial for one in authority.revoke_name("orin-7", NOW_S)] == [new.serial]
    crl = x509.load_pem_x509_crl((authority.folder / "crl.pem").read_bytes())
    assert crl.is_signature_valid(authority.cert.public_key())  # type: ignore[arg-type]
    assert [f"{one.serial_number:x}" for one in crl] == [new.serial] != [old.serial]
    assert crl.next_update_utc == authority.cert.not_valid_after_utc
    with pytest.raises(JobError, match="is unknown"):
        authority.register.redeem_token(token, "orin-7", "k", NOW_S)
    with pytest.raises(JobError, match="'orin-9' has no certificate or token"):
        authority.revoke_name("orin-9", NOW_S)


# -- sites ----------------------------------------------------------------------------------------


def test_a_site_speaks_for_boards_that_are_nobody_elses(authority: CertificateAuthority) -> None:
    with authority.register.transaction():
        authority.sign_certificate("cam-1", "device", new_key().public_key(), NOW_S)
    with pytest.raises(JobError, match="site plant cannot have cam-1, which has its own certificate"):
        authority.issue_with_new_key("plant", "site", NOW_S, site_right=SiteRight(("cam-*",), 4))
    authority.issue_with_new_key("plant", "site", NOW_S, site_right=SiteRight(("door-*",), 4))
    with pytest.raises(JobError, match="sites gate and plant have common boards"):
        authority.issue_with_new_key("gate", "site", NOW_S, site_right=SiteRight(("door-7",), 1))
    authority.issue_with_new_key("plant", "site", NOW_S, site_right=SiteRight(("door-1",), 1))
    with pytest.raises(JobError, match="gate and plant"):  # the first certificate is valid still
        authority.issue_with_new_key("gate", "site", NOW_S, site_right=SiteRight(("door-7",), 1))
    authority.revoke_name("plant", NOW_S)
    authority.issue_with_new_key("gate", "site", NOW_S, site_right=SiteRight(("door-7",), 1))
    assert authority.valid_sites(NOW_S) == [("gate", SiteRight(("door-7",), 1))]


def test_no_device_is_enrolled_under_the_name_of_a_sites_board(authority: CertificateAuthority) -> None:
    authority.issue_with_new_key("plant", "site", NOW_S, site_right=SiteRight(("cam-*",), 4))
    key = new_key().public_key()
    with pytest.raises(JobError, match="'cam-9' belongs to site plant"):
        authority.require_enrollable("cam-9", key, NOW_S)
    authority.revoke_name("plant", NOW_S)
    authority.require_enrollable("cam-9", key, NOW_S)
