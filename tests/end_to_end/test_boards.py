"""Every known board's agent as an ordinary user's process: debugfs shut, a real broker, a round, kill -9 and back.

The smaller form of `tests/rehearsal`: no systemd, and trees of files in place of the kernels'.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import waiting
from ordinary import Served, User

from fedquilt import profiles, wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import JobEnded, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import Profile
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.engines.numpy import engine
from fedquilt.formats import job_bundle, toml
from fedquilt.testing.boards import BOARDS, write_fake_board
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.tools.simulation import agents

EVERY = [(board, jetpack) for board, layout in BOARDS.items() for jetpack in layout.jetpacks]
HELPED = ("jetson-tx2-4", "jetson-orin-nx-6")  # beside them a clock helper runs, as root where the suite does
VICTIM = "jetson-orin-nx-6"
DIGITS = Path(agents.__file__).parents[1] / "lab" / "demo" / "digits.npz"
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [16], "classes": 10}
ON_A_BOARD = """
import functools, sys
from pathlib import Path
from fedquilt import cli
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.clocks.client import ClockClient
root, helper = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
devices.create_device = functools.partial(devices.create_device, root=root, connect=lambda: ClockClient.connect(helper))
sys.exit(cli.main())
"""  # `fedquilt agent`, but that its board's files are below another root
LIMIT_S = 240.0


class Unset:
    """A clock helper that tells and sets nothing."""

    def request_status(self) -> HelperStatus:
        return HelperStatus(clocks=())


@dataclass
class Site:
    """Boards, each with its own files, agent.toml and user's home; the helpers of some, and the broker of all."""

    user: User
    broker: str
    running: dict[str, subprocess.Popen[bytes]]

    @property
    def log(self) -> Path:
        return self.user.folder / "agents.log"

    def plant(self, device: str, board: str, jetpack: int, share: int) -> None:
        folder = self.user.folder / device
        write_fake_board(folder, board, jetpack)
        table = {
            "device": device,
            "home": str(self.user.home / device),
            "broker": {"url": self.broker},
            "data": {"path": str(DIGITS), "partition": "iid", "share": share, "shares": len(EVERY)},
        }
        (folder / "agent.toml").write_text(toml.format_toml(table))

    def start(self, device: str) -> None:
        folder, helper = self.user.folder / device, self.user.folder / f"run-{device}" / "clocks.sock"
        command = (sys.executable, "-c", ON_A_BOARD, folder, helper, "-v", "agent", folder / "agent.toml")
        self.running[device] = self.user.start(*map(str, command), log=self.log)

    def all_run(self) -> None:
        ended = [device for device, process in self.running.items() if process.poll() is not None]
        assert not ended, f"the agents of {', '.join(ended)} have ended: {self.log.read_text()[-3000:]}"


@pytest.fixture
def site(user: User, embedded_broker: EmbeddedBroker) -> Iterator[Site]:
    """All boards, planted and shut; nothing runs yet but the broker and the helpers."""
    made = Site(user, embedded_broker.url, {})
    with contextlib.ExitStack() as helpers:
        for share, (board, jetpack) in enumerate(EVERY):
            device = f"{board}-{jetpack}"
            made.plant(device, board, jetpack, share)
            if device in HELPED:
                whole = user.folder / device
                if not user.root:  # what is shut to this user is shut to its helper too, so that one has a copy
                    whole = user.folder / f"whole-{device}"
                    shutil.copytree(user.folder / device, whole, symlinks=True)
                helpers.enter_context(Served(whole, user.folder / f"run-{device}", user.gid))
            user.shut(user.folder / device / "sys/kernel/debug")
        yield made
        user.close()  # the agents end before their helpers


def until(site: Site, condition: Callable[[], bool], what: str) -> None:
    """Wait while all agents run; agents that have ended change nothing any more."""

    def holds() -> bool:
        if not (held := condition()):
            site.all_run()
        return held

    waiting.until(holds, what, LIMIT_S, told=lambda: site.log.read_text()[-3000:])


def answered(home: Path, round: int) -> set[str]:
    if not (home / "fedquilt.db").exists():
        return set()
    with Store(home) as store:
        facts = [fact for _, _, fact in store.read_events(store.find_job("digits").id)] if store.readable_jobs() else []
    return {fact.update.device for fact in facts if isinstance(fact, UpdateAccepted) and fact.round == round}


def test_every_board_comes_online_carries_tasks_out_and_comes_back(site: Site, stage: Any, tmp_path: Path):
    """Profiles hold the points that root would see, where a helper runs; kill -9 in round 0 costs nobody its round."""
    listener = stage.join(site.broker, "listener", wire.Topics("fleet").device_topic("+", "up", "+"))
    told: dict[str, dict[str, Any]] = {"profile": {}, "presence": {}}

    def listen() -> bool:
        listener.wait(0.01)
        for message in listener.receive():
            route = wire.parse_topic(message.topic)
            if route.leaf in told:
                kind = Profile if route.leaf == "profile" else wire.Presence
                told[route.leaf].setdefault(str(route.device), []).append(wire.decode(message.payload, kind))
        return False

    names = {f"{board}-{jetpack}" for board, jetpack in EVERY}
    for device in sorted(names):
        site.start(device)
    until(site, lambda: listen() or told["profile"].keys() == names, "every profile")
    assert all(each[-1].online for each in told["presence"].values())
    for board, jetpack in EVERY:
        device, layout = f"{board}-{jetpack}", BOARDS[board]
        profile = told["profile"][device][-1]
        whole = site.user.folder / f"seen-by-root-{device}"
        write_fake_board(whole, board, jetpack)
        as_root = devices.create_device("auto", whole, connect=Unset if device in HELPED else lambda: None)
        assert profile.board == layout.model
        assert profile.memory_bytes == layout.memory_kib * 1024
        assert len(profile.points) == len(as_root.points)
        assert not profile.points or board in profiles.board_names()
    assert len(told["profile"][VICTIM][-1].points) > 100

    first = tensors.encode_tensors(engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(tmp_path / "job.bundle", {"network": NETWORK, "flops": 2400}, {"model": first})
    job = {
        "name": "digits",
        "method": "fedavg",
        "engine": "numpy",
        "rounds": 2,
        "params": {"lr": 0.1, "batch": 8, "epochs": 3},
        "cohort": {"deadline_s": LIMIT_S, "min_devices": len(EVERY)},
    }
    (tmp_path / "job.toml").write_text(toml.format_toml(job))
    home = tmp_path / "runs"
    command = [sys.executable, "-m", "fedquilt.cli", "run", str(tmp_path / "job.toml"), "--home", str(home)]
    with (tmp_path / "run.log").open("wb") as log:
        coordinator = subprocess.Popen([*command, "--broker", site.broker], stdout=log, stderr=log)
    try:
        until(site, lambda: bool(answered(home, 0) or coordinator.poll() is not None), "an answer")
        site.running[VICTIM].send_signal(signal.SIGKILL)
        site.running[VICTIM].wait()
        site.start(VICTIM)
        until(site, lambda: coordinator.poll() is not None, "the end of the job")
        assert coordinator.returncode == 0, (tmp_path / "run.log").read_text()
    finally:
        coordinator.kill()
        coordinator.wait()
    assert answered(home, 0) == answered(home, 1) == names
    with Store(home) as store:
        (end,) = [fact for _, _, fact in store.read_events(store.find_job("digits").id) if isinstance(fact, JobEnded)]
    assert end.status == "done"
    until(site, lambda: listen() or len({one.boot for one in told["presence"][VICTIM]}) == 2, "a second boot")
    assert "Traceback" not in site.log.read_text()
    for device in HELPED:  # the helper has put the board's own clocks back
        policy = site.user.folder / device / "sys/devices/system/cpu/cpufreq/policy0"
        assert (
            site.user.root is False
            or (policy / "scaling_min_freq").read_text() != (policy / "scaling_max_freq").read_text()
        )
