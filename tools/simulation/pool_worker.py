"""The work of a pool's workers (`Worker`), and their processes: `python -m ...pool_worker PARENT ENGINE SOCKET...`.

The first imports all that is heavy and forks one more for each further socket.
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
from fedquilt.tools.simulation.hands import Bench, SharedFiles, carry_out, make_engine
from fedquilt.tools.simulation.processes import LENGTH, receive
from fedquilt.tools.simulation.workers import Done, Place, Setup, Work


class Worker(Bench):
    """Carries out what it is asked."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(self._share, make=make_engine)
        self._shares_at, self._file = setup.shares, os.open(setup.examples, os.O_RDONLY)
        self._files = SharedFiles()

    def answer(self, work: Work) -> list[Done]:
        """Carry out the orders of a package of work."""
        return [Done(*each) for each in carry_out([(self, order) for order in work.orders], work.together)]

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
    name = "torch_batched" if engine == "torch" else f"{engine}_engine"
    importlib.import_module(f"fedquilt.edge_agent.engines.{name}")
    gc.freeze()  # what is imported stays: no later collection has to go through it


def serve(orders: socket.socket, make: Callable[[Setup], Worker] = Worker) -> None:
    """Carry out what comes, until there is no more."""
    first = receive(orders)
    if first is None:
        return
    worker = make(msgspec.msgpack.decode(first, type=Setup))
    decoder, encoder = msgspec.msgpack.Decoder(Work), msgspec.msgpack.Encoder()
    while (order := receive(orders)) is not None:
        payload = encoder.encode(worker.answer(decoder.decode(order)))
        orders.sendall(LENGTH.pack(len(payload)))
        orders.sendall(payload)


def main() -> None:
    """Fork the workers and serve each one's socket until the parent ends."""
    die_with(int(sys.argv[1]))
    prepare(sys.argv[2])
    numbers = [int(number) for number in sys.argv[3:]]
    mine, children = numbers[0], []
    for number in numbers[1:]:
        if pid := os.fork():
            children.append(pid)
            continue
        die_with(os.getppid())
        mine, children = number, []
        break
    for number in numbers:
        if number != mine:
            os.close(number)
    serve(socket.socket(fileno=mine))
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # torch takes a second to go in good order, and everything has been said


if __name__ == "__main__":
    main()
