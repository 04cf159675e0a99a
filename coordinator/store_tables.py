"""Tables of a coordinator's database, their upgrade, and their integrity check."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Final

from fedquilt.coordinator import rollout_log
from fedquilt.coordinator.checksums import FIRST, chain_checksum
from fedquilt.coordinator.store_rows import Rows, Stored
from fedquilt.core import StoreError

VERSION = 4  # of the tables
CHECK_S: Final = 0.5  # that a look at the whole database may take when it is opened

_SCHEMA = """
create table if not exists jobs (
    id text primary key, settings text not null, bundle text not null, status text not null, created real not null,
    origin text not null default 'run', epoch integer not null default 0,
    head blob not null default x'', sum blob not null default x'', submitter text not null default '');
create table if not exists facts (
    seq integer primary key, job text not null references jobs(id), at real not null, body text not null,
    sum blob not null default x'');
create index if not exists facts_by_job on facts(job, seq);
create table if not exists counters (name text primary key, value integer not null, sum blob not null default x'');
-- what can be asked of facts: a damaged one says nothing
create view if not exists sound as
    select seq, job, case when json_valid(body) then body else '{}' end as body from facts;
"""
_ADDED = {  # columns that versions 0, 1 and 2 had not
    "jobs": {
        "origin": "text not null default 'run'",
        "epoch": "integer not null default 0",
        "head": "blob not null default x''",
        "sum": "blob not null default x''",
        "submitter": "text not null default ''",
    },
    "facts": {"sum": "blob not null default x''"},
    "counters": {"sum": "blob not null default x''"},
}
_OF_INDEX: Final = ("missing from index", "wrong # of entries in index", "non-unique entry in index")


def upgrade_tables(db: sqlite3.Connection, home: Path) -> None:
    """Create the tables, or upgrade those of an earlier version.

    Raises:
        StoreError: If the tables are of a later version.
    """
    found = int(db.execute("pragma user_version").fetchone()[0])
    if found > VERSION:
        raise StoreError(
            f"{home} was written by a newer fedquilt (tables of version {found}, this one knows {VERSION}): "
            "install that version, or give another --home"
        )
    if found == VERSION:
        return
    db.executescript(_SCHEMA + rollout_log.SCHEMA)  # version 4 has rollouts
    with Rows(db, home).open_transaction():
        for table, columns in _ADDED.items():
            there = {row[1] for row in db.execute(f"pragma table_info({table})")}
            for column, kind in columns.items():
                if column not in there:
                    db.execute(f"alter table {table} add column {column} {kind}")
        if found < 1:
            for (id,) in db.execute("select id from jobs where sum = x''").fetchall():
                if (home / "agents" / id).is_dir():  # as only the boards of a simulated fleet leave behind
                    db.execute("update jobs set origin = 'fleet' where id = ?", (id,))
        _add_missing_checksums(db, home)
        db.execute(f"pragma user_version = {VERSION}")


def _add_missing_checksums(db: sqlite3.Connection, home: Path) -> None:
    rows = Rows(db, home)
    for (id,) in db.execute("select id from jobs where sum = x''").fetchall():
        head = FIRST
        facts = db.execute("select seq, at, body from facts where job = ? order by seq", (id,)).fetchall()
        for seq, at, body in facts:
            head = chain_checksum(head, id, at, body)
            db.execute("update facts set sum = ? where seq = ?", (head, seq))
        found = db.execute(
            "select id, settings, bundle, status, created, origin, epoch from jobs where id = ?", (id,)
        ).fetchone()
        row = Stored(*found)._replace(head=head)
        db.execute("update jobs set head = ?, sum = ? where id = ?", (head, row.row_checksum, id))
    for name, value in db.execute("select name, value from counters where sum = x''").fetchall():
        rows.set_counter(name, value)


def find_damage(db: sqlite3.Connection, limit_s: float = CHECK_S) -> str:
    """Return the damage that SQLite finds within `limit_s`, or "". A wrong index is rebuilt."""
    said = _check_integrity(db, limit_s)
    if said and all(any(kind in line for kind in _OF_INDEX) for line in said):
        db.execute("reindex")
        said = _check_integrity(db, limit_s)
    return "; ".join(said[:3])


def _check_integrity(db: sqlite3.Connection, limit_s: float) -> list[str]:
    until_s = time.monotonic() + limit_s
    db.set_progress_handler(lambda: int(time.monotonic() > until_s), 10_000)
    try:
        rows = [str(row[0]) for row in db.execute("pragma integrity_check(10)")]
        said = [line for row in rows for line in row.splitlines() if not line.startswith("***")]  # "*** in database"
    except sqlite3.OperationalError as error:
        return [] if "interrupted" in str(error) else [str(error)]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    finally:
        db.set_progress_handler(None, 0)
        db.execute("pragma shrink_memory")
    return [] if said == ["ok"] else said
