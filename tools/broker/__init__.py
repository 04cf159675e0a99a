"""Embedded MQTT broker (amqtt in a thread) for demos, tests and small networks.

The broker supports MQTT 3.1.1 only, stores everything in memory and does not limit its queues. Use Mosquitto for a
site. An address other than loopback requires a password file: `python -m fedquilt.tools.broker USER` prints a line of
it.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from fedquilt import metrics_endpoint
from fedquilt.core import JobError, LinkError
from fedquilt.host.http_server import describe_listen_error

START_S = 60.0
STOP_S = 5.0


class EmbeddedBroker:
    """MQTT 3.1.1 broker in this process, as a context manager or by `start` and `stop`.

    Args:
        host: Address to listen on.
        port: Port to listen on, or 0 for a free port.
        password_file: File of users and argon2 hashes. Without the file, everyone may connect.

    Raises:
        JobError: If the broker would be open to a network, or the password file is unusable.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, password_file: str | Path | None = None) -> None:
        self.host = host
        self.port = port
        self.password_file = None if password_file is None else Path(password_file)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        if self.password_file is not None:
            _require_valid_password_file(self.password_file)
        elif not metrics_endpoint.is_loopback(host):
            raise JobError(
                f"broker on {host} would be open to the network: add --password-file "
                "(python -m fedquilt.tools.broker USER prints a line of it)"
            )

    @property
    def url(self) -> str:
        return f"mqtt://{self.host}:{self.port}"

    def start(self) -> EmbeddedBroker:
        """Start the broker in a thread, which runs until `stop`.

        Raises:
            JobError: If amqtt is not installed.
            LinkError: If the address is in use, or the broker does not listen within START_S.
        """
        try:
            from fedquilt.tools.broker.amqtt_fixes import PatchedBroker
        except ModuleNotFoundError:
            raise JobError("amqtt is not installed: pip install 'fedquilt[demo]'") from None
        for name in ("amqtt", "transitions"):  # they log three lines for each connection
            logging.getLogger(name).setLevel(logging.CRITICAL)
        ready = threading.Event()
        failures: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._run_event_loop, args=(PatchedBroker, ready, failures), name="broker", daemon=True
        )
        self._thread.start()
        if not ready.wait(START_S):  # an interrupted import can leave Python's import lock acquired
            self._thread = None
            raise LinkError(f"embedded broker did not start within {START_S:g} s: run the command again")
        if failures:
            self._thread.join()
            self._thread = None
            problem = describe_listen_error(failures[0])
            fix = "choose another port, or stop the program that uses it"
            raise LinkError(f"cannot listen on {self.host}:{self.port} ({problem}): {fix}")
        return self

    def stop(self) -> None:
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- in the thread ----------------------------------------------------------------------------

    def _run_event_loop(
        self, make_broker: Callable[[dict[str, Any]], Any], ready: threading.Event, failures: list[BaseException]
    ) -> None:
        try:
            asyncio.run(self._serve_until_stop(make_broker, ready))
        except Exception as error:
            failures.append(error)
        finally:
            ready.set()

    async def _serve_until_stop(self, make_broker: Callable[[dict[str, Any]], Any], ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda loop, context: None)  # amqtt leaves tasks of lost clients behind
        auth: dict[str, Any] = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
        if self.password_file is not None:
            auth = {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(self.password_file)}}
        listener = {"type": "tcp", "bind": f"{self.host}:{self.port}"}
        broker = make_broker({"listeners": {"default": listener}, "plugins": auth})
        await broker.start()
        self.port = broker.port
        ready.set()
        await self._stop.wait()
        await asyncio.wait([asyncio.ensure_future(broker.shutdown())], timeout=STOP_S)


# -- passwords ------------------------------------------------------------------------------------


def _require_valid_password_file(path: Path) -> None:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"password file {path} cannot be read: {error}") from None
    if not lines or not all(":$argon2" in line for line in lines):
        fix = "python -m fedquilt.tools.broker USER prints such a line"
        raise JobError(f"password file {path} has lines other than USER:HASH with argon2 hashes, or none: {fix}")


def format_password_line(user: str, password: str) -> str:
    """Return a line of a password file: the user and an argon2 hash, without a newline.

    Raises:
        JobError: If the user's name has a colon or white space, or a value is empty.
    """
    from pwdlib import PasswordHash
    from pwdlib.hashers.argon2 import Argon2Hasher

    if not user or not password or ":" in user or user.split() != [user]:
        raise JobError(f"user {user!r} has a colon or white space, or user or password is empty: choose others")
    return f"{user}:{PasswordHash((Argon2Hasher(),)).hash(password)}"


def serve_foreground(host: str, port: int, password_file: str | Path | None = None) -> None:
    stopped = threading.Event()
    with EmbeddedBroker(host, port, password_file) as broker:
        signal.signal(signal.SIGTERM, lambda signum, frame: stopped.set())
        print(f"listening on {broker.url} (MQTT 3.1.1); Ctrl-C ends it", flush=True)
        stopped.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fedquilt.tools.broker USER >> PASSWORD_FILE")
    print(format_password_line(sys.argv[1], getpass.getpass()))
