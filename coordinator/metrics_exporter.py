"""Metrics of a coordinator and its fleet, for Prometheus.

The number of labels is bounded: jobs beyond the first MAX_JOBS are counted together, and devices beyond MAX_DEVICES
have no samples. Counters start at 0 with each start of the coordinator.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fedquilt import __version__
from fedquilt.coordinator.fleet.device_status import FRESH_S, DeviceStatus, TelemetrySample
from fedquilt.coordinator.rounds import events
from fedquilt.coordinator.rounds.job_state import JobView
from fedquilt.metrics_endpoint import MetricFamily

MAX_DEVICES: Final = 2_000
MAX_JOBS: Final = 50
OTHER_JOBS: Final = "others"  # label of jobs beyond MAX_JOBS

DeviceReading = tuple[DeviceStatus, TelemetrySample | None]

_COUNTERS: Final = {
    "rounds": "Rounds that were committed.",
    "updates": "Updates of devices that were accepted.",
    "attempts": "Repeated attempts at rounds without a quorum.",
    "rejected": "Updates of devices that were rejected.",
    "down_bytes": "Bytes of blobs that devices fetched for tasks with accepted updates.",
    "up_bytes": "Bytes of blobs that devices sent with accepted updates.",
    "joules": "Gross joules of metered tasks with accepted updates.",
}
_GAUGES: Final[dict[str, tuple[str, Callable[[DeviceStatus, TelemetrySample], float | None]]]] = {
    "online": ("Whether the board is online.", lambda b, r: float(b.online)),
    "silent": (
        "Whether the board does not answer although the broker reports it online.",
        lambda b, r: float(b.silent),
    ),
    "heard_timestamp_seconds": ("Time of its last message.", lambda b, r: b.seen),
    "working": ("Whether the board has a task.", lambda b, r: float(b.online and b.doing is not None)),
    "progress_ratio": ("Progress of its task.", lambda b, r: b.doing.fraction if b.doing else None),
    "power_watts": ("Power of the meter that covers most, mean of 30 s.", lambda b, r: r.power_w),
    "temperature_celsius": ("Temperature of the hottest zone.", lambda b, r: r.temperature_c),
    "available_bytes": ("Available memory.", lambda b, r: r.available_bytes),
    "task_bytes": ("Resident memory of the task's process.", lambda b, r: r.task_bytes),
    "budget_bytes": ("Memory budget of a task.", lambda b, r: b.budget_bytes or None),
    "battery_ratio": ("Charge of the battery.", lambda b, r: r.battery),
    "drift_ratio": ("Drift of its model runner's inputs, from 0 (none) to 1.", lambda b, r: r.drift),
    "accuracy_ratio": ("Accuracy of its model runner on labelled inputs.", lambda b, r: r.accuracy),
    "served": ("Answers of its model runner since its start.", lambda b, r: r.served),
    "clock_skew_seconds": ("The board's clock minus the coordinator's clock.", lambda b, r: b.skew_s),
    "refused_timestamp_seconds": ("Time of its last declined task.", lambda b, r: b.refusal.at if b.refusal else None),
}


class CoordinatorMetrics:
    """Metrics of one coordinator. Events are recorded in its thread, but any thread may read metrics."""

    def __init__(self, boards: Callable[[], Sequence[DeviceReading]], clock: Callable[[], float] = time.time) -> None:
        self._boards, self._clock = boards, clock
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTERS}  # by job
        self._declined: Counter[tuple[str, str]] = Counter()  # by job and code
        self._ended_jobs: Counter[str] = Counter()  # by status
        # id of an active run -> label, round, number of rounds, time of the latest selection
        self._running_rounds: dict[str, tuple[str, int, int, float]] = {}
        self._job_labels: set[str] = set()

    def record_event(self, job: JobView, event: events.AnyEvent) -> None:
        name = self._job_label(job.job.name)
        count = self._counts
        match event:
            case events.CohortSelected():
                running_round = name, event.round, job.job.rounds, self._clock()
                self._running_rounds = {**self._running_rounds, job.id: running_round}
            case events.UpdateAccepted():
                usage = event.update.usage
                count["updates"][name] += 1
                count["down_bytes"][name] += event.update.down_bytes
                count["up_bytes"][name] += event.update.up_bytes
                count["joules"][name] += usage.energy_j or 0.0  # type: ignore[assignment]
            case events.TaskDeclined():
                self._declined[name, event.code] += 1
            case events.UpdateRejected():
                count["rejected"][name] += 1
            case events.RoundRetried():
                count["attempts"][name] += 1
            case events.RoundCommitted():
                count["rounds"][name] += 1
            case events.JobEnded():
                self._ended_jobs[event.status] += 1
                self._running_rounds = {run: values for run, values in self._running_rounds.items() if run != job.id}

    def metric_families(self) -> Iterator[MetricFamily]:
        """Yield the families of the coordinator, then of its devices. Unknown values have no sample."""
        now = self._clock()
        yield MetricFamily(
            "fedquilt_build", "gauge", "Version of the coordinator.", ("version",), [((__version__,), 1.0)]
        )
        for name, description in _COUNTERS.items():
            samples = [((job,), float(value)) for job, value in self._counts[name].copy().items()]
            yield MetricFamily(f"fedquilt_{name}", "counter", description, ("job",), samples)
        declined = [(key, float(value)) for key, value in self._declined.copy().items()]
        description = "Declined tasks, by the code of the reason."
        yield MetricFamily("fedquilt_declined", "counter", description, ("job", "code"), declined)
        ended = [((status,), float(self._ended_jobs[status])) for status in events.ENDED_PHASES]
        yield MetricFamily("fedquilt_jobs_ended", "counter", "Ended jobs, by status.", ("status",), ended)
        # one sample for each label, of the run with the latest selection
        by_time = sorted(self._running_rounds.values(), key=lambda values: values[3])
        running = {label: values for label, *values in by_time}
        for name, description, index in (
            ("round", "Number of the running round, from 0.", 0),
            ("round_most", "Largest number of rounds of the job.", 1),
            ("round_asked_timestamp_seconds", "Time of the latest selection in the running round.", 2),
        ):
            samples = [((job,), float(values[index])) for job, values in running.items()]
            yield MetricFamily(f"fedquilt_{name}", "gauge", description, ("job",), samples)
        yield from _device_families(self._boards(), now)

    def _job_label(self, job: str) -> str:
        if job not in self._job_labels:
            if len(self._job_labels) >= MAX_JOBS:
                return OTHER_JOBS
            self._job_labels.add(job)
        return job


def _device_families(devices: Sequence[DeviceReading], now: float) -> Iterator[MetricFamily]:
    online = sum(board.online for board, _ in devices)
    working = sum(board.online and board.doing is not None for board, _ in devices)
    waiting = sum(board.online and board.doing is not None and board.doing.step == "waiting" for board, _ in devices)
    silent = sum(board.silent for board, _ in devices)
    offline = len(devices) - online - silent
    counts = {"online": online, "working": working, "waiting": waiting, "offline": offline, "silent": silent}
    about = "Boards by state. Working boards are also online, and waiting ones (for their transfer) also working."
    yield MetricFamily("fedquilt_boards", "gauge", about, ("state",), [((key,), float(n)) for key, n in counts.items()])
    exported_devices = sorted(devices, key=lambda entry: entry[0].device)[:MAX_DEVICES]
    about = "Boards beyond the limit, without samples of their own."
    left_out = float(len(devices) - len(exported_devices))
    yield MetricFamily("fedquilt_boards_left_out", "gauge", about, (), [((), left_out)])
    about = "Hardware, agent version and power mode of a board."
    labels = [((b.device, b.board[:100], b.version[:100], (b.mode or "")[:100]), 1.0) for b, _ in exported_devices]
    yield MetricFamily("fedquilt_board_info", "gauge", about, ("device", "board", "version", "mode"), labels)
    for name, (about, read_value) in _GAUGES.items():
        samples = []
        for board, reading in exported_devices:
            fresh = reading if reading is not None and reading.at > now - FRESH_S else TelemetrySample(0)
            if (value := read_value(board, fresh)) is not None:
                samples.append(((board.device,), float(value)))
        yield MetricFamily(f"fedquilt_board_{name}", "gauge", about, ("device",), samples)
