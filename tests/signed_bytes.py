"""What it costs in bytes that messages are signed: the same fleet on a broker in memory, without and with certificates.

    python tests/signed_bytes.py --rounds 20

Coordinator and boards are those of `fedquilt simulate --virtual`. Signed links, handshakes and certificates
are those of a fleet with an authority of its own. Every byte that is published is counted once, topics included, by the
kind of message, but for what boards say of themselves when they begin: how often that is depends on who begins first.
What TLS between a client and its broker adds is not counted either.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from certified import Certified
from processes import DIGITS

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.tools.simulation import agents as fleet
from fedquilt.transport.memory_link import MemoryBroker

BOARDS: Final = 3
MOST: Final = 0.03  # share of bytes that signatures may add to a model of the usual size
MODELS: Final[Mapping[str, list[int]]] = {  # neurons of the hidden layers, between 64 numbers and 10 classes
    "650 numbers": [],
    "4,810 numbers": [64],
    "105,610 numbers": [1400],
}
BEGINNING: Final = ("presence", "profile", "coord")
USUAL: Final = ("4,810 numbers", "105,610 numbers")


class Spent(NamedTuple):
    """Bytes that were published, by kind of message; and how many messages."""

    size: Counter[str]
    count: Counter[str]


class Counting(MemoryBroker):
    """A broker that counts."""

    def __init__(self, spent: Spent, *given: Any) -> None:
        super().__init__(*given)
        self._spent = spent

    def _receive_message(self, topic: str, payload: bytes, retain: bool) -> None:
        kind = wire.parse_topic(topic).leaf
        if kind not in BEGINNING:
            self._spent.size[kind] += len(topic) + len(payload)
            self._spent.count[kind] += 1
        super()._receive_message(topic, payload, retain)


def played(folder: Path, hidden: list[int], rounds: int, *, signed: bool) -> Spent:
    """Bytes of a job of `rounds` rounds with a network of these hidden layers."""
    network = {"name": "mlp", "inputs": 64, "hidden": hidden, "classes": 10}
    first = numpy_engine.init_tensors(network, seed=0)
    job_bundle.write_bundle(
        folder / "job.bundle", {"network": network, "flops": 9600}, {"model": tensors.encode_tensors(first)}
    )
    job = {
        "name": "digits",
        "method": "fedprox",
        "engine": "numpy",
        "rounds": rounds,
        "params": {"lr": 0.1, "batch": 256, "epochs": 1},
        "cohort": {"start_devices": BOARDS},
        "fleet": {"devices": BOARDS, "boards": ["jetson-nano"], "budgets": ["2GB"]},
        "data": {"path": str(DIGITS), "partition": "classes", "classes": 4},
    }
    plan = fleet.FleetPlan(settings.parse_job(job), folder / "job.bundle", folder / "runs")
    spent = Spent(Counter(), Counter())
    made: list[MemoryBroker] = []

    def broker(*given: Any) -> MemoryBroker:
        made.append(Counting(spent, *given))
        return made[-1]

    def clock() -> float:
        return made[-1].now_s

    with mock.patch.multiple(fleet, MemoryBroker=broker):
        if not signed:
            _, ended = fleet.run_fleet_virtually(plan)
        else:
            certified = Certified(folder)

            def coordinator(*given: Any) -> LinkExecutor:
                return LinkExecutor(*given, identity=LinkIdentity(certified.broker("coordinator", "coordinator")))

            def agent(link: Any, options: Any, *given: Any, **more: Any) -> Agent:
                name = options.device
                own = AuthenticatedDeviceLink(link, LinkIdentity(certified.broker(name)), plan.fleet, name, clock)
                return Agent(own, options, *given, **more)

            with mock.patch.multiple(fleet, LinkExecutor=coordinator, Agent=agent):
                _, ended = fleet.run_fleet_virtually(plan)
    assert ended == "done", ended
    return spent


def compared(name: str, rounds: int) -> tuple[float, Spent, Spent]:
    """The share of bytes that signatures add to one of MODELS, and the bytes without and with them."""
    found = []
    for signed in (False, True):
        quiet = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory(prefix="fedquilt-signed-") as folder, quiet:
            found.append(played(Path(folder), MODELS[name], rounds, signed=signed))
    plain, sealed = found
    return sealed.size.total() / plain.size.total() - 1, plain, sealed


def main() -> int:
    """Print what signatures add; 1 when it is more than MOST for one of the usual models."""
    parser = argparse.ArgumentParser(description="count the bytes of a fleet without and with signatures")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    worst = 0.0
    for name in options.models:
        share, plain, sealed = compared(name, options.rounds)
        each = options.rounds * BOARDS
        print(
            f"{name}: {plain.size.total() / each:,.0f} bytes a board and round, {sealed.size.total() / each:,.0f} "
            f"signed ({share:+.2%})"
        )
        for kind, size in (sealed.size - plain.size).most_common():
            print(f"  {kind:10} {size / each:+8.0f} bytes  {sealed.count[kind] / each:5.2f} messages")
        worst = max(worst, share if name in USUAL else 0.0)
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
