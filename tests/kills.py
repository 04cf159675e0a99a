"""Processes of a federation are killed at random: every result is bit for bit that of a run in which nothing happened.

    python tests/kills.py --kills 200
    python tests/kills.py --kills 40 --seed 3 --case scaffold

A coordinator, three agents with their tasks' processes and a Mosquitto run as processes of their own, beside two that
list, explain, check and save the coordinator's home (`onlookers.py`). One after the other dies by SIGKILL: which one,
and after how many more facts of its job, is drawn from the seed. None may end otherwise. A job needs all three
boards in each round: a round does without a board whose agent is not back within 5 s otherwise. Jobs follow each other
until there were enough kills. Afterwards, for each:

- the job is done, and no board that was asked in a round is without an update that was counted there, once;
- each round's state has the bits that it has in one process on virtual time, with the same boards in each round, or
  in buffered mode and with [privacy] the bits that the method's functions give for the recorded events;
- each board's private state and the state with the best evaluation likewise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from federation import prepare_bundle, write_digits
from mosquittos import Mosquitto
from processes import Processes, read_events

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import decisions
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    RoundCommitted,
    UpdateAccepted,
    UpdateLost,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.storage.rows import is_served
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates.private_sums import PrivateSums
from fedquilt.core import DeviceUpdate, DeviceView, seed_deriver
from fedquilt.edge_agent import engines
from fedquilt.formats import toml
from fedquilt.formats.job_bundle import load_bundle
from fedquilt.tools.artefacts import export
from fedquilt.tools.simulation import agents as fleet
from fedquilt.tools.simulation.local_backend import make_task_and_context

if __name__ == "__main__":
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


DEVICES = 3
ONLOOKER = str(Path(__file__).with_name("onlookers.py"))
KINDS = ("coordinator", "agent", "task", "broker")
ONLOOKERS = 2  # of a job of the command line
LIMIT_S = 600.0  # without a new fact
TASK_KILLS = 2  # of one board's task in one round: the third would have the board refuse it, as it should
FACTS = 4  # of a job's log that come at most between two kills
STEPS = (CohortSelected, UpdateAccepted, RoundCommitted)  # the facts that are counted
POLL_S = 0.05
IN_A_ROW = 4  # kills without an answer in between: else nothing would ever be done
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # method -> network, and how long a task is
    "fedprox": ("perceptron", {"engine": "numpy", "params": {"lr": 0.1, "batch": 8, "epochs": 150}}),
    "scaffold": ("batch-norm", {"engine": "torch", "params": {"lr": 0.05, "batch": 8, "epochs": 3}}),  # private state
    "buffered": (
        "perceptron",
        {
            "method": "fedprox",
            "engine": "numpy",
            "params": {"lr": 0.01, "batch": 8, "epochs": 150},
            "cohort": {"mode": "buffered", "size": 2, "start_devices": DEVICES},
            "check": {"every": 0},
        },
    ),
    "private": (
        "perceptron",
        {
            "method": "fedprox",
            "engine": "numpy",
            "params": {"lr": 0.01, "batch": 8, "epochs": 150},
            "check": {"every": 0},
            "privacy": {"epsilon": 8.0, "delta": 1e-3, "clip": 1.0},
        },
    ),
    "ditto": ("perceptron", {"engine": "numpy", "params": {"lr": 0.01, "batch": 8, "epochs": 80}}),  # likewise
    "apfl": ("batch-norm", {"engine": "torch", "params": {"lr": 0.05, "batch": 8, "epochs": 2}}),
    "fedala": ("batch-norm", {"engine": "torch", "params": {"lr": 0.05, "batch": 8, "epochs": 2, "first_passes": 2}}),
    "fedproto": ("batch-norm", {"engine": "torch", "params": {"lr": 0.05, "batch": 8, "epochs": 2}}),
}


class LostError(AssertionError):
    """Something that must hold after the kills does not."""


class Moments:
    """When somebody dies: so many facts after the kill before, and a share of the time between two facts after that.

    Both are drawn, and none is in seconds: of a job of so many facts a slow machine sees as many kills as a fast one.

    Args:
        roll: draws them.
        now_s: when the job begins.
    """

    def __init__(self, roll: random.Random, now_s: float) -> None:
        self._roll = roll
        self._event_counts, self._seen_s, self._between_s = 0, now_s, 0.0
        self.draw()

    def draw(self) -> None:
        """The next one, from what has been seen so far."""
        self._wanted = max(self._event_counts + self._roll.randint(0, FACTS), 1)
        self._share, self._from_s = self._roll.random(), -1.0

    def due(self, events: int, now_s: float) -> bool:
        """Whether it has come, with so many facts in the log."""
        if events > self._event_counts:
            self._event_counts, self._seen_s, self._between_s = events, now_s, now_s - self._seen_s
        if events >= self._wanted and self._from_s < 0:
            self._from_s = now_s
        return 0 <= self._from_s <= now_s - self._share * self._between_s


class Campaign:
    """One job and its federation in a folder.

    Args:
        folder: for everything of it.
        case: of `CASES`.
        roll: draws who dies, and when.
        kills: at most.
        rounds: of the job.
        kinds: of processes that are killed.
        onlookers: number of processes that look at the coordinator's home meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        case: str,
        roll: random.Random,
        kills: int,
        rounds: int = 6,
        kinds: Sequence[str] = KINDS,
        onlookers: int = 0,
    ) -> None:
        network, table = CASES[case]
        self.folder, self.killed = folder, Counter[str]()
        self._roll, self._kills, self._kinds = roll, kills, kinds
        self._onlookers = [f"onlooker-{number}" for number in range(onlookers)]  # from the first fact on
        self._next: list[str] = []  # kinds to kill: each once, before any of them again
        self._home = folder / "runs"
        self._log = folder / "all.log"
        self._bundle = prepare_bundle(network, folder / "job.bundle")
        job = {
            "name": "kills",
            "method": case,
            "rounds": rounds,
            "seed": 3,
            "cohort": {"start_devices": DEVICES, "min_devices": DEVICES},
            "check": {"every": 2},
            "fleet": {"devices": DEVICES, "boards": ["jetson-agx-orin"], "budgets": ["1GB", "4GB", "8GB"]},
            "data": {
                "path": str(write_digits(folder / "digits.npz")),
                "partition": "dirichlet",
                "alpha": 2.0,
                "min_size": 8,
            },
            **table,
        }
        (folder / "job.toml").write_text(toml.format_toml(job))
        self.plan = fleet.FleetPlan(settings.load_job(folder / "job.toml"), self._bundle, folder / "calm")
        self._tasks = Counter[tuple[str, int]]()  # kills of tasks, by board and round

    # -- with kills --

    def play(self) -> Counter[str]:
        """Run the job to its end among kills, and check what came of it; returns how often each kind was killed.

        Raises:
            LostError: something does not hold; the folder has the homes and the log.
        """
        (self.folder / "mosquitto").mkdir()
        broker = Mosquitto(self.folder / "mosquitto", ()).start()
        processes = Processes()
        try:
            self._run(processes, broker)
        finally:
            processes.end()
            broker.kill()
        self._require()
        return self.killed

    def _run(self, processes: Processes, broker: Mosquitto) -> None:
        run = ("run", str(self.folder / "job.toml"), "--home", str(self._home), "--broker", broker.url)
        commands = {"coordinator": run}
        for table in self.plan.make_agent_tables():
            name = table["device"]
            report = {**table, "home": str(self.folder / name), "broker": {"url": broker.url}, "warm_s": 600.0}
            (self.folder / f"{name}.toml").write_text(toml.format_toml(report))
            commands[name] = ("agent", str(self.folder / f"{name}.toml"))
        for name, command in commands.items():
            processes.start(name, self._log, *command)
        seen, moved_s, answers, row = 0, time.monotonic(), 0, 0
        moments = Moments(self._roll, moved_s)
        while not isinstance((found := self.facts() or [None])[-1], JobEnded):
            now_s = time.monotonic()
            for name in self._onlookers if found != [None] else ():
                if name not in processes.running:
                    self._look_on(processes, name)
            self._require_alive(processes)
            if len(found) != seen:
                seen, moved_s = len(found), now_s
            if now_s > moved_s + LIMIT_S:
                raise LostError(f"nothing has happened for {LIMIT_S:g} s: {self._words()}")
            if (count := sum(isinstance(event, UpdateAccepted) for event in found)) > answers:
                answers, row = count, 0
            due = moments.due(sum(isinstance(event, STEPS) for event in found), now_s)
            able = self.killed.total() < self._kills and row < IN_A_ROW
            if due and able and self._kill(processes, broker, commands, found):
                row += 1
                moments.draw()
            time.sleep(POLL_S)
        if processes.running["coordinator"].wait(timeout=60) != 0:
            raise LostError(f"the coordinator failed: {self._words()}")
        if "damaged" in (output := self._log.read_text(errors="replace")):
            raise LostError(f"something is called damaged, and nothing is: {output[-3000:]}")
        if found := sorted(path.name for path in self._home.glob("*.damaged")):  # by whoever looked, this process too
            raise LostError(f"there is {', '.join(found)}, and nothing is damaged")

    def _look_on(self, processes: Processes, name: str) -> None:
        processes.python(name, self._log, ONLOOKER, str(self._home), "kills", str(self._roll.random()))

    def _require_alive(self, processes: Processes) -> None:
        for name, process in processes.running.items():
            if code := process.poll():
                raise LostError(f"{name} has ended by itself, with {code}: {self._words()}")

    def _kill(
        self, processes: Processes, broker: Mosquitto, commands: Mapping[str, Sequence[str]], found: Sequence[Any]
    ) -> bool:
        """Kill one of the kind whose turn it is, and start it again; False: there is none just now."""
        self._next = self._next or self._roll.sample(self._kinds, len(self._kinds))
        kind = self._next[-1]
        device = self._roll.choice(sorted(commands.keys() - {"coordinator"}))
        if kind == "broker":
            broker.kill()
            broker.restart()
        elif kind == "task":
            round = max((event.round for event in found if isinstance(event, CohortSelected)), default=0)
            found_tasks = ((name, _task_of(process.pid)) for name, process in processes.running.items())
            tasks = {name: task for name, task in found_tasks if task is not None}
            able = sorted(name for name in tasks if self._tasks[name, round] < TASK_KILLS)
            if not able:
                return False
            device = self._roll.choice(able)
            with contextlib.suppress(ProcessLookupError):
                os.kill(tasks[device], signal.SIGKILL)
            self._tasks[device, round] += 1
        elif kind == "onlooker":
            name = self._roll.choice(self._onlookers)
            processes.kill(name)
            self._look_on(processes, name)
        else:
            name = device if kind == "agent" else kind
            processes.kill(name)
            processes.start(name, self._log, *commands[name])
            while kind == "coordinator" and not is_served(self._home) and processes.running[name].poll() is None:
                time.sleep(POLL_S)  # a look at its home would take up the log that it is to find there
        self.killed[self._next.pop()] += 1
        return True

    # -- afterwards --

    def facts(self) -> list[AnyEvent]:
        """The job's facts so far; none before it is queued."""
        return read_events(self._home, "kills")

    def _require(self) -> None:
        found = self.facts()
        last = found[-1]
        if not isinstance(last, JobEnded) or last.status != "done":
            raise LostError(f"the job has not been done: {last}")
        self.partial = 0
        if self.plan.job.cohort.mode == "buffered" or self.plan.job.privacy is not None:
            with Store(self._home) as store:
                secret = store.load_or_create_secret(store.find_job("kills").id)
            return require_replayed_states(self.plan, found, self.folder, secret)
        cohorts: list[frozenset[str]] = []
        for event in found:
            if isinstance(event, RoundCommitted):
                asked = {name for each in found if isinstance(each, CohortSelected) and each.round == event.round
                         for name in each.devices}  # fmt: skip
                counted = [
                    each.update.device
                    for each in found
                    if isinstance(each, UpdateAccepted) and each.round == event.round
                ]
                if sorted(counted) != sorted(asked):
                    raise LostError(f"round {event.round} asked {sorted(asked)}, and counted {sorted(counted)}")
                cohorts.append(frozenset(counted))
        self.partial = sum(len(cohort) < DEVICES for cohort in cohorts)
        run, undisturbed = calm(self.plan, cohorts)
        states = [event.state.sha256[:12] for event in found if isinstance(event, RoundCommitted)]
        wanted = [event.state.sha256[:12] for event in undisturbed if isinstance(event, RoundCommitted)]
        if states != wanted:
            raise LostError(f"states are {states}, and without kills {wanted}; boards: {[*map(sorted, cohorts)]}")
        with Store(self._home) as store:
            best = tensors.split_state(export.load_state(store, store.find_job("kills"), best=True))
        with Store(self.plan.home) as store:
            right = tensors.split_state(export.load_state(store, store.find_job(run), best=True))
        if tensors.encode_tensors(*best) != tensors.encode_tensors(*right):
            raise LostError("the best state is another one than without kills")
        for device in sorted(frozenset().union(*cohorts)):
            kept, right = private(self.folder / device), private(self.plan.get_agent_folder(run, device))
            if kept != right:
                raise LostError(f"{device} keeps the private state {kept}, and without kills {right}")

    def _words(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def require_replayed_states(plan: fleet.FleetPlan, found: Sequence[AnyEvent], folder: Path, secret: bytes) -> None:
    """Compute the states of a job from its events, the method's functions and the secret, and compare them.

    Raises:
        LostError: a state differs, or an update counts twice.
    """
    job, method = plan.job, methods.load(plan.job.method)
    members = {member.device: member for member in plan.load_devices()[0]}
    engine = engines.create_engine("numpy", 1 << 30)
    states = [settings.create_initial_state(job, load_bundle(plan.bundle), method)]
    job_state, private_sums = JobState(JobConstants.from_job(job)), PrivateSums.from_job(job, method, lambda: secret)
    counted, buffer = set[tuple[str, int]](), dict[str, int]()

    def update(device: str, base: int) -> DeviceUpdate:
        spec = method.send(states[base], DeviceView(device, None))
        assert spec is not None
        task, context = make_task_and_context(method, spec, members[device], folder / "replay", engine=engine)
        seed = seed_deriver(job.seed, job.name, base)(device)
        result = method.work(task, replace(context, rng=tensors.seeded_rng(seed)))
        # as sent: the names of a file are sorted
        bundles = {name: tensors.decode_tensors(tensors.encode_tensors(part)) for name, part in result.bundles.items()}
        return DeviceUpdate(device, base, result.weight, result.metrics, bundles)

    for event in found:
        if isinstance(event, UpdateAccepted):
            device, base = event.update.device, event.update.round
            if (device, base) in counted:
                raise LostError(f"an update of {device}, of round {base}, counts twice")
            counted.add((device, base))
            buffer[device] = base
        elif isinstance(event, UpdateLost):
            counted.remove((event.device, buffer.pop(event.device)))
        elif isinstance(event, RoundCommitted):
            total = None
            for device, base in sorted(buffer.items()):
                sent = update(device, base)
                if base < event.round and method.aggregation.change is not None:
                    weight = job.cohort.staleness.weight(event.round - base)
                    sent = method.aggregation.change.scale(states[-1], states[base], sent, weight)
                sent = sent if private_sums is None else private_sums.clip_update(states[-1], sent)
                total = method.aggregation.fold(states[-1], total, sent)
            total = total if private_sums is None else private_sums.add_noise(job_state, total)
            states.append(method.step(states[-1], total))
            buffer.clear()
            if hashlib.sha256(tensors.pack_state(states[-1])).hexdigest() != event.state.sha256:
                raise LostError(f"the state of round {event.round} is another one than its events give")
        job_state = apply_event(job_state, event, 0.0)


def calm(plan: fleet.FleetPlan, cohorts: Sequence[Collection[str]]) -> tuple[str, list[AnyEvent]]:
    """(run, facts) of a job in this process, where nothing happens; these boards take part in each round."""
    decide = decisions.decide_event

    def among(state: JobState, now_s: float, online: Collection[str], *rest: Any, **more: Any) -> AnyEvent | None:
        allowed = cohorts[state.round] if state.round < len(cohorts) else online
        return decide(state, now_s, {name for name in online if name in allowed}, *rest, **more)

    with mock.patch.object(decisions, "decide_event", among), contextlib.redirect_stdout(io.StringIO()):
        run, _ = fleet.run_fleet_virtually(plan)
    with Store(plan.home) as store:
        return run, [event for _, _, event in store.read_events(run)]


def _task_of(agent: int) -> int | None:
    """Process id of the task's process of an agent; None: there is none."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            if b"edge_agent.task" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def private(home: Path) -> tuple[str, str] | None:
    """(round, sha256) of the private state that a board keeps of the latest round that left any."""
    names = [path.name.rpartition("@")[2].split(".") for path in home.glob("private/*")]
    found = max(names, key=lambda name: int(name[0]), default=None)
    return None if found is None else (found[0], found[1])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder of its own, which is left where it is after an error."""
    folder = Path(tempfile.mkdtemp(prefix="fedquilt-kills-"))
    try:
        yield folder
    except BaseException:
        print(f"homes and logs: {folder}", flush=True)
        raise
    shutil.rmtree(folder)


def main(words: Sequence[str] | None = None) -> int:
    """Kill as often as the command line says; 1 when something was lost."""
    parser = argparse.ArgumentParser(description="kill a federation's processes at random")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=list(CASES), help="only this method; default: all in turn")
    options = parser.parse_args(words)
    if "torch" in {CASES[case][1]["engine"] for case in ([options.case] if options.case else CASES)}:
        import torch

        torch.set_num_threads(1)
    roll, killed, jobs, partial, began_s = random.Random(options.seed), Counter[str](), 0, 0, time.monotonic()
    while killed.total() < options.kills:
        case = options.case or list(CASES)[jobs % len(CASES)]
        jobs += 1
        with _folder() as folder:
            kinds = (*KINDS, "onlooker")
            campaign = Campaign(folder, case, roll, options.kills - killed.total(), kinds=kinds, onlookers=ONLOOKERS)
            try:
                killed += campaign.play()
            except LostError as error:
                print(f"{case}, job {jobs} of seed {options.seed}, after {dict(campaign.killed)}: {error}", flush=True)
                print(f"homes and logs: {folder}")
                return 1
        partial += campaign.partial
        print(f"{case}: {dict(campaign.killed)}; {killed.total()} of {options.kills} kills", flush=True)
    report = ", ".join(f"{count} {kind}" for kind, count in sorted(killed.items()))
    print(
        f"{killed.total()} kills ({report}) in {jobs} jobs, {partial} rounds without all boards: every state and "
        f"private state has the bits of a calm run, no update is lost; {time.monotonic() - began_s:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
