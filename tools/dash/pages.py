"""Values of a dashboard's pages, made of what is watched: what their scripts ask for, as plain values."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from fedquilt import labels
from fedquilt.coordinator.housekeeping import ENDED
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Row
from fedquilt.coordinator.store_rows import Unreadable
from fedquilt.coordinator.views import devices, why
from fedquilt.coordinator.views.devices import Device
from fedquilt.core import FedquiltError, JobError
from fedquilt.tools.dash import follow
from fedquilt.tools.dash.watch import Watch

Query = Mapping[str, str]

ROWS: Final = 100  # of a table's page
DEVICES: Final = 30  # of a round
GRID: Final = 2_000  # cells of the grid's page
TURNS: Final = 60  # rounds of a board that are shown
SPANS: Final = {"2h": 2 * 3600.0, "2d": 2 * 86400.0, "30d": 30 * 86400.0}
LOGGED: Final = 300  # lines of the log that are shown

_SORTS: Final[dict[str, Callable[[Device], tuple[Any, ...]] | None]] = {
    "name": None,  # as they are
    "state": lambda each: (each.board.online, each.board.doing is not None),
    "since": lambda each: (each.board.since or 0.0,),
    "watts": lambda each: (each.reading.power_w or -1.0,),
    "temperature": lambda each: (each.reading.temperature_c or -274.0,),
    "memory": lambda each: ((each.reading.task_bytes or 0) / (each.board.budget_bytes or 1),),
    "refusal": lambda each: (each.board.refusal.at if each.board.refusal is not None else 0.0,),
}


async def fleet(watch: Watch, query: Query) -> dict[str, Any]:
    """A page of the boards that are chosen by state, labels and text, as a table's rows or a grid's cells.

    Raises:
        JobError: a state, label or page that is none.
        StoreError: what is kept of boards cannot be read.
    """
    known = await watch.fleet()
    wanted, state, text = labels.words(query.get("label", "")), query.get("state") or None, query.get("text", "")
    labels.require_selection(wanted)
    if state is not None and state not in devices.STATES:
        raise JobError(f"{state[:100]!r} is no state: {', '.join(devices.STATES)}")
    found = known.boards if not wanted and state is None else devices.chosen(known.boards, wanted, state)
    if text := text.casefold():
        found = [each for each in found if text in _text(each)]
    sort = query.get("sort", "name")
    if sort.removeprefix("-") not in _SORTS:
        raise JobError(f"boards are not sorted by {sort[:100]!r}: {', '.join(_SORTS)}")
    if key := _SORTS[sort.removeprefix("-")]:
        found = sorted(found, key=key, reverse=sort.startswith("-"))
    elif sort.startswith("-"):
        found = found[::-1]
    grid = query.get("view") == "grid"
    shown, page, pages = _paged(found, _whole(query, "page", 1), GRID if grid else ROWS)
    return {
        "at": time.time(),
        "served": watch.served,
        "counts": known.counts,
        "labels": known.labels,
        "found": len(found),
        "page": page,
        "pages": pages,
        "boards": [_cell(each) if grid else each.row() for each in shown],
    }


def _text(device: Device) -> str:
    board = device.board
    job = board.doing.job if board.doing is not None else ""
    return f"{board.device}\n{board.board}\n{board.mode or ''}\n{board.version}\n{job}".casefold()


def _cell(device: Device) -> list[Any]:
    doing = device.board.doing
    share = doing.fraction if doing is not None else None
    return [device.board.device, device.state, share, device.board.refusal is not None]


async def board(watch: Watch, name: str, query: Query) -> dict[str, Any]:
    """One board: as it is now, its readings, and its part in the latest rounds of the runs that are followed.

    Raises:
        MissingBoardError: nobody has heard of it.
        JobError: no such span.
        StoreError: what is kept of boards cannot be read.
    """
    known = (await watch.fleet()).boards
    place = bisect.bisect_left(known, name, key=lambda each: each.board.device)
    found = known[place] if place < len(known) and known[place].board.device == name else None
    now, span = time.time(), query.get("span", "2h")
    if span not in SPANS:
        raise JobError(f"{span[:100]!r} is no span: {', '.join(SPANS)}")
    readings = await watch.readings(name, now - SPANS[span] + 1, now)
    turns: list[dict[str, Any]] = []
    followed, reading = await _followed(watch)
    for each in followed:
        told = await watch.aside(lambda each=each: each.of_device(name)[:TURNS])  # type: ignore[misc]
        turns += [{"run": each.row.id, **turn} for turn in told]
    if found is None and not turns and not reading:
        raise MissingBoardError(f"no coordinator of {watch.home} has heard of a board {name[:100]!r}")
    turns.sort(key=lambda turn: -(turn.get("at") or 0.0))
    return {
        "at": now,
        "served": watch.served,
        "board": None if found is None else found.row(),
        "span": [now - SPANS[span], now],
        "readings": [msgspec.structs.astuple(each) for each in readings],
        "turns": turns[:TURNS],
        "reading": reading,
    }


async def _followed(watch: Watch) -> tuple[list[follow.Follower], bool]:
    """The runs that have not ended and the two that ended last; and whether some log is still being read.

    One whose log cannot be read is left out.
    """
    try:
        rows = [row for row in (await watch.runs()).rows if isinstance(row, Row)]
    except FedquiltError:
        return [], False
    latest = [row.id for row in rows if row.status in ENDED][-2:]
    found = []
    for row in rows:
        if row.status not in ENDED or row.id in latest:
            with contextlib.suppress(FedquiltError):
                found.append(await watch.held(row.id))
    return [each for each in found if each is not None], None in found


async def runs(watch: Watch, query: Query) -> dict[str, Any]:
    """A page of the runs, the latest first; those that have not ended with their running round.

    Raises:
        StoreError: the list of runs cannot be read.
    """
    listed = await watch.runs()
    shown, page, pages = _paged(list(reversed(listed.rows)), _whole(query, "page", 1), ROWS)
    told = []
    for row in shown:
        head = {"run": row.id, "status": listed.standing[row.id], "began": row.created}
        if isinstance(row, Unreadable):
            told.append({**head, "problem": row.reason})
            continue
        head |= {"name": row.job.name, "method": row.job.method, "rounds": row.job.rounds, "origin": row.origin}
        head |= await watch.summary(row)
        if row.status not in ENDED and "done" in head:
            running = (await watch.follower(row.id)).running_round
            head["now"] = await watch.aside(partial(running, listed.holds.get(row.id)))
        told.append(head)
    return {"at": time.time(), "served": listed.served, "page": page, "pages": pages, "runs": told}


async def run_values(watch: Watch, id: str) -> dict[str, Any]:
    """Return a run as plain values: its figures, a row for each round, and the round under way.

    Raises:
        StoreError: there is no such run.
        JobError: its log cannot be read.
    """
    found = await watch.follower(id)
    listed = await watch.runs()
    boards = {each.board.device: each.board for each in (await watch.fleet()).boards}
    row = found.row

    def told() -> dict[str, Any]:
        return {
            **found.summary(),
            "now": found.running_round(listed.holds.get(row.id), boards) if row.status not in ENDED else None,
            "table": found.rounds(),
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
        **await watch.aside(told),
        "commands": _commands(row.job, row.id, watch),
    }


def _commands(job: Job, id: str, watch: Watch) -> dict[str, str]:
    home = f"--home {watch.home}"
    return {"resume": f"fedquilt resume {id} {home}", "export": f"fedquilt export {id} {home} --out FILE"}


async def reasons(watch: Watch, id: str, query: Query) -> dict[str, Any]:
    """What became of the devices in one round of a run, and why those who were not asked were not.

    Raises:
        StoreError: there is no such run.
        JobError: no such round, or the log cannot be read.
    """
    found = await watch.follower(id)
    first, last = found.first, found.last
    if first is None or last is None:
        return {"at": time.time(), "round": None, "counts": [], "found": 0, "page": 1, "pages": 1, "devices": []}
    round = _whole(query, "round", last)
    parts = await watch.parts(found, round)
    if parts is None:
        raise JobError(f"there has been no round {round}; rounds so far: {first} to {last}")
    code, text = query.get("code", ""), query.get("text", "").casefold()
    chosen = sorted(
        (
            (name, part)
            for name, part in parts.items()
            if code in ("", part.code) and (not text or text in name.casefold() or text in part.text.casefold())
        ),
        key=lambda each: (each[1].code not in why.ASKED, each[1].place or 0, each[0]),
    )
    shown, page, pages = _paged(chosen, _whole(query, "page", 1), DEVICES)
    running = round == found.state.round and found.state.phase in ("selecting", "open", "closing")
    return {
        "at": time.time(),
        "round": round,
        "running": running,
        "first": first,
        "last": last,
        "counts": follow.counts(parts, running),
        "found": len(chosen),
        "page": page,
        "pages": pages,
        "devices": [{"device": name, "code": part.code, "text": part.text} for name, part in shown],
    }


async def lines(watch: Watch, query: Query) -> dict[str, Any]:
    """The latest lines of the logs of the runs that are followed, the latest first, chosen by run, device, kind, text.

    Raises:
        StoreError: there is no such run.
        JobError: its log cannot be read.
    """
    wanted = query.get("run", "")
    followed, reading = ([await watch.follower(wanted)], False) if wanted else await _followed(watch)
    device, kind, text = query.get("device", ""), query.get("kind", ""), query.get("text", "").casefold()

    def told() -> tuple[list[follow.Said], set[str]]:
        known = [line for each in followed for line in each.lines]
        chosen = [
            line
            for line in known
            if kind in ("", line.kind)
            and (not device or device == line.device or device in line.text)
            and (not text or any(text in said.casefold() for said in (line.text, *line.more)))
        ]
        return sorted(chosen, key=lambda line: (-line.at, -line.seq)), {line.kind for line in known}

    chosen, kinds = await watch.aside(told)
    listed = await watch.runs()
    return {
        "at": time.time(),
        "runs": [row.id for row in reversed(listed.rows)][:ROWS],
        "kinds": sorted(kinds),
        "found": len(chosen),
        "reading": reading,
        "lines": [line._asdict() for line in chosen[:LOGGED]],
    }


def _paged(found: Sequence[Any], page: int, size: int) -> tuple[Sequence[Any], int, int]:
    """The rows of a page, its number and how many pages there are; beyond the last one, that."""
    pages = max(1, -(-len(found) // size))
    page = min(max(page, 1), pages)
    return found[(page - 1) * size : page * size], page, pages


def _whole(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise JobError(f"{name}={text[:100]!r} is no whole number")
    return int(text)


class MissingBoardError(JobError):
    """A board that nobody has heard of."""
