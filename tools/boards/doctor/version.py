"""Check before an upgrade that this version of the agent can run (`fedquilt agent --check`).

The check reads the agent's files and runs a small task in a separate process. It changes none of the agent's files, so
an agent may run at the same time. Unreadable data are a warning, and `fedquilt doctor` reports other problems that do
not prevent an agent from running.
"""

from __future__ import annotations

import logging
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
from fedquilt.edge_agent.task import sandbox
from fedquilt.tools.boards.doctor import agent
from fedquilt.tools.boards.doctor.findings import run_checks
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts
from fedquilt.tools.simulation.task_process import TaskProcess

log = logging.getLogger(__name__)

TASK_S: Final = 300.0  # importing numpy from a slow SD card takes long
BUDGET_BYTES: Final = 1 << 30
NETWORK: Final = {"name": "mlp", "inputs": 5, "hidden": [], "classes": 4}
DATA: Final = {"dataset": "fedpews-3.2k", "limit": 32}
MODULES: Final = (
    "edge_agent.daemon",
    "transport.mqtt.link",
    "security.authenticated_link",
    "edge_agent.power.learned_model",
)


def check_version(settings: AgentSettings, path: Path) -> None:
    """Raise JobError unless an agent of this version can run a small task with these settings."""
    for module in MODULES:
        try:
            import_module(f"fedquilt.{module}")
        except ImportError as error:
            raise JobError(f"module {module} cannot be imported ({error}): install the missing package") from None
    facts = agent.Facts(MachineFacts(time.time()), settings=settings, path=path)
    for finding in run_checks((agent.HOME, *agent.IDENTITY), facts):
        if finding.severity == "error":
            raise JobError(f"{finding.sentence} (fix: {finding.fix})")
    for finding in run_checks((agent.EXAMPLES,), facts):  # no error, because an upgrade does not change data
        if finding.severity != "ok":
            log.warning("%s (fix: %s)", finding.sentence, finding.fix)
    read_sensors(settings)
    train_small_task()


def read_sensors(settings: AgentSettings) -> None:
    profile = None if settings.profile is None else profiles.find_board_profile(settings.profile)
    meter = None if settings.meter is None else devices.create_meter(settings.meter)
    devices.create_device(settings.board, profile=profile, meter=meter).read_sensors(time.monotonic())


def train_small_task() -> None:
    method, model = methods.load("fedavg"), numpy_engine.init_tensors(NETWORK, seed=0)
    bundle = Bundle({"network": NETWORK}, {"model": BlobRef(sha256="0" * 64, size=0)}, lambda name: model)
    task_spec = method.send(method.init(bundle, method.params(), 0), DeviceView("check", None))
    assert task_spec is not None
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        process = TaskProcess(
            "fedavg",
            "numpy",
            BUDGET_BYTES,
            DATA,
            Path,
            Path(folder),
            command=sandbox.task_command(Path(folder)),
            plugins=(),
            timeout_s=TASK_S,
            limit_bytes=BUDGET_BYTES,
        )
        try:
            with process:
                process.run_task(task_spec, 0)
        except (ModelError, OSError) as error:
            raise JobError(f"test task failed: {error}") from None
