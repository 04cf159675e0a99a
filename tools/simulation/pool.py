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
# one thread a worker, so that sums have one order; no thread of a library is alive when the first one forks
SINGLE: Final = {**process_resources.QUIET, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Keep freed arrays of some MB in the heap: returned to the kernel, their pages are cleared again at every step.
KEPT: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}
SCHEME: Final = "ray://"
TOGETHER: Final = 32  # orders at most that go to a worker at once; more are hardly faster, and keep others waiting
LOST: Final = 3  # workers lost with the same orders, after which these are taken for the cause


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
        except FileNotFoundError:  # another process took it for one that was left behind
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            os.close(lock)
            return path, None
        if path.exists():
            return path, lock
        os.close(lock)  # taken for one that was left behind all the same, before it was locked


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
                os.close(self._lock)  # the last one left it before it was locked

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

    def start(self, folder: Path) -> None: ...

    @property
    def machines(self) -> Mapping[str, Machine]: ...

    def send_setup(self, setup: PoolSetup) -> None: ...

    def wait_until_ready(self) -> None: ...

    @property
    def ready(self) -> Iterable[int]:
        """Workers that can receive work, including busy ones."""
        ...

    def send_work(self, worker: int, work: WorkBatch) -> None: ...

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


@dataclass
class WorkAssignment:
    orders: Sequence[WorkRequest]
    given: bool = False  # whether a worker has it, or has had it
    answer: WorkerReply | None = None
    sum: bytes | None = None  # of the updates in it, once its worker has made it
    lost: int = 0  # how many workers have been lost that had it

    def consists_of(self, orders: Sequence[WorkRequest]) -> bool:
        # compares identity, because equal requests can have different files
        return len(orders) == len(self.orders) and all(map(operator.is_, orders, self.orders))


class WorkerPool:
    """Workers for one fleet, started and stopped by `with`."""

    def __init__(self, workers: WorkerGroup, members: Iterable[DeviceData], *, together: bool = False) -> None:
        self._workers, self._members, self._together = workers, members, together
        self._joint = False
        self._given: dict[int, WorkAssignment] = {}  # worker -> what it works on
        self._sizes: deque[int] = deque()  # of the packages that are announced and not complete
        self._begun: list[WorkRequest] = []  # orders of the first of them
        self._ahead: list[WorkAssignment] = []  # announced, and not asked for yet
        self._sums: Simulation | None = None
        self.folder = Path()
        self.held: dict[str, int] = {}  # device -> how many held-out examples it has

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
        self._workers.stop(now=now)
        self._scratch.cleanup()

    def wait_until_ready(self) -> None:
        self._workers.wait_until_ready()

    def expect_requests(self, count: int) -> None:
        """Expect `count` announced work requests, and discard earlier ones that were not run."""
        self._sizes, self._begun = deque(self._choose_package_sizes(count)), []
        self._ahead.clear()

    def prefetch(self, order: WorkRequest) -> None:
        """Announce a work request. An idle worker starts the package that the request completes."""
        if not self._sizes:
            return
        self._begun.append(order)
        if len(self._begun) < self._sizes[0]:
            return
        self._sizes.popleft()
        self._ahead.append(WorkAssignment(self._begun))
        self._begun = []
        with contextlib.suppress(PoolError):  # a worker has died: `run_requests` will find out, and says why
            self._collect_replies(block=False)
            self._assign_packages(self._ahead)

    def set_sum_receiver(self, sums: Simulation) -> None:
        """Let the workers fold updates, and deliver the partial sums to `sums`."""
        self._sums = sums

    def run_requests(self, orders: Sequence[WorkRequest]) -> Iterator[tuple[WorkRequest, WorkResult]]:
        """Yield each work request with its result, in order and as early as possible."""
        if not orders:
            return
        packages, following = [], iter(orders)
        for size in self._choose_package_sizes(len(orders)):
            group = tuple(itertools.islice(following, size))
            ahead = next((each for each in self._ahead if each.consists_of(group)), None)
            packages.append(ahead or WorkAssignment(group))
        self._ahead = [each for each in self._ahead if each not in packages]
        first, following = True, iter(orders)
        for package, answer in zip(packages, self._run_packages(packages), strict=True):
            if answer.summed and self._sums is not None:
                self._sums.receive_sum(
                    package.orders, [done.outcome for done in answer.done], partial(self._wait_for_sum, package)
                )
            for done in answer.done:
                if first:
                    self._joint, first = done.joint, False
                yield next(following), done.outcome

    # -- within -----------------------------------------------------------------------------------

    def _choose_package_sizes(self, count: int) -> list[int]:
        # equal sizes of at most TOGETHER, and 1 while batching is not known to work
        if not self._joint:
            return [1] * count
        return [len(part) for part in np.array_split(np.arange(count), math.ceil(count / TOGETHER))]

    def _run_packages(self, packages: Sequence[WorkAssignment]) -> Iterator[WorkerReply]:
        for wanted in packages:
            self._assign_packages(packages)
            while wanted.answer is None:
                self._collect_replies(block=True)
                self._assign_packages(packages)
            answer, wanted.answer = wanted.answer, None
            yield answer
            self._collect_replies(block=False)  # a worker that has ended gets its next package first

    def _assign_packages(self, packages: Sequence[WorkAssignment]) -> None:
        left = (each for each in packages if not each.given)
        for worker in self._workers.ready:
            if worker not in self._given:
                if (package := next(left, None)) is None:
                    return
                package.given = True
                state = self._sums.find_state_file(package.orders) if self._sums is not None else ""
                self._workers.send_work(worker, WorkBatch(tuple(package.orders), self._together, state))
                self._given[worker] = package

    def _collect_replies(self, *, block: bool) -> None:
        for worker, answer in self._workers.receive_replies(block=block):
            package = self._given[worker]
            if answer is None or isinstance(answer, WorkerSum) or not answer.summed:
                del self._given[worker]
            if isinstance(answer, WorkerSum):
                package.sum = answer.packed
                continue
            package.answer = answer
            if answer is None:
                package.given, package.lost = False, package.lost + 1
                if package.lost >= LOST:
                    names = ", ".join(order.device for order in package.orders)
                    raise PoolError(
                        f"{LOST} workers were lost, one after the other, with the work of {names}: most likely it "
                        "needs more memory than a node has; give fewer --workers, or a smaller network or batch"
                    )

    def _wait_for_sum(self, package: WorkAssignment) -> bytes:
        # an empty sum makes the coordinator fold the updates one by one
        with contextlib.suppress(PoolError):  # a worker has died: the next orders find out, and say why
            while package.sum is None:
                self._collect_replies(block=True)
        return package.sum or b""

    def _write_examples(self) -> dict[str, DeviceExamples]:
        shares: dict[str, DeviceExamples] = {}
        with (self.folder / "examples").open("wb") as file:

            def write_array(array: np.ndarray) -> ArrayLocation:
                if array.dtype.kind not in "uifb":
                    raise DataError(f"examples of type {array.dtype}: expected numbers")
                place = ArrayLocation(file.tell(), array.shape, array.dtype.str)
                file.write(np.ascontiguousarray(array).data)
                return place

            for member in self._members:
                train, held = member.train, member.held
                self.held[member.device] = len(held)
                shares[member.device] = DeviceExamples(
                    (write_array(train.x), write_array(train.y)), (write_array(held.x), write_array(held.y))
                )
        return shares
