"""Every decoder of both sides: where it is, valid inputs of it, and the errors that it may raise."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import classifiers
import msgspec
import numpy as np
from certified import Certified
from wired import MESSAGES

from fedquilt import checked, compression, config, enrolment, graph_check, profiles, tensors, wire
from fedquilt.blobs import chunks, pack
from fedquilt.bundle import Index
from fedquilt.coordinator import backup, facts, manifest, settings, store_rows, write_ahead
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views.scores import Score, Scores
from fedquilt.core import (
    CODECS,
    UNDECODABLE,
    BlobRef,
    DataError,
    Encoding,
    JobError,
    ModelError,
    StoreError,
    Update,
    UpdateError,
    WireError,
)
from fedquilt.core.method import Expected
from fedquilt.disk import REAL
from fedquilt.edge_agent import enrol, remembered
from fedquilt.edge_agent import settings as agent_settings
from fedquilt.edge_agent.clocks import client, helper, hold
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import process, protocol
from fedquilt.methods import fedavg
from fedquilt.models.partial import masks
from fedquilt.models.stitching import stitched
from fedquilt.tools import demo
from fedquilt.tools.runner import drift
from fedquilt.tools.runner.models import Models
from fedquilt.tools.runner.service import Service
from fedquilt.transport import envelope, sealed
from fedquilt.transport.handshake import Grant, Identity, Session
from fedquilt.transport.link import Message

SHA = "ab" * 32
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Decoder:
    """One way of bytes into a side.

    Args:
        module: that decodes, below the checkout.
        read: takes bytes; whatever it returns is right.
        errors: that it may raise, as its docstring says.
        seeds: valid inputs.
        dress: gives changed bytes the checksum or code that they need to be looked into.
        share: of the inputs, where it is slow.
    """

    module: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    dress: Callable[[bytes], bytes] | None = None
    share: float = 1.0


def every(folder: Path) -> dict[str, Decoder]:
    """All decoders by name.

    Args:
        folder: for files of theirs, empty.
    """
    return {
        **_wire(),
        **_sealed(folder / "site"),
        **_tensors(folder / "tensors"),
        **_coordinator(folder / "coordinator"),
        **_agent(folder / "agent"),
        **_tables(),
        **_runner(folder / "runner"),
    }


# -- messages -------------------------------------------------------------------------------------


def numbered(payload: bytes) -> bytes:
    """A message with the right checksum for what follows it."""
    at = payload.find(b',"crc":"') + 16
    return b'{"v":1,"crc":"%08x"' % zlib.crc32(payload[at + 1 :]) + payload[at + 1 :] if at > 16 else payload


def _wire() -> dict[str, Decoder]:
    def reader(kind: type[Any]) -> Callable[[bytes], object]:
        return lambda payload: wire.decode(payload, kind)

    found = {}
    for message in MESSAGES:
        kind, payload = type(message), wire.encode(message)
        found[f"wire.{kind.__name__}"] = Decoder("fedquilt/wire.py", reader(kind), (WireError,), (payload,), numbered)
    topics = wire.Topics("fleet")
    named = (topics.coord, topics.device("a", "up", "update"), topics.chunk("a", "dn", SHA, 7), topics.job("digits"))
    found["wire.route"] = Decoder(
        "fedquilt/wire.py",
        lambda payload: wire.route.__wrapped__(payload.decode("utf-8", "replace")),
        (WireError,),
        tuple(map(str.encode, named)),
    )
    request = enrolment.Request(device="orin-01", csr="-----BEGIN", token="t")
    answer = enrolment.Answer(certificate="-----BEGIN", reason="")
    for name, one in (("Request", request), ("Answer", answer)):
        kind = type(one)
        found[f"enrolment.{name}"] = Decoder(
            "fedquilt/enrolment.py",
            lambda payload, kind=kind: enrolment.decode(payload, kind),  # type: ignore[misc]
            (WireError,),
            (msgspec.json.encode(one),),
        )
    return found


def _sealed(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    site, grant = Certified(folder), Grant("0123456789abcdef", bytes(32), 3)
    board, coordinator = (Identity(site.broker(name, kind)) for name, kind in (("b", "device"), ("coordinator",) * 2))
    topic = wire.Topics("fleet").device("b", "up", "update")
    route = wire.route(topic)
    update = next(wire.encode(message) for message in MESSAGES if isinstance(message, Update))

    def opened(payload: bytes) -> object:
        inner = envelope.inside(payload)
        assert isinstance(inner, bytes)
        return wire.decode(envelope.open(Session(grant), route, Message(topic, payload)).payload, Update)

    def closed(payload: bytes) -> bytes:
        return envelope.close(Session(grant), topic, numbered(envelope.inside(payload)))

    def granted(payload: bytes) -> object:
        ours, theirs = board.board(), coordinator.coordinator()
        theirs.step(ours.step(theirs.step(ours.step(b""))))
        theirs._tls.write(payload or b"{}")
        return ours.granted(theirs._out.read())

    ours, theirs = board.board(), coordinator.coordinator()
    first = ours.step(b"")
    second = theirs.step(first)
    third = ours.step(second)
    hello = wire.encode(sealed.flight(ours, 2, third))

    def answered(payload: bytes) -> object:
        begun = board.board()
        begun.step(b"")
        return begun.step(payload)

    def proved(payload: bytes) -> object:
        begun, other = coordinator.coordinator(), board.board()
        begun.step(other.step(b""))
        return begun.step(payload)

    where = "fedquilt/transport/handshake.py"
    return {
        "envelope": Decoder(
            "fedquilt/transport/envelope.py",
            opened,
            (WireError,),
            (envelope.close(Session(grant), topic, update),),
            closed,
        ),
        "hello": Decoder(
            "fedquilt/transport/sealed.py",
            lambda payload: sealed.data_of(wire.decode(payload, wire.Hello)),
            (WireError,),
            (hello,),
            numbered,
        ),
        "handshake.coordinator": Decoder(
            where, lambda payload: coordinator.coordinator().step(payload), (WireError,), (first,), share=0.02
        ),
        "handshake.board": Decoder(where, answered, (WireError,), (second,), share=0.02),
        "handshake.proof": Decoder(where, proved, (WireError,), (third,), share=0.01),
        "handshake.grant": Decoder(where, granted, (WireError,), (msgspec.json.encode(grant),), share=0.01),
        "certificate": _certificate(site, folder),
    }


def _certificate(site: Certified, folder: Path) -> Decoder:
    named = site.files("orin-01")
    files = enrol.paths(AgentSettings(device="orin-01", home=str(folder), broker=_broker(named), budget="1GB"))
    key, pem = enrol.own_key(files), Path(named["cert"]).read_bytes()
    head, tail = b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n"

    def wrapped(der: bytes) -> bytes:
        return head + base64.encodebytes(der) + tail

    der = base64.b64decode(b"".join(pem.split(tail)[0].removeprefix(head).split()))
    return Decoder(
        "edge_agent/enrol.py",
        lambda payload: enrol._parse(payload, files, "orin-01", key),
        (JobError,),
        (pem, der),
        lambda payload: wrapped(payload),
        share=0.1,
    )


def _broker(files: dict[str, str]) -> agent_settings.BrokerSettings:
    return agent_settings.BrokerSettings(url="mqtts://localhost", **files)


# -- tensors and graphs ---------------------------------------------------------------------------


def _tensors(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    roll = np.random.default_rng(0)
    model = {"a.weight": roll.random((3, 4), np.float32), "a.bias": np.zeros(3, np.float32), "n": np.array(7)}
    plain = tensors.encode(model)
    state = fedavg.State({"lr": 0.1}, {"name": "mlp", "hidden": [2]}, model, 9.0, 4)
    path = folder / "floats"

    def floats(payload: bytes) -> object:
        path.write_bytes(payload)
        return list(tensors.Floats(path).values())

    found = {
        "tensors": Decoder(
            "fedquilt/tensors.py",
            lambda payload: tensors.require_finite(tensors.decode(payload)),
            (UpdateError,),
            (plain, tensors.encode({"b": roll.random(5) > 0.5, "h": np.ones(2, np.float16)})),
            measured,
        ),
        "state": Decoder(
            "fedquilt/tensors.py",
            lambda payload: tensors.unpack(payload, fedavg.State),
            (StoreError,),
            (tensors.pack(state),),
            measured,
        ),
        "floats": Decoder("fedquilt/tensors.py", floats, (UpdateError, StoreError), (plain,), measured),
        "graph": Decoder("fedquilt/graph_check.py", graph_check.of_bytes, (ModelError,), _graphs(), share=0.5),
        "plan of masks": Decoder(
            "models/partial/masks.py",
            lambda payload: masks.from_array(np.frombuffer(payload, np.uint8)),
            (ModelError,),
            (masks.to_array(masks.dense({"0": (4, 3), "2": (2, 4)})).tobytes(),),
        ),
    }
    base = {"a.weight": roll.random((3, 4), np.float32)}
    for codec in CODECS[1:]:
        coding = Encoding(codec=codec, keep=0.5)
        sent, _ = compression.encode(coding, {"a.weight": roll.random((3, 4), np.float32)}, base, {})

        def read(payload: bytes, coding: Encoding = coding) -> object:
            return compression.decode(coding, tensors.decode(payload), base)

        found[f"codec.{codec}"] = Decoder(
            "fedquilt/compression/__init__.py", read, (UpdateError,), (tensors.encode(sent),), measured
        )
    return found


def measured(payload: bytes) -> bytes:
    """A safetensors blob whose first number is the size of its header, if that can be told."""
    end = payload.find(b"}", payload.rfind(b"data_offsets")) + 1
    end += payload[end : end + 1] == b"}"
    while end % 8 and payload[end : end + 1] == b" ":
        end += 1
    return struct.pack("<Q", end - 8) + payload[8:] if end > 8 else payload


def _graphs() -> tuple[bytes, ...]:
    """The demo's graphs that are small."""
    found = sorted((Path(demo.__file__).parent / "bundle" / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    graphs = []
    for path in found:
        payload = path.read_bytes()
        try:
            graph_check.of_bytes(payload)
        except ModelError:
            continue
        graphs.append(payload)
    return tuple(graphs[:6])


# -- what a model runner is asked -----------------------------------------------------------------


def _runner(folder: Path) -> dict[str, Decoder]:
    """Bodies of requests, with a network of ours behind them, and the counts that it keeps of one."""
    place = classifiers.written(folder / "model.onnx")
    answers = Service(Models(place, threads=1), size=20)
    x = np.stack([classifiers.image(level) for level in (0, 90, 250)])
    files = [io.BytesIO() for _ in range(4)]
    np.save(files[0], x[0])
    np.save(files[1], np.asfortranarray(x[1].astype(np.float64)))
    np.savez(files[2], x=x, y=np.array([0, 1, 1]))
    np.savez_compressed(files[3], x=x)
    bodies = [each.getvalue() for each in files]
    for _ in range(20):
        answers.asked(bodies[2])
    kept = drift.reference(("mean",), np.arange(60.0)[:, None], np.arange(60) % 2)

    def compared(payload: bytes) -> object:
        found = msgspec.json.decode(payload, type=drift.Reference)
        if found.whole:
            counted = drift.Drift(found)
            counted.add(found.names, np.ones((60, len(found.names))), [0] * 60)
            assert 0.0 <= (counted.score() or 0.0) <= 1.0
        return found

    return {
        "asked": Decoder("tools/artefacts/classifier.py", answers.asked, (DataError,), tuple(bodies), share=0.2),
        "reference": Decoder("tools/runner/service.py", compared, UNDECODABLE, (msgspec.json.encode(kept),), share=0.2),
    }


# -- what the coordinator reads -------------------------------------------------------------------


def _coordinator(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    ref = BlobRef(sha256=SHA, size=3)
    update = next(message for message in MESSAGES if isinstance(message, Update))
    update = msgspec.structs.replace(update, layouts={"model": {"w": "f4:3,4", "n": "i8:"}})
    log = (
        facts.Started(ref),
        facts.Asked(0, 0, ("a", "b"), {"a": 1.0}),
        facts.Answered(0, update, 1.0),
        facts.Committed(0, ref, False, {"loss": 0.5}),
        facts.Surveyed(0, ("a",), {"offline": ("b",)}),
        facts.Declined(0, "a", "memory", "too little"),
        facts.Ended("done", ""),
    )
    like = {"model": {"w": np.zeros((3, 4), np.float32), "n": np.array(7)}}

    def fits(payload: bytes) -> object:
        found = wire.decode(payload, Update)
        for codec in CODECS:
            for whole in (True, False):
                try:
                    manifest.require_fit(found, Expected(like, whole), Encoding(codec=codec), None)
                except UpdateError:
                    continue
        return None

    def cut(payload: bytes) -> object:
        told = wire.decode(payload, wire.Manifest)
        return [chunks.is_chunk(told, index, b"x" * 1024) for index in range(-1, min(chunks.count(told), 3))]

    index = Index(meta={"network": {"name": "mlp"}, "flops": 9}, files={"model": ref})
    scored = Scores({"path": "x"}, (Score(5, 0.5, 12, 1.25, SHA),), (), {"a": 0.5})
    known, path = _log_of(folder / "home"), folder / "small.pack"
    written = pack.Pack(str(path))
    for payload in (b"first", b"second blob"):
        sha256 = hashlib.sha256(payload).hexdigest()
        written.name(sha256, written.put(sha256, payload), len(payload))
    packed = path.read_bytes()

    def unpacked(payload: bytes) -> object:
        path.write_bytes(payload)
        found = pack.Pack(str(path))
        return [found.read(name) for name in found.names()]

    def taken_up(payload: bytes) -> object:
        (folder / "fedquilt.db-wal").write_bytes(payload)
        return write_ahead.look(REAL, folder / "fedquilt.db").lost(REAL)

    shutil.copy(known / "fedquilt.db-shm", folder)
    with Store(folder / "saved") as store:
        store.add(settings.parse({"name": "digits", "method": "fedavg"}), folder / "bundle")
        backup.save(store, folder / "whole.tar")

    def restored(payload: bytes) -> object:
        (folder / "changed.tar").write_bytes(payload)
        shutil.rmtree(folder / "again", ignore_errors=True)
        return backup.restore(folder / "changed.tar", folder / "again")

    return {
        "facts": Decoder(
            "coordinator/store_rows.py",
            lambda payload: store_rows.decoded(payload.decode("utf-8", "replace")),
            (msgspec.MsgspecError,),
            tuple(msgspec.json.encode(fact) for fact in log),
        ),
        "job as stored": Decoder(
            "coordinator/store.py",
            lambda payload: msgspec.json.decode(payload.decode("utf-8", "replace"), type=settings.Job),
            (msgspec.MsgspecError,),
            (msgspec.json.encode(settings.parse({"name": "digits", "method": "fedavg"})),),
        ),
        "manifest of an update": Decoder(
            "coordinator/manifest.py", fits, (WireError,), (wire.encode(update),), numbered
        ),
        "manifest of a blob": Decoder(
            "fedquilt/blobs/chunks.py",
            cut,
            (WireError,),
            (wire.encode(wire.Manifest(sha256=SHA, size=1500, chunk=1024, digests=SHA * 2)),),
            numbered,
        ),
        "bundle": Decoder(
            "fedquilt/checked.py",
            lambda payload: checked.decode(payload, Index),
            (checked.DamagedFileError,),
            (checked.encode(index),),
            summed,
        ),
        "scores": Decoder(
            "fedquilt/checked.py",
            lambda payload: checked.decode(payload, Scores),
            (checked.DamagedFileError,),
            (checked.encode(scored),),
            summed,
        ),
        "backup": Decoder(
            "coordinator/backup.py", restored, (StoreError,), ((folder / "whole.tar").read_bytes(),), named, share=0.02
        ),
        "pack": Decoder("fedquilt/blobs/pack.py", unpacked, (OSError,), (packed,), share=0.5),
        "write-ahead log": Decoder(
            "coordinator/write_ahead.py", taken_up, (), ((known / "fedquilt.db-wal").read_bytes(),), share=0.05
        ),
    }


def named(payload: bytes) -> bytes:
    """A backup whose manifest, the last member, is named by what it holds, with the right sum of that header."""
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
    """A file of `fedquilt.checked` with the right checksum, if it is JSON."""
    try:
        table = json.loads(payload)
    except (ValueError, RecursionError):
        return payload
    if not isinstance(table, dict):
        return payload
    table.pop(checked.FIELD, None)
    return payload if "\ud800" in str(table) else json.dumps({**table, checked.FIELD: _sum(table)}).encode()


def _sum(table: dict[str, Any]) -> str:
    try:
        return checked._sum(table)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError):
        return ""


def _log_of(home: Path) -> Path:
    """A home as SIGKILL leaves it, with facts in the log alone."""
    with Store(home / "alive") as store:
        run = store.add(settings.parse({"name": "digits", "method": "fedavg"}), home)
        store.append(run, facts.Started(BlobRef(sha256=SHA, size=3)))
        shutil.copytree(home / "alive", home / "killed")
    return home / "killed"


# -- what an agent reads --------------------------------------------------------------------------


def _agent(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    entry = remembered.Entry(round=3, epoch=1, private=SHA, left=3)
    ledger = wire.encode(remembered.Ledger(jobs={"digits": entry}))

    def remember(payload: bytes) -> object:
        (folder / "counted.json").write_bytes(payload)
        return remembered.Remembered(folder, REAL, durable=False).recover()

    task = next(message for message in MESSAGES if type(message).__name__ == "Task")
    order = protocol.Order(
        task=task, device="a", budget_bytes=1, data={}, bundles={}, private=None, cache="/c", out="/o"
    )
    outcome = protocol.Outcome(metrics={"loss": 0.5}, bundles={"model": BlobRef(sha256=SHA, size=3)}, reason="x")
    child = _child()

    def answered(payload: bytes) -> object:
        return child(payload.replace(b"\n", b" ") + b"\n")

    clock = client.Clock(
        name="gpu", kind="gpu", listed_hz=(1e9,), low_hz=1e8, high_hz=1e9, now_hz=1e9, governor="performance"
    )
    status = client.Answer(status=client.Status(clocks=(clock,), mode="MAXN"))
    held = msgspec.json.encode(client.Hold(point=client.OperatingPoint("p", 1e9, 1e9, 1e9)))
    journal = hold.Journal(boot="b", settings=hold.Settings(mode="MAXN", levers=()), put="MAXN")
    clamp = hold.Clamp(folder / "root", folder / "state")

    def recovered(payload: bytes) -> object:
        (folder / "state" / "clocks.json").write_bytes(payload)
        clamp._boot = lambda: "another"  # type: ignore[method-assign]
        return clamp.recover()

    served = helper.Helper.__new__(helper.Helper)
    served._now_s = served._heard_s = 0.0
    served._decoder, served._holder, served._status = msgspec.json.Decoder(client.Request), None, lambda: None  # type: ignore[assignment,method-assign,return-value]

    return {
        "counted.json": Decoder("edge_agent/remembered.py", remember, (), (ledger, b'{"digits":3}'), numbered),
        "order": Decoder(
            "edge_agent/task/main.py",
            lambda payload: msgspec.json.decode(payload, type=protocol.Order),
            (msgspec.MsgspecError, UnicodeDecodeError, RecursionError),  # its own daemon's, which it trusts
            (msgspec.json.encode(order),),
        ),
        "answer of a task": Decoder(
            "edge_agent/task/process.py",
            answered,
            (),
            tuple(map(msgspec.json.encode, (outcome, protocol.Loaded(3), protocol.Progressed(0.5)))),
        ),
        "answer of the clock helper": Decoder(
            "edge_agent/clocks/client.py",
            _asked(folder),
            (client.ClockError,),
            (msgspec.json.encode(status),),
            share=0.3,
        ),
        "request to the clock helper": Decoder(
            "edge_agent/clocks/helper.py",
            lambda payload: served._answer(None, payload),  # type: ignore[arg-type]
            (),
            (msgspec.json.encode(client.Ask()), msgspec.json.encode(client.Keepalive())),
        ),
        "hold of clocks": Decoder(
            "edge_agent/clocks/helper.py",
            lambda payload: served._decoder.decode(payload),
            (msgspec.DecodeError, ValueError, RecursionError),  # that `_answer` takes
            (held,),
        ),
        "journal of clocks": Decoder(
            "edge_agent/clocks/hold.py", recovered, (), (msgspec.json.encode(journal),), share=0.3
        ),
    }


def _child() -> Callable[[bytes], object]:
    """What the daemon makes of a line that its task's process writes."""
    import os

    child = process.Child.__new__(process.Child)
    child._line = child._tail = child._unsent = b""
    child.garbled, child._errors = False, None

    def read(line: bytes) -> object:
        out, into = os.pipe()
        os.set_blocking(out, False)
        os.write(into, line[: 1 << 15] if len(line) > 1 << 15 else line)
        os.close(into)
        child._answers = os.fdopen(out, "rb", buffering=0)
        child._line = b""
        return child.receive()

    return read


def _asked(folder: Path) -> Callable[[bytes], object]:
    """What an agent makes of the clock helper's answer."""
    import socket

    def read(payload: bytes) -> object:
        ours, theirs = socket.socketpair()
        clocks = client.Clocks.__new__(client.Clocks)
        clocks._line, clocks._path = ours, folder
        clocks._decoder = msgspec.json.Decoder(client.Answer)
        with ours, theirs:
            theirs.sendall(payload[: 1 << 15].replace(b"\n", b" ") + b"\n")
            return clocks._ask(client.Ask())

    return read


# -- decoders of files that people write -----------------------------------------------------------


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
        return profiles.signed(text(payload).rpartition("# sha256")[0] or text(payload)).encode()

    meta = json.loads((Path(demo.__file__).parent / "bundle" / "bundle.json").read_text())["meta"]

    def stock(payload: bytes) -> object:
        try:
            table = msgspec.json.decode(payload)
        except UNDECODABLE:
            return None
        return stitched.stock(table) if isinstance(table, dict) else None

    return {
        "toml": Decoder(
            "fedquilt/config.py", lambda payload: config.parse(text(payload), "job.toml"), (JobError,), (job, agent)
        ),
        "job": Decoder(
            "coordinator/settings.py",
            lambda payload: settings.parse(config.parse(text(payload), "job.toml")),
            (JobError,),
            (job, *(path.read_bytes() for path in jobs)),
            share=0.05,
        ),
        "agent.toml": Decoder(
            "edge_agent/settings.py",
            lambda payload: agent_settings.parse(config.parse(text(payload), "agent.toml")),
            (JobError,),
            (agent,),
            share=0.1,
        ),
        "profile of a board": Decoder(
            "profiles/__init__.py",
            lambda payload: profiles.parse(text(payload), "x.toml"),
            (JobError,),
            (board,),
            signed,
            share=0.01,
        ),
        "stock of donors": Decoder(
            "models/stitching/stitched.py", stock, (ModelError,), (json.dumps(meta).encode(),), share=0.05
        ),
    }
