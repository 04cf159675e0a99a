"""Children of the tests' own process. That has threads, so it is never forked: a server without any is.

A fork copies one thread and every lock as it is at that moment: a child of a process with threads may wait for ever
for one that nobody holds any more.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from typing import Final

CONTEXT: Final = multiprocessing.get_context("forkserver")
"""Its children get a function of a module, by name, and values that can be pickled."""

# what the tests' modules import, so that a child has it already
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "fedquilt.cli",
        "fedquilt.coordinator.server",
        "fedquilt.edge_agent.agent",
        "fedquilt.tools.boards.doctor.agent",
    ]
)


def refuse_with_threads() -> None:
    """Fail the test that forks a process with threads, by os.fork or by subprocess with `preexec_fn`.

    Python 3.12 only warns of it, also where warnings are errors. Ray, whose own affair it is, starts its processes so.
    """

    def before() -> None:
        callers = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(None))
        if len(os.listdir("/proc/self/task")) > 1 and not any(name.startswith("ray.") for name in callers):
            raise RuntimeError("a process with threads is forked: use forks.CONTEXT, or subprocess without preexec_fn")

    os.register_at_fork(before=before)  # pytest makes an error of what it raises
