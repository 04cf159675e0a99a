"""Devices that are removed from a fleet by `fedquilt devices --remove`."""

from pathlib import Path

import pytest
from by_hand import Hand, Noted, ones

from fedquilt import wire
from fedquilt.cli import main
from fedquilt.coordinator.fleet.device_status import TelemetryStore
from fedquilt.coordinator.rounds import decisions
from fedquilt.coordinator.rounds.events import JobEnded, UpdateAccepted, UpdateRejected


class Home(Noted):
    """A coordinator with its home, on which commands are run."""

    def said(self, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
        """What the command prints."""
        assert main(["devices", *words, "--home", str(self.store.home)]) == code
        captured = capsys.readouterr()
        return " ".join((captured.out + captured.err).split())

    def retained(self, device: str) -> list[str]:
        """Topics of a device's messages that the broker keeps."""
        return sorted(topic for topic in self.broker._retained if f"/dev/{device}/" in topic)

    def known(self) -> list[str]:
        with TelemetryStore(self.store.home) as store:
            return [each.device for each in store.load_statuses()]


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[Home, Hand, Hand]:
    """Two devices with a task each."""
    stage = Home(tmp_path, cohort={"deadline_s": 600.0})
    assert stage.store.acquire_lock()
    a, b = stage.hand("a"), stage.hand("b")
    stage.play()
    return stage, a, b


def test_a_removed_device_leaves_nothing_at_the_broker_and_in_the_home(fleet, capsys):
    stage, a, b = fleet
    b.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    a.answer(ones())
    stage.play(10.0)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    told = stage.said(capsys, "b", "--remove")
    assert told.startswith("b: removed at the coordinator's next look")
    assert "fedquilt identity revoke" in told
    assert stage.retained("b") == ["fq/1/f/dev/b/up/presence", "fq/1/f/dev/b/up/profile"]
    stage.play()
    assert (stage.retained("b"), stage.known()) == ([], ["a"])
    assert stage.retained("a") == ["fq/1/f/dev/a/up/presence", "fq/1/f/dev/a/up/profile"]
    stage.restart()
    stage.play()
    assert (stage.known(), stage.server.registry.devices.keys()) == (["a"], {"a"})


def test_a_device_with_a_task_is_removed_only_by_force_and_its_round_goes_on(fleet, capsys):
    stage, a, b = fleet
    assert f"b has a task of {stage.job}, round 1" in stage.said(capsys, "b", "--remove", code=2)
    stage.play()
    assert stage.known() == ["a", "b"]
    stage.said(capsys, "b", "--remove", "--force")
    stage.play()
    assert [(fact.device, fact.reason) for fact in stage.told(UpdateRejected)] == [("b", decisions.REMOVED)]
    assert b.tasks[-1] is None
    assert stage.retained("b") == []
    a.answer(ones())
    stage.play()
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a"]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_removed_device_that_still_runs_is_back_with_its_next_message(fleet, capsys):
    stage, _, b = fleet
    stage.said(capsys, "b", "--remove", "--force")
    stage.play()
    assert stage.known() == ["a"]
    b.say("presence", b.presence, retain=True)
    b.say("profile", b.profile, retain=True)
    stage.play()
    assert stage.known() == ["a", "b"]
    assert "b" in stage.server.registry.online_devices(stage.broker.now_s)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--remove"], "--remove takes the NAMEs of the boards to remove"),
        (["a", "--remove", "--watch"], "--remove takes the NAMEs of the boards to remove"),
        (["z", "--remove"], "has heard of a board 'z'"),
        (["a", "--force"], "--force has a meaning only with --remove"),
    ],
)
def test_a_removal_of_nobody_is_refused(fleet, capsys, words, told):
    stage, _, _ = fleet
    assert told in stage.said(capsys, *words, code=2)
    stage.play()
    assert stage.known() == ["a", "b"]
