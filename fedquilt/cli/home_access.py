"""Common steps of several verbs: reading jobs, opening homes, running to the end, printing rows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedquilt.cli.commands import verbosity
from fedquilt.cli.options import HOME, BlobOptions, BrokerOptions
from fedquilt.console import table
from fedquilt.core import JobError, StoreError
from fedquilt.host import disk

if TYPE_CHECKING:
    from fedquilt.coordinator.jobs.retention import RemovedFiles
    from fedquilt.coordinator.settings import JobSettings
    from fedquilt.coordinator.storage.store import Store
    from fedquilt.security.handshake import LinkIdentity
    from fedquilt.transport.mqtt.link import MqttLink

EXIT_CODES: Final = {"done": 0, "failed": 8, "stopped": 9}


def open_existing_home(home: Path) -> Store:
    from fedquilt.coordinator.storage.store import open_store

    require_home(home)
    return open_store(home)


def require_home(home: Path) -> None:
    with disk.disk_errors(f"look into {home}"):
        found = disk.REAL.stat(home / "fedquilt.db")
    if found is None or found.is_dir:
        raise StoreError(no_runs_message(home))


def no_runs_message(home: Path) -> str:
    return f"no runs in {home}: `fedquilt run` or `simulate` begins one, --home names another folder"


def load_job(path: Path) -> JobSettings:
    """Load a job file, and check its [data] and [test] tables too.

    Raises:
        JobError: If the file cannot be read, is not a job, or has a wrong key or value.
    """
    from fedquilt.coordinator import settings
    from fedquilt.data.spec import DataSpec
    from fedquilt.formats import toml

    job = settings.load_job(path)
    with toml.prefix_errors(str(path)):
        if job.data:
            DataSpec.parse(job.data)
        if job.test:
            from fedquilt.coordinator.views import scores

            DataSpec.parse(scores.make_test_table(job), "[test]")
    return job


def bundle_folder(job: Path) -> Path:
    return job.with_name(job.stem + ".bundle")


def create_coordinator_link(broker: BrokerOptions, say: Callable[[str], None]) -> tuple[MqttLink, LinkIdentity | None]:
    """Return the unconnected MQTT link of the coordinator, and the identity for signing or None.

    Unsigned messages are reported through `say`.
    """
    from fedquilt import wire
    from fedquilt.security import authenticated_link
    from fedquilt.transport.mqtt.broker import Broker as Address
    from fedquilt.transport.mqtt.link import MqttLink

    will = (wire.Topics(broker.fleet).coord, wire.encode(wire.CoordState(online=False)))
    address = Address.from_url(**broker.to_table())
    identity = authenticated_link.load_identity(address)
    if identity is None:
        say(authenticated_link.UNSIGNED)
    return MqttLink(address, f"fedquilt-coordinator-{broker.fleet}", will), identity


def run_to_end(home: Path, broker: BrokerOptions, blobs: BlobOptions, store: Store, submit: Callable[[], str]) -> int:
    """Submit a job, run it to its end and return the exit code.

    The job runs in this process, or in the coordinator that serves the home. This is decided before `submit`, so that
    the process does not replace a coordinator that fails because of the job.

    Raises:
        JobError: If blob locations or the home's limits.toml are wrong.
    """
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.views import terminal

    where, limited = blobs.to_locations(broker.ca), settings.load_limits(home)
    here = store.acquire_lock()
    if here:
        console = terminal.Console(wordy=verbosity() > 0)
        link, identity = create_coordinator_link(broker, console.report)
    id = submit()
    print_rows("text", [], [f"{id}; from elsewhere: `fedquilt logs {id} --follow --home {home.resolve()}`"])
    if here:
        link.wait_until_connected(timeout_s=5.0)
        terminal.run_coordinator(
            store, link, broker.fleet, console, only=id, identity=identity, limits=limited, where=where
        )
    else:
        if blobs.given_options:
            print(
                f"{blobs.given_options[0]} has no effect: a coordinator serves {home}, by the options of its "
                "own command"
            )
        terminal.print_log(store, id, follow=True, wordy=verbosity() > 0)
    return report_end(home, id, store.stored_status(id), f"fedquilt resume {id}")


def report_end(home: Path, id: str, status: str, again: str) -> int:
    """Print the next step after a run, and return the exit code. `again` is the resuming command."""
    told = f"interrupted; `{again} --home {shlex.quote(str(home))}` continues it" if status == "running" else ""
    if status == "done" and id:
        told = f"`{export_command(home, id)}` writes the result"
    print_rows("text", [], [told] if told else [])
    return EXIT_CODES.get(status, 130)


def export_command(home: Path, id: str) -> str:
    given = "" if home == HOME else f" --home {home}"
    return f"fedquilt model export {id}{given} --out FILE"


def confirm(question: str, yes: bool) -> bool:
    """Return whether the user confirms a question, or True with `yes`.

    Raises:
        JobError: If there is no terminal.
    """
    import click

    if yes:
        return True
    if not sys.stdin.isatty():
        raise JobError(f"{question} There is no terminal to ask on: --yes answers it")
    return click.confirm(question, err=True)


def format_freed_space(found: RemovedFiles) -> str:
    from fedquilt.console import units

    said = f"{units.format_bytes(found.bytes)} freed"
    return f"{said}; blobs go when the coordinator of this home takes up its next job" if found.blobs_left else said


def print_rows(format: str, rows: Any, lines: Sequence[str]) -> None:
    if format == "json":
        import msgspec

        print(msgspec.json.encode(rows).decode())
    elif lines:
        print("\n".join(part for line in lines for part in table.fold_line(line)), flush=True)
