"""What runs wait for."""

import errno
import io
import os
import re
import time
from pathlib import Path

import pytest
from by_hand import MonitoredStage, Stage, constant_model
from stored_job import JOB

from fedquilt import cli, wire
from fedquilt.blobs.store import BlobStore
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker, MonitoringExecutor
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobStarted,
    RoundCommitted,
    TaskDeclined,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.storage import suspended_jobs
from fedquilt.coordinator.storage.store import Store, StoreReader
from fedquilt.coordinator.views import event_messages, terminal, wait_reasons
from fedquilt.core import BlobRef, StoreError
from fedquilt.formats import job_bundle
from fedquilt.host.disk import PrivateDisk, StrPath
from fedquilt.tools.operations.dash.run_follower import RunFollower
from fedquilt.transport.memory_link import MemoryBroker


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run that a coordinator has taken up."""
    with Store(tmp_path) as store:
        id = store.add_job(settings.parse_job({"name": "j", "method": "fedavg", "engine": "numpy"}), tmp_path)
        store.begin_epoch()
        store.mark_running(id)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main([*words]) == 0
    return capsys.readouterr().out


def test_a_coordinator_without_its_broker_is_what_runs_wait_for(home, capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    link = MemoryBroker().connect()
    link.connected = False
    noted = DeviceStatusTracker(home, clock=lambda: now[0])
    with Store(home) as store:
        assert store.acquire_lock()
        executor = MonitoringExecutor(link, "f", BlobStore(home / "blobs"), 1, noted)
        for connected in (False, True, False):
            link.connected = connected
            executor.send_pending(now[0])
            now[0] += 720.0
            told = [said(capsys, *words, "--home", str(home)) for words in (["ls"], ["why", "j"], ["devices"])]
            assert [("its broker, unreachable for 12 min" in " ".join(each.split())) for each in told] == [
                not connected
            ] * 3
    noted.close()


def test_nobody_is_said_to_wait_for_a_broker_where_no_coordinator_runs(home, capsys):
    noted = DeviceStatusTracker(home)
    noted.step(0.0)
    noted.close()
    for words in (["ls"], ["why", "j"], ["devices"]):
        assert "broker, which" not in said(capsys, *words, "--home", str(home))


REF = BlobRef(sha256="0" * 64, size=1)


class Fails(PrivateDisk):
    """A disk that does not give back files of one name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hash_file(self, path: StrPath) -> str:
        if Path(os.fspath(path)).name == self.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().hash_file(path)


@pytest.fixture
def held(tmp_path: Path) -> Stage:
    """A served job whose bundle the disk has not given back."""
    stage = Stage(tmp_path)
    stage.disk = Fails(job_bundle.load_bundle(tmp_path / "bundle").files["model"].sha256)
    stage.restart()
    assert stage.store.acquire_lock()
    stage.hand("a")
    stage.play()
    return stage


def test_a_job_that_is_held_for_the_disk_says_so_since_when_and_when_it_is_tried_again(held, capsys):
    home = str(held.store.home)
    for words in (["ls"], ["why", held.job]):
        assert main([*words, "--home", home]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert f"{held.job} waits for the disk since {time.strftime('%Y-%m-%d')}" in told
        assert "with the next try at" in told
        assert f"the bundle of {held.job} cannot be read" in told
        assert ("held 0/" in told) == (words == ["ls"])
    hold = held.store.suspensions.current_suspension(held.job)
    assert 0 < hold.retry_time - hold.start_time <= suspended_jobs.RETRY_S
    assert hold.start_time - 10 < time.time() < hold.retry_time + 10
    with StoreReader(held.store.home) as reader:
        row = reader.find_job(held.job)
        assert reader.current_status(row) == "held"
        assert RunFollower(row).describe_current_round(str(reader.suspensions.current_suspension(row.id)))[
            "waits"
        ] == str(hold)
    held.store.blob_store.disk.name = ""
    held.play(suspended_jobs.RETRY_S + 1.0)
    assert event_messages.summarise_run(held.store.find_job(held.job), held.store)["status"] == "running"
    assert wait_reasons.describe_wait(held.store.find_job(held.job), held.store) is None
    held.hands[0].answer(constant_model())
    held.play()
    assert held.store.stored_status(held.job) == "done"


def test_a_second_try_does_not_change_since_when_a_job_is_held(held):
    first = held.store.suspensions.current_suspension(held.job)
    held.play(suspended_jobs.RETRY_S + 1.0)
    second = held.store.suspensions.current_suspension(held.job)
    assert first is not None
    assert second is not None
    waits_s = [each.retry_time - each.start_time for each in (first, second)]
    assert waits_s == pytest.approx([suspended_jobs.RETRY_S, 2 * suspended_jobs.RETRY_S], abs=2)
    held.play(suspended_jobs.RETRY_S + 1.0)
    assert [fact.status for fact in held.told(JobEnded)] == ["failed"]
    assert event_messages.summarise_run(held.store.find_job(held.job), held.store)["status"] == "failed"


def test_why_tells_of_a_run_that_could_not_be_taken_up(held, capsys):
    held.play(suspended_jobs.TRIES * (suspended_jobs.RETRY_S + 1.0))
    assert main(["why", held.job, "--home", str(held.store.home)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"job failed: the bundle of {held.job} cannot be read" in told


def test_what_a_coordinator_held_is_not_held_by_the_next_one_before_it_has_tried(held):
    held.restart()
    assert held.store.suspensions.current_suspension(held.job) is None
    assert held.store.acquire_lock()
    held.play()
    assert held.store.current_status(held.store.find_job(held.job)) == "held"
    held.store.delete_runs([held.job])
    assert held.store.suspensions.current_suspension(held.job) is None


# -- boards that other runs have ----------------------------------------------------------------------------------


def begun(cohort: CohortSettings) -> JobState:
    return apply_event(JobState(JobConstants(0, 2, cohort, 0)), JobStarted(REF), 0.0)


def test_a_round_that_could_begin_without_other_runs_says_what_its_boards_are_busy_with():
    state, busy = begun(CohortSettings(min_devices=2)), {"a": "digits-2", "b": "digits-3", "c": "digits-2"}
    told = "continues when they are free: a, c working for digits-2; b working for digits-3"
    assert wait_reasons.describe_busy_devices(state, "abc", busy) == told
    assert wait_reasons.describe_busy_devices(state, "abcd", busy) == told
    assert wait_reasons.describe_busy_devices(state, "a", busy) is None
    assert wait_reasons.describe_busy_devices(state, "ab", {}) is None
    hot = apply_event(state, EligibilityRecorded(0, ("a",), {"hot": ("b", "c")}), 0.0)
    assert wait_reasons.describe_busy_devices(hot, "abc", busy) is None


def test_a_round_whose_boards_have_all_gone_to_other_runs_says_to_which():
    state = apply_event(begun(CohortSettings()), CohortSelected(0, 0, ("a", "b")), 1.0)
    assert (
        wait_reasons.describe_busy_devices(state, "ab", dict.fromkeys("ab", "k-1"))
        == "continues when they are free: a, b working for k-1"
    )
    assert wait_reasons.describe_busy_devices(state, "b", {"b": "k-1"}) is None
    for device in "ab":
        state = apply_event(state, TaskDeclined(0, device, "battery", "low"), 2.0)
    assert wait_reasons.describe_busy_devices(state, "ab", dict.fromkeys("ab", "k-1")) is None


def test_a_round_whose_devices_have_all_declined_waits_for_others_for_seconds(tmp_path, capsys):
    stage = MonitoredStage(tmp_path, cohort={"deadline_s": 600.0})
    hands = [stage.hand(name) for name in "abc"]
    console = terminal.Console(clock=lambda: stage.broker.now_s)
    stage.play()
    refused = {"accepted": False, "code": "diverged", "reason": "the loss became NaN"}
    for hand in hands:
        hand.say("claim", wire.Claim(job=stage.job, round=0, attempt=0, **refused))
    stage.play(1.0)
    told = ""
    for _ in range(8):
        console.report_waits(stage.server, stage.noted.find_status)
        told += " ".join(capsys.readouterr().out.split())
        stage.play(1.0)
    assert re.search(r"waiting for other devices: a, b, c declined, until .*\d\d:\d\d \([1-5] s\)$", told), told


def test_a_coordinator_whose_boards_are_all_busy_does_not_ask_for_more(two_jobs, capsys):
    stage, first, second, a, b = two_jobs
    stage.play()
    now_s = iter([0.0, *[stage.broker.now_s + after_s for after_s in (0.0, 6.0, 6.0)]])
    console = terminal.Console(run_names=True, clock=lambda: next(now_s))
    console.report_waits(stage.server)
    console.report_waits(stage.server)
    told = " ".join(capsys.readouterr().out.split())
    assert f"{second}: waiting for devices that run torch or numpy: 2 online, 2 of them working for other jobs" in told
    assert f"continues when they are free: {a.name}, {b.name} working for {first}" in told
    assert "start more" not in told


def test_a_followed_run_whose_devices_are_all_at_other_jobs_does_not_ask_for_more(opened, capsys, monkeypatch):
    store, clock_s = opened(), [0.0]
    assert store.acquire_lock()
    run = store.add_job(JOB, store.home)
    store.append_event(run, JobStarted(REF))
    store.append_event(run, EligibilityRecorded(0, (), {"busy": ("a", "b")}))
    store.set_status(run, "running")

    def wait(seconds: float) -> None:
        clock_s[0] += terminal.WAIT_REPORT_S
        if clock_s[0] > 2 * terminal.WAIT_REPORT_S:
            store.append_event(run, JobEnded("stopped"))
            store.set_status(run, "stopped")

    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock_s[0])
    monkeypatch.setattr(terminal.time, "sleep", wait)
    terminal.print_log(store, run, follow=True)
    told = " ".join(capsys.readouterr().out.split())
    assert "waiting for devices that run torch or numpy: 2 online, 2 of them working for other jobs" in told


def test_a_followed_run_ends_when_its_home_is_replaced(opened, monkeypatch):
    store = opened()
    assert store.acquire_lock()
    run = store.add_job(JOB, store.home)

    def replace_home(seconds: float) -> None:
        store.home.rename(store.home.with_name("away"))
        with Store(store.home):
            pass

    monkeypatch.setattr(terminal.time, "sleep", replace_home)
    with pytest.raises(StoreError, match=f"{store.home} was replaced"):
        terminal.print_log(store, run, follow=True)


def test_a_log_that_is_not_followed_has_no_live_block(opened, monkeypatch):
    store = opened()
    assert store.acquire_lock()
    run = store.add_job(JOB, store.home)
    store.append_event(run, JobStarted(REF))

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    terminal.print_log(store, run)
    assert shown.getvalue().endswith("started\n")
    assert "\x1b" not in shown.getvalue()


def test_a_device_that_goes_offline_is_named_within_10_s(tmp_path, capsys):
    stage = MonitoredStage(tmp_path, cohort={"deadline_s": 600.0, "min_devices": 3})
    hands = [stage.hand(name) for name in "abc"]
    console = terminal.Console(clock=lambda: stage.broker.now_s)
    stage.play(10.0)
    hands[2].say("presence", wire.Presence(online=False, boot="1"), retain=True)
    begin_s, told = stage.broker.now_s, ""
    while "waiting for" not in told:
        assert stage.broker.now_s < begin_s + 10.0
        stage.play(0.1)
        console.report_waits(stage.server, stage.noted.find_status)
        told += " ".join(capsys.readouterr().out.split())
    assert stage.broker.now_s - begin_s >= terminal.WAIT_REPORT_S
    assert re.search(r"waiting for c, offline since .*\d\d:\d\d, until .*\d\d:\d\d \(58\d s\)$", told), told


def test_a_round_that_goes_on_without_a_lost_device_does_not_say_that_it_waits_for_it(tmp_path, capsys):
    stage = MonitoredStage(tmp_path, cohort={"deadline_s": 600.0})
    hands = [stage.hand(name) for name in "abc"]
    console, told = terminal.Console(clock=lambda: stage.broker.now_s), ""
    stage.play(10.0)
    hands[2].say("presence", wire.Presence(online=False, boot="1"), retain=True)
    for _ in range(12):
        stage.play(1.0)
        console.report_waits(stage.server, stage.noted.find_status)
        told += " ".join(capsys.readouterr().out.split())
    assert re.search(r"waiting for a, b, at work for 1\d s, until \S.*\(58\d s\), not for c, offline since", told), told
    hands[0].answer(constant_model())
    hands[1].answer(constant_model())
    stage.play(3.0)
    assert stage.told(RoundCommitted)


def test_the_dashboard_names_the_device_that_a_round_waits_for(tmp_path):
    stage = MonitoredStage(tmp_path, cohort={"deadline_s": 600.0, "min_devices": 3})
    assert stage.store.acquire_lock()
    hands = [stage.hand(name) for name in "abc"]
    stage.play(10.0)
    hands[2].say("presence", wire.Presence(online=False, boot="1"), retain=True)
    stage.play()
    row = stage.store.find_job(stage.job)
    follower = RunFollower(row)
    for seq, at, fact in stage.store.read_events(row.id):
        follower.add_event(seq, at, fact)
    shown = follower.describe_current_round(None, wait_reasons.load_device_statuses(stage.store.home))["waits"]
    assert re.match(r"c, offline since .*\d\d:\d\d, until .*\d\d:\d\d \(\d+ s\)$", shown), shown
    found = wait_reasons.find_round_wait(row, follower.state, wait_reasons.load_device_statuses(stage.store.home))
    assert (found.kind, found.key) == ("lost", (("offline", "c"),))
    hands[2].say("presence", hands[2].presence, retain=True)
    stage.play()
    assert follower.describe_current_round(None, wait_reasons.load_device_statuses(stage.store.home))["waits"] is None
