"""Give root's rights up: `python dropped.py PIPE UID GID FOLDERS WORD...` does so, and becomes a command.

    PIPE       descriptor that is closed as the command begins
    UID, GID   of an ordinary user
    FOLDERS    to which that user needs a way, with colons between them

It has the standard library alone, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

PR_SET_DUMPABLE = 4
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def drop(uid: int, gid: int, folders: Iterable[Path]) -> None:
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        _open_folders(libc, set(folders))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own files in /proc are root's
    os.umask(0o077)


def _open_folders(libc: ctypes.CDLL, folders: set[Path]) -> None:
    closed = {above for place in folders for above in (place, *place.parents) if not above.stat().st_mode & 0o001}
    closed_tops = {one for one in closed if not closed & set(one.parents)}
    if not closed_tops or libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return
    for top in closed_tops:
        inside = sorted(place for place in folders if top in place.parents)
        inside = [place for place in inside if not {*place.parents} & {*inside}]
        held = {place: os.open(place, os.O_PATH) for place in inside}
        libc.mount(b"tmpfs", bytes(top), b"tmpfs", 0, b"mode=0755")
        before = os.umask(0o022)
        for place, handle in held.items():
            place.mkdir(parents=True)
            libc.mount(f"/proc/self/fd/{handle}".encode(), bytes(place), None, MS_BIND | MS_REC, None)
            os.close(handle)
        os.umask(before)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    drop(int(sys.argv[2]), int(sys.argv[3]), map(Path, sys.argv[4].split(":")))
    os.execvp(sys.argv[5], sys.argv[5:])
