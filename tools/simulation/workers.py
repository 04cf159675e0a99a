"""The small protocol between a pool and its workers, wherever they are: its messages, and who carries them.

`processes` starts workers on this machine, `ray_workers` on the nodes of a Ray cluster. Both run `pool_worker.Worker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from fedquilt import threads
from fedquilt.core import FedquiltError
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation.machines import Machine

# one thread a worker, so that sums have one order; no thread of a library is alive when the first one forks
SINGLE: Final = {**threads.QUIET, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Keep freed arrays of some MB in the heap: returned to the kernel, their pages are cleared again at every step.
KEPT: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}


class Place(msgspec.Struct, frozen=True, array_like=True):
    """An array in the file of examples."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One device's examples: x and y to train on, x and y held out."""

    train: tuple[Place, Place]
    held: tuple[Place, Place]


class Setup(msgspec.Struct, frozen=True):
    """First message to a worker."""

    examples: str  # the file
    shares: dict[str, Share]


class Work(msgspec.Struct, frozen=True):
    """To a worker: carry these out."""

    orders: tuple[Order, ...] = ()
    together: bool = False
    state: str = ""  # file of the round's state: fold what the orders come to; "": do not


class Done(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of an order, and whether it was or could have been trained with others."""

    outcome: Outcome
    joint: bool


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """From a worker: what has become of its orders, in their order, and whether the sum of their updates follows."""

    done: list[Done]
    summed: bool = False


class Sum(msgspec.Struct, frozen=True):
    """From a worker, behind an `Answer`: the packed sum of the updates in it; b"": it could not be made."""

    packed: bytes


class PoolError(FedquiltError):
    """A worker that has died, or could not start."""


class Workers(Protocol):
    """Workers of one fleet. Each has at most one package of orders at a time."""

    def start(self, folder: Path) -> None:
        """Start them, with a folder that is removed after their end."""
        ...

    @property
    def machines(self) -> Mapping[str, Machine]:
        """Their machines by name, as far as they are known."""
        ...

    def begin(self, setup: Setup) -> None:
        """Send what comes before all orders."""
        ...

    def warm(self) -> None:
        """Wait until they are ready.

        Raises:
            PoolError: one has ended.
        """
        ...

    @property
    def ready(self) -> Iterable[int]:
        """Those that can be given orders, unless they have some."""
        ...

    def give(self, worker: int, work: Work) -> None:
        """Have a worker carry orders out.

        Raises:
            PoolError: one has ended.
        """
        ...

    def done(self, *, block: bool) -> Iterable[tuple[int, Answer | Sum | None]]:
        """Workers that have answered, or made the sum that an answer of theirs has announced.

        None instead: the worker is lost, and its orders are to be given to another.

        Args:
            block: wait until something has happened: a worker is done, lost, or newly ready.

        Raises:
            PoolError: one has ended, and no other can do its work.
        """
        ...

    def stop(self, *, now: bool) -> None:
        """End them; `now`: also amid their work."""
        ...
