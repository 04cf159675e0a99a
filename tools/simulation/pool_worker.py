"""The work of a pool's workers (`Worker`), and their processes: `... pool_worker PARENT ENGINE SOCKET:BLOBS...`.

The first imports all that is heavy and forks one more for each further pair of descriptors.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.core import Examples
from fedquilt.edge_agent.task.process import die_with
from fedquilt.open_file import write_whole
from fedquilt.tools.simulation.hands import Bench, SharedFiles, carry_out, make_engine
from fedquilt.tools.simulation.processes import LENGTH, Apart, Behind, apart, receive
from fedquilt.tools.simulation.sums import Sums
from fedquilt.tools.simulation.workers import Answer, Done, Place, Setup, Work


class Worker(Bench):
    """Carries out what it is asked."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(self._share, make=make_engine)
        self._shares_at, self._file = setup.shares, os.open(setup.examples, os.O_RDONLY)
        self._files, self._sums = SharedFiles(), Sums()

    def answer(self, work: Work) -> Answer:
        """Carry out the orders of a package of work; `sum` may follow if their round's state is given."""
        done = [Done(*each) for each in carry_out([(self, order) for order in work.orders], work.together)]
        return Answer(done, self._sums.takes(work.state, work.orders, [each.outcome for each in done]))

    def sum(self) -> bytes:
        """Packed sum of the updates of the latest answer; b"": it cannot be made."""
        return self._sums.sum()

    def tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        """Tensors of a file, read once for several orders."""
        return self._files(path, partial(tensors.read, sha256=sha256))

    def _share(self, device: str) -> tuple[Examples, Examples]:
        share = self._shares_at[device]
        return self._read(share.train), self._read(share.held)

    def _read(self, places: tuple[Place, Place]) -> Examples:
        """Read, not mapped: pages that are mapped would count as this process's own."""
        return Examples(*(self._array(place) for place in places))

    def _array(self, place: Place) -> np.ndarray:
        found = np.empty(place.shape, place.dtype)
        if not found.nbytes:  # as of all who hold nothing out
            return found
        view, have = found.reshape(-1).view(np.uint8).data, 0
        while have < found.nbytes:
            have += os.preadv(self._file, [view[have:]], place.offset + have)
        return found


def prepare(engine: str) -> None:
    """Import what is heavy, before anything is asked."""
    name = f"{engine}_batched" if engine in ("torch", "numpy") else f"{engine}_engine"
    importlib.import_module(f"fedquilt.edge_agent.engines.{name}")
    gc.freeze()  # what is imported stays: no later collection has to go through it


def serve(orders: socket.socket, blobs: int, make: Callable[[Setup], Worker] = Worker) -> None:
    """Carry out what comes, until there is no more.

    Args:
        orders: they come here, and answers go.
        blobs: descriptor of a file in memory, which takes the bytes of an answer and its sum, one behind the other.
        make: makes the worker.
    """
    first = receive(orders)
    if first is None:
        return
    worker = make(msgspec.msgpack.decode(first, type=Setup))
    decoder, encoder = msgspec.msgpack.Decoder(Work), msgspec.msgpack.Encoder()

    def say(what: Apart | Behind) -> None:
        payload = encoder.encode(what)
        orders.sendall(LENGTH.pack(len(payload)) + payload)

    while (order := receive(orders)) is not None:
        answer, pieces = apart(worker.answer(decoder.decode(order)))
        place = 0
        for piece in pieces:
            write_whole(blobs, piece, place)
            place += len(piece)
        say(answer)
        if answer.answer.summed:
            packed = worker.sum()
            write_whole(blobs, packed, place)
            say(Behind(place, len(packed)))


def main() -> None:
    """Fork the workers and serve each one's socket until the parent ends."""
    die_with(int(sys.argv[1]))
    prepare(sys.argv[2])
    pairs = [(int(socket), int(blobs)) for socket, _, blobs in (each.partition(":") for each in sys.argv[3:])]
    mine, children = pairs[0], []
    for pair in pairs[1:]:
        if pid := os.fork():
            children.append(pid)
            continue
        die_with(os.getppid())
        mine, children = pair, []
        break
    for pair in pairs:
        for number in pair if pair != mine else ():
            os.close(number)
    serve(socket.socket(fileno=mine[0]), mine[1])
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # torch takes a second to go in good order, and everything has been said


if __name__ == "__main__":
    main()
