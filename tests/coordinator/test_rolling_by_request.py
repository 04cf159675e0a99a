"""Rollouts ended and taken back by request, and boards that say odd things."""

import pytest
from rolled import MODEL, OTHER

from fedquilt import wire
from fedquilt.coordinator import run_control
from fedquilt.coordinator.rounds.rollout import StatusReported
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError


# -- people ---------------------------------------------------------------------------------------
def test_a_rollout_is_ended_by_request(ground):
    boards = ground.fleet(10, lambda device, release: "soaking")
    id = ground.deploy(canary=0.3, phases=(1.0,))
    ground.play()
    assert len(ground.having()) == 3
    away = next(board for board in boards if board.runs)
    away.go()
    said = run_control.revert_rollout(ground.store, id)
    when = f"as soon as a coordinator serves {ground.home}"
    assert said == f"{id} of digits is ended {when}: boards return to what they ran before"
    ground.play()
    assert ground.having() == [away.name]
    away.come()
    ground.play()
    assert ground.having() == []
    assert ground.state(id).status == "aborted"
    assert not ground.store.rollouts.find_rollout(id).revert_requested
    with pytest.raises(JobError, match=f"{id} is aborted"):
        run_control.revert_rollout(ground.store, id)


def test_a_rollout_that_is_done_is_taken_back(ground):
    ground.fleet(6)
    first = ground.deploy(MODEL, name="first")
    ground.play(30.0)
    second = ground.deploy(OTHER, name="second")
    ground.play(30.0)
    assert len(ground.having(OTHER)) == 6
    with pytest.raises(JobError, match=f"boards have {second} of second since, .*roll out again .* before {first}"):
        run_control.revert_rollout(ground.store, "first")
    run_control.revert_rollout(ground.store)
    ground.play()
    assert ground.state(second).status == "rolled back"
    assert len(ground.having(MODEL)) == 6
    ground.fleet(1)
    ground.play()
    assert len(ground.having(MODEL)) == 7  # it gets the one before, which is in force again
    assert ground.state(first).device_phase("b-006") == "committed"


@pytest.mark.parametrize("ended", ["aborted", "rolled back"])
def test_what_boards_have_had_a_later_one_of_is_not_taken_back(ground, ended):
    ground.fleet(4, lambda device, release: "returned" if release.name == "bad" else "committed")
    first = ground.deploy(MODEL, name="first")
    ground.play(30.0)
    second = ground.deploy(OTHER, name="bad" if ended == "aborted" else "second")
    ground.play(30.0)
    if ended == "rolled back":
        run_control.revert_rollout(ground.store, second)
        ground.play()
    assert ground.state(second).status == ended
    with pytest.raises(JobError, match=f"boards were offered {second} of .* since, .*roll out again .* before {first}"):
        run_control.revert_rollout(ground.store, first)
    ground.play()
    assert ground.state(first).status == "done"
    assert len(ground.having(MODEL)) == 4


def test_a_rollout_is_taken_back_though_a_board_reports_at_that_moment(ground):
    ground.fleet(2)
    id = ground.deploy()
    ground.play(30.0)
    with Store(ground.home) as store:
        find = store.rollouts.find_rollout

        def find_slowly(rollout=""):
            found = find(rollout)
            ground.store.rollouts.append_events([(id, StatusReported("b-000", found.state.serial, "returned"))])
            return found

        store.rollouts.find_rollout = find_slowly
        assert run_control.revert_rollout(store, id).startswith(f"{id} of digits is taken back")
    assert ground.store.rollouts.find_rollout(id).revert_requested


def test_one_rollout_of_a_kind_at_a_time(ground):
    id = ground.deploy()
    with pytest.raises(JobError, match=rf"{id} of digits is queued: .*`fedquilt rollout back {id} --home"):
        ground.deploy(OTHER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phases": (0.03, 1.0)}, "the phases 5 %, 3 %, 100 % do not grow"),
        ({"phases": ()}, "at least one phase"),
        ({"canary": 0.0}, "a canary above 0 %"),
        ({"window": "2-5"}, "'2-5' is no window: write it as 02:00-05:00"),
        ({"window": "02:00-02:00"}, "begins when it ends"),
        ({"select": ("Site Lab",)}, "selects no boards"),
        ({"limits": wire.ReleaseLimits(max_energy_j=1e300)}, "Plan of model-.* cannot be kept: .*max_energy_j"),
        ({"name": "\udcff"}, "Plan of model-.* cannot be kept: .*surrogates"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(ground, changes, said):
    with pytest.raises(JobError, match=said):
        ground.deploy(**changes)
    assert ground.store.rollouts.readable_rollouts() == []


# -- odd boards -----------------------------------------------------------------------------------
def test_a_board_with_a_later_release_of_elsewhere_is_named(ground):
    (board,) = ground.fleet(1)
    board.serial = 1 << 40
    board.take = lambda release: (
        release
        and board.say("installed", wire.ReleaseStatus(rollout="other", kind="model", serial=1 << 40, phase="committed"))
    )
    id = ground.deploy()
    ground.play()
    assert ground.state(id).status == "aborted"
    assert f"it has release {1 << 40} of other" in ground.state(id).reason


def test_a_board_that_says_ever_more_fills_no_log(ground):
    (board,) = ground.fleet(1, lambda device, release: "soaking")
    id = ground.deploy()
    ground.play()
    release = next(filter(None, board.releases))
    for number in range(300):
        board.tell(release, "waiting", f"reason {number}")
        ground.play(0.2)
    assert (
        len([fact for _, _, fact in ground.store.rollouts.read_events(id) if isinstance(fact, StatusReported)]) == 100
    )


def test_who_was_not_offered_it_says_nothing_of_it(ground):
    boards = ground.fleet(10)
    id = ground.deploy(canary=0.1, phases=(1.0,), patience_s=1000.0)
    for board in boards:
        board.judge = lambda device, release: "soaking"
    ground.play()
    (canary,) = ground.state(id).offered
    release = next(board for board in boards if board.name == canary).releases[0]
    other = next(board for board in boards if board.name != canary)
    assert release.blob is not None
    other.tell(release, "refused")
    other.transfers.request_blob(other.name, release.blob)
    for _ in range(50):
        ground.broker.now_s += 0.1
        ground.broker.deliver_due()
        ground.server.step(ground.broker.now_s)
        for message in other.link.receive():
            other.transfers.handle_message(wire.parse_topic(message.topic), message.payload, ground.broker.now_s)
        other.transfers.step(ground.broker.now_s)
    assert not other.depot.has_blob(release.blob)
    assert list(ground.state(id).heard) == [canary]
