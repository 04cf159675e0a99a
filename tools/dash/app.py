"""The dashboard's addresses: pages and their files, values as JSON, changes as they come, and three things to do."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedquilt import __version__
from fedquilt.coordinator import requests, store
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.tools.dash import guard, pages, rollouts
from fedquilt.tools.dash.guard import Door
from fedquilt.tools.dash.reports import Reports
from fedquilt.tools.dash.watch import MissingRunError, Watch

log = logging.getLogger("fedquilt.dash")

KINDS: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_BODY: Final = 4096  # bytes of a request
MOST_QUERY: Final = 2048
ANSWERS: Final = 32  # answers that are kept for whoever asks the same, until something changes
ANSWER_S: Final = 5.0

Told = Callable[[Request], Awaitable[dict[str, Any]]]


class Dash:
    """Answers of one dashboard.

    Args:
        watch: of its home.
        door: what requests to do something need; None: nothing can be done.
        names: by which it may be called besides addresses and localhost.
    """

    def __init__(self, watch: Watch, door: Door | None = None, names: Collection[str] = ()) -> None:
        self._watch, self._door, self._names = watch, door, names
        self._reports = Reports(watch.home)
        self._answers: dict[str, tuple[object, float, bytes]] = {}
        folder = resources.files("fedquilt.tools.dash") / "static"
        files = {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "index.html"}
        digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:12]
        self._files = {f"/static/{digest}/{name}": body for name, body in files.items()}
        self._shell = (folder / "index.html").read_bytes().replace(b"{static}", f"/static/{digest}".encode())

    def app(self) -> ASGIApp:
        """The application; every answer passes its guard."""
        shells = ("/", "/boards/{name}", "/runs", "/runs/{run}", "/rollouts", "/rollouts/{rollout}", "/log")
        routes = [
            *(Route(path, self._page) for path in shells),
            Route("/static/{digest}/{name}", self._file),
            Route("/api/fleet", self._json(lambda r: pages.fleet(self._watch, _query(r)))),
            Route("/api/boards/{name}", self._json(lambda r: pages.board(self._watch, _word(r, "name"), _query(r)))),
            Route("/api/runs", self._json(lambda r: pages.runs(self._watch, _query(r)))),
            Route("/api/runs/{run}", self._json(lambda r: pages.run_values(self._watch, _word(r, "run")))),
            Route("/api/runs/{run}/why", self._json(lambda r: pages.reasons(self._watch, _word(r, "run"), _query(r)))),
            Route("/api/runs/{run}/report", self._report),
            Route("/api/runs/{run}/{what:str}", self._act, methods=["POST"]),
            Route("/api/rollouts", self._json(lambda r: rollouts.listed(self._watch))),
            Route("/api/rollouts/{rollout}", self._json(lambda r: rollouts.one(self._watch, _word(r, "rollout")))),
            Route("/api/rollouts/{rollout}/{what:str}", self._steer, methods=["POST"]),
            Route("/api/log", self._json(lambda r: pages.lines(self._watch, _query(r)))),
            Route("/api/events", self._events),
            Route("/api/session", self._session, methods=["GET", "POST"]),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http, FedquiltError: _failed, Exception: _odd}
        return Guarded(Starlette(routes=routes, exception_handlers=handlers), self._names)

    # -- pages --

    async def _page(self, request: Request) -> Response:
        return Response(self._shell, media_type="text/html", headers={"cache-control": "no-cache"})

    async def _file(self, request: Request) -> Response:
        body = self._files.get(request.url.path)
        if body is None:
            raise HTTPException(404)
        kind = KINDS[request.url.path[request.url.path.rindex(".") :]]
        return Response(body, media_type=kind, headers={"cache-control": "max-age=31536000, immutable"})

    async def _report(self, request: Request) -> Response:
        found = await self._watch.follower(_word(request, "run"))
        summary = await self._watch.aside(found.summary)
        page = await self._reports.page(found.row.id, f"{summary['done']} {found.row.status}")
        return Response(page, media_type="text/html", headers={**guard.REPORT, "cache-control": "no-cache"})

    # -- values --

    def _json(self, told: Told) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            key, stamp = f"{request.url.path}?{request.url.query}", dict(self._watch.changes)
            kept = self._answers.pop(key, None)
            if kept is None or kept[0] != stamp or time.monotonic() > kept[1] + ANSWER_S:
                kept = (stamp, time.monotonic(), msgspec.json.encode(await told(request)))
            while len(self._answers) >= ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = kept
            return _values(kept[2])

        return answer

    async def _events(self, request: Request) -> Response:
        async def told() -> AsyncIterator[bytes]:
            async with aclosing(self._watch.news()) as news:
                async for changes in news:
                    yield _event(changes)

        return StreamingResponse(told(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    # -- what can be done --

    async def _session(self, request: Request) -> Response:
        door, headers = self._door, {}
        knows = door is not None and door.knows(request.headers)
        if request.method == "POST":
            if door is None:
                raise HTTPException(403, "this dashboard only shows: start it with --actions")
            try:
                given = msgspec.json.decode(await _body(request), type=dict[str, str]).get("token")
            except msgspec.MsgspecError:
                given = None
            if not door.opens(given):
                raise HTTPException(403, "that is not the token of this start: open the address that was printed last")
            headers, knows = {"set-cookie": door.cookie()}, True
        told = {
            "version": __version__,
            "home": str(self._watch.home),
            "actions": door is not None,
            "proof": door.proof if door is not None and knows else None,
        }
        return _values(msgspec.json.encode(told), headers=headers)

    async def _act(self, request: Request) -> Response:
        what = await self._allowed(request, ("approve", "stop", "resume"))
        row = await self._watch.row(_word(request, "run"))
        return _asked(what, await self._watch.aside(lambda: _done(what, self._watch, row.id)))

    async def _steer(self, request: Request) -> Response:
        what = await self._allowed(request, rollouts.WISHES)
        return _asked(what, await rollouts.act(self._watch, _word(request, "rollout"), what))

    async def _allowed(self, request: Request, known: Collection[str]) -> str:
        """What a request asks to be done, if it is known and the door allows it.

        Raises:
            HTTPException: it is not.
        """
        await _body(request)
        door, what = self._door, _word(request, "what")
        if what not in known:
            raise HTTPException(404)
        if door is None:
            raise HTTPException(403, "this dashboard only shows: start it with --actions")
        if not door.allows(request.headers):
            raise HTTPException(403, "this needs the address with the token that `fedquilt dash --actions` printed")
        return what


def _asked(what: str, said: str) -> Response:
    """Answer to a request to do something, which is logged."""
    log.warning("%s was asked for from the dashboard: %s", what, said)
    return _values(msgspec.json.encode({"said": said}))


def _done(what: str, watch: Watch, run: str) -> str:
    """Do what is asked with a run, and say what comes of it."""
    with store.Store(watch.home) as written:
        if what == "approve":
            return requests.approve(written, run)
        if what == "stop":
            return requests.stop(written, run)
        if not written.served():
            raise JobError(
                f"no coordinator serves {watch.home}: `fedquilt resume {run} --home {watch.home}` is one that goes on"
            )
        return f"{requests.resume(written, run).id} goes on at the coordinator's next look at its store"


class Guarded:
    """An application whose answers all have the headers of `guard`, and that no page of somebody else's asks."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in guard.HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in known)]
            await send(message)

        request = Request(scope)
        acts = request.method not in ("GET", "HEAD")
        said = guard.refusal_reason(request.headers, self._names, acts=acts)
        if said is None and len(scope.get("query_string", b"")) > MOST_QUERY:
            said = "so long a question has no answer here"
        if said is not None:
            return await _problem(403, said)(scope, receive, headed)
        return await self._app(scope, receive, headed)


def _values(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    headers = {"cache-control": "no-store", **(headers or {})}
    return Response(body, status, media_type="application/json", headers=headers)


def _problem(status: int, said: str) -> Response:
    return _values(msgspec.json.encode({"problem": said}), status)


async def _http(request: Request, error: HTTPException) -> Response:
    return _problem(error.status_code, error.detail)


async def _failed(request: Request, error: FedquiltError) -> Response:
    status = 409
    if isinstance(error, MissingRunError | pages.MissingBoardError):
        status = 404
    elif isinstance(error, StoreError):
        status = 503
    return _problem(status, str(error))


async def _odd(request: Request, error: Exception) -> Response:
    log.error("no answer to %s: %r", request.url.path, error)
    return _problem(500, "an error of fedquilt's own; its log says more")


def _query(request: Request) -> dict[str, str]:
    return dict(parse_qsl(request.url.query))


def _word(request: Request, name: str) -> str:
    return str(request.path_params[name])


async def _body(request: Request) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: it is longer than any that is asked for here.
    """
    found = b""
    async for piece in request.stream():
        found += piece
        if len(found) > MOST_BODY:
            raise HTTPException(413, "so long a request has no answer here")
    return found


def _event(changes: dict[str, int] | None) -> bytes:
    return b": still here\n\n" if changes is None else b"data: " + msgspec.json.encode(changes) + b"\n\n"
