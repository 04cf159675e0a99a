"""Whether this version of the agent could run here: `fedquilt agent agent.toml --check`, asked before an upgrade.

It reads what the agent reads and carries out one small task in a process of its own, as tasks are. It changes nothing
of the agent's, which may run beside it. What was wrong before the upgrade and does not keep an agent from
running, such as data that are missing, is left to `fedquilt doctor`.
"""

from __future__ import annotations

import select
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Final

from fedquilt import profiles, tensors
from fedquilt.core import JobError, Task, Work
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import budget, confine
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.tools.doctor import agent, identity
from fedquilt.tools.doctor.findings import Finding

TASK_S: Final = 300.0  # a slow card takes a while to read numpy
NETWORK: Final = {"name": "mlp", "inputs": 5, "hidden": [], "classes": 4}
DATA: Final = {"synthetic": "fedpews-3.2k", "limit": 32}
PARTS: Final = ("edge_agent.daemon", "transport.mqtt", "transport.sealed", "edge_agent.power.learned")


def check(settings: AgentSettings, path: Path) -> None:
    """Check that an agent of this version would run with these settings.

    Args:
        settings: read from the file `path`.
        path: of agent.toml.

    Raises:
        FedquiltError: it would not, and why.
    """
    for part in PARTS:
        try:
            import_module(f"fedquilt.{part}")
        except ImportError as error:
            raise JobError(f"{part} of this version cannot be imported ({error}): a package is missing") from None
    for finding in (agent.folder(Path(settings.home)), *identity.check(settings, path, time.time())):
        _require(finding)
    sensors(settings)
    small_task()


def _require(finding: Finding) -> None:
    if finding.severity == "error":
        raise JobError(f"{finding.sentence} (mend: {finding.mend})")


def sensors(settings: AgentSettings) -> None:
    """Read the board's sensors as the agent will.

    Raises:
        FedquiltError: they cannot be read.
    """
    profile = None if settings.profile is None else profiles.find(settings.profile)
    meter = None if settings.meter is None else devices.meter(settings.meter)
    devices.make(settings.board, profile=profile, meter=meter).read(time.monotonic())


def small_task() -> None:
    """Train a tiny network on a few drawn points, in the process that tasks have.

    Raises:
        JobError: the task has failed.
    """
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        scratch = Path(folder)
        (scratch / "out").mkdir()
        (scratch / "model").write_bytes(tensors.encode(numpy_engine.init(NETWORK, seed=0)))
        outcome = _carried_out(scratch)
    if outcome.code != "ok":
        raise JobError(f"one small task has failed ({outcome.code}): {outcome.reason}")


def _carried_out(scratch: Path) -> Outcome:
    training = {"epochs": 1, "batch": 8, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
    task = Task(
        job="check",
        round=0,
        attempt=0,
        method="fedavg",
        engine="numpy",
        actions=("work",),
        params={**training, "network": NETWORK},
        bundles={},
        seed=0,
        work=Work(flops=1e6),
        deadline_s=TASK_S,
    )
    order = Order(
        task=task,
        device="check",
        budget_bytes=1 << 30,
        data=DATA,
        bundles={"model": str(scratch / "model")},
        private=None,
        cache=str(scratch / "cache"),
        out=str(scratch / "out"),
        plugins=(),
    )
    nowhere = budget.Cage(Path("/dev/null"))  # the agent that runs has the board's group of tasks
    worker = ChildWorker(0.0, confine.command(scratch), nowhere)
    end_s = time.monotonic() + TASK_S
    try:
        worker.start(order, time.monotonic())
        while (now_s := time.monotonic()) < end_s:
            for event in worker.poll(now_s):
                if isinstance(event, Outcome):
                    return event
            select.select(worker.fds(), [], [], 1.0)
    finally:
        worker.close()
    return Outcome(code="failed", reason=f"it has not ended within {TASK_S:g} s")
