"""Flashing of every board in a table, with progress files for a later continuation.

name,target,budget,labels,address
orin-01,jetpack6,2GB,hall-a,me@10.0.0.11
pi-07,raspberry-pi-os,,hall-b window,

A folder keeps what was made: `NAME.token`, `NAME.img` or `NAME.tar`, and `NAME.json` once a board is done. Its state
afterwards is read in the authority's register; `fedquilt devices` shows who is online.
"""

from __future__ import annotations

import csv
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fedquilt.console import progress, table
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.edge_agent import settings as agents
from fedquilt.formats import labels as words
from fedquilt.formats import toml
from fedquilt.security import enrolment
from fedquilt.tools.boards import flash as tool
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import image
from fedquilt.tools.identity.register import (
    TOKEN_S,
    CertificateRegister,
    EnrolmentToken,
    IssuedCertificate,
    format_time,
)

COLUMNS: Final = ("name", "target", "budget", "labels", "address")
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
POLL_S: Final = 2.0
HEAD: Final = ("board", "labels", "target", "written to", "enrolment")
Say = Callable[[str], None]


@dataclass(frozen=True)
class BoardRow:
    name: str
    target: str
    budget: str | None = None
    labels: tuple[str, ...] = ()  # empty for the labels of agent.toml
    address: str | None = None  # as ssh takes it; None: an image or an archive is made


@dataclass(frozen=True)
class FlashPlan:
    """Settings, packages and output folder for flashing the boards of a table.

    Attributes:
        what: Settings and packages of all boards. Name, target, budget and token come from the table.
        base: Disk image, or None to use ssh for rows with an address and archives for the rest.
        folder: Output folder.
        authority: Folder of the certificate authority, whose register receives the tokens.
    """

    what: tool.FlashContent
    base: Path | None
    folder: Path
    authority: Path
    dry_run: bool = False


class FlashRecord(msgspec.Struct, frozen=True):
    inputs: str  # hash of all inputs of the bundle
    place: str
    written_s: float  # since 1970


class EnrolmentState(NamedTuple):
    text: str = "-"
    waits: bool = False  # for the first boot
    expired: bool = False


class FlashState(NamedTuple):
    row: BoardRow
    written: str  # where to, or why not
    enrolment: EnrolmentState = EnrolmentState()
    done: bool = False


# -- the table ------------------------------------------------------------------------------------


def read_table(path: Path, target: str | None = None) -> list[BoardRow]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            found = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JobError(
            f"--boards {path} cannot be read ({error}): a CSV file is wanted, its first line {_format_header()}"
        ) from None
    rows: list[BoardRow] = []
    for number, given in enumerate(found, 2):
        where = f"{path}, line {number}"
        if None in given or (unknown := sorted(set(given) - set(COLUMNS))):
            what = "more values than columns" if None in given else f"there is no column {unknown[0]!r}"
            raise JobError(f"{where}: {what}; the first line is {_format_header()}")
        row = _parse_row({key: (value or "").strip() for key, value in given.items()}, target, where)
        if row.name in {one.name for one in rows}:
            raise JobError(f"{where}: {row.name} stands in the table twice")
        rows.append(row)
    if not rows:
        raise JobError(f"{path} has no board: its first line is {_format_header()}, then one line for each")
    return rows


def _format_header() -> str:
    return ",".join(COLUMNS)


def _parse_row(given: Mapping[str, str], target: str | None, where: str) -> BoardRow:
    name = given.get("name", "")
    if not NAME.fullmatch(name):
        raise JobError(f"{where}: {name!r} is no name of a board: up to 64 of a-z, 0-9, '.', '_' and '-'")
    kind = given.get("target") or target
    if not kind:
        raise JobError(f"{where}: {name} has no target: one of {', '.join(targets.KNOWN)}, or --target for all")
    try:
        if kind not in targets.KNOWN or targets.KNOWN[kind].python:
            targets.find_target(kind)
        if given.get("budget"):
            agents.parse_size(given["budget"])
        named = words.parse_labels(words.split_words(given.get("labels", "")))
    except JobError as error:
        raise JobError(f"{where}: {error}") from None
    return BoardRow(name, kind, given.get("budget") or None, named, given.get("address") or None)


# -- flashing -------------------------------------------------------------------------------------


def flash_boards(
    rows: Sequence[BoardRow],
    plan: FlashPlan,
    say: Say = progress.LINE.print_to_stdout,
    now_s: Callable[[], float] = time.time,
) -> dict[str, str]:
    """Flash every board without a valid record. Return the error of each failed board, by name.

    After a failure the next boards are flashed nevertheless.
    """
    enrols = agents.load_settings(plan.what.settings).enrol.url is not None
    if enrols and not plan.dry_run and not (plan.authority / "ca.key").is_file():
        raise StoreError(f"no authority in {plan.authority}: `fedquilt identity init` makes one, --ca names its folder")
    plan.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    waiting = [row for row in rows if find_record(row, plan) is None]
    for row in rows:
        if row not in waiting:
            say(f"{row.name}: done before")
    now = (0, "")  # how many are over, and who is flashed

    def show_progress() -> None:
        progress.LINE.show_status(f"flashing {now[1]}", now[0], len(waiting))

    with ExitStack() as stack:
        stack.callback(progress.LINE.end_operation)
        stack.enter_context(progress.call_periodically(show_progress))
        base = plan.base
        if base is not None and len(waiting) > 1 and not plan.dry_run:
            base = plan.folder / "base.img.part"  # unpacked once for all
            stack.callback(base.unlink, missing_ok=True)
            image.copy_image(plan.base or base, base)
        for number, row in enumerate(waiting):
            now = (number, row.name)
            try:
                _flash_board(row, replace(plan, base=base), enrols, _hash_inputs(row, plan), say, now_s)
            except FedquiltError as error:
                failed[row.name] = str(error)
                say(f"{row.name}: not flashed: {error}")
    return failed


def _flash_board(
    row: BoardRow, plan: FlashPlan, enrols: bool, inputs: str, say: Say, now_s: Callable[[], float]
) -> None:
    token = _reuse_or_create_token(row, plan, now_s()) if enrols and not plan.dry_run else None
    what = replace(
        plan.what, target=row.target, device=row.name, budget=row.budget, token=token, labels=row.labels or None
    )
    place = _output_place(row, plan.base is not None, plan.folder)
    if plan.base is not None:
        where = tool.FlashDestination(image=plan.base, out=Path(place), dry_run=plan.dry_run)
    elif row.address is not None:
        where = tool.FlashDestination(ssh=row.address, dry_run=plan.dry_run)
    else:
        where = tool.FlashDestination(out=Path(place), dry_run=plan.dry_run)
    tool.flash_board(what, where, say)
    if not plan.dry_run:
        note = msgspec.json.encode(FlashRecord(inputs=inputs, place=place, written_s=now_s()))
        enrolment.write_file_with_mode(plan.folder / f"{row.name}.json", note + b"\n", 0o644)


def _output_place(row: BoardRow, imaged: bool, folder: Path) -> str:
    if imaged:
        return str(folder / f"{row.name}.img")
    return row.address or str(folder / f"{row.name}.tar")


def _reuse_or_create_token(row: BoardRow, plan: FlashPlan, at_s: float) -> Path:
    # a token of an interrupted run is used again while valid
    path = plan.folder / f"{row.name}.token"
    with closing(CertificateRegister(plan.authority / "register.db")) as register:
        if not path.is_file() or not register.is_redeemable(path.read_text(errors="replace").strip(), at_s):
            text = register.create_token(row.name, TOKEN_S, at_s)
            enrolment.write_file_with_mode(path, f"{text}\n".encode(), 0o600)
    return path


def _hash_inputs(row: BoardRow, plan: FlashPlan) -> str:
    base = None if plan.base is None or not plan.base.is_file() else (str(plan.base), plan.base.stat().st_mtime)
    return hashlib.sha256(repr((row, plan.what, toml.read_toml(plan.what.settings), base)).encode()).hexdigest()[:16]


def find_record(row: BoardRow, plan: FlashPlan) -> FlashRecord | None:
    try:
        note = msgspec.json.decode((plan.folder / f"{row.name}.json").read_bytes(), type=FlashRecord)
    except (OSError, msgspec.DecodeError):
        return None
    made = (row.address is not None and plan.base is None) or Path(note.place).is_file()
    return note if made and note.inputs == _hash_inputs(row, plan) else None


# -- how they are ---------------------------------------------------------------------------------


def read_states(rows: Sequence[BoardRow], plan: FlashPlan, failed: Mapping[str, str]) -> list[FlashState]:
    path = plan.authority / "register.db"
    with closing(CertificateRegister(path)) if path.is_file() else nullcontext() as register:
        tokens = [] if register is None else register.list_tokens()
        told = []
        for row in rows:
            note = find_record(row, plan)
            issued = [] if register is None else register.list_certificates(row.name)
            written = note.place if note else f"not written: {failed.get(row.name, 'not yet')}"
            mine = [one for one in tokens if one.pattern == row.name]
            told.append(
                FlashState(row, written, determine_enrolment_state(issued, mine, time.time()), note is not None)
            )
        return told


def determine_enrolment_state(
    issued: Sequence[IssuedCertificate], tokens: Sequence[EnrolmentToken], now_s: float
) -> EnrolmentState:
    valid = [one for one in issued if one.revoked_s is None and one.ends_s > now_s]
    token = tokens[-1] if tokens else None
    if token is not None and token.used_s is None and not any(one.issued_s >= token.made_s for one in valid):
        if token.ends_s <= now_s:
            return EnrolmentState("token expired", expired=True)
        return EnrolmentState(f"waits for its first boot, until {format_time(token.ends_s)}", waits=True)
    return EnrolmentState(f"enrolled {format_time(valid[-1].issued_s)}") if valid else EnrolmentState()


def format_states(states: Sequence[FlashState], wide: int | None = None) -> list[str]:
    rows = [(s.row.name, " ".join(s.row.labels), s.row.target, s.written, s.enrolment.text) for s in states]
    told = table.format_table([HEAD, *rows], "<", wide)
    if missing := [one.row.name for one in states if not one.done]:
        told.append(f"not written: {', '.join(missing)}; the same command again goes on with them")
    if waiting := [one.row.name for one in states if one.enrolment.waits or one.enrolment.expired]:
        told.append(f"not enrolled yet: {', '.join(waiting)}")
    return told


def watch_boards(
    look: Callable[[], Sequence[FlashState]], wait: Callable[[float], None], say: Say
) -> Sequence[FlashState]:
    """Print each change of state until no flashed board waits for its first boot. Return the states."""
    before: dict[str, EnrolmentState] = {}
    while True:
        now = look()
        for one in now:
            if before.get(one.row.name) != one.enrolment:
                before[one.row.name] = one.enrolment
                say(f"{time.strftime('%H:%M:%S')}  {one.row.name}: {one.enrolment.text}")
        if not any(one.enrolment.waits for one in now if one.done):
            return now
        wait(POLL_S)


def flash_table(table: Path, target: str | None, plan: FlashPlan, *, watch: bool) -> None:
    rows = read_table(table, target)
    failed = flash_boards(rows, plan)
    if plan.dry_run:
        return
    now: Sequence[FlashState] = []
    with suppress(KeyboardInterrupt):
        now = watch_boards(lambda: read_states(rows, plan, failed), time.sleep, print) if watch else []
    print("\n".join(format_states(now or read_states(rows, plan, failed))))
    if failed:
        raise JobError(
            f"{len(failed)} of {len(rows)} boards were not flashed: the same command again goes on with them"
        )
