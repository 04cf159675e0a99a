"""Large updates that come in turn through an S3-compatible store, among boards and a coordinator that are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import object_stores
import pytest
from cutting import Change, Relay
from kills import private
from processes import TABLE, Processes, facts
from waiting import until

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.background_worker import LARGE_BYTES
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views.devices import load_devices
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.simulation import agents as fleet

pytestmark = pytest.mark.nightly

NETWORK = {"name": "mlp", "inputs": 64, "hidden": [1000, 1000], "classes": 10}
BOARDS, ROUNDS = 5, 2
LIMIT_S = 600.0


class Uploads:
    """What devices put into a store, through a relay: 16 kB a second each until it is `wide`."""

    def __init__(self) -> None:
        self.wide = threading.Event()
        self.begun: list[str] = []  # devices
        self.whole: list[str] = []  # those whose upload has passed

    def sent(self, number: int) -> Change:
        """Bytes of a connection pass unchanged, those of a device's update after a pause."""
        device, size = "", 0

        def passed(offset: int, data: bytes) -> bytes:
            nonlocal device, size
            if offset == 0 and data.startswith(b"PUT /bucket/models/fleet/up/"):
                device, head = data.split(b"/")[5].decode(), data.split(b"\r\n\r\n")[0]
                self.begun.append(device)
                size = len(head) + 4 + int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            if device and not self.wide.is_set():
                self.wide.wait(1.0)
            if device and offset + len(data) == size:
                self.whole.append(device)
            return data

        return passed


@pytest.fixture
def moto() -> Iterator[str]:
    """Its origin."""
    with object_stores.moto() as origin:
        yield origin


def job(folder: Path) -> fleet.FleetPlan:
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    assert len(first) > LARGE_BYTES
    job_bundle.write_bundle(folder / "job.bundle", {"network": NETWORK, "flops": 2_200_000}, {"model": first})
    table = {
        **TABLE,
        "method": "scaffold",
        "rounds": ROUNDS,
        "params": {"lr": 0.05, "batch": 32, "epochs": 1},
        "cohort": {"deadline_s": LIMIT_S, "start_devices": BOARDS, "min_devices": BOARDS},
        "data": {**TABLE["data"], "classes": 5},
        "fleet": {"devices": BOARDS, "boards": ["jetson-nano"], "budgets": ["512MB"]},
    }
    (folder / "job.toml").write_text(toml.format_toml(table))
    return fleet.FleetPlan(settings.load_job(folder / "job.toml"), folder / "job.bundle", folder / "virtual")


def test_boards_and_a_coordinator_that_die_in_mid_turn_cost_no_update_and_no_bit(
    tmp_path: Path, processes: Processes, mosquitto: Callable[..., Any], moto: str
) -> None:
    """One board is killed while it waits, one while it sends, the coordinator while both happen; SCAFFOLD's bits."""
    broker, log, home, plan, uploads = mosquitto(), tmp_path / "log", tmp_path / "runs", job(tmp_path), Uploads()
    store, relay = object_stores.bucket(moto), Relay(int(moto.rpartition(":")[2]), sent=uploads.sent)
    home.mkdir()
    (home / "limits.toml").write_text("waiting_mb = 1\n")  # less than an update: two at a time
    commands = processes.start_agents(tmp_path, plan.make_agent_tables(), broker.url, log.name)
    where = ("--blobs-backend", f"s3=http://127.0.0.1:{relay.port}/bucket/models")
    own = {**object_stores.KEYS, "PYTHONPATH": str(object_stores.install(tmp_path / "site"))}  # no board has the keys
    commands["run"] = ("run", str(tmp_path / "job.toml"), "--home", str(home), "--broker", broker.url, *where)
    processes.start("run", log, *commands["run"], **own)

    def step(wanted: str, round: int) -> list[str]:
        """Boards that wait, or send, in a round, as `devices` shows them."""
        boards = [each.board for each in load_devices(home)] if (home / "boards.db").exists() else []
        doing = {each.device: each.doing for each in boards if each.doing is not None}
        return sorted(name for name, each in doing.items() if (each.step, each.round) == (wanted, round))

    def die(name: str) -> None:
        processes.kill(name)
        processes.start(name, log, *commands[name], **(own if name == "run" else {}))

    def others_wait(round: int) -> bool:
        return len(step("sending", round)) == 2 and len(step("waiting", round)) == BOARDS - 2

    until(lambda: others_wait(0), "turns in round 0", LIMIT_S, told=log.read_text)
    waits, sends = step("waiting", 0)[0], step("sending", 0)[0]
    assert set(uploads.begun) == set(step("sending", 0))
    die(waits)
    die(sends)
    uploads.wide.set()
    until(lambda: any(isinstance(fact, RoundCommitted) for fact in facts(home)), "round 0", LIMIT_S, told=log.read_text)
    uploads.wide.clear()
    before = len(uploads.begun)
    until(lambda: others_wait(1), "turns in round 1", LIMIT_S, told=log.read_text)
    assert set(uploads.begun[before:]) == set(step("sending", 1))
    die("run")
    uploads.wide.set()
    until(lambda: isinstance(facts(home)[-1], JobEnded), "the end of the job", LIMIT_S, told=log.read_text)
    assert processes.running["run"].wait(timeout=60) == 0, log.read_text()

    found = facts(home)
    counted = [(fact.round, fact.update.device) for fact in found if isinstance(fact, UpdateAccepted)]
    assert len(counted) == len(set(counted)) == (ROUNDS + 1) * BOARDS  # and the closing evaluation
    virtual, _ = fleet.run_fleet_virtually(plan)
    with Store(plan.home) as calm:
        states = [fact.state for _, _, fact in calm.read_events(virtual) if isinstance(fact, RoundCommitted)]
    assert [fact.state for fact in found if isinstance(fact, RoundCommitted)] == states
    for table in plan.make_agent_tables():
        kept = private(tmp_path / table["device"])
        assert kept is not None
        assert kept == private(plan.get_agent_folder(virtual, table["device"]))
    assert set(uploads.whole) == {each["device"] for each in plan.make_agent_tables()}
    assert b"/up/" not in object_stores.asked(store.sign_url("GET", ""), "GET")[1]
    relay.close()
