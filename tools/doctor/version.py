"""Whether this version of the agent could run here: `fedquilt agent agent.toml --check`, asked before an upgrade.

The check reads what the agent reads, and carries out one small task in a process of its own, as tasks are. Nothing of
the agent's is changed: an agent may run beside the check. What was wrong before the upgrade and does not keep an agent
from running, such as data that are missing, is left to `fedquilt doctor`.
"""

from __future__ import annotations

import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Final

from fedquilt import methods, profiles
from fedquilt.core import BlobRef, Bundle, DeviceView, JobError, ModelError
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import confine
from fedquilt.tools.doctor import agent, identity
from fedquilt.tools.doctor.findings import Finding
from fedquilt.tools.simulation.task_process import TaskProcess

TASK_S: Final = 300.0  # a slow card takes a while to read numpy
BUDGET_BYTES: Final = 1 << 30
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
    method, model = methods.load("fedavg"), numpy_engine.init(NETWORK, seed=0)
    made = Bundle({"network": NETWORK}, {"model": BlobRef(sha256="0" * 64, size=0)}, lambda name: model)
    order = method.send(method.init(made, method.params(), 0), DeviceView("check", None))
    assert order is not None
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        process = TaskProcess(
            "fedavg",
            "numpy",
            BUDGET_BYTES,
            DATA,
            Path,
            Path(folder),
            command=confine.task_command(Path(folder)),
            plugins=(),
            most_s=TASK_S,
            most_bytes=BUDGET_BYTES,
        )
        try:
            with process:
                process.run_task(order, 0)
        except (ModelError, OSError) as error:
            raise JobError(f"one small task has failed: {error}") from None
