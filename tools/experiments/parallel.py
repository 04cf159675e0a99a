"""Independent runs by as many processes as there are cores: each result as it is there; they end with this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fedquilt.core import FedquiltError
from fedquilt.edge_agent.task import process

T = TypeVar("T")


class ProcessError(FedquiltError):
    """A process that plays runs has ended before it was done."""


def spread(
    play: Callable[..., T], todo: Sequence[tuple[Any, ...]], workers: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield (index, `play(*todo[index])`) as each is finished. An exception in one ends the others.

    Args:
        play: a function of a module, since each process imports it anew.
        todo: arguments of each call.
        workers: None: one for each core that this process may use.

    Raises:
        ProcessError: one of the processes was killed.
    """
    if not todo:
        return
    count = min(workers or len(os.sched_getaffinity(0)), len(todo))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (os.getpid(),)) as pool:
        try:
            waiting = {pool.submit(_played, play, given): index for index, given in enumerate(todo)}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise ProcessError(
                f"a process that plays runs has ended, {count} at a time: most likely the kernel killed it for want of "
                "memory, then allow this command fewer cores (taskset -c 0 fedquilt ...); what it said stands above"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, _end)
    process.die_with(parent)


class _Told(SystemExit):
    """The process was told to end."""


def _end(number: int, frame: object) -> None:
    raise _Told(128 + number)  # by way of all that cleans up


def _played(play: Callable[..., T], given: tuple[Any, ...]) -> T:
    """One run. A process that is told to end amid it begins no other."""
    try:
        return play(*given)
    except _Told:
        os._exit(1)
