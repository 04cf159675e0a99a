"""Inference server of a device ("model runner"), which loads new models and measures drift.

POST /v1/predict   bytes of an image, WAV file, text or .npy: one result. Bytes of an .npz or CSV: one per example
POST /v1/label     {"id": ..., "label": in the form of the prediction}: true label of a result
GET  /v1/health    model, request counts, latency, drift and errors

All responses are JSON. Errors are {"error": a sentence}.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import metrics_endpoint
from fedquilt.core import DECODE_ERRORS, DataError, FedquiltError
from fedquilt.host import http_server
from fedquilt.host.http_server import ConnectionLimiter, ConnectionLimits, HttpExchange, HttpServer, RequestRefusedError
from fedquilt.tools.operations import access_control
from fedquilt.tools.operations.inference_server.service import (
    MAX_BODY_BYTES,
    ModelService,
    ModelSwitcher,
    UnknownAnswerError,
)

SHUTDOWN_S: Final = 5.0  # limit for running requests
POLL_S: Final = 0.2  # interval of checks for a new model


def serve_model(location: Path, listen: str, *, print_line: Callable[[str], None] = print) -> None:
    """Answer requests until KeyboardInterrupt, with the newest model at `location`, a folder or file.

    Raise JobError if `listen` cannot be used, and ModelError if there is no usable model.
    """
    http_server.raise_descriptor_limit()
    address = metrics_endpoint.parse_listen_address(listen)
    models = ModelSwitcher(location)
    service = ModelService(models, location if location.is_dir() else None)
    with contextlib.ExitStack() as stack:
        print_line(f"{models.current.network.model} answers at {stack.enter_context(_serve_http(service, address))}")
        stack.callback(service.write_status)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                if models.reload_if_changed():
                    service.write_status()  # the agent waits for the status of the new model
                service.write_status_if_due()
                time.sleep(POLL_S)


@contextlib.contextmanager
def _serve_http(service: ModelService, address: tuple[str, int]) -> Iterator[str]:
    server = InferenceServer(service, *address)
    server.start()
    try:
        yield server.url
    finally:
        server.close()
        deadline_s = time.monotonic() + SHUTDOWN_S
        while server.active_requests and time.monotonic() < deadline_s:
            time.sleep(0.02)


log = logging.getLogger("fedquilt.runner")

MAX_PENDING_BYTES: Final = 64 << 20  # limit of all request bodies in memory
MAX_ADDRESS_BYTES: Final = MAX_PENDING_BYTES // 2  # limit of the bodies of one address
MAX_LABEL_BYTES: Final = 4096
MAX_CONNECTIONS: Final = 64


class _LabelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    label: str | int | float | list[str] | dict[str, float]


class InferenceServer:
    def __init__(
        self,
        service: ModelService,
        host: str,
        port: int,
        *,
        connections: ConnectionLimiter | None = None,
    ) -> None:
        self._service, self._is_public = service, not metrics_endpoint.is_loopback(host)
        self.active_requests = 0
        self._pending_bytes = Counter[str]()  # address -> received bytes of unfinished requests
        self._lock = threading.Lock()
        # on loopback, all clients have one address
        per_address = MAX_CONNECTIONS // 2 if self._is_public else MAX_CONNECTIONS
        limits = ConnectionLimits(MAX_CONNECTIONS, per_address)
        connections = ConnectionLimiter(limits) if connections is None else connections
        self._http = HttpServer(host, port, self._answer_request, connections=connections, error_body=_json_error_body)

    @property
    def address(self) -> tuple[str, int]:
        return self._http.address

    @property
    def url(self) -> str:
        return self._http.url

    def start(self) -> None:
        self._http.start()

    def close(self) -> None:
        self._http.close()

    @contextmanager
    def _count_as_busy(self) -> Iterator[None]:
        with self._lock:
            self.active_requests += 1
        try:
            yield
        finally:
            with self._lock:
                self.active_requests -= 1

    @contextmanager
    def reserve_body_memory(self, address: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves memory for received bytes until the context ends.

        The function raises RequestRefusedError if the address, or all addresses together, have too many bytes.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            with self._lock:
                if (
                    self._pending_bytes[address] + size > MAX_ADDRESS_BYTES
                    or self._pending_bytes.total() + size > MAX_PENDING_BYTES
                ):
                    raise RequestRefusedError(503, "too many pending requests: try again later")
                self._pending_bytes[address] += size
                reserved += size

        try:
            yield reserve
        finally:
            with self._lock:
                self._pending_bytes[address] -= reserved
                if not self._pending_bytes[address]:
                    del self._pending_bytes[address]

    # -- requests --

    def _answer_request(self, exchange: HttpExchange) -> None:
        with self._count_as_busy():
            try:
                status, response = 200, self._route_request(exchange)
            except UnknownAnswerError as error:
                status, response = 404, {"error": str(error)}
            except DataError as error:
                status, response = 400, {"error": str(error)}
            except FedquiltError as error:
                status, response = 500, {"error": str(error)}
            except (RequestRefusedError, OSError):
                raise
            except Exception as error:
                log.exception("request failed")
                status, response = 500, {"error": f"internal error ({type(error).__name__}): see the server's log"}
            headers = {"content-type": "application/json", "cache-control": "no-store"}
            exchange.send_response(status, headers, msgspec.json.encode(response))

    def _route_request(self, exchange: HttpExchange) -> Any:
        self._refuse_other_sites(exchange)
        match exchange.method, exchange.path:
            case "POST", "/v1/predict":
                with self.reserve_body_memory(exchange.connection.address) as reserve:
                    return self._service.predict_bytes(exchange.read_body(MAX_BODY_BYTES, reserve))
            case "POST", "/v1/label":
                try:
                    label = msgspec.json.decode(exchange.read_body(MAX_LABEL_BYTES), type=_LabelRequest)
                except DECODE_ERRORS as error:
                    problem = f'body is not {{"id": ..., "label": ...}}: {error}'
                    raise RequestRefusedError(400, problem) from None
                return self._service.record_label(label.id, label.label)
            case "GET" | "HEAD", "/v1/health":
                return self._service.make_health()
        raise RequestRefusedError(
            404, f"unknown request {exchange.method} {exchange.path[:100]}: use /v1/predict, /v1/label or /v1/health"
        )

    def _refuse_other_sites(self, exchange: HttpExchange) -> None:
        headers = exchange.headers
        host_name = headers.get("host", "").rpartition(":")[0].lower()
        from_browser = "origin" in headers or "sec-fetch-site" in headers
        is_action = exchange.method == "POST" and from_browser
        permitted_names = (host_name,) if self._is_public else ()
        if access_control.refusal_reason(headers, permitted_names, is_action=is_action) is not None:
            problem = "request comes from another site's page, or has a host name: use the server's IP address"
            raise RequestRefusedError(403, problem)


def _json_error_body(message: str) -> tuple[str, bytes]:
    return "application/json", msgspec.json.encode({"error": message})
