"""Decoders of what lies on disks: files that the coordinator and agents write, and those that people write."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
from decoding import SHA, Decoder, numbered
from wired import MESSAGES

from fedquilt import profiles, wire
from fedquilt.blobs import pack_file
from fedquilt.coordinator import settings
from fedquilt.coordinator.device_columns import RoundBitmap
from fedquilt.coordinator.rounds import deadline, events
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState
from fedquilt.coordinator.storage import backup, rows, snapshots, write_ahead_log
from fedquilt.coordinator.storage.rows import IndexedLog
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views.scores import EvaluationScore, RunScores
from fedquilt.core import DECODE_ERRORS, BlobRef, JobError, ModelError, StoreError, Update, UpdateError, evaluation
from fedquilt.edge_agent import agent_state
from fedquilt.edge_agent import settings as agent_settings
from fedquilt.edge_agent.clocks import clock_pin
from fedquilt.formats import checksummed_json, toml
from fedquilt.formats.job_bundle import BundleIndex
from fedquilt.host.disk import REAL
from fedquilt.models.stitching import stitched_network
from fedquilt.tools.lab import demo

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def every(folder: Path) -> dict[str, Decoder]:
    """The decoders of files, by name.

    Args:
        folder: for the files, empty.
    """
    return {**_coordinator(folder / "coordinator"), **_agent(folder / "agent"), **_tables()}


def _coordinator(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    ref = BlobRef(sha256=SHA, size=3)
    update = next(message for message in MESSAGES if isinstance(message, Update))
    update = msgspec.structs.replace(update, layouts={"model": {"w": "f4:3,4", "n": "i8:"}})
    log = (
        events.JobStarted(ref),
        events.CohortSelected(0, 0, ("a", "b"), {"a": 1.0}),
        events.UpdateAccepted(0, update, 1.0),
        events.RoundCommitted(0, ref, False, {"loss": 0.5}),
        events.EligibilityRecorded(0, ("a",), {"offline": ("b",)}),
        events.TaskDeclined(0, "a", "memory", "too little"),
        events.JobEnded("done", ""),
    )
    index = BundleIndex(meta={"network": {"name": "mlp"}, "flops": 9}, files={"model": ref})
    scored = RunScores({"path": "x"}, (EvaluationScore(5, 0.5, 12, 1.25, SHA),), (), {"a": 0.5})
    known, path = _log_of(folder / "home"), folder / "small.pack"
    written = pack_file.PackFile(str(path), REAL)
    for payload in (b"first", b"second blob"):
        sha256 = hashlib.sha256(payload).hexdigest()
        written.register_blob(sha256, written.write_blob(sha256, payload), len(payload))
    packed = path.read_bytes()

    def unpacked(payload: bytes) -> object:
        path.write_bytes(payload)
        found = pack_file.PackFile(str(path), REAL)
        return [found.read_range(name) for name in found.blob_names()]

    def taken_up(payload: bytes) -> object:
        (folder / "fedquilt.db-wal").write_bytes(payload)
        return write_ahead_log.read_log(REAL, folder / "fedquilt.db").count_lost_frames(REAL, 1)

    with Store(folder / "saved") as store:
        store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), folder / "bundle")
        backup.write_backup(store, folder / "whole.tar")

    def restored(payload: bytes) -> object:
        (folder / "changed.tar").write_bytes(payload)
        shutil.rmtree(folder / "again", ignore_errors=True)
        return backup.restore_backup(folder / "changed.tar", folder / "again")

    def followed(payload: bytes) -> object:
        found = IndexedLog()
        found.add_rows("job", [(1, 1.0, payload.decode("utf-8", "replace"), b"", len(payload))])
        return found.needed_blobs or found.event_count

    plan = JobConstants.from_job(settings.parse_job({"name": "digits", "method": "fedavg"}))
    answered, history = {"a": update}, {"a": RoundBitmap(5), "b": RoundBitmap(1 << 70)}
    took = {"a": (deadline.TaskDuration(0, 1.5, 2.0),)}
    rounds = JobState(
        plan,
        "open",
        2,
        state=ref,
        pending_devices=frozenset("bc"),
        accepted_updates=answered,
        history=history,
        durations=took,
    )
    return {
        "counts of an evaluation": Decoder(
            "fedquilt/core/evaluation.py",
            lambda payload: evaluation.unpack_counts(payload, 20),
            (UpdateError,),
            tuple(evaluation.pack_counts(range(start, start + 20)) for start in (0, 120, 1 << 40)),
        ),
        "what a fact names": Decoder(
            "coordinator/storage/rows.py", followed, (), tuple(msgspec.json.encode(event) for event in log)
        ),
        "snapshot": Decoder(
            "coordinator/storage/snapshots.py",
            snapshots.decode,
            DECODE_ERRORS,
            (snapshots.encode(snapshots.Snapshot(rounds, {"a": 9}, 12)),),
        ),
        "facts": Decoder(
            "coordinator/storage/rows.py",
            lambda payload: rows.decoded(payload.decode("utf-8", "replace")),
            (msgspec.MsgspecError,),
            tuple(msgspec.json.encode(event) for event in log),
        ),
        "job as stored": Decoder(
            "coordinator/storage/store.py",
            lambda payload: msgspec.json.decode(payload.decode("utf-8", "replace"), type=settings.JobSettings),
            (msgspec.MsgspecError,),
            (msgspec.json.encode(settings.parse_job({"name": "digits", "method": "fedavg"})),),
        ),
        "bundle": Decoder(
            "fedquilt/formats/checksummed_json.py",
            lambda payload: checksummed_json.decode_with_checksum(payload, BundleIndex),
            (checksummed_json.DamagedFileError,),
            (checksummed_json.encode_with_checksum(index),),
            summed,
        ),
        "scores": Decoder(
            "fedquilt/formats/checksummed_json.py",
            lambda payload: checksummed_json.decode_with_checksum(payload, RunScores),
            (checksummed_json.DamagedFileError,),
            (checksummed_json.encode_with_checksum(scored),),
            summed,
        ),
        "backup": Decoder(
            "coordinator/storage/backup.py",
            restored,
            (StoreError,),
            ((folder / "whole.tar").read_bytes(),),
            named,
            share=0.02,
        ),
        "pack": Decoder("fedquilt/blobs/pack_file.py", unpacked, (OSError,), (packed,), share=0.5),
        "write-ahead log": Decoder(
            "coordinator/storage/write_ahead_log.py",
            taken_up,
            (),
            ((known / "fedquilt.db-wal").read_bytes(),),
            share=0.05,
        ),
    }


def named(payload: bytes) -> bytes:
    at = payload.rfind(b"manifest-") // 512 * 512
    header, rest = bytearray(payload[at : at + 512]), payload[at + 512 :]
    size = header[124:135]
    if at < 0 or len(header) < 512 or not size.isdigit():
        return payload
    content = rest[: int(size, 8)] if not set(size) & set(b"89") else rest
    header[9:73] = hashlib.sha256(content).hexdigest().encode()
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return payload[:at] + bytes(header) + rest


def summed(payload: bytes) -> bytes:
    try:
        table = json.loads(payload)
    except (ValueError, RecursionError):
        return payload
    if not isinstance(table, dict):
        return payload
    table.pop(checksummed_json.FIELD, None)
    return payload if "\ud800" in str(table) else json.dumps({**table, checksummed_json.FIELD: _sum(table)}).encode()


def _sum(table: dict[str, Any]) -> str:
    try:
        return checksummed_json._checksum_of(table)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError):
        return ""


def _log_of(home: Path) -> Path:
    with Store(home / "alive") as store:
        run = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), home)
        store.append_event(run, events.JobStarted(BlobRef(sha256=SHA, size=3)))
        shutil.copytree(home / "alive", home / "killed")
    return home / "killed"


def _agent(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    entry = agent_state.JobRecord(round=3, epoch=1, private=SHA, private_round=3)
    ledger = wire.encode(agent_state.JobRecordFile(jobs={"digits": entry}))

    def remember(payload: bytes) -> object:
        (folder / "counted.json").write_bytes(payload)
        return agent_state.JobRecords(folder, REAL, durable=False).load_counted()

    journal = clock_pin.RestoreJournal(
        boot="b", settings=clock_pin.BoardControlState(mode="MAXN", controls=()), pinned_mode="MAXN"
    )
    clamp = clock_pin.ClockPin(folder / "root", folder / "state")

    def recovered(payload: bytes) -> object:
        (folder / "state" / "clocks.json").write_bytes(payload)
        clamp._boot_id = lambda: "another"  # type: ignore[method-assign]
        return clamp.restore_after_crash()

    return {
        "counted.json": Decoder("edge_agent/agent_state.py", remember, (), (ledger,), numbered),
        "journal of clocks": Decoder(
            "edge_agent/clocks/clock_pin.py", recovered, (), (msgspec.json.encode(journal),), share=0.3
        ),
    }


def _tables() -> dict[str, Decoder]:
    jobs = tuple(path for path in sorted(EXAMPLES.glob("*/job.toml")) if path.parent.name != "outside")
    job = b'name = "digits"\nmethod = "fedavg"\nrounds = 3\n[params]\nlr = 0.1\n[cohort]\nsize = 3\nquorum = 0.5\n'
    agent = (
        b'device = "orin-01"\nbudget = "2GB"\nhome = "/h"\n[broker]\nurl = "mqtts://h:1"\nca = "x"\n[governor]\n'
        b'policy = "max"\n[data]\npath = "digits.npz"\n'
    )
    board = (Path(profiles.__file__).parent / "x86-host.toml").read_bytes()

    def text(payload: bytes) -> str:
        return payload.decode("utf-8", "replace")

    def signed(payload: bytes) -> bytes:
        return profiles.add_checksum(text(payload).rpartition("# sha256")[0] or text(payload)).encode()

    meta = json.loads((Path(demo.__file__).parent / "bundle" / "bundle.json").read_text())["meta"]

    def stock(payload: bytes) -> object:
        try:
            table = msgspec.json.decode(payload)
        except DECODE_ERRORS:
            return None
        return stitched_network.load_donor_pool(table) if isinstance(table, dict) else None

    return {
        "toml": Decoder(
            "fedquilt/formats/toml.py",
            lambda payload: toml.parse_toml(text(payload), "job.toml"),
            (JobError,),
            (job, agent),
        ),
        "job": Decoder(
            "coordinator/settings.py",
            lambda payload: settings.parse_job(toml.parse_toml(text(payload), "job.toml")),
            (JobError,),
            (job, *(path.read_bytes() for path in jobs)),
            share=0.05,
        ),
        "agent.toml": Decoder(
            "edge_agent/settings.py",
            lambda payload: agent_settings.parse_settings(toml.parse_toml(text(payload), "agent.toml")),
            (JobError,),
            (agent,),
            share=0.1,
        ),
        "profile of a board": Decoder(
            "profiles/__init__.py",
            lambda payload: profiles.parse_board_profile(text(payload), "x.toml"),
            (JobError,),
            (board,),
            signed,
            share=0.01,
        ),
        "stock of donors": Decoder(
            "models/stitching/stitched_network.py", stock, (ModelError,), (json.dumps(meta).encode(),), share=0.05
        ),
    }
