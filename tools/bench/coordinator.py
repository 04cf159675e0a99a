"""`fedquilt bench coordinator`: what an answer costs a coordinator, and what a round of many boards takes.

A real Mosquitto, a `fedquilt serve` with a home on disk, and light boards (`protocol_boards`) in processes of their
own, which speak the protocol and train nothing. Beside it stands the bare cost of an answer in the same run: its
message is decoded, its blob is hashed, folded and written, in a loop.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from fedquilt import bundle, methods, tensors, wire
from fedquilt.coordinator import facts, settings
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.preflight import first_state
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.snapshots import Standing
from fedquilt.coordinator.store import Store
from fedquilt.core import BlobRef, Contribution, JobError, LinkError, Update, Usage
from fedquilt.disk import REAL
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.tools.bench.protocol_boards import EXAMPLES, FLEET
from fedquilt.tools.identity import broker_config
from fedquilt.tools.report.figures import figure, figure_lines
from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt import MqttLink

AGENTS: Final = (200, 3000)
ROUNDS: Final = 6
PROCESSES: Final = 4  # processes of boards
NETWORK: Final = {"name": "mlp", "inputs": 16, "hidden": [16], "classes": 10}
LIMIT_S: Final = 600.0  # longest that a round may take
BARE: Final = 2000  # answers of the bare loop
SPARE_FILES: Final = 200  # files that a process opens besides its boards' connections

MOST_MS, MOST_ROUND_S, MOST_MB, MOST_GROWTH = 1.5, 30.0, 200.0, 1.2
MOST_OPENING_S: Final = 1.0
JUDGED: Final = 3000  # largest fleet whose rounds are judged by a limit


class Sample(NamedTuple):
    """Resources that the processes have used when a round ended."""

    round: int
    at_s: float
    coordinator_s: float  # processor time, as the next two
    broker_s: float
    boards_s: float
    resident_mb: float


def measure(agents: Sequence[int] = AGENTS, rounds: int = ROUNDS, after: int = 0) -> dict[str, Any]:
    """Run a job with each number of boards, all of which answer in each round.

    Args:
        agents: numbers of boards.
        rounds: number of rounds, of which the first is not counted: boards are met and the model is new.
        after: rounds that the log of another run of the first of these fleets holds before it begins.

    Raises:
        JobError: Mosquitto is not installed, or this process may not open as many files.
        LinkError: a process did not start, or a round took too long.
    """
    mosquitto = program()
    _allow_files(max(agents) + SPARE_FILES)
    bare_ms = _bare_ms()
    fleets = {str(count): _fleet(mosquitto, count, rounds, 0, bare_ms) for count in agents}
    figures: dict[str, Any] = {}
    for count, each in fleets.items():
        figures[f"processor_time_of_an_answer_of_{count}"] = figure(each["answer_ms"], MOST_MS, "ms")
        if int(count) <= JUDGED:  # a larger fleet's figure is reported without a limit
            figures[f"round_of_{count}"] = figure(each["round_s"], MOST_ROUND_S, "s")
        figures[f"resident_with_{count}"] = figure(each["resident_mb"], MOST_MB, "MB")
    result = {"bench": "coordinator", "bare_ms": round(bare_ms, 3), "fleets": fleets, "figures": figures}
    if after:
        later = _fleet(mosquitto, agents[0], rounds, after, bare_ms)
        growth = later["answer_ms"] / fleets[str(agents[0])]["answer_ms"]
        result["after"] = {"rounds": after, "growth": round(growth, 2), **later}
        figures[f"an_answer_after_{after}_rounds_over_one_before"] = figure(growth, MOST_GROWTH, "times")
        figures[f"opening_of_{after}_rounds"] = figure(later["opening_s"], MOST_OPENING_S, "s")
        figures[f"resident_after_{after}_rounds"] = figure(later["resident_mb"], MOST_MB, "MB")
    return result


def program() -> str:
    """Path of Mosquitto.

    Raises:
        JobError: it is not installed.
    """
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        raise JobError("this bench needs Mosquitto: apt install mosquitto")
    return found


def lines(result: dict[str, Any]) -> list[str]:
    """Lines of text that show the result."""
    told = []
    after = result.get("after")
    for name, each in [*result["fleets"].items(), *([(f"after {after['rounds']} rounds", after)] if after else [])]:
        told.append(
            f"{name} boards: {each['answer_ms']} ms of the coordinator's processor time an answer "
            f"({each['times_bare']} times the bare loop's {result['bare_ms']} ms), {each['broker_ms']} of the broker, "
            f"a round {each['round_s']} s (first {each['first_round_s']}), late rounds cost {each['late_over_early']} "
            f"times early ones; {each['resident_mb']} MB resident"
        )
    if after:
        told.append(
            f"the log of {after['rounds']} rounds is open after {after['opening_s']} s; read from its first fact, as "
            f"without a snapshot, after {after['opening_without_snapshot_s']} s"
        )
    return [*told, *figure_lines(result)]


# -- one fleet ------------------------------------------------------------------------------------


def _fleet(mosquitto: str, count: int, rounds: int, after: int, bare_ms: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, processes() as start:
        home = Path(folder)
        run = _queued(home, count, after, rounds)
        opening_s, whole_s = _opening_s(home), _opening_s(home, snapshots=False)
        port = free_port()
        broker = start([mosquitto, "-c", configured(home, port)])
        url = f"mqtt://127.0.0.1:{port}"
        watch = MqttLink(Broker.parse(url), "bench-watch")
        watch.connect(timeout_s=10.0)
        watch.subscribe([wire.Topics(FLEET).job(run)])
        boards = [start([*BOARDS, url, str(first), str(size)], heard=True) for first, size in shares(count)]
        for each in boards:
            assert each.stdout is not None
            if each.stdout.readline().strip() != b"ready":
                raise LinkError("boards did not connect: see above")
        where = ["--broker", url, "--home", str(home / "runs"), "--fleet", FLEET]
        serving = psutil.Process(start([*SERVE, *where]).pid)
        others = [psutil.Process(broker.pid)], [psutil.Process(each.pid) for each in boards]
        samples = [Sample(after, time.monotonic(), 0.0, used_s(others[0]), used_s(others[1]), 0.0)]
        while samples[-1].round < after + rounds:
            round = next_round(watch, samples[-1].round)
            samples.append(
                Sample(
                    round,
                    time.monotonic(),
                    used_s([serving]),
                    used_s(others[0]),
                    used_s(others[1]),
                    serving.memory_info().rss / 1e6,
                )
            )
        watch.close()
        return {"opening_s": opening_s, "opening_without_snapshot_s": whole_s, **_summed(samples, count, bare_ms)}


def configured(home: Path, port: int) -> str:
    """Write the broker's settings, as `fedquilt broker config` has them; returns the file."""
    (home / "mosquitto.conf").write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nuser {user()}\n"
        f"max_inflight_messages {broker_config.MAX_INFLIGHT}\nmax_queued_messages {broker_config.MAX_QUEUED}\n"
        f"max_queued_bytes {broker_config.MAX_QUEUED_BYTES}\n"
    )
    return str(home / "mosquitto.conf")


def _summed(samples: Sequence[Sample], count: int, bare_ms: float) -> dict[str, Any]:
    """Figures of a fleet; the first round is not counted."""
    counted = samples[1:]
    answers = count * (counted[-1].round - counted[0].round)
    costs = [
        (after.coordinator_s - before.coordinator_s) / (after.round - before.round)
        for before, after in itertools.pairwise(counted)
    ]
    third = max(1, len(costs) // 3)
    answer_ms = 1000 * (counted[-1].coordinator_s - counted[0].coordinator_s) / answers
    return {
        "answers": answers,
        "answer_ms": round(answer_ms, 3),
        "times_bare": round(answer_ms / bare_ms, 1),
        "broker_ms": round(1000 * (counted[-1].broker_s - counted[0].broker_s) / answers, 3),
        "boards_ms": round(1000 * (counted[-1].boards_s - counted[0].boards_s) / answers, 3),
        "first_round_s": round(counted[0].at_s - samples[0].at_s, 2),
        "first_answer_ms": round(1000 * counted[0].coordinator_s / count, 3),
        "round_s": round((counted[-1].at_s - counted[0].at_s) / (counted[-1].round - counted[0].round), 2),
        "late_over_early": round(statistics.mean(costs[-third:]) / max(statistics.mean(costs[:third]), 1e-9), 2),
        "resident_mb": round(max(each.resident_mb for each in counted), 1),
    }


def _queued(home: Path, count: int, after: int, rounds: int) -> str:
    """Queue the job, with the log of so many rounds; returns the run's id."""
    made = _model()
    bundle.write(home / "bundle", {"network": NETWORK, "flops": 1000}, {"model": made})
    job = _job(count, after + rounds + 1)
    with Store(home / "runs") as store:
        run = store.add(job, home / "bundle")
        if after:
            _write_log(store, run, job, count, after)
    return run


def _job(count: int, rounds: int) -> Job:
    cohort = {"deadline_s": LIMIT_S, "start_devices": count, "quorum": 1.0}
    return settings.parse({"name": "bench", "method": "fedavg", "engine": "numpy", "rounds": rounds, "cohort": cohort})


def _write_log(store: Store, run: str, job: Job, count: int, rounds: int) -> None:
    """Append the facts of so many rounds, as a coordinator appends them, and store what it keeps of them.

    Every round ends in the same state here.
    """
    method = methods.load(job.method)
    state = store.depot.put(tensors.pack(first_state(job, bundle.load(store.job(run).bundle), method)))
    devices = tuple(f"board-{number:05d}" for number in range(count))
    update = BlobRef(sha256=hashlib.sha256(b"update").hexdigest(), size=3000)
    standing = Standing(facts.Rounds(Plan.of(job)))

    def append(fact: facts.AnyFact) -> None:
        store.append(run, fact)
        standing.apply_fact(fact, facts.apply(standing.rounds, fact, 0.0))

    with store.together():
        append(facts.Started(state))
    for round in range(rounds):
        with store.together():
            if round == 0:
                append(facts.Surveyed(0, devices))
            append(facts.Asked(round, 0, devices))
            for device in devices:
                append(facts.Answered(round, _update(run, round, device, update, state.sha256), 0.5, 0.4))
            append(facts.Closed(round))
            append(facts.Committed(round, state, False, {"loss": 1.0}, took_s=1.0))
        store.snapshots.keep(run, standing)


def _update(run: str, round: int, device: str, ref: BlobRef, state: str) -> Update:
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


def _opening_s(home: Path, snapshots: bool = True) -> float:
    """Seconds until a process has the home open, and its run at the point that the log has reached.

    `snapshots`: False: without any, as a home that an earlier version has written.
    """
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fedquilt import methods\n"
        "from fedquilt.coordinator.job import Running\n"
        "from fedquilt.coordinator.store import Store\n"
        "begun = time.perf_counter()\n"
        "with Store(Path(sys.argv[1])) as store:\n"
        "    row = store.jobs()[0]\n"
        "    job = Running(row, store, 0.0, methods.load(row.job.method))\n"
        "    job.continue_from(job.opening()(), 0.0)\n"
        "    print(time.perf_counter() - begun)\n"
    )
    copied = home / "opened"
    shutil.copytree(home / "runs", copied)  # a run that is opened notes its first state
    if not snapshots:
        with closing(REAL.connect(copied / "fedquilt.db")) as db:
            db.execute("drop table if exists snapshots")
    told = subprocess.run([sys.executable, "-c", code, str(copied)], check=True, stdout=subprocess.PIPE).stdout
    shutil.rmtree(copied)
    return round(float(told), 3)


def next_round(watch: MqttLink, before: int) -> int:
    """Wait for the end of a round; returns the number of the round that follows."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        watch.wait(1.0)
        for message in watch.receive():
            if message.payload and (told := wire.decode(message.payload, wire.RoundState)).round > before:
                return told.round
    raise LinkError(f"round {before} has not ended within {LIMIT_S:g} s")


def used_s(processes: Sequence[psutil.Process]) -> float:
    """Seconds of processor time of these processes so far."""
    return sum(sum(each.cpu_times()[:2]) for each in processes)


# -- the bare loop --------------------------------------------------------------------------------


def _bare_ms() -> float:
    """Milliseconds of processor time in which an answer is decoded, hashed, folded and written, and nothing else."""
    method, model = methods.load("fedavg"), _model()
    message = wire.encode(_update("bench", 0, "board-00000", _ref(model), _ref(b"").sha256))
    with tempfile.TemporaryDirectory() as folder:
        made = bundle.write(Path(folder), {"network": NETWORK, "flops": 1000}, {"model": model})
        state = method.init(made, method.params(), 0)
        with (Path(folder) / "blobs.bin").open("wb") as out:
            total, begun = None, time.process_time()
            for _ in range(BARE):
                update = wire.decode(message, Update)
                if hashlib.sha256(model).hexdigest() != update.bundles["model"].sha256:
                    raise JobError("the bare loop has hashed another blob")
                given = Contribution(update.device, 0, update.weight, update.metrics, {"model": tensors.decode(model)})
                total = method.fold(state, total, given)
                out.write(model)
                out.flush()
            return 1000 * (time.process_time() - begun) / BARE


def _model() -> bytes:
    return tensors.encode(numpy_engine.init(NETWORK, seed=0))


def _ref(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


# -- processes ------------------------------------------------------------------------------------

SERVE: Final = (sys.executable, "-m", "fedquilt.cli", "serve")
BOARDS: Final = (sys.executable, "-m", "fedquilt.tools.bench.protocol_boards")


@contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that are killed at the end; `heard`: the caller reads what it prints."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], heard: bool = False) -> subprocess.Popen[bytes]:
        errors = None if command[0] == sys.executable else subprocess.DEVNULL  # Mosquitto prints all that it does
        out = subprocess.PIPE if heard else subprocess.DEVNULL
        started.append(subprocess.Popen(list(command), stdout=out, stderr=errors))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def shares(count: int) -> list[tuple[int, int]]:
    """(first board, number of boards) of each process."""
    each = -(-count // PROCESSES)
    return [(first, min(each, count - first)) for first in range(0, count, each)]


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise JobError(f"{wanted} connections need as many open files, and {hard} are allowed: raise `ulimit -n`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def user() -> str:
    """Name of the user that the broker goes on as: one that is started by root would become "mosquitto"."""
    return psutil.Process().username()


def free_port() -> int:
    """A port of this machine that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
