"""Which device is a site, and for whom it speaks, from its first message to the end of its right."""

from pathlib import Path

import msgspec
import pytest
from by_hand import Hand, Stage, ones

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.updates import sites
from fedquilt.coordinator.updates.validation import LATER_EPOCHS
from fedquilt.core import DeviceUpdate, SiteRight, Task

COHORT = {"deadline_s": 5.0, "attempts": 50, "quorum": 0.5, "min_devices": 1, "start_devices": 2}
RIGHT = SiteRight(("cam-*", "a"), 2)


def stage(folder: Path, **table: object) -> Stage:
    """A coordinator with a site "plant" by its limits.toml, and a device "a"."""
    made = Stage(folder, limits=CoordinatorLimits(sites={"plant": RIGHT}), cohort=COHORT, **table)
    made.hand("a")
    plant = made.hand("plant")
    plant.say("profile", msgspec.structs.replace(plant.profile, boards=9), retain=True)
    made.play(1.0)
    return made


def task_of(hand: Hand) -> Task:
    return next(task for task in reversed(hand.tasks) if task)


def speak(site: Hand, *names: str) -> None:
    """Submit updates of these devices."""
    given = [DeviceUpdate(name, 0, 10.0, {}, {"model": ones(7.0)}) for name in names]
    bundles = {name: site.depot.store_bytes(tensors.encode_tensors(each)) for name, each in sites.bundle_updates(given)}
    site.answer(ones(), bundles=bundles, weight=10.0 * len(names))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("cam-1", "cam-2"), ""),
        (("cam-1", "door-1"), "plant has no right to speak for door-1"),
        (("cam-1", "cam-2", "cam-3"), "plant speaks for 3 boards, and may speak for 2"),
        (("a", "cam-1"), "a is a device of this coordinator, and speaks for itself"),
        (("plant",), "plant has no right to speak for plant"),
    ],
)
def test_a_site_speaks_for_the_boards_of_its_right_alone(tmp_path, names, said):
    """Otherwise all of its update is refused, and the device that it named counts by its own."""
    made = stage(tmp_path)
    device, plant = made.hands
    speak(plant, *names)
    made.play()
    device.answer(ones(1.0), weight=10.0)
    made.play(8.0)
    assert said in "".join(fact.reason for fact in made.told(UpdateRejected))
    updates = {fact.update.device: fact.update for fact in made.told(UpdateAccepted)}
    assert updates.keys() == ({"a"} if said else {"a", "plant"})
    assert said or updates["plant"].boards == names
    assert len(made.told(RoundCommitted)) == 1


def test_a_device_without_a_right_gets_the_task_of_a_device(tmp_path, caplog):
    """Not the state, which the site gets; the log says what a site would have to do."""
    made = stage(tmp_path)
    device, plant = made.hands
    liar = made.hand("z")
    liar.say("profile", msgspec.structs.replace(liar.profile, boards=1), retain=True)
    made.play(6.0)  # it is asked in the next attempt
    assert set(task_of(plant).bundles) == {"state"}
    assert set(task_of(device).bundles) == set(task_of(liar).bundles) == {"model"}
    assert "z says that it is a site, and has no right to speak for other devices" in caplog.text


def test_a_site_that_loses_its_right_in_a_round_is_a_device(tmp_path):
    made = stage(tmp_path, rounds=2)
    device, plant = made.hands
    made.server._limits.sites.clear()
    speak(plant, "cam-1")
    made.play()
    assert "it is what a site sends, and the device has no right to be one" in made.told(UpdateRejected)[0].reason
    device.answer(ones(1.0))
    made.play(8.0)
    plant.tasks.clear()
    plant.say("profile", msgspec.structs.replace(plant.profile, boards=9), retain=True)
    made.play(8.0)
    assert set(task_of(plant).bundles) == {"model"}


def test_a_device_that_becomes_a_site_in_a_round_answers_once(tmp_path):
    """It has answered for itself, and may speak for others from the next round on."""
    made = stage(tmp_path, rounds=2)
    device, plant = made.hands
    plant.say("profile", plant.profile, retain=True)
    made.play(0.5)
    plant.answer(ones(2.0), weight=10.0)
    made.play(0.5)
    plant.say("profile", msgspec.structs.replace(plant.profile, boards=9), retain=True)
    speak(plant, "cam-1")
    device.answer(ones(1.0), weight=10.0)
    made.play(0.5)
    assert [fact.update.boards for fact in made.told(UpdateAccepted)] == [(), ()]
    speak(plant, "cam-1")
    made.play(0.5)
    assert made.told(UpdateAccepted)[-1].update.boards == ("cam-1",)


def test_a_right_holds_after_a_restart(tmp_path):
    made = stage(tmp_path)
    device, plant = made.hands
    made.broker.lose_client(device.link)
    made.restart()
    made.play()
    speak(plant, "a", "cam-1")
    made.play()
    assert "a is a device of this coordinator" in made.told(UpdateRejected)[0].reason


@pytest.mark.parametrize(("ahead", "follows"), [(3, True), (LATER_EPOCHS, True), (LATER_EPOCHS + 1, False)])
def test_a_device_moves_the_start_of_the_coordinator_on_once_and_not_by_any_number(tmp_path, ahead, follows):
    """A start that devices cannot read, or ever new ones, would cut all of them off."""
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
