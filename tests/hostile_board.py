"""An enrolled board that lies: real Mosquitto with a fleet's own access rules, real coordinator, three honest boards.

    python tests/hostile_board.py --seconds 60

It has a certificate, shakes hands as a board does and is asked for work; each of its tasks is answered by another of
`ATTACKS`. Whatever it does, every committed state has the bits that it has without it, and the coordinator's log
names it. The command measures besides what a flood of it costs a coordinator that waits for other boards: processor
time and memory, in the given time and in as long a time without it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import numpy as np
import processes
from certified import Certified
from mosquittos import Mosquitto
from processes import DIGITS, NETWORK, Processes
from waiting import wait_until

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs import chunks
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import AnyEvent, JobEnded
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import sites
from fedquilt.core import BlobRef, DeviceUpdate, Task, Update, Usage
from fedquilt.edge_agent import messages, state_machine
from fedquilt.edge_agent.devices import create_device as make_board
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.tools.simulation import agents as fleet
from fedquilt.transport.mqtt.link import MqttLink

LIAR, FLEET = "liar-00", "fleet"
TOPICS = wire.Topics(FLEET)
MOST_MB = 50.0  # that the coordinator's memory may grow by
MOST_CPU_S = 1.0  # of processor time a minute
Tensors = Mapping[str, np.ndarray]


class Lie:
    """What an update of the liar holds: bytes of its bundle, and what its manifest says."""

    def __init__(self, payload: bytes, layout: Mapping[str, str] | None = None, **told: Any) -> None:
        self.payload, self.layout, self.told = payload, layout, told


def _bomb(model: Tensors) -> bytes:
    """A blob whose header says that it has an exbibyte."""
    return struct.pack("<Q", 1 << 60) + tensors.encode_tensors(model)[8:]


def _inflated(model: Tensors) -> bytes:
    """A blob whose header promises tensors of a hundred gigabytes."""
    payload = tensors.encode_tensors(model)
    (size,) = struct.unpack("<Q", payload[:8])
    head = payload[8 : 8 + size].replace(b"[10,64]", b"[1000000,25000]")
    return struct.pack("<Q", len(head)) + head + payload[8 + size :]


ATTACKS: dict[str, tuple[Callable[[Tensors], Lie], str]] = {  # -> what the log has to say beside the liar's name
    "a header of an exbibyte": (lambda model: Lie(_bomb(model)), "header of .* exceeds"),
    "tensors that inflate": (lambda model: Lie(_inflated(model)), "not a safetensors blob"),
    "1e300": (
        lambda model: Lie(tensors.encode_tensors({name: np.full(a.shape, 1e300) for name, a in model.items()})),
        "float64|bytes, at most",
    ),
    "infinity": (
        lambda model: Lie(tensors.encode_tensors({name: np.full_like(a, np.inf) for name, a in model.items()})),
        "finite",
    ),
    "wrong types": (
        lambda model: Lie(tensors.encode_tensors(model), dict.fromkeys(model, "i4:3")),
        "is int32",
    ),
    "a manifest of gigabytes": (
        lambda model: Lie(tensors.encode_tensors(model), None, size=1 << 40),
        "bytes, at most",
    ),
    "a weight of 1e24": (lambda model: Lie(tensors.encode_tensors(model), None, weight=1e24), "examples"),
    "joules that end a job, and a strange tensor": (
        lambda model: Lie(
            tensors.encode_tensors(_renamed(model)),
            None,
            usage=Usage(wall_s=1.0, energy_j=1e12),
        ),
        "implausible claims",
    ),
    "updates of the honest boards": (
        lambda model: Lie(_of_others(model), None, bundle="site.0", weight=30.0),
        "a site's update, but the device has no site right",
    ),
    "chunks that are withheld": (
        lambda model: Lie(tensors.encode_tensors({name: 2 * a for name, a in model.items()}), None, withheld=True),
        "",
    ),
}


def _of_others(model: Tensors) -> bytes:
    """Updates of the honest boards, as a site passes them up."""
    names = [f"jetson-nano-{number:02d}" for number in range(3)]
    given = [DeviceUpdate(name, 0, 10.0, {}, {"model": model}) for name in names]
    ((_, bundle),) = sites.bundle_updates(given)
    return tensors.encode_tensors(bundle)


def _renamed(model: Tensors) -> dict[str, np.ndarray]:
    """The model with one tensor under another name of the same length."""
    return {(name[:-1] + "_" if index == 0 else name): array for index, (name, array) in enumerate(model.items())}


class Noted(MqttLink):
    """A link that keeps the updates that went over it."""

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if topic.endswith("/up/update"):
            self.__dict__.setdefault("updates", []).append(payload)
        super().publish(topic, payload, retain=retain, reliable=reliable)

    def taken(self) -> list[bytes]:
        """The updates since the last call."""
        return self.__dict__.pop("updates", [])


class Liar(threading.Thread):
    """The hostile board.

    Args:
        link: with its certificate.
        raw: the one below, for what is in no envelope.
        model: tensors of the right names and shapes.
        rate: messages a second that it sends besides, of all kinds; 0: none.
    """

    def __init__(self, link: AuthenticatedDeviceLink, raw: Noted, model: Tensors, rate: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.done, self.sent = Counter[str](), 0
        self._link, self._raw, self._model, self._rate = link, raw, model, rate
        self._left = list(ATTACKS)
        self._blobs: dict[str, bytes] = {}
        self._offered: set[int] = set()  # rounds
        self._kept: list[bytes] = []  # updates in their envelopes
        self._ending, self._session, self._began_s = threading.Event(), 0, 0.0

    def run(self) -> None:
        while not self._ending.is_set():
            self._link.wait(0.005)
            for message in self._link.receive():
                route = wire.parse_topic(message.topic)
                if route.message_type is Task and message.payload:
                    self._tasked(wire.decode(message.payload, Task))
                elif route.message_type is wire.ChunkRequest:
                    self._served(wire.decode(message.payload, wire.ChunkRequest))
            if self._link.connected and self._session != self._link.session:
                self._session = self._link.session
                self._told()
            if self._rate and self._link.connected:
                self._began_s = self._began_s or time.monotonic()
                while self.sent < self._rate * (time.monotonic() - self._began_s) and self._link.backlog < 1 << 20:
                    self._pour(self.sent)

    def end(self) -> None:
        self._ending.set()
        self.join()
        self._link.close()

    def _say(self, leaf: str, message: Any, *, retain: bool = False) -> None:
        self._link.publish(TOPICS.device_topic(LIAR, "up", leaf), wire.encode(message), retain=retain)
        self.sent += 1

    def _told(self) -> None:
        """Come online as a board of the smallest kind that says it is a site of five."""
        self._say("presence", wire.Presence(online=True, boot="b"), retain=True)
        means = state_machine.Capabilities(2_000_000_000, ("numpy",), ())
        profile = messages.profile_message(LIAR, make_board("x86-host"), means)
        self._say("profile", msgspec.structs.replace(profile, site_device_count=5), retain=True)

    def _tasked(self, task: Task) -> None:
        if task.round in self._offered or not self._left or "work" not in task.actions:
            return
        name = self._left.pop(0)
        lie = ATTACKS[name][0](self._model)
        sha256 = hashlib.sha256(lie.payload).hexdigest()
        size = lie.told.pop("size", len(lie.payload))
        bundle = lie.told.pop("bundle", next(iter(task.bundles), "model"))
        if not lie.told.pop("withheld", False):
            self._blobs[sha256] = lie.payload
        update = Update(
            job=task.job,
            round=task.round,
            attempt=task.attempt,
            device=LIAR,
            **{"weight": 10.0, "usage": Usage(wall_s=1.0), **lie.told},
            bundles={bundle: BlobRef(sha256=sha256, size=size)},
            layouts={} if lie.layout is None else {bundle: dict(lie.layout)},
            metrics={},
            state=task.state,
            epoch=task.epoch,
        )
        self._say("update", msgspec.structs.replace(update, device="jetson-nano-00"))  # another board's name
        self._raw.taken()
        self._say("update", update)
        sealed = self._raw.taken()
        for older in (*self._kept, wire.encode(update)):  # the bytes of earlier rounds, and an update in no envelope
            self._raw.publish(TOPICS.device_topic(LIAR, "up", "update"), older)
        self._offered.add(task.round)
        self._kept += sealed
        self._raw.publish(
            TOPICS.device_topic("jetson-nano-00", "up", "update"), wire.encode(update)
        )  # the broker's to stop
        self.done[name] += 1

    def _served(self, get: wire.ChunkRequest) -> None:
        payload = self._blobs.get(get.sha256)
        if payload is None:
            return
        ref = BlobRef(sha256=get.sha256, size=len(payload))
        cut = chunks.ManifestBuilder(ref, get.chunk, lambda offset, size: payload[offset : offset + size]).hash_chunks()
        if not get.indices:
            self._link.publish(TOPICS.blob_topic(LIAR, "up", get.sha256, "manifest"), wire.encode(cut))
        for index in get.indices:
            offset, size = chunks.chunk_extent(cut, index)
            topic = TOPICS.chunk_topic(LIAR, "up", get.sha256, index)
            self._link.publish(topic, payload[offset : offset + size], reliable=False)

    def _pour(self, number: int) -> None:
        """Send a message of one of seven kinds, some of them none at all."""
        kind = number % 7
        if kind == 0:
            self._say("presence", wire.Presence(online=True, boot=f"b{number}"))
        elif kind == 1:
            self._say("telemetry", wire.Telemetry(power_w=1e300))
        elif kind == 2:
            self._say("claim", wire.Claim(job="none", round=0, attempt=0, accepted=True))
        elif kind == 3:
            self._raw.publish(TOPICS.device_topic(LIAR, "up", "update"), b"[" * (60_000 if number % 70 == 3 else 200))
            self.sent += 1
        elif kind == 4:
            hello = wire.Hello(attempt=f"{number:016x}", flight=0, tls="AAAA")  # one more handshake, begun and left
            self._raw.publish(TOPICS.device_topic(LIAR, "up", "hello"), wire.encode(hello))
            self.sent += 1
        elif kind == 5:  # of a blob that nobody has asked for
            self._link.publish(TOPICS.chunk_topic(LIAR, "up", f"{number:064x}", 0), bytes(1024), reliable=False)
            self.sent += 1
        else:
            get = wire.ChunkRequest(sha256=f"{number:064x}", chunk=1024, indices=tuple(range(64)))
            self._link.publish(f"{TOPICS.root}/dev/{LIAR}/up/blob/get", wire.encode(get))
            self.sent += 1


class Site:
    """A fleet with certificates in a folder: broker, job, honest boards' settings, and the liar."""

    def __init__(self, folder: Path, processes: Processes, **cohort: Any) -> None:
        self.folder, self.processes = folder, processes
        self.certified = Certified(folder)
        table: dict[str, Any] = {
            "name": "digits",
            "method": "fedprox",
            "engine": "numpy",
            "rounds": len(ATTACKS),
            "params": {"lr": 0.1, "batch": 8, "epochs": 1},
            "cohort": {"deadline_s": 20.0, "quorum": 0.75, "attempts": 100, "start_devices": 4, **cohort},
            "stop": {"max_joules": 1e9},
            "fleet": {"devices": 3, "boards": ["jetson-nano"], "budgets": ["256MB"]},
            "data": {"path": str(DIGITS), "partition": "classes", "classes": 4},
        }
        first = numpy_engine.init_tensors(NETWORK, seed=0)
        self.model = {name: array + np.float32(1) for name, array in first.items()}  # which nobody has yet
        job_bundle.write_bundle(
            folder / "job.bundle", {"network": NETWORK, "flops": 9600}, {"model": tensors.encode_tensors(first)}
        )
        (folder / "job.toml").write_text(toml.format_toml(table))
        calm = {**table, "cohort": {"start_devices": 3}}
        self.plan = fleet.FleetPlan(settings.parse_job(calm), folder / "job.bundle", folder / "calm")
        (folder / "mosquitto").mkdir()
        config_lines = self.certified.configure_broker(folder / "site")
        self.mosquitto = Mosquitto(folder / "mosquitto", tuple(config_lines)).start()
        self.url = self.mosquitto.url.replace("mqtt://", "mqtts://")
        self.home, self.log = folder / "runs", folder / "run.log"

    def boards(self) -> None:
        """Start the honest boards."""
        tables, certificate_files = self.plan.make_agent_tables(), self.certified.files
        self.processes.start_agents(
            self.folder, tables, lambda name: {"url": self.url, **certificate_files(name)}, warm_s=600.0
        )

    def coordinate(self) -> None:
        """Start the coordinator."""
        own = self.certified.files("coordinator", "coordinator")
        named = [part for key, value in own.items() for part in (f"--{key}", value)]
        command = ("run", str(self.folder / "job.toml"), "--home", str(self.home), "--broker", self.url, *named)
        self.processes.start("coordinator", self.log, *command)

    def liar(self, rate: float = 0.0) -> Liar:
        """The hostile board, at its work."""
        broker = self.certified.broker(LIAR, url=self.url)
        raw = Noted(broker, LIAR)
        made = Liar(AuthenticatedDeviceLink(raw, LinkIdentity(broker), FLEET, LIAR), raw, self.model, rate)
        made.start()
        return made

    def facts(self) -> list[AnyEvent]:
        """The job's facts so far."""
        return processes.read_events(self.home)

    def ended(self) -> bool:
        return any(isinstance(event, JobEnded) for event in self.facts())

    def calm(self) -> list[AnyEvent]:
        """Facts of the same job in this process, without the liar."""
        run, _ = fleet.run_fleet_virtually(self.plan)
        with Store(self.plan.home) as store:
            return [event for _, _, event in store.read_events(run)]


@contextlib.contextmanager
def site(folder: Path, **cohort: Any) -> Iterator[Site]:
    """A site whose processes end with it."""
    processes = Processes()
    made = None
    try:
        made = Site(folder, processes, **cohort)
        yield made
    finally:
        processes.end()
        if made is not None:
            made.mosquitto.kill()


def spent(pid: int) -> tuple[float, float]:
    """Processor seconds of a process so far, and the most MB that it has held."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu_s, int(status["VmHWM"].split()[0]) / 1024


def main() -> int:
    """Measure what a flood costs; 1 when it is more than `MOST_MB` or `MOST_CPU_S`, or when nothing names the board."""
    parser = argparse.ArgumentParser(description="have an enrolled board flood a coordinator, and measure it")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1000.0, help="messages a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedquilt-liar-") as folder, site(Path(folder), start_devices=9) as made:
        made.coordinate()
        wait_until(made.facts, "the start of the job")
        pid = made.processes.running["coordinator"].pid
        time.sleep(options.seconds)
        start_s, start_mb = spent(pid)
        time.sleep(options.seconds)
        calm_s = spent(pid)[0] - start_s
        liar = made.liar(options.rate)
        time.sleep(options.seconds)
        flooded_s, most_mb = spent(pid)
        liar.end()
        log = made.log.read_text()
    cpu_s = (flooded_s - start_s - 2 * calm_s) * 60 / options.seconds
    named = LIAR in log and "exceeds its rate limit" in log
    print(
        f"{liar.sent} messages in {options.seconds:g} s: {cpu_s:.2f} s of processor time a minute and "
        f"{most_mb - start_mb:.0f} MB more than without them; {'named' if named else 'NOT NAMED'} in the log, "
        f"which has {len(log.splitlines())} lines"
    )
    if not named:
        print(log)
    return 0 if named and cpu_s < MOST_CPU_S and most_mb - start_mb < MOST_MB else 1


if __name__ == "__main__":
    sys.exit(main())
