"""Files that are opened while the process has no file descriptor left."""

import errno
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from fedquilt.host import disk
from fedquilt.host.disk import REAL

CALLS: dict[str, Callable[[Path], object]] = {
    "read": REAL.read,
    "read into": lambda path: REAL.read_into(path, bytearray(3), 0),
    "pieces": lambda path: [bytes(piece) for piece in REAL.read_pieces(path)],
    "write": lambda path: REAL.write(path, b"abc"),
    "write at": lambda path: REAL.write_at(path, b"c", 2),
    "open": lambda path: REAL.open(path).close(),
    "sync": REAL.sync,
    "entries": lambda path: REAL.entries(path.parent),
    "lock": lambda path: REAL.lock(path).release(),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_disk_waits_for_a_descriptor(tmp_path, monkeypatch, caplog, name):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    monkeypatch.setattr(disk.time, "sleep", sleep)
    lowest = os.dup(0)  # all below are in use
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        CALLS[name](path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (path.read_bytes(), len(waits)) == (b"abc", 3)
    logged = [(each.levelno, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in logged] == [logging.ERROR, logging.WARNING]
    assert os.strerror(errno.EMFILE) in logged[0][1]
