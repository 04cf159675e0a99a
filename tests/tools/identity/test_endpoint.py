"""The endpoint over real TLS, with the board's own code on the other side."""

from __future__ import annotations

import datetime
import http.client
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from waiting import LIMIT_S, wait_until

from fedquilt.core import JobError, LinkError
from fedquilt.edge_agent import enrolment as edge_agent_enrolment
from fedquilt.edge_agent import settings
from fedquilt.security import enrolment
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, clock_s
from fedquilt.tools.identity.endpoint import EnrolmentServer


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ahead_s = 0.0  # of the endpoint's clock
        self.authority = CertificateAuthority.create(folder / "ca", "site", clock_s())
        self.endpoint = EnrolmentServer(
            self.authority, "127.0.0.1", 0, ["localhost", "127.0.0.1"], clock=lambda: clock_s() + self.ahead_s
        )
        self.endpoint.start()

    def close(self) -> None:
        self.endpoint.close()
        self.authority.register.close()

    def board(self, device: str, token: str | None = None, url: str | None = None) -> settings.AgentSettings:
        folder = self.folder / device
        folder.mkdir(exist_ok=True)
        (folder / "ca.crt").write_bytes((self.authority.folder / "ca.crt").read_bytes())
        if token is not None:
            (folder / "token").write_text(token + "\n")
        files = {
            key: str(folder / name) for key, name in (("ca", "ca.crt"), ("cert", "device.crt"), ("key", "device.key"))
        }
        table = {
            "device": device,
            "home": str(folder / "home"),
            "broker": {"url": "mqtts://localhost", **files},
            "enrol": {"url": url or f"https://localhost:{self.endpoint.port}"},
        }
        return settings.parse_settings(table)

    def token(self, pattern: str) -> str:
        return self.authority.register.create_token(pattern, DAY_S, clock_s())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def now(days: float = 0.0) -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)


def serial(board: settings.AgentSettings) -> int:
    assert board.broker.cert is not None
    return x509.load_pem_x509_certificate(Path(board.broker.cert).read_bytes()).serial_number


def test_a_board_enrols_once_renews_when_due_and_is_otherwise_left_alone(site: Site) -> None:
    board = site.board("orin-7", site.token("orin-*"))
    files = edge_agent_enrolment.paths_from_settings(board)
    assert "orin-7 is enrolled, until" in edge_agent_enrolment.enrol(board, now())
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert not files.token.exists()
    key, first = files.key.read_bytes(), serial(board)
    for path in site.authority.folder.iterdir():
        assert b"".join(key.split(b"\n")[1:-2]) not in path.read_bytes()
    assert "is enrolled" in edge_agent_enrolment.enrol(board, now())
    assert serial(board) == first
    site.ahead_s = 300 * DAY_S
    assert "orin-7 is renewed" in edge_agent_enrolment.enrol(board, now(300))
    assert files.key.read_bytes() == key
    assert serial(board) != first


def test_a_board_whose_clock_says_1970_asks_and_the_endpoint_decides(site: Site) -> None:
    board = site.board("orin-7", site.token("orin-7"))
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    edge_agent_enrolment.enrol(board, epoch)
    first = serial(board)
    assert "is renewed" in edge_agent_enrolment.enrol(board, epoch)
    assert serial(board) == first
    site.ahead_s = 300 * DAY_S
    edge_agent_enrolment.enrol(board, epoch)
    assert serial(board) != first


def test_a_refusal_is_the_endpoints_sentence_and_the_token_stays(site: Site) -> None:
    token = site.token("orin-7")
    edge_agent_enrolment.enrol(site.board("orin-7", token), now())
    thief = site.board("orin-8", token)
    with pytest.raises(JobError, match="refuses orin-8: token is for orin-7"):
        edge_agent_enrolment.enrol(thief, now())
    assert edge_agent_enrolment.paths_from_settings(thief).token.exists()
    again = site.board("orin-7", "guess")
    assert "is enrolled" in edge_agent_enrolment.enrol(again, now())


def test_a_revoked_board_is_told_so_when_it_renews(site: Site) -> None:
    board = site.board("orin-7", site.token("orin-7"))
    edge_agent_enrolment.enrol(board, now())
    site.authority.revoke_name("orin-7", clock_s())
    with pytest.raises(JobError, match="refuses orin-7: certificate of orin-7 was revoked at"):
        edge_agent_enrolment.enrol(board, now(300))


def test_an_expired_certificate_is_refused_by_tls_and_the_board_says_what_to_do(site: Site) -> None:
    board = site.board("orin-7", site.token("orin-7"))
    edge_agent_enrolment.enrol(board, now())
    files = edge_agent_enrolment.paths_from_settings(board)
    held = site.authority.register.list_certificates("orin-7")[-1]
    key = edge_agent_enrolment.load_or_create_key(files).public_key()
    with site.authority.register.transaction():
        gone = site.authority.sign_certificate("orin-7", "device", key, clock_s() - 400 * DAY_S, days=30)
    assert gone.ends_s < held.ends_s
    files.cert.write_text(gone.pem)
    with pytest.raises(LinkError, match="as expired: put a new token into"):
        edge_agent_enrolment.enrol(board, datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc))
    with pytest.raises(JobError, match=r"expired on .* .now 20.*: set the clock"):
        edge_agent_enrolment.enrol(board, now())


def test_an_endpoint_of_another_authority_or_name_gets_no_token(site: Site, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = Site(tmp_path / "elsewhere")
    try:
        board = site.board("orin-7", "token", f"https://localhost:{other.endpoint.port}")
        with pytest.raises(LinkError, match="is not trusted"):
            edge_agent_enrolment.enrol(board, now())
        elsewhere = site.board("orin-7", "token", f"https://127.0.0.2:{site.endpoint.port}")
        with pytest.raises(LinkError, match=r"cannot be reached|is not trusted"):
            edge_agent_enrolment.enrol(elsewhere, now())
    finally:
        other.close()


@pytest.mark.parametrize(
    "url", ["https://a..b", "https://[::1", "https://a:x", "https://a:65536", "http://a", "https://"]
)
def test_an_address_that_is_none_is_named_before_anything_is_sent(site: Site, url: str) -> None:
    with pytest.raises(JobError, match="is not the address of an endpoint"):
        edge_agent_enrolment.enrol(site.board("orin-7", "token", url), now())


def test_a_clock_that_is_far_ahead_is_named_as_what_is_wrong(site: Site) -> None:
    board = site.board("orin-7", site.token("orin-7"))
    site.ahead_s = -400 * DAY_S
    ssl.get_server_certificate(("127.0.0.1", site.endpoint.port))  # after it, a new certificate is made
    with pytest.raises(LinkError, match=r"is not valid at 20.*: set the clock"):
        edge_agent_enrolment.enrol(board, now())


def ask(site: Site, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=str(site.authority.folder / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", site.endpoint.port, timeout=LIMIT_S, context=context)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_is_no_request_is_answered_and_never_ends_the_endpoint(site: Site) -> None:
    assert ask(site, "GET", "/")[0] == 404
    assert ask(site, "POST", "/v1/other", b"{}")[0] == 404
    assert ask(site, "PUT", enrolment.ENROL, b"{}")[0] == 404
    assert ask(site, "POST", enrolment.ENROL, b"no json")[0] == 400
    assert ask(site, "POST", enrolment.ENROL, b'{"device":"a","csr":"b","more":1}')[0] == 400
    assert ask(site, "POST", enrolment.ENROL, b'{"device":"A/B","csr":"b"}')[0] == 400
    assert ask(site, "POST", enrolment.ENROL, b"", **{"Content-Length": "99999999"})[0] == 413
    assert ask(site, "POST", enrolment.ENROL, b"", **{"Content-Length": "-1"})[0] == 400
    status, body = ask(site, "POST", enrolment.RENEW, json.dumps({"device": "orin-7", "csr": "x"}).encode())
    assert (status, "without a device's certificate" in json.loads(body)["reason"]) == (403, True)
    status, body = ask(site, "GET", enrolment.CRL)
    assert (status, body) == (200, (site.authority.folder / "crl.pem").read_bytes())


def test_plain_http_and_garbage_are_dropped_quietly(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fedquilt.host.http_server"):
        with socket.create_connection(("127.0.0.1", site.endpoint.port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while raw.recv(4096):
                pass
            assert ask(site, "GET", "/")[0] == 404
        wait_until(lambda: "the connection of 127.0.0.1 ended early" in caplog.text, "the log says it")
    assert "Traceback" not in caplog.text


def test_a_revocation_list_that_cannot_be_read_is_answered_and_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    (site.authority.folder / "crl.pem").unlink()
    status, body = ask(site, "GET", enrolment.CRL)
    assert status == 500
    assert "revocation list cannot be read" in json.loads(body)["reason"]
    assert "crl.pem" in caplog.text


def test_a_port_in_use_says_so(site: Site) -> None:
    with pytest.raises(JobError, match=f"cannot listen at 127.0.0.1:{site.endpoint.port}"):
        EnrolmentServer(site.authority, "127.0.0.1", site.endpoint.port, ["localhost"])


def test_the_endpoints_own_certificate_is_made_anew_while_it_runs(site: Site) -> None:
    def shown() -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", site.endpoint.port)).encode()

    first = shown()
    site.ahead_s = 31 * DAY_S
    ask(site, "GET", "/")
    assert shown() != first
