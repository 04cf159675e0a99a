"""Worker processes of a pool: `... worker PARENT ENGINE SOCKET:BLOBS...`.

The first process imports the engine and forks one more for each further pair of descriptors.
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

from fedquilt.arrays import tensors
from fedquilt.core import Examples
from fedquilt.edge_agent.task.process import exit_with_parent
from fedquilt.host.disk import write_fully
from fedquilt.tools.simulation.workers.local_backend import SharedTensors, WorkExecutor, make_engine, run_requests
from fedquilt.tools.simulation.workers.partial_sums import OutcomeSums
from fedquilt.tools.simulation.workers.processes import (
    LENGTH,
    DetachedResult,
    SharedMemorySum,
    detach_blobs,
    receive_message,
)
from fedquilt.tools.simulation.workers.protocol import ArrayLocation, PoolSetup, WorkBatch, WorkerReply, WorkOutcome


class PoolWorker(WorkExecutor):
    def __init__(self, setup: PoolSetup) -> None:
        super().__init__(self._load_device_examples, make=make_engine)
        self._shares_at, self._file = setup.shares, os.open(setup.examples, os.O_RDONLY)
        self._files, self._sums = SharedTensors(), OutcomeSums()

    def run_batch(self, work: WorkBatch) -> WorkerReply:
        """Run the work requests of a batch. If the reply promises a sum, `pack_sum` returns it next."""
        done = [WorkOutcome(*each) for each in run_requests([(self, order) for order in work.orders], work.together)]
        return WorkerReply(done, self._sums.prepare_sum(work.state, work.orders, [each.outcome for each in done]))

    def pack_sum(self) -> bytes:
        """Return the packed sum of the last reply's updates, or b"" if they cannot be summed."""
        return self._sums.pack_sum()

    def read_tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        return self._files(path, partial(tensors.read_tensors, sha256=sha256))

    def _load_device_examples(self, device: str) -> tuple[Examples, Examples]:
        share = self._shares_at[device]
        return self._read_examples(share.train), self._read_examples(share.held)

    def _read_examples(self, places: tuple[ArrayLocation, ArrayLocation]) -> Examples:
        # read, not mapped: mapped pages would count as memory of this process
        return Examples(*(self._read_array(place) for place in places))

    def _read_array(self, place: ArrayLocation) -> np.ndarray:
        found = np.empty(place.shape, place.dtype)
        if not found.nbytes:  # as of all who hold nothing out
            return found
        view, have = found.reshape(-1).view(np.uint8).data, 0
        while have < found.nbytes:
            have += os.preadv(self._file, [view[have:]], place.offset + have)
        return found


def import_engine(engine: str) -> None:
    module = "batch_engine" if engine in ("torch", "numpy") else "engine"
    importlib.import_module(f"fedquilt.edge_agent.engines.{engine}.{module}")
    gc.freeze()  # imported objects stay, so collections need not visit them


def serve_requests(orders: socket.socket, blobs: int, make: Callable[[PoolSetup], PoolWorker] = PoolWorker) -> None:
    """Run work requests from a socket until the socket is closed.

    Args:
        orders: Socket for requests and replies.
        blobs: Descriptor of a memory file, which receives the bytes of each reply and its sum.
        make: Factory of the worker.
    """
    first = receive_message(orders)
    if first is None:
        return
    worker = make(msgspec.msgpack.decode(first, type=PoolSetup))
    decoder, encoder = msgspec.msgpack.Decoder(WorkBatch), msgspec.msgpack.Encoder()

    def send_reply(what: DetachedResult | SharedMemorySum) -> None:
        payload = encoder.encode(what)
        orders.sendall(LENGTH.pack(len(payload)) + payload)

    while (order := receive_message(orders)) is not None:
        answer, pieces = detach_blobs(worker.run_batch(decoder.decode(order)))
        place = 0
        for piece in pieces:
            write_fully(blobs, piece, place)
            place += len(piece)
        send_reply(answer)
        if answer.answer.summed:
            packed = worker.pack_sum()
            write_fully(blobs, packed, place)
            send_reply(SharedMemorySum(place, len(packed)))


def run_workers() -> None:
    exit_with_parent(int(sys.argv[1]))
    import_engine(sys.argv[2])
    pairs = [(int(socket), int(blobs)) for socket, _, blobs in (each.partition(":") for each in sys.argv[3:])]
    mine, children = pairs[0], []
    for pair in pairs[1:]:
        if pid := os.fork():
            children.append(pid)
            continue
        exit_with_parent(os.getppid())
        mine, children = pair, []
        break
    for pair in pairs:
        for number in pair if pair != mine else ():
            os.close(number)
    serve_requests(socket.socket(fileno=mine[0]), mine[1])
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # regular exit of torch takes a second, and all results are sent


if __name__ == "__main__":
    run_workers()
