"""The tables of a coordinator's database, and how those of an earlier version become these."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from fedquilt.core import StoreError

VERSION = 1  # of the tables

_SCHEMA = """
create table if not exists jobs (
    id text primary key, settings text not null, bundle text not null, status text not null, created real not null,
    origin text not null default 'run', epoch integer not null default 0);
create table if not exists facts (
    seq integer primary key, job text not null references jobs(id), at real not null, body text not null);
create index if not exists facts_by_job on facts(job, seq);
create table if not exists counters (name text primary key, value integer not null);
-- what can be asked of facts: a damaged one says nothing
create view if not exists sound as
    select seq, job, case when json_valid(body) then body else '{}' end as body from facts;
"""
_ADDED = {  # columns of `jobs` that version 0 had not
    "origin": "alter table jobs add column origin text not null default 'run'",
    "epoch": "alter table jobs add column epoch integer not null default 0",
}


def bring_up_to_date(db: sqlite3.Connection, home: Path) -> None:
    """Make the tables, or give those of an earlier version what they lack.

    Raises:
        StoreError: they are of a later version.
    """
    found = int(db.execute("pragma user_version").fetchone()[0])
    if found > VERSION:
        raise StoreError(
            f"{home} was written by a newer fedquilt (tables of version {found}, this one knows {VERSION}): "
            "install that version, or give another --home"
        )
    if found == VERSION:
        return
    db.executescript(_SCHEMA)
    db.execute("begin immediate")
    there = {row[1] for row in db.execute("pragma table_info(jobs)")}
    for column, change in _ADDED.items():
        if column not in there:
            db.execute(change)
    for (id,) in db.execute("select id from jobs").fetchall():
        if (home / "agents" / id).is_dir():  # as only the boards of a simulated fleet leave behind
            db.execute("update jobs set origin = 'fleet' where id = ?", (id,))
    db.execute(f"pragma user_version = {VERSION}")
    db.execute("commit")
