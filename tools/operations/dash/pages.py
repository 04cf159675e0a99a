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
from fedquilt.coordinator.rounds.events import ENDED
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
from fedquilt.tools.operations.dash.home_watcher import HomeWatcher, MissingRunError

Query = Mapping[str, str]

ROWS: Final = 100  # of a table's page
DEVICES: Final = 30  # of a round
GRID: Final = 2_000  # cells of the grid's page
TURNS: Final = 60  # rounds of a board that are shown
SPANS: Final = {"2h": 2 * 3600.0, "2d": 2 * 86400.0, "30d": 30 * 86400.0}
LOGGED: Final = 300  # lines of the log that are shown

_SORTS: Final[dict[str, Callable[[DeviceRow], tuple[Any, ...]] | None]] = {
    "name": None,  # as they are
    "state": lambda each: (each.board.online, each.board.doing is not None),
    "since": lambda each: (each.board.since or 0.0,),
    "watts": lambda each: (each.reading.power_w or -1.0,),
    "temperature": lambda each: (each.reading.temperature_c or -274.0,),
    "memory": lambda each: ((each.reading.task_bytes or 0) / (each.board.budget_bytes or 1),),
    "refusal": lambda each: (each.board.refusal.at if each.board.refusal is not None else 0.0,),
}


async def load_fleet_page(watch: HomeWatcher, query: Query) -> dict[str, Any]:
    known = await watch.load_fleet()
    wanted, state, text = labels.split_words(query.get("label", "")), query.get("state") or None, query.get("text", "")
    labels.require_valid_selection(wanted)
    if state is not None and state not in devices.STATES:
        raise JobError(f"{state[:100]!r} is no state: {', '.join(devices.STATES)}")
    found = known.boards if not wanted and state is None else devices.filter_devices(known.boards, wanted, state)
    if text := text.casefold():
        found = [each for each in found if text in _make_searchable_text(each)]
    sort = query.get("sort", "name")
    if sort.removeprefix("-") not in _SORTS:
        raise JobError(f"boards are not sorted by {sort[:100]!r}: {', '.join(_SORTS)}")
    if key := _SORTS[sort.removeprefix("-")]:
        found = sorted(found, key=key, reverse=sort.startswith("-"))
    elif sort.startswith("-"):
        found = found[::-1]
    grid = query.get("view") == "grid"
    shown, page, pages = _paginate(found, _parse_integer(query, "page", 1), GRID if grid else ROWS)
    return {
        "at": time.time(),
        "served": watch.is_served,
        "counts": known.counts,
        "labels": known.labels,
        "found": len(found),
        "page": page,
        "pages": pages,
        "boards": [_make_grid_cell(each) if grid else each.to_dict() for each in shown],
    }


def _make_searchable_text(device: DeviceRow) -> str:
    board = device.board
    job = board.doing.job if board.doing is not None else ""
    return f"{board.device}\n{board.board}\n{board.mode or ''}\n{board.version}\n{job}".casefold()


def _make_grid_cell(device: DeviceRow) -> list[Any]:
    doing = device.board.doing
    share = doing.fraction if doing is not None else None
    return [device.board.device, device.state, share, device.board.refusal is not None]


async def load_device_page(watch: HomeWatcher, query: Query, name: str) -> dict[str, Any]:
    known = (await watch.load_fleet()).boards
    place = bisect.bisect_left(known, name, key=lambda each: each.board.device)
    found = known[place] if place < len(known) and known[place].board.device == name else None
    now, span = time.time(), query.get("span", "2h")
    if span not in SPANS:
        raise JobError(f"{span[:100]!r} is no span: {', '.join(SPANS)}")
    readings = await watch.load_readings(name, now - SPANS[span] + 1, now)
    turns: list[dict[str, Any]] = []
    followed, reading = await _load_recent_runs(watch)
    for each in followed:
        told = await watch.run_in_reader_thread(lambda each=each: each.list_device_rounds(name)[:TURNS])  # type: ignore[misc]
        turns += [{"run": each.row.id, **turn} for turn in told]
    if found is None and not turns and not reading:
        raise MissingDeviceError(f"no coordinator of {watch.home} knows a device {name[:100]!r}")
    turns.sort(key=lambda turn: -(turn.get("at") or 0.0))
    return {
        "at": now,
        "served": watch.is_served,
        "board": None if found is None else found.to_dict(),
        "span": [now - SPANS[span], now],
        "readings": [msgspec.structs.astuple(each) for each in readings],
        "turns": turns[:TURNS],
        "reading": reading,
    }


async def _load_recent_runs(watch: HomeWatcher) -> tuple[list[run_follower.RunFollower], bool]:
    # all unfinished runs and the two that ended last. Unreadable logs are left out
    try:
        rows = [row for row in (await watch.load_runs()).rows if isinstance(row, StoredJob)]
    except FedquiltError:
        return [], False
    latest = [row.id for row in rows if row.status in ENDED][-2:]
    found = []
    for row in rows:
        if row.status not in ENDED or row.id in latest:
            with contextlib.suppress(FedquiltError):
                found.append(await watch.get_loaded_follower(row.id))
    return [each for each in found if each is not None], None in found


async def load_runs_page(watch: HomeWatcher, query: Query) -> dict[str, Any]:
    listed = await watch.load_runs()
    shown, page, pages = _paginate(list(reversed(listed.rows)), _parse_integer(query, "page", 1), ROWS)
    told = []
    for row in shown:
        head = {"run": row.id, "status": listed.standing[row.id], "began": row.created}
        if isinstance(row, UnreadableRow):
            told.append({**head, "problem": row.reason})
            continue
        head |= {"name": row.job.name, "method": row.job.method, "rounds": row.job.rounds, "origin": row.origin}
        head |= await watch.load_summary(row)
        if row.status not in ENDED and "done" in head:
            running = (await watch.load_follower(row.id)).describe_current_round
            head["now"] = await watch.run_in_reader_thread(partial(running, listed.holds.get(row.id)))
        told.append(head)
    return {"at": time.time(), "served": listed.served, "page": page, "pages": pages, "runs": told}


async def load_run_page(watch: HomeWatcher, query: Query, id: str) -> dict[str, Any]:
    found = await watch.load_follower(id)
    listed = await watch.load_runs()
    boards = {each.board.device: each.board for each in (await watch.load_fleet()).boards}
    row = found.row

    def load_figures() -> dict[str, Any]:
        return {
            **found.make_summary(),
            "now": found.describe_current_round(listed.holds.get(row.id), boards) if row.status not in ENDED else None,
            "table": found.make_round_rows(),
            "first": found.first,
            "last": found.last,
        }

    return {
        "at": time.time(),
        "served": listed.served,
        "run": row.id,
        "status": listed.standing.get(row.id, row.status),
        "origin": row.origin,
        "began": row.created,
        "name": row.job.name,
        "method": row.job.method,
        "rounds": row.job.rounds,
        **await watch.run_in_reader_thread(load_figures),
        "commands": _make_commands(row.job, row.id, watch),
    }


def _make_commands(job: JobSettings, id: str, watch: HomeWatcher) -> dict[str, str]:
    home = f"--home {watch.home}"
    return {"resume": f"fedquilt resume {id} {home}", "export": f"fedquilt model export {id} {home} --out FILE"}


async def load_round_page(watch: HomeWatcher, query: Query, id: str) -> dict[str, Any]:
    found = await watch.load_follower(id)
    first, last = found.first, found.last
    if first is None or last is None:
        return {"at": time.time(), "round": None, "counts": [], "found": 0, "page": 1, "pages": 1, "devices": []}
    round = _parse_integer(query, "round", last + 1) - 1
    parts = await watch.load_round_outcomes(found, round)
    if parts is None:
        raise JobError(f"there has been no round {round + 1}; rounds so far: {first + 1} to {last + 1}")
    code, text = query.get("code", ""), query.get("text", "").casefold()
    chosen = sorted(
        (
            (name, part)
            for name, part in parts.items()
            if code in ("", part.code) and (not text or text in name.casefold() or text in part.text.casefold())
        ),
        key=lambda each: (each[1].code not in round_outcomes.ASKED, each[1].place or 0, each[0]),
    )
    shown, page, pages = _paginate(chosen, _parse_integer(query, "page", 1), DEVICES)
    running = round == found.state.round and found.state.phase in ("selecting", "open", "closing")
    return {
        "at": time.time(),
        "round": round + 1,
        "running": running,
        "first": first + 1,
        "last": last + 1,
        "counts": run_follower.count_outcomes(parts, running),
        "found": len(chosen),
        "page": page,
        "pages": pages,
        "devices": [{"device": name, "code": part.code, "text": part.text} for name, part in shown],
    }


async def load_log_page(watch: HomeWatcher, query: Query) -> dict[str, Any]:
    wanted = query.get("run", "")
    followed, reading = ([await watch.load_follower(wanted)], False) if wanted else await _load_recent_runs(watch)
    device, kind, text = query.get("device", ""), query.get("kind", ""), query.get("text", "").casefold()

    def select_lines() -> tuple[list[run_follower.LogLine], set[str]]:
        known = [line for each in followed for line in each.lines]
        chosen = [
            line
            for line in known
            if kind in ("", line.kind)
            and (not device or device == line.device or device in line.text)
            and (not text or any(text in said.casefold() for said in (line.text, *line.more)))
        ]
        return sorted(chosen, key=lambda line: (-line.at, -line.seq)), {line.kind for line in known}

    chosen, kinds = await watch.run_in_reader_thread(select_lines)
    listed = await watch.load_runs()
    return {
        "at": time.time(),
        "runs": [row.id for row in reversed(listed.rows)][:ROWS],
        "kinds": sorted(kinds),
        "found": len(chosen),
        "reading": reading,
        "lines": [line._asdict() for line in chosen[:LOGGED]],
    }


def _paginate(found: Sequence[Any], page: int, size: int) -> tuple[Sequence[Any], int, int]:
    pages = max(1, -(-len(found) // size))
    page = min(max(page, 1), pages)
    return found[(page - 1) * size : page * size], page, pages


def _parse_integer(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise JobError(f"{name}={text[:100]!r} is no whole number")
    return int(text)


class MissingDeviceError(JobError): ...


BOARDS: Final = 200  # of one rollout that are shown, those first that have not committed it
LATEST: Final = 100  # rollouts of the list


async def load_rollouts(watch: HomeWatcher, query: Query) -> dict[str, Any]:
    def read() -> tuple[list[dict[str, Any]], dict[str, str]]:
        log = watch.open_rollout_log()
        around, latest = view.load_context(watch.home, log), log.readable_rollouts()[::-1][:LATEST]
        return [{**_format_row(kept), "waits": view.load_rollout_wait(kept, log, around)} for kept in latest], {
            id: str(why) for id, why in log.read_errors().items()
        }

    rows, odd = await watch.run_in_reader_thread(read)
    rows += [{"rollout": id, "problem": why} for id, why in odd.items()]
    return {"at": time.time(), "served": watch.is_served, "rollouts": rows}


async def load_rollout(watch: HomeWatcher, query: Query, id: str) -> dict[str, Any]:
    kept = await _find_rollout(watch, id)

    def read() -> tuple[Any, str]:
        log = watch.open_rollout_log()
        facts = log.read_events(id)
        return facts, view.describe_rollout_wait(kept.state, facts, view.load_context(watch.home, log))

    facts, waits = await watch.run_in_reader_thread(read)
    told = view.summarise_rollout_and_devices(kept)
    steps = [
        {"at": at, "text": view.format_event(kept.state, fact)}
        for _, at, fact in facts
        if not isinstance(fact, StatusReported)
    ]
    boards = told.pop("boards")
    return {
        "at": time.time(),
        "served": watch.is_served,
        **told,
        **_format_row(kept),
        "boards": boards[:BOARDS],
        "more": max(0, len(boards) - BOARDS),
        "steps": steps,
        "waits": waits,
    }


async def request_revert(watch: HomeWatcher, id: str) -> str:
    """Request the end or the roll-back of a rollout, and return a sentence on the effect."""
    kept = await _find_rollout(watch, id)

    def store_request() -> str:
        with store.Store(watch.home) as written:
            return run_control.revert_rollout(written, kept.state.id)

    return await watch.run_in_reader_thread(store_request)


def _format_row(kept: StoredRollout) -> dict[str, Any]:
    return {**view.summarise_rollout(kept), "now": view.format_step(kept.state)}


async def _find_rollout(watch: HomeWatcher, id: str) -> StoredRollout:
    for kept in await watch.run_in_reader_thread(lambda: watch.open_rollout_log().readable_rollouts()):
        if kept.state.id == id:
            return kept
    raise MissingRunError(f"there is no rollout {id[:100]!r} in {watch.home}, or it cannot be read")
