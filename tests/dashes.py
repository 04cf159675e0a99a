"""Homes to watch, and dashboards as processes of their own."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evaluations import of_classes, total
from job_facts import BLOB
from waiting import LIMIT_S, wait_until

from fedquilt import wire
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.device_status import (
    CurrentTask,
    DeviceStatus,
    LatestDecline,
    TelemetrySample,
    TelemetryStore,
)
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
)
from fedquilt.coordinator.rounds.rollout import (
    PhasePassed,
    ReleaseOffered,
    RolloutPlan,
    RolloutReverted,
    RolloutStarted,
    StatusReported,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import Update, Usage


def names(count: int) -> list[str]:
    return [f"board-{number:05d}" for number in range(count)]


def answer(device: str, round: int, accuracy: float = 0.5) -> UpdateAccepted:
    usage = Usage(wall_s=4.0, energy_j=6.0, energy_source="INA3221", down_bytes=3_000_000, up_bytes=1_000_000)
    update = Update(
        job="j",
        round=round,
        attempt=0,
        device=device,
        weight=1.0,
        bundles={},
        metrics={},
        usage=usage,
        evaluation=of_classes(accuracy),
    )
    return UpdateAccepted(round, update, 10.0)


def facts(devices: list[str], rounds: int = 3, *, ended: bool = False) -> list[AnyEvent]:
    offline = tuple(devices[::5])
    able = [device for device in devices if device not in offline]
    cohort = able[: max(2, len(able) // 2)]
    found: list[AnyEvent] = [JobStarted(BLOB), EligibilityRecorded(0, tuple(able), {"offline": offline})]
    for number in range(rounds):
        found.append(CohortSelected(number, 0, tuple(cohort)))
        if number == rounds - 1 and not ended:
            return [*found, answer(cohort[0], number)]
        found += [answer(device, number, 0.2 + 0.1 * number) for device in cohort[:-1]]
        told = total(*(of_classes(0.2 + 0.1 * number) for _ in cohort[:-1]))
        found += [
            TaskDeclined(number, cohort[-1], "memory", "the task needs 12 MB more than its budget"),
            RoundClosed(number),
        ]
        found.append(RoundCommitted(number, BLOB, False, {"loss": 1.0}, (), 16.0, evaluation=told))
    return [*found, JobEnded("stopped", "by request")]


def add_run(home: Path, found: list[AnyEvent], name: str = "digits", status: str = "running") -> str:
    with Store(home, durable=False) as store:
        run = store.add_job(settings.parse_job({"name": name, "method": "fedavg", "rounds": 9}), home)
        if status == "running":
            store.mark_running(run)
        else:
            store.set_status(run, status)
        with store.batch_events():
            for event in found:
                store.append_event(run, event)
    return run


def add_boards(home: Path, devices: list[str], run: str = "", **changes: dict[str, Any]) -> None:
    now = time.time()
    found = []
    for number, device in enumerate(devices):
        table: dict[str, Any] = {
            "online": number % 5 != 0,
            "since": now - 3600,
            "seen": now - 1,
            "board": "Raspberry Pi 5",
            "version": "0.1.0",
            "budget_bytes": 2_000_000_000,
            "labels": (f"site={'lab' if number % 2 else 'hall'}",),
            "mode": "25W",
            "doing": CurrentTask(run, 2, "working", now - 60, 0.45) if number % 7 == 1 and number % 5 else None,
            "refusal": LatestDecline(now - 90, "memory", "the task needs 12 MB more", run, 1)
            if number % 11 == 0
            else None,
        }
        found.append(DeviceStatus(device, **{**table, **changes.get(device, {})}))
    at = int(now) // 30 * 30
    readings = [
        (device, TelemetrySample(at + ahead, 5.0 + number % 7, 9.0, 55.0, 10**9, 3 * 10**8))
        for number, device in enumerate(devices)
        for ahead in (-30, 0, 3600)  # the last one stays recent, however long a test takes
        if number % 5
    ]
    with TelemetryStore(home, writes=True) as store:
        store.write_telemetry(found, readings)


class Dashboard:
    """`fedquilt dash` as a process.

    Args:
        home: to watch.
        words: more of the command line.
    """

    def __init__(self, home: Path, *words: str) -> None:
        self.home, self._log = home, home.with_name(f"{home.name}-dash.log")
        command = [sys.executable, "-m", "fedquilt.cli", "dash", "--home", str(home), "--listen", "127.0.0.1:0", *words]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        last = r"http://127\.0\.0\.1:(\d+)/" + (r"#token=\S+\n" if "--actions" in words else r"\n")

        def address() -> Any:
            ended = self.process.poll() is not None  # asked before the log is read, which is then complete
            found = re.search(last, self.said)
            assert found or not ended, self.said
            return found

        self.port = int(wait_until(address, "its address", LIMIT_S, diagnostics=lambda: self.said)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def token(self) -> str:
        (found,) = re.findall(r"#token=(\S+)", self.said)
        return str(found)

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            link.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            told = link.getresponse()
            return told.status, told.headers, told.read()
        finally:
            link.close()

    def values(self, path: str) -> dict[str, Any]:
        status, _, body = self.ask(path)
        assert status == 200, body
        return dict(json.loads(body))

    def problem(self, path: str, **headers: str) -> tuple[int, str]:
        status, _, body = self.ask(path, **headers)
        return status, str(json.loads(body)["problem"])

    def until(self, path: str, condition: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def fulfilled() -> Any:
            nonlocal found
            found = self.values(path)
            return condition(found)

        wait_until(fulfilled, path, LIMIT_S, diagnostics=lambda: str(found))
        return found

    def until_status(self, path: str, status: int) -> None:
        found: Any = None

        def has_it() -> bool:
            nonlocal found
            found = self.ask(path)
            return bool(found[0] == status)

        wait_until(has_it, f"{path} answers {status}", LIMIT_S, diagnostics=lambda: str(found))

    def cookie(self, token: str) -> str:
        body = json.dumps({"token": token})
        status, headers, told = self.ask("/api/session", "POST", body, Origin=self.url)
        assert status == 200, told
        return headers["set-cookie"]

    def act(self, run: str, what: str, **headers: str) -> tuple[int, dict[str, Any]]:
        status, _, body = self.ask(f"/api/runs/{run}/{what}", "POST", **headers)
        return status, dict(json.loads(body))


def add_rollout(home: Path, devices: list[str], name: str = "digits-20261123-041500-1a2b3c", bad: bool = False) -> str:
    canary, rest = devices[:2], devices[2:6]
    phase = "refused" if bad else "committed"
    why = "its accuracy is 3 points less than that of what runs now" if bad else ""
    measured = {"accuracy": 0.91, "accuracy_before": 0.94, "latency_s": 0.0123}
    with Store(home, durable=False) as store:
        id = store.rollouts.add_rollout(RolloutPlan("model", name, limits=wire.ReleaseLimits(max_latency_s=0.04)))
        found: list[Any] = [RolloutStarted(7), ReleaseOffered(0, tuple(canary))]
        found += [StatusReported(device, 7, phase, why, measured) for device in canary]  # type: ignore[arg-type]
        found += (
            [RolloutReverted(8, "2 of 2 boards failed")] if bad else [PhasePassed(0), ReleaseOffered(1, tuple(rest))]
        )
        store.rollouts.append_events([(id, event) for event in found])
    return id
