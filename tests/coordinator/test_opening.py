"""Jobs that are taken up: by the worker where they are large, beside the others, and announced if they cannot go on."""

import shutil
from typing import Any

import numpy as np
import pytest
from by_hand import MODEL, NETWORK, TABLE, Killed, SlowWorker, Stage, ones

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import AnyEvent, CohortSelected, JobEnded, JobStarted, RoundCommitted
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.formats import job_bundle

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
    worker = SlowWorker(at_once=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, CoordinatorLimits(), worker)
    id = large(stage)
    a = stage.hand("a")
    stage.play()
    a.answer(ones())
    stage.play()
    assert stage.store.stored_status(stage.job) == "done"
    assert (facts(stage, id), len(worker.begun)) == ([], 1)
    worker.go_on()
    stage.play()
    assert [type(fact) for fact in facts(stage, id)][:1] == [JobStarted]
    a.answer(ones())
    stage.play()
    assert stage.store.stored_status(id) == "done"


def test_a_coordinator_that_dies_between_the_first_state_and_its_fact_makes_it_again(tmp_path, monkeypatch):
    append = Store.append_event

    def dies(store, id, fact):
        if isinstance(fact, JobStarted):
            raise Killed
        append(store, id, fact)

    found = []
    for name in ("calm", "killed"):
        worker = SlowWorker(at_once=True, large_bytes=SMALL_BYTES)
        stage = Stage(tmp_path / name, CoordinatorLimits(running=1), worker)
        stage.store.set_status(stage.job, "done")
        id, a = large(stage), stage.hand("a")
        stage.play()
        worker.go_on()
        if name == "killed":
            monkeypatch.setattr(Store, "append_event", dies)
            with pytest.raises(Killed):
                stage.play()
            monkeypatch.setattr(Store, "append_event", append)
            stage.worker = worker = SlowWorker(at_once=True, large_bytes=SMALL_BYTES)
            stage.restart()
            stage.play()
            worker.go_on()
        stage.play()
        a.answer(ones(3.0))
        stage.play()
        worker.go_on()
        stage.play()
        found.append([fact.state for fact in facts(stage, id) if isinstance(fact, JobStarted | RoundCommitted)])
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_boards_of_a_job_that_is_taken_up_again_are_left_to_it_and_keep_their_tasks(tmp_path):
    worker = SlowWorker(at_once=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, CoordinatorLimits(), worker)
    stage.store.set_status(stage.job, "done")
    id, a = large(stage, cohort={"deadline_s": 1000.0}), stage.hand("a")
    stage.play()
    worker.go_on()
    stage.play()
    (task,) = [task for task in a.tasks if task]
    stage.restart()
    other = stage.add("other")
    stage.play()
    a.say("claim", wire.Claim(job=id, round=0, attempt=0, accepted=True))
    stage.play()
    assert worker.begun
    assert not [fact for fact in facts(stage, other) if isinstance(fact, CohortSelected)]
    worker.go_on()
    stage.play()
    assert all(a.tasks)
    assert (a.tasks[-1].job, a.tasks[-1].round, a.tasks[-1].epoch > task.epoch) == (id, 0, True)
    a.answer(ones())
    stage.play()
    assert [type(fact) for fact in facts(stage, other)].count(CohortSelected) == 1


def test_a_job_that_is_stopped_while_it_is_taken_up_stops_then(tmp_path):
    worker = SlowWorker(at_once=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, worker=worker)
    stage.store.set_status(stage.job, "done")
    id = large(stage)
    stage.hand("a")
    stage.play()
    stage.store.set_status(id, "stopping")
    stage.play()
    assert stage.store.stored_status(id) == "stopping"
    worker.go_on()
    stage.play()
    assert stage.store.stored_status(id) == "stopped"
    assert facts(stage, id)[-1] == JobEnded("stopped", "by request")


def test_a_first_state_that_another_job_releases_meanwhile_is_kept(tmp_path):
    worker = SlowWorker(at_once=True, large_bytes=SMALL_BYTES)
    stage = Stage(tmp_path, worker=worker)
    stage.store.set_status(stage.job, "done")
    id, a = large(stage), stage.hand("a")
    stage.play()
    worker.go_on()
    stage.server._desk.garbage.add_candidates({path.name for path in stage.store.depot.folder.iterdir()}, soon=True)
    stage.server._desk.collect_garbage()
    stage.play()
    (started,) = [fact for fact in facts(stage, id) if isinstance(fact, JobStarted)]
    assert stage.store.depot.has_blob(started.state)
    a.answer(ones())
    stage.play()
    assert stage.store.stored_status(id) == "done"


@pytest.mark.parametrize("why", ["bundle", "engine", "method", "stopped"])
def test_a_job_that_ends_before_it_is_taken_up_is_published_as_any_that_ends(tmp_path, why):
    resnet = {"engine": "numpy", "network": {**NETWORK, "name": "resnet"}}
    stage = Stage(tmp_path, **(resnet if why == "engine" else {}))
    if why == "bundle":
        shutil.rmtree(tmp_path / "bundle")
    elif why == "method":
        stage.server._opening._load = lambda name: {}[name]
    elif why == "stopped":
        stage.store.set_status(stage.job, "stopping")
    watcher, topic = stage.broker.connect(), wire.Topics("f").round_topic(stage.job)
    watcher.subscribe([topic])
    stage.play()
    told, cleared = watcher.receive()
    said = wire.decode(told.payload, wire.RoundState)
    status, reason = {
        "bundle": ("failed", "make it with `fedquilt prepare`"),
        "engine": ("failed", "leave the line out"),
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
