"""Pool of workers, with results that do not depend on the number of workers.

Training in one graph affects the last bits of a result. Therefore the grouping of work requests
(`local_backend.run_requests`) follows from their order alone, never from the number of workers. The first request of a
run is run alone, and the first reply of each call decides whether the next call groups requests.

Work requests can be announced as the devices of a round start them (`expect_requests`, `prefetch`), and idle workers
start them at once. Results count only if exactly these requests are run later.

`processes` starts workers on this machine, `ray_workers` on the nodes of a Ray cluster, and both run
`processes.PoolWorker`. A work request has the same result wherever and however often it is run, so requests of a lost
worker go to another.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import operator
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from fedquilt.core import DataError, FedquiltError, JobError
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.host import process_resources
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.machines import Machine

if TYPE_CHECKING:
    from fedquilt.tools.simulation.simulated_job import Simulation

PREFIX: Final = "fedquilt-scratch-"
# One thread for each worker keeps the order of sums. No library thread may be alive when the first worker forks.
SINGLE_THREAD_ENV: Final = {**process_resources.LIBRARY_ENVIRONMENT, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Keep freed arrays of some MB in the heap, because the kernel clears returned pages again at every step.
MALLOC_ENV: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}
RAY_SCHEME: Final = "ray://"
MAX_BATCH_REQUESTS: Final = 32  # larger batches are hardly faster, and keep other workers waiting
MAX_LOST_WORKERS: Final = 3  # consecutive losses with the same requests, which then count as the cause


class ScratchFolder:
    """Empty temporary folder, removed on exit or by `cleanup`.

    The process holds a lock on the folder, which ends with the process. Creating a folder also removes unlocked
    folders of this user.
    """

    def __init__(self) -> None:
        remove_stale_folders()
        self.path, self._lock = _make_locked_folder()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_locked_folder() -> tuple[Path, int | None]:
    # without a lock (None) no other process removes the folder
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed the folder as stale
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            os.close(lock)
            return path, None
        if path.exists():
            return path, lock
        os.close(lock)  # another process removed the folder as stale before it was locked


class SharedFolder:
    """Named folder of several processes, removed when the last process leaves or ends."""

    def __init__(self, name: str) -> None:
        remove_stale_folders()
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._lock)  # the last process removed the folder before it was locked

    def release(self) -> None:
        """Unlock the folder, and remove it unless another process uses it."""
        os.close(self._lock)
        with contextlib.suppress(OSError):
            _remove_unless_locked(self.path)


def remove_stale_folders() -> None:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_unless_locked(Path(entry))


def _remove_unless_locked(folder: Path) -> None:
    if folder.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


class ArrayLocation(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    shape: tuple[int, ...]
    dtype: str


class DeviceExamples(msgspec.Struct, frozen=True, array_like=True):
    train: tuple[ArrayLocation, ArrayLocation]  # x and y
    held_out: tuple[ArrayLocation, ArrayLocation]


class PoolSetup(msgspec.Struct, frozen=True):
    examples: str  # path of the file
    shards: dict[str, DeviceExamples]


class WorkBatch(msgspec.Struct, frozen=True):
    """Work requests for one worker. A worker on another machine gets sha256 hashes instead of paths."""

    requests: tuple[WorkRequest, ...] = ()
    batched: bool = False
    state_path: str = ""  # file of the round's state if the worker folds the updates, or ""
    file_hashes: tuple[str, ...] = ()  # sha256 of files that another machine can fetch, in the order of the references


class WorkOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Result of a work request, and whether its training could be batched."""

    result: WorkResult
    batchable: bool


class WorkerReply(msgspec.Struct, frozen=True, array_like=True):
    """Outcomes in the order of the requests, and whether a `WorkerSum` follows."""

    outcomes: list[WorkOutcome]
    has_sum: bool = False
    private_states: dict[str, bytes] = {}  # by sha256, from workers of other machines only


class WorkerSum(msgspec.Struct, frozen=True):
    """Packed sum of a reply's updates, or b"" if the worker could not sum them."""

    packed: bytes


class PoolError(FedquiltError): ...


class WorkerGroup(Protocol):
    """Workers of one fleet. Each worker runs at most one batch at a time."""

    def start(self, folder: Path) -> None: ...

    @property
    def machines(self) -> Mapping[str, Machine]: ...

    def send_setup(self, setup: PoolSetup) -> None: ...

    def wait_until_ready(self) -> None: ...

    @property
    def ready(self) -> Iterable[int]:
        """Indices of the workers that can receive work, including busy ones."""
        ...

    def send_work(self, worker: int, work: WorkBatch) -> None: ...

    def receive_replies(self, *, block: bool) -> Iterable[tuple[int, WorkerReply | WorkerSum | None]]:
        """Return the replies and sums of workers. None marks a lost worker whose work must be repeated."""
        ...

    def stop(self, *, immediately: bool) -> None:
        """Stop the workers, with `immediately` also during their work."""
        ...


def choose_engine(engine: str, environ: Mapping[str, str]) -> str:
    """Return "pool", "ray" or the address of a cluster for an engine name.

    "auto" is "ray" if RAY_ADDRESS is set, and "pool" otherwise.
    """
    if engine == "auto":
        return "ray" if environ.get("RAY_ADDRESS") else "pool"
    host, _, port = engine.removeprefix(RAY_SCHEME).rpartition(":")
    if engine in ("pool", "ray") or (engine.startswith(RAY_SCHEME) and host and port.isdigit()):
        return engine
    raise JobError(f"engine {engine!r} is unknown: use auto, pool, ray or {RAY_SCHEME}HOST:PORT")


@dataclass
class WorkAssignment:
    requests: Sequence[WorkRequest]
    is_assigned: bool = False  # stays true after the reply
    reply: WorkerReply | None = None
    packed_sum: bytes | None = None  # of its updates, None until the worker sends the sum
    lost_workers: int = 0

    def consists_of(self, requests: Sequence[WorkRequest]) -> bool:
        # compares identity, because equal requests can have different files
        return len(requests) == len(self.requests) and all(map(operator.is_, requests, self.requests))


class WorkerPool:
    """Workers for one fleet, started and stopped by `with`."""

    def __init__(self, workers: WorkerGroup, devices: Iterable[DeviceData], *, batched: bool = False) -> None:
        self._workers, self._devices, self._batched = workers, devices, batched
        self._is_batching = False
        self._assignments: dict[int, WorkAssignment] = {}  # by worker
        self._expected_sizes: deque[int] = deque()  # of batches that are expected and not complete
        self._incomplete_batch: list[WorkRequest] = []  # requests of the first expected batch
        self._prefetched: list[WorkAssignment] = []  # announced, and not requested by `run_requests` yet
        self._sum_receiver: Simulation | None = None
        self.folder = Path()
        self.held_out_counts: dict[str, int] = {}  # by device

    def __enter__(self) -> WorkerPool:
        self._scratch = ScratchFolder()
        self.folder = self._scratch.path
        try:
            self._workers.start(self.folder)
            self._workers.send_setup(PoolSetup(str(self.folder / "examples"), self._write_examples()))
        except BaseException:
            self._stop_workers(now=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stop_workers(now=kind is not None)

    def _stop_workers(self, *, now: bool) -> None:
        self._workers.stop(immediately=now)
        self._scratch.cleanup()

    def wait_until_ready(self) -> None:
        self._workers.wait_until_ready()

    def expect_requests(self, count: int) -> None:
        """Prepare for `count` announcements of work requests, and discard earlier announcements."""
        self._expected_sizes, self._incomplete_batch = deque(self._choose_batch_sizes(count)), []
        self._prefetched.clear()

    def prefetch(self, request: WorkRequest) -> None:
        """Announce a work request. If it completes a batch, an idle worker starts the batch at once."""
        if not self._expected_sizes:
            return
        self._incomplete_batch.append(request)
        if len(self._incomplete_batch) < self._expected_sizes[0]:
            return
        self._expected_sizes.popleft()
        self._prefetched.append(WorkAssignment(self._incomplete_batch))
        self._incomplete_batch = []
        with contextlib.suppress(PoolError):  # `run_requests` reports a worker that has died
            self._collect_replies(block=False)
            self._assign_workers(self._prefetched)

    def set_sum_receiver(self, simulation: Simulation) -> None:
        """Make the workers fold updates, and deliver the partial sums to `simulation`."""
        self._sum_receiver = simulation

    def run_requests(self, requests: Sequence[WorkRequest]) -> Iterator[tuple[WorkRequest, WorkResult]]:
        """Yield each work request with its result, in order and as early as possible."""
        if not requests:
            return
        assignments, remaining = [], iter(requests)
        for size in self._choose_batch_sizes(len(requests)):
            group = tuple(itertools.islice(remaining, size))
            prefetched = (each for each in self._prefetched if each.consists_of(group))
            assignments.append(next(prefetched, None) or WorkAssignment(group))
        self._prefetched = [each for each in self._prefetched if each not in assignments]
        is_first, remaining = True, iter(requests)
        for assignment, reply in zip(assignments, self._run_assignments(assignments), strict=True):
            if reply.has_sum and self._sum_receiver is not None:
                results = [outcome.result for outcome in reply.outcomes]
                self._sum_receiver.receive_sum(assignment.requests, results, partial(self._wait_for_sum, assignment))
            for outcome in reply.outcomes:
                if is_first:
                    self._is_batching, is_first = outcome.batchable, False
                yield next(remaining), outcome.result

    def _choose_batch_sizes(self, count: int) -> list[int]:
        # equal sizes of at most MAX_BATCH_REQUESTS, and 1 until a request was batched
        if not self._is_batching:
            return [1] * count
        return [len(part) for part in np.array_split(np.arange(count), math.ceil(count / MAX_BATCH_REQUESTS))]

    def _run_assignments(self, assignments: Sequence[WorkAssignment]) -> Iterator[WorkerReply]:
        for assignment in assignments:
            self._assign_workers(assignments)
            while assignment.reply is None:
                self._collect_replies(block=True)
                self._assign_workers(assignments)
            reply, assignment.reply = assignment.reply, None
            yield reply
            self._collect_replies(block=False)  # so that an idle worker receives its next batch first

    def _assign_workers(self, assignments: Sequence[WorkAssignment]) -> None:
        unassigned = (each for each in assignments if not each.is_assigned)
        for worker in self._workers.ready:
            if worker not in self._assignments:
                if (assignment := next(unassigned, None)) is None:
                    return
                assignment.is_assigned = True
                state_path = ""
                if self._sum_receiver is not None:
                    state_path = self._sum_receiver.find_state_file(assignment.requests)
                self._workers.send_work(worker, WorkBatch(tuple(assignment.requests), self._batched, state_path))
                self._assignments[worker] = assignment

    def _collect_replies(self, *, block: bool) -> None:
        for worker, reply in self._workers.receive_replies(block=block):
            assignment = self._assignments[worker]
            if reply is None or isinstance(reply, WorkerSum) or not reply.has_sum:
                del self._assignments[worker]
            if isinstance(reply, WorkerSum):
                assignment.packed_sum = reply.packed
                continue
            assignment.reply = reply
            if reply is None:
                assignment.is_assigned = False
                assignment.lost_workers += 1
                if assignment.lost_workers >= MAX_LOST_WORKERS:
                    names = ", ".join(request.device for request in assignment.requests)
                    raise PoolError(
                        f"{MAX_LOST_WORKERS} workers ended one after another during the work of {names}, probably for "
                        "lack of memory: use fewer --workers, or a smaller network or batch"
                    )

    def _wait_for_sum(self, assignment: WorkAssignment) -> bytes:
        # an empty sum makes the coordinator fold the updates one by one
        with contextlib.suppress(PoolError):  # the next requests report a worker that has died
            while assignment.packed_sum is None:
                self._collect_replies(block=True)
        return assignment.packed_sum or b""

    def _write_examples(self) -> dict[str, DeviceExamples]:
        shards: dict[str, DeviceExamples] = {}
        with (self.folder / "examples").open("wb") as file:

            def write_array(array: np.ndarray) -> ArrayLocation:
                if array.dtype.kind not in "uifb":
                    raise DataError(f"examples have the type {array.dtype}: convert them to numbers")
                location = ArrayLocation(file.tell(), array.shape, array.dtype.str)
                file.write(np.ascontiguousarray(array).data)
                return location

            for device in self._devices:
                train, held_out = device.train, device.held_out
                self.held_out_counts[device.device] = len(held_out)
                shards[device.device] = DeviceExamples(
                    (write_array(train.x), write_array(train.y)), (write_array(held_out.x), write_array(held_out.y))
                )
        return shards
