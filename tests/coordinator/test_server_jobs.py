"""Jobs of a coordinator: taken up, stopped, resumed."""

import shutil
from typing import Any

import numpy as np
import pytest
from by_hand import MODEL, NETWORK, TABLE, Hand, Killed, SlowWorker, Stage, constant_model

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    JobStarted,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.formats import job_bundle


def half_answered(stage: Stage) -> tuple[Hand, Hand]:
    """Two boards: the first has answered in its round, and the second works."""
    a, b = stage.connect("ab")
    stage.submit(a)
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
    stage.submit(b)
    assert stage.store.stored_status(stage.job) == "done"
    assert len(stage.told(UpdateAccepted)) == 2


def test_work_for_a_job_that_nobody_here_knows_is_refused(stage):
    (a,) = stage.connect("a")
    a.answer(constant_model(), job="of-old")
    stage.play()
    assert [(ack.accepted, ack.reason) for ack in a.acks] == [(False, "job of-old is not active on this coordinator")]


def test_a_job_whose_bundle_is_gone_fails_with_the_mend(stage):
    (stage.folder / "bundle" / "bundle.json").unlink()
    stage.play()
    assert stage.store.stored_status(stage.job) == "failed"
    (ended,) = [fact for _, _, fact in stage.store.read_events(stage.job)]
    assert "fedquilt prepare" in ended.reason


def test_a_job_whose_state_is_lost_or_whose_method_breaks_fails_alone(tmp_path):
    stage = Stage(tmp_path, rounds=2)
    (hand,) = stage.connect("a")
    stage.submit(hand)
    (sha256,) = stage.store.latest_state_hashes()
    stage.store.blob_store.remove_blob(sha256)
    stage.restart()
    stage.play()
    assert stage.store.stored_status(stage.job) == "failed"
    *_, (_, _, ended) = stage.store.read_events(stage.job)
    assert "is missing from" in ended.reason
    broken = stage.store.add_job(settings.parse_job(TABLE), stage.folder / "broken")
    # without its network
    job_bundle.write_bundle(stage.folder / "broken", {}, {"model": tensors.encode_tensors(MODEL)})
    stage.server.finished, stage.server._only = False, broken
    stage.play()
    assert stage.store.stored_status(broken) == "failed"


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
        f"{left} needs simulated devices: only `fedquilt simulate` continues this run"
    ]
    assert stage.store.stored_status(left) == "running"


def test_a_job_that_was_stopped_before_it_began_can_be_resumed(stage):
    stage.store.append_event(stage.job, JobEnded("stopped", "by request"))
    stage.store.set_status(stage.job, "running")
    (a,) = stage.connect("a")
    stage.submit(a)
    assert stage.store.stored_status(stage.job) == "done"


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


SMALL_BYTES = 2048  # bundles of more are for the worker


def large(stage: Stage, name: str = "large", **table: Any) -> str:
    """Queue a job whose bundle is for the worker, as it has a file besides its model."""
    folder = stage.folder / f"{name}.bundle"
    files = {
        "model": tensors.encode_tensors(MODEL),
        "more": tensors.encode_tensors({"x": np.zeros(SMALL_BYTES, np.float32)}),
    }
    job_bundle.write_bundle(folder, {"network": NETWORK, "flops": 8}, files)
    stage.all, stage.server._only = True, None
    return stage.store.add_job(settings.parse_job({**TABLE, "name": name, **table}), folder)


def facts(stage: Stage, id: str) -> list[AnyEvent]:
    return [fact for _, _, fact in stage.store.read_events(id)]


def test_other_jobs_go_on_while_a_large_one_is_taken_up(tmp_path):
    worker = SlowWorker(runs_all=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, CoordinatorLimits(), worker)
    id = large(stage)
    (a,) = stage.connect("a")
    stage.submit(a)
    assert stage.store.stored_status(stage.job) == "done"
    assert (facts(stage, id), len(worker.begun)) == ([], 1)
    worker.run_pending()
    stage.play()
    assert [type(fact) for fact in facts(stage, id)][:1] == [JobStarted]
    stage.submit(a)
    assert stage.store.stored_status(id) == "done"


def test_a_coordinator_that_dies_between_the_first_state_and_its_fact_makes_it_again(tmp_path, monkeypatch):
    append = Store.append_event

    def dies(store, id, fact):
        if isinstance(fact, JobStarted):
            raise Killed
        append(store, id, fact)

    found = []
    for name in ("calm", "killed"):
        worker = SlowWorker(runs_all=True, large_bytes=SMALL_BYTES)
        stage = Stage(tmp_path / name, CoordinatorLimits(running=1), worker)
        stage.store.set_status(stage.job, "done")
        id, a = large(stage), stage.hand("a")
        stage.play()
        worker.run_pending()
        if name == "killed":
            monkeypatch.setattr(Store, "append_event", dies)
            with pytest.raises(Killed):
                stage.play()
            monkeypatch.setattr(Store, "append_event", append)
            stage.worker = worker = SlowWorker(runs_all=True, large_bytes=SMALL_BYTES)
            stage.restart()
            stage.play()
            worker.run_pending()
        stage.play()
        stage.submit(a, factor=3.0)
        worker.run_pending()
        stage.play()
        found.append([fact.state for fact in facts(stage, id) if isinstance(fact, JobStarted | RoundCommitted)])
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_boards_of_a_job_that_is_taken_up_again_are_left_to_it_and_keep_their_tasks(tmp_path):
    worker = SlowWorker(runs_all=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, CoordinatorLimits(), worker)
    stage.store.set_status(stage.job, "done")
    id, a = large(stage, cohort={"deadline_s": 1000.0}), stage.hand("a")
    stage.play()
    worker.run_pending()
    stage.play()
    (task,) = [task for task in a.tasks if task]
    stage.restart()
    other = stage.add("other")
    stage.play()
    a.say("claim", wire.Claim(job=id, round=0, attempt=0, accepted=True))
    stage.play()
    assert worker.begun
    assert not [fact for fact in facts(stage, other) if isinstance(fact, CohortSelected)]
    worker.run_pending()
    stage.play()
    assert all(a.tasks)
    assert (a.tasks[-1].job, a.tasks[-1].round, a.tasks[-1].epoch > task.epoch) == (id, 0, True)
    stage.submit(a)
    assert [type(fact) for fact in facts(stage, other)].count(CohortSelected) == 1


def test_a_job_that_is_stopped_while_it_is_taken_up_stops_then(tmp_path):
    worker = SlowWorker(runs_all=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, worker=worker)
    stage.store.set_status(stage.job, "done")
    id = large(stage)
    stage.hand("a")
    stage.play()
    stage.store.set_status(id, "stopping")
    stage.play()
    assert stage.store.stored_status(id) == "stopping"
    worker.run_pending()
    stage.play()
    assert stage.store.stored_status(id) == "stopped"
    assert facts(stage, id)[-1] == JobEnded("stopped", "by request")


@pytest.mark.parametrize("why", ["bundle", "engine", "method", "stopped"])
def test_a_job_that_ends_before_it_is_taken_up_is_published_as_any_that_ends(tmp_path, why):
    resnet = {"engine": "numpy", "network": {**NETWORK, "name": "resnet"}}
    stage = Stage(tmp_path, **(resnet if why == "engine" else {}))
    if why == "bundle":
        shutil.rmtree(tmp_path / "bundle")
    elif why == "method":
        stage.server._job_loader._load = lambda name: {}[name]
    elif why == "stopped":
        stage.store.set_status(stage.job, "stopping")
    watcher, topic = stage.broker.connect(), wire.Topics("f").round_topic(stage.job)
    watcher.subscribe([topic])
    stage.play()
    told, cleared = watcher.receive()
    said = wire.decode(told.payload, wire.RoundState)
    status, reason = {
        "bundle": ("failed", "create one with `fedquilt prepare`"),
        "engine": ("failed", "remove the line"),
        "method": ("failed", "KeyError: 'fedavg'"),
        "stopped": ("stopped", "by request"),
    }[why]
    assert (said.job, said.phase, said.rounds, cleared.payload) == (stage.job, status, 1, b"")
    assert reason in said.note
    assert [fact.status for fact in stage.told(JobEnded)] == ([] if why == "stopped" else [status])
    late = stage.broker.connect()
    late.subscribe([topic])
    stage.play()
    assert list(late.receive()) == []


def test_a_first_state_that_another_job_releases_meanwhile_is_kept(tmp_path):
    worker = SlowWorker(runs_all=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, worker=worker)
    stage.store.set_status(stage.job, "done")
    id, a = large(stage), stage.hand("a")
    stage.play()
    worker.run_pending()
    stage.server._context.garbage.add_candidates(
        {path.name for path in stage.store.blob_store.folder.iterdir()}, urgent=True
    )
    stage.server._context.collect_garbage()
    stage.play()
    (started,) = [fact for fact in facts(stage, id) if isinstance(fact, JobStarted)]
    assert stage.store.blob_store.has_blob(started.state)
    stage.submit(a)
    assert stage.store.stored_status(id) == "done"
