"""Protocol between a pool and its workers.

`processes` starts workers on this machine, `ray.workers` on the nodes of a Ray cluster. Both run
`worker.PoolWorker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from fedquilt.core import FedquiltError, JobError
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.host import threads
from fedquilt.tools.simulation.machines import Machine

# one thread a worker, so that sums have one order; no thread of a library is alive when the first one forks
SINGLE: Final = {**threads.QUIET, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Keep freed arrays of some MB in the heap: returned to the kernel, their pages are cleared again at every step.
KEPT: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}
SCHEME: Final = "ray://"


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    shape: tuple[int, ...]
    dtype: str


class DeviceExamples(msgspec.Struct, frozen=True, array_like=True):
    train: tuple[ArrayLocation, ArrayLocation]
    held: tuple[ArrayLocation, ArrayLocation]


class PoolSetup(msgspec.Struct, frozen=True):
    examples: str  # the file
    shares: dict[str, DeviceExamples]


class WorkBatch(msgspec.Struct, frozen=True):
    """Work requests for one worker, with a sha256 instead of each path for a worker of another machine."""

    orders: tuple[WorkRequest, ...] = ()
    together: bool = False
    state: str = ""  # file of the round's state if the worker folds the updates, or ""
    contents: tuple[str, ...] = ()  # files that the other machine can fetch, in the order of their references


class WorkOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Result of a work request, and whether its training could be batched."""

    outcome: WorkResult
    joint: bool


class WorkerReply(msgspec.Struct, frozen=True, array_like=True):
    """Reply of a worker: results in the order of the requests, and whether a sum follows."""

    done: list[WorkOutcome]
    summed: bool = False
    private: dict[str, bytes] = {}  # on the way from another machine: private state by sha256


class WorkerSum(msgspec.Struct, frozen=True):
    """Packed sum of a reply's updates, or b"" if the worker could not sum them."""

    packed: bytes


class PoolError(FedquiltError): ...


class WorkerGroup(Protocol):
    """Workers of one fleet. Each worker runs at most one batch at a time."""

    def start(self, folder: Path) -> None:
        """Start the workers with a temporary folder, which is removed after their end."""
        ...

    @property
    def machines(self) -> Mapping[str, Machine]: ...

    def send_setup(self, setup: PoolSetup) -> None: ...

    def wait_until_ready(self) -> None:
        """Wait until the workers are ready."""
        ...

    @property
    def ready(self) -> Iterable[int]:
        """Workers that can receive work, including busy ones."""
        ...

    def send_work(self, worker: int, work: WorkBatch) -> None:
        """Send a batch of work requests to a worker."""
        ...

    def receive_replies(self, *, block: bool) -> Iterable[tuple[int, WorkerReply | WorkerSum | None]]:
        """Return the replies and sums of workers. None marks a lost worker whose work must be repeated."""
        ...

    def stop(self, *, now: bool) -> None:
        """Stop the workers, with `now` also during their work."""
        ...


def choose_engine(engine: str, environ: Mapping[str, str]) -> str:
    """Return "pool", "ray" or the address of a cluster for an engine name.

    "auto" is "ray" if RAY_ADDRESS is set, and "pool" otherwise.
    """
    if engine == "auto":
        return "ray" if environ.get("RAY_ADDRESS") else "pool"
    host, _, port = engine.removeprefix(SCHEME).rpartition(":")
    if engine in ("pool", "ray") or (engine.startswith(SCHEME) and host and port.isdigit()):
        return engine
    raise JobError(f"engine {engine!r} is none of auto, pool, ray and {SCHEME}HOST:PORT")
