"""Commands that show and delete a coordinator's runs and devices."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb, verb_group, verbosity
from fedquilt.console import progress, table, units
from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt.coordinator.views.devices import DeviceRow


def complete_devices(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from fedquilt.coordinator.views import devices
    from fedquilt.core import FedquiltError

    home = Path(context.params.get("home") or options.HOME)
    try:
        rows = devices.load_devices(home) if (home / "fedquilt.db").is_file() else []
    except (FedquiltError, OSError):
        return []
    return [row.board.device for row in rows if row.board.device.startswith(incomplete)]


@verb()
@options.home_option
@options.format_option
def ls(home: Path, format: str) -> None:
    """List the runs in --home with status, rounds, result and exclusive disk space."""
    from fedquilt.coordinator.jobs import retention
    from fedquilt.coordinator.views import event_messages, job_changes
    from fedquilt.security import authenticated_link

    with home_access.open_existing_home(home) as store:
        exclusive = retention.exclusive_bytes(store)
        stored = store.all_jobs()
        changes = job_changes.describe_changes(stored)
        rows = [event_messages.summarise_run(row, store, exclusive, changes) for row in stored]
        notes = [authenticated_link.UNSIGNED] if store.was_authenticated() is False else []
    home_access.print_rows(
        format, rows, [*(event_messages.format_runs(rows) or [home_access.no_runs_message(home)]), *notes]
    )


@verb()
@options.run_argument
@option("--follow", is_flag=True, help="Show the rounds of the run until it has ended; with -v, every event.")
@options.home_option
@options.format_option
def logs(run: str, follow: bool, home: Path, format: str) -> None:
    """Show the events of a run, round by round."""
    from fedquilt.coordinator.views import terminal

    with home_access.open_existing_home(home) as store:
        terminal.print_log(store, store.find_job(run).id, follow=follow, json=format == "json", verbose=verbosity() > 0)


@verb()
@options.run_argument
@argument("number", "Show this round only, counted from 1.", type=options.INTEGER, metavar="[ROUND]", required=False)
@option("--device", type=options.NAME, metavar="D", help="Show this device only.", shell_complete=complete_devices)
@options.home_option
@options.format_option
def why(run: str, number: int | None, device: str | None, home: Path, format: str) -> None:
    """Explain the selection of devices in each round, and the outcome of their tasks."""
    from fedquilt.coordinator.rounds import privacy
    from fedquilt.coordinator.views import event_messages, wait_reasons
    from fedquilt.coordinator.views import round_outcomes as reasons

    with home_access.open_existing_home(home) as store:
        outcomes, row = reasons.load_outcomes(store, run), store.find_job(run)
        wait_reason = wait_reasons.describe_wait(row, store)
        warning = reasons.warn_of_weights(store, row.job, (event for _, _, event in store.read_events(row.id)))
    is_unfiltered = number is None and device is None
    notes = [f"{row.id} waits for {wait_reason}"] if wait_reason and is_unfiltered else []
    notes += [warning] if warning and is_unfiltered else []
    if is_unfiltered and (best := outcomes.summary.state.best) is not None:
        notes.append(f"best evaluation: {best.describe()}, {best.without_gain} later without a gain")
    if is_unfiltered and (budget := privacy.describe_spent_budget(outcomes.summary.state)):
        notes.append(budget)
    if is_unfiltered and outcomes.summary.state.phase == row.status == "failed":
        notes += event_messages.format_end("failed", outcomes.summary.state.reason)
    contributions = reasons.format_contributions(outcomes.summary, device) if number is None else []
    lines = [*reasons.format_outcomes(outcomes, number, device), *contributions, *notes]
    home_access.print_rows(
        format,
        reasons.filter_outcomes(outcomes.by_round, number, device),
        lines or [f"{row.id} is {row.status}, and no round has begun"],
    )


@verb()
@options.run_argument
@option("--out", type=options.PATH, metavar="FILE", help="File for the page (default: RUN.html).")
@options.home_option
def report(run: str, out: Path | None, home: Path) -> None:
    """Write an HTML page about a run: accuracy, time, energy, memory and participants."""
    from fedquilt.tools import report as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"writing the report of {run}"):
        line = f"{tool.write_run_page(store, run, out)}: {store.find_job(run).id}"
        progress.LINE.print_to_stdout(*table.fold_line(line))


@verb()
@argument(
    "runs",
    "Ids of runs to delete; a job's name stands for its latest run.",
    nargs=-1,
    metavar="[RUN]...",
    shell_complete=options.complete_runs,
)
@option("--keep", type=options.COUNT, metavar="N", help="Delete all ended runs except the N latest.")
@option(
    "--older-than", type=options.TIME, metavar="AGE", help="Delete runs that ended longer ago than this: 30d, 12h, 2w."
)
@option("--dry-run", is_flag=True, help="List the runs that would be deleted, and delete nothing.")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.home_option
def prune(
    runs: tuple[str, ...], keep: int | None, older_than: float | None, dry_run: bool, yes: bool, home: Path
) -> int:
    """Delete named runs, or ended runs by age or number.

    With both --keep and --older-than, a run must match both. Queued, running and interrupted runs are deleted only by
    name. Without any of these, only leftover files of interrupted deletions are removed.
    """
    from fedquilt.coordinator.jobs import retention

    is_by_age = keep is not None or older_than is not None
    if runs and is_by_age:
        raise click.UsageError("RUN is not possible with --keep or --older-than", click.get_current_context())
    with home_access.open_existing_home(home) as store:
        ids = retention.select_expired_runs(store, time.time(), keep, older_than) if is_by_age else []
        if runs:
            ids = list(dict.fromkeys(retention.find_run(store, run).id for run in runs))
            store.require_inactive(ids)
        for id in ids:
            print(f"{'would delete' if dry_run else 'to delete'} {id}")
        if dry_run:
            return 0
        if ids and not _confirm(f"delete {len(ids)} runs for good?", yes):
            return 130
        removed = retention.remove_runs(store, ids)
    freed = f"{units.format_bytes(removed.bytes)} freed"
    remaining = "; the coordinator deletes blobs when it starts its next job" if removed.blobs_left else ""
    print(f"deleted {len(ids)} runs: {freed}{remaining}")
    return 0


def _confirm(question: str, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise JobError(f"{question} There is no terminal for the answer: confirm with --yes")
    return click.confirm(question, err=True)


@verb_group()
def backup() -> None:
    """Save a coordinator's home to one file, and restore it."""


@backup.command()
@argument("home", "Folder of the coordinator's runs.", type=options.FOLDER)
@argument("file", "New file.", type=options.PATH)
def save(home: Path, file: Path) -> None:
    """Save a coordinator's home to one file, also while a coordinator runs."""
    from fedquilt.coordinator.storage import backup as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"saving {home}"):
        saved = tool.write_backup(store, file)
    print(f"{file}: {saved.runs} runs with {saved.files} blobs, {units.format_bytes(saved.bytes)}")


@backup.command()
@argument("file", "Backup written by `backup save`.", type=options.PATH)
@argument("home", "New or empty folder.", type=options.FOLDER)
def restore(file: Path, home: Path) -> None:
    """Restore a coordinator's home from a verified backup, with resumable runs."""
    from fedquilt.coordinator.storage import backup as tool

    with progress.show_progress(f"restoring {home}"):
        restored = tool.restore_backup(file, home)
    size = units.format_bytes(restored.bytes)
    print(f"{home}: {restored.runs} runs, {size}; `fedquilt serve --home {home}` continues them")


@verb()
@argument(
    "names", "Names of devices; without one, all.", nargs=-1, metavar="[NAME]...", shell_complete=complete_devices
)
@options.label_option("label")
@option(
    "--state",
    type=options.WordChoice(("online", "offline", "silent", "working", "idle", "refused")),
    help="State of the devices; refused: with a declined task or rejected update.",
)
@option("--remove", is_flag=True, help="Remove the named devices, until their next message.")
@option("--force", is_flag=True, help="With --remove: also devices that have a task.")
@option("--watch", is_flag=True, help="Keep running, and show every change.")
@options.home_option
@options.format_option
def devices(
    names: tuple[str, ...],
    label: tuple[str, ...],
    state: str | None,
    remove: bool,
    force: bool,
    watch: bool,
    home: Path,
    format: str,
) -> None:
    """Show each device's state, task, power, memory, refusals and labels, or remove devices."""
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.storage.rows import is_served
    from fedquilt.coordinator.views import devices as view
    from fedquilt.formats import labels

    labels.require_valid_selection(label)
    home_access.require_home(home)
    if remove:
        if not names or label or state or watch:
            raise JobError("--remove requires NAMEs of devices, and is not possible with --label, --state or --watch")
        with home_access.open_existing_home(home) as store:
            print("\n".join(table.fold_line(run_control.remove_devices(store, names, force=force), 0)))
        return None
    if force:
        raise JobError("--force requires --remove")

    def read_devices() -> list[DeviceRow]:
        all_rows = view.load_devices(home)
        if unknown := set(names) - {row.board.device for row in all_rows}:
            raise JobError(f"device {min(unknown)!r} is unknown in {home}: `fedquilt devices` lists the devices")
        rows = view.filter_devices(all_rows, label, state)
        return [row for row in rows if not names or row.board.device in names]

    def print_devices(rows: list[DeviceRow]) -> None:
        now = time.time()
        lines = (
            []
            if format == "json"
            else view.format_devices(rows, now, is_served=is_served(home), outage=view.describe_outage(home, now))
        )
        if watch and format == "text" and sys.stdout.isatty():
            max_lines = shutil.get_terminal_size().lines - 2
            hidden = ["... and more: --label, --state or a NAME shows fewer"] if len(lines) > max_lines else []
            print("\x1b[H\x1b[2J", end="")
            lines = [*lines[: max_lines - len(hidden)], *hidden]
        home_access.print_rows(format, [row.to_dict() for row in rows], lines)
        sys.stdout.flush()

    if not watch:
        return print_devices(read_devices())
    view.watch_devices(print_devices, read_devices)
