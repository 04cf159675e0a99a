"""Buffered mode: who is selected when, which tasks are cancelled, and how updates of earlier states count."""

import math
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import plain
import pytest
from job_facts import BLOB, apply_events, started_state, update
from msgspec.structs import replace

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.coordinator.device_columns import DeviceSet
from fedquilt.coordinator.rounds import buffering, decisions, responses
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, TaskDuration
from fedquilt.coordinator.rounds.decisions import decide_event, next_decision_s
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    JobStarted,
    ModeChosen,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    TasksCancelled,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobState, TaskVersion
from fedquilt.coordinator.rounds.selection import DeviceSnapshot, JobRequirements, ineligibility_code
from fedquilt.coordinator.settings import CohortSettings, StalenessSettings
from fedquilt.coordinator.views import event_messages, round_outcomes
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.coordinator.views.scores import RunScores
from fedquilt.core import BlobRef, DeviceUpdate, JobError, OperatingPoint, WorkEstimate
from fedquilt.formats.tensor_register import register_from_kinds
from fedquilt.methods import genefl
from fedquilt.models.local_training import NetworkState
from fedquilt.tools.report import columns

STATES = [BlobRef(sha256=f"{number:064x}", size=1) for number in range(9)]


JOB = settings.parse_job({"name": "j", "method": "fedavg"})


def buffered_state(rounds: int = 9, **cohort: object) -> JobState:
    settings = {"mode": "buffered", "size": 2, "concurrency": 3, **cohort}
    return replace(started_state(rounds, **settings), state=STATES[0])  # type: ignore[arg-type]


def committed(round: int) -> RoundCommitted:
    return RoundCommitted(round, STATES[round + 1], False, {})


def play(state: JobState, *steps: str, now_s: float = 0.0) -> JobState:
    """Apply short events: "+abc" selected, "a0" accepted, of round 0, "!" closed and committed."""
    for step in steps:
        if step == "!":
            state = apply_events(state, RoundClosed(state.round), committed(state.round), now_s=now_s)
        elif step[0] == "+":
            state = apply_events(state, CohortSelected(state.round, 0, tuple(step[1:])), now_s=now_s)
        else:
            state = apply_events(state, UpdateAccepted(state.round, update(step[0], int(step[1]))), now_s=now_s)
    return state


# -- decisions ------------------------------------------------------------------------------------


def test_as_many_devices_are_at_work_as_the_concurrency_says():
    state = buffered_state()
    assert decide_event(state, 0.0, set("abcdef")) == CohortSelected(0, 0, ("b", "c", "d"))
    assert decide_event(replace(state, round=0), 0.0, set("ab")) == CohortSelected(0, 0, ("a", "b"))
    assert decide_event(buffered_state(concurrency=0), 0.0, set("abcdef")) == CohortSelected(0, 0, tuple("abcdef"))


@pytest.mark.parametrize(
    ("steps", "online", "event"),
    [
        (["+abc", "a0"], "abcd", CohortSelected(0, 0, ("d",))),  # the place of a is free
        (["+abc", "a0"], "abc", None),  # a has an update in this buffer
        (["+abc"], "abd", CohortSelected(0, 0, ("d",))),  # c is offline
        (["+abc", "a0", "b0"], "abcd", RoundClosed(0)),
        (["+abc", "a0", "b0", "!"], "abc", CohortSelected(1, 0, ("a", "b"))),  # c works on
        (["+abc", "a0", "b0", "!"], "c", CohortSelected(1, 0, ())),  # c alone is enough to go on
        (["+abc", "a0", "b0", "!", "+ab", "a1", "c0"], "abc", RoundClosed(1)),
    ],
)
def test_devices_work_on_over_commits_and_others_take_free_places(steps, online, event):
    assert decide_event(play(buffered_state(), *steps), 1.0, set(online)) == event


def test_a_device_that_declines_is_replaced():
    state = apply_events(play(buffered_state(), "+abc"), TaskDeclined(0, "b", "memory", "too big"))
    assert decide_event(state, 1.0, set("abcd")) == CohortSelected(0, 0, ("d",))


def test_a_late_task_is_cancelled_alone_and_its_device_is_selected_last():
    state = play(buffered_state(), "+ab")
    state = apply_events(play(state, "a0", now_s=4.0), CohortSelected(0, 0, ("c",)), now_s=5.0)
    assert next_decision_s(state) == 10.0
    assert decide_event(state, 9.0, set("abc")) is None
    state = play(state, "c0", "!", now_s=9.0)
    state = play(state, "+c", now_s=9.0)
    assert next_decision_s(state) == 10.0
    assert decide_event(state, 10.0, set("bc")) == TasksCancelled(1, ("b",), "deadline")
    state = apply_events(state, TasksCancelled(1, ("b",), "deadline"), now_s=10.0)
    assert (state.pending_devices, state.silent_devices, state.earlier_versions) == ({"c"}, ("b",), {})
    assert decide_event(replace(state, silent_devices=("b",)), 10.0, set("abcd")) == CohortSelected(1, 0, ("a", "d"))
    assert decide_event(state, 10.0, set("bc")) == CohortSelected(1, 0, ("b",))


def test_a_task_of_too_old_a_state_is_cancelled_before_the_next_selection():
    state = play(buffered_state(staleness={"max": 1}), "+abc", "a0", "b0", "!", "+ab", "a1", "b1", "!")
    assert decide_event(state, 1.0, set("abc")) == TasksCancelled(2, ("c",), "staleness")
    state = apply_events(state, TasksCancelled(2, ("c",), "staleness"))
    assert decide_event(state, 1.0, set("abc")) == CohortSelected(2, 0, ("a", "b", "c"))


def test_a_buffer_with_a_quorum_is_committed_at_the_deadline_and_otherwise_tried_again():
    half = play(buffered_state(quorum=0.5), "+ab", "a0")
    late = apply_events(half, TasksCancelled(0, ("b",), "deadline"))
    assert decide_event(late, 10.0, {"a"}) == RoundClosed(0)
    whole = apply_events(play(buffered_state(), "+ab", "a0"), TasksCancelled(0, ("b",), "deadline"))
    assert decide_event(whole, 10.0, {"a", "c"}) == RoundRetried(0, 1)


HELD = {"fair": "contributions", "size": 4, "concurrency": 0}


@pytest.mark.parametrize(
    ("steps", "working", "held"),
    [
        (["+abc", "a0", "b0"], "c", {}),  # a and b were selected once during the task of c
        (["+abc", "a0", "b0", "+a", "a0"], "c", {"a": "ahead"}),  # a was selected twice
        (["+abc", "a0", "b0", "+a"], "ac", {}),  # a works, and so does c
        (["+abc", "a0", "b0", "+a", "a0", "c0"], "", {}),  # no device works
        (["+abc", "a0", "b0", "+a", "a0"], "", {}),  # c is offline, so its task holds up nobody
        (["+ab", "a0", "+c", "+a", "a0"], "bc", {"a": "ahead"}),  # during the task of b
    ],
)
def test_a_fair_device_is_selected_twice_during_a_task_of_another_one(steps, working, held):
    state = play(buffered_state(**HELD), *steps)
    free = DeviceSet.from_devices(set("abc") - set(working))
    assert decisions.devices_to_hold(state, free, set(working), 1.0) == held
    assert decisions.devices_to_hold(play(buffered_state(), *steps), free, set(working), 1.0) == {}


def test_a_device_whose_tasks_are_too_old_is_selected_again_after_twice_as_many_commits():
    state = replace(play(buffered_state(staleness={"max": 3}), "+c", "c0"), round=10)
    state = apply_events(state, TasksCancelled(10, ("c",), "staleness"))

    def held(round: int) -> dict[str, str]:
        return decisions.devices_to_hold(replace(state, round=round), DeviceSet.from_devices("bc"), {"a"}, 1.0)

    assert (held(12), held(13)) == ({"c": "outdated"}, {})
    state = apply_events(replace(state, round=20), TasksCancelled(20, ("c",), "staleness"))
    assert (held(25), held(26)) == ({"c": "outdated"}, {})
    state = apply_events(state, TasksCancelled(20, ("b",), "deadline"), UpdateAccepted(20, update("c", 20)))
    assert state.backoffs == {}


@pytest.mark.parametrize(
    ("remaining", "held"),
    [(4, set()), (3, {"slow"}), (2, {"slow", "fast"}), (0, set())],  # tasks end at 5, 8 and never
)
def test_a_device_is_unneeded_if_its_update_would_come_after_the_last_one(remaining, held):
    durations = {name: (TaskDuration(0, seconds, 1.0),) for name, seconds in (("fast", 7.0), ("slow", math.inf))}
    ends = {"a": 5.0, "b": 8.0, "c": math.inf}
    assert buffering.unneeded_devices(["fast", "slow", "new"], durations, ends, remaining, 2.0) == held


def test_the_last_commit_starts_no_task_that_comes_too_late():
    state = buffered_state(rounds=1, size=3)
    state = apply_events(state, CohortSelected(0, 0, ("a", "b", "c")), now_s=0.0)
    state = apply_events(state, UpdateAccepted(0, update("a"), took_s=4.0), now_s=4.0)
    state = replace(state, durations={"a": state.durations["a"], "b": (TaskDuration(0, 6.0, 1.0),)})
    assert decisions.devices_to_hold(state, DeviceSet.from_devices("a"), {"b", "c"}, 4.0) == {}  # c may take long
    state = replace(state, durations={**state.durations, "c": (TaskDuration(0, 7.0, 1.0),)})
    assert decisions.devices_to_hold(state, DeviceSet.from_devices("a"), {"b", "c"}, 4.0) == {"a": "unneeded"}


def test_a_predicted_deadline_is_that_of_a_task():
    state = buffered_state(deadline="predicted", deadline_s=100.0)
    state = apply_events(state, CohortSelected(0, 0, ("a", "b"), deadline_s=20.0), now_s=0.0)
    state = apply_events(state, CohortSelected(0, 0, ("c",)), now_s=5.0)
    assert [state.task_deadline_s(device) for device in "abc"] == [20.0, 20.0, 105.0]
    assert decide_event(state, 20.0, set("abc")) == TasksCancelled(0, ("a", "b"), "deadline")
    state = replace(state, durations={"d": (TaskDuration(0, 20.0, 1.0),)})
    assert decide_event(replace(state, pending_devices=frozenset("bc")), 1.0, set("bcd")) == CohortSelected(
        0, 0, ("d",), deadline_s=30.0
    )  # its own pace, and half of it to spare


def test_held_devices_are_present_but_not_selected():
    state = play(buffered_state(min_devices=4, **HELD), "+abcde", "a0", "b0", "c0", "d0", "!")
    held = {"a", "b", "c", "d"}
    assert decide_event(state, 1.0, set("abcde"), held_devices=held) == CohortSelected(1, 0, ())
    state = play(state, "+")
    assert decide_event(state, 1.0, set("abcde"), held_devices=held - {"d"}) == CohortSelected(1, 0, ("d",))


def test_no_device_is_held_if_all_others_have_an_update_or_have_declined():
    state = play(buffered_state(size=3, staleness={"max": 0}), "+abcd", "a0", "b0", "c0", "!")
    state = play(apply_events(state, TasksCancelled(1, ("d",), "staleness")), "+abc", "a1", "b1")
    free = DeviceSet.from_devices("abd")
    assert decisions.devices_to_hold(state, free, {"c"}, 1.0) == {"d": "outdated"}
    state = apply_events(state, TaskDeclined(1, "c", "memory", "too big"))
    assert decisions.devices_to_hold(state, free | {"c"}, set(), 1.0) == {}


def test_a_task_that_takes_longer_than_before_makes_no_device_unneeded():
    state = apply_events(buffered_state(rounds=1, size=1), CohortSelected(0, 0, ("a",)), now_s=0.0)
    state = replace(state, durations=dict.fromkeys("ab", (TaskDuration(0, 5.0, 1.0),)))
    held = [decisions.devices_to_hold(state, DeviceSet.from_devices("b"), {"a"}, now_s) for now_s in (4.0, 5.0)]
    assert held == [{"b": "unneeded"}, {}]


# -- mode -----------------------------------------------------------------------------------------


def workload(flops_per_s: float | None) -> DeviceWorkload:
    points = () if flops_per_s is None else (OperatingPoint(name="p", flops_per_s=flops_per_s),)
    work = WorkEstimate(flops_per_example=1e9)
    return DeviceWorkload(work, replace(plain.profile(), points=points))


@pytest.mark.parametrize(
    ("speeds", "cohort", "mode", "reason"),
    [
        ([1e9] * 6, {}, "synchronous", "takes 1.0 times as long .* 0.6 times as many"),
        ([1e9, 1e9, 1e9, 1e8], {}, "buffered", "takes 10.0 times as long"),
        ([1e9, 1e9, 1e9, 1e8], {"quorum": 0.5}, "synchronous", "with a deadline of 1.0 times"),
        ([1e9, None], {}, "synchronous", "no profile predicts the duration of a task on d1"),
    ],
)
def test_the_mode_follows_from_the_predicted_durations(speeds, cohort, mode, reason):
    settings = CohortSettings(mode="auto", **{"size": 2, **cohort})
    choice = buffering.choose_mode(settings, {f"d{index}": workload(speed) for index, speed in enumerate(speeds)})
    assert choice.mode == mode
    assert re.search(reason, choice.reason)


def test_the_rates_are_those_of_a_count_by_hand():
    cohort = CohortSettings(mode="auto", size=1, staleness=StalenessSettings("constant", max=1000))
    assert buffering.best_synchronous_rate(cohort, [1.0, 10.0]) == (0.2, 10.0)
    one = replace(cohort, concurrency=1)
    assert buffering.best_synchronous_rate(one, [1.0, 10.0]) == (pytest.approx(1 / 5.5), 10.0)
    assert buffering.best_synchronous_rate(replace(one, quorum=0.5), [1.0, 10.0]) == (0.5, 1.0)
    assert buffering.simulate_buffered_rate(cohort, [1.0, 10.0]) == pytest.approx(1.1, rel=0.01)
    assert buffering.simulate_buffered_rate(one, [2.0, 2.0]) == pytest.approx(0.5)
    hinge = StalenessSettings("hinge", a=1.0, b=0)  # each update but the first is one commit old and counts half
    late = replace(cohort, staleness=hinge)
    assert buffering.simulate_buffered_rate(late, [1.0, 1.0]) == pytest.approx(1.0, rel=0.01)


def test_the_mode_of_a_fleet_of_ten_thousand_devices_is_chosen_while_the_coordinator_waits():
    durations_s = [1.0] * 9_000 + [10.0] * 1_000
    cohort = CohortSettings(mode="auto", size=1_000, concurrency=1_000, quorum=0.9)
    assert buffering.best_synchronous_rate(cohort, durations_s) == (pytest.approx(900.0), 1.0)
    assert 300.0 < buffering.simulate_buffered_rate(cohort, durations_s) < 1_000 / 1.9


def test_the_mode_is_chosen_once():
    state = buffered_state(mode="auto", min_devices=2)
    speeds = {"a": 1e9, "b": 1e9, "c": 1e8}

    def decide(state: JobState, online: str) -> object:
        return decide_event(state, 0.0, set(online), lambda device: workload(speeds[device]))

    assert not state.is_buffered
    assert decide(state, "a") is None
    choice = decide(state, "abc")
    assert decide(buffered_state(mode="auto"), "ab") is None  # up to 3 devices are at work
    assert isinstance(decide_event(state, decisions.MODE_WAIT_S, {"a", "b"}), ModeChosen)
    assert (next_decision_s(state), next_decision_s(buffered_state())) == (decisions.MODE_WAIT_S, math.inf)
    assert isinstance(choice, ModeChosen)
    assert choice.mode == "buffered"
    state = apply_events(state, choice)
    assert state.is_buffered
    assert isinstance(decide(state, "abc"), CohortSelected)
    assert event_messages.format_single_event(choice) == [f"buffered rounds: {choice.reason}"]


def test_synchronous_rounds_chosen_by_mode_auto_need_as_many_devices_as_others():
    state = replace(buffered_state(mode="auto", concurrency=0), chosen_mode="synchronous", cohort=frozenset("abcdefgh"))
    assert decisions.minimum_updates(state) == 4  # of all devices, not one of a buffer
    assert decisions.minimum_updates(replace(state, chosen_mode="buffered")) == 1


def test_a_job_ends_while_devices_are_at_work():
    state = play(buffered_state(rounds=1), "+abc", "a0", "b0", "!")
    assert decide_event(state, 1.0, set("abc")) == JobEnded("done", "")


# -- state ----------------------------------------------------------------------------------------


def test_tasks_keep_their_version_over_commits():
    state = play(buffered_state(), "+abc", "a0", "b0", "!", "+ab")
    assert (state.round, state.pending_devices) == (1, set("abc"))
    assert state.earlier_versions == {"c": TaskVersion(0, 0, STATES[0])}
    assert state.task_version("a") == TaskVersion(1, 0, STATES[1])
    state = play(state, "a1", "c0")
    assert state.earlier_versions.keys() == {"c"}  # the commit needs its state
    state = apply_events(state, UpdateLost(1, "c", "damaged"))
    assert state.task_version("c") == TaskVersion(0, 0, STATES[0])
    state = play(state, "c0", "!")
    assert state.earlier_versions == {"b": TaskVersion(1, 0, STATES[1])}
    assert {name: list(rounds) for name, rounds in state.history.items()} == {"a": [0, 1], "b": [0], "c": [0]}


def test_an_update_of_an_earlier_round_counts_once_and_for_its_task_alone():
    state = play(buffered_state(), "+abc", "a0", "b0", "!", "+ab")

    def announce(device: str, round: int, base: int) -> str:
        sent = replace(update(device, round), state=STATES[base].sha256)
        input = responses.UpdateAnnounced(device, sent)
        return type(responses.decide_response("j-1", state, None, input, 1.0).actions[-1]).__name__

    assert announce("c", 0, 0) == "ValidateUpdate"
    assert announce("c", 0, 1) == "AckUpdate"  # of another state
    assert announce("c", 1, 1) == "AckUpdate"  # not its task
    assert announce("a", 0, 0) == "AckUpdate"  # counted already
    assert announce("a", 1, 1) == "ValidateUpdate"
    counted = responses.decide_response("j-1", state, None, responses.UpdateAnnounced("a", update("a", 0)), 1.0)
    assert counted.actions == (responses.AckUpdate("a", update("a", 0), True),)


def test_an_earlier_update_is_rejected_in_the_running_round():
    state = play(buffered_state(), "+abc", "a0", "b0", "!", "+ab")
    sent = update("c", 0)
    decision = responses.decide_response("j-1", state, sent, responses.UpdateValidated("c", sent, None, "NaN"), 1.0)
    assert decision.events == (UpdateRejected(1, "c", "NaN"),)
    assert apply_events(state, *decision.events).earlier_versions == {}


def test_tasks_that_are_open_after_the_last_round_are_still_training():
    state = play(buffered_state(rounds=1), "+abc", "a0", "b0", "!")
    assert (state.is_work_done, state.task_actions) == (True, ("work",))


def test_updates_that_arrive_between_two_rounds_wait_for_the_next():
    state = apply_events(play(buffered_state(), "+abc", "a0", "b0"), RoundClosed(0))
    sent = replace(update("c"), state=STATES[0].sha256, bundles={"model": BLOB})
    decision = responses.decide_response("j-1", state, None, responses.UpdateAnnounced("c", sent), 1.0)
    assert decision.arriving_update == sent
    for input in (responses.UpdateReceived("c"), responses.UpdateValidated("c", sent, sent)):
        assert responses.decide_response("j-1", state, sent, input, 1.0) == responses.Decision(sent)


# -- views ----------------------------------------------------------------------------------------


def test_a_commit_does_not_name_devices_that_work_on():
    state = play(buffered_state(), "+abc", "a0", "b0")
    summaries = [RunSummary(state), RunSummary(apply_events(state, RoundClosed(0)))]
    assert event_messages.format_event(summaries[0], RoundClosed(0), summaries[1]) == [
        "round 1: closed to further updates"
    ]


def test_views_show_how_often_each_device_contributes_and_how_old_its_updates_are():
    outcomes = round_outcomes.RoundOutcomes(buffered_state().constants)
    lines = []
    for event in (
        JobStarted(BLOB),
        CohortSelected(0, 0, ("a", "b", "c")),
        UpdateAccepted(0, update("a")),
        UpdateAccepted(0, update("b")),
        RoundClosed(0),
        committed(0),
        CohortSelected(1, 0, ("a",)),
        UpdateAccepted(1, update("c")),
        UpdateAccepted(1, update("a", 1)),
    ):
        before = outcomes.summary
        outcomes.apply_event(event)
        lines += event_messages.format_event(before, event, outcomes.summary)
    assert any("update from c, 1 commit old (task of round 1): " in line for line in lines)
    assert outcomes.by_round[1]["c"].text == "update received, 1 commit old (task of round 1)"
    status = event_messages.format_status(outcomes.summary, outcomes.summary.state)
    assert status[-1] == "2 of 2 updates, up to 1 commit old"
    assert [line.split() for line in round_outcomes.format_contributions(outcomes.summary)] == [
        ["device", "updates", "share", "commits", "old,", "mean"],
        ["a", "2", "50.0", "%", "0.0"],
        ["b", "1", "25.0", "%", "0.0"],
        ["c", "1", "25.0", "%", "1.0"],
    ]
    assert len(round_outcomes.format_contributions(outcomes.summary, "c")) == 2
    assert columns.make_device_columns(outcomes.summary, JOB, RunScores(""))["staleness"] == [0.0, 0.0, 1.0]
    assert round_outcomes.format_contributions(RunSummary(started_state())) == []


# -- staleness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "weights"),
    [
        (StalenessSettings("constant"), [1, 1, 1]),
        (StalenessSettings(), [1, 0.5, 1 / 3]),
        (StalenessSettings("polynomial", a=1.0), [1, 0.25, 1 / 9]),
        (StalenessSettings("hinge"), [1, 1, 1 / 41]),
        (StalenessSettings("hinge", a=1.0, b=2), [1, 0.5, 1 / 7]),
    ],
)
def test_the_weights_are_those_of_fedasync(staleness, weights):
    assert [staleness.weight(commits) for commits in (0, 3, 8)] == pytest.approx(weights)


def network_state(weight: float, variance: float, count: int) -> NetworkState:
    model = {
        "norm.weight": np.array([weight], np.float32),
        "norm.running_var": np.array([variance], np.float32),
        "norm.num_batches_tracked": np.array(count),
    }
    register = register_from_kinds(model, dict.fromkeys(("norm.running_var", "norm.num_batches_tracked"), "buffer"))
    network = {"name": "mlp", "register": msgspec.to_builtins(register)}
    return NetworkState({}, network, model, 0.0, 0)


def test_a_late_change_moves_the_present_model_by_its_weight():
    change = methods.load("fedavg").aggregation.change
    present, earlier, trained = network_state(5, 0.1, 40), network_state(1, 4.0, 10), network_state(3, 1.0, 16)
    sent = DeviceUpdate("a", 0, 1.0, {}, {"model": trained.model})
    assert change is not None
    model = change.scale(present, earlier, sent, 0.5).bundles["model"]
    assert model["norm.weight"] == 5 + 0.5 * (3 - 1)
    assert model["norm.running_var"] == pytest.approx(0.55)  # a difference would make it -1.4
    assert model["norm.num_batches_tracked"] == 40 + (16 - 10)
    assert [array.dtype for array in model.values()] == [array.dtype for array in present.model.values()]


def test_a_late_learngene_is_mixed_into_the_layers_of_its_cluster():
    layers = {"first": {"w": np.zeros(1, np.float32)}, "second": {"v": np.zeros(1, np.float32)}}
    cluster = {"first": {"w": np.array([4], np.float32)}}
    gene = {"w": np.array([8], np.float32), "v": np.array([6], np.float32)}
    sent = DeviceUpdate("a", 0, 1.0, {}, {"gene": gene})
    for size, expected in ((2, {"w": 5, "v": 6}), (1, {"w": 5})):
        state = SimpleNamespace(
            assigned={"a": 0}, shared=("first", "second"), initial_layers=layers, size=size, clusters=(cluster,)
        )
        assert genefl.rebase(state, state, sent, 0.25).bundles["gene"] == expected
        unassigned = SimpleNamespace(**{**vars(state), "assigned": {}})
        assert genefl.rebase(unassigned, state, sent, 0.25) is sent


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cohort": {"size": 0}}, "needs size"),
        ({"cohort": {"mode": "auto", "size": 0}}, 'mode = "auto" needs size'),
        ({"cohort": {"over_select": 0.5}}, "has no over_select"),
        ({"cohort": {"deadline": "energy"}}, 'has no rounds to plan by deadline = "energy"'),
        ({"cohort": {"staleness": {"function": "constant", "a": 1.0}}}, "staleness.a and b only for other functions"),
        ({"cohort": {"staleness": {"b": 3}}}, "staleness.a and b only for other functions"),
        ({"cohort": {"staleness": {"max": -1}}}, "cohort.*max"),
        ({"cohort": {"mode": "synchronous", "concurrency": 3}}, "concurrency has no effect without mode"),
        ({"cohort": {"mode": "synchronous", "fair": "contributions"}}, "fair has no effect without mode"),
        ({"cohort": {"mode": "synchronous", "staleness": {"max": 3}}}, "staleness has no effect without mode"),
        ({"check": {"every": 2}}, "has no rounds in which devices evaluate"),
        ({"method": "scaffold"}, "scaffold combines only updates of one state"),
        ({"method": "fedstitch"}, "fedstitch combines only updates of one state"),
    ],
)
def test_a_job_that_contradicts_buffered_mode_is_refused(changes, problem):
    cohort = {"mode": "buffered", "size": 2, **changes.pop("cohort", {})}
    with pytest.raises(JobError, match=problem):
        settings.parse_job({"name": "j", "method": "fedavg", "cohort": cohort, **changes})


def test_the_methods_that_run_buffered_are_those_that_average_models_or_mix_layers():
    able = {name for name in methods.builtin_names() if methods.load(name).aggregation.change is not None}
    assert able >= {"fedavg", "fedprox", "fedopt", "fedsq", "genefl"}
    assert able.isdisjoint({"scaffold", "fednova", "fedstitch", "heterofl", "robust", "local"})


def test_a_site_is_not_selected():
    snapshot = DeviceSnapshot(True, replace(plain.profile(), engines=("numpy",), site_device_count=3))
    for mode, code in (("buffered", "site"), ("auto", "site"), ("synchronous", None)):
        cohort = settings.CohortSettings(mode=mode, size=2)  # type: ignore[arg-type]
        assert ineligibility_code(snapshot, JobRequirements(("numpy",), cohort)) == code
        assert ineligibility_code(snapshot, JobRequirements(("numpy",), cohort, is_private=True)) == "site"
