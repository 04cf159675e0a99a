"""Benchmark of a coordinator: processor time of an update, and duration of a round.

A real Mosquitto and a `fedquilt serve` run with many light devices (`LightDevice`), which do not train. The
baseline is a loop before and after each fleet that decodes the message of an update and hashes, folds and writes its
blob.
"""

from __future__ import annotations

import hashlib
import os
import resource
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from fedquilt import methods, wire
from fedquilt.arrays import tensors
from fedquilt.blobs import chunks
from fedquilt.blobs.download import Download
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import events
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import JobSettings, create_initial_state
from fedquilt.coordinator.storage.snapshots import Snapshot
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import (
    BlobRef,
    DeviceUpdate,
    FedquiltError,
    JobError,
    LinkError,
    Profile,
    Task,
    Update,
    Usage,
    WireMessage,
)
from fedquilt.edge_agent.agent import REPUBLISH
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.profiles import load_board_profile
from fedquilt.tools.identity import broker_config
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.client import MqttClient, payload_limit
from fedquilt.transport.mqtt.link import MqttLink
from tests.benches.figures import compare_at_most

DEVICE_PROCESSES: Final = 4
NETWORK: Final = {"name": "mlp", "inputs": 16, "hidden": [16], "classes": 10}
ROUND_TIMEOUT_S: Final = 600.0
BARE_UPDATES: Final = 2000
SERVE_COMMAND: Final = (sys.executable, "-m", "fedquilt.cli", "serve")
DEVICES_COMMAND: Final = (sys.executable, "-m", "tests.benches.coordinator")
BROKER_LIMITS: Final = (  # as `fedquilt broker config` writes them
    f"max_inflight_messages {broker_config.MAX_INFLIGHT}\nmax_queued_messages {broker_config.MAX_QUEUED}\n"
    f"max_queued_bytes {broker_config.MAX_QUEUED_BYTES}\n"
)
SPARE_FILES: Final = 200  # open files of a process in addition to its devices' connections

MOST_MS, MOST_ROUND_S, MOST_MB, MOST_GROWTH = 1.5, 30.0, 200.0, 1.2
MOST_OPENING_S: Final = 1.0
MOST_TIMES: Final = {"cpu": 13.0, "wall": 25.0}  # ratio to the bare loop, in the order of `_measure_bare_loop_ms`
MAX_JUDGED_DEVICES: Final = 3000  # round times of larger fleets have no limit
FLEET: Final = "bench"
EXAMPLES: Final = 32
POLL_S: Final = 1.0
START_S: Final = 10.0  # limit for Mosquitto's start
CONNECT_S: Final = 120.0  # limit for the connections of a process's devices
RESUBMIT_S: Final = 30.0  # time after which an unacknowledged update is submitted again
CHUNK: Final = chunks.chunk_size_for(payload_limit(5, None))
PROFILE: Final[dict[str, Any]] = {
    "board": "bench",
    "memory_bytes": 4 << 30,
    "budget_bytes": 1 << 30,
    "engines": ("numpy",),
    "versions": {"numpy": "2"},
    "points": load_board_profile("jetson-orin-nano").operating_points(),  # 40 kB, as boards with a profile announce
}


class ResourceSample(NamedTuple):
    round: int
    at_s: float
    coordinator_s: float  # processor time of each kind of process
    broker_s: float
    boards_s: float
    resident_mb: float


def measure(report: Callable[[str], None], agents: Sequence[int], rounds: int, after: int) -> dict[str, Any]:
    """Run a job with each number of devices, and return times, memory and judged figures.

    With `after`, also run a job whose event log begins with `after` rounds.
    """
    _raise_file_limit(max(agents) + SPARE_FILES)
    fleets: dict[str, dict[str, Any]] = {}
    for count in agents:
        fleets[str(count)] = result_of_fleet = _measure_fleet(count, rounds, 0)
        report(_format_fleet(str(count), result_of_fleet))
    figures: dict[str, Any] = {}
    for name, result_of_fleet in fleets.items():
        figures[f"processor_time_of_an_answer_of_{name}"] = compare_at_most(result_of_fleet["answer_ms"], MOST_MS, "ms")
        for clock, ratio in result_of_fleet["times_bare"].items():
            figures[f"answer_of_{name}_over_bare_loop_by_{clock}"] = compare_at_most(ratio, MOST_TIMES[clock], "times")
        if int(name) <= MAX_JUDGED_DEVICES:  # a larger fleet's figure is reported without a limit
            figures[f"round_of_{name}"] = compare_at_most(result_of_fleet["round_s"], MOST_ROUND_S, "s")
        figures[f"resident_with_{name}"] = compare_at_most(result_of_fleet["resident_mb"], MOST_MB, "MB")
    if after:
        after_result = _measure_fleet(agents[0], rounds, after)
        report(_format_fleet(f"after {after} rounds: {agents[0]}", after_result))
        growth = after_result["answer_ms"] / fleets[str(agents[0])]["answer_ms"]
        figures[f"an_answer_after_{after}_rounds_over_one_before"] = compare_at_most(growth, MOST_GROWTH, "times")
        figures[f"opening_of_{after}_rounds"] = compare_at_most(after_result["opening_s"], MOST_OPENING_S, "s")
        figures[f"resident_after_{after}_rounds"] = compare_at_most(after_result["resident_mb"], MOST_MB, "MB")
    return {"figures": figures}


def _format_fleet(name: str, result: dict[str, Any]) -> str:
    return (
        f"{name} boards: {result['answer_ms']} ms of the coordinator's processor time an answer "
        f"({result['times_bare']['cpu']} times the bare loop's {result['bare_ms']} ms), "
        f"{result['broker_ms']} of the broker, "
        f"a round {result['round_s']} s (first {result['first_round_s']}); {result['resident_mb']} MB resident"
    )


def _measure_fleet(count: int, rounds: int, past_rounds: int) -> dict[str, Any]:
    bare_ms = [_measure_bare_loop_ms()]
    with tempfile.TemporaryDirectory() as folder, _kill_processes_at_end() as processes:
        home = Path(folder)
        run = _queue_job(home, count, past_rounds, rounds)
        opening_s = _measure_opening_s(home)
        port = find_free_port()
        broker = start_mosquitto(home, port, BROKER_LIMITS)
        processes.append(broker)
        url = f"mqtt://127.0.0.1:{port}"
        watch = MqttLink(Broker.from_url(url), "bench-watch")
        watch.wait_until_connected(timeout_s=10.0)
        watch.subscribe([wire.Topics(FLEET).round_topic(run)])
        devices_per_process = -(-count // DEVICE_PROCESSES)
        boards = [
            subprocess.Popen(
                [*DEVICES_COMMAND, url, str(first_device), str(min(devices_per_process, count - first_device))],
                stdout=subprocess.PIPE,
            )
            for first_device in range(0, count, devices_per_process)
        ]
        processes += boards
        for group in boards:
            assert group.stdout is not None
            if group.stdout.readline().strip() != b"ready":
                raise LinkError("devices did not connect: see the error above")
        serve_options = ["--broker", url, "--home", str(home / "runs"), "--fleet", FLEET]
        coordinator = subprocess.Popen([*SERVE_COMMAND, *serve_options], stdout=subprocess.DEVNULL)
        processes.append(coordinator)
        samples = [_sample_resources(past_rounds, coordinator, broker, boards)]
        while samples[-1].round < past_rounds + rounds:
            samples.append(
                _sample_resources(_wait_for_next_round(watch, samples[-1].round), coordinator, broker, boards)
            )
        watch.close()
    bare_ms.append(_measure_bare_loop_ms())
    return {"opening_s": opening_s, **_summarise_samples(samples, count, np.mean(bare_ms, axis=0))}


def _summarise_samples(samples: Sequence[ResourceSample], count: int, bare_ms: np.ndarray) -> dict[str, Any]:
    steady = samples[1:]
    updates = count * (steady[-1].round - steady[0].round)
    update_ms = 1000 * (steady[-1].coordinator_s - steady[0].coordinator_s) / updates
    ratios = np.array([update_ms, 1000 * (steady[-1].at_s - steady[0].at_s) / updates]) / bare_ms
    return {
        "answers": updates,
        "answer_ms": round(update_ms, 3),
        "bare_ms": round(float(bare_ms[0]), 3),
        "times_bare": {clock: round(float(sample), 1) for clock, sample in zip(MOST_TIMES, ratios, strict=True)},
        "broker_ms": round(1000 * (steady[-1].broker_s - steady[0].broker_s) / updates, 3),
        "boards_ms": round(1000 * (steady[-1].boards_s - steady[0].boards_s) / updates, 3),
        "first_round_s": round(steady[0].at_s - samples[0].at_s, 2),
        "round_s": round((steady[-1].at_s - steady[0].at_s) / (steady[-1].round - steady[0].round), 2),
        "resident_mb": round(max(sample.resident_mb for sample in steady), 1),
    }


def _queue_job(home: Path, count: int, past_rounds: int, rounds: int) -> str:
    model = _encode_model()
    job_bundle.write_bundle(home / "bundle", {"network": NETWORK, "flops": 1000}, {"model": model})
    cohort = {"deadline_s": ROUND_TIMEOUT_S, "start_devices": count, "quorum": 1.0}
    table = {"name": "bench", "method": "fedavg", "engine": "numpy", "rounds": past_rounds + rounds + 1}
    job = settings.parse_job({**table, "cohort": cohort})
    with Store(home / "runs") as store:
        run = store.add_job(job, home / "bundle")
        if past_rounds:
            _write_past_rounds(store, run, job, count, past_rounds)
    return run


def _write_past_rounds(store: Store, run: str, job: JobSettings, count: int, rounds: int) -> None:
    method = methods.load(job.method)
    state = store.blob_store.store_bytes(
        tensors.pack_state(create_initial_state(job, job_bundle.load_bundle(store.find_job(run).bundle), method))
    )
    devices = tuple(f"board-{number:05d}" for number in range(count))
    update = BlobRef(sha256=hashlib.sha256(b"update").hexdigest(), size=3000)
    snapshot = Snapshot(JobState(JobConstants.from_job(job)))

    def append_event(event: events.AnyEvent) -> None:
        store.append_event(run, event)
        snapshot.apply_event(event, apply_event(snapshot.job_state, event, 0.0))

    with store.batch_events():
        append_event(events.JobStarted(state))
    for round in range(rounds):
        with store.batch_events():
            if round == 0:
                append_event(events.EligibilityRecorded(0, devices))
            append_event(events.CohortSelected(round, 0, devices))
            for device in devices:
                append_event(
                    events.UpdateAccepted(round, _create_update(run, round, device, update, state.sha256), 0.5, 0.4)
                )
            append_event(events.RoundClosed(round))
            append_event(events.RoundCommitted(round, state, False, {"loss": 1.0}, took_s=1.0))
        store.snapshots.save_if_due(run, snapshot)


def _create_update(run: str, round: int, device: str, ref: BlobRef, state: str) -> Update:
    return Update(
        job=run,
        round=round,
        attempt=0,
        device=device,
        weight=float(EXAMPLES),
        bundles={"model": ref},
        metrics={"loss": 1.0},
        usage=Usage(wall_s=0.1, cpu_s=0.1, examples=EXAMPLES, up_bytes=ref.size),
        state=state,
        epoch=1,
    )


def _measure_opening_s(home: Path) -> float:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fedquilt import methods\n"
        "from fedquilt.coordinator.jobs.job import RunningJob\n"
        "from fedquilt.coordinator.storage.store import Store\n"
        "started_s = time.perf_counter()\n"
        "with Store(Path(sys.argv[1])) as store:\n"
        "    row = store.readable_jobs()[0]\n"
        "    job = RunningJob(row, store, 0.0, methods.load(row.job.method))\n"
        "    job.use_loaded_state(job.build_state_loader()(), 0.0)\n"
        "    print(time.perf_counter() - started_s)\n"
    )
    copy = home / "opened"
    shutil.copytree(home / "runs", copy)  # opening a run writes its first state
    output = subprocess.run([sys.executable, "-c", code, str(copy)], check=True, stdout=subprocess.PIPE).stdout
    shutil.rmtree(copy)
    return round(float(output), 3)


def _wait_for_next_round(watch: MqttLink, last_round: int) -> int:
    deadline_s = time.monotonic() + ROUND_TIMEOUT_S
    while time.monotonic() < deadline_s:
        watch.wait(1.0)
        for message in watch.receive():
            if message.payload and (round_state := wire.decode(message.payload, wire.RoundState)).round > last_round:
                return round_state.round
    raise LinkError(f"round {last_round} has not ended within {ROUND_TIMEOUT_S:g} s")


def _sample_resources(
    round: int, coordinator: subprocess.Popen[bytes], broker: subprocess.Popen[bytes], boards: Sequence[Any]
) -> ResourceSample:
    def processor_s(*processes: subprocess.Popen[bytes]) -> float:
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes)

    resident_mb = psutil.Process(coordinator.pid).memory_info().rss / 1e6
    return ResourceSample(
        round, time.monotonic(), processor_s(coordinator), processor_s(broker), processor_s(*boards), resident_mb
    )


def _measure_bare_loop_ms() -> np.ndarray:
    method, model = methods.load("fedavg"), _encode_model()
    message = wire.encode(_create_update("bench", 0, "board-00000", _blob_ref(model), _blob_ref(b"").sha256))
    with tempfile.TemporaryDirectory() as folder:
        bundle = job_bundle.write_bundle(Path(folder), {"network": NETWORK, "flops": 1000}, {"model": model})
        state = method.init(bundle, method.params(), 0)
        with (Path(folder) / "blobs.bin").open("wb") as out:
            total, started = None, np.array([time.process_time(), time.monotonic()])
            for _ in range(BARE_UPDATES):
                update = wire.decode(message, Update)
                if hashlib.sha256(model).hexdigest() != update.bundles["model"].sha256:
                    raise JobError("blob of the bare loop has another hash")
                device_update = DeviceUpdate(
                    update.device, 0, update.weight, update.metrics, {"model": tensors.decode_tensors(model)}
                )
                total = method.aggregation.fold(state, total, device_update)
                out.write(model)
                out.flush()
            return 1000 * (np.array([time.process_time(), time.monotonic()]) - started) / BARE_UPDATES


def _encode_model() -> bytes:
    return tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))


def _blob_ref(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


@contextmanager
def _kill_processes_at_end() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_mosquitto(folder: Path, port: int, settings: str = "") -> subprocess.Popen[bytes]:
    """Start Mosquitto on a port of this machine, and return the process when it accepts connections.

    `settings` are further lines of mosquitto.conf. Raise JobError if Mosquitto is missing, LinkError if it fails.
    """
    program = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        raise JobError("Mosquitto is not installed: apt install mosquitto")
    config = folder / "mosquitto.conf"
    user = psutil.Process().username()  # a broker started by root would change to the user "mosquitto"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nuser {user}\n{settings}")
    log_path = folder / "mosquitto.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=log)
    limit_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < limit_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.05)
    process.kill()
    process.wait()
    log_text = " ".join(log_path.read_text(errors="replace").split())[-300:] or "no message"
    raise LinkError(f"mosquitto accepts no connections on port {port} ({log_text}): repeat the benchmark")


def _raise_file_limit(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < connections:
        if hard != resource.RLIM_INFINITY and hard < connections:
            raise JobError(
                f"{connections} connections need as many open files, but {hard} are permitted: raise `ulimit -n`"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (connections, hard))


class DeviceGroup:
    def __init__(self, url: str, first_device: int, count: int) -> None:
        self.broker, self.topics = Broker.from_url(url), wire.Topics(FLEET)
        self.boards = [LightDevice(self, number) for number in range(first_device, first_device + count)]
        self._ready = selectors.DefaultSelector()

    def connect_all(self) -> None:
        """Connect all devices, and wait until the broker confirms their presences and profiles.

        Raise LinkError if it does not within CONNECT_S.
        """
        deadline_s = time.monotonic() + CONNECT_S
        for board in self.boards:
            self._ready.register(board.connect(), selectors.EVENT_READ, board)
            self._process_messages(0.0)
        while not all(board.is_registered for board in self.boards):
            if time.monotonic() > deadline_s:
                raise LinkError(f"broker did not confirm all profiles within {CONNECT_S:g} s")
            self._process_messages(1.0)

    def run_until_disconnected(self) -> None:
        look_s = 0.0
        while True:
            self._process_messages(POLL_S)
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + POLL_S
                for board in self.boards:
                    board.repeat_requests(now_s)

    def _process_messages(self, timeout_s: float) -> None:
        for key, _ in self._ready.select(timeout_s):
            key.data.read()


class LightDevice:
    """A device that follows the protocol without training: its update is the model plus a small number."""

    def __init__(self, group: DeviceGroup, number: int) -> None:
        self.group, self.number, self.device = group, number, f"board-{number:05d}"
        self.is_registered = False  # whether the broker has the presence and profile
        self.client: MqttClient
        self._profile_message_id, self._republish_s, self._publish_count = -1, 0.0, 0
        self._task: Task | None = None
        self._download: Download | None = None
        self._update: Update | None = None  # unacknowledged
        self._model = b""  # of the latest update
        self._submitted_s = 0.0

    def connect(self) -> socket.socket:
        """Start to connect and return the socket. `read` completes the connection."""
        broker, will = self.group.broker, wire.encode(wire.Presence(online=False, boot="bench"))
        sock = socket.create_connection((broker.host, broker.port))
        self.client = MqttClient(sock, 5, self.device, self._handle_message, self._handle_publish_ack)
        self.client.on_connect = self._handle_connect
        self.client.send_connect(broker, None, (self.group.topics.device_topic(self.device, "up", "presence"), will))
        self.read()
        return sock

    def read(self) -> None:
        """Process messages and send responses. Raise ConnectionError if the broker closed the connection."""
        self.client.loop_read()
        while self.client.socket() is not None and self.client.want_write():
            self.client.loop_write()
        if self.client.socket() is None:
            raise ConnectionError(f"the broker has closed the connection of {self.device}")

    def repeat_requests(self, now_s: float) -> None:
        self._request_chunks(now_s)
        if self._update is not None and now_s >= self._submitted_s + RESUBMIT_S:
            self._announce_update(self._update, now_s)
        if now_s >= self._republish_s:
            self._publish_profile(now_s)
        self.client.loop_misc()
        while self.client.want_write():
            self.client.loop_write()

    def _handle_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.client.subscribe_filters(self.group.topics.device_filters(self.device))
        self._publish_profile(time.monotonic())

    def _publish_profile(self, now_s: float) -> None:
        self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
        self._profile_message_id = self._publish("profile", Profile(device=self.device, **PROFILE), retain=True)
        self._republish_s, self._publish_count = now_s + REPUBLISH.delay_s(self._publish_count), self._publish_count + 1

    def _handle_publish_ack(self, message_id: int, code: int) -> None:
        self.is_registered = self.is_registered or message_id == self._profile_message_id

    def _handle_message(self, topic: str, payload: bytes, retained: bool) -> None:
        route, now_s = wire.parse_topic(topic), time.monotonic()
        match route.subtopic:
            case "coord" if wire.decode(payload, wire.CoordState).online:
                self._publish_count = 0
                self._publish_profile(now_s)
            case "presence":
                self._publish("presence", wire.Presence(online=True, boot="bench"), retain=True)
            case "task" if payload:
                self._accept_task(wire.decode(payload, Task), now_s)
            case "ack":
                self._handle_ack(wire.decode(payload, wire.Ack))
            case "get":
                self._send_model(wire.decode(payload, wire.ChunkRequest))
            case "chunk" if self._download is not None and self._download.ref.sha256 == route.sha256:
                if self._download.handle_chunk(route.index, payload, now_s):
                    self._download = None
                    self._submit_update(payload, now_s)

    def _accept_task(self, task: Task, now_s: float) -> None:
        is_repeated = self._task is not None and (task.job, task.round) == (self._task.job, self._task.round)
        self._task = task
        self._publish("claim", wire.Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True))
        if is_repeated and self._update is not None:
            self._announce_update(self._update, now_s)
        elif not is_repeated or self._download is None:
            self._download = Download(task.bundles["model"], CHUNK, now_s)
            self._request_chunks(now_s)

    def _request_chunks(self, now_s: float) -> None:
        for request in self._download.next_requests(now_s) if self._download is not None else ():
            self._publish("blob/get", request)

    def _submit_update(self, received: bytes, now_s: float) -> None:
        task = self._task
        assert task is not None
        model = {
            name: value + value.dtype.type(1e-6 * (self.number + 1))
            for name, value in tensors.decode_tensors(received).items()
        }
        self._model = tensors.encode_tensors(model)
        ref = BlobRef(sha256=hashlib.sha256(self._model).hexdigest(), size=len(self._model))
        self._update = Update(
            job=task.job,
            round=task.round,
            attempt=task.attempt,
            device=self.device,
            weight=float(EXAMPLES),
            bundles={"model": ref},
            metrics={"loss": 1.0, "steps": 10.0},
            usage=Usage(wall_s=0.1, cpu_s=0.1, examples=EXAMPLES, up_bytes=ref.size),
            layouts={"model": tensors.layout_from_tensors(model)},
            state=task.state,
            epoch=task.epoch,
        )
        self._announce_update(self._update, now_s)

    def _announce_update(self, update: Update, now_s: float) -> None:
        self._submitted_s = now_s
        self._publish("update", update)

    def _send_model(self, request: wire.ChunkRequest) -> None:
        if self._update is not None and request.sha256 == self._update.bundles["model"].sha256:
            topic = self.group.topics.chunk_topic(self.device, "up", request.sha256, 0)
            self.client.queue_message(topic, self._model, 0, False)

    def _handle_ack(self, ack: wire.Ack) -> None:
        if self._update is not None and (ack.job, ack.round) == (self._update.job, self._update.round):
            if not ack.accepted:
                print(f"update of {self.device} was rejected: {ack.reason}", file=sys.stderr, flush=True)
            self._update = None

    def _publish(self, leaf: str, message: WireMessage, retain: bool = False) -> int:
        topic = self.group.topics.device_topic(self.device, "up", leaf)
        return self.client.queue_message(topic, wire.encode(message), 1, retain)


def main(url: str, first_device: str, count: str) -> int:
    """Connect devices, print "ready", and run until killed. Return 1 if a connection fails or closes."""
    group = DeviceGroup(url, int(first_device), int(count))
    try:
        group.connect_all()
        print("ready", flush=True)
        group.run_until_disconnected()
    except (FedquiltError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    os.nice(1)  # the measured coordinator has priority
    sys.exit(main(*sys.argv[1:]))
