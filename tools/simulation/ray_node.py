"""A worker of a pool on a node of a Ray cluster: it runs `pool_worker.Worker`, as the processes of one machine do.

Its arguments and answers are bytes of our own encoding, and references to such bytes in Ray's object store. What the
workers of a node have fetched or made lies in a folder that they share, each file once, named by its sha256.
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

from fedquilt.core import StoreError
from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.tools.simulation import machines, parcels, pool_worker
from fedquilt.tools.simulation.scratch import Common
from fedquilt.tools.simulation.workers import Work

log = logging.getLogger("fedquilt.simulation")

MOST_BYTES: Final = 1 << 30  # of a node's files beside the examples; those used longest ago go first
Fetch = Callable[[Any], bytes]
"""Bytes of a reference into the object store."""


class Files:
    """Files of a node by their content. A file in use has a second name, in its worker's own folder.

    Args:
        folder: that the workers of the node share.
        own: a folder of this worker alone.
        fetch: the bytes of a reference.
        most_bytes: what the shared files may hold together.
    """

    def __init__(self, folder: Path, own: Path, fetch: Fetch, most_bytes: int = MOST_BYTES) -> None:
        self._shared, self._own, self._fetch, self._most = folder / "files", own, fetch, most_bytes
        for each in (self._shared, own):
            each.mkdir(exist_ok=True)

    def find(self, sha256: str, reference: Any) -> str:
        """Path of a content: from this node, or fetched.

        Raises:
            StoreError: what was fetched is not that content, or cannot be written.
        """
        path = self._own / sha256
        if not path.exists():
            try:
                os.link(self._shared / sha256, path)
                os.utime(path)
            except FileNotFoundError:
                self.put(sha256, self._fetch(reference))
        return str(path)

    def put(self, sha256: str, payload: bytes) -> None:
        """Keep a content for all workers of the node.

        Raises:
            StoreError: it has another digest.
        """
        if hashlib.sha256(payload).hexdigest() != sha256:
            raise StoreError(f"content {sha256[:12]} came damaged from the object store")
        part = self._own / "part"
        part.write_bytes(payload)
        os.replace(part, self._own / sha256)
        with contextlib.suppress(FileExistsError):
            os.link(self._own / sha256, self._shared / sha256)

    def rest(self, used: Sequence[str]) -> None:
        """Give up this worker's names of files that were not used last, and the oldest files of a full folder."""
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


class Node:
    """What Ray makes an actor of. Every method takes and returns bytes; the last word of a failure is its error.

    Args:
        asked: `parcels.Asked`.
    """

    def __init__(self, asked: bytes) -> None:
        import ray

        self._asked = msgspec.msgpack.decode(asked, type=parcels.Asked)
        self._fetch: Fetch = ray.get
        self._worker: pool_worker.Worker | None = None

    def hello(self) -> bytes:
        """Import what is heavy; returns the machine, as `machines.Machine`."""
        told = machines.here(self._asked.modules)
        pool_worker.prepare(self._asked.engine)
        self._common = Common(self._asked.folder)
        self._own = self._common.path / f"worker-{os.getpid()}"
        self._out = self._common.path / f"made-{os.getpid()}"
        self._files = Files(self._common.path, self._own, self._fetch)
        return msgspec.msgpack.encode(told)

    def begin(self, begin: bytes, pieces: Sequence[Any]) -> bytes:
        """Have the examples, which one worker of the node fetches; nothing is returned.

        Raises:
            StoreError: they are not those that were sent.
        """
        told = msgspec.msgpack.decode(begin, type=parcels.Begin)
        path = self._common.path / "examples"
        with (self._common.path / "examples.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self._receive(path, told.sha256, pieces)
        self._worker = pool_worker.Worker(msgspec.structs.replace(told.setup, examples=str(path)))
        return b""

    def answer(self, parcel: bytes, offered: Sequence[Any]) -> bytes:
        """Carry orders out; returns `parcels.Made`.

        Args:
            parcel: `parcels.Parcel`.
            offered: references of the parcel's contents.

        Raises:
            StoreError: this node's disk failed, which is no fault of a device.
        """
        told = msgspec.msgpack.decode(parcel, type=parcels.Parcel)
        references = dict(zip(told.contents, offered, strict=True))
        caches = f"{self._common.path}/caches"

        def find(sha256: str) -> str:
            return self._files.find(sha256, references[sha256])

        orders = tuple(parcels.unpacked(each, find, caches, str(self._out)) for each in told.work.orders)
        assert self._worker is not None
        done = self._worker.answer(Work(orders, told.work.together)).done
        for each in done:
            if each.outcome.code == "disk":
                raise StoreError(each.outcome.reason)
        private = {}
        for order, each in zip(orders, done, strict=True):
            if (left := each.outcome.private) is not None:
                payload = Path(f"{order.out}/{order.prefix}{PRIVATE}").read_bytes()
                private[left.sha256] = payload
                self._files.put(left.sha256, payload)
        self._files.rest(told.contents)
        shutil.rmtree(self._out, ignore_errors=True)
        return msgspec.msgpack.encode(parcels.Made(done, private))

    def leave(self) -> bytes:
        """Give up this worker's files; those of the node go with its last worker."""
        for each in (self._own, self._out):
            shutil.rmtree(each, ignore_errors=True)
        self._common.leave()
        return b""

    def _receive(self, path: Path, sha256: str, pieces: Sequence[Any]) -> None:
        digest, part = hashlib.sha256(), path.with_suffix(".part")
        with part.open("wb") as file:
            for each in pieces:
                payload = self._fetch(each)
                digest.update(payload)
                file.write(payload)
        if digest.hexdigest() != sha256:
            raise StoreError("the examples came damaged from the object store")
        os.replace(part, path)
