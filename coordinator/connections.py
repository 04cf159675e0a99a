"""Connections to a server, counted by who has them, so that nobody takes the places of all."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final, NamedTuple

MOST: Final = {  # connections at once
    "all": 256,
    "address": 128,  # of one address: the boards of a site may have one alone
    "unknown": 16,  # of one address, that have not shown whose they are
    "board": 8,  # of one board, which has two transfers at once; a connection that it has lost may stay for a while
}


class Share(NamedTuple):
    """Connections that are counted together."""

    kind: str  # a key of MOST
    name: str = ""  # of the address, or of the board


class Connections:
    """Number of open connections of each share; several threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[Share] = Counter()

    def __getitem__(self, share: Share) -> int:
        return self._open[share]

    def enter(self, *shares: Share) -> bool:
        """Count a connection in all of these shares; False: one of them is used up, and it is counted in none."""
        with self._lock:
            free = all(self._open[share] < MOST[share.kind] for share in shares)
            if free:
                self._open.update(shares)
        return free

    def leave(self, *shares: Share) -> None:
        """Count a connection no more."""
        with self._lock:
            self._open.subtract(shares)
            for share in shares:
                if not self._open[share]:
                    del self._open[share]
