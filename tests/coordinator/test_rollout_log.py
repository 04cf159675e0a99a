"""Rollouts in a home's database: what is kept, what is read back, and what is said of damage."""

import itertools
from pathlib import Path

import pytest
from rolled import MODEL, OTHER, Ground

from fedquilt import wire
from fedquilt.coordinator.rounds.rollout import ReleaseOffered, RolloutPlan, RolloutStarted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import StoreError


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A home without boards."""
    return Ground(tmp_path)


def test_blobs_are_kept_while_some_board_may_ask_for_them(ground):
    ground.fleet(2, lambda device, release: "refused" if release.name == "bad" else "committed")
    digests = [ground.store.depot.store_bytes(each).sha256 for each in (MODEL, OTHER, b"bad")]
    ground.deploy(MODEL, name="first")
    assert ground.store.referenced_blobs() == {digests[0]}
    ground.play(30.0)
    ground.deploy(b"bad", name="bad")
    assert ground.store.referenced_blobs() == {digests[0], digests[2]}
    ground.play(30.0)
    assert ground.state().status == "aborted"
    ground.deploy(OTHER, name="second")
    ground.play(30.0)
    assert ground.state().status == "done"
    assert ground.store.referenced_blobs() == {digests[1]}


def test_who_reads_while_a_coordinator_writes_sees_one_moment(ground):
    """A fact that is written between two reads of one rollout would otherwise look like damage."""
    id = ground.deploy()
    ground.play(8.0)
    with Store(ground.home) as reader:
        line = reader.rollouts._rows.find_job
        number = itertools.count(100)

        def slow(wanted):
            found = line(wanted)
            ground.store.rollouts.append_events([(id, ReleaseOffered(0, (f"x-{next(number)}",)))])
            return found

        reader.rollouts._rows.find_job = slow
        assert [kept.state.id for kept in reader.rollouts.readable_rollouts()] == [id]
        assert reader.rollouts.find_rollout().state.id == id
        assert reader.rollouts.read_events(id)
        assert reader.rollouts.read_errors() == {}


def test_a_damaged_log_is_named_and_hides_no_other(ground, caplog):
    ground.fleet(2)
    first = ground.deploy(MODEL, name="first")
    ground.play(30.0)
    ground.store._db.execute("update rollout_facts set at = at + 1 where seq = 2")
    ground.restart()
    second = ground.deploy(OTHER, name="second")
    ground.play(30.0)
    assert ground.state(second).status == "done"
    assert f"the log of {first} in" in caplog.text
    assert ground.store.find_damaged_ids() == [first]
    with pytest.raises(StoreError, match="is damaged: fact 2"):
        ground.store.rollouts.find_rollout(first)


def test_a_rollout_that_there_is_not_is_named(ground):
    """Nothing is written for it."""
    log = ground.store.rollouts
    for act in (
        lambda: log.read_events("none"),
        lambda: log.request_revert("none"),
        lambda: log.append_events([(ground.deploy(), RolloutStarted(1)), ("none", RolloutStarted(2))]),
    ):
        with pytest.raises(StoreError, match=r"no rollout 'none' in .*: `fedquilt rollout status` lists them"):
            act()
    (kept,) = log.readable_rollouts()
    assert (kept.state.status, log.read_events(kept.state.id)) == ("queued", [])
    assert ground.store._db.execute("select count(*) from rollout_facts").fetchone() == (0,)


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_rollout_that_was_replaced_is_read_anew(ground, name):
    """By the same id with other events or another plan, as a backup that is put back may have."""
    log = ground.store.rollouts
    id = ground.deploy(name="first")
    log.append_events([(id, RolloutStarted(1)), (id, ReleaseOffered(0, ("a", "b")))])
    assert log.find_rollout(id).state.offered.keys() == {"a", "b"}
    for table, key in (("rollout_facts", "job"), ("rollouts", "id")):
        ground.store._db.execute(f"delete from {table} where {key} = ?", (id,))
    log.add_rollout(RolloutPlan("model", name, blob=ground.store.depot.store_bytes(OTHER)), id=id)
    log.append_events([(id, RolloutStarted(2)), (id, ReleaseOffered(0, ("c",))), (id, ReleaseOffered(1, ("d",)))])
    with Store(ground.home) as fresh:
        assert log.find_rollout(id) == fresh.rollouts.find_rollout(id)
    assert log.find_rollout(id).state.offered.keys() == {"c", "d"}


def test_a_serial_is_later_than_any_before_and_than_any_of_a_home_that_was_put_back(ground, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 5e9)
    assert ground.store.rollouts.next_serial() == 5_000_000_000
    ground.store.rollouts.append_events([(ground.deploy(), RolloutStarted(6_000_000_000))])
    assert ground.store.rollouts.next_serial() == 6_000_000_001


def test_a_plan_is_read_back_as_it_was(ground):
    plan = RolloutPlan(
        "settings", "s", settings={"budget": "1GB", "governor": {"max_w": 7.5}}, limits=wire.ReleaseLimits(min_gain=0.0)
    )
    id = ground.store.rollouts.add_rollout(plan)
    ground.restart()
    assert ground.state(id).plan == plan
