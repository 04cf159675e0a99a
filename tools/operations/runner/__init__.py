"""Model runner on ONNX Runtime that loads new models while running and measures drift."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fedquilt import open_metrics
from fedquilt.core import JobError
from fedquilt.host import http_server
from fedquilt.tools.operations.runner.models import ModelSwitcher
from fedquilt.tools.operations.runner.service import ModelService

ENDING_S: Final = 5.0  # for which requests that have begun are waited for at the end
LOOK_S: Final = 0.2  # between two looks for a new model


def serve_model(
    place: Path,
    listen: str,
    *,
    anywhere: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Classify examples of HTTP requests until the process ends.

    Args:
        place: Model folder or file, as for `fedquilt.tools.operations.runner.models.resolve_model_file`.
        listen: HOST:PORT of the HTTP server, with port 0 for any free port.
        anywhere: Permit an address that other machines can reach.
        say: Function that prints a line.

    Raises:
        ModelError: If the model is missing or unusable.
        JobError: If the address is invalid, in use or reachable by others.
    """
    http_server.raise_descriptor_limit()
    address = _require_permitted_address(listen, anywhere)
    models = ModelSwitcher(place)
    service = ModelService(models, place if place.is_dir() else None)
    with contextlib.ExitStack() as stack:
        say(f"{models.now.network.model} answers at {stack.enter_context(_serve_http(service, address, anywhere))}")
        stack.callback(service.write_status)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                if models.reload_if_changed():
                    service.write_status()  # the agent waits for a word of the new model
                service.write_status_if_due()
                time.sleep(LOOK_S)


def _require_permitted_address(listen: str, anywhere: bool) -> tuple[str, int]:
    """Return host and port, or raise JobError if not a loopback address, unless `anywhere`."""
    host, port = open_metrics.parse_listen_address(listen)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise JobError(f"{listen!r} is no address here: {error.strerror}") from None
    if not anywhere and not ipaddress.ip_address(str(found).partition("%")[0]).is_loopback:
        raise JobError(
            f"--listen {listen}: other machines reach that, and whoever does may ask; say --listen-anywhere if that is "
            "wanted, or use 127.0.0.1"
        )
    return host, port


@contextlib.contextmanager
def _serve_http(service: ModelService, address: tuple[str, int], anywhere: bool) -> Iterator[str]:
    """Answer HTTP requests in threads while the body runs, and yield the URL."""
    from fedquilt.tools.operations.runner.http import RunnerServer

    try:
        server = RunnerServer(service, *address, anywhere=anywhere)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        mend = "another program listens there; choose another port" if taken else "choose another address"
        raise JobError(f"cannot answer at {address[0]}:{address[1]}: {error.strerror}; {mend} with --listen") from None
    server.start()
    try:
        yield server.url
    finally:
        server.close()
        end_s = time.monotonic() + ENDING_S
        while server.busy and time.monotonic() < end_s:
            time.sleep(0.02)
