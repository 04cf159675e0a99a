"""Process that checks whether a device's examples can be read.

    python -m fedquilt.edge_agent.task.sandbox fedquilt.edge_agent.task.data_check PRIVATE BUDGET PARENT

The daemon starts this process because it imports no numpy itself. The process reads the table [data] as JSON from stdin
and writes the problem, or nothing, to stdout. It may run at the same time as a task. So it has a low priority, and ends
without a result if it needs more memory than the budget of a task.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedquilt.core import FedquiltError
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.memory_budget import MemoryLimit
from fedquilt.edge_agent.task.process import exit_with_parent
from fedquilt.host import process_resources

log = logging.getLogger("fedquilt.agent")

PROGRAM: Final = "fedquilt.edge_agent.task.data_check"


def find_data_problem(data: Mapping[str, Any]) -> str:
    """Return why a device with this [data] table has no examples, or an empty string."""
    from fedquilt.data import examples

    spec = DataSpec.parse(dict(data))
    try:
        examples.require_nonempty_share(examples.open_split(spec), spec)
    except (FedquiltError, OSError) as error:
        return str(error)
    return ""


def warn_of_unreadable_data(settings: AgentSettings, private: Path, limit: MemoryLimit, budget_bytes: int) -> None:
    """Check in the background whether this device can read its examples, and log why it cannot."""
    if not settings.data:
        return
    # no error, because the file may be on a disk that is mounted later
    if problem := DataSpec.parse(settings.data).find_path_problem():
        log.warning("%s", problem)
    else:
        limit.create_group()  # before the first child process
        command = [*sandbox.task_command(private, PROGRAM), str(budget_bytes), str(os.getpid())]
        threading.Thread(target=_check_in_process, args=(settings.data, command), name="data", daemon=True).start()


def _check_in_process(data: Mapping[str, Any], command: Sequence[str]) -> None:
    environment = {**process_resources.LIBRARY_ENVIRONMENT, **os.environ}
    checked = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, env=environment)
    if checked.stdout:
        log.warning("this device declines tasks, as its data cannot be used: %s", checked.stdout)


def main() -> None:
    exit_with_parent(int(sys.argv[-1]))
    budget_bytes = int(sys.argv[-2])
    resource.setrlimit(resource.RLIMIT_DATA, (budget_bytes, budget_bytes))
    os.nice(10)
    print(find_data_problem(json.load(sys.stdin)), end="")
