"""A device puts any value into any field of its messages: the others' result stays, and the coordinator goes on."""

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hostile_fields
import msgspec
import numpy as np
import pytest
from by_hand import Hand, Stage, constant_model
from evaluations import of_classes, total

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, TaskDeclined, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.updates import sites
from fedquilt.core import (
    DeviceUpdate,
    EvaluationSums,
    OperatingPoint,
    Profile,
    Rates,
    Update,
    Usage,
    WireError,
    evaluation,
)
from fedquilt.methods import robust
from fedquilt.models.local_training import NetworkState

HONEST = ("a", "b", "c", "d", "e")
LIAR = "z"
COHORT = {"deadline_s": 5.0, "attempts": 50, "quorum": 0.8, "min_devices": 5, "start_devices": 6}
Change = Callable[[Any], Any]


class Liar:
    """A device that changes what it says; what it does not change is as an honest device has it."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.change: Change = lambda message: message

    def say(self, leaf: str, message: Any, sha256: str = "") -> None:
        """Publish a message, of a blob if that is given, unless it is larger than any message may be."""
        topics = self.hand.topics
        topic = topics.blob_topic(LIAR, "up", sha256, leaf) if sha256 else topics.device_topic(LIAR, "up", leaf)
        with contextlib.suppress(WireError):
            self.hand.link.publish(topic, wire.encode(self.change(message)))

    def greet(self) -> None:
        point = OperatingPoint(name="p", flops_per_s=1e9, busy_w=5.0, rates={"w": self.change(Rates(flops_per_s=1e9))})
        profile = msgspec.structs.replace(self.hand.profile, points=(self.change(point),))
        self.say("presence", wire.Presence(online=True, boot="1"))
        self.say("profile", profile)
        self.say("hello", wire.Hello())

    def lie(self, speaks: bool) -> None:
        """Say all that a device says during a round, the update last: for itself, or for two others."""
        task = next(task for task in reversed(self.hand.tasks) if task)
        of = {"job": task.job, "round": task.round, "attempt": task.attempt}
        self.say("telemetry", wire.Telemetry(power_w=5.0, temperature_c=40.0))
        self.say("installed", wire.ReleaseStatus(rollout="r", kind="model", serial=1, phase="committed"))
        self.say("claim", wire.Claim(**of, accepted=True))
        self.say("progress", wire.Progress(**of, fraction=0.5))
        if speaks:
            parts = [self.change(sites.SiteUpdatePart(name, 10.0, {}, ("model",))) for name in ("a", "b")]
            given = [
                DeviceUpdate(p.device, task.round, p.weight, p.metrics, {"model": constant_model(7.0)}) for p in parts
            ]
            bundles = {
                name: self.hand.depot.store_bytes(tensors.encode_tensors(each))
                for name, each in sites.bundle_updates(given)
            }
        else:
            bundles = {"model": self.hand.depot.store_bytes(tensors.encode_tensors(constant_model(7.0)))}
        bundles = {name: self.change(ref) for name, ref in bundles.items()}
        sha256 = next(iter(bundles.values())).sha256
        self.say("manifest", wire.BlobManifest(sha256=sha256, size=1, chunk=1024, digests=""), sha256)
        self.say("missing", wire.MissingBlob(sha256="0" * 64), sha256)
        self.say("placed", wire.UploadProgress(sha256=sha256), sha256)
        self.say("blob/get", wire.ChunkRequest(sha256=next(iter(task.bundles.values())).sha256, chunk=1024))
        usage = self.change(Usage(wall_s=1.0))
        update = Update(
            **of,
            device=LIAR,
            weight=20.0 if speaks else 10.0,
            bundles=bundles,
            metrics={},
            usage=usage,
            state=task.state,
        )
        self.say("update", update)


def play(folder: Path, changes: Sequence[Change], **table: Any) -> Stage:
    """A job of a round for each change, which five devices work for, and a liar.

    It answers for itself after the others, and in each second round before them for two of them.
    """
    stage = Stage(folder, rounds=len(changes), cohort=COHORT, **table)
    honest = [stage.hand(name) for name in HONEST]
    liar = Liar(stage.hand(LIAR))
    stage.play(0.5)
    for number, change in enumerate(changes):
        liar.change = change
        liar.greet()
        stage.play(0.3)
        if number % 2:
            liar.lie(speaks=True)
            stage.play(0.3)
        for hand in honest:
            hand.answer(constant_model(float(1 + HONEST.index(hand.name))), weight=10.0, usage=Usage(examples=10))
        stage.play(0.3)
        if not number % 2:
            liar.lie(speaks=False)
        stage.play(0.3)
        for _ in range(40):
            if len(stage.told(RoundCommitted)) > number:
                break
            stage.play(1.0)
        stage.play(0.5)
    return stage


def require_right(stage: Stage, rounds: int, result: Callable[[float], list[float]], kind: type) -> None:
    """Every honest update has counted in every round, and the liar's as one of a device at most.

    Args:
        stage: after its job.
        rounds: number of the job's rounds.
        result: gives what the last state may be, by the weight of the liar's update.
        kind: of the state.
    """
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    assert [fact.round for fact in stage.told(RoundCommitted)] == list(range(rounds))
    assert not [fact for fact in stage.told(UpdateRejected) if fact.device in HONEST]
    for round in range(rounds):
        updates = {fact.update.device: fact.update for fact in stage.told(UpdateAccepted) if fact.round == round}
        assert updates.keys() - {LIAR} == set(HONEST)
        assert all(update.site_devices == () for update in updates.values())
        weight = updates[LIAR].weight if LIAR in updates else 0.0
        assert weight <= 1000.0
    payload = stage.store.blob_store.load(stage.told(RoundCommitted)[-1].state.sha256)
    assert payload is not None
    bias = tensors.unpack_state(payload, kind).model["1.bias"]
    assert any(np.allclose(bias, each) for each in result(weight)), (bias, weight)


def mean(weight: float) -> list[float]:
    return [(10.0 * (1 + 2 + 3 + 4 + 5) + 7.0 * weight) / (50.0 + weight)]


def of_field(kind: type, name: str, most: int = 4) -> list[Change]:
    """Changes that set a field to its extreme values."""

    def set_to(value: Any) -> Change:
        return lambda message: msgspec.structs.replace(message, **{name: value}) if type(message) is kind else message

    values = hostile_fields.extremes(kind, name)
    values = values if len(values) <= most else random.Random(name).sample(values, most)
    return [set_to(value) for value in values for _ in range(2)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [each for each in hostile_fields.fields() if each[0] is not EvaluationSums],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.parametrize("most", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_no_value_of_a_field_changes_more_than_the_update_of_its_device(tmp_path, kind, name, most):
    changes = of_field(kind, name, most)
    require_right(play(tmp_path, changes), len(changes), mean, NetworkState)


@pytest.mark.parametrize("name", EvaluationSums.__struct_fields__)
def test_no_sum_of_a_device_changes_more_than_its_own_part_of_an_evaluation(tmp_path, name):
    values = hostile_fields.extremes(EvaluationSums, name)
    table = {"cohort": {**COHORT, "quorum": 0.6, "min_devices": 2, "start_devices": 3}, "check": {"every": 1}}
    stage = Stage(tmp_path, rounds=len(values), **table)
    honest, liar = [stage.hand(each) for each in "ab"], stage.hand(LIAR)
    stage.play(0.5)
    own = of_classes(0.5)
    for number, value in enumerate(values):
        for hand in honest:
            hand.answer(constant_model(), weight=10.0, evaluation=own)
        with contextlib.suppress(WireError):
            liar.answer(constant_model(), weight=10.0, evaluation=msgspec.structs.replace(own, **{name: value}))
        for _ in range(40):
            if len(stage.told(RoundCommitted)) > number:
                break
            stage.play(1.0)
        stage.play(0.5)
    committed = stage.told(RoundCommitted)[: len(values)]
    assert len(committed) == len(values)
    two, three = total(own, own), total(own, own, own)
    for sums in (fact.evaluation for fact in committed):
        assert evaluation.find_inconsistency(sums) == ""
        assert {**msgspec.structs.asdict(sums), "loss": None} in (
            {**msgspec.structs.asdict(each), "loss": None} for each in (two, three)
        )
        assert sums.loss in (two.loss, three.loss) or name == "loss"


def at_random(seed: int, rounds: int) -> list[Change]:
    roll = random.Random(seed)
    return [lambda message: hostile_fields.changed(message, roll, roll.choice((0.05, 0.3)))] * rounds


@pytest.mark.parametrize("seed", [n if n < 3 else pytest.param(n, marks=pytest.mark.nightly) for n in range(10)])
def test_no_values_of_many_fields_change_more_than_the_update_of_their_device(tmp_path, seed):
    require_right(play(tmp_path, at_random(seed, 6)), 6, mean, NetworkState)


@pytest.mark.parametrize("seed", [n if n < 2 else pytest.param(n, marks=pytest.mark.nightly) for n in range(5)])
def test_the_median_of_honest_devices_stays(tmp_path, seed):
    robust_job = {"method": "robust", "params": {"rule": "median"}}
    changes = [*of_field(Profile, "site_device_count"), *at_random(seed, 4)]
    require_right(play(tmp_path, changes, **robust_job), len(changes), lambda weight: [3.0, 3.5], robust.State)


def test_control_characters_of_a_device_reach_no_log(tmp_path):
    odd = "\x1b[2J\x1b]0;title\x07\nround 9: done \x9b2J\x7f"
    stage = Stage(tmp_path, rounds=1, cohort={"deadline_s": 5.0, "min_devices": 1, "quorum": 0.5})
    honest, liar = stage.hand("a"), stage.hand("b")
    stage.play(0.5)
    task = next(task for task in reversed(liar.tasks) if task)
    of = {"job": task.job, "round": task.round, "attempt": task.attempt}
    claim = wire.Claim(**of, accepted=False, code="data", reason=odd)
    liar.link.publish(liar.topics.device_topic("b", "up", "claim"), wire.encode(claim))
    honest.answer(constant_model(1.0), weight=10.0, metrics={odd: 1.0, "loss": 0.5})
    stage.play(2.0)
    (declined,) = stage.told(TaskDeclined)
    (rejected,) = stage.told(UpdateRejected)
    assert declined.reason == "?[2J?]0;title? round 9: done ?2J?"
    assert rejected.reason.startswith(f"metric name {declined.reason!r} is invalid")
