"""A coordinator that dies and begins again, with devices driven by hand."""

from pathlib import Path

import pytest
from by_hand import TABLE, Stage, constant_model

from fedquilt import methods, wire
from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.registry import RECONNECT_GRACE_S
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    RoundCommitted,
    RoundRetried,
    UpdateAccepted,
)
from fedquilt.host.disk import Disk
from fedquilt.models.local_training import NetworkState
from fedquilt.transport.memory_link import MemoryBroker


def test_a_coordinator_that_dies_mid_round_continues_the_round(stage):
    a, b = stage.connect("ab")
    stage.submit(a)
    stage.restart()
    stage.play()
    assert a.tasks[-1] is None
    stage.submit(b, factor=3.0)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "b"]
    assert stage.told(JobEnded)[0].status == "done"


def test_a_board_that_looks_offline_after_a_restart_has_its_grace_before_it_is_replaced(tmp_path):
    stage = Stage(tmp_path, cohort={"size": 1, "start_devices": 2, "deadline_s": 600.0})
    hands = {name: stage.hand(name) for name in "ab"}
    stage.play()
    (first,) = stage.told(CohortSelected)[0].devices
    hands[first].say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.restart()
    stage.play(RECONNECT_GRACE_S - 0.5)
    assert len(stage.told(CohortSelected)) == 1
    stage.play(1.0)
    assert [fact.devices for fact in stage.told(CohortSelected)[1:]] == [tuple({"a", "b"} - {first})]


@pytest.mark.parametrize("served", [True, False])
def test_a_job_that_was_done_when_its_coordinator_was_killed_stays_done(stage, monkeypatch, served):
    (a,) = stage.connect("a")
    a.answer(constant_model())

    def killed(id, status, **given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "set_status", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.play()
    if served:
        stage.store.set_status(stage.job, "stopping")
        stage.restart()
        stage.play()
    else:
        assert main(["stop", stage.job, "--home", str(stage.store.home)]) == 0
    row = stage.store.find_job(stage.job)
    assert row.status == "done"
    assert RunningJob(row, stage.store, 0.0, methods.load("fedavg")).job_state.phase == "done"


def test_boards_that_are_gone_are_waited_for_without_a_turn_of_the_loop(tmp_path):
    stage = Stage(tmp_path, cohort={**TABLE["cohort"], "deadline_s": 15.0, "attempts": 3})
    hands = stage.connect("ab")
    for hand in hands:
        hand.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(30.0)
    assert stage.told(RoundRetried)
    before = len(stage.steps)
    stage.play(30.0)
    at_once = [now_s for now_s, due_s, _ in stage.steps[before:] if due_s <= now_s]
    assert len(at_once) <= 8  # one for each attempt at the round


class Wall(Disk):
    """A disk whose computer has the wall clock of a stage, and another one from some starts on."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__()
        self.broker, self.ahead_s = broker, 1e9

    def wall_clock_s(self) -> float:
        """See `Disk`."""
        return self.broker.now_s + self.ahead_s


def by_wall(folder: Path, **cohort: float) -> tuple[Stage, Wall]:
    stage = Stage(folder, uses_wall_clock=True, cohort=cohort)
    wall = Wall(stage.broker)
    stage.disk = wall
    stage.restart()
    return stage, wall


@pytest.mark.parametrize("set_s", [0.0, 2.0, -3600.0, 7200.0])
def test_a_round_ends_though_its_coordinators_live_for_a_fiftieth_of_its_deadline(tmp_path, set_s):
    stage, wall = by_wall(tmp_path, deadline_s=50.0, quorum=0.5, attempts=1)
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play(1.0)
    a.answer(constant_model(3.0))
    stage.play(1.0)
    lives = 0
    while not stage.told(JobEnded):
        assert (lives := lives + 1) < 110
        wall.ahead_s += set_s
        stage.restart()
        stage.play(1.0)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    (committed,) = stage.told(RoundCommitted)
    state = tensors.unpack_state(stage.store.blob_store.load(committed.state.sha256), NetworkState)
    assert state.model["1.bias"].tolist() == [3.0, 3.0]
    assert lives > 10


def test_a_run_leaves_alone_what_an_interrupted_one_still_needs(tmp_path):
    stage = Stage(tmp_path)
    a, _ = stage.connect("ab")
    stage.submit(a, factor=3.0)
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    first, needed = stage.job, stage.store.referenced_blobs()
    assert len(needed) == 2

    stage.job = stage.store.add_job(settings.parse_job(TABLE), tmp_path / "bundle")
    stage.restart()
    stage.play()
    stage.submit(*stage.hands)
    assert [fact.status for fact in stage.told(JobEnded)] == ["stopped", "done"]
    assert all(stage.store.blob_store.blob_path(sha256) for sha256 in needed)

    stage.job = first
    stage.store.set_status(first, "running")
    stage.restart()
    stage.play()
    stage.submit(stage.hands[1], factor=5.0)
    assert stage.store.stored_status(first) == "done"
