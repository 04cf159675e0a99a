"""Rollouts with a coordinator and boards."""

from typing import Any

import pytest
from rolled import MODEL, OTHER, TOPICS, Ground, good

from fedquilt import wire
from fedquilt.coordinator import run_control
from fedquilt.coordinator.rollout_runner import REPORT_REQUEST_INTERVAL_S, SESSION_SETTLE_S
from fedquilt.coordinator.rounds.rollout import (
    NO_LAUNCHER,
    PhasePassed,
    ReleaseOffered,
    RolloutCompleted,
    RolloutStarted,
    StatusReported,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import rollouts as view
from fedquilt.core import JobError
from fedquilt.core.messages import UPGRADES
from fedquilt.host.disk import PrivateDisk


def told(ground: Ground, *kinds: type) -> list[Any]:
    """Facts of these kinds, in order."""
    return [fact for _, fact in ground.facts if isinstance(fact, kinds)]


# -- phases ---------------------------------------------------------------------------------------
def test_a_good_model_reaches_all_in_phases(ground):
    ground.fleet(20)
    id = ground.deploy(canary=0.05, phases=(0.25, 1.0))
    ground.play(30.0)
    assert ground.state(id).status == "done"
    assert len(ground.having()) == 20
    steps = [
        len(fact.devices) if isinstance(fact, ReleaseOffered) else type(fact)
        for fact in told(ground, ReleaseOffered, PhasePassed, RolloutCompleted)
    ]
    assert steps == [1, PhasePassed, 4, PhasePassed, 15, PhasePassed, RolloutCompleted]


def test_a_coordinator_that_has_just_started_first_hears_which_boards_there_are(ground):
    ground.deploy(canary=0.25, phases=(1.0,))
    boards = ground.fleet(40, away=39)
    ground.play(SESSION_SETTLE_S / 2)
    for board in boards[1:]:
        board.come()
    ground.play(SESSION_SETTLE_S)
    assert len(told(ground, ReleaseOffered)[0].devices) == 10


def test_only_boards_with_the_labels_get_it(ground):
    ground.fleet(3, labels=("site=lab",))
    ground.fleet(3, labels=("site=hall",))
    id = ground.deploy(select=("site=lab",))
    ground.play(30.0)
    assert ground.state(id).status == "done"
    assert ground.having() == ["b-000", "b-001", "b-002"]


# -- boards that are away -------------------------------------------------------------------------
def test_boards_that_cannot_be_upgraded_are_left_out_by_name_and_do_not_count(ground):
    never = {"versions": {UPGRADES: "none: its agent was not started by the launcher"}}
    unable = ground.fleet(2, lambda device, release: "refused" if release.kind == "agent" else "committed", **never)
    ground.fleet(2)
    id = ground.deploy(kind="agent", canary=0.5, phases=(1.0,))
    ground.play(30.0)
    state = ground.state(id)
    assert (state.status, state.count_outcomes()) == ("done", {"committed": 2})
    assert not any(board.releases for board in unable)
    begun = told(ground, RolloutStarted)[0]
    assert begun.incompatible_devices == dict.fromkeys(("b-000", "b-001"), NO_LAUNCHER)
    said = f"started: agent digits; left out: b-000, b-001 ({NO_LAUNCHER})"
    assert view.format_event(state, begun) == said
    ground.fleet(1, **never)
    ground.play(10.0)
    assert ground.state(id).count_outcomes() == {"committed": 2}
    model = ground.deploy(OTHER, canary=0.5, phases=(1.0,))
    ground.play(30.0)
    assert ground.state(model).count_outcomes() == {"committed": 5}


# -- models for devices without ONNX Runtime ------------------------------------------------------
def test_a_model_goes_to_no_device_without_a_runtime(ground):
    bare = ground.fleet(1, judge=lambda device, release: "refused", engines=("numpy", "torch"))
    ground.fleet(2)
    id = ground.deploy(canary=0.5, phases=(1.0,))
    ground.play(30.0)
    assert not any(board.releases for board in bare)
    state = ground.state(id)
    assert view.format_event(state, told(ground, RolloutStarted)[0]) == (
        "started: model digits; left out: b-000 (ONNX Runtime, which checks models, is missing: "
        "install the extra `onnx` on the device)"
    )
    assert (state.status, state.count_outcomes()) == ("done", {"committed": 2})
    bare[0].go()
    bare[0].engines, bare[0].judge = ("numpy", "onnx"), good
    bare[0].come()
    ground.play(10.0)
    assert ground.state(id).count_outcomes() == {"committed": 3}


def test_settings_go_to_devices_without_a_runtime(ground):
    ground.fleet(1, engines=("numpy",))
    id = ground.deploy(kind="settings", name="", blob=None, settings={"budget": "1GB"})
    ground.play(10.0)
    assert list(ground.state(id).offered) == ["b-000"]


def test_a_board_that_is_off_for_the_whole_rollout_catches_up_when_it_returns(ground):
    boards = ground.fleet(8)
    ground.play(1.0)
    boards[3].go()
    ground.play(30.0)  # longer than a grace
    id = ground.deploy(patience_s=60.0)
    ground.play(120.0)
    assert ground.state(id).status == "done"
    assert len(ground.having()) == 7
    ground.restart()
    ground.play(20.0)
    boards[3].come()
    ground.fleet(1)
    ground.play(20.0)
    assert len(ground.having()) == 9
    assert ground.state(id).device_phase("b-003") == ground.state(id).device_phase("b-008") == "committed"


def test_a_board_that_has_just_gone_is_no_canary(ground):
    boards = ground.fleet(30)
    ground.play(6.0)
    for board in boards[1:]:
        board.go()
    ground.play(1.0)
    id = ground.deploy(patience_s=1000.0)
    ground.play(5.0)
    assert ground.state(id).offered.get("b-000") == 0


def test_a_board_whose_last_word_was_lost_is_asked_for_it_again(ground):
    (board,) = ground.fleet(1)
    board.judge = lambda device, release: "soaking"
    id = ground.deploy()
    ground.play()
    board.judge = good  # and nobody hears of it
    ground.play(REPORT_REQUEST_INTERVAL_S / 2)
    assert ground.state(id).device_phase(board.name) == "soaking"
    ground.play(REPORT_REQUEST_INTERVAL_S)
    assert ground.state(id).status == "done"


def test_a_board_that_answers_nothing_holds_up_for_its_patience_alone(ground):
    boards = ground.fleet(4)
    for board in boards:
        board.take = lambda release: None
    id = ground.deploy(canary=0.5, phases=(1.0,), patience_s=60.0)
    ground.play(100.0)
    first = sorted(ground.state(id).offered)
    assert len(first) == 2
    assert ground.state(id).step == 0
    board = next(board for board in boards if board.name == first[0])
    del board.take
    board.go()
    board.come()
    ground.play(10.0)
    assert told(ground, PhasePassed)[0] == PhasePassed(0, (first[1],))


def test_a_board_that_says_nothing_is_waited_for_no_longer_because_coordinators_are_killed(ground):
    ground.disk = PrivateDisk()
    ground.disk.wall_clock_s = lambda: 1e9 + ground.broker.now_s
    ground.restart()
    boards = ground.fleet(2)
    id = ground.deploy(canary=0.9, phases=(1.0,), patience_s=60.0)
    while not ground.state(id).offered:
        ground.play(0.1)
    (quiet,) = (board for board in boards if board.name not in ground.state(id).offered)
    quiet.take = lambda release: None
    ground.play(10.0)
    assert quiet.name in ground.state(id).offered
    for _ in range(6):
        ground.restart()
        ground.play(20.0)
    assert told(ground, PhasePassed) == [PhasePassed(0), PhasePassed(1, (quiet.name,))]
    assert ground.state(id).status == "done"


# -- people ---------------------------------------------------------------------------------------
def test_a_rollout_is_ended_by_request(ground):
    boards = ground.fleet(10, lambda device, release: "soaking")
    id = ground.deploy(canary=0.3, phases=(1.0,))
    ground.play()
    assert len(ground.having()) == 3
    away = next(board for board in boards if board.runs)
    away.go()
    said = run_control.revert_rollout(ground.store, id)
    when = f"as soon as a coordinator runs for {ground.home}"
    assert said == f"{id} of digits is aborted {when}: devices return to their previous release"
    ground.play()
    assert ground.having() == [away.name]
    away.come()
    ground.play()
    assert ground.having() == []
    assert ground.state(id).status == "aborted"
    assert not ground.store.rollouts.find_rollout(id).revert_requested
    with pytest.raises(JobError, match=f"{id} is already aborted"):
        run_control.revert_rollout(ground.store, id)


def test_a_rollout_that_is_done_is_taken_back(ground):
    ground.fleet(6)
    first = ground.deploy(MODEL, name="first")
    ground.play(30.0)
    second = ground.deploy(OTHER, name="second")
    ground.play(30.0)
    assert len(ground.having(OTHER)) == 6
    with pytest.raises(JobError, match=f"{first} cannot be reverted: devices have the later {second} of second"):
        run_control.revert_rollout(ground.store, "first")
    run_control.revert_rollout(ground.store)
    ground.play()
    assert ground.state(second).status == "rolled back"
    assert len(ground.having(MODEL)) == 6
    ground.fleet(1)
    ground.play()
    assert len(ground.having(MODEL)) == 7  # it gets the one before, which is in force again
    assert ground.state(first).device_phase("b-006") == "committed"


@pytest.mark.parametrize("restart", [False, True])
def test_a_rollout_is_taken_back_after_a_later_one_was_refused(ground, restart):
    ground.fleet(4, lambda device, release: "refused" if release.name == "bad" else "committed")
    first = ground.deploy(MODEL, name="first")
    ground.play(30.0)
    second = ground.deploy(OTHER, name="bad")
    ground.play(30.0)
    assert (ground.state(second).status, len(ground.having(MODEL))) == ("aborted", 4)
    run_control.revert_rollout(ground.store, first)
    ground.play()
    if restart:
        ground.restart()
        for board in ground.boards:
            board.go()
            board.come()
        ground.play(30.0)
    assert (ground.state(first).status, ground.having(MODEL)) == ("rolled back", [])
    assert ground.state(first).count_outcomes() == {"returned": 4}
    for board in ground.boards:
        assert board.releases[-1].rollout == first
    third = ground.deploy(OTHER, name="third")
    ground.play(30.0)
    assert (ground.state(third).status, len(ground.having(OTHER))) == ("done", 4)


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
        assert run_control.revert_rollout(store, id).startswith(f"{id} of digits is rolled back")
    assert ground.store.rollouts.find_rollout(id).revert_requested


def test_one_rollout_of_a_kind_at_a_time(ground):
    id = ground.deploy()
    with pytest.raises(JobError, match=rf"{id} of digits is queued: .*`fedquilt rollout back {id} --home"):
        ground.deploy(OTHER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phases": (0.03, 1.0)}, "phases 5 %, 3 %, 100 % do not grow"),
        ({"phases": (), "canary": 1.0}, "--phases has one share, 100 %"),
        ({"canary": 0.0}, "the canary is 0 %"),
        ({"window": "2-5"}, "window '2-5' is invalid: write 02:00-05:00"),
        ({"window": "02:00-02:00"}, "is empty: set different times"),
        ({"select": ("Site Lab",)}, "is not a label or !label"),
        ({"limits": wire.ReleaseLimits(max_energy_j=1e300)}, "Plan of model-.* cannot be encoded: .*max_energy_j"),
        ({"name": "\udcff"}, "Plan of model-.* cannot be encoded: .*surrogates"),
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
    assert f"has the later release {1 << 40} of other" in ground.state(id).reason


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
    assert list(ground.state(id).reports) == [canary]


def test_without_a_retained_message_a_board_gets_it_all_the_same(ground):
    """A broker may lose the messages that it retains, and a signed message is valid in one session alone."""
    boards = ground.fleet(4)
    ground.play(1.0)
    boards[0].go()
    ground.play(30.0)
    ground.deploy(patience_s=30.0)
    ground.play(60.0)
    ground.link.publish(TOPICS.device_topic("b-000", "dn", "model"), b"", retain=True)
    ground.play(1.0)
    boards[0].come()
    ground.play(20.0)
    assert len(ground.having()) == 4
