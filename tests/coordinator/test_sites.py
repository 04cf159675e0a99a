"""Sites: what they pass up, and for whom they may speak."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from by_hand import Hand, Stage, constant_model

from fedquilt import methods, wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import events, responses
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.updates import sites, validation
from fedquilt.coordinator.updates.validation import MAX_EPOCH_LEAD
from fedquilt.core import BlobRef, DeviceUpdate, Encoding, SiteRight, Task, Update, UpdateError, UpdateSchema, Usage

PLAN = JobConstants(0, 3, settings.CohortSettings(), 0)


def board(name: str, value: float, weight: float = 2.0, **metrics: float) -> DeviceUpdate:
    model = {"a": np.full((2, 3), value, np.float32), "steps": np.array(7)}
    return DeviceUpdate(name, 4, weight, metrics, {"model": model, "empty": {}})


def of(given: list[DeviceUpdate], weight: float | None = None) -> DeviceUpdate:
    """A site's update, as it is read from the blobs that it travels as."""
    bundles = {
        name: tensors.decode_tensors(tensors.encode_tensors(bundle)) for name, bundle in sites.bundle_updates(given)
    }
    return DeviceUpdate("site", 4, sum(each.weight for each in given) if weight is None else weight, {}, bundles)


def test_what_is_passed_up_is_what_the_boards_sent():
    given = [board("b", 1.0, loss=0.5), board("a", 2.0, 3.0)]
    update = of(given)
    assert list(update.bundles) == ["site.0"]
    assert [part.device for part in sites.parts_of_site(update)] == ["a", "b"]
    for before, after in zip(given, sites.split_site_update(update), strict=True):
        assert (before.device, before.round, before.weight) == (after.device, after.round, after.weight)
        assert before.metrics == after.metrics
        assert list(before.bundles) == list(after.bundles)
        for name, bundle in before.bundles.items():
            assert list(bundle) == list(after.bundles[name])
            assert all(np.array_equal(bundle[each], after.bundles[name][each]) for each in bundle)
            assert all(bundle[each].dtype == after.bundles[name][each].dtype for each in bundle)


def test_many_boards_are_cut_into_several_bundles(monkeypatch):
    given = [board(f"b{number}", float(number)) for number in range(5)]
    monkeypatch.setattr(sites, "BUNDLE_TENSORS", 4)
    assert [len(sites._decode_parts(bundle)) for bundle in of(given).bundles.values()] == [2, 2, 1]
    monkeypatch.setattr(sites, "BUNDLE_TENSORS", 1000)
    monkeypatch.setattr(sites, "BUNDLE_BYTES", 3 * (2 * 3 * 4 + 8))
    update = of(given)
    assert [len(sites._decode_parts(bundle)) for bundle in update.bundles.values()] == [3, 2]
    assert [each.device for each in sites.split_site_update(update)] == [f"b{number}" for number in range(5)]


def test_a_site_of_which_no_board_had_anything_to_send_says_so():
    assert sites.split_site_update(of([])) == []
    assert sites.parts_of_site(of([])) == []


def read(update: DeviceUpdate) -> list[DeviceUpdate]:
    assert sites.parts_of_site(update)
    return sites.split_site_update(update)


def table(**given: Any) -> np.ndarray:
    return np.frombuffer(msgspec.json.encode([given]), np.uint8)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"site.0": {}}, "table of devices .* is missing"),
        ({"site.0": {"boards": np.zeros(3, np.float32)}}, "table of devices .* is missing"),
        ({"site.0": {"boards": np.zeros(3, np.uint8)}}, "cannot be read"),
        ({"site.0": {"boards": table(device="a/b")}}, "cannot be read"),
        ({"site.0": {"boards": table(device="a", weight=-1.0)}}, "cannot be read"),
        ({"site.0": {"boards": table(device="a"), "0/0/x": np.zeros(1)}}, "belongs to none"),
        ({"site.0": {"boards": table(device="a"), "1/0/x": np.zeros(1)}}, "belongs to none"),
        ({"site.0": {"boards": table(device="a", bundles=["m", "m"])}}, "two bundles of the same name"),
        ({"site.0": {"boards": table(device="a", weight=1.0)}}, "add up to 1, but the site claims 0"),
        ({"site.0": {"boards": table(device="a")}, "model": {}}, "is not allowed in|is missing"),
    ],
)
def test_an_update_that_is_not_what_it_says_is_refused_by_name(spoilt, said):
    with pytest.raises(UpdateError, match=said):
        read(DeviceUpdate("site", 0, 0.0, {}, spoilt))


def test_a_board_that_is_in_it_twice_is_named():
    with pytest.raises(UpdateError, match="a occurs twice"):
        sites.parts_of_site(of([board("a", 1.0), board("a", 2.0)]))
    one, other = of([board("a", 1.0)]).bundles["site.0"], of([board("a", 2.0)]).bundles["site.0"]
    with pytest.raises(UpdateError, match="a occurs twice"):
        sites.parts_of_site(DeviceUpdate("site", 4, 4.0, {}, {"site.0": one, "site.1": other}))


def test_a_board_whose_update_does_not_fit_is_named_and_nothing_of_the_site_is_folded():
    method = methods.load("robust")
    above = sites.adapt_for_sites(
        method, settings.parse_job({"name": "j", "method": "robust", "cohort": {"min_devices": 3}}), {}
    )
    model = {"a": np.zeros((2, 3), np.float32), "steps": np.array(0)}
    state = method.state({"most": 32}, {}, model, 0.0, 0, seed=0)
    good, bad = board("a", 1.0), board("b", 1.0)
    plain = [replace(each, bundles={"model": each.bundles["model"]}) for each in (good, bad)]
    above.aggregation.require_valid_update(state, of(plain))
    odd = replace(plain[1], bundles={"model": {"a": np.zeros(9, np.float32), "steps": np.array(1)}})
    with pytest.raises(UpdateError, match="b: tensor 'a' has shape"):
        above.aggregation.require_valid_update(state, of([plain[0], odd]))
    with pytest.raises(UpdateError, match="this job requires single updates"):
        above.aggregation.require_valid_update(state, DeviceUpdate("site", 0, 1.0, {}, {sites.AGGREGATE_BUNDLE: {}}))


# -- at the coordinator above ---------------------------------------------------------------------


def update(device: str, *boards: str, size: int = 10) -> Update:
    ref = {"site.0" if boards else "model": BlobRef(sha256=f"{len(device):064x}", size=size)}
    whose = {"job": "j", "round": 0, "attempt": 0, "device": device, "state": "0" * 64, "site_devices": boards}
    return Update(**whose, weight=1.0, bundles=ref, metrics={}, usage=Usage())


def running(*answers: Update) -> JobState:
    """A round that has asked sites and a board, with these answers."""
    state = apply_event(JobState(PLAN), events.JobStarted(BlobRef(sha256="0" * 64, size=1)), 0.0)
    state = apply_event(state, events.CohortSelected(0, 0, ("one", "other", "alone")), 0.0)
    for each in answers:
        state = apply_event(state, events.UpdateAccepted(0, each), 0.0)
    return state


def examined(state: JobState, taken: Update) -> responses.Decision:
    return responses.decide_response("j", state, taken, responses.UpdateValidated(taken.device, taken, taken), 0.0)


def test_a_board_that_counts_through_one_site_is_refused_from_another():
    state = running(update("one", "a", "b"))
    step = examined(state, update("other", "b", "c"))
    (fact,) = step.events
    assert isinstance(fact, events.UpdateRejected)
    assert fact.reason.startswith("other: an update of b is already in this round, submitted by one")
    (fine,) = examined(state, update("other", "c")).events
    assert isinstance(fine, events.UpdateAccepted)


def test_a_board_that_counts_through_a_site_is_refused_by_itself_and_the_other_way_round():
    own = update("alone")
    step = responses.decide_response(
        "j", running(update("one", "alone")), None, responses.UpdateAnnounced("alone", own), 0.0
    )
    (fact,) = step.events
    assert isinstance(fact, events.UpdateRejected)
    assert "an update of alone is already in this round, submitted by one" in fact.reason
    (fact,) = examined(running(own), update("one", "alone")).events
    assert isinstance(fact, events.UpdateRejected)
    assert "an update of alone is already in this round, submitted by itself" in fact.reason


def test_a_site_does_not_speak_for_a_device_that_the_coordinator_knows():
    (fact,) = examined(running(), update("one", "alone")).events
    assert isinstance(fact, events.UpdateRejected)
    assert "its device alone is also connected to this coordinator" in fact.reason


def test_the_boards_of_a_lost_update_may_count_again():
    state = apply_event(running(update("one", "a")), events.UpdateLost(0, "one", "gone"), 0.0)
    assert state.sites_by_device == {}
    (fact,) = examined(state, update("other", "a")).events
    assert isinstance(fact, events.UpdateAccepted)


def test_a_sites_update_may_be_as_large_as_its_boards_could_send():
    known = UpdateSchema({"model": {"a": tensors.TensorSpec((1000,), np.dtype(np.float32))}})
    each = validation.max_bundle_bytes(known.bundles["model"], Encoding())
    with pytest.raises(UpdateError, match="has no site right"):
        validation.require_manifest_fits(update("one", "a"), known, Encoding())
    most = 50 * each + validation.SITE_OVERHEAD_BYTES
    validation.require_manifest_fits(update("one", "a", size=most), known, Encoding(), boards=50)
    with pytest.raises(UpdateError, match="from a site with 50 devices"):
        validation.require_manifest_fits(update("one", "a", size=most + 1), known, Encoding(), boards=50)
    vast = validation.MAX_SITE_DEVICES * each + validation.SITE_OVERHEAD_BYTES + 1
    with pytest.raises(UpdateError, match="are expected from a site"):
        validation.require_manifest_fits(update("one", "a", size=vast), known, Encoding(), boards=2**53)


COHORT = {"deadline_s": 5.0, "attempts": 50, "quorum": 0.5, "min_devices": 1, "start_devices": 2}
RIGHT = SiteRight(("cam-*", "a"), 2)


def stage(folder: Path, **table: object) -> Stage:
    """A coordinator with a site "plant" by its limits.toml, and a device "a"."""
    made = Stage(folder, limits=CoordinatorLimits(sites={"plant": RIGHT}), cohort=COHORT, **table)
    made.hand("a")
    plant = made.hand("plant")
    plant.say("profile", msgspec.structs.replace(plant.profile, site_device_count=9), retain=True)
    made.play(1.0)
    return made


def task_of(hand: Hand) -> Task:
    return next(task for task in reversed(hand.tasks) if task)


def speak(site: Hand, *names: str) -> None:
    """Submit updates of these devices."""
    given = [DeviceUpdate(name, 0, 10.0, {}, {"model": constant_model(7.0)}) for name in names]
    bundles = {name: site.depot.store_bytes(tensors.encode_tensors(each)) for name, each in sites.bundle_updates(given)}
    site.answer(constant_model(), bundles=bundles, weight=10.0 * len(names))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("cam-1", "cam-2"), ""),
        (("cam-1", "door-1"), "plant has no right to submit updates of door-1"),
        (("cam-1", "cam-2", "cam-3"), "plant submits updates of 3 devices, its site right allows 2"),
        (("a", "cam-1"), "its device a is also connected to this coordinator"),
        (("plant",), "plant has no right to submit updates of plant"),
    ],
)
def test_a_site_speaks_for_the_boards_of_its_right_alone(tmp_path, names, said):
    made = stage(tmp_path)
    device, plant = made.hands
    speak(plant, *names)
    made.play()
    device.answer(constant_model(1.0), weight=10.0)
    made.play(8.0)
    assert said in "".join(fact.reason for fact in made.told(UpdateRejected))
    updates = {fact.update.device: fact.update for fact in made.told(UpdateAccepted)}
    assert updates.keys() == ({"a"} if said else {"a", "plant"})
    assert said or updates["plant"].site_devices == names
    assert len(made.told(RoundCommitted)) == 1


def test_a_device_without_a_right_gets_the_task_of_a_device(tmp_path, caplog):
    made = stage(tmp_path)
    device, plant = made.hands
    liar = made.hand("z")
    liar.say("profile", msgspec.structs.replace(liar.profile, site_device_count=1), retain=True)
    made.play(6.0)  # it is asked in the next attempt
    assert set(task_of(plant).bundles) == {"state"}
    assert set(task_of(device).bundles) == set(task_of(liar).bundles) == {"model"}
    assert "z claims to be a site but has no site right" in caplog.text


def test_a_site_that_loses_its_right_in_a_round_is_a_device(tmp_path):
    made = stage(tmp_path, rounds=2)
    device, plant = made.hands
    made.server._limits.sites.clear()
    speak(plant, "cam-1")
    made.play()
    assert "a site's update, but the device has no site right" in made.told(UpdateRejected)[0].reason
    device.answer(constant_model(1.0))
    made.play(8.0)
    plant.tasks.clear()
    plant.say("profile", msgspec.structs.replace(plant.profile, site_device_count=9), retain=True)
    made.play(8.0)
    assert set(task_of(plant).bundles) == {"model"}


def test_a_device_that_becomes_a_site_in_a_round_answers_once(tmp_path):
    made = stage(tmp_path, rounds=2)
    device, plant = made.hands
    plant.say("profile", plant.profile, retain=True)
    made.play(0.5)
    plant.answer(constant_model(2.0), weight=10.0)
    made.play(0.5)
    plant.say("profile", msgspec.structs.replace(plant.profile, site_device_count=9), retain=True)
    speak(plant, "cam-1")
    device.answer(constant_model(1.0), weight=10.0)
    made.play(0.5)
    assert [fact.update.site_devices for fact in made.told(UpdateAccepted)] == [(), ()]
    speak(plant, "cam-1")
    made.play(0.5)
    assert made.told(UpdateAccepted)[-1].update.site_devices == ("cam-1",)


def test_a_right_holds_after_a_restart(tmp_path):
    made = stage(tmp_path)
    device, plant = made.hands
    made.broker.lose_client(device.link)
    made.restart()
    made.play()
    speak(plant, "a", "cam-1")
    made.play()
    assert "its device a is also connected to this coordinator" in made.told(UpdateRejected)[0].reason


@pytest.mark.parametrize(("ahead", "follows"), [(3, True), (MAX_EPOCH_LEAD, True), (MAX_EPOCH_LEAD + 1, False)])
def test_a_device_moves_the_start_of_the_coordinator_on_once_and_not_by_any_number(tmp_path, ahead, follows):
    made = stage(tmp_path)
    device, _ = made.hands
    before = made.store.epoch
    claim = wire.Claim(job=made.job, round=0, attempt=0, accepted=False, code="counted", epoch=before + ahead)
    device.say("claim", claim)
    made.play()
    after = made.store.epoch
    assert after == (before + ahead + 1 if follows else before)
    device.say("claim", msgspec.structs.replace(claim, epoch=after + 3))
    made.play()
    assert made.store.epoch == (after if follows else after + 4)
