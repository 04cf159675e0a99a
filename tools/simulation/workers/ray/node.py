"""Worker of a pool as an actor on a node of a Ray cluster.

Arguments and replies are messages of the pool's protocol as bytes in our own encoding, and references to such bytes in
Ray's object store. The workers of a node share a folder, in which each file is stored once under its sha256.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from fedquilt.core import StoreError
from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.tools.simulation import adversaries, machines
from fedquilt.tools.simulation.scratch_folders import SharedFolder
from fedquilt.tools.simulation.workers import worker
from fedquilt.tools.simulation.workers.protocol import PoolSetup, WorkBatch

log = logging.getLogger("fedquilt.simulation")

MOST_BYTES: Final = 1 << 30  # of a node's files beside the examples; those used longest ago go first
Fetch = Callable[[Any], bytes]
"""Bytes of a reference into the object store."""


class WorkerSetup(msgspec.Struct, frozen=True):
    engine: str
    modules: tuple[str, ...]  # of plug-ins, whose content it reports
    folder: str  # name of the folder that the workers of its node share


def unpack_request(order: WorkRequest, find: Callable[[str], str], cache: str, out: str) -> WorkRequest:
    """Return the work request with paths of this machine. `find` returns the path of a sha256."""
    if (honest := adversaries.honest_file(order)) is not None:
        order = adversaries.add_honest_mean(order, find(honest))
    return replace(
        order,
        bundles={name: find(sha256) for name, sha256 in order.bundles.items()},
        private=None if order.private is None else find(order.private),
        cache=f"{cache}/{order.device}",
        out=out,
    )


class NodeFiles:
    """Content-addressed files that the workers of a node share.

    Files in use are also linked into the worker's own folder.
    """

    def __init__(self, folder: Path, own: Path, fetch: Fetch, most_bytes: int = MOST_BYTES) -> None:
        self._shared, self._own, self._fetch, self._most = folder / "files", own, fetch, most_bytes
        for each in (self._shared, own):
            each.mkdir(exist_ok=True)

    def ensure_file(self, sha256: str, reference: Any) -> str:
        """Return the path of a file with this sha256, fetched from the object store if missing."""
        path = self._own / sha256
        if not path.exists():
            try:
                os.link(self._shared / sha256, path)
                os.utime(path)
            except FileNotFoundError:
                self.store_file(sha256, self._fetch(reference))
        return str(path)

    def store_file(self, sha256: str, payload: bytes) -> None:
        """Write a file for all workers of the node."""
        if hashlib.sha256(payload).hexdigest() != sha256:
            raise StoreError(f"content {sha256[:12]} came damaged from the object store")
        part = self._own / "part"
        part.write_bytes(payload)
        os.replace(part, self._own / sha256)
        with contextlib.suppress(FileExistsError):
            os.link(self._own / sha256, self._shared / sha256)

    def evict_files(self, used: Sequence[str]) -> None:
        """Unlink this worker's files that are not in `used`, and the oldest shared files above the limit."""
        for each in os.scandir(self._own):
            if each.name not in used:
                os.unlink(each.path)
        found = []
        for each in os.scandir(self._shared):
            with contextlib.suppress(FileNotFoundError):  # another worker gave it up
                found.append((each.stat().st_mtime, each.stat().st_size, each.path))
        held = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if held <= self._most:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            held -= size


class RayNode:
    """Worker as a Ray actor. All methods take and return msgpack bytes."""

    def __init__(self, asked: bytes) -> None:
        import ray

        self._asked = msgspec.msgpack.decode(asked, type=WorkerSetup)
        self._fetch: Fetch = ray.get
        self._worker: worker.PoolWorker | None = None

    def hello(self) -> bytes:
        """Import the engine, and return the encoded `machines.Machine` of this node."""
        told = machines.describe_this_machine(self._asked.modules)
        worker.import_engine(self._asked.engine)
        self._common = SharedFolder(self._asked.folder)
        self._own = self._common.path / f"worker-{os.getpid()}"
        self._out = self._common.path / f"made-{os.getpid()}"
        self._files = NodeFiles(self._common.path, self._own, self._fetch)
        return msgspec.msgpack.encode(told)

    def begin(self, begin: bytes, pieces: Sequence[Any]) -> bytes:
        """Receive the examples. Only the first worker of a node fetches them. Return empty bytes."""
        setup = msgspec.msgpack.decode(begin, type=PoolSetup)
        path = self._common.path / "examples"
        with (self._common.path / "examples.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self._fetch_examples(path, setup.examples, pieces)
        self._worker = worker.PoolWorker(replace(setup, examples=str(path)))
        return b""

    def answer(self, parcel: bytes, offered: Sequence[Any]) -> bytes:
        """Run work requests and return an encoded `WorkerReply`."""
        told = msgspec.msgpack.decode(parcel, type=WorkBatch)
        references = dict(zip(told.contents, offered, strict=True))
        caches = f"{self._common.path}/caches"

        def find(sha256: str) -> str:
            return self._files.ensure_file(sha256, references[sha256])

        orders = tuple(unpack_request(each, find, caches, str(self._out)) for each in told.orders)
        assert self._worker is not None
        reply = self._worker.run_batch(WorkBatch(orders, told.together))
        for each in reply.done:
            if each.outcome.code == "disk":
                raise StoreError(each.outcome.reason)
        private = {}
        for order, each in zip(orders, reply.done, strict=True):
            if (left := each.outcome.private) is not None:
                payload = Path(f"{order.out}/{order.prefix}{PRIVATE}").read_bytes()
                private[left.sha256] = payload
                self._files.store_file(left.sha256, payload)
        self._files.evict_files(told.contents)
        shutil.rmtree(self._out, ignore_errors=True)
        return msgspec.msgpack.encode(replace(reply, private=private))

    def leave(self) -> bytes:
        """Delete the files of this worker, and those of the node with its last worker. Return empty bytes."""
        for each in (self._own, self._out):
            shutil.rmtree(each, ignore_errors=True)
        self._common.release()
        return b""

    def _fetch_examples(self, path: Path, sha256: str, pieces: Sequence[Any]) -> None:
        digest, part = hashlib.sha256(), path.with_suffix(".part")
        with part.open("wb") as file:
            for each in pieces:
                payload = self._fetch(each)
                digest.update(payload)
                file.write(payload)
        if digest.hexdigest() != sha256:
            raise StoreError("the examples came damaged from the object store")
        os.replace(part, path)
