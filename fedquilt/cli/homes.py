"""What several verbs do: read a job, open a home with runs in it, follow a run to its end, print rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fedquilt import columns, disk
from fedquilt.cli.commands import wordy
from fedquilt.cli.options import Blobs, Broker
from fedquilt.core import JobError, StoreError

ENDED: Final = {"done": 0, "failed": 8, "stopped": 9}


def existing(home: Path) -> Any:
    """The store in a home, which must be there already.

    Raises:
        StoreError: there is none.
    """
    from fedquilt.coordinator.store import Store

    require(home)
    return Store(home)


def require(home: Path) -> None:
    """Refuse a folder that is no home of a coordinator.

    Raises:
        StoreError: it is none, or it cannot be looked into.
    """
    with disk.doing(f"look into {home}"):
        found = disk.REAL.stat(home / "fedquilt.db")
    if found is None or found.is_dir:
        raise StoreError(empty(home))


def empty(home: Path) -> str:
    """That a home has no run, and the mend."""
    return f"no runs in {home}: `fedquilt run` or `fleet` begins one, --home names another folder"


def load_job(path: Path) -> Any:
    """The job in a file; what only tools read of it is checked here, where its file is known.

    Raises:
        JobError: as `coordinator.settings.load`, or a key of [data] or [test] that is wrong.
    """
    from fedquilt import config
    from fedquilt.coordinator import settings
    from fedquilt.data.spec import DataSpec

    job = settings.load(path)
    with config.naming(str(path)):
        if job.data:
            DataSpec.parse(job.data)
        if job.test:
            from fedquilt.coordinator.views import scores

            DataSpec.parse(scores.test_table(job), "[test]")
    return job


def bundle_of(job: Path, given: Path | None) -> Path:
    """The bundle's folder: as given, or beside the job file."""
    return given or job.with_name(job.stem + ".bundle")


def link_to(broker: Broker, say: Callable[[str], None]) -> tuple[Any, Any]:
    """The coordinator's link, and with what it proves who it is; None: it is unsigned, which is said.

    The link is not connected yet: a daemon waits for its broker, a command asks for it.
    """
    from fedquilt import wire
    from fedquilt.transport import sealed
    from fedquilt.transport.broker import Broker as Address
    from fedquilt.transport.mqtt import MqttLink

    will = (wire.Topics(broker.fleet).coord, wire.encode(wire.CoordState(online=False)))
    address = Address.parse(**broker.table())
    identity = sealed.identity(address)
    if identity is None:
        say(sealed.UNSIGNED)
    return MqttLink(address, f"fedquilt-coordinator-{broker.fleet}", will), identity


def follow(home: Path, broker: Broker, blobs: Blobs, store: Any, submit: Callable[[], str]) -> int:
    """Submit a job and run it to its end: here, unless a coordinator serves this home already; returns the exit code.

    Who runs it is settled before `submit` returns its id: a coordinator that ends over the job, for a full disk say,
    does not make this process the next one, at a broker that nobody named.

    Raises:
        JobError: places of blobs are wrong, or the home's limits.toml is.
    """
    from fedquilt.coordinator import limits
    from fedquilt.coordinator.views import terminal

    where, limited = blobs.where(broker.ca), limits.load_limits(home)
    here, id = store.lock(), submit()
    print(f"{id}; from elsewhere: `fedquilt logs {id} --follow --home {home.resolve()}`", flush=True)
    if here:
        console = terminal.Console(wordy=wordy() > 0)
        link, identity = link_to(broker, console.say)
        link.connect(timeout_s=5.0)
        terminal.run_coordinator(
            store, link, broker.fleet, console, only=id, identity=identity, limits=limited, where=where
        )
    else:
        if blobs.given:
            print(f"{blobs.given[0]} has no effect: a coordinator serves {home}, by the options of its own command")
        terminal.print_log(store, id, follow=True)
    return ended(home, id, store.status(id), f"fedquilt resume {id}")


def ended(home: Path, id: str, status: str, again: str) -> int:
    """Say what can be done now; the exit code. `again` is the command that continues it."""
    if status == "running":
        print(f"interrupted; `{again} --home {home}` continues it")
    elif status == "done" and id:
        print(f"done; `{export_command(home, id)}` writes its result")
    return ENDED.get(status, 130)


def export_command(home: Path, id: str) -> str:
    """The command that writes a run's result."""
    return f"fedquilt export {id} --home {home} --out FILE"


def agreed(question: str, yes: bool) -> bool:
    """Whether the person at the terminal agrees; `yes` is --yes, the answer of whoever cannot be asked.

    Raises:
        JobError: there is no terminal to ask on.
    """
    import click

    if yes:
        return True
    if not sys.stdin.isatty():
        raise JobError(f"{question} There is no terminal to ask on: --yes answers it")
    return click.confirm(question, err=True)


def swept(found: Any) -> str:
    """What a removal freed, in a sentence."""
    from fedquilt import units

    said = f"{units.size(found.bytes)} freed"
    return f"{said}; blobs go when the coordinator of this home takes up its next job" if found.blobs_left else said


def show(format: str, rows: Any, lines: Sequence[str]) -> None:
    """Print lines, or the rows that they tell of as JSON."""
    if format == "json":
        import msgspec

        print(msgspec.json.encode(rows).decode())
    elif lines:
        print("\n".join(part for line in lines for part in columns.fold(line)))
