"""Metrics of a coordinator and its fleet, served as OpenMetrics."""

import urllib.request
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import plain
import pytest

from fedquilt import metrics_endpoint
from fedquilt.coordinator import metrics_exporter
from fedquilt.coordinator.fleet.device_status import CurrentTask, DeviceStatus, TelemetrySample
from fedquilt.coordinator.metrics_exporter import CoordinatorMetrics
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundCommitted, TaskDeclined, UpdateAccepted
from fedquilt.core import BlobRef, JobError, Usage
from fedquilt.metrics_endpoint import MetricFamily

NOW = 1_800_000_000.0
OPEN = "application/openmetrics-text; version=1.0.0"


def values(found: Iterable[MetricFamily]) -> dict[tuple[str, ...], float]:
    """Every sample by the metric's name and its labels' values."""
    return {(each.name, *labels): value for each in found for labels, value in each.samples}


def job(name: str, run: str = "") -> Any:
    return SimpleNamespace(id=run or name, job=SimpleNamespace(name=name, rounds=10))


def play(counts: CoordinatorMetrics, name: str = "digits") -> None:
    """Half a round of a job."""
    usage = Usage(down_bytes=100, up_bytes=40, energy_j=2.5)
    ref = BlobRef(sha256="0" * 64, size=1)
    update = plain.update(round=3, bundles={"m": ref}, usage=usage)
    for fact in (
        CohortSelected(3, 0, ("a", "b")),
        UpdateAccepted(3, update),
        TaskDeclined(3, "b", "memory", "12 MB short"),
    ):
        counts.record_event(job(name), fact)


def test_rounds_are_counted_by_job_and_boards_as_they_are():
    known = [
        (
            DeviceStatus("a", online=True, budget_bytes=8, doing=CurrentTask("j", 3, "working", NOW, 0.5)),
            TelemetrySample(int(NOW), 7.5, served=9, drift=0.4),
        ),
        (DeviceStatus("b", skew_s=-3.0), TelemetrySample(int(NOW) - 3600, 9.0)),
        (DeviceStatus("c", online=True), None),
        (DeviceStatus("d", silent=True, since=NOW - 60.0, seen=NOW - 60.0), None),
    ]
    counts = CoordinatorMetrics(lambda: known, lambda: NOW)
    play(counts)
    found = values(counts.metric_families())
    wanted = {
        ("fedquilt_updates", "digits"): 1,
        ("fedquilt_joules", "digits"): 2.5,
        ("fedquilt_down_bytes", "digits"): 100,
        ("fedquilt_declined", "digits", "memory"): 1,
        ("fedquilt_round", "digits"): 3,
        ("fedquilt_round_most", "digits"): 10,
        ("fedquilt_boards", "online"): 2,
        ("fedquilt_boards", "offline"): 1,
        ("fedquilt_boards", "working"): 1,
        ("fedquilt_boards", "silent"): 1,
        ("fedquilt_board_online", "b"): 0,
        ("fedquilt_board_online", "d"): 0,
        ("fedquilt_board_silent", "a"): 0,
        ("fedquilt_board_silent", "d"): 1,
        ("fedquilt_board_heard_timestamp_seconds", "d"): NOW - 60.0,
        ("fedquilt_board_power_watts", "a"): 7.5,
        ("fedquilt_board_progress_ratio", "a"): 0.5,
        ("fedquilt_board_clock_skew_seconds", "b"): -3.0,
        ("fedquilt_board_drift_ratio", "a"): 0.4,
        ("fedquilt_board_served", "a"): 9,
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert ("fedquilt_board_power_watts", "b") not in found
    assert ("fedquilt_board_heard_timestamp_seconds", "b") not in found
    assert ("fedquilt_board_accuracy_ratio", "a") not in found
    counts.record_event(job("digits"), RoundCommitted(3, BlobRef(sha256="0" * 64, size=1), False, {}))
    counts.record_event(job("digits"), JobEnded("done", ""))
    found = values(counts.metric_families())
    assert (found["fedquilt_rounds", "digits"], found["fedquilt_jobs_ended", "done"]) == (1, 1)
    assert ("fedquilt_round", "digits") not in found


def test_the_end_of_a_run_leaves_the_gauges_of_another_run_of_its_job():
    counts = CoordinatorMetrics(list, iter(range(100)).__next__)
    for run, number in (("digits-1", 3), ("digits-2", 7)):
        counts.record_event(job("digits", run), CohortSelected(number, 0, ("a",)))
    assert values(counts.metric_families())["fedquilt_round", "digits"] == 7
    counts.record_event(job("digits", "digits-2"), JobEnded("done", ""))
    assert values(counts.metric_families())["fedquilt_round", "digits"] == 3
    counts.record_event(job("digits", "digits-1"), JobEnded("stopped", ""))
    assert ("fedquilt_round", "digits") not in values(counts.metric_families())


def test_labels_are_bounded():
    known = [(DeviceStatus(f"{index:05d}", online=True), None) for index in range(metrics_exporter.MAX_DEVICES + 7)]
    counts = CoordinatorMetrics(lambda: known, lambda: NOW)
    for index in range(metrics_exporter.MAX_JOBS + 20):
        play(counts, f"job-{index}")
    found = values(counts.metric_families())
    assert sum(key[0] == "fedquilt_board_online" for key in found) == metrics_exporter.MAX_DEVICES
    assert (found["fedquilt_boards", "online"], found[("fedquilt_boards_left_out",)]) == (
        metrics_exporter.MAX_DEVICES + 7,
        7,
    )
    assert sum(key[0] == "fedquilt_updates" for key in found) == metrics_exporter.MAX_JOBS + 1
    assert found["fedquilt_updates", metrics_exporter.OTHER_JOBS] == 20


def read(place: str) -> str:
    asked = urllib.request.Request(place, headers={"Accept": OPEN})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return str(answer.read().decode())


def test_they_are_served_as_open_metrics_and_every_name_is_one():
    pytest.importorskip("prometheus_client", reason="metrics are an extra")
    from prometheus_client.openmetrics import parser

    counts = CoordinatorMetrics(lambda: [(DeviceStatus('a"b\nc', online=True, board="x" * 300), None)], lambda: NOW)
    play(counts)
    with metrics_endpoint.serve_metrics("127.0.0.1:0", counts.metric_families) as place:
        found = {family.name: family for family in parser.text_string_to_metric_families(read(place))}
    assert found["fedquilt_updates"].samples[0].value == 1
    assert found["fedquilt_board_online"].samples[0].labels == {"device": 'a"b\nc'}
    assert found["process_resident_memory_bytes"].samples[0].value > 1e6


def test_an_error_of_metrics_is_theirs_alone(caplog):
    pytest.importorskip("prometheus_client", reason="metrics are an extra")
    broken = [True]

    def collect():
        if broken.pop():
            raise ZeroDivisionError
        return []

    broken.insert(0, False)
    with metrics_endpoint.serve_metrics("127.0.0.1:0", collect) as place:
        with pytest.raises(OSError):
            read(place)
        assert "process_cpu_seconds" in read(place)
    assert "collecting the metrics failed" in caplog.text


@pytest.mark.parametrize("listen", ["9464", ":9464", "localhost:", "localhost:http", "localhost:70000", ""])
def test_what_is_no_place_to_serve_at_is_refused(listen):
    with (
        pytest.raises(JobError, match=r"write HOST:PORT, such as 127\.0\.0\.1:9464"),
        metrics_endpoint.serve_metrics(listen, list),
    ):
        pass


def test_a_place_that_is_taken_is_named():
    pytest.importorskip("prometheus_client", reason="metrics are an extra")
    with metrics_endpoint.serve_metrics("127.0.0.1:0", list) as place:
        taken = place.removeprefix("http://").removesuffix("/metrics")
        with (
            pytest.raises(JobError, match=f"cannot listen at {taken} .address already in use.: choose"),
            metrics_endpoint.serve_metrics(taken, list),
        ):
            pass
