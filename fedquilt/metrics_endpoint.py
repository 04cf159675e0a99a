"""Metrics for Prometheus in the OpenMetrics format, at http://HOST:PORT/metrics.

Sources return plain values (`MetricFamily`). The package prometheus_client (the extra `metrics`) is imported only when
metrics are served. A separate thread serves them, so that scrapes do not delay other work.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

from fedquilt import extras
from fedquilt.core import JobError
from fedquilt.host.http_server import (
    ConnectionLimiter,
    ConnectionLimits,
    HttpExchange,
    HttpServer,
    RequestRefusedError,
)

log = logging.getLogger(__name__)


CACHE_S: Final = 0.5  # time for which a response is reused
LIMITS: Final = ConnectionLimits(connections=32, per_address=16)  # scrapes are few and short


class MetricFamily(NamedTuple):
    name: str  # without "_total" for a counter
    kind: Literal["gauge", "counter"]
    description: str
    labels: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]  # values of `labels`, and the value


def parse_listen_address(listen: str) -> tuple[str, int]:
    """Return host (without brackets) and port of "HOST:PORT", or raise JobError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not int(port) < 65536:
        raise JobError(f"{listen!r} is not a valid address: write HOST:PORT, such as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def serve_metrics(
    listen: str | None, collect: Callable[[], Iterable[MetricFamily]], connections: ConnectionLimiter | None = None
) -> Iterator[str]:
    """Serve metrics of `collect` and of this process during a `with` block, which gets the URL.

    Args:
        listen: "HOST:PORT" with port 0 for any free port, or None to serve nothing and yield "".
        collect: Function called in another thread for each request. Errors are logged and cause status 500.
        connections: Limits on the connections, or None for LIMITS.

    Raise JobError if the address is invalid or in use, or prometheus_client is not installed.
    """
    if listen is None:
        yield ""
        return
    host, port = parse_listen_address(listen)
    client: Any = extras.load_optional("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(_Collector(collect, extras.load_optional("prometheus_client.core")))
    client.ProcessCollector(registry=registry)
    responses = _CachedResponses(client.make_wsgi_app(registry))
    server = HttpServer(
        host,
        port,
        responses.answer_request,
        connections=ConnectionLimiter(LIMITS) if connections is None else connections,
    )
    server.start()
    try:
        yield f"http://{host}:{server.address[1]}/metrics"
    finally:
        server.close()


class _CachedResponses:
    """Responses of prometheus_client's WSGI application, which negotiates format and compression.

    Responses are created one at a time and reused for CACHE_S, so that many clients cost no more time than a few.
    """

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self._responses: dict[tuple[str, ...], tuple[float, int, dict[str, str], bytes]] = {}

    def answer_request(self, exchange: HttpExchange) -> None:
        path, _, query = exchange.path.partition("?")
        if exchange.method not in ("GET", "HEAD") or path not in ("/", "/metrics"):
            raise RequestRefusedError(404, "unknown path or method: send GET /metrics")
        accepted = {name: exchange.headers.get(name, "") for name in ("accept", "accept-encoding")}
        with self._lock:
            now_s = time.monotonic()
            for expired in [key for key, response in self._responses.items() if now_s >= response[0] + CACHE_S]:
                del self._responses[expired]
            key = (query, *accepted.values())
            if key not in self._responses:
                status, headers, body = self._call_application(path, query, accepted)
                self._responses[key] = time.monotonic(), status, headers, body
            _, status, headers, body = self._responses[key]
        exchange.send_response(status, headers, body)

    def _call_application(self, path: str, query: str, accepted: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        environment = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": query}
        environment |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in accepted.items() if value}
        responses: list[tuple[str, list[tuple[str, str]]]] = []
        try:
            body = b"".join(self._application(environment, lambda status, headers: responses.append((status, headers))))
        except Exception:  # logged by _Collector
            raise RequestRefusedError(500, "collecting the metrics failed: see the log") from None
        status, headers = responses[0]
        return int(status.split()[0]), dict(headers), body


class _Collector:
    def __init__(self, collect: Callable[[], Iterable[MetricFamily]], kinds: Any) -> None:
        self._collect, self._kinds = collect, kinds

    def describe(self) -> list[Any]:
        # Names are unknown before the first collection.
        return []

    def collect(self) -> Iterator[Any]:
        try:
            families = list(self._collect())
        except Exception:
            log.exception("collecting the metrics failed")
            raise
        for family in families:
            kind = self._kinds.CounterMetricFamily if family.kind == "counter" else self._kinds.GaugeMetricFamily
            prometheus_family = kind(family.name, family.description, labels=family.labels)
            for values, value in family.samples:
                prometheus_family.add_metric(values, value)
            yield prometheus_family
