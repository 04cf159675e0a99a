"""A whole federation in one process on virtual time, with seeded faults: what the test-suite plays many seeds of.

    python -m fedquilt.tools.simulation.faults --seeds 0-199
    python -m fedquilt.tools.simulation.faults --seed 17 -v

One coordinator and a few agents run FedAvg for a few rounds over a MemoryBroker that drops,
duplicates, delays, reorders and corrupts messages, while both sides are killed in the middle of
what they do and started again on the same folders. Afterwards it must hold that no update was lost or
counted twice, that rounds only went forward, and that the final state equals the undisturbed
run's bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedquilt import bundle, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.executors import OverLink
from fedquilt.coordinator.facts import Answered, AnyFact, Committed
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.store import Store
from fedquilt.core import CODECS, FedquiltError
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices import make as make_board
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.transport.link import Endpoint, Faults, MemoryBroker, MemoryLink, simulate

DEVICES = 4
ROUNDS = 3
LIMIT_S = 400_000.0  # virtual; longer than any schedule of retries and restarts


class Crash(Exception):
    """The process is gone, in the middle of what it did."""


class BrokenError(FedquiltError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """Faults and their victims; probabilities are per message, crashes per published message."""

    faults: Faults = Faults()
    crash: float = 0.0
    deadline: str = "fixed"  # how the job finds its rounds' deadlines
    codec: str = "raw"  # of the job's updates

    @staticmethod
    def drawn(seed: int, codec: str = "raw") -> Scenario:
        """A seed's own mixture: from a little trouble to a lot."""
        roll = random.Random(seed)
        return Scenario(
            Faults(
                drop=roll.choice([0.0, 0.05, 0.2]),
                duplicate=roll.choice([0.0, 0.1, 0.3]),
                corrupt=roll.choice([0.0, 0.02, 0.1]),
                delay_s=roll.choice([0.01, 1.0, 10.0]),
            ),
            crash=roll.choice([0.0, 0.01, 0.03]),
            deadline=roll.choice(["fixed", "predicted", "paper"]),
            codec=codec,
        )


class FragileLink:
    """A MemoryLink whose owner may die at any publish."""

    def __init__(self, link: MemoryLink, roll: random.Random, crash: float) -> None:
        self._link, self._roll, self._crash = link, roll, crash
        self.subscribe, self.receive, self.wait, self.close = link.subscribe, link.receive, link.wait, link.close
        self.tended = link.tended
        self.max_payload, self.backlog = link.max_payload, link.backlog

    @property
    def session(self) -> int:
        """Session of the inner link."""
        return self._link.session

    @property
    def connected(self) -> bool:
        """Whether the inner link is connected."""
        return self._link.connected

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish, or crash before or after it with the given probability."""
        if self._roll.random() < self._crash / 2:
            raise Crash
        self._link.publish(topic, payload, retain=retain, reliable=reliable)
        if self._roll.random() < self._crash / 2:
            raise Crash


class Mortal:
    """A side that dies now and then, and is started again on the same folder after a while."""

    def __init__(self, broker: MemoryBroker, roll: random.Random, crash: float, start: Callable[..., Endpoint]) -> None:
        self._broker, self._roll, self._crash, self._start = broker, roll, crash, start
        self._inner: Endpoint | None = None
        self._up_s = 0.0
        self.link = broker.connect()

    @property
    def finished(self) -> bool:
        """Whether the endpoint has finished, and is not down."""
        return self._inner is not None and self._inner.finished

    def fds(self) -> Sequence[int]:
        """None: everything is on virtual time."""
        return ()

    def step(self, now_s: float) -> float:
        """Step the endpoint; after a crash it is started again once its down time is over."""
        if now_s < self._up_s:
            return self._up_s
        try:
            if self._inner is None:
                self.link = self._broker.connect()
                fragile = FragileLink(self.link, self._roll, self._crash)
                self._inner = self._start(fragile, self.link)
            return self._inner.step(now_s)
        except Crash:
            self._broker.lose(self.link)
            self._inner = None
            self._up_s = now_s + self._roll.uniform(0.1, 30.0)
            return self._up_s


class World:
    """One federation in one folder."""

    def __init__(self, seed: int, scenario: Scenario, home: Path, observe: Callable[[AnyFact], None]) -> None:
        self.home = home
        self._store: Store | None = None  # the running coordinator's
        self.broker = MemoryBroker(seed, scenario.faults, max_payload=4096)
        self._observe = observe
        table = {
            "name": "sim",
            "method": "fedavg",
            "rounds": ROUNDS,
            "engine": "numpy",
            "params": {"lr": 0.1, "batch": 4},
            "cohort": {
                "size": DEVICES,
                "min_devices": DEVICES,
                "deadline_s": LIMIT_S,
                "deadline": scenario.deadline,
            },
            "check": {"every": 2},
            "wire": {"codec": scenario.codec},
        }
        network = {"name": "mlp", "inputs": 16, "hidden": [], "classes": 3}
        first = tensors.encode(numpy_engine.init(network, seed=0))
        bundle.write(home / "bundle", {"network": network, "flops": 96}, {"model": first})
        data = np.random.default_rng(0)
        for index in range(DEVICES):
            np.savez(home / f"data-{index}.npz", x=data.random((12, 4, 4), np.float32), y=data.integers(0, 3, 12))
        with Store(home / "coordinator") as store:
            self.job = store.add(settings.parse(table), home / "bundle")
        roll = random.Random(seed + 1)
        self.coordinator = Mortal(self.broker, roll, scenario.crash, self._coordinator)
        self.agents = [
            Mortal(self.broker, roll, scenario.crash, lambda link, raw, index=index: self._agent(link, raw, index))
            for index in range(DEVICES)
        ]

    def run(self) -> None:
        """Until the job has ended.

        Raises:
            BrokenError: it does not end.
        """
        sides = [self.coordinator, *self.agents]

        def present() -> list[tuple[MemoryLink, Endpoint]]:
            return [(side.link, side) for side in sides]

        try:
            simulate(self.broker, present, lambda: self.coordinator.finished, limit_s=LIMIT_S)
        except TimeoutError as error:
            raise BrokenError(f"the job does not end: {error}") from None
        finally:
            if self._store is not None:
                self._store.close()

    def facts(self) -> list[AnyFact]:
        """Facts of the job so far."""
        with Store(self.home / "coordinator") as store:
            return [fact for _, _, fact in store.facts(self.job)]

    def _coordinator(self, link: FragileLink, raw: MemoryLink) -> Server:
        if self._store is not None:
            self._store.close()  # as the kernel does for a process that is gone
        self._store = Store(self.home / "coordinator")
        executor = OverLink(link, "sim", self._store.depot, self._store.next_epoch())
        return Server(executor, self._store, lambda job, fact: self._observe(fact), only=self.job)

    def _agent(self, link: FragileLink, raw: MemoryLink, index: int) -> Agent:
        device = f"dev-{index}"
        board = make_board("jetson-nano")
        options = AgentSettings(
            device=device,
            fleet="sim",
            home=str(self.home / device),
            data={"path": str(self.home / f"data-{index}.npz"), "held": 0.25},
        )
        return Agent(link, options, board, InlineWorker(board))


def check(facts: Sequence[AnyFact]) -> str:
    """The final state's sha256.

    Raises:
        BrokenError: an update was lost or counted twice, or rounds did not go forward one by one.
    """
    committed = [fact.round for fact in facts if isinstance(fact, Committed)]
    if committed != list(range(ROUNDS + 1)):
        raise BrokenError(f"rounds committed: {committed}")
    counted = Counter((fact.round, fact.update.device) for fact in facts if isinstance(fact, Answered))
    wanted = {(round, f"dev-{index}") for round in range(ROUNDS + 1) for index in range(DEVICES)}
    if set(counted) != wanted or max(counted.values()) != 1:
        odd = {key: n for key, n in counted.items() if n != 1} | dict.fromkeys(wanted - counted.keys(), 0)
        raise BrokenError(f"updates not counted exactly once: {odd}")
    last = [fact for fact in facts if isinstance(fact, Committed)][-1]
    return last.state.sha256


def play(seed: int, scenario: Scenario, observe: Callable[[AnyFact], None] = lambda fact: None) -> str:
    """Run one federation; the sha256 of the state it ends with.

    Raises:
        BrokenError: an invariant does not hold.
    """
    shared = Path("/dev/shm")  # noqa: S108 - thousands of fsyncs, of files nobody keeps
    home = Path(tempfile.mkdtemp(prefix="fedquilt-sim-", dir=shared if shared.is_dir() else None))
    try:
        world = World(seed, scenario, home, observe)
        world.run()
        return check(world.facts())
    finally:
        shutil.rmtree(home)


def verify(
    seed: int, undisturbed: str, observe: Callable[[AnyFact], None] = lambda fact: None, codec: str = "raw"
) -> None:
    """Play one seed's troubles.

    Raises:
        BrokenError: an invariant does not hold; says how to replay it.
    """
    try:
        ended = play(seed, Scenario.drawn(seed, codec), observe)
        if ended != undisturbed:
            raise BrokenError(f"the final state {ended[:12]} is not the undisturbed run's {undisturbed[:12]}")
    except BrokenError as error:
        raise BrokenError(
            f"seed {seed}: {error}; replay: python -m fedquilt.tools.simulation.faults --seed {seed} --codec {codec} -v"
        ) from None


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(description="play federations with seeded faults")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0-199", metavar="FIRST-LAST")
    parser.add_argument("--codec", choices=CODECS, default="raw")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.CRITICAL)
    first, _, last = options.seeds.partition("-")
    seeds = [options.seed] if options.seed is not None else range(int(first), int(last or first) + 1)
    undisturbed = play(0, Scenario(codec=options.codec))
    for seed in seeds:
        verify(seed, undisturbed, (lambda fact: print(fact)) if options.verbose else lambda fact: None, options.codec)
    print(f"{len(seeds)} seeds: nothing lost, nothing counted twice, every final state {undisturbed[:12]}")


if __name__ == "__main__":
    main()
