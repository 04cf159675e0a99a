"""Every listener of the product while somebody floods it: others are served, and afterwards everybody is."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import classifiers
import dashes
import pytest
from blob_site import Site
from two_sides import noise
from waiting import wait_until

from fedquilt import metrics_endpoint
from fedquilt.coordinator.storage.store import Store
from fedquilt.host.http_server import ConnectionLimiter, ConnectionLimits
from fedquilt.metrics_endpoint import MetricFamily
from fedquilt.security import enrolment
from fedquilt.tools.identity.authority import CertificateAuthority, clock_s
from fedquilt.tools.identity.endpoint import EnrolmentServer

BODIES = (enrolment.ENROL, "/v1/predict", "/api/session")
HALF = "GET / HTTP/1.1\nHost: 127.0.0.1\nX: "
BODY = "POST {} HTTP/1.1\nHost: 127.0.0.1\nOrigin: http://127.0.0.1\nContent-Length: 1000\n\n{{"
ROOT = Path(__file__).parents[2]
FLOODER, OTHER = "127.0.0.1", "127.0.0.2"
LIMITS = ConnectionLimits(connections=8, per_address=4)
SHORT, LONG = (0.5, 1.5), (3600.0, 3600.0)  # seconds for a header, and for a request
HEAVY = [MetricFamily("fq_large", "gauge", "large", ("n",), [((f"{n:0600}",), 1.0) for n in range(10_000)])]


class Listener:
    """A listener with few places and short deadlines.

    Args:
        port: Port on 127.0.0.1.
        request: Header of a request that is answered with 200.
        large: Header of a request whose answer does not fit the buffers of a socket, or None if there is none.
        context: TLS of a client, or None.
        log: File with the errors of a listener that is a process, or None.
        renew: Function that lets the requests be made again, where they are limited.
    """

    def __init__(
        self,
        port: int,
        request: str,
        large: str | None = None,
        context: ssl.SSLContext | None = None,
        log: Path | None = None,
        renew: Callable[[], object] = lambda: None,
    ) -> None:
        self.port, self.request, self.large, self.context = port, request, large, context
        self.log, self.renew = log, renew

    def connect(self, address: str, sends: str = "", *, buffer: int | None = None) -> socket.socket:
        """Return a connection from `address` that has sent the bytes of `sends` after the TLS handshake, if any."""
        sock = socket.socket()
        try:
            if buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            sock.settimeout(60)
            sock.bind((address, 0))
            sock.connect(("127.0.0.1", self.port))
            if sends:
                sock = self.context.wrap_socket(sock, server_hostname="127.0.0.1") if self.context else sock
                sock.sendall(sends.replace("\n", "\r\n").encode())
        except OSError:
            sock.close()
            raise
        return sock

    def status(self, address: str, request: str | None = None) -> int:
        """Return the status of the answer to a request, or 0 if the connection ends without one."""
        with suppress(OSError), self.connect(address, request or self.request) as sock:
            return int(sock.recv(100).split()[1])
        return 0


def metrics(folder: Path, stack: ExitStack, connections: ConnectionLimiter) -> Listener:
    place = stack.enter_context(metrics_endpoint.serve_metrics("127.0.0.1:0", lambda: HEAVY, connections))
    request = "GET /metrics{} HTTP/1.1\nHost: x\n\n"
    return Listener(int(re.findall(r":(\d+)/", place)[0]), request.format("?name[]=none"), request.format(""))


def blobs(folder: Path, stack: ExitStack, connections: ConnectionLimiter) -> Listener:
    site = Site(folder, connections)
    stack.callback(site.server.close)
    head = "GET /blobs/{} HTTP/1.1\nHost: x\nAuthorization: Bearer {}\n\n"
    small, large = site.depot.store_bytes(b"small"), site.depot.store_bytes(noise(16_000_000, 1))

    def issue_tokens() -> tuple[str, str]:
        return site.server.issue_token("b", small), site.server.issue_token("a", large)

    own, others = issue_tokens()
    requests = head.format(small.sha256, own), head.format(large.sha256, others)
    return Listener(site.server.port, *requests, renew=issue_tokens)


def enrolling(folder: Path, stack: ExitStack, connections: ConnectionLimiter) -> Listener:
    authority = CertificateAuthority.create(folder / "ca", "site", clock_s())
    stack.callback(authority.register.close)
    endpoint = EnrolmentServer(authority, "127.0.0.1", 0, ["127.0.0.1"], connections=connections)
    stack.callback(endpoint.close)
    endpoint.start()
    context = ssl.create_default_context(cafile=str(authority.folder / "ca.crt"))
    return Listener(endpoint.port, f"GET {enrolment.CRL} HTTP/1.1\nHost: x\n\n", None, context)


def runner(folder: Path, stack: ExitStack, connections: ConnectionLimiter) -> Listener:
    from fedquilt.tools.operations.inference_server import InferenceServer
    from fedquilt.tools.operations.inference_server.service import ModelService, ModelSwitcher

    models = ModelSwitcher(classifiers.write_classifier(folder / "a" / "model.onnx"))
    server = InferenceServer(ModelService(models, None), "127.0.0.1", 0, connections=connections)
    stack.callback(server.close)
    server.start()
    return Listener(server.address[1], "GET /v1/health HTTP/1.1\nHost: 127.0.0.1\n\n")


DASH = """
import sys; from pathlib import Path
from fedquilt.host.http_server import ConnectionLimiter, ConnectionLimits
from fedquilt.tools.operations import dash
dash.serve_dashboard(Path(sys.argv[1]), "127.0.0.1:0", actions=False, print_line=lambda line: print(line, flush=True),
          connections=ConnectionLimiter(ConnectionLimits(8, 4), header_s=float(sys.argv[2]),
          request_s=float(sys.argv[3])))
"""


def dashboard(folder: Path, stack: ExitStack, connections: ConnectionLimiter) -> Listener:
    Store(folder).close()
    dashes.add_boards(folder, dashes.names(15_000))
    deadlines = [str(connections._header_s), str(connections._request_s)]
    command = [sys.executable, "-c", DASH, str(folder), *deadlines]
    log = folder / "errors.log"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stack.enter_context(log.open("w")), text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    port = int(re.findall(r":(\d+)/", process.stdout.readline())[0])
    root, events = (f"GET {path} HTTP/1.1\nHost: 127.0.0.1\n\n" for path in ("/", "/api/events"))
    return Listener(port, root, events, log=log)


LISTENERS: dict[str, Callable[[Path, ExitStack, ConnectionLimiter], Listener]] = {
    "metrics": metrics,
    "blobs": blobs,
    "enrolment": enrolling,
    "runner": runner,
    "dashboard": dashboard,
}
MECHANISMS = ("metrics", "enrolment", "dashboard")  # HttpServer, the same with TLS, and uvicorn
PACKAGES = {"runner": ("onnx", "onnxruntime"), "dashboard": ("uvicorn",), "metrics": ("prometheus_client",)}
FILES = {"fedquilt/host/http_server.py"}  # with sockets of HTTP listeners
OTHERS = {"edge_agent/clocks/helper.py"}  # a socket in a folder of root's, with limits of its own


def made(name: str, folder: Path, deadlines: tuple[float, float]) -> Iterator[Listener]:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    with ExitStack() as stack:
        connections = ConnectionLimiter(LIMITS, header_s=deadlines[0], request_s=deadlines[1])
        yield LISTENERS[name](folder / "listener", stack, connections)


@pytest.fixture(scope="module", params=MECHANISMS)
def lasting_patient(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    yield from made(request.param, tmp_path_factory.mktemp("patient"), LONG)


@pytest.fixture(scope="module", params=MECHANISMS)
def lasting_strict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    yield from made(request.param, tmp_path_factory.mktemp("strict"), SHORT)


@pytest.fixture
def patient(lasting_patient: Listener) -> Listener:
    lasting_patient.renew()
    return lasting_patient


@pytest.fixture
def strict(lasting_strict: Listener) -> Listener:
    lasting_strict.renew()
    return lasting_strict


@contextmanager
def flood(
    listener: Listener, count: int, sends: str = "", *, buffer: int | None = None
) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            with suppress(OSError):
                found.append(stack.enter_context(listener.connect(FLOODER, sends, buffer=buffer)))
        yield found


def ended(sock: socket.socket) -> bool:
    """Whether the listener has ended a connection, of which at most an answer is left to read."""
    with suppress(OSError):
        while sock.recv(1 << 20):
            pass
    return True


def test_every_socket_that_listens_is_one_of_these() -> None:
    """A new listener needs limits, and a place in this test."""
    listens = re.compile(r"create_server\(|\.listen\([A-Z_]+\)|HTTPServer\(\(|start_http_server|start_server\(")
    files = [
        path
        for folder in ("fedquilt", "coordinator", "edge_agent", "models", "tools")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    found = {
        str(path.relative_to(ROOT)) for path in files if listens.search(path.read_text()) and "bench" not in path.parts
    }
    assert {each for each in found if not each.startswith("fedquilt/coordinator")} - OTHERS == FILES


@pytest.mark.parametrize("name", LISTENERS)
def test_idle_connections_of_one_address_leave_others_served_by_each_listener(name: str, tmp_path: Path) -> None:
    """Twice as many as there are places; other clients of that address are served too."""
    for listener in made(name, tmp_path, LONG):
        with flood(listener, 16):
            assert listener.status(OTHER) == 200
            assert listener.status(FLOODER) == 200
        listener.renew()
        assert listener.status(FLOODER) == 200


@pytest.mark.parametrize(
    "sends", [HALF, "large", *(BODY.format(path) for path in BODIES)], ids=("half", "large", *BODIES)
)
def test_requests_of_one_address_that_do_not_end_leave_others_served(patient: Listener, sends: str) -> None:
    """Half of a header, a body that does not come, and a large answer that is never read."""
    if sends == "large" and patient.large is None:
        pytest.skip("all answers of this listener are small")
    with flood(patient, 16, (patient.large or "") if sends == "large" else sends, buffer=4096):
        assert patient.status(OTHER) == 200
    wait_until(lambda: patient.status(FLOODER) == 200, "a place")


@pytest.mark.parametrize("sends", ["", "large"])
def test_connections_of_many_addresses_leave_the_next_address_served(patient: Listener, sends: str) -> None:
    """The oldest gives its place to who comes, whether it is idle or never reads."""
    if sends and patient.large is None:
        pytest.skip("all answers of this listener are small")
    with ExitStack() as stack:
        for number in range(20):
            stack.enter_context(
                patient.connect(f"127.0.1.{number + 1}", (patient.large or "") * 20 if sends else "", buffer=4096)
            )
        assert patient.status(OTHER) == 200


def test_a_huge_header_is_refused(patient: Listener) -> None:
    """A megabyte of header is not read to its end."""
    huge = f"GET / HTTP/1.1\nHost: 127.0.0.1\nX: {'x' * 1_000_000}\n\n"
    assert patient.status(FLOODER, huge) in (0, 400, 431)
    assert patient.status(OTHER) == 200


def test_connections_beyond_all_places_end_without_a_traceback(
    patient: Listener, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with flood(patient, 40, BODY.format("/v1/predict")), flood(patient, 40, patient.large or "GET "):
        assert patient.status(OTHER) == 200
    wait_until(lambda: patient.status(FLOODER) == 200, "a place")
    said = "".join((caplog.text, *capfd.readouterr(), patient.log.read_text() if patient.log else ""))
    assert "Traceback" not in said


def test_half_open_requests_are_ended_by_a_deadline(strict: Listener) -> None:
    """Though each of them still sends a byte of its header now and then."""
    with strict.connect(FLOODER, HALF) as sock:

        def sent() -> bool:
            try:
                sock.sendall(b"x")
                sock.setblocking(False)
                return sock.recv(1000) == b""
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except OSError:
                return True
            finally:
                sock.setblocking(True)

        wait_until(sent, "the end of the connection")


def test_a_body_that_does_not_come_is_not_waited_for(strict: Listener) -> None:
    """The listener answers at once or ends the connection by a deadline."""
    with ExitStack() as stack:
        socks = [stack.enter_context(strict.connect(FLOODER, BODY.format(path))) for path in BODIES]
        assert all(ended(sock) for sock in socks)


def test_a_connection_serves_requests_and_does_not_wait_for_ever_for_the_next_one(strict: Listener) -> None:
    with strict.connect(FLOODER, strict.request) as sock:
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        answer.read()
        assert answer.status == 200
        assert ended(sock)


def test_a_client_that_reads_slowly_loses_its_connection(strict: Listener) -> None:
    """The rest of an answer is not kept for it."""
    if strict.large is None or "/api/" in strict.large:
        pytest.skip("answers of this listener are small, or are limited by their pace")
    with strict.connect(FLOODER, strict.large, buffer=4096) as sock:

        def lost() -> bool:
            with suppress(OSError):
                return sock.recv(64) == b""
            return True

        wait_until(lost, "the end of the connection")
