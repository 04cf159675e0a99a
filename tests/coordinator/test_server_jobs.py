"""Jobs that are stopped, resumed, broken, or wait for boards, with devices driven by hand."""

from by_hand import MODEL, TABLE, Hand, Stage, ones

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.formats import job_bundle


def half_answered(stage: Stage) -> tuple[Hand, Hand]:
    """Two boards: the first has answered in its round, and the second works."""
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    return a, b


def test_a_stopped_job_takes_its_tasks_back_and_resumes_where_it_was(stage):
    _, b = half_answered(stage)
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    assert stage.store.stored_status(stage.job) == "stopped"
    assert b.tasks[-1] is None
    stage.store.set_status(stage.job, "running")
    stage.restart()
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.stored_status(stage.job) == "done"
    assert len(stage.told(UpdateAccepted)) == 2


def test_work_that_comes_while_its_job_is_stopped_is_kept_for_when_it_goes_on(stage):
    _, b = half_answered(stage)
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    update = b.answer(ones())
    stage.server.finished = False
    stage.play()
    assert b.acks == []
    stage.store.set_status(stage.job, "running")
    stage.restart()
    stage.play()
    b.say("update", update)
    stage.play()
    assert stage.store.stored_status(stage.job) == "done"


def test_work_for_a_job_that_nobody_here_knows_is_refused(stage):
    """So that a device does not offer it for ever."""
    a = stage.hand("a")
    stage.play()
    a.answer(ones(), job="of-old")
    stage.play()
    assert [(ack.accepted, ack.reason) for ack in a.acks] == [(False, "no job of-old is under way here")]


def test_a_job_whose_bundle_is_gone_fails_with_the_mend(stage):
    (stage.folder / "bundle" / "bundle.json").unlink()
    stage.play()
    assert stage.store.stored_status(stage.job) == "failed"
    (ended,) = [fact for _, _, fact in stage.store.read_events(stage.job)]
    assert "fedquilt prepare" in ended.reason


def test_a_job_whose_state_is_lost_or_whose_method_breaks_fails_alone(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    hand = stage.hand("a")
    stage.play()
    hand.answer(ones())
    stage.play()
    (sha256,) = stage.store.latest_state_hashes()
    stage.store.depot.remove_blob(sha256)
    stage.restart()
    stage.play()
    assert stage.store.stored_status(stage.job) == "failed"
    *_, (_, _, ended) = stage.store.read_events(stage.job)
    assert "is gone from" in ended.reason
    broken = stage.store.add_job(settings.parse_job(TABLE), stage.folder / "broken")
    job_bundle.write_bundle(
        stage.folder / "broken", {}, {"model": tensors.encode_tensors(MODEL)}
    )  # without its network
    stage.server.finished, stage.server._only = False, broken
    stage.play()
    assert stage.store.stored_status(broken) == "failed"


def test_a_job_whose_boards_have_gone_lets_the_next_one_be_done(tmp_path):
    stage = Stage(tmp_path, cohort={"deadline_s": 600.0, "min_devices": 2})
    first, a, b = stage.job, stage.hand("a"), stage.hand("b")
    stage.play()
    a.answer(ones())
    stage.play()
    b.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play(25.0)  # longer than a grace
    second = stage.add("k")
    stage.play()
    a.answer(ones())
    stage.play()
    assert [stage.store.stored_status(job) for job in (first, second)] == ["running", "done"]
    b.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    stage.play()
    b.answer(ones())
    stage.play()
    assert stage.store.stored_status(first) == "done"
    assert [
        fact.update.device for _, _, fact in stage.store.read_events(first) if isinstance(fact, UpdateAccepted)
    ] == ["a", "b"]


def test_jobs_whose_boards_never_come_have_their_turns_in_order(tmp_path):
    stage = Stage(tmp_path, limits=CoordinatorLimits(running=1))
    jobs = [stage.job, stage.add("k"), stage.add("l")]
    served = list[str]()
    for _ in range(140):
        stage.play(0.05)
        served += [job.id for job in stage.server.active_jobs() if job.id not in served[-1:]]
    assert served[:4] == [*jobs, jobs[0]]


def test_a_fleets_run_that_was_killed_does_not_keep_others_from_being_served(stage, caplog):
    job = settings.parse_job({**TABLE, "name": "simulated"})
    left = stage.store.add_job(job, stage.folder / "bundle", "fleet")
    stage.store.set_status(left, "running")
    stage.server._only = None
    stage.hand("a")
    stage.play(5.0)
    assert [job.id for job in stage.server.active_jobs()] == [stage.job]
    assert [record.message for record in caplog.records if left in record.message] == [
        f"{left} is a simulated fleet's, whose boards are not here: it is left to `fedquilt simulate`"
    ]
    assert stage.store.stored_status(left) == "running"


def test_a_job_that_was_stopped_before_it_began_can_be_resumed(stage):
    stage.store.append_event(stage.job, JobEnded("stopped", "by request"))
    stage.store.set_status(stage.job, "running")
    a = stage.hand("a")
    stage.play()
    a.answer(ones())
    stage.play()
    assert stage.store.stored_status(stage.job) == "done"


def test_a_stop_that_is_asked_for_while_a_job_is_taken_up_is_not_lost(stage, monkeypatch):
    load = stage.server._opening._load

    def stopped(method):
        stage.store.set_status(stage.job, "stopping")
        return load(method)

    monkeypatch.setattr(stage.server._opening, "_load", stopped)
    stage.play()
    assert stage.store.stored_status(stage.job) == "stopped"


def test_a_stop_that_is_asked_for_while_a_job_gives_way_is_not_lost(tmp_path, monkeypatch):
    stage = Stage(tmp_path, CoordinatorLimits())
    stage.hand("a")
    stage.play()

    def nobody(*given):
        stage.store.set_status(stage.job, "stopping")
        monkeypatch.undo()
        return []

    monkeypatch.setattr(fair_share, "select_jobs", nobody)
    stage.play(4.0)
    assert stage.store.stored_status(stage.job) == "stopped"


def test_what_a_round_needed_is_dropped_when_the_next_ones_tasks_are_sent(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    first = stage.server.active_jobs()[0].rounds.state
    assert first is not None
    updates = [a.answer(ones(2.0)), b.answer(ones(4.0))]
    stage.play()
    assert [fact.round for fact in stage.told(CohortSelected)] == [0, 1]
    depot = stage.store.depot
    assert not depot.has_blob(first)
    assert not any(depot.has_blob(update.bundles["model"]) for update in updates)
    assert depot.has_blob(stage.told(RoundCommitted)[0].state)
