"""One fault of a coordinator's folder is planted, and that is what is found."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.device_status import TelemetryStore
from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded, JobStarted
from fedquilt.coordinator.rounds.rollout import RolloutPlan, RolloutStarted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef
from fedquilt.formats import job_bundle
from fedquilt.tools.boards.doctor import coordinator
from fedquilt.tools.boards.doctor.findings import Finding, to_finding

ROOM = 10**11


def free(folder: Path) -> int:
    return ROOM


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with Store(tmp_path / "runs") as store:
        store.set_status(add(store, tmp_path), "stopped")
    return tmp_path / "runs"


def add(store: Store, folder: Path, **table: Any) -> str:
    made = folder / "job.bundle"
    if not made.is_dir():
        job_bundle.write_bundle(made, {}, {})
    return store.add_job(settings.parse_job({"name": "digits", "method": "fedavg", **table}), made)


def bad(home: Path, free: Callable[[Path], int] = free) -> list[tuple[str, str]]:
    return [(one.number, one.severity) for one in found(home, free) if one.severity != "ok"]


def found(home: Path, free: Callable[[Path], int] = free) -> list[Finding]:
    return sorted(
        (to_finding(number, verdict) for number, verdict in coordinator.check_coordinator(home, free)),
        key=lambda one: one.number,
    )


def test_a_healthy_folder_has_no_finding(home: Path) -> None:
    assert bad(home) == []
    with Store(home) as store:
        assert store.acquire_lock()
        assert bad(home) == []
        (served,) = [one for one in found(home) if one.number == "FQ507"]
        assert re.search(r"a coordinator serves .*; the last write was \S+ \S+ ago$", served.sentence), served.sentence


def test_an_unreachable_broker_that_the_coordinator_has_noted_is_found(home: Path) -> None:
    with Store(home) as store, TelemetryStore(home, writes=True) as statuses:
        statuses.record_broker_outage(time.time() - 300.0)
        assert bad(home) == []  # no coordinator waits
        assert store.acquire_lock()
        assert bad(home) == [("FQ513", "error")]
        (outage,) = [one for one in found(home) if one.number == "FQ513"]
        assert outage.sentence == "the coordinator waits for its broker, unreachable for 5 min"


def test_a_folder_that_is_none_is_found_and_not_made(tmp_path: Path) -> None:
    assert bad(tmp_path / "none") == [("FQ502", "warning")]
    assert not (tmp_path / "none").exists()


def test_a_folder_that_everybody_can_read_is_found(home: Path) -> None:
    home.chmod(0o750)
    assert bad(home) == []
    home.chmod(0o755)
    assert bad(home) == [("FQ512", "warning")]


def test_a_full_disk_is_found(home: Path) -> None:
    assert bad(home, lambda folder: 5 * 10**8) == [("FQ505", "warning")]
    assert bad(home, lambda folder: 5 * 10**6) == [("FQ505", "error")]


@pytest.mark.parametrize("at", [0, 30])
def test_a_damaged_database_is_found(home: Path, at: int) -> None:
    database = home / "fedquilt.db"
    whole = database.read_bytes()
    begin = at * len(whole) // 100
    database.write_bytes(whole[:begin] + b"\xff" * 5000 + whole[begin + 5000 :])
    assert bad(home) == [("FQ506", "error")]


def test_a_job_of_another_version_is_found(home: Path) -> None:
    with Store(home) as store:
        add(store, home.parent)
        (first, *_) = store.readable_jobs()
        store._db.execute("update jobs set settings = '{}' where id = ?", (first.id,))
    assert bad(home) == [("FQ504", "error"), ("FQ507", "warning")]
    with Store(home) as store:
        insert = "insert into facts (job, at, body, sum) values (?, 0, '{}', x'00')"
        store._db.execute(insert, (store.readable_jobs()[0].id,))
    assert bad(home) == [("FQ504", "error"), ("FQ504", "error"), ("FQ507", "warning")]


def test_damaged_logs_are_told_from_those_of_another_version(home: Path) -> None:
    with Store(home) as store:
        id = store.rollouts.add_rollout(RolloutPlan("settings", "s", settings={"budget": "1GB"}))
        store.rollouts.append_events([(id, RolloutStarted(1))])
        store._db.execute("update jobs set status = 'done'")
        store._db.execute("update rollout_facts set at = at + 1")
    damaged = [one for one in found(home) if one.number == "FQ504"]
    assert [one.fix for one in damaged] == ["restore a backup of the whole folder, or begin with an empty one"] * 2
    assert f"the event log of {id} in" in damaged[1].sentence


def test_a_job_that_waits_for_devices_is_found_with_the_reason(home: Path, tmp_path: Path) -> None:
    with Store(home) as store:
        id = add(store, tmp_path, cohort={"min_devices": 3})
        store.set_status(id, "running")
        other = add(store, tmp_path)
        assert store.acquire_lock()
        assert bad(home) == [("FQ509", "warning")]
        store.append_event(id, EligibilityRecorded(0, ("a", "b"), {"offline": ("c",)}))
        told = [one for one in found(home) if one.number in ("FQ508", "FQ509")]
        assert other in told[1].sentence or other in told[0].sentence
        (stuck,) = [one for one in told if one.number == "FQ509"]
        assert "waits for 3 eligible devices" in stuck.sentence
        assert "c: offline" in stuck.sentence
        store.append_event(id, CohortSelected(0, 0, ("a", "b", "d")))
        assert bad(home) == []


def test_a_bundle_or_a_state_that_is_gone_is_found(home: Path, tmp_path: Path) -> None:
    with Store(home) as store:
        id = add(store, tmp_path)
        store.append_event(id, JobStarted(BlobRef(sha256="ab" * 32, size=1)))
        assert store.acquire_lock()
        assert ("FQ511", "error") in bad(home)
        assert ("FQ510", "error") not in bad(home)
        (tmp_path / "job.bundle/bundle.json").unlink()
        assert ("FQ510", "error") in bad(home)


def test_the_command_says_the_worst_by_its_exit_code(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--home", str(tmp_path / "none"), "--format", "json"]
    code = main(arguments)
    told = json.loads(capsys.readouterr().out)
    assert code == {"warning": 10, "error": 11}[told["severity"]]
    assert {"FQ502"} <= {one["number"] for one in told["findings"]}
    assert main(["doctor", "agent.toml", "--home", str(home)]) == 2
    assert "leave out --home and --broker" in capsys.readouterr().err
    assert main(["doctor", "--ca", "x"]) == 2


def test_what_is_wrong_is_told_with_its_mend(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(home) as store:
        add(store, tmp_path)
    main(["doctor", "--home", str(home)])
    lines = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(lines) if "FQ507" in line)
    assert lines[at].startswith("warning  FQ507  no coordinator serves")
    assert lines[at + 1].strip() == f"fix: fedquilt serve --home {home}"
    assert "warning" in lines[-1]
