"""Messages that carry work requests to another machine.

`pack_request` replaces the path of each file with its sha256, `unpack_request` inserts the paths of the other
machine, and `write_outputs` writes the received outputs as a worker of this machine would have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.tools.simulation import adversaries
from fedquilt.tools.simulation.workers.protocol import PoolSetup, WorkBatch, WorkOutcome


class WorkerSetup(msgspec.Struct, frozen=True):
    engine: str
    modules: tuple[str, ...]  # of plug-ins, whose content it reports
    folder: str  # name of the folder that the workers of its node share


class ExamplesTransfer(msgspec.Struct, frozen=True):
    setup: PoolSetup  # its file is to be replaced
    sha256: str  # of the file


class WorkPackage(msgspec.Struct, frozen=True):
    """Message with work requests, in which a sha256 stands for each file."""

    work: WorkBatch
    contents: tuple[str, ...]  # the files that can be had, in the order in which they are offered


class WorkResults(msgspec.Struct, frozen=True):
    done: list[WorkOutcome]
    private: dict[str, bytes]  # private state that was left, by sha256


def pack_request(order: WorkRequest) -> tuple[WorkRequest, dict[str, str]]:
    """Return a work request without paths, and the path of each file by sha256."""
    files = {order.task.bundles[name].sha256: path for name, path in order.bundles.items()}
    private = None
    if order.private is not None:
        private = REAL.hash_file(order.private)
        files[private] = order.private
    if (honest := adversaries.honest_file(order)) is not None:
        files[REAL.hash_file(honest)] = honest
        order = adversaries.add_honest_mean(order, REAL.hash_file(honest))
    bundles = {name: order.task.bundles[name].sha256 for name in order.bundles}
    sent = replace(order, bundles=bundles, private=private, cache="", out="", whole_bytes=sys.maxsize)
    return sent, files


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


def write_outputs(orders: Sequence[WorkRequest], made: WorkResults) -> list[WorkOutcome]:
    """Write the outputs of a remote worker into the folders of the work requests.

    Returns:
        Results with the small blobs alone, as a worker of this machine returns them.

    Raises:
        StoreError: If a file cannot be written.
    """
    found = []
    for order, done in zip(orders, made.done, strict=True):
        outcome, small = done.outcome, {}
        with disk_errors(f"write into {order.out}"):
            for sha256, payload in outcome.blobs.items():
                if len(payload) < order.whole_bytes:
                    small[sha256] = payload
                else:
                    REAL.write(f"{order.out}/{order.prefix}{sha256}", payload)
            if outcome.private is not None:
                REAL.write(f"{order.out}/{order.prefix}{PRIVATE}", made.private[outcome.private.sha256])
        found.append(WorkOutcome(replace(outcome, blobs=small), done.joint))
    return found


def read_pieces(path: str, size: int) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(size):
            yield piece
