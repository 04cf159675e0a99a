"""Agents are upgraded and taken back in the middle of a job: real processes, Mosquitto, a loop in a unit's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import upgrades
from processes import TABLE, Processes, make_job, read_events
from waiting import wait_until

import fedquilt
from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import devices
from fedquilt.formats import toml
from fedquilt.tools.simulation import agents as fleet

LOOP = 'while :; do "$@"; sleep 0.2; done'


class Units:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "agents.log"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, table: dict[str, Any], url: str) -> None:
        name = str(table["device"])
        path = self.folder / f"{name}.toml"
        told = {**table, "home": str(self.folder / name), "broker": {"url": url}, "upgrade": {"unsigned": True}}
        path.write_text(toml.format_toml({**told, "telemetry_s": 5.0}))
        command = upgrades.launcher(self.folder / f"{name}-versions", "agent", str(path))
        with self.log.open("ab") as log:
            made = subprocess.Popen(
                ["sh", "-c", LOOP, "sh", *command], stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        self._running.append(made)

    def said(self) -> str:
        """Ends of all logs, and the facts last written: a board that is silent is explained by the other side's."""
        logs = [path for path in (self.folder / "serve.log", self.folder / "run.log", self.log) if path.exists()]
        ends = [f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in logs]
        latest = [f"{type(fact).__name__} {str(fact)[:300]}" for fact in read_events(self.folder / "runs")[-12:]]
        return "\n".join([*ends, "facts:", *latest])

    def end(self) -> None:
        for process in self._running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Units]:
    made = Units(tmp_path)
    yield made
    made.end()


def order(*words: str) -> str:
    command = [sys.executable, "-m", "fedquilt.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def committed(home: Path) -> int:
    return sum(isinstance(fact, RoundCommitted) for fact in read_events(home))


def versions(home: Path) -> dict[str, str | None]:
    return {each.board.device: each.board.version for each in devices.load_devices(home) if each.state != "offline"}


def status(home: Path) -> str:
    with Store(home) as store:
        return store.rollouts.find_rollout().state.status


def test_agents_are_upgraded_and_taken_back_in_the_middle_of_a_job(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes, units: Units
) -> None:
    """No round is without a board, no work is lost, and each state has the bits that it has on virtual time."""
    plan = make_job(tmp_path)
    path, broker, home = tmp_path / "job.toml", mosquitto(), tmp_path / "runs"
    long = {
        **TABLE,
        "rounds": 1000,
        "params": {**TABLE["params"], "epochs": 2},
        "cohort": {"deadline_s": 240.0, "start_devices": 3, "min_devices": 3},
    }
    path.write_text(toml.format_toml(long))
    members = [str(table["device"]) for table in plan.make_agent_tables()]
    for table in plan.make_agent_tables():
        units.start(table, broker.url)
    serve = ("serve", "--home", str(home), "--broker", broker.url)
    processes.start("coordinator", tmp_path / "serve.log", *serve)
    wait_until(lambda: len(versions(home)) == 3, "all boards are online", diagnostics=units.said)
    processes.start("run", tmp_path / "run.log", "run", str(path), "--home", str(home))  # it shows the job to its end
    wait_until(lambda: committed(home) >= 2, "two rounds", diagnostics=units.said)

    file = upgrades.pack(tmp_path / "agents.tar", [upgrades.wheel(tmp_path / "house")])
    phases = ("--phases", "34%", "100", "--soak", "1s", "--patience", "5min")
    said = order("rollout", "agent", str(file), "--home", str(home), *phases)
    assert "not signed: only boards with unsigned = true under [upgrade] in agent.toml accept it" in said
    assert f"fedquilt {upgrades.NEW} for " in said
    new, old = dict.fromkeys(members, upgrades.NEW), dict.fromkeys(members, fedquilt.__version__)
    wait_until(lambda: status(home) in ("done", "aborted"), "the upgrade is over", diagnostics=units.said)
    assert status(home) == "done"
    wait_until(lambda: versions(home) == new, "all boards say that they are new", diagnostics=units.said)
    upgraded = committed(home)
    wait_until(lambda: committed(home) > upgraded + 1, "the new version's rounds", diagnostics=units.said)

    order("rollout", "back", "agent", "--home", str(home))
    wait_until(lambda: versions(home) == old, "all boards are back", diagnostics=units.said)
    returned = committed(home)
    wait_until(lambda: committed(home) > returned + 1, "the old version's rounds again", diagnostics=units.said)
    with Store(home) as store:
        run_control.stop_run(store, "digits")
    wait_until(lambda: any(isinstance(fact, JobEnded) for fact in read_events(home)), "the end of the job")

    found = read_events(home)
    states = [fact.state for fact in found if isinstance(fact, RoundCommitted)]
    for fact in found:
        if isinstance(fact, RoundCommitted):
            folded = {
                each.update.device for each in found if isinstance(each, UpdateAccepted) and each.round == fact.round
            }
            assert folded == set(members), f"round {fact.round} has the updates of {sorted(folded)}"
    path.write_text(path.read_text().replace("rounds = 1000", f"rounds = {len(states)}"))
    calm = fleet.FleetPlan(settings.load_job(path), plan.bundle, tmp_path / "virtual")
    virtual, _ = fleet.run_fleet_virtually(calm)
    with Store(calm.home) as store:
        undisturbed = [fact.state for _, _, fact in store.read_events(virtual) if isinstance(fact, RoundCommitted)]
    assert states == undisturbed[: len(states)]
    assert len(states) >= 6


def test_a_version_that_cannot_start_is_returned_from_and_the_rollout_ends(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes, units: Units
) -> None:
    """Such a version passes its own check; the canary returns by itself, says why, and nobody else gets it."""
    plan, broker, home = make_job(tmp_path), mosquitto(), tmp_path / "runs"
    for table in plan.make_agent_tables()[:2]:
        units.start(table, broker.url)
    processes.start("coordinator", tmp_path / "serve.log", "serve", "--home", str(home), "--broker", broker.url)
    wait_until(lambda: len(versions(home)) == 2, "both boards are online", diagnostics=units.said)
    broken = upgrades.wheel(tmp_path / "house", changes={"fedquilt/cli/entry.py": upgrades.cannot_start})
    file = upgrades.pack(tmp_path / "agents.tar", [broken])
    order("rollout", "agent", str(file), "--home", str(home), "--phases", "50%", "100", "--soak", "1s")
    wait_until(lambda: status(home) in ("done", "aborted"), "the upgrade is over", diagnostics=units.said)
    with Store(home) as store:
        state = store.rollouts.find_rollout().state
    assert (state.status, len(state.offered)) == ("aborted", 1)
    assert "it ended 3 times before it was confirmed" in state.reason
    assert units.log.read_text().count("this version cannot start") == 3
    wait_until(
        lambda: versions(home) == dict.fromkeys(versions(home), fedquilt.__version__) and len(versions(home)) == 2,
        "both run the old version",
        diagnostics=units.said,
    )
