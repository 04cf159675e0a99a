"""`fedquilt serve-model`: a small runner on ONNX Runtime that takes up models as they come, and watches drift."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fedquilt import connections, open_metrics
from fedquilt.core import DataError, JobError
from fedquilt.tools.runner.models import Models
from fedquilt.tools.runner.service import Service
from fedquilt.tools.runner.sources import LOOK_S, Camera, Folder

ENDING_S: Final = 5.0  # for which requests that have begun are waited for at the end
FIRST_S: Final = 0.05  # until a camera is asked for its next picture


def main(
    place: Path,
    *,
    listen: str | None = None,
    folder: Path | None = None,
    camera: str | None = None,
    every_s: float = 1.0,
    threads: int = 0,
    labels: Path | None = None,
    anywhere: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Classify requests, or the files of a folder or camera, with a place's model until told to end.

    Args:
        place: as `fedquilt.tools.runner.models.target` takes it.
        listen: HOST:PORT to answer at, port 0 for any that is free; None: with `folder` or `camera`.
        folder: folder whose files are answered to.
        camera: path of a camera whose pictures are answered to.
        every_s: seconds between two pictures.
        threads: within one operation of the network; 0: one per core.
        labels: file with a name of a class in each line; None: as the network has them.
        anywhere: allow an address that other machines reach.
        say: takes a line.

    Raises:
        ModelError: there is no model, or it cannot be used.
        JobError: no such address, one that is taken or that others reach, or a package is missing.
        DataError: no such folder or camera, or the file of labels cannot be read.
    """
    connections.raise_descriptor_limit()
    address = None if listen is None else _address(listen, anywhere)
    models = Models(place, None if labels is None else read_labels(labels), threads=threads)
    service = Service(models, place if place.is_dir() else None)
    with contextlib.ExitStack() as stack:
        every = LOOK_S
        source: Folder | Camera | None = None
        if address is not None:
            say(f"{models.now.network.model} answers at {stack.enter_context(_serve_http(service, address, anywhere))}")
        elif folder is not None:
            source = Folder(service, folder, say)
        elif camera is not None:
            source = stack.enter_context(contextlib.closing(Camera(service, camera, every_s, say)))
            every = FIRST_S
        stack.callback(service.write)
        with contextlib.suppress(KeyboardInterrupt):
            look_s = 0.0
            while True:
                if source is not None:
                    source.step()
                if time.monotonic() >= look_s:
                    if models.look():
                        service.write()  # the agent waits for a word of the new model
                    service.step()
                    look_s = time.monotonic() + LOOK_S
                time.sleep(every)


def read_labels(path: Path) -> list[str]:
    """Names of classes, one a line.

    Raises:
        DataError: the file cannot be read, or holds none.
    """
    try:
        found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the labels in {path}: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise DataError(f"{path} holds no labels: write the name of a class in each line")
    return found


def _address(listen: str, anywhere: bool) -> tuple[str, int]:
    host, port = open_metrics.address(listen)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise JobError(f"{listen!r} is no address here: {error.strerror}") from None
    if not anywhere and not ipaddress.ip_address(str(found).partition("%")[0]).is_loopback:
        raise JobError(
            f"--http {listen}: other machines reach that, and whoever does may ask; say --listen-anywhere if that is "
            "wanted, or use 127.0.0.1"
        )
    return host, port


@contextlib.contextmanager
def _serve_http(service: Service, address: tuple[str, int], anywhere: bool) -> Iterator[str]:
    """Answer HTTP requests in threads while the body runs, and yield the URL."""
    from fedquilt.tools.runner.http import Server

    try:
        server = Server(service, *address, anywhere=anywhere)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        mend = "another program listens there; choose another port" if taken else "choose another address"
        raise JobError(f"cannot answer at {address[0]}:{address[1]}: {error.strerror}; {mend} with --http") from None
    server.start()
    try:
        yield server.url
    finally:
        server.close()
        end_s = time.monotonic() + ENDING_S
        while server.busy and time.monotonic() < end_s:
            time.sleep(0.02)
