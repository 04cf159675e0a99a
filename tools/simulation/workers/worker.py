"""Worker processes of a pool: `... worker PARENT ENGINE PIPE:BLOBS...`.

The first process imports the engine and forks one more for each further pair of descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import DeviceUpdate, Examples, Method
from fedquilt.edge_agent.task.process import exit_with_parent
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.host.disk import write_fully
from fedquilt.tools.simulation.workers.local_backend import SharedTensors, WorkExecutor, make_engine, run_requests
from fedquilt.tools.simulation.workers.processes import SharedMemorySum, detach_blobs
from fedquilt.tools.simulation.workers.protocol import ArrayLocation, PoolSetup, WorkBatch, WorkerReply, WorkOutcome


class OutcomeSums:
    """Partial sums of updates, folded by the workers so that the coordinator merges few sums.

    Only updates with mergeable accumulators (`Aggregation.accumulator`) are summed, because their sums are
    bit-identical in any order and grouping. A sum counts only if the round counts exactly its updates
    (`coordinator.updates.aggregation`). Otherwise the updates are folded one by one.
    """

    def __init__(self) -> None:
        self._state: tuple[str, Any] = ("", None)  # the last one, and its file
        self._waiting: tuple[Method, list[DeviceUpdate]] | None = None  # what the next sum is of

    def prepare_sum(self, file: str, orders: Sequence[WorkRequest], outcomes: Sequence[WorkResult]) -> bool:
        """Validate updates for the next `pack_sum`. Return whether they can be summed.

        Args:
            file: File of the method state, or "" to disable folding.
            orders: Work requests of one round of a job.
            outcomes: Results of these requests, with the bytes of their bundles.
        """
        self._waiting = None
        with contextlib.suppress(Exception):  # the coordinator folds the same updates and reports the error
            if not file:
                return False
            method = methods.load(orders[0].task.method)
            if self._state[0] != file:
                self._state = file, tensors.unpack_state(Path(file).read_bytes(), method.state)
            if method.aggregation.accumulator(self._state[1]) is None:
                return False
            done = zip(orders, outcomes, strict=True)
            given = [_read_update(order, outcome) for order, outcome in done if outcome.code == "ok"]
            for each in given:
                method.aggregation.require_valid_update(self._state[1], each)
            self._waiting = (method, given) if given else None
        return self._waiting is not None

    def pack_sum(self) -> bytes:
        """Return the packed sum of the prepared updates, or b"" if they cannot be summed."""
        waiting, self._waiting = self._waiting, None
        with contextlib.suppress(Exception):  # the coordinator folds these updates one by one then
            assert waiting is not None
            method, given = waiting
            return tensors.pack_state(reduce(partial(method.aggregation.fold, self._state[1]), given, None))
        return b""


def _read_update(order: WorkRequest, outcome: WorkResult) -> DeviceUpdate:
    bundles = {name: tensors.decode_tensors(outcome.blobs[ref.sha256]) for name, ref in outcome.bundles.items()}
    return DeviceUpdate(order.device, order.task.round, outcome.weight, outcome.metrics, bundles)


class PoolWorker(WorkExecutor):
    def __init__(self, setup: PoolSetup) -> None:
        super().__init__(self._load_device_examples, make=make_engine)
        self._shares_at, self._file = setup.shares, os.open(setup.examples, os.O_RDONLY)
        self._files, self.sums = SharedTensors(), OutcomeSums()

    def run_batch(self, work: WorkBatch) -> WorkerReply:
        """Run the work requests of a batch. If the reply promises a sum, `sums.pack_sum` returns it next."""
        done = [WorkOutcome(*each) for each in run_requests([(self, order) for order in work.orders], work.together)]
        return WorkerReply(done, self.sums.prepare_sum(work.state, work.orders, [each.outcome for each in done]))

    def read_tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        return self._files(path, partial(tensors.read_tensors, sha256=sha256))

    def _load_device_examples(self, device: str) -> tuple[Examples, Examples]:
        share = self._shares_at[device]
        return self._read_examples(share.train), self._read_examples(share.held)

    def _read_examples(self, places: tuple[ArrayLocation, ArrayLocation]) -> Examples:
        # read, not mapped: mapped pages would count as memory of this process
        x, y = (self._read_array(place) for place in places)
        return Examples(x, y)

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


def serve_requests(orders: Connection, blobs: int) -> None:
    """Run work requests from a pipe until the pipe is closed.

    Args:
        orders: Pipe for requests and replies.
        blobs: Descriptor of a memory file, which receives the bytes of each reply and its sum.
    """
    messages = _receive_messages(orders)
    if (first := next(messages, None)) is None:
        return
    worker = PoolWorker(msgspec.msgpack.decode(first, type=PoolSetup))
    decoder, encoder = msgspec.msgpack.Decoder(WorkBatch), msgspec.msgpack.Encoder()
    for order in messages:
        answer, pieces = detach_blobs(worker.run_batch(decoder.decode(order)))
        place = 0
        for piece in pieces:
            write_fully(blobs, piece, place)
            place += len(piece)
        orders.send_bytes(encoder.encode(answer))
        if answer.answer.summed:
            packed = worker.sums.pack_sum()
            write_fully(blobs, packed, place)
            orders.send_bytes(encoder.encode(SharedMemorySum(place, len(packed))))


def _receive_messages(orders: Connection) -> Iterator[bytes]:
    with contextlib.suppress(EOFError, OSError):  # an OSError where the coordinator ends within a message
        while True:
            yield orders.recv_bytes()


def run_workers() -> None:
    """Fork a worker for each pair of descriptors in the arguments, and serve until the sockets close."""
    exit_with_parent(int(sys.argv[1]))
    import_engine(sys.argv[2])
    pairs = [(int(pipe), int(blobs)) for pipe, _, blobs in (each.partition(":") for each in sys.argv[3:])]
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
    serve_requests(Connection(mine[0]), mine[1])
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # regular exit of torch takes a second, and all results are sent


if __name__ == "__main__":
    run_workers()
