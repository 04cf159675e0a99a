"""Simulated fleets run the agents' own code: on virtual time, and as processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from waiting import LIMIT_S, is_running, wait_until

from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views.run_summary import RunSummary, summarise_events
from fedquilt.core import DataError, JobError
from fedquilt.core.evaluation import main_metric_value
from fedquilt.data import examples
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.artefacts import export
from fedquilt.tools.simulation import agents as fleet
from fedquilt.transport.mqtt.link import MqttLink

DIGITS = Path(fleet.__file__).parents[1] / "lab" / "demo" / "digits.npz"
DATA = {"path": str(DIGITS), "partition": "dirichlet", "alpha": 1.0}
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [16], "classes": 10}


def plan(folder: Path, **changes: object) -> fleet.FleetPlan:
    table = {
        "name": "fleet",
        "method": "fedavg",
        "rounds": 2,
        "engine": "numpy",
        "params": {"lr": 0.2, "batch": 16},
        "check": {"every": 2},
        "fleet": {"devices": 3, "boards": ["jetson-nano", "jetson-tx2"], "budgets": ["256MB", "512MB"]},
        "data": DATA,
        **changes,
    }
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(folder / "bundle", {"network": NETWORK, "flops": 2176}, {"model": first})
    return fleet.FleetPlan(settings.parse_job(table), folder / "bundle", folder / "runs")


def summary_of(given: fleet.FleetPlan, run: str) -> RunSummary:
    with Store(given.home) as store:
        return summarise_events(given.job, store.read_events(run))


def facts_of(given: fleet.FleetPlan, run: str) -> list[object]:
    with Store(given.home) as store:
        return [fact for _, _, fact in store.read_events(run)]


def test_a_fleet_on_virtual_time_that_waits_for_boards_that_never_come_says_so(tmp_path: Path) -> None:
    given = plan(tmp_path, cohort={"min_devices": 5}, fleet={"devices": 2})
    with pytest.raises(JobError, match="lacks devices in round 1"):
        fleet.run_fleet_virtually(given)


def test_a_job_asks_the_boards_that_it_selects_and_no_others(tmp_path: Path) -> None:
    fleet_of = {"devices": 3, "labels": ["site=lab", "site=hall window"]}
    given = plan(tmp_path, cohort={"select": ["site=lab", "!window"]}, fleet=fleet_of)
    run, ended = fleet.run_fleet_virtually(given)
    asked = {fact.update.device for fact in facts_of(given, run) if isinstance(fact, UpdateAccepted)}
    assert (ended, asked) == ("done", {"x86-host-00", "x86-host-02"})
    nobody = plan(tmp_path, cohort={"select": ["attic"]}, fleet=fleet_of)
    with pytest.raises(JobError, match=r"\[cohort\] select = \['attic'\]: no simulated device"):
        fleet.run_fleet_virtually(nobody)
    many = plan(tmp_path, cohort={"select": ["window"], "size": 2}, fleet=fleet_of)
    with pytest.raises(JobError, match="the fleet has 1 devices of"):
        fleet.run_fleet_virtually(many)


def test_a_fleet_on_virtual_time_trains_and_reports_what_its_boards_would_take(tmp_path: Path) -> None:
    given = plan(tmp_path)
    run, status = fleet.run_fleet_virtually(given)
    assert status == "done"
    facts = facts_of(given, run)
    found = summary_of(given, run).device_costs()["jetson-nano-00"]
    assert found.tasks == 3  # two rounds, and the closing evaluation
    assert found.energy_j is not None
    assert "jetson-nano" in str(found.energy_source)
    sums = [fact.evaluation for fact in facts if isinstance(fact, RoundCommitted)]
    checks = [main_metric_value(each) for each in sums if each is not None]
    assert checks[-1] > checks[0] + 0.2
    with Store(given.home) as store:
        assert "network" in export.export_result(store, run, tmp_path / "weights.safetensors")
    assert tensors.read_tensors(tmp_path / "weights.safetensors").keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}


def test_an_export_says_that_the_trained_networks_stay_on_devices(tmp_path: Path) -> None:
    given = plan(tmp_path, method="local")
    run, _ = fleet.run_fleet_virtually(given)
    with Store(given.home) as store:
        described = export.export_result(store, run, tmp_path / "weights.safetensors")
    assert "untrained: local leaves the trained ones on devices" in described


def test_processes_on_a_real_broker_end_with_the_same_bits_as_virtual_time(tmp_path: Path) -> None:
    virtual, real = plan(tmp_path / "virtual"), plan(tmp_path / "real")
    one, _ = fleet.run_fleet_virtually(virtual)
    other, status = fleet.run_fleet_on_broker(real, None)
    assert status == "done"
    last = [
        [f for f in facts_of(p, run) if isinstance(f, RoundCommitted)][-1] for p, run in ((virtual, one), (real, other))
    ]
    assert last[0].state == last[1].state
    peaks = [fact.update.usage.peak_bytes for fact in facts_of(real, other) if isinstance(fact, UpdateAccepted)]
    assert all(peak is not None and 10e6 < peak < 256e6 for peak in peaks)


def test_a_fleet_whose_agents_all_fail_says_what_one_of_them_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "AGENT_PROGRAM", "raise SystemExit('the port is taken')")
    with pytest.raises(JobError, match=r"every agent has ended \(last line of jetson-nano-00: the port is taken"):
        fleet.run_fleet_on_broker(plan(tmp_path), None)


def test_an_agent_that_is_killed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = fleet.AGENT_PROGRAM.replace(
        "import sys;", "import os, sys; 'jetson-tx2-01' in sys.argv[-1] and os.kill(os.getpid(), 9);"
    )
    monkeypatch.setattr(fleet, "AGENT_PROGRAM", killed)
    given = plan(tmp_path, cohort={"size": 2}, check={"every": 0})
    monkeypatch.setattr(
        fleet.FleetPlan, "queue_or_resume", lambda plan, store: store.add_job(plan.job, plan.bundle.resolve())
    )
    _, status = fleet.run_fleet_on_broker(given, None)
    assert status == "done"
    told = [line for line in capsys.readouterr().out.splitlines() if "the agent of" in line]
    assert len(told) == 1
    assert "the agent of jetson-tx2-01 was killed by SIGKILL; last line: (nothing)" in told[0]
    assert told[0].endswith("2 agents are left")


def test_a_fleet_that_is_killed_goes_on_when_it_is_started_again_and_leaves_no_agents(tmp_path: Path) -> None:
    job, given = tmp_path / "job.toml", plan(tmp_path, rounds=9, check={"every": 0})
    table = msgspec.to_builtins(given.job)
    job.write_text(
        toml.format_toml({key: table[key] for key in ("name", "method", "rounds", "engine", "params", "fleet", "data")})
    )
    words = [sys.executable, "-m", "fedquilt.cli", "simulate", str(job), "--link", "embedded"]
    job.with_suffix(".bundle").symlink_to(given.bundle)
    words += ["--home", str(given.home)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        try:
            while "round 2 of 9: " not in first.stdout.readline():
                assert first.poll() is None
            agents = children(first.pid)
            assert len(agents) >= 3
        finally:
            first.kill()
    wait_until(lambda: not any(is_running(pid) for pid in agents), "the end of every agent")
    again = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 0, again.stdout + again.stderr
    with Store(given.home) as store:
        (row,) = store.readable_jobs()
        assert row.status == "done"
        committed = [fact.round for _, _, fact in store.read_events(row.id) if isinstance(fact, RoundCommitted)]
    assert committed == list(range(9))
    assert "round 1 of 9: " not in again.stdout


def children(pid: int) -> list[int]:
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(pid for each in found if is_running(each) for pid in children(each))]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fleet": {"devices": 3, "boards": ["jetson-nanoo"]}}, r"\[fleet\].*jetson-nanoo"),
        ({"fleet": {"devices": 3, "budgets": ["128XB"]}}, r"\[fleet\].*128XB"),
        ({"data": {}}, r"\[data\]"),
        ({"data": {**DATA, "partition": "dirichelt"}}, "dirichelt"),
        ({"data": {**DATA, "alpha": 0.0}}, "alpha"),
        ({"data": {**DATA, "path": "/nowhere/digits.npz"}}, "/nowhere/digits.npz"),
        ({"data": {**DATA, "partition": "iid", "limit": 2}}, "share 2 of 3 .* has none of the 2 examples"),
        ({"cohort": {"size": 4}}, r"\[cohort\] size = 4, but the fleet has 3 devices"),
    ],
)
def test_a_fleet_that_cannot_run_leaves_no_run_behind(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    given = plan(tmp_path, **changes)
    for run in (lambda: fleet.run_fleet_virtually(given), lambda: fleet.run_fleet_on_broker(given, None)):
        with pytest.raises((JobError, DataError), match=said):
            run()
    with Store(given.home) as store:
        assert store.readable_jobs() == []


def test_a_fleet_in_a_folder_that_was_used_before_is_fresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = plan(tmp_path)
    took = []
    for _ in range(2):
        run, status = fleet.run_fleet_virtually(given)
        assert status == "done"
        took.append(summary_of(given, run).total.down_bytes)
    assert took[0] == took[1] > 0
    assert caplog.records == []


@pytest.mark.parametrize(("method", "kept"), [("scaffold", {"counted.json", "private"}), ("fedavg", set())])
def test_boards_of_a_run_that_is_over_keep_what_is_theirs_and_no_blobs(
    tmp_path: Path, method: str, kept: set[str]
) -> None:
    given = plan(tmp_path, method=method)
    run, status = fleet.run_fleet_virtually(given)
    assert status == "done"
    home = given.get_agent_folder(run, "jetson-nano-00")
    assert {path.name for path in home.glob("*")} == kept
    assert not list(given.get_agent_folder(run, "").glob(".*"))
    assert next(table["home"] for table in given.make_agent_tables()) == str(
        given.get_agent_folder("", "jetson-nano-00")
    )


def test_the_command_that_an_interrupted_fleet_prints_resumes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(store: Store, link: MqttLink, fleet: str, *given: object, only: str, **options: object) -> None:
        assert fleet == "own"
        link.close()
        store.set_status(only, "running")

    monkeypatch.setattr(fleet, "run_coordinator", interrupted)
    monkeypatch.setattr(fleet, "start_agents", lambda *given: contextlib.nullcontext({}))
    given, job = plan(tmp_path), tmp_path / "job.toml"
    table = msgspec.to_builtins(given.job)
    job.write_text(toml.format_toml({key: table[key] for key in ("name", "method", "engine", "params", "data")}))
    job.with_suffix(".bundle").symlink_to(given.bundle)
    words = ["simulate", str(job), "--link", "embedded", "--devices", "2", "--fleet", "own"]
    words += ["--home", str(tmp_path / "my runs")]
    for _ in range(2):
        assert main(words) == 130
        words = shlex.split(
            capsys.readouterr().out.rpartition("interrupted; `fedquilt ")[2].rpartition("` continues")[0]
        )
    with Store(tmp_path / "my runs") as store:
        (row,) = store.readable_jobs()
    assert row.job.cohort.start_devices == 2


def test_virtual_time_waits_for_no_disk_and_processes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    given = plan(tmp_path)
    assert fleet.run_fleet_virtually(given)[1] == "done"
    assert synced == []
    with Store(tmp_path / "real") as store, Store(tmp_path / "virtual", durable=False) as other:
        assert store._db.execute("pragma synchronous").fetchone() == (2,)  # full
        assert other._db.execute("pragma synchronous").fetchone() == (0,)
        settled = len(synced)  # the folders that hold all that is to come
        store.blob_store.store_bytes(b"x")
        assert len(synced) == settled + 2  # the file and its folder
        other.blob_store.store_bytes(b"x")
        assert len(synced) == settled + 2


def test_a_fleets_data_is_read_once_for_all_its_boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    read = examples.open_split
    monkeypatch.setattr(examples, "open_split", lambda spec: reads.append(spec) or read(spec))
    given = plan(tmp_path)
    fleet.run_fleet_virtually(given)
    assert len(reads) == 2  # once before anything is queued


def test_ctrl_c_in_the_terminal_of_a_command_reaches_it_alone(tmp_path: Path) -> None:
    with fleet.start_agents(plan(tmp_path).make_agent_tables()[:1], {"url": "mqtt://127.0.0.1:1"}) as started:
        assert os.getpgid(started["jetson-nano-00"].pid) != os.getpgid(0)
