"""Rollouts whose coordinator is killed at a call to its disk or its broker, and is started again."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from rolled import TOPICS, Ground, Judge, good

from fedquilt import wire
from fedquilt.coordinator import run_control
from fedquilt.coordinator.rounds import rollout
from fedquilt.coordinator.rounds.rollout import ReleaseOffered, RolloutReverted
from fedquilt.coordinator.storage.store import Store
from tests.faults.disk import SimDisk, SimulatedCrash, SimulatedFileSystem

BAD: Judge = lambda device, release: "returned"  # noqa: E731


class Doomed:
    """Computer of a coordinator whose process ends at one of its calls to the disk or the broker."""

    def __init__(self, folder: Path, at: int) -> None:
        self.platter = SimulatedFileSystem("/coordinator", folder)
        self.calls, self.at, self.dead = 0, at, False

    def __call__(self, what: str, where: object) -> OSError | None:
        self.calls += 1
        if self.dead or self.calls == self.at:
            self.dead = True
            raise SimulatedCrash
        return None

    def disk(self) -> SimDisk:
        return SimDisk(self.platter, self)


def rolled_out(folder: Path, at: int, power: bool, judge: Judge, steps: Callable[[Ground], None]) -> Ground:
    """A rollout whose coordinator ends at a call, and is started again."""
    (folder / "databases").mkdir(parents=True)
    doomed = Doomed(folder / "databases", -1)
    ground = Ground(folder, doomed.disk(), Path("/coordinator"))
    ground.fleet(6, judge)
    ground.deploy(name="new", patience_s=60.0, phases=(0.5, 1.0))
    doomed.calls, doomed.at = 0, at
    ground.calls = doomed

    def mortal() -> None:
        publish = ground.link.publish
        ground.link.publish = lambda *args, **named: doomed("publish", "") or publish(*args, **named)

    mortal()
    while True:
        try:
            steps(ground)
            return ground
        except SimulatedCrash:
            ground.broker.lose_client(ground.link)
            doomed.dead = False
            ground.disk.release_locks()
            doomed.platter.fail_power(random.Random(at)) if power else doomed.platter.end_processes()
            ground.disk = doomed.disk()
            ground.start()
            mortal()


@pytest.mark.parametrize("step", [15, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_a_coordinator_that_is_killed_at_any_call_goes_on_with_a_good_model(tmp_path, power, step):
    calls = rolled_out(tmp_path / "count", -1, power, good, lambda ground: ground.play(25.0)).calls.calls
    assert calls > 60
    for at in range(1 + power * (step // 2), calls, step):
        ground = rolled_out(tmp_path / str(at), at, power, good, lambda ground: ground.play(40.0))
        state = ground.state()
        assert state.status == "done", at
        assert len(ground.having()) == 6
        offered = [
            fact.devices
            for _, _, fact in ground.store.rollouts.read_events(state.id)
            if isinstance(fact, ReleaseOffered)
        ]
        assert sorted(sum(offered, ())) == sorted(state.offered)


@pytest.mark.parametrize("step", [12, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_a_coordinator_that_is_killed_at_any_call_lets_a_bad_model_reach_the_canary_alone(tmp_path, power, step):
    calls = rolled_out(tmp_path / "count", -1, power, BAD, lambda ground: ground.play(25.0)).calls.calls
    for at in range(1 + power * (step // 2), calls, step):
        ground = rolled_out(tmp_path / str(at), at, power, BAD, lambda ground: ground.play(40.0))
        assert ground.state().status == "aborted", at
        assert len(ground.ever()) == 1
        assert ground.having() == []
        facts = ground.store.rollouts.read_events(ground.state().id)
        assert sum(isinstance(fact, RolloutReverted) for _, _, fact in facts) == 1


def test_a_coordinator_that_starts_replaces_releases_that_its_broker_kept_for_boards_that_are_away(tmp_path):
    ground = Ground(tmp_path)
    (board,) = ground.fleet(1)
    id = ground.deploy()
    ground.play()
    board.go()
    ground.store.rollouts.append_events([(id, RolloutReverted(ground.store.rollouts.next_serial()))])
    ground.restart()
    ground.play(1.0)
    reader = ground.broker.connect()
    reader.subscribe([TOPICS.device_topic(board.name, "dn", "model")])
    ground.play(0.2)
    (message,) = reader.receive()
    assert wire.decode(message.payload, wire.DesiredRelease).is_rollback


def test_every_release_that_is_sent_follows_from_facts_that_are_written(tmp_path):
    ground = Ground(tmp_path)
    publish, sent = ground.link.publish, list[bool]()

    def seen(topic, payload, **named):
        route = wire.parse_topic(topic)
        if route.subtopic == "model":
            with Store(ground.home) as written:
                wanted = rollout.release_for_device(written.rollouts.find_rollout().state, route.device)
            assert (wire.decode(payload, wire.DesiredRelease) if payload else None) == wanted
            sent.append(wanted is not None and wanted.is_rollback)
        publish(topic, payload, **named)

    ground.link.publish = seen
    ground.fleet(4, lambda device, release: "returned" if release.name == "bad" else "committed")
    for name, ended in (("bad", "aborted"), ("good", "rolled back")):
        id = ground.deploy(name=name)
        ground.play(30.0)
        if name == "good":
            run_control.revert_rollout(ground.store, id)
            ground.play()
        assert ground.state(id).status == ended
    assert sorted(set(sent)) == [False, True]
