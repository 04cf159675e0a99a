"""Web dashboard of a fleet and its runs, based on a coordinator's databases.

The dashboard writes nothing, except requests to approve, stop or resume runs. No other process depends on it. All
pages are files of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from fedquilt import extras, metrics_endpoint, systemd
from fedquilt.coordinator import settings
from fedquilt.host import disk
from fedquilt.host.http_server import ConnectionLimiter, open_listener, raise_descriptor_limit

TOKEN_FILE: Final = "dash.token"  # noqa: S105  # a file's name


def serve_dashboard(
    home: Path,
    listen: str,
    *,
    actions: bool,
    names: Collection[str] = (),
    print_line: Callable[[str], None] = print,
    connections: ConnectionLimiter | None = None,
) -> None:
    """Serve the dashboard of a home until KeyboardInterrupt. `names` are permitted host names.

    With `actions`, write the token into the home. Raise JobError if `listen` cannot be used or a library is missing.
    """
    raise_descriptor_limit()
    uvicorn: Any = extras.load_optional("uvicorn")
    extras.load_optional("starlette")
    from fedquilt.tools.operations.access_control import AccessPolicy
    from fedquilt.tools.operations.dash import app
    from fedquilt.tools.operations.dash.app import Dashboard
    from fedquilt.tools.operations.dash.home_watcher import HomeWatcher

    connections = ConnectionLimiter(settings.load_limits(home).http) if connections is None else connections
    with contextlib.closing(open_listener(*metrics_endpoint.parse_listen_address(listen))) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        access_policy = AccessPolicy(port=port) if actions else None
        if access_policy is not None:
            write_token(home, access_policy.token)  # may fail, so before the address is printed
        print_line(f"dashboard of {home}: {url}")
        if access_policy is not None:
            token = f"WORD, the word in {home / TOKEN_FILE}" if systemd.is_journal_stream() else access_policy.token
            print_line(f"to approve, stop and resume runs, open {url}#token={token}")

        async def serve() -> None:
            watch = HomeWatcher(home)
            config = uvicorn.Config(
                Dashboard(watch, access_policy, names).make_app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                ws="none",
                http=app.make_limited_protocol(connections),
                timeout_graceful_shutdown=2,
            )
            server = uvicorn.Server(config)
            poll = asyncio.create_task(watch.poll_databases())
            reads = asyncio.create_task(watch.read_logs())
            for background_task in (poll, reads):  # a dashboard that cannot read must not show old data
                background_task.add_done_callback(lambda task: setattr(server, "should_exit", True))
            closing = asyncio.create_task(_close_watch_on_exit(server, watch))
            deadline_task = asyncio.create_task(app.close_late_connections(connections, server))
            try:
                await server.serve([listener])
            finally:
                watch.close()
                await asyncio.gather(poll, reads, closing, deadline_task, return_exceptions=True)
                watch.close_databases()
            poll.result()
            reads.result()

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())


async def _close_watch_on_exit(server: Any, watcher: Any) -> None:
    # the server waits for the event streams, which end when the watcher is closed
    while not server.should_exit:
        await asyncio.sleep(0.2)
    watcher.close()


def write_token(home: Path, token: str) -> None:
    with disk.disk_errors(f"write {home / TOKEN_FILE}"):
        disk.PRIVATE.write_atomically(home / TOKEN_FILE, f"{token}\n".encode(), durable=False)
