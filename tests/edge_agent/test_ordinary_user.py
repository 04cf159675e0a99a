"""The agent's parts carried out by an ordinary user: its task's process, its files, the clock helper's client."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from ordinary import Served, User
from waiting import wait_until

from fedquilt import cli
from fedquilt.arrays import tensors
from fedquilt.core import DataError, JobError, OperatingPoint, StoreError, Task, WorkEstimate
from fedquilt.data.examples import load_share as load_examples
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import enrolment
from fedquilt.edge_agent import settings as edge_agent_settings
from fedquilt.edge_agent.clocks.client import ClockClient
from fedquilt.edge_agent.settings import AgentSettings, BrokerSettings
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.agent import Facts
from fedquilt.tools.boards.doctor.findings import Finding, run_checks
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts
from fedquilt.transport.mqtt.broker import Broker
from tests.fake_boards import write_fake_board

NETWORK = {"name": "mlp", "inputs": 4, "hidden": [], "classes": 2}
MODEL = {"1.weight": np.zeros((2, 4), np.float32), "1.bias": np.zeros(2, np.float32)}
PARAMS = {"epochs": 1, "batch": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "network": NETWORK}


def order(home: Path, examples: Path, budget_bytes: int) -> WorkRequest:
    out = home / "out"
    out.mkdir(exist_ok=True)
    (home / "model").write_bytes(tensors.encode_tensors(MODEL))
    task = Task(
        job="j-1",
        round=0,
        attempt=0,
        method="fedavg",
        engine="numpy",
        actions=("check", "work"),
        params=PARAMS,
        bundles={},
        seed=7,
        deadline_s=60.0,
        work=WorkEstimate(flops=1e9),
    )
    return WorkRequest(
        task=task,
        device="d",
        budget_bytes=budget_bytes,
        data={"path": str(examples), "held": 0.2},
        bundles={"model": str(home / "model")},
        private_state=None,
        cache_folder=str(home / "cache"),
        output_folder=str(out),
    )


def carried_out(given: WorkRequest) -> WorkResult:
    worker = ChildWorker(60.0)

    def outcomes() -> Iterator[WorkResult]:
        return (event for event in worker.poll_events(time.monotonic()) if isinstance(event, WorkResult))

    try:
        worker.start(given, 0.0)
        return wait_until(lambda: next(outcomes(), None), "an answer of the task's process")
    finally:
        worker.close()


@pytest.fixture
def examples(user: User) -> Path:
    """Ten examples in a file of root's that all may read, in a folder that a test may shut."""
    place = user.folder / "examples"
    place.mkdir()
    draw = np.random.default_rng(0)
    np.savez(place / "data.npz", x=draw.random((10, 4), np.float32), y=np.arange(10) % 2)
    return place / "data.npz"


# -- the task's process ---------------------------------------------------------------------------


def trains(home: Path, examples: Path, budget_bytes: int) -> Any:
    outcome = carried_out(order(home, examples, budget_bytes))
    assert os.getuid() != 0
    return [outcome.code, outcome.reason, outcome.weight, outcome.base_bytes, outcome.peak_bytes]


def test_a_tasks_process_trains_and_its_memory_is_measured(user: User, examples: Path):
    code, reason, weight, base_bytes, peak_bytes = user.does(trains, user.home, examples, 1 << 30)
    assert (code, reason, weight) == ("ok", "", 8.0)
    assert 20 << 20 < base_bytes <= peak_bytes < 200 << 20


def test_a_tasks_process_is_killed_above_its_budget(user: User, examples: Path):
    code, reason, *_ = user.does(trains, user.home, examples, 1 << 20)
    assert code == "memory", reason


def examine(settings: AgentSettings, number: str) -> Finding:
    facts = Facts(MachineFacts(1.8e9), settings=settings, path=Path("agent.toml"))
    (found,) = [one for one in run_checks(doctor.CHECKS, facts) if one.number == number]
    return found


def is_told(home: Path, examples: Path, form: str) -> str:
    path = examples if form != "folder" else examples.parent
    with pytest.raises(DataError, match=r"cannot read .*: Permission denied|this user may not read") as raised:
        load_examples(DataSpec.parse({"path": str(path)}))
    settings = AgentSettings(device="d", home=str(home), data={"path": str(examples)})
    assert re.search("Permission denied|this user may not read", examine(settings, "FQ309").sentence)
    return str(raised.value)


@pytest.mark.parametrize("form", ["npz", "folder"])
def test_examples_that_may_not_be_read_are_an_error_of_the_data(user: User, examples: Path, form: str):
    if form == "npz":
        user.shut(examples)
        assert str(examples) in user.does(is_told, user.home, examples, form)
    user.shut(examples.parent)
    assert str(examples.parent) in user.does(is_told, user.home, examples, form)


def finds_a_cage(groups: Path, proc: Path) -> bool:
    return memory_budget.MemoryLimit(groups, proc).apply_limit(os.getpid(), 1 << 30)


def test_a_cage_that_may_not_be_looked_into_is_none(user: User):
    groups, proc = user.folder / "cgroup", user.folder / "proc"
    (groups / "system.slice/agent").mkdir(parents=True)
    (groups / "system.slice/agent/cgroup.subtree_control").touch()
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/system.slice/agent\n")
    user.shut(groups / "system.slice")
    assert user.does(finds_a_cage, groups, proc) is False


# -- its own files --------------------------------------------------------------------------------


def names_secrets(settings: AgentSettings, etc: Path, run: Path) -> str | None:
    with mock.patch.dict(os.environ, CREDENTIALS_DIRECTORY=str(run)):
        assert edge_agent_settings.apply_systemd_credentials(settings) == settings
    with pytest.raises(JobError, match=r"ca\.crt cannot be read: check its path and permissions"):
        Broker.from_url(url="mqtts://127.0.0.1", ca=settings.broker.ca)
    with pytest.raises(StoreError, match=r"look for .*device\.key: Permission denied"):
        enrolment.load_or_create_key(
            enrolment.CredentialPaths(*(etc / name for name in ("ca.crt", "device.crt", "device.key", "token")))
        )
    return examine(settings, "FQ304").fix


def test_secrets_that_are_roots_are_named(user: User):
    etc, run = user.folder / "etc", user.folder / "run"
    for folder in (etc, run):
        folder.mkdir()
        for name in ("ca.crt", "device.crt", "device.key"):
            (folder / name).write_text("a secret")
        user.shut(folder)
    files = {"ca": str(etc / "ca.crt"), "cert": str(etc / "device.crt"), "key": str(etc / "device.key")}
    settings = AgentSettings(device="d", home=str(user.home), broker=BrokerSettings(url="mqtts://127.0.0.1", **files))
    assert user.does(names_secrets, settings, etc, run) == "sudo fedquilt doctor agent.toml"


def finds_the_folder(home: Path) -> Any:
    settings = AgentSettings(device="d", home=str(home))
    return ["FQ302", examine(settings, "FQ302").severity, examine(settings, "FQ303").number]


def test_an_agents_folder_that_may_not_be_seen_is_found(user: User):
    state = user.folder / "state"
    (state / "agent/blobs").mkdir(parents=True)
    user.shut(state)
    assert user.does(finds_the_folder, state / "agent") == ["FQ302", "error", "FQ303"]


# -- the clock helper's client --------------------------------------------------------------------


def said(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["board", "clocks", *arguments]) == 0
    return out.getvalue()


def held_for_a_moment(*arguments: str) -> str:
    with mock.patch("fedquilt.tools.boards.clocks.time.sleep", side_effect=KeyboardInterrupt):
        return said("hold", *arguments)


def test_the_clock_commands_are_an_ordinary_users(user: User):
    root = user.folder / "board"
    write_fake_board(root, "jetson-orin-nx", 6)
    if user.root:
        user.shut(root / "sys/kernel/debug")
    where = ("--root", str(root))
    (root / "run").mkdir()
    with Served(root, root / "run/fedquilt", user.gid):
        told = user.does(said, "status", *where)
        assert "lists 204 2133 3199" in told
        held = user.does(held_for_a_moment, "emc=2133MHz", *where)
        assert held.startswith("pinned: emc 2133 MHz (Ctrl-C to unpin)\nunpinned")
    if not user.root:
        user.shut(root / "sys/kernel/debug")
    alone = user.does(said, "status", *where)
    assert "emc     emc: " in alone
    assert "frequencies readable only by root" in alone


def found(root: Path) -> Any:
    seen = machine_facts.read_machine(root, 1.8e9, 0.0)
    return [[one.severity, one.sentence] for one in run_checks(doctor.CHECKS, Facts(seen)) if one.number == "FQ172"]


def test_the_doctor_asks_the_helper_for_what_this_user_may_not_read(user: User):
    root = user.folder / "board"
    write_fake_board(root, "jetson-orin-nx", 6)
    whole = root
    if not user.root:
        whole = user.folder / "whole"
        write_fake_board(whole, "jetson-orin-nx", 6)
    user.shut(root / "sys/kernel/debug")
    (root / "run").mkdir()
    ((severity, sentence),) = user.does(found, root)
    assert (severity, sentence.split(":")[0]) == ("ok", "the frequencies of emc are unknown")
    with Served(whole, root / "run/fedquilt", user.gid) as served:
        assert served.path == root / machine_facts.SOCKET
        assert user.does(found, root) == [
            ["ok", "the clock helper reports the frequencies of emc, which this user cannot read"]
        ]
    shutil.rmtree(root / "run/fedquilt")
    blind = user.folder / "blind"  # without debugfs and without modes, root itself knows no list
    write_fake_board(blind, "jetson-orin-nx", 6)
    shutil.rmtree(blind / "sys/kernel/debug")
    (blind / "etc/nvpmodel.conf").unlink()
    with Served(blind, root / "run/fedquilt", user.gid):
        ((severity, sentence),) = user.does(found, root)
    assert severity == "warning"
    assert "neither by this user nor by the clock helper" in sentence


def holds(socket: Path, limit: Path) -> Any:
    clocks = ClockClient.connect(socket)
    assert clocks is not None
    clocks.pin(OperatingPoint(name="slow", cpu_hz=345.6e6))
    return [limit.read_text().strip(), len(clocks.request_status().clocks)]


def test_a_client_hears_the_helper_within_its_own_rights(user: User):
    root = user.folder / "board"
    write_fake_board(root, "jetson-tx2", 4)
    limit = root / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"
    with Served(root, user.folder / "run", user.gid) as served:
        assert user.does(holds, served.path, limit) == ["345600", 4]
    assert limit.read_text().strip() == "2035200"


def looks(shut: Path, own: Path, root: bool) -> Any:
    with pytest.raises(PermissionError):
        (shut / "inside").is_dir()
    with pytest.raises(PermissionError):
        list(shut.iterdir())
    if root:
        with pytest.raises(PermissionError):
            os.setuid(0)
    own.write_text("mine")
    return [os.geteuid(), os.getgroups() if root else [], sys.executable]


def fails() -> float:
    return 1 // 0


def test_an_ordinary_user_is_no_root(user: User):
    shut = user.folder / "shut"
    (shut / "inside").mkdir(parents=True)
    user.shut(shut)
    assert user.does(looks, shut, user.home / "own", user.root) == [user.uid, [], sys.executable]
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        user.does(fails)
