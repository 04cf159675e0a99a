"""Parallel calls in processes, one per core, which end with this process."""

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


class RunProcessError(FedquiltError): ...


def run_in_processes(
    play: Callable[..., T], todo: Sequence[tuple[Any, ...]], workers: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield the index and the result of each call as it finishes. An exception in one call stops all."""
    if not todo:
        return
    count = min(workers or len(os.sched_getaffinity(0)), len(todo))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _initialise_worker, (os.getpid(),)) as pool:
        try:
            waiting = {pool.submit(_run_call_until_terminated, play, given): index for index, given in enumerate(todo)}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise RunProcessError(
                f"a process that plays runs has ended, {count} at a time: most likely the kernel killed it for want of "
                "memory, then allow this command fewer cores (taskset -c 0 fedquilt ...); what it said stands above"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _initialise_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, _raise_on_sigterm)
    process.exit_with_parent(parent)


class _TerminationExit(SystemExit): ...


def _raise_on_sigterm(number: int, frame: object) -> None:
    raise _TerminationExit(128 + number)  # by way of all that cleans up


def _run_call_until_terminated(play: Callable[..., T], given: tuple[Any, ...]) -> T:
    # a terminated process must not start the next call
    try:
        return play(*given)
    except _TerminationExit:
        os._exit(1)
