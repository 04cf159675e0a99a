"""A coordinator above a site, each with a Mosquitto of its own, and boards that train a network with batch norm."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills
import pytest
from federation import committed_hashes, prepare_bundle, write_digits
from processes import Processes, read_events
from waiting import LIMIT_S, wait_until

from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.formats import toml
from fedquilt.tools.simulation.agents import FleetPlan

ROUNDS, BOARDS = 3, 4
RUN = "sited"


def plan(folder: Path, method: str, every: int) -> FleetPlan:
    """A job for a site and a board; on virtual time its fleet has all boards. Later rounds have short deadlines."""
    job = {
        "name": RUN,
        "method": method,
        "rounds": ROUNDS,
        "seed": 3,
        "engine": "torch",
        "params": {"lr": 0.05, "batch": 8, "epochs": 1},
        "cohort": {"start_devices": 2, "min_devices": 2, "deadline_s": LIMIT_S, "deadline": "predicted"},
        "check": {"every": every},
        "fleet": {"devices": BOARDS, "boards": ["jetson-agx-orin"], "budgets": ["1GB", "4GB"]},
        "data": {
            "path": str(write_digits(folder / "digits.npz")),
            "partition": "dirichlet",
            "alpha": 2.0,
            "min_size": 8,
        },
    }
    (folder / "job.toml").write_text(toml.format_toml(job))
    return FleetPlan(
        settings.load_job(folder / "job.toml"), prepare_bundle("batch-norm", folder / "job.bundle"), folder / "calm"
    )


def counted(found: list[AnyEvent], round: int) -> set[str]:
    updates = [fact.update for fact in found if isinstance(fact, UpdateAccepted) and fact.round == round]
    return {board for update in updates for board in update.site_devices or (update.device,)}


@pytest.mark.parametrize(
    ("method", "dies", "every"),
    [
        ("fedavg", "when it has answered", 0),
        pytest.param("fedavg", "at its task", 1, marks=pytest.mark.nightly),
        pytest.param("scaffold", "at its task", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_site_and_a_dead_board_change_no_bit_beside_the_boards_in_one_place(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes, method: str, dies: str, every: int
) -> None:
    """The site's coordinator dies by SIGKILL in round 0 and goes on; one of its boards dies for good in round 1."""
    pytest.importorskip("torch")
    made, above, below = plan(tmp_path, method, every), mosquitto(), mosquitto()
    home, home_below = tmp_path / "root", tmp_path / "plant"
    *members, direct = [table["device"] for table in made.make_agent_tables()]
    for table in made.make_agent_tables():
        name = table["device"]
        fleet, broker = ("fleet", above) if name == direct else ("plant", below)
        told = {**table, "fleet": fleet, "home": str(tmp_path / name), "warm_s": 600.0}
        told["broker"] = {"url": broker.url, "keepalive_s": 600}  # a suspended board is not reported offline
        (tmp_path / f"{name}.toml").write_text(toml.format_toml(told))
        processes.start(name, tmp_path / "agents.log", "agent", str(tmp_path / f"{name}.toml"))
    site = {"device": "plant", "fleet": "fleet", "home": str(tmp_path / "above"), "broker": {"url": above.url}}
    (tmp_path / "plant.toml").write_text(toml.format_toml(site))
    home.mkdir()
    right = {"boards": members, "most": len(members)}
    (home / settings.LIMITS_FILE).write_text(toml.format_toml({"sites": {"plant": right}}))
    serve = ("serve", "--home", str(home_below), "--broker", below.url, "--fleet", "plant")
    serve = (*serve, "--site", str(tmp_path / "plant.toml"))
    processes.start("site", tmp_path / "site.log", *serve)
    processes.start("root", tmp_path / "run.log", "run", str(tmp_path / "job.toml"), "--home", str(home),
                    "--broker", above.url)  # fmt: skip

    def answered(round: int) -> set[str]:
        return counted(read_events(home_below, RUN), round)

    def signalled(name: str, sent: signal.Signals) -> None:
        processes.running[name].send_signal(sent)

    def asked(round: int) -> set[str]:
        found = [
            fact for fact in read_events(home_below, RUN) if isinstance(fact, CohortSelected) and fact.round == round
        ]
        return {device for fact in found for device in fact.devices}

    wait_until(lambda: asked(0) == set(members), "all boards of the site are asked")
    first, victim, last = members
    signalled(first, signal.SIGSTOP)  # so that the round cannot be over before somebody looks
    wait_until(lambda: answered(0), "an answer below in round 0")
    processes.kill("site")
    processes.start("site", tmp_path / "site.log", *serve)
    wait_until(lambda: answered(0) == {victim, last}, "the others' answers in round 0")
    held = last if dies == "when it has answered" else victim
    signalled(held, signal.SIGSTOP)  # so that round 1 waits for it
    signalled(first, signal.SIGCONT)
    wait_until(lambda: asked(1) == set(members), "round 1 below")
    if held != victim:
        wait_until(lambda: victim in answered(1), "its answer in round 1")
    processes.kill(victim)
    signalled(last, signal.SIGCONT)
    assert processes.running["root"].wait(timeout=LIMIT_S) == 0, (tmp_path / "run.log").read_text()

    found = read_events(home, RUN)
    assert not [fact for fact in found if isinstance(fact, TaskDeclined | UpdateRejected)]
    late = {*members, direct} - {victim}
    middle = {*members, direct} if dies == "when it has answered" else late
    cohorts = [{*members, direct}, middle, late, *[late] * every]  # the last may be the closing evaluation
    assert [counted(found, round) for round in range(ROUNDS)] == cohorts[:ROUNDS]
    assert sum(isinstance(fact, RoundCommitted) for fact in found) == len(cohorts)
    assert len(set(committed_hashes(found))) == ROUNDS
    _, flat = kills.calm(made, cohorts)
    assert committed_hashes(found) == committed_hashes(flat)
