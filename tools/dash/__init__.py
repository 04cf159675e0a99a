"""`fedquilt dash`: a fleet and its runs in a browser, from what a coordinator has stored.

It reads the home's databases and writes nothing, unless it is asked to approve, stop or resume a run. Nothing else
knows of it: it may end at any moment. Pages are this package's own files, and need nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from fedquilt import disk, extras, open_metrics, systemd
from fedquilt.connections import Connections, raise_descriptor_limit
from fedquilt.coordinator import limits
from fedquilt.core import JobError

TOKEN: Final = "dash.token"  # noqa: S105  # a file's name
BACKLOG: Final = 128


def main(
    home: Path,
    listen: str,
    *,
    actions: bool,
    names: Collection[str] = (),
    say: Callable[[str], None] = print,
    connections: Connections | None = None,
) -> None:
    """Serve the dashboard of a home until the process is told to end.

    Args:
        home: folder of a coordinator, which need not run.
        listen: HOST:PORT, port 0 for any that is free.
        actions: whether runs can be approved, stopped and resumed by whoever has the token.
        names: by which the dashboard may be called besides addresses and localhost.
        say: prints a line.
        connections: limits on the connections, or None for those of the home's limits.toml.

    Raises:
        JobError: no such address, one that is taken, a limits.toml that is malformed, or starlette and uvicorn are not
            installed.
        StoreError: the token cannot be written.
    """
    raise_descriptor_limit()
    uvicorn: Any = extras.load("uvicorn")
    extras.load("starlette")
    from fedquilt.tools.dash import limited
    from fedquilt.tools.dash.app import Dash
    from fedquilt.tools.dash.guard import Door
    from fedquilt.tools.dash.watch import Watch

    connections = Connections(limits.load_limits(home).http) if connections is None else connections
    with contextlib.closing(_socket(listen)) as place:
        host, port = place.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        door = Door(port=port) if actions else None
        if door is not None:
            write_token(home, door.token)  # before an address is told: this may fail
        say(f"dashboard of {home}: {url}")
        if door is not None:
            token = f"WORD, the word in {home / TOKEN}" if systemd.journaled() else door.token
            say(f"to approve, stop and resume runs, open {url}#token={token}")

        async def serve() -> None:
            watch = Watch(home)
            settings = uvicorn.Config(
                Dash(watch, door, names).app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=limited.limited_protocol(connections),
                timeout_graceful_shutdown=2,
            )
            server = uvicorn.Server(settings)
            poll = asyncio.create_task(watch.poll())
            reads = asyncio.create_task(watch.read_logs())
            for each in (poll, reads):  # without them nothing is live: better an end than a page that stands still
                each.add_done_callback(lambda task: setattr(server, "should_exit", True))
            closing = asyncio.create_task(_closing(server, watch))
            late = asyncio.create_task(limited.close_late_connections(connections, server))
            try:
                await server.serve([place])
            finally:
                watch.close()
                await asyncio.gather(poll, reads, closing, late, return_exceptions=True)
                watch.shut()
            poll.result()
            reads.result()

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())


async def _closing(server: Any, watch: Any) -> None:
    """End the connections of those who watch as soon as the server is to end, which waits for them."""
    while not server.should_exit:
        await asyncio.sleep(0.2)
    watch.close()


def _socket(listen: str) -> socket.socket:
    host, port = open_metrics.address(listen)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        place = socket.socket(family)
        try:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(address)
            place.listen(BACKLOG)
        except BaseException:
            place.close()
            raise
    except OSError as error:
        raise JobError(f"no dashboard can be served at {listen}: {error.strerror}; choose another --listen") from None
    return place


def write_token(home: Path, token: str) -> None:
    """Write the token of this start into the home, where nobody else can read it from its first byte.

    Raises:
        StoreError: it cannot be written.
    """
    with disk.doing(f"write {home / TOKEN}"):
        disk.PRIVATE.put(home / TOKEN, f"{token}\n".encode(), durable=False)
