"""Benchmark of a round of large updates: memory, disk and pauses of a coordinator.

A real Mosquitto and a `fedquilt serve` run with light devices (`protocol_devices`), whose updates have the size of a
ResNet-50. A device outside of the round sends requests continuously, from before the job is submitted. The time to the
response is the length of a pause of the coordinator, including the broker's part. The baseline is a loop in the same
run that hashes, decodes and folds the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from fedquilt import methods, wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.background_worker import STORED_AT
from fedquilt.coordinator.limits import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import DeviceUpdate, JobError, LinkError
from fedquilt.formats import job_bundle
from fedquilt.formats.tensor_register import Kind, register_of_kinds
from fedquilt.tools.lab.bench import coordinator as processes
from fedquilt.tools.lab.bench.protocol_devices import CHUNK, FLEET, ShiftedModel, update_weight
from fedquilt.tools.report.thresholds import compare_at_most, format_figures
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

METHODS: Final = ("fedavg", "scaffold")
UPDATES: Final = 5
CLASSES: Final = 200
BLOCKS: Final = ((64, 3), (128, 4), (256, 6), (512, 3))  # of a ResNet-50: width, and how many
BARE: Final = 3  # updates of the bare fold
ASKS_S: Final = 0.05  # between two questions of the board that takes no part
ASKERS: Final = 20  # names that it asks under, as nobody may ask for more than a few messages a second
FIRST_S: Final = 1.0  # until it asks anew while the coordinator has not answered anything: it is not there yet
LOOK_S: Final = 0.05  # between two looks at the disk
LIMIT_S: Final = 1800.0

MOST_MB, MOST_PAUSE_S, MOST_OVER_FEDAVG = 500.0, 1.0, 1.5


def measure(updates: int = UPDATES) -> dict[str, Any]:
    """Run a round of FedAvg and a round of SCAFFOLD with `updates` devices.

    Raises:
        JobError: If Mosquitto is not installed.
        LinkError: If a process did not start, or a round took too long.
    """
    mosquitto = processes.find_mosquitto()
    model = tensors.encode_tensors(resnet50())
    rounds = {name: _measure_round(mosquitto, name, updates, model) for name in METHODS}
    fedavg, scaffold = (rounds[name] for name in METHODS)
    figures = {
        "peak_with_fedavg": compare_at_most(fedavg["peak_mb"], MOST_MB, "MB"),
        "longest_pause_with_fedavg": compare_at_most(fedavg["pause_s"], MOST_PAUSE_S, "s"),
        "longest_pause_with_scaffold": compare_at_most(scaffold["pause_s"], MOST_PAUSE_S, "s"),
        "peak_with_scaffold": compare_at_most(scaffold["peak_mb"], MOST_OVER_FEDAVG * MOST_MB, "MB"),
        "peak_with_scaffold_over_fedavg": compare_at_most(
            scaffold["peak_mb"] / fedavg["peak_mb"], MOST_OVER_FEDAVG, "times"
        ),
        "on_the_disk_with_fedavg": compare_at_most(fedavg["disk_mb"], fedavg["most_disk_mb"], "MB"),
        "on_the_disk_with_scaffold": compare_at_most(scaffold["disk_mb"], scaffold["most_disk_mb"], "MB"),
    }
    return {
        "bench": "large",
        "updates": updates,
        "model_mb": round(len(model) / 1e6, 1),
        "rounds": rounds,
        "figures": figures,
    }


def lines(result: dict[str, Any]) -> list[str]:
    told = [f"a round of {result['updates']} updates of {result['model_mb']} MB"]
    for name, each in result["rounds"].items():
        told.append(
            f"{name}: at its peak {each['peak_mb']} MB resident ({each['start_mb']} before the round), "
            f"{each['disk_mb']} MB on the disk; longest pause {each['pause_s']} s of "
            f"{each['answers_to_questions']} looks ({each['start_pause_s']} s until the round had begun, "
            f"{each['start_s']} s after the job was submitted)"
        )
        told.append(
            f"{name}: {each['update_s']} s of processor time an update, {each['times_bare']} times the bare fold's "
            f"{each['bare_s']}; the round took {each['round_s']} s"
        )
    return [*told, *format_figures(result)]


def resnet50(classes: int = CLASSES) -> dict[str, np.ndarray]:
    """Tensors of a ResNet-50's names, shapes and types: 23.9 million numbers."""
    made: dict[str, np.ndarray] = {}
    roll = np.random.default_rng(0)

    def convolution(name: str, norm: str, given: int, taken: int, size: int) -> None:
        made[f"{name}.weight"] = 0.05 * roll.standard_normal((given, taken, size, size), np.float32)
        for part, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            made[f"{norm}.{part}"] = np.full(given, value, np.float32)
        made[f"{norm}.num_batches_tracked"] = np.array(0)

    convolution("conv1", "bn1", 64, 3, 7)
    taken = 64
    for stage, (width, count) in enumerate(BLOCKS, 1):
        for block in range(count):
            at = f"layer{stage}.{block}"
            for number, (given, size) in enumerate(((width, 1), (width, 3), (4 * width, 1)), 1):
                convolution(f"{at}.conv{number}", f"{at}.bn{number}", given, taken if number == 1 else width, size)
            if not block:
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", 4 * width, taken, 1)
            taken = 4 * width
    made["fc.weight"] = 0.05 * roll.standard_normal((classes, taken), np.float32)
    made["fc.bias"] = np.zeros(classes, np.float32)
    return made


# -- one round ------------------------------------------------------------------------------------


def _measure_round(mosquitto: str, method: str, count: int, model: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, processes.managed_processes() as start:
        home = Path(folder)
        bare_s, most_disk_mb = _measure_bare_fold(home, method, model)
        port = processes.find_free_port()
        start([mosquitto, "-c", processes.write_mosquitto_config(home, port)])
        url = f"mqtt://127.0.0.1:{port}"
        watch = MqttLink(Broker.from_url(url), "bench-watch")
        watch.wait_until_connected(timeout_s=10.0)
        for first, size in processes.split_devices(count):
            boards = start([*processes.BOARDS, url, str(first), str(size)], heard=True)
            assert boards.stdout is not None
            if boards.stdout.readline().strip() != b"ready":
                raise LinkError("boards did not connect: see above")
        where = ["--broker", url, "--home", str(home / "runs"), "--fleet", FLEET]
        serving = psutil.Process(start([*processes.SERVE, *where]).pid)
        with _observe_coordinator(url, home / "runs", serving.pid) as watched:
            if not watched.answered.wait(LIMIT_S):
                raise LinkError(f"the coordinator has answered nobody within {LIMIT_S:g} s")
            run, queued_s = _queue_job(home, method, count, model), time.monotonic()
            watch.subscribe([wire.Topics(FLEET).round_topic(run)])
            _wait_until(watch, lambda told: bool(told.asked))
            start_mb, start_pause_s = _peak_mb(serving.pid), watched.longest_s
            begun_s, used_s = time.monotonic(), processes.processor_time_s([serving])
            _wait_until(watch, lambda told: told.round > 0 and bool(told.asked))
            round_s, used_s = time.monotonic() - begun_s, processes.processor_time_s([serving]) - used_s
            peak_mb = _peak_mb(serving.pid)
        watch.close()
    return {
        "peak_mb": round(peak_mb, 1),
        "start_mb": round(start_mb, 1),
        "pause_s": round(watched.longest_s, 3),
        "start_pause_s": round(start_pause_s, 3),
        "start_s": round(begun_s - queued_s, 1),
        "answers_to_questions": watched.answers,
        "disk_mb": round(watched.disk_bytes / 1e6, 1),
        "most_disk_mb": round(most_disk_mb, 1),
        "round_s": round(round_s, 1),
        "update_s": round(used_s / count, 3),
        "bare_s": round(bare_s, 3),
        "times_bare": round(used_s / count / bare_s, 1),
    }


def _bundle_facts(model: bytes, flops: float) -> dict[str, Any]:
    """Return the metadata of a bundle with a ResNet-50's tensors."""
    found = tensors.decode_tensors(model)
    kinds: dict[str, Kind] = {name: "buffer" for name in found if ".running_" in name}
    kinds |= {name: "counter" for name in found if name.endswith("num_batches_tracked")}
    return {"network": {"name": "resnet50"}, "flops": flops, "register": register_of_kinds(found, kinds)}


def _queue_job(home: Path, method: str, count: int, model: bytes) -> str:
    """Queue a job that waits for all boards, and return the run's id."""
    job_bundle.write_bundle(home / "bundle", _bundle_facts(model, 4e9), {"model": model})
    cohort = {"deadline_s": LIMIT_S, "start_devices": count, "quorum": 1.0}
    table = {"name": "bench", "method": method, "rounds": 2, "cohort": cohort}
    with Store(home / "runs") as store:
        return store.add_job(settings.parse_job(table), home / "bundle")


def _wait_until(watch: MqttLink, done: Callable[[wire.RoundState], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        watch.wait(1.0)
        for message in watch.receive():
            told = wire.decode(message.payload, wire.RoundState) if message.payload else None
            if told is not None and told.phase in ("failed", "stopped"):
                raise JobError(f"the job has {told.phase}: {told.note}")
            if told is not None and done(told):
                return
    raise LinkError(f"the round has not ended within {LIMIT_S:g} s")


def _peak_mb(process: int) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise JobError("this system does not tell how much memory a process has had at the most")


# -- observers ------------------------------------------------------------------------------------


class _CoordinatorSamples:
    """What has been seen of the coordinator from outside."""

    def __init__(self) -> None:
        self.answers = 0  # to questions
        self.answered = threading.Event()  # whether there was one
        self.asked_s: float | None = None  # when the question was asked that waits for its answer
        self.disk_bytes = 0  # at the most
        self._longest_s = 0.0

    @property
    def longest_s(self) -> float:
        asked_s = self.asked_s
        return max(self._longest_s, 0.0 if asked_s is None or not self.answers else time.monotonic() - asked_s)

    def end_question(self) -> None:
        self._longest_s, self.asked_s = self.longest_s, None


@contextmanager
def _observe_coordinator(url: str, home: Path, process: int) -> Iterator[_CoordinatorSamples]:
    seen, stop = _CoordinatorSamples(), threading.Event()
    threads = [
        threading.Thread(target=_probe_coordinator, args=(url, seen, stop)),
        threading.Thread(target=_sample_disk, args=(home, Path(f"/proc/{process}/fd"), seen, stop)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _probe_coordinator(url: str, seen: _CoordinatorSamples, stop: threading.Event) -> None:
    topics, link = wire.Topics(FLEET), MqttLink(Broker.from_url(url), "bench-asks")
    names = [f"asks-{number:02d}" for number in range(ASKERS)]
    link.wait_until_connected(timeout_s=10.0)
    link.subscribe([f"{topics.root}/dev/{name}/dn/blob/#" for name in names])
    number = 0
    while not stop.is_set():
        name = names[number % ASKERS]
        sha256 = hashlib.sha256(f"{number}".encode()).hexdigest()
        number += 1
        link.publish(
            topics.device_topic(name, "up", "blob/get"), wire.encode(wire.ChunkRequest(sha256=sha256, chunk=CHUNK))
        )
        seen.asked_s = asked_s = time.monotonic()
        answered, waits = False, True
        while waits and not answered and not stop.is_set():
            link.wait(0.5)
            answered = any(sha256 in message.topic for message in link.receive())
            waits = seen.answers > 0 or time.monotonic() < asked_s + FIRST_S
        seen.end_question()
        seen.answers += answered
        if answered:
            seen.answered.set()
        stop.wait(ASKS_S)
    link.close()


def _sample_disk(home: Path, opened: Path, seen: _CoordinatorSamples, stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        seen.disk_bytes = max(
            seen.disk_bytes, sum(_yield_disk_bytes(home)) + sum(_yield_disk_bytes(opened, nameless=True))
        )


def _yield_disk_bytes(folder: Path, *, nameless: bool = False) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue
        if not nameless or (stat.S_ISREG(found.st_mode) and not found.st_nlink):
            yield 512 * found.st_blocks


# -- the bare fold --------------------------------------------------------------------------------


def _measure_bare_fold(home: Path, method: str, model: bytes) -> tuple[float, float]:
    """Return a bare fold's processor seconds per update, and the MB that a round may take on the disk.

    Returns its seconds of processor time, and the MB that a round may take on the disk, however many updates come:
    those that wait; those in the running sum until that is stored; the sum, the stored one and the next; the model, and
    three states, as one is sent while another is made.
    """
    found = methods.load(method)
    made = job_bundle.write_bundle(home / "bare", _bundle_facts(model, 1000.0), {"model": model})
    state = found.init(made, found.params(), 0)
    moved, path = ShiftedModel(model, 1e-6), home / "update"
    path.write_bytes(moved.read(0, len(model)))
    wanted = hashlib.sha256(moved.read(0, len(model))).hexdigest()
    total, begun_s = None, time.process_time()
    for number in range(BARE):
        payload = path.read_bytes()
        if hashlib.sha256(payload).hexdigest() != wanted:
            raise JobError("the bare fold has read another update")
        metrics = {"steps": 10.0, "new": 1.0}
        given = DeviceUpdate(
            f"board-{number}", 0, update_weight(method), metrics, {"model": tensors.decode_tensors(payload)}
        )
        total = found.aggregation.fold(state, total, given)
    bare_s = (time.process_time() - begun_s) / BARE
    sum_bytes, state_bytes = (tensors.total_bytes([tensors.split_state(each)[0]]) for each in (total, state))
    most_bytes = (STORED_AT + 3) * sum_bytes + 3 * state_bytes + len(model)
    return bare_s, CoordinatorLimits().waiting_mb + most_bytes / 1e6
