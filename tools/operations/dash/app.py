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
from urllib.parse import parse_qsl

import h11
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
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
from fedquilt.tools.operations.dash.home_watcher import HomeWatcher, MissingRunError
from fedquilt.tools.operations.dash.reports import ReportBuilder

log = logging.getLogger("fedquilt.dash")

KINDS: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_BODY: Final = 4096  # bytes of a request
MOST_QUERY: Final = 2048
ANSWERS: Final = 32  # answers that are kept for whoever asks the same, until something changes
ANSWER_S: Final = 5.0

PageLoader = Callable[..., Awaitable[dict[str, Any]]]
PAGES: Final[dict[str, PageLoader]] = {  # called with the watcher, the query and the path's parameter
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
    def __init__(self, watch: HomeWatcher, door: AccessPolicy | None = None, names: Collection[str] = ()) -> None:
        self._watch, self._door, self._names = watch, door, names
        self._reports = ReportBuilder(watch.home)
        self._answers: dict[str, tuple[object, float, bytes]] = {}
        folder = resources.files("fedquilt.tools.operations.dash") / "static"
        files = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "index.html"}
        digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:12]
        self._files = {f"/static/{digest}/{name}": body for name, body in files.items()}
        self._shell = (folder / "index.html").read_bytes().replace(b"{static}", f"/static/{digest}".encode())

    def make_app(self) -> ASGIApp:
        shells = ("/", "/boards/{name}", "/runs", "/runs/{run}", "/rollouts", "/rollouts/{rollout}", "/log")
        routes = [
            *(Route(path, self._serve_page) for path in shells),
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
        return SecuredApp(Starlette(routes=routes, exception_handlers=handlers), self._names)

    # -- pages --

    async def _serve_page(self, request: Request) -> Response:
        return Response(self._shell, media_type="text/html", headers={"cache-control": "no-cache"})

    async def _serve_file(self, request: Request) -> Response:
        body = self._files.get(request.url.path)
        if body is None:
            raise HTTPException(404)
        kind = KINDS[request.url.path[request.url.path.rindex(".") :]]
        return Response(body, media_type=kind, headers={"cache-control": "max-age=31536000, immutable"})

    async def _serve_report(self, request: Request) -> Response:
        found = await self._watch.load_follower(_get_path_parameter(request, "run"))
        summary = await self._watch.run_in_reader_thread(found.make_summary)
        page = await self._reports.get_page(found.row.id, f"{summary['done']} {found.row.status}")
        return Response(page, media_type="text/html", headers={**access_control.REPORT, "cache-control": "no-cache"})

    # -- values --

    def _make_cached_json_handler(self, load: PageLoader) -> Callable[[Request], Awaitable[Response]]:
        async def handle_request(request: Request) -> Response:
            key, stamp = f"{request.url.path}?{request.url.query}", dict(self._watch.changes)
            kept = self._answers.pop(key, None)
            if kept is None or kept[0] != stamp or time.monotonic() > kept[1] + ANSWER_S:
                kept = (
                    stamp,
                    time.monotonic(),
                    msgspec.json.encode(
                        await load(self._watch, dict(parse_qsl(request.url.query)), *request.path_params.values())
                    ),
                )
            while len(self._answers) >= ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = kept
            return _make_json_response(kept[2])

        return handle_request

    async def _serve_events(self, request: Request) -> Response:
        async def encode_changes() -> AsyncIterator[bytes]:
            async with aclosing(self._watch.iterate_changes()) as news:
                async for changes in news:
                    yield _encode_event(changes)

        return StreamingResponse(
            encode_changes(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    # -- what can be done --

    async def _serve_session(self, request: Request) -> Response:
        door, headers = self._door, {}
        knows = door is not None and door.has_session(request.headers)
        if request.method == "POST":
            if door is None:
                raise HTTPException(403, "this dashboard only shows: start it with --actions")
            try:
                given = msgspec.json.decode(await _read_body(request), type=dict[str, str]).get("token")
            except msgspec.MsgspecError:
                given = None
            if not door.accepts_token(given):
                raise HTTPException(403, "that is not the token of this start: open the address that was printed last")
            headers, knows = {"set-cookie": door.make_session_cookie()}, True
        told = {
            "version": __version__,
            "home": str(self._watch.home),
            "actions": door is not None,
            "proof": door.proof if door is not None and knows else None,
        }
        return _make_json_response(msgspec.json.encode(told), headers=headers)

    async def _control_run(self, request: Request) -> Response:
        what = await self._require_allowed_action(request, ("approve", "stop", "resume"))
        row = await self._watch.find_run(_get_path_parameter(request, "run"))
        return _confirm_action(
            what, await self._watch.run_in_reader_thread(lambda: _request_run_action(what, self._watch, row.id))
        )

    async def _control_rollout(self, request: Request) -> Response:
        what = await self._require_allowed_action(request, ("back",))
        return _confirm_action(what, await pages.request_revert(self._watch, _get_path_parameter(request, "rollout")))

    async def _require_allowed_action(self, request: Request, known: Collection[str]) -> str:
        await _read_body(request)
        door, what = self._door, _get_path_parameter(request, "what")
        if what not in known:
            raise HTTPException(404)
        if door is None:
            raise HTTPException(403, "this dashboard only shows: start it with --actions")
        if not door.permits_action(request.headers):
            raise HTTPException(403, "this needs the address with the token that `fedquilt dash --actions` printed")
        return what


def _confirm_action(what: str, said: str) -> Response:
    log.warning("%s was asked for from the dashboard: %s", what, said)
    return _make_json_response(msgspec.json.encode({"said": said}))


def _request_run_action(what: str, watch: HomeWatcher, run: str) -> str:
    with store.Store(watch.home) as written:
        if what == "approve":
            return run_control.approve_run(written, run)
        if what == "stop":
            return run_control.stop_run(written, run)
        if not written.is_served():
            raise JobError(
                f"no coordinator serves {watch.home}: `fedquilt resume {run} --home {watch.home}` is one that goes on"
            )
        return f"{run_control.resume_run(written, run).id} goes on at the coordinator's next look at its store"


class SecuredApp:
    """ASGI middleware that checks host and origin and adds the security headers of `access_control`."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in access_control.HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in known)]
            await send(message)

        request = Request(scope)
        acts = request.method not in ("GET", "HEAD")
        said = access_control.refusal_reason(request.headers, self._names, acts=acts)
        if said is None and len(scope.get("query_string", b"")) > MOST_QUERY:
            said = "so long a question has no answer here"
        if said is not None:
            return await _make_problem_response(403, said)(scope, receive, send_with_headers)
        return await self._app(scope, receive, send_with_headers)


def _make_json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    headers = {"cache-control": "no-store", **(headers or {})}
    return Response(body, status, media_type="application/json", headers=headers)


def _make_problem_response(status: int, said: str) -> Response:
    return _make_json_response(msgspec.json.encode({"problem": said}), status)


async def _handle_http_error(request: Request, error: HTTPException) -> Response:
    return _make_problem_response(error.status_code, error.detail)


async def _handle_fedquilt_error(request: Request, error: FedquiltError) -> Response:
    status = 409
    if isinstance(error, MissingRunError | pages.MissingDeviceError):
        status = 404
    elif isinstance(error, StoreError):
        status = 503
    return _make_problem_response(status, str(error))


async def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    log.error("no answer to %s: %r", request.url.path, error)
    return _make_problem_response(500, "an error of fedquilt's own; its log says more")


def _get_path_parameter(request: Request, name: str) -> str:
    return str(request.path_params[name])


async def _read_body(request: Request) -> bytes:
    found = b""
    async for piece in request.stream():
        found += piece
        if len(found) > MOST_BODY:
            raise HTTPException(413, "so long a request has no answer here")
    return found


def _encode_event(changes: dict[str, int] | None) -> bytes:
    return b": still here\n\n" if changes is None else b"data: " + msgspec.json.encode(changes) + b"\n\n"


CHECK_S = 0.5  # between checks of deadlines


def make_limited_protocol(connections: ConnectionLimiter) -> Callable[..., asyncio.Protocol]:
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
            elif self.entry.waits or self.entry.deadline_s == math.inf:
                connections.begin_request(self.entry)

        def on_response_complete(self) -> None:
            if self.entry is not None:
                connections.await_request(self.entry)
            super().on_response_complete()

    return LimitedProtocol


async def close_late_connections(connections: ConnectionLimiter, server: Any) -> None:
    """Close connections whose deadline has passed, until the server ends."""
    while not server.should_exit:
        connections.close_overdue()
        await asyncio.sleep(CHECK_S)
