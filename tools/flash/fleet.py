"""Flashes every board of a table, each with its own token, goes on where it was interrupted, and tells how each is.

name,target,budget,labels,address
orin-01,jetpack6,2GB,hall-a,me@10.0.0.11
pi-07,raspberry-pi-os,,hall-b window,

A folder keeps what was made: `NAME.token`, `NAME.img` or `NAME.tar`, and `NAME.json` once a board is done. Its state
afterwards is read where the operator has it: enrolment in the authority's register, presence at the broker.
"""

from __future__ import annotations

import csv
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from fedquilt import columns, config, enrolment, progress, wire
from fedquilt import labels as words
from fedquilt.core import FedquiltError, JobError, StoreError, WireError
from fedquilt.edge_agent import settings as agents
from fedquilt.tools import flash as tool
from fedquilt.tools.flash import image, targets
from fedquilt.tools.identity.register import Issued, Register, Token, stamp
from fedquilt.transport.link import Link

COLUMNS: Final = ("name", "target", "budget", "labels", "address")
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
POLL_S: Final = 2.0
HEAD: Final = ("board", "labels", "target", "written to", "enrolment", "presence")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One board of the table."""

    name: str
    target: str
    budget: str | None = None
    labels: tuple[str, ...] = ()  # (): those of agent.toml
    address: str | None = None  # as ssh takes it; None: an image or an archive is made


@dataclass(frozen=True)
class Plan:
    """What is flashed, and where what was made is kept.

    Args:
        what: settings and packages of all boards; each has its own name, target, budget and token.
        base: disk image; None: by ssh where a row has an address, else an archive.
        folder: of what was made.
        authority: folder of the certificate authority, whose register gets the tokens.
        hours: after which a token expires.
    """

    what: tool.What
    base: Path | None
    folder: Path
    authority: Path
    ssh_options: tuple[str, ...] = ()
    hours: float = 72.0
    dry_run: bool = False


class Done(msgspec.Struct, frozen=True):
    """Note of a board that has been flashed."""

    inputs: str  # hash of everything that decided what was written
    place: str
    written_s: float  # since 1970


@dataclass(frozen=True)
class Enrolment:
    """Enrolment of one board, as the authority's register has it."""

    step: Literal["none", "token unused", "token expired", "enrolled"] = "none"
    at_s: float | None = None  # end of the token, or time of issue of the certificate

    def __str__(self) -> str:
        when = "" if self.at_s is None else stamp(self.at_s)
        match self.step:
            case "none":
                return "-"
            case "token unused":
                return f"waits for its first boot, until {when}"
            case "token expired":
                return "token expired"
            case "enrolled":
                return f"enrolled {when}"


@dataclass(frozen=True)
class State:
    """State of one board, as the operator's side knows it."""

    row: Row
    written: str  # where to, or why not
    enrolment: Enrolment = Enrolment()
    online: bool | None = None
    done: bool = False

    @property
    def presence(self) -> str:
        """The presence in a word or two."""
        return "not looked" if self.online is None else "online" if self.online else "offline"


# -- the table ------------------------------------------------------------------------------------


def read(path: Path, target: str | None = None) -> list[Row]:
    """Rows of a CSV file with a line of names; a missing target is `target`.

    Raises:
        JobError: unreadable, an unknown column, two boards of a name, a value that no board can have; with the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JobError(
            f"--boards {path} cannot be read ({error}): a CSV file is wanted, its first line {_head()}"
        ) from None
    rows: list[Row] = []
    for number, given in enumerate(found, 2):
        where = f"{path}, line {number}"
        if None in given or (unknown := sorted(set(given) - set(COLUMNS))):
            what = "more values than columns" if None in given else f"there is no column {unknown[0]!r}"
            raise JobError(f"{where}: {what}; the first line is {_head()}")
        row = _row({key: (value or "").strip() for key, value in given.items()}, target, where)
        if row.name in {one.name for one in rows}:
            raise JobError(f"{where}: {row.name} stands in the table twice")
        rows.append(row)
    if not rows:
        raise JobError(f"{path} has no board: its first line is {_head()}, then one line for each")
    return rows


def _head() -> str:
    return ",".join(COLUMNS)


def _row(given: Mapping[str, str], target: str | None, where: str) -> Row:
    name = given.get("name", "")
    if not NAME.fullmatch(name):
        raise JobError(f"{where}: {name!r} is no name of a board: up to 64 of a-z, 0-9, '.', '_' and '-'")
    kind = given.get("target") or target
    if not kind:
        raise JobError(f"{where}: {name} has no target: one of {', '.join(targets.KNOWN)}, or --target for all")
    try:
        if kind not in targets.KNOWN or targets.KNOWN[kind].python:
            targets.find(kind)
        if given.get("budget"):
            agents.size_bytes(given["budget"])
        named = words.parse(words.words(given.get("labels", "")))
    except JobError as error:
        raise JobError(f"{where}: {error}") from None
    return Row(name, kind, given.get("budget") or None, named, given.get("address") or None)


# -- flashing -------------------------------------------------------------------------------------


def flash(
    rows: Sequence[Row], plan: Plan, say: Say = progress.LINE.aside, now_s: Callable[[], float] = time.time
) -> dict[str, str]:
    """Flash every board that is not done yet; why not, for those that failed. One that fails does not stop the others.

    Raises:
        JobError: the settings or the image cannot be used for any board.
        StoreError: the folder or the authority cannot be used.
    """
    enrols = agents.load(plan.what.settings).enrol.url is not None
    if enrols and not plan.dry_run and not (plan.authority / "ca.key").is_file():
        raise StoreError(
            f"no authority in {plan.authority}: `fedquilt ca init` makes one, --authority names its folder"
        )
    plan.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    waiting = [row for row in rows if done(row, plan) is None]
    for row in rows:
        if row not in waiting:
            say(f"{row.name}: done before")
    now = (0, "")  # how many are over, and who is flashed

    def tell() -> None:
        progress.LINE.at(f"flashing {now[1]}", now[0], len(waiting))

    with ExitStack() as stack:
        stack.callback(progress.LINE.end)
        stack.enter_context(progress.ticking(tell))
        base = plan.base
        if base is not None and len(waiting) > 1 and not plan.dry_run:
            base = plan.folder / "base.img.part"  # unpacked once for all
            stack.callback(base.unlink, missing_ok=True)
            image.plain(plan.base or base, base)
        for number, row in enumerate(waiting):
            now = (number, row.name)
            try:
                _one(row, replace(plan, base=base), enrols, _inputs(row, plan), say, now_s)
            except FedquiltError as error:
                failed[row.name] = str(error)
                say(f"{row.name}: not flashed: {error}")
    return failed


def _one(row: Row, plan: Plan, enrols: bool, inputs: str, say: Say, now_s: Callable[[], float]) -> None:
    token = _token(row, plan, now_s()) if enrols and not plan.dry_run else None
    what = replace(
        plan.what, target=row.target, device=row.name, budget=row.budget, token=token, labels=row.labels or None
    )
    place = _place(row, plan.base is not None, plan.folder)
    if plan.base is not None:
        where = tool.Where(image=plan.base, out=Path(place), dry_run=plan.dry_run)
    elif row.address is not None:
        where = tool.Where(ssh=row.address, ssh_options=plan.ssh_options, dry_run=plan.dry_run)
    else:
        where = tool.Where(tar=Path(place), dry_run=plan.dry_run)
    tool.flash(what, where, say)
    if not plan.dry_run:
        note = msgspec.json.encode(Done(inputs=inputs, place=place, written_s=now_s()))
        enrolment.keep(plan.folder / f"{row.name}.json", note + b"\n", 0o644)


def _place(row: Row, imaged: bool, folder: Path) -> str:
    if imaged:
        return str(folder / f"{row.name}.img")
    return row.address or str(folder / f"{row.name}.tar")


def _token(row: Row, plan: Plan, at_s: float) -> Path:
    """Return the file of the board's token: that of an interrupted run if the token is still unused, else a new one."""
    path = plan.folder / f"{row.name}.token"
    with closing(Register(plan.authority / "register.db")) as register:
        if not path.is_file() or not register.is_unused(path.read_text(errors="replace").strip(), at_s):
            text = register.make_token(row.name, plan.hours * 3600.0, at_s)
            enrolment.keep(path, f"{text}\n".encode(), 0o600)
    return path


def _inputs(row: Row, plan: Plan) -> str:
    base = None if plan.base is None or not plan.base.is_file() else (str(plan.base), plan.base.stat().st_mtime)
    what = replace(plan.what, wheels=None, refresh=False)
    return hashlib.sha256(repr((row, what, config.read(plan.what.settings), base)).encode()).hexdigest()[:16]


def done(row: Row, plan: Plan) -> Done | None:
    """Note of a board that was flashed like this; None: it was not, or what was made is gone."""
    try:
        note = msgspec.json.decode((plan.folder / f"{row.name}.json").read_bytes(), type=Done)
    except (OSError, msgspec.DecodeError):
        return None
    made = (row.address is not None and plan.base is None) or Path(note.place).is_file()
    return note if made and note.inputs == _inputs(row, plan) else None


# -- how they are ---------------------------------------------------------------------------------


def states(rows: Sequence[Row], plan: Plan, failed: Mapping[str, str], online: set[str] | None) -> list[State]:
    """State of every board.

    Args:
        rows: the table.
        plan: as it was flashed.
        failed: why not, of those that failed.
        online: devices that are online; None: nobody looked.
    """
    register = None
    if (plan.authority / "register.db").is_file():
        register = Register(plan.authority / "register.db")
    try:
        tokens = register.tokens() if register is not None else []
        told = []
        for row in rows:
            note = done(row, plan)
            issued = register.certificates(row.name) if register is not None else []
            written = note.place if note else f"not written: {failed.get(row.name, 'not yet')}"
            mine = [one for one in tokens if one.pattern == row.name]
            there = None if online is None else row.name in online
            told.append(State(row, written, enrolled(issued, mine, time.time()), there, note is not None))
        return told
    finally:
        if register is not None:
            register.close()


def enrolled(issued: Sequence[Issued], tokens: Sequence[Token], now_s: float) -> Enrolment:
    """Return the enrolment of a board with these certificates and tokens."""
    valid = [one for one in issued if one.revoked_s is None and one.ends_s > now_s]
    token = tokens[-1] if tokens else None
    if token is not None and token.used_s is None and not any(one.issued_s >= token.made_s for one in valid):
        return Enrolment("token unused" if token.ends_s > now_s else "token expired", token.ends_s)
    return Enrolment("enrolled", valid[-1].issued_s) if valid else Enrolment()


def lines(states: Sequence[State], wide: int | None = None) -> list[str]:
    """The table at the end, and what is still offline in one sentence."""
    rows = [(s.row.name, " ".join(s.row.labels), s.row.target, s.written, str(s.enrolment), s.presence) for s in states]
    told = columns.table([HEAD, *rows], "<", wide)
    if missing := [one.row.name for one in states if not one.done]:
        told.append(f"not written: {', '.join(missing)}; the same command again goes on with them")
    if waiting := [one.row.name for one in states if one.enrolment.step in ("token unused", "token expired")]:
        told.append(f"not enrolled yet: {', '.join(waiting)}")
    if off := [one.row.name for one in states if one.online is False]:
        told.append(f"still offline: {', '.join(off)}")
    return told


class Presences:
    """Set of the boards that are online, by the presence messages that a broker retains.

    Args:
        link: to the broker, with rights to read devices' branches.
        fleet: name of the fleet.
    """

    def __init__(self, link: Link, fleet: str) -> None:
        self._link, self.online = link, set[str]()
        link.subscribe([wire.Topics(fleet).device("+", "up", "presence")])

    def wait(self, timeout_s: float) -> None:
        """Wait for messages, at most so long, and note what they say."""
        self._link.wait(timeout_s)
        for message in self._link.receive():
            try:
                said = wire.decode(message.payload, wire.Presence)
            except WireError:
                continue
            change = self.online.add if said.online else self.online.discard
            change(wire.sender(message.topic))


def watch(look: Callable[[], Sequence[State]], wait: Callable[[float], None], say: Say) -> Sequence[State]:
    """Tell each change until every board is as it should be: online where presence is looked at, else enrolled.

    Args:
        look: the states now.
        wait: waits so many seconds for something to happen.
        say: prints a line.
    """
    before: dict[str, tuple[Enrolment, bool | None]] = {}
    while True:
        now = look()
        for one in now:
            if before.get(one.row.name) != (one.enrolment, one.online):
                before[one.row.name] = (one.enrolment, one.online)
                said = str(one.enrolment) if one.online is None else f"{one.enrolment}, {one.presence}"
                say(f"{time.strftime('%H:%M:%S')}  {one.row.name}: {said}")
        if all(ready(one) for one in now if one.done):
            return now
        wait(POLL_S)


def ready(state: State) -> bool:
    """Whether nothing more is to be waited for from a board that was flashed."""
    return state.enrolment.step != "token unused" if state.online is None else state.online
