"""Which devices the coordinator chooses and when a job has used up its bytes or joules, driven by hand."""

from by_hand import MODEL, Stage, ones

from fedquilt import wire
from fedquilt.coordinator.rounds.events import CohortSelected, EligibilityRecorded, JobEnded, RoundCommitted
from fedquilt.coordinator.views import event_messages, round_outcomes, wait_reasons
from fedquilt.core import Profile, Usage


def test_blobs_of_past_rounds_are_let_go(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    a = stage.hand("a")
    for factor in (1.0, 2.0):
        stage.play()
        a.answer(ones(factor))
        stage.play()
    assert stage.server.finished
    kept = {path.name for path in (tmp_path / "home" / "blobs").iterdir() if len(path.name) == 64}
    assert kept == {
        stage.told(RoundCommitted)[-1].state.sha256,
        *(p.name for p in (tmp_path / "bundle/blobs").iterdir()),
    }


def test_a_board_that_is_low_or_hot_is_passed_over_until_it_is_not(tmp_path):
    """The log says why, and the round begins as soon as somebody can be asked."""
    stage = Stage(tmp_path, cohort={"min_battery": 0.2, "max_temperature_c": 70.0})
    stage.play(0.1)  # nobody keeps what sensors said before the coordinator came
    a, b = stage.hand("a"), stage.hand("b")
    a.say("telemetry", wire.Telemetry(battery=0.1, charging=False))
    b.say("telemetry", wire.Telemetry(temperature_c=85.0))
    stage.play()
    assert not stage.told(CohortSelected)
    found = round_outcomes.load_outcomes(stage.store, stage.job).found
    assert {device: part.code for device, part in found[0].items()} == {"a": "battery", "b": "hot"}
    active = stage.server.find_job(stage.job)
    wait = wait_reasons.find_wait(active.rounds, active.engines, ["a", "b"])
    assert wait.text == (
        "devices that run torch or numpy: 2 online, 1 not eligible (battery), 1 not eligible (hot), at least 1 needed"
    )
    b.say("telemetry", wire.Telemetry(temperature_c=60.0))
    stage.play()
    assert [fact.devices for fact in stage.told(CohortSelected)] == [("b",)]
    b.say("telemetry", wire.Telemetry(temperature_c=90.0))  # from the work: it is not taken from it
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.stored_status(stage.job) == "done"
    found = round_outcomes.load_outcomes(stage.store, stage.job).found
    assert {device: part.code for device, part in found[0].items()} == {"a": "battery", "b": "answered"}


def test_a_job_stops_when_its_bytes_are_used_up_and_says_what_joules_it_cannot_count(tmp_path):
    stage = Stage(tmp_path, rounds=9, stop={"max_bytes": 10, "max_joules": 5.0})
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), usage=Usage(up_bytes=12))
    stage.play()
    assert [fact.round for fact in stage.told(RoundCommitted)] == [0]
    assert stage.told(RoundCommitted)[0].warnings == (
        "max_joules = 5 ends nothing here: no board that has answered has a meter for its joules; the job runs to its "
        "rounds, or to another limit of [stop]",
    )
    assert 2.0 < stage.told(RoundCommitted)[0].took_s < 4.2
    assert [(fact.status, fact.reason) for fact in stage.told(JobEnded)] == [
        ("done", "max_bytes: 12 bytes of 10 are used up")
    ]


def test_a_limit_of_joules_that_no_board_counts_is_told_once_more_at_the_end(tmp_path):
    stage = Stage(tmp_path, rounds=1, stop={"max_joules": 5.0})
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), usage=Usage())
    stage.play()
    (ended,) = stage.told(JobEnded)
    assert ended.status == "done"
    assert "max_joules = 5 ends nothing here" in ended.reason


def test_boards_that_take_fewer_joules_are_preferred_where_the_job_says_so(tmp_path):
    stage = Stage(tmp_path, cohort={"size": 1, "min_devices": 2, "prefer": "energy"})
    for name, watts in (("a", 1000.0), ("b", 1.23456)):
        stage.hand(name).measured(flops_per_s=1.0, busy_w=watts)
    stage.play()
    assert stage.told(EligibilityRecorded)[-1].costs == {"a": 1000.0, "b": 1.23}
    assert stage.told(CohortSelected)[0].devices == ("b",)


def test_a_task_carries_its_devices_tier_and_the_log_says_who_could_take_part(tmp_path):
    """Two devices with half a gigabyte for a task; one then has 10 bytes and cannot, and of examples one has told."""
    stage = Stage(tmp_path, rounds=3)
    one, two = stage.hand("one"), stage.hand("two")
    stage.play(2.0)
    assert one.tasks[-1].tier == "under 1GB"
    assert stage.told(CohortSelected)[0].coverage[0].endswith("2 of 2 devices")
    one.answer(MODEL, usage=Usage(examples=30))
    two.answer(MODEL)
    stage.play(2.0)
    assert stage.told(CohortSelected)[1].coverage == ()  # everybody can still, which is no news
    small = Profile(device="two", board="hand", memory_bytes=1 << 30, budget_bytes=10, engines=("numpy",), versions={})
    two.say("profile", small, retain=True)
    stage.restart()
    stage.play(2.0)
    one.answer(MODEL, usage=Usage(examples=30))
    two.answer(MODEL)
    stage.play(2.0)
    last = stage.told(CohortSelected)[2]
    assert last.coverage[0].endswith("1 of 2 devices, 30 of 30 examples (1 have not said how many)")
    assert last.coverage[0] in event_messages.format_single_event(last)[1]
