"""Implementation of `fedquilt flash --boards`."""

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


def flash_table(
    table: Path, target: str | None, plan: Plan, *, watch: bool, cert: Path | None, key: Path | None
) -> None:
    """Flash the boards of a table that are not done yet, and print the states of all.

    Args:
        table: CSV file of boards.
        target: Target of rows without one.
        plan: Settings, packages and output folder.
        watch: Whether to wait until all boards are enrolled or online.
        cert: The coordinator's certificate, or None to skip the check of presence.
        key: Private key of the certificate.

    Raises:
        JobError: If a board was not flashed, or the table is unusable.
    """
    rows = fleet.read_table(table, target)
    failed = fleet.flash_boards(rows, plan)
    if plan.dry_run:
        return
    with _connect_presences(plan, cert, key) as presences:
        wait: Callable[[float], None] = time.sleep if presences is None else presences.process_messages
        if presences is not None:
            presences.process_messages(LOOK_S)

        def current_states() -> list[fleet.State]:
            return fleet.read_states(rows, plan, failed, None if presences is None else presences.online)

        try:
            now = fleet.watch_boards(current_states, wait, print) if watch else current_states()
        except KeyboardInterrupt:
            now = current_states()
    print("\n".join(fleet.format_states(now)))
    if failed:
        raise JobError(
            f"{len(failed)} of {len(rows)} boards were not flashed: the same command again goes on with them"
        )


@contextmanager
def _connect_presences(plan: Plan, cert: Path | None, key: Path | None) -> Iterator[Presences | None]:
    # without a connection, boards enrol all the same and their states are still printed
    if cert is None:
        yield None
        return
    known = agents.load_settings(plan.what.settings)
    broker = Broker.from_url(known.broker.url, ca=known.broker.ca, cert=cert, key=key, session_expiry_s=0)
    link = MqttLink(broker, CLIENT)
    try:
        presences = None
        try:
            link.wait_until_connected(CONNECT_S)
            presences = Presences(link, known.fleet)
        except LinkError as error:  # boards enrol without the broker, and what was flashed is to be told
            print(f"who is online is not looked at: {error}", flush=True)
        yield presences
    finally:
        link.close()
