"""Connection to a Ray cluster: by address, of this machine, or newly started."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedquilt import extras
from fedquilt.tools.simulation.workers.protocol import KEPT, SCHEME, SINGLE, PoolError

log = logging.getLogger("fedquilt.simulation")

STORE_BYTES: Final = 256 << 20  # of the object store of a Ray that is started here; what is more goes to its disk
KNOCK_S: Final = 10.0
ATTEMPTS: Final = 3  # at a client server
QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is reported to Ray's makers
# A Ray that listens on 127.0.0.1 alone, and whose workers have the priority of the command and not 15 steps less.
ALONE: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}

VERSIONS: Final = re.compile(r"Ray: (\S+) Python: (\S+)")  # of the cluster and of this process, in Ray's complaint

TOKEN: Final = {"RAY_AUTH_MODE": "token"}


class RayConnection(NamedTuple):
    ray: Any  # the module
    ours: bool  # whether it is to be closed at the end: the program was not connected before
    own: bool  # whether this Ray was started for the run, with the workers' environment


def find_ray_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of the Ray cluster that this machine is a node of, or None.

    The address is RAY_ADDRESS, or the one that `ray start` has stored. Ray itself would also accept a cluster that
    another program has started for its own use.
    """
    if address := environ.get("RAY_ADDRESS"):
        return address
    noted = Path(environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108
    try:
        return noted.read_text().strip() or None
    except OSError:
        return None


def connect_to_ray(engine: str, processors: int | None) -> RayConnection:
    """Import Ray, and connect to a cluster unless this process is connected already."""
    there = engine if engine != "ray" else find_ray_address(os.environ)
    how: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not there:
        how |= {
            "num_cpus": processors or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    locked = engine.startswith(SCHEME) and "RAY_AUTH_MODE" not in os.environ and _has_token(os.environ)
    kept = {**QUIET, **({} if there else {**SINGLE, **KEPT, **ALONE}), **(TOKEN if locked else {})}
    with _set_environment(kept):
        ray = extras.load_optional("ray")
        if ray.is_initialized():
            return RayConnection(ray, ours=False, own=False)
        try:
            if there:
                _require_listener(there)
            if locked:
                ray._raylet.Config.initialize("")  # the environment again, where Ray was imported before
            _init_ray(ray, there, how)
        except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            raise PoolError(_format_connection_error(ray, there, " ".join(str(error).split()))) from None
    return RayConnection(ray, ours=True, own=not there)


def _has_token(environ: Mapping[str, str]) -> bool:
    # a head node enables tokens if it finds one, but a client needs TOKEN to send it
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    return (
        bool(environ.get("RAY_AUTH_TOKEN")) or (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()
    )


def _format_connection_error(ray: Any, there: str | None, said: str) -> str:
    if not there:
        return f"Ray could not be started ({said[:300]}): `fedquilt simulate --engine pool` needs none"
    told = VERSIONS.findall(said)
    if len(told) == 2:
        (theirs, their_python), (ours, our_python) = told
        return (
            f"the cluster at {there} runs Ray {theirs} on Python {their_python}, and this command Ray {ours} on Python "
            f"{our_python}: they have to be the same. Install the cluster's here (pip install 'ray[client]=={theirs}', "
            "on its Python), or this command's on all of its nodes"
        )
    return (
        f"no Ray could be reached at {there} ({said[:300]}): it has to run the same versions of Ray and Python (here "
        f"Ray {ray.__version__}), with the same token (~/.ray/auth_token); {SCHEME}HOST:PORT names a cluster's client "
        "server, port 10001 unless told otherwise; `ray stop` forgets a Ray of this machine that is gone"
    )


def _init_ray(ray: Any, there: str | None, how: Mapping[str, Any]) -> None:
    # the first process of a client server sometimes ends during its start, so the connection is tried again
    for left in reversed(range(ATTEMPTS)):
        try:
            with _restore_sigterm_handler():
                ray.init(address=there or "local", **how)
            return
        except ConnectionAbortedError as error:
            if not left:
                raise
            log.warning("the client server at %s had no process for this command, and is asked again: %s", there, error)


def _require_listener(address: str) -> None:
    # Ray itself waits for minutes for a cluster that is gone
    host, colon, port = address.removeprefix(SCHEME).rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK_S):
            pass


@contextlib.contextmanager
def _set_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _restore_sigterm_handler() -> Iterator[None]:
    # ray.init replaces the handler
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # in another thread than the main one, where Ray handles none either
            signal.signal(signal.SIGTERM, before)
