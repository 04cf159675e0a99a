"""`fedquilt resume`, and so `run`, as a coordinator with places of blobs beside the broker."""

from pathlib import Path

import click
import pytest

from fedquilt.cli import jobs, main, options
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import MAX_COORDINATOR_GAP_S, InactiveRunError, Store
from fedquilt.coordinator.views import terminal


@pytest.fixture
def run(tmp_path: Path) -> str:
    with Store(tmp_path) as store:
        id = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        store.set_status(id, "stopped")
    return id


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--blobs-http", "0.0.0.0:8443"), "set --blobs-url"),
        (("--blobs-http", "nowhere"), "nowhere"),
        (("--blobs-backend", "s3=https://store.site/bucket"), "blob backend 's3' is unknown"),
    ],
)
def test_a_wrong_place_of_blobs_is_refused_by_name(tmp_path, run, capsys, given, said):
    assert main(["resume", run, "--home", str(tmp_path), *given]) == 2
    assert said in capsys.readouterr().err


def test_limits_of_the_home_hold_for_a_run_without_a_server_too(tmp_path, run, embedded_broker, monkeypatch):
    found = []

    def coordinate(store, link, *given, limits, **more):
        found.append(limits)
        link.close()

    monkeypatch.setattr(terminal, "run_coordinator", coordinate)
    words = ["resume", run, "--home", str(tmp_path), "--broker", embedded_broker.url]
    (tmp_path / "limits.toml").write_text("waiting_mb = 0\n")
    assert main(words) == 2
    with Store(tmp_path) as store:
        assert store.stored_status(run) == "stopped"
    (tmp_path / "limits.toml").write_text("waiting_mb = 7\n")
    main(words)
    assert found == [CoordinatorLimits(waiting_mb=7)]


def test_without_a_broker_nothing_is_submitted(tmp_path, run, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "CONNECT_S", 0.5)
    words = ["resume", run, "--home", str(tmp_path), "--broker", "mqtt://127.0.0.1:1"]
    assert main(words) == 5
    assert "refused the connection" in capsys.readouterr().err
    with Store(tmp_path) as store:
        assert store.stored_status(run) == "stopped"


def test_a_run_says_which_process_is_its_coordinator(tmp_path, run, embedded_broker, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "run_coordinator", lambda store, link, *given, **more: link.close())
    main(["resume", run, "--home", str(tmp_path), "--broker", embedded_broker.url])
    assert f"{run} runs in this process, its coordinator until it ends; from" in " ".join(
        capsys.readouterr().out.split()
    )


def test_places_given_beside_a_coordinator_are_said_to_have_no_effect(tmp_path, run, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "print_log", lambda *given, **more: None)
    with Store(tmp_path) as serving:
        assert serving.acquire_lock()
        main(["resume", run, "--home", str(tmp_path), "--blobs-http", "127.0.0.1:8443"])
        out = " ".join(capsys.readouterr().out.split())
        assert out.startswith(f"{run} runs in the coordinator that serves {tmp_path}; from elsewhere")
        assert f"--blobs-http has no effect: the coordinator that serves {tmp_path}" in out
        assert serving.stored_status(run) == "running"


def test_a_coordinator_that_ends_over_a_job_is_not_replaced_by_the_command_that_submitted_it(tmp_path):
    """The job would go to the default broker, which nobody named, and without certificates."""
    nowhere = options.BrokerOptions("mqtt://127.0.0.1:1", None, None, None, None, "fleet")
    with Store(tmp_path) as serving, Store(tmp_path) as store:
        assert serving.acquire_lock()

        def submit():
            id = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
            serving.close()
            return id

        command = click.Context(click.Command("run"), obj=0)
        with command, pytest.raises(InactiveRunError, match="no coordinator is running for"):
            jobs.run_to_end(tmp_path, nowhere, options.BlobOptions(None, None, None), store, submit)


def test_whoever_follows_a_run_outlives_a_coordinator_that_is_started_again(tmp_path, run, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    serving = [Store(tmp_path)]
    assert serving[0].acquire_lock()
    serving[0].set_status(run, "running")

    def turn(seconds):
        """Each look at the store takes 2 s; the coordinator is away from 4 to 10 s, and for good after 20 s."""
        clock[0] += 2.0
        up = clock[0] < 4 or 10 <= clock[0] < 20
        if serving[0] is not None and not up:
            serving[0].close()
            serving[0] = None
        elif serving[0] is None and up:
            serving[0] = Store(tmp_path)
            assert serving[0].acquire_lock()

    monkeypatch.setattr(terminal.time, "sleep", turn)
    with Store(tmp_path) as store, pytest.raises(InactiveRunError, match="no coordinator is running for"):
        terminal.print_log(store, run, follow=True)
    assert 18 + MAX_COORDINATOR_GAP_S <= clock[0] <= 20 + MAX_COORDINATOR_GAP_S
    assert capsys.readouterr().err.count("waiting 20 s for one") == 2
