"""What is noted of boards, and how they are removed."""

import contextlib
import sqlite3
from pathlib import Path

import msgspec
import plain
import pytest
from by_hand import Hand, MonitoredStage, constant_model

from fedquilt import wire
from fedquilt.cli import main
from fedquilt.coordinator.delivery.monitoring_executor import (
    CLEANUP_INTERVAL_S,
    START_GRACE_S,
    STATUS_DELAY_S,
    TELEMETRY_DELAY_S,
    DeviceStatusTracker,
)
from fedquilt.coordinator.fleet import device_status
from fedquilt.coordinator.fleet.device_status import CurrentTask, DeviceStatus, TelemetrySample, TelemetryStore
from fedquilt.coordinator.rounds import responses
from fedquilt.coordinator.rounds.events import JobEnded, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.rounds.responses import DeviceChange
from fedquilt.core import BlobRef, StoreError, Update
from fedquilt.wire import Telemetry

PROFILE = plain.profile(
    board="Orin",
    engines=("numpy",),
    versions={"fedquilt": "0.1.0"},
    labels=("site=lab",),
    memory_bytes=8,
    budget_bytes=4,
)
TASK = plain.task(round=3)
CLAIM = wire.Claim(job="j", round=3, attempt=0, accepted=True)


def update() -> Update:
    ref = {"model": BlobRef(sha256="0" * 64, size=1)}
    return plain.update(round=3, bundles=ref)


class Watched:
    """A home whose boards are noted, with time that the test moves on."""

    def __init__(self, home: Path) -> None:
        self.home, self.now, self.now_s = home, 1_800_000_000.0, 100.0
        self.start()

    def start(self) -> None:
        self.noted = DeviceStatusTracker(self.home, lambda: self.now)
        self.noted.step(self.now_s)

    def say(self, device: str, *messages: object, retained: bool = False) -> None:
        for message in messages:
            if not retained and (not isinstance(message, wire.Presence) or message.online):
                self.noted.record_contact(device)
            self.noted.record_message((device, message), self.now_s)

    def wait(self, seconds: float) -> None:
        """Let time pass, as far as something is due in it."""
        end_s = self.now_s + seconds
        while (due_s := self.noted.step(self.now_s)) <= end_s:
            due_s = max(due_s, self.now_s)
            self.now, self.now_s = self.now + due_s - self.now_s, due_s
        self.now, self.now_s = self.now + end_s - self.now_s, end_s

    def stored(self, device: str = "a") -> DeviceStatus:
        with TelemetryStore(self.home) as store:
            return next(each for each in store.load_statuses() if each.device == device)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_board_is_known_soon_by_what_it_says(watched):
    began = watched.now
    watched.say("a", wire.Presence(online=True, boot="1"), PROFILE)
    watched.wait(STATUS_DELAY_S)
    found = watched.stored()
    assert (found.online, found.since, found.board, found.version) == (True, began, "Orin", "0.1.0")
    assert (found.budget_bytes, found.labels, found.doing) == (4, ("site=lab",), None)
    watched.noted.record_task("a", TASK)
    asked = watched.now
    watched.wait(STATUS_DELAY_S)
    assert watched.stored().doing == CurrentTask("j", 3, "asked", asked)
    watched.say("a", CLAIM, wire.Progress(job="j", round=3, attempt=0, fraction=0.25))
    watched.say("a", Telemetry(mode="25W", clock_s=watched.now - 7.0))
    claimed = watched.now
    watched.wait(TELEMETRY_DELAY_S)
    assert watched.stored().doing == CurrentTask("j", 3, "working", claimed, 0.25)
    assert (watched.stored().mode, watched.stored().skew_s) == ("25W", -7.0)
    watched.say("a", update())
    watched.wait(STATUS_DELAY_S)
    sending = watched.stored().doing
    assert sending.step == "sending"
    watched.noted.record_ack("a", wire.Ack(job="j", round=3, attempt=0, accepted=True))
    watched.wait(STATUS_DELAY_S)
    assert watched.stored().doing is None


def test_the_last_refusal_is_kept_with_its_reason_and_the_time_it_began(watched):
    refused = wire.Claim(job="j", round=3, attempt=0, accepted=False, code="memory", reason="12 MB short")
    began = watched.now
    watched.noted.record_task("a", TASK)
    watched.say("a", refused)
    watched.wait(60.0)
    watched.say("a", refused)
    watched.say("a", wire.Claim(job="j", round=3, attempt=0, accepted=False, code="cleared"))
    watched.wait(STATUS_DELAY_S)
    found = watched.stored()
    assert found.refusal == device_status.LatestDecline(began, "memory", "12 MB short", "j", 3)
    assert found.doing is None
    watched.noted.record_ack("a", wire.Ack(job="j", round=4, attempt=0, accepted=False, reason="not finite"))
    watched.wait(STATUS_DELAY_S)
    found = watched.stored()
    assert (found.refusal.code, found.refusal.reason, found.refusal.round) == ("update", "not finite", 4)
    watched.noted.record_ack("a", wire.Ack(job="j", round=9, attempt=0, accepted=False, reason="late", is_late=True))
    watched.wait(STATUS_DELAY_S)
    assert watched.stored().refusal == found.refusal
    watched.noted.record_message(DeviceChange("a", "flooding"), watched.now_s)
    watched.wait(STATUS_DELAY_S)
    assert watched.stored().refusal is not None
    assert watched.stored().refusal.code == "flooding"


def test_a_late_message_makes_no_clock_slow(watched):
    watched.say("a", Telemetry(clock_s=watched.now))
    watched.wait(30.0)
    watched.say("a", Telemetry(clock_s=watched.now - 20.0))
    watched.wait(TELEMETRY_DELAY_S)
    assert watched.stored().skew_s == 0.0
    watched.wait(device_status.SKEW_KEPT_S)
    watched.say("a", Telemetry(clock_s=watched.now - 20.0))
    watched.wait(TELEMETRY_DELAY_S)
    assert watched.stored().skew_s == -20.0


def test_a_restarted_coordinator_goes_on_with_what_is_known(watched):
    began = watched.now
    for device in ("a", "b"):
        watched.say(device, wire.Presence(online=True, boot="1"))
        watched.noted.record_task(device, TASK)
    watched.noted.close()
    watched.now += 3600
    watched.start()
    watched.say("a", wire.Presence(online=True, boot="1"))
    watched.wait(STATUS_DELAY_S)
    assert (watched.stored("a").since, watched.stored("a").doing) == (began, None)
    assert watched.stored("b").online
    watched.wait(START_GRACE_S)
    assert (watched.stored("a").online, watched.stored("b").online) == (True, False)
    watched.say("a", wire.Presence(online=True, boot="2"))
    watched.wait(STATUS_DELAY_S)
    assert watched.stored("a").since == watched.now - STATUS_DELAY_S


def test_what_a_broker_keeps_of_boards_long_gone_is_no_news(watched):
    watched.say("a", wire.Presence(online=False, boot="1"), PROFILE, retained=True)
    watched.wait(STATUS_DELAY_S)
    assert (watched.stored().online, watched.stored().since, watched.stored().seen) == (False, None, None)


def test_a_board_that_does_not_answer_is_silent_since_its_last_message(watched):
    watched.say("a", wire.Presence(online=True, boot="1"), PROFILE)
    heard = watched.now
    watched.wait(35.0)
    watched.noted.mark_quiet("a")
    watched.wait(STATUS_DELAY_S)
    quiet = watched.stored()
    assert (quiet.online, quiet.quiet, quiet.silent, quiet.seen) == (True, True, False, heard)
    watched.wait(15.0)
    watched.noted.record_message(DeviceChange("a", "silent"), watched.now_s)
    watched.wait(STATUS_DELAY_S)
    lost = watched.stored()
    assert (lost.online, lost.quiet, lost.silent, lost.since, lost.seen) == (False, False, True, heard, heard)
    watched.say("a", wire.Presence(online=True, boot="1"), retained=True)
    watched.wait(STATUS_DELAY_S)
    assert watched.stored() == lost
    watched.noted.record_contact("a")
    watched.noted.record_message(DeviceChange("a", "returned"), watched.now_s)
    watched.say("a", Telemetry(mode="25W"))
    back = watched.now
    watched.wait(TELEMETRY_DELAY_S)
    found = watched.stored()
    assert (found.online, found.silent, found.since, found.seen) == (True, False, back, back)


def test_a_board_that_was_silent_is_online_to_the_next_coordinator_until_it_does_not_answer(watched):
    watched.say("a", wire.Presence(online=True, boot="1"))
    watched.noted.record_message(DeviceChange("a", "silent"), watched.now_s)
    watched.noted.close()
    watched.start()
    watched.say("a", wire.Presence(online=True, boot="1"), retained=True)
    watched.say("a", Telemetry(mode="25W"))
    watched.wait(TELEMETRY_DELAY_S)
    assert (watched.stored().online, watched.stored().silent) == (True, False)


def test_readings_become_coarser_with_age_and_end(watched):
    watched.now = 1_800_000_000.0 // 3600 * 3600
    began = int(watched.now)
    for minute in range(180):
        for power_w, temperature_c, free in ((10.0, 50.0, 100), (20.0, 60.0 + minute / 10, 80)):
            watched.say("a", Telemetry(power_w=power_w, temperature_c=temperature_c, available_bytes=free))
            watched.wait(10.0)
        watched.wait(40.0)
    with TelemetryStore(watched.home) as store:
        fine = store.load_readings("a", watched.now - 600, watched.now)
        assert fine[0].power_w == 15.0
        assert (fine[0].power_most_w, fine[0].available_bytes) == (20.0, 80)
        coarse = store.load_readings("a", began, began + 86400)
        assert [each.at - began for each in coarse[:3]] == [0, 300, 600]
        assert (coarse[0].power_w, coarse[0].temperature_c) == (15.0, 60.4)
        assert [each.at for each in store.load_readings("a", began, began + 20 * 86400)] == [began, began + 3600]
    rows = sqlite3.connect(watched.home / device_status.NAME)
    finest = rows.execute("select min(at), count(*) from readings where step = 30").fetchone()
    rows.close()
    assert finest[0] >= watched.now - 7200 - CLEANUP_INTERVAL_S
    assert finest[1] <= 240 + CLEANUP_INTERVAL_S / 30


def test_a_coarser_reading_is_made_of_all_finer_ones_of_its_time(tmp_path):
    with TelemetryStore(tmp_path, writes=True) as store:
        store.write_telemetry([DeviceStatus("a")], [])
        for tenth in range(5 * 3600 // 30):
            i = tenth % 10
            store.write_telemetry(
                [],
                [
                    (
                        "a",
                        TelemetrySample(
                            30 * tenth, float(i), 1.0 + i, float(i), 100 - i, i, i / 10, i, i / 10, (i + 1) / 10
                        ),
                    )
                ],
            )
            if tenth % 7 == 0:
                store.downsample_readings(30.0 * tenth)
        coarse = store.load_readings("a", 0, 86400)
        assert [each.at for each in coarse] == list(range(0, 5 * 3600 - 300, 300))
        assert {msgspec.structs.astuple(each)[1:] for each in coarse} == {(4.5, 10.0, 9.0, 91, 9, 0.45, 9, 0.9, 0.1)}
        hours = store.load_readings("a", 0, 20 * 86400)
        assert [each.at for each in hours] == [0, 3600, 7200, 10800]
        assert {(each.power_w, each.power_most_w, each.available_bytes) for each in hours} == {(4.5, 10.0, 91)}


def test_what_is_forgotten_of_a_board_is_nobody_elses(tmp_path):
    with TelemetryStore(tmp_path, writes=True) as store:
        store.write_telemetry(
            [DeviceStatus("a"), DeviceStatus("b")], [("a", TelemetrySample(30, 1.0)), ("b", TelemetrySample(30, 2.0))]
        )
        store.delete_devices({"b"})
        store.write_telemetry([DeviceStatus("c")], [])
        assert store.load_readings("c", 0, 60) == []
        assert store.load_readings("a", 0, 60) == [TelemetrySample(30, 1.0)]


def test_boards_that_have_long_been_away_are_forgotten(watched):
    watched.say("a", wire.Presence(online=True, boot="1"), Telemetry(power_w=1.0))
    watched.say("b", wire.Presence(online=True, boot="1"))
    watched.wait(TELEMETRY_DELAY_S)
    watched.say("a", wire.Presence(online=False, boot="1"))
    watched.wait(STATUS_DELAY_S)
    watched.now += device_status.FORGOTTEN_S + 1
    watched.wait(CLEANUP_INTERVAL_S)
    with TelemetryStore(watched.home) as store:
        assert [each.device for each in store.load_statuses()] == ["b"]
        assert store.load_readings("a", 0, 1) == []


def test_an_old_home_has_no_boards_and_is_not_changed_by_looking(tmp_path):
    with TelemetryStore(tmp_path) as store:
        assert (store.load_statuses(), store.latest_readings(0.0), store.load_readings("a", 0, 100)) == ([], {}, [])
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_another_version_is_refused_and_one_that_is_damaged_put_aside(tmp_path, caplog):
    (tmp_path / device_status.NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="only contains monitoring data"):
        TelemetryStore(tmp_path)
    watched = Watched(tmp_path)
    watched.say("a", PROFILE)
    watched.wait(STATUS_DELAY_S)
    assert watched.stored().board == "Orin"
    assert (tmp_path / "boards.db.damaged").exists()
    watched.noted.close()
    db = sqlite3.connect(tmp_path / device_status.NAME)
    db.execute(f"pragma user_version = {device_status.VERSION - 1}")
    db.close()
    later = Watched(tmp_path)
    later.say("a", Telemetry())
    later.wait(60.0)
    assert "use the fedquilt version that wrote the file, or remove" in caplog.text


def test_a_full_disk_is_said_once_and_noting_goes_on_afterwards(watched, monkeypatch, caplog):
    def full(*given):
        raise StoreError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(TelemetryStore, "write_telemetry", full)
        for minute in range(10):
            watched.say("a", Telemetry(power_w=float(minute)), wire.Presence(online=minute % 2 == 0, boot="1"))
            watched.wait(60.0)
    assert caplog.text.count("no space left") == 1
    watched.say("a", PROFILE)
    watched.wait(120.0)
    assert watched.stored().board == "Orin"


def test_a_row_that_cannot_be_read_hides_no_other(watched):
    watched.say("a", PROFILE)
    watched.say("b", msgspec.structs.replace(PROFILE, device="b"))
    watched.wait(STATUS_DELAY_S)
    db = sqlite3.connect(watched.home / device_status.NAME)
    db.execute("update boards set body = '{\"device\": 3}' where device = 'a'")
    db.commit()
    db.close()
    with TelemetryStore(watched.home) as store:
        assert [each.device for each in store.load_statuses()] == ["b"]


def test_a_reading_of_one_message_is_that_message():
    assert device_status.add_sample(None, 1, Telemetry(power_w=3.0), 30) == TelemetrySample(30, 3.0, 3.0)


def test_a_fleet_that_is_looked_at_while_its_tables_are_made_is_empty(tmp_path):
    for words in ((), ("create table boards (id integer primary key, device text unique not null, body blob)",)):
        with contextlib.closing(sqlite3.connect(tmp_path / "boards.db")) as db:
            for word in words:
                db.execute(word)
            db.commit()
        (tmp_path / "boards.db").touch()
        with TelemetryStore(tmp_path) as store:
            assert store.load_statuses() == []
            assert store.latest_readings(0.0) == {}


class Home(MonitoredStage):
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
    a, b = stage.connect("ab")
    return stage, a, b


def test_a_removed_device_leaves_nothing_at_the_broker_and_in_the_home(fleet, capsys):
    stage, a, b = fleet
    b.say("presence", wire.Presence(online=False, boot="1"), retain=True)
    a.answer(constant_model())
    stage.play(10.0)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    told = stage.said(capsys, "b", "--remove")
    assert told.startswith("b: removed within about a second")
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
    assert f"b is working on {stage.job}, round 1" in stage.said(capsys, "b", "--remove", code=2)
    stage.play()
    assert stage.known() == ["a", "b"]
    stage.said(capsys, "b", "--remove", "--force")
    stage.play()
    assert [(fact.device, fact.reason) for fact in stage.told(UpdateRejected)] == [("b", responses.REMOVED)]
    assert b.tasks[-1] is None
    assert stage.retained("b") == []
    stage.submit(a)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a"]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--remove"], "--remove requires NAMEs of devices"),
        (["a", "--remove", "--watch"], "--remove requires NAMEs of devices"),
        (["z", "--remove"], "device 'z' is unknown"),
        (["a", "--force"], "--force requires --remove"),
    ],
)
def test_a_removal_of_nobody_is_refused(fleet, capsys, words, told):
    stage, _, _ = fleet
    assert told in stage.said(capsys, *words, code=2)
    stage.play()
    assert stage.known() == ["a", "b"]
