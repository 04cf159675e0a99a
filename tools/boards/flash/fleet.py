"""Flashing of every board in a table, with progress files for a later continuation.

name,target,budget,labels,address
orin-01,jetpack6,2GB,hall-a,me@10.0.0.11
pi-07,raspberry-pi-os,,hall-b window,

A folder contains the output: `NAME.token`, `NAME.img` or `NAME.tar`, and `NAME.json` for each flashed board. The state
of enrolment is in the authority's register.
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
from typing import Final

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
from fedquilt.tools.identity.register import TOKEN_VALIDITY_S, CertificateRegister

COLUMNS: Final = ("name", "target", "budget", "labels", "address")
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
HEADER: Final = ("board", "labels", "target", "written to")
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class BoardRow:
    name: str
    target: str
    budget: str | None = None
    labels: tuple[str, ...] = ()  # empty for the labels of agent.toml
    address: str | None = None  # for ssh, or None to write an image or archive


@dataclass(frozen=True)
class FlashPlan:
    """Settings, packages and output folder for flashing the boards of a table.

    Attributes:
        content: Settings and packages of all boards. Name, target, budget and token come from the table.
        base_image: Disk image, or None to use ssh for rows with an address and archives for the rest.
        folder: Output folder.
        authority: Folder of the certificate authority, whose register receives the tokens.
    """

    content: tool.FlashContent
    base_image: Path | None
    folder: Path
    authority: Path
    dry_run: bool = False


class FlashRecord(msgspec.Struct, frozen=True):
    inputs: str  # hash of all inputs of the bundle
    destination: str
    written_s: float  # since 1970


# -- table ----------------------------------------------------------------------------------------


def read_table(path: Path, target: str | None = None) -> list[BoardRow]:
    """Read a table of boards, with `target` as their default. Raise JobError for invalid rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            csv_rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = f"write a CSV file whose first line is {_format_header()}"
        raise JobError(f"--boards {path} cannot be read ({error}): {fix}") from None
    rows: list[BoardRow] = []
    for number, csv_row in enumerate(csv_rows, 2):
        line = f"{path}, line {number}"
        if None in csv_row or (unknown := sorted(set(csv_row) - set(COLUMNS))):
            problem = "more values than columns" if None in csv_row else f"unknown column {unknown[0]!r}"
            raise JobError(f"{line}: {problem}: the columns are {_format_header()}")
        row = _parse_row({key: (value or "").strip() for key, value in csv_row.items()}, target, line)
        if row.name in {known_row.name for known_row in rows}:
            raise JobError(f"{line}: board {row.name} is in the table twice: remove one line")
        rows.append(row)
    if not rows:
        raise JobError(f"{path} has no board: write the line {_format_header()}, then one line for each board")
    return rows


def _format_header() -> str:
    return ",".join(COLUMNS)


def _parse_row(csv_row: Mapping[str, str], target: str | None, line: str) -> BoardRow:
    name = csv_row.get("name", "")
    if not NAME.fullmatch(name):
        raise JobError(f"{line}: board name {name!r} is invalid: use up to 64 of a-z, 0-9, '.', '_' and '-'")
    target_name = csv_row.get("target") or target
    if not target_name:
        raise JobError(f"{line}: {name} has no target: write one of {', '.join(targets.TARGETS)}, or give --target")
    try:
        if target_name not in targets.TARGETS or targets.TARGETS[target_name].python:
            targets.find_target(target_name)
        if csv_row.get("budget"):
            agents.parse_size(csv_row["budget"])
        labels = words.parse_labels(words.split_words(csv_row.get("labels", "")))
    except JobError as error:
        raise JobError(f"{line}: {error}") from None
    return BoardRow(name, target_name, csv_row.get("budget") or None, labels, csv_row.get("address") or None)


# -- flashing -------------------------------------------------------------------------------------


def flash_boards(
    rows: Sequence[BoardRow],
    plan: FlashPlan,
    print_line: PrintLine = progress.LINE.print_to_stdout,
    now_s: Callable[[], float] = time.time,
) -> dict[str, str]:
    """Flash all boards without a valid record, and return the error of each board that failed.

    A failure does not stop the others. Raise StoreError if the boards enrol and `plan.authority` has no authority.
    """
    can_enrol = agents.load_settings(plan.content.settings).enrol.url is not None
    if can_enrol and not plan.dry_run and not (plan.authority / "ca.key").is_file():
        fix = "create one with `fedquilt identity init`, or name its folder with --ca"
        raise StoreError(f"no authority in {plan.authority}: {fix}")
    plan.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    waiting_rows = [row for row in rows if find_record(row, plan) is None]
    for row in rows:
        if row not in waiting_rows:
            print_line(f"{row.name}: flashed before")
    progress_state = (0, "")  # completed devices, current device

    def show_progress() -> None:
        progress.LINE.show_status(f"flashing {progress_state[1]}", progress_state[0], len(waiting_rows))

    with ExitStack() as stack:
        stack.callback(progress.LINE.end_operation)
        stack.enter_context(progress.call_periodically(show_progress))
        base_image = plan.base_image
        if base_image is not None and len(waiting_rows) > 1 and not plan.dry_run:
            base_image = plan.folder / "base.img.part"  # unpacked once for all
            stack.callback(base_image.unlink, missing_ok=True)
            image.copy_image(plan.base_image or base_image, base_image)
        for number, row in enumerate(waiting_rows):
            progress_state = (number, row.name)
            try:
                board_plan = replace(plan, base_image=base_image)
                _flash_board(row, board_plan, can_enrol, _hash_inputs(row, plan), print_line, now_s)
            except FedquiltError as error:
                failed[row.name] = str(error)
                print_line(f"{row.name}: not flashed: {error}")
    return failed


def _flash_board(
    row: BoardRow, plan: FlashPlan, can_enrol: bool, inputs: str, print_line: PrintLine, now_s: Callable[[], float]
) -> None:
    token = _reuse_or_create_token(row, plan, now_s()) if can_enrol and not plan.dry_run else None
    content = replace(
        plan.content, target=row.target, device=row.name, budget=row.budget, token=token, labels=row.labels or None
    )
    destination_name = _output_place(row, plan.base_image is not None, plan.folder)
    if plan.base_image is not None:
        destination = tool.FlashDestination(image=plan.base_image, out=Path(destination_name), dry_run=plan.dry_run)
    elif row.address is not None:
        destination = tool.FlashDestination(ssh=row.address, dry_run=plan.dry_run)
    else:
        destination = tool.FlashDestination(out=Path(destination_name), dry_run=plan.dry_run)
    tool.flash_board(content, destination, print_line)
    if not plan.dry_run:
        record_json = msgspec.json.encode(FlashRecord(inputs=inputs, destination=destination_name, written_s=now_s()))
        enrolment.write_file_with_mode(plan.folder / f"{row.name}.json", record_json + b"\n", 0o644)


def _output_place(row: BoardRow, has_image: bool, folder: Path) -> str:
    if has_image:
        return str(folder / f"{row.name}.img")
    return row.address or str(folder / f"{row.name}.tar")


def _reuse_or_create_token(row: BoardRow, plan: FlashPlan, now_s: float) -> Path:
    # a token of an interrupted run is used again while valid
    path = plan.folder / f"{row.name}.token"
    with closing(CertificateRegister(plan.authority / "register.db")) as register:
        if not path.is_file() or not register.is_redeemable(path.read_text(errors="replace").strip(), now_s):
            with register.transaction():
                text = register.create_token(row.name, TOKEN_VALIDITY_S, now_s)
                enrolment.write_file_with_mode(path, f"{text}\n".encode(), 0o600)
    return path


def _hash_inputs(row: BoardRow, plan: FlashPlan) -> str:
    base = None
    if plan.base_image is not None and plan.base_image.is_file():
        base = (str(plan.base_image), plan.base_image.stat().st_mtime)
    inputs = (row, plan.content, toml.read_toml(plan.content.settings), base)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def find_record(row: BoardRow, plan: FlashPlan) -> FlashRecord | None:
    """Return the record of a flashed board, or None if it is missing or its inputs or output changed."""
    try:
        record = msgspec.json.decode((plan.folder / f"{row.name}.json").read_bytes(), type=FlashRecord)
    except (OSError, msgspec.DecodeError):
        return None
    is_output_present = (row.address is not None and plan.base_image is None) or Path(record.destination).is_file()
    return record if is_output_present and record.inputs == _hash_inputs(row, plan) else None


# -- result ---------------------------------------------------------------------------------------


def flash_table(table_path: Path, target: str | None, plan: FlashPlan) -> None:
    """Flash the boards of a table and print their destinations. Raise JobError if a board failed."""
    rows = read_table(table_path, target)
    failed = flash_boards(rows, plan)
    if not plan.dry_run:
        print("\n".join(format_destinations(rows, plan, failed)))
    if failed:
        raise JobError(f"{len(failed)} of {len(rows)} boards were not flashed: repeat the command to continue")


def format_destinations(rows: Sequence[BoardRow], plan: FlashPlan, failed: Mapping[str, str]) -> list[str]:
    records = {row.name: find_record(row, plan) for row in rows}
    destinations = {
        name: record.destination if record else f"not written: {failed.get(name, 'not yet')}"
        for name, record in records.items()
    }
    cells = [(row.name, " ".join(row.labels), row.target, destinations[row.name]) for row in rows]
    return table.format_table([HEADER, *cells], "<")
