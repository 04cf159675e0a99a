"""What the coordinator refuses of a device driven by hand: bad updates, floods, claims, garbage."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from by_hand import Stage, constant_model

from fedquilt import methods, wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.delivery import rate_limiter
from fedquilt.coordinator.device_columns import ELIGIBLE
from fedquilt.coordinator.rounds import responses
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    RoundCommitted,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.core import Aggregation, Usage
from fedquilt.methods import fedavg
from fedquilt.models.local_training import NetworkState


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {**constant_model(), "1.bias": np.array([np.nan, 1], np.float32)},
            "'1.bias' holds 1 values that are not finite",
        ),
        ({**constant_model(), "1.bias": np.zeros(3, np.float32)}, "'1.bias' has shape (3,), expected (2,)"),
        ({"1.bias": np.zeros(2, np.float32)}, "tensor names differ: 1.weight"),
        ({**constant_model(), "1.bias": np.full(2, 1e300)}, "a: tensor '1.bias' is float64, expected float32"),
        ({**constant_model(), "1.bias": np.full(2, 7, np.int64)}, "a: tensor '1.bias' is int64, expected float32"),
        (
            {**constant_model(), "1.bias": np.full(2, 3e38, np.float32)},
            "a: tensor '1.bias' has numbers from 3e+38 to 3e+38",
        ),
    ],
)
def test_a_bad_update_is_refused_with_its_reason_and_costs_nothing(stage, model, said):
    a, b = stage.connect("ab")
    b.answer(constant_model(2.0))
    a.answer(model)
    stage.play()
    assert said in stage.told(UpdateRejected)[0].reason
    assert not a.acks[0].accepted
    assert [fact.update.device for fact in stage.told(RoundCommitted) and stage.told(UpdateAccepted)] == ["b"]


@pytest.mark.parametrize(
    ("weight", "examples", "said"),
    [
        (1e24, None, "a claims weight 1e+24, but at most 1e+07 is plausible"),
        (40.0, 30, "a claims weight 40, but has only 30 examples"),
    ],
)
def test_a_device_counts_as_no_more_examples_than_it_has(stage, weight, examples, said):
    a, b = stage.connect("ab")
    a.answer(constant_model(5.0), weight=weight, usage=Usage(examples=examples))
    b.answer(constant_model(2.0), weight=30.0, usage=Usage(examples=30))
    stage.play()
    assert said in stage.told(UpdateRejected)[0].reason
    stored = stage.store.blob_store.blob_path(stage.told(RoundCommitted)[0].state.sha256)
    assert tensors.unpack_state(stored.read_bytes(), NetworkState).model["1.bias"].tolist() == [2.0, 2.0]


def test_a_state_that_is_not_finite_is_not_committed(stage, monkeypatch):
    (a,) = stage.connect("a")
    assert stage.server.find_job(stage.job) is not None
    broken = {**constant_model(), "1.bias": np.array([np.inf, 1], np.float32)}
    method = dataclasses.replace(
        stage.server.find_job(stage.job).method, step=lambda state, total: dataclasses.replace(state, model=broken)
    )
    monkeypatch.setattr(stage.server.find_job(stage.job), "method", method)
    stage.submit(a)
    assert not stage.told(RoundCommitted)
    (ended,) = stage.told(JobEnded)
    assert ended.status == "failed"
    assert "new state: model['1.bias'] is not finite after updates of a" in ended.reason


def test_an_update_that_is_no_tensors_at_all_is_refused(stage):
    (a,) = stage.connect("a")
    a.answer(constant_model(), bundles={"model": a.depot.store_bytes(b"\x80\x04pickle!")})
    stage.play()
    assert "not a safetensors blob" in stage.told(UpdateRejected)[0].reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"1.bias": np.zeros(3, np.float32)}, "a: tensor '1.bias' has shape (3,), expected (2,)"),
        ({"1.bias": np.zeros(2)}, "a: tensor '1.bias' is float64, expected float32"),
        ({"2.bias": np.zeros(2, np.float32)}, "a: tensor names differ: 2.bias"),
    ],
)
def test_an_update_is_refused_for_its_manifest_before_a_byte_of_it_is_fetched(stage, changed, said):
    a, b = stage.connect("ab")
    model = {**constant_model(), **changed}
    held = {path.name for path in stage.store.blob_store.folder.iterdir()}
    a.answer(model, layouts={"model": tensors.layout_from_tensors(model)})
    b.answer(constant_model(2.0), layouts={"model": tensors.layout_from_tensors(constant_model())})
    stage.play(0.2)
    assert [fact.reason for fact in stage.told(UpdateRejected)] == [said]
    assert stage.executor._transfers.traffic_bytes("a", "up") == 0
    stage.play()
    ref = a.depot.store_bytes(tensors.encode_tensors(model))
    assert ref.sha256 not in {path.name for path in stage.store.blob_store.folder.iterdir()} - held
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["b"]
    assert not stage.told(UpdateAccepted)[0].update.layouts  # the log does not keep it


@pytest.mark.parametrize("ends", ["withheld", "failed", "closed"])
def test_of_all_that_a_device_begins_to_send_one_update_at_most_is_on_the_disk(stage, monkeypatch, ends):
    unchecked = replace(fedavg.METHOD, aggregation=Aggregation(fedavg.fold))  # else none of them would be fetched
    monkeypatch.setattr(methods, "load", lambda name: unchecked)
    a, b = stage.connect("ab")
    before = {path.name for path in stage.store.blob_store.folder.iterdir()}
    size = 2_000_000
    for number in range(20):
        whole = a.depot.store_bytes(np.full(1000, number, np.uint8).tobytes())
        half = a.depot.store_bytes(np.full(size, number, np.uint8).tobytes())
        a.answer(constant_model(), bundles={"one": whole, "two": half})
        for _ in range(6):
            stage.play(0.05)
        a.depot.remove_blob(half.sha256)
        if ends == "failed":
            stage.play(4.0)
    parts = list(stage.store.blob_store.folder.glob("*.part"))
    new = {path.name for path in stage.store.blob_store.folder.iterdir()} - before
    assert len(parts) <= 1
    assert len(new) <= 2
    if ends == "closed":
        b.answer(constant_model())
        stage.play(40.0)  # its deadline
        assert not list(stage.store.blob_store.folder.glob("*.part"))
        assert stage.server.finished


@pytest.mark.parametrize("topic", ["progress", "nonsense"])
def test_a_board_that_floods_is_set_aside_by_name_and_the_round_goes_on(tmp_path, caplog, topic):
    stage = Stage(tmp_path, rounds=2, cohort={"deadline_s": 5000.0, "quorum": 0.5})
    a, b = stage.connect("ab")
    for _ in range(20_000):
        a.say(topic, wire.Progress(job="j", round=0, attempt=0, fraction=0.5))
    stage.play(0.2)
    assert [fact.reason for fact in stage.told(UpdateRejected)] == [responses.FLOODED]
    assert f"a {responses.FLOODED}" in caplog.text
    b.answer(constant_model(2.0))
    stage.play(2.0)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["b"]
    assert stage.told(RoundCommitted)
    assert stage.told(CohortSelected)[-1].devices == ("b",)
    assert "flooding" in stage.told(EligibilityRecorded)[-1].ineligible
    stage.play(rate_limiter.BLOCK_S)
    a.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    stage.play(2.0)
    assert "a" in stage.told(EligibilityRecorded)[-1].eligible


def test_a_device_cannot_speak_for_another(stage, caplog):
    a, _ = stage.connect("ab")
    a.answer(constant_model(), device="b")
    stage.play()
    assert not stage.told(UpdateAccepted)
    assert not a.acks
    assert "dev/a/up/update: the message names another device, b" in caplog.text


def test_garbage_from_the_network_is_counted_and_dropped(stage):
    (a,) = stage.connect("a")
    for leaf in ("presence", "profile", "claim", "update", "blob/get", "nonsense"):
        a.say(leaf, b"\x00garbage")
    stage.play()
    assert stage.executor.malformed_messages.dropped == 6
    stage.submit(a)
    assert stage.server.finished


def test_garbage_floods_no_log(tmp_path, caplog):
    stage = Stage(tmp_path, cohort={"deadline_s": 2000.0})
    (a,) = stage.connect("a")
    for _ in range(200):
        a.say("claim", b"\x00garbage")
    stage.play(650.0)
    told = [record.message for record in caplog.records if "dropped" in record.message]
    assert len(told) == 4
    assert told[-1].startswith("dropped 197 more messages under fq/1/f/dev/a/up; the last: ")


def test_a_board_that_is_removed_is_not_asked_before_its_next_message(tmp_path):
    stage = Stage(tmp_path)
    a, _ = stage.hand("a"), stage.hand("b")
    stage.play()
    wants, registry = stage.server._jobs[stage.job].job.requirements, stage.server.registry

    def able() -> set[str]:
        return set(registry.eligibility(wants, stage.broker.now_s).devices_with(ELIGIBLE))

    assert able() == {"a", "b"}
    stage.server._handle_input(responses.DeviceChange("a", "removed"), stage.broker.now_s)
    assert able() == {"b"}
    assert registry.eligibility(wants, stage.broker.now_s)["a"] == "removed"
    a.say("presence", wire.Presence(online=True, boot="2"), retain=True)
    a.say("profile", a.profile, retain=True)
    stage.play(2.0)
    assert able() == {"a", "b"}
