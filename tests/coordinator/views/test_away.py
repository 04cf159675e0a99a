"""What onlookers are told while the coordinator does not reach its broker."""

from pathlib import Path

import pytest

from fedquilt import cli
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator import settings
from fedquilt.coordinator.delivery.monitoring_executor import DeviceStatusTracker, MonitoringExecutor
from fedquilt.coordinator.storage.store import Store
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
            assert [("its broker, which it has not reached for 12 min" in " ".join(each.split())) for each in told] == [
                not connected
            ] * 3
    noted.close()


def test_nobody_is_said_to_wait_for_a_broker_where_no_coordinator_runs(home, capsys):
    """The last one may have ended without it."""
    noted = DeviceStatusTracker(home)
    noted.step(0.0)
    noted.close()
    for words in (["ls"], ["why", "j"], ["devices"]):
        assert "broker, which" not in said(capsys, *words, "--home", str(home))
