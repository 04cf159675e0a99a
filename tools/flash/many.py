"""`fedquilt flash --boards` as typed: flash the table, look who is there, and print how each board is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedquilt.core import JobError, LinkError
from fedquilt.edge_agent import settings as agents
from fedquilt.tools.flash import fleet
from fedquilt.tools.flash.fleet import Plan, Presences
from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt import MqttLink

CONNECT_S = 10.0
LOOK_S = 1.0  # in which a broker hands over what it keeps
CLIENT = "fedquilt-flash"


def main(table: Path, target: str | None, plan: Plan, *, watch: bool, cert: Path | None, key: Path | None) -> None:
    """Flash every board of a table that is not done yet, and print the states of all.

    Args:
        table: CSV file of boards.
        target: of rows without one.
        plan: what is flashed.
        watch: follow first boots and enrolments until all are there.
        cert: the coordinator's certificate; None: presence is not looked at.
        key: its key.

    Raises:
        JobError: a board was not flashed, or the table cannot be used.
    """
    rows = fleet.read(table, target)
    failed = fleet.flash(rows, plan)
    if plan.dry_run:
        return
    with _presences(plan, cert, key) as presences:
        wait: Callable[[float], None] = time.sleep if presences is None else presences.wait
        if presences is not None:
            presences.wait(LOOK_S)

        def look() -> list[fleet.State]:
            return fleet.states(rows, plan, failed, None if presences is None else presences.online)

        try:
            now = fleet.watch(look, wait, print) if watch else look()
        except KeyboardInterrupt:
            now = look()
    print("\n".join(fleet.lines(now)))
    if failed:
        raise JobError(
            f"{len(failed)} of {len(rows)} boards were not flashed: the same command again goes on with them"
        )


@contextmanager
def _presences(plan: Plan, cert: Path | None, key: Path | None) -> Iterator[Presences | None]:
    """Who is online; None: no certificate to look with, or the broker lets nobody in, which is printed."""
    if cert is None:
        yield None
        return
    known = agents.load(plan.what.settings)
    broker = Broker.parse(known.broker.url, ca=known.broker.ca, cert=cert, key=key, session_expiry_s=0)
    link = MqttLink(broker, CLIENT)
    try:
        presences = None
        try:
            link.connect(CONNECT_S)
            presences = Presences(link, known.fleet)
        except LinkError as error:  # boards enrol without the broker, and what was flashed is to be told
            print(f"who is online is not looked at: {error}", flush=True)
        yield presences
    finally:
        link.close()
