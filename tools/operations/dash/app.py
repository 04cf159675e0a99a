"""HTTP interface of the dashboard: pages, JSON values, an event stream and actions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import h11
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedquilt import __version__
from fedquilt.coordinator import run_control
from fedquilt.coordinator.storage import store
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.host.http_server import Connection, ConnectionLimiter
from fedquilt.tools.operations import access_control
from fedquilt.tools.operations.access_control import AccessPolicy
from fedquilt.tools.operations.dash import pages
from fedquilt.tools.operations.dash.home_watcher import HomeWatcher, NotFoundError
from fedquilt.tools.operations.dash.reports import ReportBuilder

log = logging.getLogger("fedquilt.dash")

MEDIA_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MAX_BODY_BYTES: Final = 4096  # limit of a request's body in bytes
MAX_QUERY_BYTES: Final = 2048
MAX_CACHED_RESPONSES: Final = 32  # cached pages, valid until the next change
RESPONSE_TTL_S: Final = 5.0

PageLoader = Callable[..., Awaitable[dict[str, Any]]]
PAGES: Final[dict[str, PageLoader]] = {  # arguments: watcher, query and path parameter
    "/api/fleet": pages.load_fleet_page,
    "/api/boards/{name}": pages.load_device_page,
    "/api/runs": pages.load_runs_page,
    "/api/runs/{run}": pages.load_run_page,
    "/api/runs/{run}/why": pages.load_round_page,
    "/api/rollouts": pages.load_rollouts,
    "/api/rollouts/{rollout}": pages.load_rollout,
    "/api/log": pages.load_log_page,
}


class Dashboard:
    def __init__(
        self, watcher: HomeWatcher, access_policy: AccessPolicy | None = None, names: Collection[str] = ()
    ) -> None:
        self._watcher, self._access_policy, self._names = watcher, access_policy, names
        self._reports = ReportBuilder(watcher.home)
        self._responses: dict[str, tuple[object, float, bytes]] = {}
        folder = resources.files("fedquilt.tools.operations.dash") / "static"
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "index.html"}
        digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:12]
        self._files = {f"/static/{digest}/{name}": body for name, body in files.items()}
        self._index_page = (folder / "index.html").read_bytes().replace(b"{static}", f"/static/{digest}".encode())

    def make_app(self) -> ASGIApp:
        page_paths = ("/boards", "/boards/{name}", "/runs", "/runs/{run}", "/rollouts", "/rollouts/{rollout}", "/log")
        routes = [
            Route("/", self._serve_start_page),
            *(Route(path, self._serve_page) for path in page_paths),
            Route("/static/{digest}/{name}", self._serve_file),
            *(Route(path, self._make_cached_json_handler(load)) for path, load in PAGES.items()),
            Route("/api/runs/{run}/report", self._serve_report),
            Route("/api/runs/{run}/{what:str}", self._control_run, methods=["POST"]),
            Route("/api/rollouts/{rollout}/{what:str}", self._control_rollout, methods=["POST"]),
            Route("/api/events", self._serve_events),
            Route("/api/session", self._serve_session, methods=["GET", "POST"]),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: _handle_http_error,
            FedquiltError: _handle_fedquilt_error,
            Exception: _handle_unexpected_error,
        }
        return add_security(Starlette(routes=routes, exception_handlers=handlers), self._names)

    # -- pages --

    async def _serve_page(self, request: Request) -> Response:
        return Response(self._index_page, media_type="text/html", headers={"cache-control": "no-cache"})

    async def _serve_start_page(self, request: Request) -> Response:
        run = await pages.find_start_run(self._watcher)
        return await self._serve_page(request) if run is None else RedirectResponse(f"/runs/{quote(run, safe='')}")

    async def _serve_file(self, request: Request) -> Response:
        body = self._files.get(request.url.path)
        if body is None:
            raise HTTPException(404)
        media_type = MEDIA_TYPES[request.url.path[request.url.path.rindex(".") :]]
        return Response(body, media_type=media_type, headers={"cache-control": "max-age=31536000, immutable"})

    async def _serve_report(self, request: Request) -> Response:
        follower = await self._watcher.load_follower(_get_path_parameter(request, "run"))
        summary = await self._watcher.run_in_reader_thread(follower.make_summary)
        page = await self._reports.get_page(follower.row.id, f"{summary['done']} {follower.row.status}")
        return Response(
            page, media_type="text/html", headers={**access_control.REPORT_HEADERS, "cache-control": "no-cache"}
        )

    # -- values --

    def _make_cached_json_handler(self, load: PageLoader) -> Callable[[Request], Awaitable[Response]]:
        async def handle_request(request: Request) -> Response:
            key, changes = f"{request.url.path}?{request.url.query}", dict(self._watcher.changes)
            cached = self._responses.get(key)
            if cached is None or cached[0] != changes or time.monotonic() > cached[1] + RESPONSE_TTL_S:
                values = await load(self._watcher, dict(parse_qsl(request.url.query)), *request.path_params.values())
                cached = changes, time.monotonic(), msgspec.json.encode(values)
                self._responses[key] = cached
                while len(self._responses) > MAX_CACHED_RESPONSES:
                    del self._responses[next(iter(self._responses))]
            return _make_json_response(cached[2])

        return handle_request

    async def _serve_events(self, request: Request) -> Response:
        async def encode_changes() -> AsyncIterator[bytes]:
            async with aclosing(self._watcher.iterate_changes()) as news:
                async for changes in news:
                    yield _encode_event(changes)

        return StreamingResponse(
            encode_changes(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    # -- actions --

    async def _serve_session(self, request: Request) -> Response:
        access_policy, headers = self._access_policy, {}
        has_session = access_policy is not None and access_policy.has_session(request.headers)
        if request.method == "POST":
            if access_policy is None:
                raise HTTPException(403, "dashboard is read-only: start it with --actions")
            try:
                token = msgspec.json.decode(await _read_body(request), type=dict[str, str]).get("token")
            except msgspec.MsgspecError:
                token = None
            if not access_policy.accepts_token(token):
                raise HTTPException(403, "token is wrong: open the address that `fedquilt dash` printed last")
            headers, has_session = {"set-cookie": access_policy.make_session_cookie()}, True
        session = {
            "version": __version__,
            "home": str(self._watcher.home),
            "actions": access_policy is not None,
            "proof": access_policy.proof if access_policy is not None and has_session else None,
        }
        return _make_json_response(msgspec.json.encode(session), headers=headers)

    async def _control_run(self, request: Request) -> Response:
        action = await self._require_allowed_action(request, ("approve", "stop", "resume"))
        row = await self._watcher.find_run(_get_path_parameter(request, "run"))
        return _confirm_action(
            action, await self._watcher.run_in_reader_thread(lambda: _request_run_action(action, self._watcher, row.id))
        )

    async def _control_rollout(self, request: Request) -> Response:
        action = await self._require_allowed_action(request, ("back",))
        return _confirm_action(
            action, await pages.request_revert(self._watcher, _get_path_parameter(request, "rollout"))
        )

    async def _require_allowed_action(self, request: Request, actions: Collection[str]) -> str:
        await _read_body(request)
        access_policy, action = self._access_policy, _get_path_parameter(request, "what")
        if action not in actions:
            raise HTTPException(404)
        if access_policy is None:
            raise HTTPException(403, "dashboard is read-only: start it with --actions")
        if not access_policy.permits_action(request.headers):
            raise HTTPException(403, "session is missing: open the address that `fedquilt dash --actions` printed")
        return action


def _confirm_action(action: str, message: str) -> Response:
    log.warning("action %s requested from the dashboard: %s", action, message)
    return _make_json_response(msgspec.json.encode({"said": message}))


def _request_run_action(action: str, watcher: HomeWatcher, run: str) -> str:
    with store.Store(watcher.home) as job_store:
        if action == "approve":
            return run_control.approve_run(job_store, run)
        if action == "stop":
            return run_control.stop_run(job_store, run)
        if not job_store.is_served():
            raise JobError(
                f"no coordinator serves {watcher.home}: start one with `fedquilt resume {run} --home {watcher.home}`"
            )
        return f"{run_control.resume_run(job_store, run).id} resumes within a second"


def add_security(app: ASGIApp, names: Collection[str]) -> ASGIApp:
    """Return an app that checks host and origin first, and adds the security headers of `access_control`."""

    async def secured_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present_names = {name.lower() for name, _ in message["headers"]}
                security_headers = [(name.encode(), value.encode()) for name, value in access_control.HEADERS.items()]
                message["headers"] = [
                    *message["headers"],
                    *(header for header in security_headers if header[0] not in present_names),
                ]
            await send(message)

        request = Request(scope)
        is_action = request.method not in ("GET", "HEAD")
        reason = access_control.refusal_reason(request.headers, names, is_action=is_action)
        if reason is None and len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            reason = f"query is too long: send at most {MAX_QUERY_BYTES} bytes"
        if reason is not None:
            return await _make_problem_response(403, reason)(scope, receive, send_with_headers)
        return await app(scope, receive, send_with_headers)

    return secured_app


def _make_json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    headers = {"cache-control": "no-store", **(headers or {})}
    return Response(body, status, media_type="application/json", headers=headers)


def _make_problem_response(status: int, problem: str) -> Response:
    return _make_json_response(msgspec.json.encode({"problem": problem}), status)


async def _handle_http_error(request: Request, error: HTTPException) -> Response:
    return _make_problem_response(error.status_code, error.detail)


async def _handle_fedquilt_error(request: Request, error: FedquiltError) -> Response:
    status = 409
    if isinstance(error, NotFoundError):
        status = 404
    elif isinstance(error, StoreError):
        status = 503
    return _make_problem_response(status, str(error))


async def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    log.error("request for %s failed: %r", request.url.path, error)
    return _make_problem_response(500, "internal error: see the dashboard's log")


def _get_path_parameter(request: Request, name: str) -> str:
    return str(request.path_params[name])


async def _read_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"request body is too long: send at most {MAX_BODY_BYTES} bytes")
    return body


def _encode_event(changes: dict[str, int] | None) -> bytes:
    return b": still here\n\n" if changes is None else b"data: " + msgspec.json.encode(changes) + b"\n\n"


CHECK_S = 0.5  # between checks of deadlines


def make_limited_protocol(connections: ConnectionLimiter) -> Callable[..., asyncio.Protocol]:
    """Return a uvicorn protocol class that refuses connections (503) and sets deadlines by `connections`."""

    class LimitedProtocol(H11Protocol):
        entry: Connection | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            sock: socket.socket = transport.get_extra_info("socket")
            address = str((transport.get_extra_info("peername") or ("",))[0])
            self.entry = connections.add_connection(address, sock.fileno(), transport.abort)
            if self.entry is None:
                transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n")
                transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.entry is not None:
                connections.remove_connection(self.entry)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.entry is not None:
                super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            self._restart_deadline()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._restart_deadline()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._restart_deadline()

        def _restart_deadline(self) -> None:
            if self.entry is None or self.cycle is None or self.cycle.response_complete:
                return
            if self.conn.their_state is not h11.SEND_BODY and not self.flow.write_paused:
                connections.begin_request(self.entry, math.inf)  # changes are streamed for hours
            elif self.entry.is_waiting or self.entry.deadline_s == math.inf:
                connections.begin_request(self.entry)

        def on_response_complete(self) -> None:
            if self.entry is not None:
                connections.await_request(self.entry)
            super().on_response_complete()

    return LimitedProtocol


async def close_late_connections(connections: ConnectionLimiter, server: Any) -> None:
    while not server.should_exit:
        connections.close_overdue()
        await asyncio.sleep(CHECK_S)
