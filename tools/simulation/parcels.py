"""Orders on their way to another machine: files are named by their content, and what comes of them is bytes.

The machine of the pool has all files. It sends an order with the sha256 of each instead of its path (`packed`), the
other one puts its own paths in their places (`unpacked`), and what was made there is written here (`received`), as if
a worker of this machine had written it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from fedquilt.disk import REAL, doing
from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.edge_agent.task.protocol import Order
from fedquilt.tools.simulation import adversaries
from fedquilt.tools.simulation.workers import Done, Setup, Work


class Asked(msgspec.Struct, frozen=True):
    """To a worker, first: what it is to be ready for."""

    engine: str
    modules: tuple[str, ...]  # of plug-ins, whose content it reports
    folder: str  # name of the folder that the workers of its node share


class Begin(msgspec.Struct, frozen=True):
    """To a worker: the examples, which come in pieces."""

    setup: Setup  # its file is to be replaced
    sha256: str  # of the file


class Parcel(msgspec.Struct, frozen=True):
    """To a worker: orders, with the sha256 of each file in place of its path."""

    work: Work
    contents: tuple[str, ...]  # the files that can be had, in the order in which they are offered


class Made(msgspec.Struct, frozen=True):
    """From a worker: what has come of its orders."""

    done: list[Done]
    private: dict[str, bytes]  # private state that was left, by sha256


def packed(order: Order) -> tuple[Order, dict[str, str]]:
    """An order without paths, and the file of each content that it names."""
    files = {order.task.bundles[name].sha256: path for name, path in order.bundles.items()}
    private = None
    if order.private is not None:
        private = REAL.digest(order.private)
        files[private] = order.private
    if (honest := adversaries.honest_file(order)) is not None:
        files[REAL.digest(honest)] = honest
        order = adversaries.informed(order, REAL.digest(honest))
    bundles = {name: order.task.bundles[name].sha256 for name in order.bundles}
    sent = replace(order, bundles=bundles, private=private, cache="", out="", whole_bytes=sys.maxsize)
    return sent, files


def unpacked(order: Order, find: Callable[[str], str], cache: str, out: str) -> Order:
    """The order with this machine's paths; `find` has the file of a content."""
    if (honest := adversaries.honest_file(order)) is not None:
        order = adversaries.informed(order, find(honest))
    return replace(
        order,
        bundles={name: find(sha256) for name, sha256 in order.bundles.items()},
        private=None if order.private is None else find(order.private),
        cache=f"{cache}/{order.device}",
        out=out,
    )


def received(orders: Sequence[Order], made: Made) -> list[Done]:
    """Write what a worker made into the orders' own folders; what is left is what a worker of this machine returns.

    Raises:
        StoreError: it cannot be written.
    """
    found = []
    for order, done in zip(orders, made.done, strict=True):
        outcome, small = done.outcome, {}
        with doing(f"write into {order.out}"):
            for sha256, payload in outcome.blobs.items():
                if len(payload) < order.whole_bytes:
                    small[sha256] = payload
                else:
                    REAL.write(f"{order.out}/{order.prefix}{sha256}", payload)
            if outcome.private is not None:
                REAL.write(f"{order.out}/{order.prefix}{PRIVATE}", made.private[outcome.private.sha256])
        found.append(Done(replace(outcome, blobs=small), done.joint))
    return found


def pieces(path: str, size: int) -> Iterable[bytes]:
    """The bytes of a file, so many at a time."""
    with open(path, "rb") as file:
        while piece := file.read(size):
            yield piece
