"""Why a device was not chosen is told from the log alone."""

import msgspec
import pytest
from job_facts import BLOB, update

from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.device_columns import LabelColumn
from fedquilt.coordinator.fleet.device_status import CurrentTask, DeviceStatus, TelemetryStore
from fedquilt.coordinator.rounds.decisions import decide_event, eligibility_event
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobResumed,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import round_outcomes, wait_reasons
from fedquilt.core import JobError

OUTWEIGHS = (
    "one device can outweigh the others: of 3 devices no median bounds the weight by examples. Set [cohort] "
    "max_examples to the most examples that a device has"
)


@pytest.mark.parametrize(
    ("signed", "limited", "count", "weight", "changes", "said"),
    [
        (True, False, 3, 5.0, {}, True),
        (False, True, 3, 5.0, {}, True),
        (False, False, 3, 5.0, {}, False),  # whoever reaches the broker speaks for any device
        (True, False, 4, 5.0, {}, False),
        (True, False, 3, 1.0, {}, False),
        (True, False, 3, 5.0, {"cohort": {"max_examples": 100}}, False),
        (True, False, 3, 5.0, {"method": "robust"}, False),
    ],
)
def test_a_fleet_too_small_for_a_median_of_weights_is_warned_of_where_devices_are_not_all_trusted(
    tmp_path, capsys, signed, limited, count, weight, changes, said
):
    devices = tuple("abcd"[:count])
    with Store(tmp_path) as store:
        store.record_authentication(signed)
        if limited:
            (tmp_path / "limits.toml").write_text("")
        run = store.add_job(settings.parse_job({"name": "j", "method": "fedavg", "rounds": 1, **changes}), tmp_path)
        store.mark_running(run)
        for fact in (
            JobStarted(BLOB),
            EligibilityRecorded(0, devices, {}),
            CohortSelected(0, 0, devices[:2]),
            UpdateAccepted(0, msgspec.structs.replace(update("a"), weight=weight), 1.0),
        ):
            store.append_event(run, fact)
    assert main(["why", run, "--home", str(tmp_path)]) == 0
    assert (OUTWEIGHS in " ".join(capsys.readouterr().out.split())) is said


PLAN = JobConstants(0, 100, CohortSettings(size=2), 0)


def played(plan: JobConstants, fleet: dict[str, str], rounds: int) -> list[AnyEvent]:
    """The facts of a job whose devices all answer; `fleet` is device -> why it cannot be asked, or ""."""
    facts: list[AnyEvent] = [JobStarted(BLOB)]
    state = apply_event(JobState(plan), facts[0], 0.0)
    free = [device for device, code in fleet.items() if not code]
    while state.round < rounds:
        fact = decide_event(state, 0.0, free)
        if isinstance(fact, CohortSelected):
            fact = eligibility_event(state, LabelColumn(fleet)) or fact
        if fact is None and state.pending_devices:
            fact = UpdateAccepted(state.round, update(min(state.pending_devices), state.round))
        facts.append(fact or RoundCommitted(state.round, BLOB, False, {}))
        state = apply_event(state, facts[-1], 0.0)
    return facts


def test_every_device_has_its_reason_and_who_was_not_drawn_its_place():
    fleet = {"a": "", "b": "", "c": "", "d": "", "e": "hot", "f": "offline"}
    told = round_outcomes.outcomes_by_round(played(PLAN, fleet, 1), PLAN)[0]
    codes = [told[device].code for device in "abcdef"]
    assert sorted(codes[:4]) == ["answered", "answered", "drawn", "drawn"]
    assert codes[4:] == ["hot", "offline"]
    places = sorted(
        (part.position, part.eligible_count, part.cohort_size) for part in told.values() if part.code == "drawn"
    )
    assert places == [(3, 4, 2), (4, 4, 2)]


def test_the_places_told_afterwards_are_those_of_the_draw_in_every_round():
    plan = msgspec.structs.replace(PLAN.cohort, turns=1.0)
    plan = JobConstants(7, 100, plan, 0)
    facts = played(plan, dict.fromkeys("abcdefg", ""), 40)
    for number, told in round_outcomes.outcomes_by_round(facts, plan).items():
        places = sorted(part.position for part in told.values() if part.code == "drawn")
        assert places == [3, 4, 5, 6, 7], number


def test_what_became_of_those_who_were_asked_is_told():
    facts = [
        JobStarted(BLOB),
        EligibilityRecorded(0, ("a", "b", "c", "d")),
        CohortSelected(0, 0, ("a", "b")),
        TaskDeclined(0, "a", "memory", "too big"),
        CohortSelected(0, 0, ("c",)),
        UpdateRejected(0, "c", "NaN"),
        CohortSelected(0, 0, ("d",)),
        UpdateAccepted(0, update("d")),
        RoundClosed(0),
        RoundCommitted(0, BLOB, False, {}),
    ]
    told = round_outcomes.outcomes_by_round(facts, PLAN)[0]
    assert [told[device].text for device in "abcd"] == [
        "declined (memory): too big",
        "selected; no update before the round closed",
        "update refused: NaN",
        "update received",
    ]


def test_a_device_that_was_silent_through_an_attempt_says_so():
    facts = [JobStarted(BLOB), EligibilityRecorded(0, ("a",)), CohortSelected(0, 0, ("a",)), RoundRetried(0, 1)]
    assert (
        round_outcomes.outcomes_by_round(facts, PLAN)[0]["a"].text
        == "selected; no update by the deadline: selected last in the next attempt"
    )
    again = [*facts, CohortSelected(0, 1, ("a",)), UpdateAccepted(0, update("a"))]
    assert round_outcomes.outcomes_by_round(again, PLAN)[0]["a"].code == "answered"


def test_a_run_that_was_stopped_and_fails_as_it_is_taken_up_again_was_stopped_with_its_round():
    facts = [
        JobStarted(BLOB),
        CohortSelected(0, 0, ("a",)),
        JobEnded("stopped", "by request"),
        JobEnded("failed", "gone"),
    ]
    assert (
        round_outcomes.outcomes_by_round(facts, PLAN)[0]["a"].text == "selected; no update before the run was stopped"
    )


@pytest.mark.parametrize(
    ("status", "silence"),
    [("failed", "no update by the deadline"), ("stopped", "no update before the run was stopped")],
)
def test_a_round_that_fails_for_quorum_tells_of_everybody_who_was_asked(status, silence):
    facts = [
        JobStarted(BLOB),
        EligibilityRecorded(0, tuple("abcde")),
        CohortSelected(0, 0, ("a", "b", "c")),
        UpdateAccepted(0, update("a")),
        TaskDeclined(0, "b", "memory", "too big"),
        RoundRetried(0, 1),
        CohortSelected(0, 1, ("d", "c")),
        UpdateRejected(0, "d", "NaN"),
        JobEnded(status, "no quorum"),
    ]
    assert round_outcomes.format_outcomes(told(facts, JobConstants(0, 100, CohortSettings(size=3), 0)), 1) == [
        "round 1:",
        "  update received: a",
        "  declined (memory): too big: b",
        f"  selected; {silence}: c",
        "  update refused: NaN: d",
        "  not drawn, by place (2 of 4 selected): e",
    ]


def test_what_became_of_a_round_outlives_a_resumption():
    facts = [
        JobStarted(BLOB),
        EligibilityRecorded(0, ("a", "b")),
        CohortSelected(0, 0, ("a", "b")),
        TaskDeclined(0, "a", "data", "no data"),
        RoundRetried(0, 1),
        JobEnded("failed", "no quorum"),
        JobResumed(),
        EligibilityRecorded(0, (), {"offline": ("b",)}),
    ]
    assert round_outcomes.format_outcomes(told(facts), 1) == [
        "round 1:",
        "  declined (data): no data: a",
        "  selected; no update by the deadline: b",
    ]


def test_a_round_that_cannot_begin_tells_why_too():
    facts = [JobStarted(BLOB), EligibilityRecorded(0, (), {"hot": ("a", "b")})]
    assert round_outcomes.format_outcomes(told(facts)) == [
        "round 1:",
        "  is hotter than [cohort] max_temperature_c: a, b",
    ]


def told(facts: list[AnyEvent], plan: JobConstants = PLAN) -> round_outcomes.RoundOutcomes:
    """Parts of devices by these facts."""
    made = round_outcomes.RoundOutcomes(plan)
    for fact in facts:
        made.apply_event(fact)
    return made


def test_lines_are_for_people_and_ask_for_what_there_is():
    found = told(played(PLAN, {"a": "", "b": "", "c": "battery"}, 2))
    assert round_outcomes.format_outcomes(found, round=2) == [
        "round 2:",
        "  update received: a, b",
        "  has less battery charge than [cohort] min_battery, and is not charging: c",
    ]
    assert round_outcomes.format_outcomes(found, device="a") == ["rounds 1 to 2: update received"]
    with pytest.raises(JobError, match="choose from 1 to 2"):
        round_outcomes.format_outcomes(found, round=9)
    with pytest.raises(JobError, match="it knows a, b, c"):
        round_outcomes.format_outcomes(found, device="z")


def test_boards_that_flood_are_online_in_what_a_run_waits_for(tmp_path):
    with Store(tmp_path) as store:
        id = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        assert store.acquire_lock()
        store.set_status(id, "running")
        for fact in (JobStarted(BLOB), EligibilityRecorded(0, (), {"flooding": ("a", "b")}, {})):
            store.append_event(id, fact)
        said = wait_reasons.describe_wait(store.find_job(id), store)
    assert said is not None
    assert "2 online, 2 not eligible (flooding)" in said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (("waiting", "working", "asked"), "others are being validated, and there is no room"),
        (("waiting", "sending", "waiting"), "1 other is in transfer or being validated, and there is no room"),
        (("waiting", "sending", "sending"), "2 others are in transfer or being validated, and there is no room"),
    ],
)
def test_a_board_that_waits_for_its_turn_says_whose_update_goes_before(tmp_path, steps, said):
    with Store(tmp_path) as store, TelemetryStore(tmp_path, writes=True) as noted:
        id = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        assert store.acquire_lock()
        store.set_status(id, "running")
        for fact in (
            JobStarted(BLOB),
            EligibilityRecorded(0, ("a", "b", "c"), {}, {}),
            CohortSelected(0, 0, ("a", "b", "c")),
        ):
            store.append_event(id, fact)
        doing = {device: CurrentTask(id, 0, step, 0.0) for device, step in zip("abc", steps, strict=True)}
        noted.write_telemetry([DeviceStatus(device, online=True, doing=each) for device, each in doing.items()], [])
        parts = round_outcomes.load_outcomes(store, id).by_round[0]
    waiting = [device for device, step in zip("abc", steps, strict=True) if step == "waiting"]
    assert [device for device in "abc" if said in parts[device].text] == waiting
    assert {parts[device].text for device in set("abc") - set(waiting)} <= {"selected"}
