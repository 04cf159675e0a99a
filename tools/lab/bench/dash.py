"""Benchmark of the dashboard: memory, page time and delay of a change.

A home with 1,000 boards, then one with 10,000, of which some thirty tell their sensors every second. A client watches
as a browser does: it is told of changes and asks for the page again. Drawing, which a browser adds, is not in it.
"""

from __future__ import annotations

import http.client
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from fedquilt.coordinator.fleet.device_status import DeviceStatus, LatestDecline, TelemetrySample
from fedquilt.coordinator.fleet.telemetry_store import TelemetryStore
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError
from fedquilt.tools.report.thresholds import compare_at_most, format_figures

FLEETS: Final = (1_000, 10_000)
TOLD: Final = 33  # boards that tell their sensors between two probes
PROBES: Final = 15
PROBE_S: Final = 1.0
START_S: Final = 60.0


def measure() -> dict[str, Any]:
    found = {count: _measure_fleet(count) for count in FLEETS}
    small, large = (found[count] for count in FLEETS)
    return {
        "bench": "dash",
        "fleets": {str(count): each for count, each in found.items()},
        "figures": {
            "resident_of_1000_boards": compare_at_most(small["resident_mb"], 80, "MB"),
            "page_of_1000_boards_median": compare_at_most(small["page_ms"], 300, "ms"),
            "page_of_10000_boards_median": compare_at_most(large["page_ms"], 300, "ms"),
            "change_of_1000_boards_latest": compare_at_most(small["change_most_ms"], 1000, "ms"),
            "change_of_10000_boards_latest": compare_at_most(large["change_most_ms"], 1000, "ms"),
        },
    }


def _measure_fleet(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "runs"
        Store(home).close()
        boards = [DeviceStatus(f"board-{number:05d}", online=True, since=time.time()) for number in range(count)]
        with TelemetryStore(home, writes=True) as store:
            store.write_telemetry(boards, [(each.device, _reading()) for each in boards])
            command = [sys.executable, "-m", "fedquilt.cli", "dash", "--home", str(home), "--listen", "127.0.0.1:0"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None
                told = re.search(r":(\d+)/$", process.stdout.readline().strip())
                if told is None:
                    raise JobError("the dashboard does not start: see above")
                return _measure_dashboard(int(told[1]), psutil.Process(process.pid), store, boards)
            finally:
                process.kill()
                process.communicate()


def _measure_dashboard(
    port: int, process: psutil.Process, store: TelemetryStore, boards: list[DeviceStatus]
) -> dict[str, Any]:
    pages_ms = [_measure_page_ms(port)]
    first_ms = pages_ms.pop()
    watcher = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    watcher.request("GET", "/api/events")
    events = watcher.getresponse()
    changes_ms, begun, used = [], time.perf_counter(), sum(process.cpu_times()[:2])
    for probe in range(PROBES):
        some = boards[1 + probe * TOLD : 1 + (probe + 1) * TOLD]
        code = f"probe-{probe}"
        at = time.perf_counter()
        refused = msgspec.structs.replace(boards[0], refusal=LatestDecline(time.time(), code, ""))
        store.write_telemetry([refused, *some], [(each.device, _reading()) for each in some])
        while code.encode() not in _fetch_page(port, "/api/fleet"):
            events.readline()
        changes_ms.append(1000 * (time.perf_counter() - at))
        pages_ms.append(_measure_page_ms(port))
        time.sleep(max(0.0, at + PROBE_S - time.perf_counter()))
    share = (sum(process.cpu_times()[:2]) - used) / (time.perf_counter() - begun)
    watcher.close()
    return {
        "resident_mb": round(process.memory_info().rss / 1e6, 1),
        "core_percent": round(100 * share, 1),
        "first_page_ms": round(first_ms, 1),
        "page_ms": round(statistics.median(pages_ms), 1),
        "page_most_ms": round(max(pages_ms), 1),
        "change_ms": round(statistics.median(changes_ms), 1),
        "change_most_ms": round(max(changes_ms), 1),
    }


def _measure_page_ms(port: int) -> float:
    begun = time.perf_counter()
    shell = _fetch_page(port, "/").decode()
    for path in re.findall(r'(?:href|src)="(/static/[^"]+)"', shell):
        _fetch_page(port, path)
    _fetch_page(port, "/api/fleet")
    return 1000 * (time.perf_counter() - begun)


def _fetch_page(port: int, path: str) -> bytes:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    try:
        link.request("GET", path)
        return link.getresponse().read()
    finally:
        link.close()


def _reading() -> TelemetrySample:
    return TelemetrySample(int(time.time()) // 30 * 30, 5.0, 9.0, 55.0, 10**9, 3 * 10**8)


def lines(result: dict[str, Any]) -> list[str]:
    told = [
        f"{int(count):,} boards: {each['resident_mb']} MB, {each['core_percent']} % of a core; "
        f"page {each['page_ms']} ms (first {each['first_page_ms']}, slowest {each['page_most_ms']}), "
        f"change {each['change_ms']} ms (latest {each['change_most_ms']})"
        for count, each in result["fleets"].items()
    ]
    return [*told, *format_figures(result)]
