"""The board's side of enrolment: what is due, what is kept on disk, what is believed."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from certified import of_another_version
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fedquilt.core import JobError, LinkError, StoreError
from fedquilt.edge_agent import enrolment, settings
from fedquilt.edge_agent.enrolment import CertificateValidity, CredentialPaths, select_step
from fedquilt.security.certificates import require_enrolled
from fedquilt.security.enrolment import OTHER_REVOKED_NOTE, SigningRequest, SigningResponse
from fedquilt.tools.identity.authority import CertificateAuthority, clock_s
from fedquilt.tools.identity.endpoint import EnrolmentService


def day(number: int) -> datetime.datetime:
    return datetime.datetime(2027, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(days=number)


@pytest.mark.parametrize(
    ("held", "token", "now", "step"),
    [
        (None, False, 0, None),
        (None, True, 0, "enrol"),
        (CertificateValidity(day(0), day(90)), False, 1, "keep"),
        (CertificateValidity(day(0), day(90)), False, 59, "keep"),
        (CertificateValidity(day(0), day(90)), False, 60, "renew"),
        (CertificateValidity(day(0), day(90)), False, 89, "renew"),
        (CertificateValidity(day(0), day(90)), False, 90, None),
        (CertificateValidity(day(0), day(90)), True, 90, "enrol"),
        (CertificateValidity(day(0), day(90)), True, 1, "enrol"),
        (CertificateValidity(day(0), day(90)), False, -20000, "renew"),
    ],
)
def test_the_next_step_follows_from_certificate_token_and_clock(
    held: CertificateValidity | None, token: bool, now: int, step: str | None
) -> None:
    assert select_step(held, token, day(now)) == step


class Site:
    """An authority whose desk answers without a network, and one board."""

    def __init__(self, folder: Path) -> None:
        self.authority = CertificateAuthority.create(folder / "ca", "site", clock_s())
        self.desk = EnrolmentService(self.authority)
        self.asked: list[tuple[str, SigningRequest]] = []
        (folder / "etc").mkdir()
        (folder / "etc" / "ca.crt").write_bytes((folder / "ca" / "ca.crt").read_bytes())
        (folder / "etc" / "agent.toml").write_text(
            'device = "orin-7"\nhome = "home"\n[broker]\nurl = "mqtts://broker"\nca = "ca.crt"\ncert = "device.crt"\n'
            'key = "device.key"\n[enrol]\nurl = "https://site:8884"\n'
        )
        self.board = settings.load_settings(folder / "etc" / "agent.toml")
        self.files = enrolment.paths_from_settings(self.board)

    def give_token(self) -> None:
        self.files.token.write_text(self.authority.register.create_token("orin-7", 3600.0, clock_s()))

    def post(
        self, url: str, files: CredentialPaths, path: str, request: SigningRequest, certified: bool
    ) -> SigningResponse:
        self.asked.append((path, request))
        return self.desk.make_response(lambda: self.desk.enrol_device(request), request.device)[1]

    def enrol(self) -> str:
        return enrolment.enrol(self.board, datetime.datetime.now(datetime.timezone.utc), self.post)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A board that was flashed and not yet enrolled."""
    return Site(tmp_path)


def test_files_lie_where_agent_toml_says_and_the_token_beside_the_key(site: Site) -> None:
    assert [path.name for path in site.files] == ["ca.crt", "device.crt", "device.key", "token"]
    assert site.files.token.parent == site.files.key.parent
    with pytest.raises(JobError, match="lacks ca"):
        enrolment.paths_from_settings(settings.parse_settings({"device": "a", "home": "b"}))


def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_key(site: Site) -> None:
    site.give_token()

    def lost(url: str, files: CredentialPaths, path: str, request: SigningRequest, certified: bool) -> SigningResponse:
        site.post(url, files, path, request, certified)
        raise LinkError("reset")

    with pytest.raises(LinkError):
        enrolment.enrol(site.board, datetime.datetime.now(datetime.timezone.utc), lost)
    assert site.files.token.exists()
    assert not site.files.cert.exists()
    assert "is enrolled" in site.enrol()
    assert len(site.authority.register.list_certificates("orin-7")) == 1


def test_waiting_tries_until_the_endpoint_answers_and_a_refusal_ends_it(site: Site) -> None:
    site.give_token()
    pauses: list[float] = []
    tries = iter([LinkError("down")] * 8)

    def flaky(*args: object) -> SigningResponse:
        for error in tries:
            raise error
        return site.post(*args)  # type: ignore[arg-type]

    def clock() -> datetime.datetime:
        return datetime.datetime.now(datetime.timezone.utc)

    assert "is enrolled" in enrolment.enrol_with_retries(site.board, clock, pauses.append, flaky)
    assert len(pauses) == 8
    assert max(pauses) <= 60.0
    assert pauses[0] <= 2.0
    site.files.cert.unlink()
    with pytest.raises(JobError, match="no token"):
        enrolment.enrol_with_retries(site.board, clock, pauses.append, flaky)


def test_an_authority_of_another_version_is_named(site: Site) -> None:
    own = enrolment.load_or_create_key(site.files).public_key()
    pem = site.authority.sign_certificate("orin-7", "device", own, clock_s()).pem
    site.files.ca.write_text(of_another_version(site.files.ca.read_text()))
    with pytest.raises(JobError, match="contains no certificate in PEM"):
        enrolment.install_certificate(site.board, pem.encode())


def test_a_certificate_that_is_not_this_boards_is_not_kept(site: Site, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    other = CertificateAuthority.create(tmp_path / "other", "site", clock_s())
    own = enrolment.load_or_create_key(site.files).public_key()
    cases = (
        (
            site.authority.sign_certificate("orin-8", "device", own, clock_s()).pem,
            "issued to 'orin-8', and agent.toml has",
        ),
        (site.authority.sign_certificate("orin-7", "device", key.public_key(), clock_s()).pem, "for another key"),
        (other.sign_certificate("orin-7", "device", own, clock_s()).pem, "not signed by"),
        ("text", "damaged"),
        (of_another_version(site.authority.sign_certificate("orin-7", "device", own, clock_s()).pem), "damaged"),
    )
    for pem, said in cases:
        with pytest.raises(JobError, match=said):
            enrolment.install_certificate(site.board, pem.encode())
    assert not site.files.cert.exists()


def test_a_certificate_on_disk_that_cannot_serve_counts_as_none(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.files.cert.write_text(
        site.authority.sign_certificate("old", "device", enrolment.load_or_create_key(site.files).public_key(), 0.0).pem
    )
    with pytest.raises(JobError, match=r"no certificate and .* has no token"):
        site.enrol()
    assert "issued to 'old'" in caplog.text
    site.give_token()
    assert "is enrolled" in site.enrol()


def test_a_key_that_others_could_read_is_closed_and_told(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    enrolment.load_or_create_key(site.files)
    site.files.key.chmod(0o644)
    enrolment.load_or_create_key(site.files)
    assert site.files.key.stat().st_mode & 0o777 == 0o600
    assert "was readable by other users" in caplog.text


def test_key_token_and_ca_files_that_cannot_be_used_say_which(site: Site) -> None:
    rsa_pem = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for data in (b"", b"text", rsa_pem):
        site.files.key.write_bytes(data)
        site.files.key.chmod(0o600)
        with pytest.raises(JobError, match=r"device\.key has no ECDSA P-256 key"):
            site.enrol()
    site.files.key.unlink()
    site.files.token.mkdir()
    with pytest.raises(StoreError, match=r"token .*cannot be read"):
        site.enrol()
    site.files.token.rmdir()
    site.give_token()
    site.files.ca.write_text("text")
    with pytest.raises(JobError, match="contains no certificate in PEM"):
        site.enrol()


def test_without_an_endpoint_it_says_how_to_name_one(site: Site) -> None:
    site.give_token()
    table = {
        "device": "orin-7",
        "home": "h",
        "broker": {k: str(v) for k, v in site.files._asdict().items() if k != "token"},
    }
    with pytest.raises(JobError, match=r"under \[enrol\], or have a request signed"):
        enrolment.enrol(settings.parse_settings(table), day(0))


@pytest.mark.parametrize("url", ["http://site", "https://", "https://site/path", "https://site:99999", "site"])
def test_an_address_that_is_none_is_refused(site: Site, url: str) -> None:
    with pytest.raises(JobError, match=r"\[enrol\] url"):
        enrolment._post_request(url, site.files, "/v1/enrol", SigningRequest("orin-7", "csr"), False)


def test_an_agent_that_could_enrol_is_told_so(site: Site) -> None:
    cert, url = site.board.broker.cert, site.board.enrol.url
    with pytest.raises(JobError, match=r"orin-7 has no certificate .*: run `fedquilt identity enrol`"):
        require_enrolled(cert, url, "orin-7")
    require_enrolled(cert, None, "orin-7")
    site.give_token()
    site.enrol()
    require_enrolled(cert, url, "orin-7")


def test_a_board_that_replaces_another_is_told_of_the_revoked_certificate(site: Site) -> None:
    site.give_token()
    assert "is revoked" not in site.enrol()
    for file in (site.files.key, site.files.cert):
        file.unlink()
    site.give_token()
    assert site.enrol().endswith(OTHER_REVOKED_NOTE)
