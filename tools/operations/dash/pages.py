"""Values of the dashboard's pages for JSON."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from fedquilt.coordinator import run_control
from fedquilt.coordinator.rounds.events import ENDED_PHASES
from fedquilt.coordinator.rounds.rollout import StatusReported
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage import store
from fedquilt.coordinator.storage.rollout_log import StoredRollout
from fedquilt.coordinator.storage.rows import UnreadableRow
from fedquilt.coordinator.storage.store import StoredJob
from fedquilt.coordinator.views import devices, round_outcomes
from fedquilt.coordinator.views import rollouts as view
from fedquilt.coordinator.views.devices import DeviceRow
from fedquilt.core import FedquiltError, JobError
from fedquilt.formats import labels
from fedquilt.tools.operations.dash import run_follower
from fedquilt.tools.operations.dash.home_watcher import HomeWatcher, NotFoundError

Query = Mapping[str, str]

PAGE_ROWS: Final = 100
PAGE_DEVICES: Final = 30
PAGE_CELLS: Final = 2_000
MAX_DEVICE_ROUNDS: Final = 60
SPANS: Final = {"2h": 2 * 3600.0, "2d": 2 * 86400.0, "30d": 30 * 86400.0}
MAX_LOG_LINES: Final = 300

_SORTS: Final[dict[str, Callable[[DeviceRow], tuple[Any, ...]] | None]] = {
    "name": None,  # already sorted
    "state": lambda each: (each.board.online, each.board.doing is not None),
    "since": lambda each: (each.board.since or 0.0,),
    "watts": lambda each: (each.reading.power_w or -1.0,),
    "temperature": lambda each: (each.reading.temperature_c or -274.0,),
    "memory": lambda each: ((each.reading.task_bytes or 0) / (each.board.budget_bytes or 1),),
    "refusal": lambda each: (each.board.refusal.at if each.board.refusal is not None else 0.0,),
}


async def load_fleet_page(watcher: HomeWatcher, query: Query) -> dict[str, Any]:
    fleet = await watcher.load_fleet()
    label_filter, state, text = (
        labels.split_words(query.get("label", "")),
        query.get("state") or None,
        query.get("text", ""),
    )
    labels.require_valid_selection(label_filter)
    if state is not None and state not in devices.STATES:
        raise JobError(f"unknown state {state[:100]!r}: choose one of {', '.join(devices.STATES)}")
    rows = (
        fleet.device_rows
        if not label_filter and state is None
        else devices.filter_devices(fleet.device_rows, label_filter, state)
    )
    if text := text.casefold():
        rows = [row for row in rows if text in _make_searchable_text(row)]
    sort = query.get("sort", "name")
    if sort.removeprefix("-") not in _SORTS:
        raise JobError(f"unknown sort key {sort[:100]!r}: choose one of {', '.join(_SORTS)}")
    if key := _SORTS[sort.removeprefix("-")]:
        rows = sorted(rows, key=key, reverse=sort.startswith("-"))
    elif sort.startswith("-"):
        rows = rows[::-1]
    grid = query.get("view") == "grid"
    shown, page, pages = _paginate(rows, _parse_integer(query, "page", 1), PAGE_CELLS if grid else PAGE_ROWS)
    return {
        "at": time.time(),
        "served": watcher.is_served,
        "counts": fleet.counts,
        "labels": fleet.labels,
        "found": len(rows),
        "page": page,
        "pages": pages,
        "boards": [_make_grid_cell(row) if grid else row.to_dict() for row in shown],
    }


def _make_searchable_text(device: DeviceRow) -> str:
    board = device.board
    job = board.doing.job if board.doing is not None else ""
    return f"{board.device}\n{board.board}\n{board.mode or ''}\n{board.version}\n{job}".casefold()


def _make_grid_cell(device: DeviceRow) -> list[Any]:
    task = device.board.doing
    share = task.fraction if task is not None else None
    return [device.board.device, device.state, share, device.board.refusal is not None]


async def load_device_page(watcher: HomeWatcher, query: Query, name: str) -> dict[str, Any]:
    rows = (await watcher.load_fleet()).device_rows
    index = bisect.bisect_left(rows, name, key=lambda follower: follower.board.device)
    row = rows[index] if index < len(rows) and rows[index].board.device == name else None
    now_s, span = time.time(), query.get("span", "2h")
    if span not in SPANS:
        raise JobError(f"unknown span {span[:100]!r}: choose one of {', '.join(SPANS)}")
    readings = await watcher.load_readings(name, now_s - SPANS[span] + 1, now_s)
    device_rounds: list[dict[str, Any]] = []
    followers, reading = await _load_recent_runs(watcher)
    for follower in followers:
        rounds = await watcher.run_in_reader_thread(partial(follower.list_device_rounds, name))
        device_rounds += [{"run": follower.row.id, **entry} for entry in rounds[:MAX_DEVICE_ROUNDS]]
    if row is None and not device_rounds and not reading:
        raise NotFoundError(f"no device {name[:100]!r} in {watcher.home}")
    device_rounds.sort(key=lambda entry: -(entry.get("at") or 0.0))
    return {
        "at": now_s,
        "served": watcher.is_served,
        "board": None if row is None else row.to_dict(),
        "span": [now_s - SPANS[span], now_s],
        "readings": [msgspec.structs.astuple(follower) for follower in readings],
        "turns": device_rounds[:MAX_DEVICE_ROUNDS],
        "reading": reading,
    }


async def _load_recent_runs(watcher: HomeWatcher) -> tuple[list[run_follower.RunFollower], bool]:
    # unfinished runs and the two that ended last, and whether a log is still being read. Unreadable logs are left out
    try:
        rows = [row for row in (await watcher.load_runs()).rows if isinstance(row, StoredJob)]
    except FedquiltError:
        return [], False
    latest = [row.id for row in rows if row.status in ENDED_PHASES][-2:]
    followers = []
    for row in rows:
        if row.status not in ENDED_PHASES or row.id in latest:
            with contextlib.suppress(FedquiltError):
                followers.append(await watcher.get_loaded_follower(row.id))
    return [follower for follower in followers if follower is not None], None in followers


async def find_start_run(watcher: HomeWatcher) -> str | None:
    """Return the newest run of a home that has only simulated runs, or None."""
    with contextlib.suppress(FedquiltError):
        if not (await watcher.load_fleet()).device_rows:
            rows = (await watcher.load_runs()).rows
            return next((row.id for row in reversed(rows) if isinstance(row, StoredJob)), None)
    return None


async def load_runs_page(watcher: HomeWatcher, query: Query) -> dict[str, Any]:
    run_list = await watcher.load_runs()
    page_rows, page, pages = _paginate(list(reversed(run_list.rows)), _parse_integer(query, "page", 1), PAGE_ROWS)
    runs = []
    for row in page_rows:
        run = {"run": row.id, "status": run_list.statuses[row.id], "began": row.created}
        if isinstance(row, UnreadableRow):
            runs.append({**run, "problem": row.reason})
            continue
        run |= {"name": row.job.name, "method": row.job.method, "rounds": row.job.rounds, "origin": row.origin}
        run["changed"] = run_list.changes.get(row.id, "")
        run |= await watcher.add_stored_results(row, await watcher.load_summary(row))
        if row.status not in ENDED_PHASES and "done" in run:
            describe_round = (await watcher.load_follower(row.id)).describe_current_round
            run["now"] = await watcher.run_in_reader_thread(partial(describe_round, run_list.wait_reasons.get(row.id)))
        runs.append(run)
    return {"at": time.time(), "served": run_list.is_served, "page": page, "pages": pages, "runs": runs}


async def load_run_page(watcher: HomeWatcher, query: Query, id: str) -> dict[str, Any]:
    follower = await watcher.load_follower(id)
    run_list = await watcher.load_runs()
    boards = {device_row.board.device: device_row.board for device_row in (await watcher.load_fleet()).device_rows}
    row = follower.row

    def load_figures() -> dict[str, Any]:
        return {
            **follower.make_summary(),
            "now": follower.describe_current_round(run_list.wait_reasons.get(row.id), boards)
            if row.status not in ENDED_PHASES
            else None,
            "table": follower.make_round_rows(),
            "first": follower.first_round,
            "last": follower.last_round,
        }

    return {
        "at": time.time(),
        "served": run_list.is_served,
        "run": row.id,
        "status": run_list.statuses.get(row.id, row.status),
        "origin": row.origin,
        "began": row.created,
        "name": row.job.name,
        "method": row.job.method,
        "rounds": row.job.rounds,
        **await watcher.add_stored_results(row, await watcher.run_in_reader_thread(load_figures)),
        "commands": _make_commands(row.job, row.id, watcher),
    }


def _make_commands(job: JobSettings, id: str, watcher: HomeWatcher) -> dict[str, str]:
    home = f"--home {watcher.home}"
    return {"resume": f"fedquilt resume {id} {home}", "export": f"fedquilt model export {id} {home} --out FILE"}


async def load_round_page(watcher: HomeWatcher, query: Query, id: str) -> dict[str, Any]:
    follower = await watcher.load_follower(id)
    first, last = follower.first_round, follower.last_round
    if first is None or last is None:
        return {"at": time.time(), "round": None, "counts": [], "found": 0, "page": 1, "pages": 1, "devices": []}
    round = _parse_integer(query, "round", last + 1) - 1
    parts = await watcher.load_round_outcomes(follower, round)
    if parts is None:
        raise JobError(f"no round {round + 1}: choose one of {first + 1} to {last + 1}")
    code, text = query.get("code", ""), query.get("text", "").casefold()
    matching = sorted(
        (
            (name, part)
            for name, part in parts.items()
            if code in ("", part.code) and (not text or text in name.casefold() or text in part.text.casefold())
        ),
        key=lambda entry: (entry[1].code not in round_outcomes.SELECTED_CODES, entry[1].position or 0, entry[0]),
    )
    page_outcomes, page, pages = _paginate(matching, _parse_integer(query, "page", 1), PAGE_DEVICES)
    contributions = follower.format_contributions()
    running = round == follower.state.round and follower.state.phase in ("selecting", "open", "closing")
    return {
        "at": time.time(),
        "round": round + 1,
        "running": running,
        "first": first + 1,
        "last": last + 1,
        "counts": run_follower.count_outcomes(parts, running),
        "found": len(matching),
        "page": page,
        "pages": pages,
        "devices": [
            {"device": name, "code": part.code, "text": part.text, "contribution": contributions.get(name, "")}
            for name, part in page_outcomes
        ],
    }


async def load_log_page(watcher: HomeWatcher, query: Query) -> dict[str, Any]:
    run = query.get("run", "")
    followers, reading = ([await watcher.load_follower(run)], False) if run else await _load_recent_runs(watcher)
    device, kind, text = query.get("device", ""), query.get("kind", ""), query.get("text", "").casefold()

    def select_lines() -> tuple[list[run_follower.LogLine], set[str]]:
        lines = [line for follower in followers for line in follower.lines]
        matching = [
            line
            for line in lines
            if kind in ("", line.kind)
            and (not device or device == line.device or device in line.text)
            and (not text or any(text in text_line.casefold() for text_line in (line.text, *line.more)))
        ]
        return sorted(matching, key=lambda line: (-line.at, -line.seq)), {line.kind for line in lines}

    matching, kinds = await watcher.run_in_reader_thread(select_lines)
    run_list = await watcher.load_runs()
    return {
        "at": time.time(),
        "runs": [row.id for row in reversed(run_list.rows)][:PAGE_ROWS],
        "kinds": sorted(kinds),
        "found": len(matching),
        "reading": reading,
        "lines": [line._asdict() for line in matching[:MAX_LOG_LINES]],
    }


def _paginate(rows: Sequence[Any], page: int, size: int) -> tuple[Sequence[Any], int, int]:
    # rows of the page, number of the page within the limits, and number of pages
    pages = max(1, -(-len(rows) // size))
    page = min(max(page, 1), pages)
    return rows[(page - 1) * size : page * size], page, pages


def _parse_integer(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise JobError(f"{name}={text[:100]!r} is not a whole number: write one of up to 9 digits")
    return int(text)


MAX_ROLLOUT_DEVICES: Final = 200  # devices without the release come first
MAX_ROLLOUTS: Final = 100


async def load_rollouts(watcher: HomeWatcher, query: Query) -> dict[str, Any]:
    def read() -> tuple[list[dict[str, Any]], dict[str, str]]:
        log = watcher.open_rollout_log()
        context, latest = view.load_context(watcher.home, log), log.readable_rollouts()[::-1][:MAX_ROLLOUTS]
        return [
            {**_format_row(rollout), "waits": view.load_rollout_wait(rollout, log, context)} for rollout in latest
        ], {id: str(reason) for id, reason in log.read_errors().items()}

    rows, unreadable = await watcher.run_in_reader_thread(read)
    rows += [{"rollout": id, "problem": reason} for id, reason in unreadable.items()]
    return {"at": time.time(), "served": watcher.is_served, "rollouts": rows}


async def load_rollout(watcher: HomeWatcher, query: Query, id: str) -> dict[str, Any]:
    rollout = await _find_rollout(watcher, id)

    def read() -> tuple[Any, str]:
        log = watcher.open_rollout_log()
        events = log.read_events(id)
        return events, view.describe_rollout_wait(rollout.state, events, view.load_context(watcher.home, log))

    events, waits = await watcher.run_in_reader_thread(read)
    page = view.summarise_rollout_and_devices(rollout)
    steps = [
        {"at": time_s, "text": view.format_event(rollout.state, event)}
        for _, time_s, event in events
        if not isinstance(event, StatusReported)
    ]
    boards = page.pop("boards")
    return {
        "at": time.time(),
        "served": watcher.is_served,
        **page,
        **_format_row(rollout),
        "boards": boards[:MAX_ROLLOUT_DEVICES],
        "more": max(0, len(boards) - MAX_ROLLOUT_DEVICES),
        "steps": steps,
        "waits": waits,
    }


async def request_revert(watcher: HomeWatcher, id: str) -> str:
    """Request the end or the roll-back of a rollout, and return a sentence on the effect.

    Raise NotFoundError without the rollout, and JobError if it cannot be reverted.
    """
    rollout = await _find_rollout(watcher, id)

    def store_request() -> str:
        with store.Store(watcher.home) as job_store:
            return run_control.revert_rollout(job_store, rollout.state.id)

    return await watcher.run_in_reader_thread(store_request)


def _format_row(rollout: StoredRollout) -> dict[str, Any]:
    return {**view.summarise_rollout(rollout), "now": view.format_step(rollout.state)}


async def _find_rollout(watcher: HomeWatcher, id: str) -> StoredRollout:
    for rollout in await watcher.run_in_reader_thread(lambda: watcher.open_rollout_log().readable_rollouts()):
        if rollout.state.id == id:
            return rollout
    raise NotFoundError(f"rollout {id[:100]!r} in {watcher.home} is missing or unreadable")
