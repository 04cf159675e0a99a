"""Decoders of what is sent over the network."""

from __future__ import annotations

import base64
import contextlib
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from certified import Certified
from decoding import SHA, Decoder, numbered
from signed_payloads import payload_without_check
from wired import MESSAGES

from fedquilt import compression, wire
from fedquilt.arrays import disk_arrays, tensors
from fedquilt.blobs import chunks
from fedquilt.coordinator import settings
from fedquilt.coordinator.updates import sites, validation
from fedquilt.core import (
    CODECS,
    DeviceUpdate,
    Encoding,
    JobError,
    ModelError,
    StoreError,
    Update,
    UpdateError,
    WireError,
)
from fedquilt.core.method import UpdateSchema
from fedquilt.edge_agent import enrolment as edge_agent_enrolment
from fedquilt.edge_agent import settings as agent_settings
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.methods import fedavg
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import masks
from fedquilt.onnx import graph_check
from fedquilt.security import authenticated_link, enrolment
from fedquilt.security.handshake import LinkIdentity, Session, SessionGrant
from fedquilt.tools.lab import demo
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt import client


def every(folder: Path) -> dict[str, Decoder]:
    """The decoders of what is sent, by name.

    Args:
        folder: for files of theirs, empty.
    """
    return {**_wire(), **_packets(), **_sealed(folder / "site"), **_manifests(), **_tensors(folder / "tensors")}


def _wire() -> dict[str, Decoder]:
    def reader(kind: type[Any]) -> Callable[[bytes], object]:
        return lambda payload: wire.decode(payload, kind)

    found = {}
    for message in MESSAGES:
        kind, payload = type(message), wire.encode(message)
        found[f"wire.{kind.__name__}"] = Decoder("fedquilt/wire.py", reader(kind), (WireError,), (payload,), numbered)
    topics = wire.Topics("fleet")
    named = (
        topics.coord,
        topics.device_topic("a", "up", "update"),
        topics.chunk_topic("a", "dn", SHA, 7),
        topics.round_topic("digits"),
    )
    found["wire.route"] = Decoder(
        "fedquilt/wire.py",
        lambda payload: wire.parse_topic.__wrapped__(payload.decode("utf-8", "replace")),
        (WireError,),
        tuple(map(str.encode, named)),
    )
    request = enrolment.SigningRequest(device="orin-01", csr="-----BEGIN", token="t")
    answer = enrolment.SigningResponse(certificate="-----BEGIN", reason="")
    for name, one in (("Request", request), ("Answer", answer)):
        kind = type(one)
        found[f"enrolment.{name}"] = Decoder(
            "fedquilt/security/enrolment.py",
            lambda payload, kind=kind: enrolment.decode_message(payload, kind),  # type: ignore[misc]
            (WireError,),
            (msgspec.json.encode(one),),
        )
    return found


def _packets() -> dict[str, Decoder]:
    seeds = tuple(
        client.publish_packet(level, 7, "fleet/a", b"payload" * 20, 1, False) + client.puback_packet(513)
        for level in (4, 5)
    )

    def read(payload: bytes, level: int) -> None:
        data, at = bytearray(payload), 0
        while (found := client.find_packet(data, at)) is not None:
            head, begin, at = found
            for decode in (lambda body: client.parse_publish(level, head, body), client.parse_puback):  # noqa: B023
                with contextlib.suppress(client.MalformedPacketError):
                    decode(data[begin:at])

    return {
        f"packets of MQTT {name}": Decoder(
            "fedquilt/transport/mqtt/client.py",
            lambda payload, level=level: read(payload, level),  # type: ignore[misc]
            (client.MalformedPacketError,),
            seeds,
        )
        for level, name in ((4, "3.1.1"), (5, "5"))
    }


def _sealed(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    site, grant = Certified(folder), SessionGrant("0123456789abcdef", bytes(32), 3)
    board, coordinator = (
        LinkIdentity(site.broker(name, kind)) for name, kind in (("b", "device"), ("coordinator",) * 2)
    )
    topic = wire.Topics("fleet").device_topic("b", "up", "update")
    route = wire.parse_topic(topic)
    update = next(wire.encode(message) for message in MESSAGES if isinstance(message, Update))

    def opened(payload: bytes) -> object:
        inner = payload_without_check(payload)
        assert isinstance(inner, bytes)
        return wire.decode(
            authenticated_link.verify_message(Session(grant), route, Message(topic, payload)).payload, Update
        )

    def closed(payload: bytes) -> bytes:
        return authenticated_link.make_signed_payload(Session(grant), topic, numbered(payload_without_check(payload)))

    def granted(payload: bytes) -> object:
        ours, theirs = board.start_as_device(), coordinator.start_as_coordinator()
        theirs.step(ours.step(theirs.step(ours.step(b""))))
        theirs._tls.write(payload or b"{}")
        return ours.session_from_flight(theirs._out.read())

    ours, theirs = board.start_as_device(), coordinator.start_as_coordinator()
    first = ours.step(b"")
    second = theirs.step(first)
    third = ours.step(second)
    hello = wire.encode(authenticated_link.hello_from_flight(ours, 2, third))

    def answered(payload: bytes) -> object:
        begun = board.start_as_device()
        begun.step(b"")
        return begun.step(payload)

    def proved(payload: bytes) -> object:
        begun, other = coordinator.start_as_coordinator(), board.start_as_device()
        begun.step(other.step(b""))
        return begun.step(payload)

    where = "fedquilt/security/handshake.py"
    return {
        "envelope": Decoder(
            "fedquilt/security/authenticated_link.py",
            opened,
            (WireError,),
            (authenticated_link.make_signed_payload(Session(grant), topic, update),),
            closed,
        ),
        "hello": Decoder(
            "fedquilt/security/authenticated_link.py",
            lambda payload: authenticated_link.flight_from_hello(wire.decode(payload, wire.Hello)),
            (WireError,),
            (hello,),
            numbered,
        ),
        "handshake.coordinator": Decoder(
            where, lambda payload: coordinator.start_as_coordinator().step(payload), (WireError,), (first,), share=0.02
        ),
        "handshake.board": Decoder(where, answered, (WireError,), (second,), share=0.02),
        "handshake.proof": Decoder(where, proved, (WireError,), (third,), share=0.01),
        "handshake.grant": Decoder(where, granted, (WireError,), (msgspec.json.encode(grant),), share=0.01),
        "certificate": _certificate(site, folder),
    }


def _certificate(site: Certified, folder: Path) -> Decoder:
    named = site.files("orin-01")
    files = edge_agent_enrolment.paths_from_settings(
        AgentSettings(device="orin-01", home=str(folder), broker=_broker(named), budget="1GB")
    )
    key, pem = edge_agent_enrolment.load_or_create_key(files), Path(named["cert"]).read_bytes()
    head, tail = b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n"

    def wrapped(der: bytes) -> bytes:
        return head + base64.encodebytes(der) + tail

    der = base64.b64decode(b"".join(pem.split(tail)[0].removeprefix(head).split()))
    return Decoder(
        "edge_agent/enrolment.py",
        lambda payload: edge_agent_enrolment._validity_or_reason(payload, files, "orin-01", key),
        (JobError,),
        (pem, der),
        lambda payload: wrapped(payload),
        share=0.1,
    )


def _broker(files: dict[str, str]) -> agent_settings.BrokerSettings:
    return agent_settings.BrokerSettings(url="mqtts://localhost", **files)


def _manifests() -> dict[str, Decoder]:
    update = next(message for message in MESSAGES if isinstance(message, Update))
    update = msgspec.structs.replace(update, layouts={"model": {"w": "f4:3,4", "n": "i8:"}})
    like = {"model": {"w": np.zeros((3, 4), np.float32), "n": np.array(7)}}

    def fits(payload: bytes) -> object:
        found = wire.decode(payload, Update)
        for codec in CODECS:
            for whole in (True, False):
                try:
                    validation.require_manifest_fits(found, UpdateSchema(like, whole), Encoding(codec=codec))
                except UpdateError:
                    continue
        return None

    def cut(payload: bytes) -> object:
        told = wire.decode(payload, wire.BlobManifest)
        return [
            chunks.is_valid_chunk(told, index, b"x" * 1024) for index in range(-1, min(chunks.chunk_count(told), 3))
        ]

    return {
        "manifest of an update": Decoder(
            "coordinator/updates/validation.py", fits, (WireError,), (wire.encode(update),), numbered
        ),
        "manifest of a blob": Decoder(
            "fedquilt/blobs/chunks.py",
            cut,
            (WireError,),
            (wire.encode(wire.BlobManifest(sha256=SHA, size=1500, chunk=1024, digests=SHA * 2)),),
            numbered,
        ),
    }


def _tensors(folder: Path) -> dict[str, Decoder]:
    folder.mkdir()
    roll = np.random.default_rng(0)
    model = {"a.weight": roll.random((3, 4), np.float32), "a.bias": np.zeros(3, np.float32), "n": np.array(7)}
    plain = tensors.encode_tensors(model)
    state = NetworkState({"lr": 0.1}, {"name": "mlp", "hidden": [2]}, model, 9.0, 4)
    path = folder / "floats"

    def floats(payload: bytes) -> object:
        path.write_bytes(payload)
        return list(disk_arrays.Float32Reader(path).values())

    def streamed(payload: bytes) -> None:
        path.write_bytes(payload)
        tensors.require_finite(disk_arrays.SafetensorsReader(path))

    def state_file(payload: bytes) -> object:
        path.write_bytes(payload)
        return disk_arrays.read_state(path, NetworkState)

    found = {
        "large update": Decoder(
            "fedquilt/arrays/disk_arrays.py", streamed, (UpdateError, StoreError), (plain,), measured
        ),
        "large state": Decoder(
            "fedquilt/arrays/disk_arrays.py", state_file, (StoreError,), (tensors.pack_state(state),), measured
        ),
        "tensors": Decoder(
            "fedquilt/arrays/tensors.py",
            lambda payload: tensors.require_finite(tensors.decode_tensors(payload)),
            (UpdateError,),
            (plain, tensors.encode_tensors({"b": roll.random(5) > 0.5, "h": np.ones(2, np.float16)})),
            measured,
        ),
        "state": Decoder(
            "fedquilt/arrays/tensors.py",
            lambda payload: tensors.unpack_state(payload, NetworkState),
            (StoreError,),
            (tensors.pack_state(state),),
            measured,
        ),
        "floats": Decoder("fedquilt/arrays/disk_arrays.py", floats, (UpdateError, StoreError), (plain,), measured),
        "sum of a site": _summed(state),
        "updates of a site": _passed(state),
        "boards of a site": _table(),
        "graph": Decoder("fedquilt/onnx/graph_check.py", graph_check.check_bytes, (ModelError,), _graphs(), share=0.5),
        "plan of masks": Decoder(
            "models/partial/masks.py",
            lambda payload: masks.plan_from_array(np.frombuffer(payload, np.uint8)),
            (ModelError,),
            (masks.plan_to_array(masks.plan_from_layers({"0": (4, 3), "2": (2, 4)})).tobytes(),),
        ),
    }
    base = {"a.weight": roll.random((3, 4), np.float32)}
    for codec in CODECS[1:]:
        coding = Encoding(codec=codec, keep=0.5)
        sent, _ = compression.encode_bundle(coding, {"a.weight": roll.random((3, 4), np.float32)}, base, {})

        def read(payload: bytes, coding: Encoding = coding) -> object:
            return compression.decode_bundle(coding, tensors.decode_tensors(payload), base)

        found[f"codec.{codec}"] = Decoder(
            "fedquilt/compression.py", read, (UpdateError,), (tensors.encode_tensors(sent),), measured
        )
    return found


def _summed(state: NetworkState) -> Decoder:
    method = sites.adapt_for_sites(fedavg.METHOD, settings.parse_job({"name": "j", "method": "fedavg"}), {})
    boards = [DeviceUpdate(name, 0, 3.0, {}, {"model": state.model}) for name in ("a", "b")]
    total = functools.reduce(lambda so_far, board: fedavg.fold(state, so_far, board), boards, None)

    def read(payload: bytes) -> object:
        bundles = {sites.AGGREGATE_BUNDLE: tensors.decode_tensors(payload)}
        return method.step(state, method.aggregation.fold(state, None, DeviceUpdate("site", 0, 6.0, {}, bundles)))

    arrays, skeleton = tensors.split_state(total)
    sent = tensors.encode_tensors(sites.bundle_from_aggregate(arrays, skeleton["state"], ["a", "b"]))
    return Decoder("coordinator/updates/sites.py", read, (UpdateError,), (sent,), measured)


def _passed(state: NetworkState) -> Decoder:
    method = sites.adapt_for_sites(fedavg.METHOD, settings.parse_job({"name": "j", "method": "fedavg"}), {})
    boards = [DeviceUpdate(name, 0, 3.0, {"loss": 0.5}, {"model": state.model}) for name in ("a", "b")]
    seeds = tuple(tensors.encode_tensors(bundle) for _, bundle in sites.bundle_updates(boards))

    def read(payload: bytes) -> object:
        update = DeviceUpdate("site", 0, 6.0, {}, {"site.0": tensors.decode_tensors(payload)})
        sites.parts_of_site(update)
        return method.step(state, method.aggregation.fold(state, None, update))

    return Decoder("coordinator/updates/sites.py", read, (UpdateError,), seeds, measured)


def _table() -> Decoder:
    parts = [sites.SiteUpdatePart("a", 3.0, {"loss": 0.5}, ("model",)), sites.SiteUpdatePart("b", 1.0)]

    def read(payload: bytes) -> object:
        bundle = {sites.DEVICE_TABLE: np.frombuffer(payload, np.uint8)}
        update = DeviceUpdate("site", 0, 4.0, {}, {"site.0": bundle})
        return sites.parts_of_site(update), sites.split_site_update(update)

    return Decoder("coordinator/updates/sites.py", read, (UpdateError,), (sites.encode_parts(parts).tobytes(),))


def measured(payload: bytes) -> bytes:
    end = payload.find(b"}", payload.rfind(b"data_offsets")) + 1
    end += payload[end : end + 1] == b"}"
    while end % 8 and payload[end : end + 1] == b" ":
        end += 1
    return struct.pack("<Q", end - 8) + payload[8:] if end > 8 else payload


def _graphs() -> tuple[bytes, ...]:
    found = sorted((Path(demo.__file__).parent / "bundle" / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    graphs = []
    for path in found:
        payload = path.read_bytes()
        try:
            graph_check.check_bytes(payload)
        except ModelError:
            continue
        graphs.append(payload)
    return tuple(graphs[:6])
