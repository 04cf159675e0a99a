"""Wire protocol: topic, struct and bytes of every message.

A control message is one JSON object that any dashboard can read. It begins with the protocol version and a CRC-32 of
the rest, so that a flipped bit is found before decoding:

    {"v":1,"crc":"1c291ca3","job":"digits","round":3, ...}

A chunk of a blob is its raw bytes under a topic with its sha256 and index. The module does no I/O and is the same for
both sides. `decode` and `parse_topic` return a value or raise `WireError`, nothing else.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta

from fedquilt.core import (
    DECODE_ERRORS,
    Amount,
    BlobRef,
    Count,
    DeviceReport,
    Digest,
    LocationOffer,
    Metrics,
    Name,
    OptionalDigest,
    Profile,
    Seconds,
    Sentence,
    ShortText,
    Task,
    Update,
    UploadProgress,
    WireError,
    WireMessage,
)

VERSION: Final = 1
MAX_CONTROL: Final = 64 * 1024  # bytes of a control message other than a manifest, which may fill a chunk
MAX_CHUNK: Final = 256 * 1024
MIN_CHUNK: Final = 1024
MAX_WINDOW: Final = 64  # chunk indices in one request

Seconds1970 = Annotated[float, Meta(ge=-1e12, le=1e12)]

# -- messages -------------------------------------------------------------------------------------


class CoordState(WireMessage, frozen=True):
    """State of the coordinator on coord/state, retained and used as last will.

    On dn/presence, the message requests the presence of a device.
    """

    online: bool
    epoch: Count = 0  # number of coordinator starts


class ProcessState(WireMessage, frozen=True):
    """Process that uses the name of a coordinator or device, on coord/process or dev/<device>/process, retained."""

    process: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]  # earlier starts have smaller ids
    number: Count  # grows with each publication
    is_established: bool  # false while the process waits for the answer of another one
    place: ShortText = ""  # host and folder of the process


class RoundState(WireMessage, frozen=True):
    """State of the running round on job/<job>/round for observers, retained until the end of the job."""

    job: Name
    method: Name
    round: Count
    rounds: Count  # limit of the job
    phase: Literal["selecting", "open", "closing", "committed", "done", "stopped", "failed"]
    cohort: tuple[Name, ...] = ()
    submitted_by: tuple[Name, ...] = ()
    deadline_s: Seconds = 0.0
    metrics: Metrics = msgspec.field(default_factory=dict)
    note: Sentence = ""


class Presence(DeviceReport, frozen=True):
    """Presence of a device on dev/<device>/up/presence, retained and used as last will."""

    online: bool
    boot: ShortText  # different at every start of the agent
    seq: Count = 0


RefusalCode = Literal[
    "budget", "codec", "data", "disk", "diverged", "engine", "exception", "failed", "full", "memory", "method", "model"
]
"""Reason for declining a task. `fedquilt.coordinator.rounds.selection` describes each code."""


class Claim(DeviceReport, frozen=True):
    """Acceptance or refusal of a task on dev/<device>/up/claim, with a reason."""

    job: Name
    round: Count
    attempt: Count
    accepted: bool
    code: Literal["ok", "cleared", "counted", RefusalCode] = "ok"
    reason: Sentence = ""
    last_counted_round: Count | None = None  # last round with an accepted update, if not before the task's round
    epoch: Count = 0  # number of the coordinator start that accepted the update


class Progress(DeviceReport, frozen=True):
    """Progress of the open task on dev/<device>/up/progress, 0 to 1."""

    job: Name
    round: Count
    attempt: Count
    fraction: Annotated[float, Meta(ge=0.0, le=1.0)]


class Telemetry(DeviceReport, frozen=True):
    """Sensor readings on dev/<device>/up/telemetry, best effort. Unmeasurable values are None."""

    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    available_bytes: Count | None = None
    disk_full: bool | None = None  # a task failed because the disk is full, and no space has been freed since
    battery: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    charging: bool | None = None
    task_bytes: Count | None = None  # resident memory of the task process
    mode: ShortText | None = None  # power mode set by the owner of the board
    clock_s: Seconds1970 | None = None  # clock of the board at sending
    served: Count | None = None  # predictions of the model runner since its start
    drift: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None  # of the runner's inputs, from 0 for none
    accuracy: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None  # of the runner's predictions with known labels


class Ack(WireMessage, frozen=True):
    """Acknowledgement of an update on dev/<device>/dn/ack: stored, or permanently rejected.

    The device deletes the update in either case.
    """

    job: Name
    round: Count
    attempt: Count
    accepted: bool
    reason: Sentence = ""
    epoch: Count = 0  # number of the coordinator start that sent the acknowledgement
    is_late: bool = False  # whether the update was no longer expected


ReleaseKind = Literal["model", "agent", "settings"]
"""Content of a release."""

ReleasePhase = Literal["waiting", "fetching", "checking", "soaking", "committed", "refused", "returned"]
"""Progress of a release on a device."""


class ReleaseLimits(WireMessage, frozen=True, omit_defaults=True):
    """Limits that the device checks before it installs a release. None means no limit."""

    min_gain: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None  # accuracy minus that of the running release
    max_latency_s: Seconds | None = None  # median of one prediction
    max_energy_j: Amount | None = None  # of one prediction
    max_peak_bytes: Count | None = None


InputShape: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**31)], ...], Meta(max_length=15)]


class ReleaseContent(WireMessage, frozen=True, omit_defaults=True):
    """Content of a release, with the time and conditions of its installation."""

    kind: ReleaseKind
    name: ShortText = ""  # run or version, for display
    blob: BlobRef | None = None  # None for settings and for a rollback
    limits: ReleaseLimits = ReleaseLimits()
    input_shape: InputShape | None = None  # shape of a model's example, None for the shape in the graph
    soak_s: Seconds = 60.0  # time without failure before the release is committed
    window: ShortText = ""  # local time of the board, such as "02:00-05:00", "" for any time
    force: bool = False  # install also while a task runs
    settings: Annotated[dict[ShortText, Any], Meta(max_length=100)] = msgspec.field(default_factory=dict)


class DesiredRelease(ReleaseContent, frozen=True, omit_defaults=True, kw_only=True):
    """Desired release of a device on dev/<device>/dn/<kind>, retained for devices that are offline."""

    rollout: Name
    serial: Count  # grows with each release for this device and kind, so smaller numbers are outdated
    is_rollback: bool = False  # restore the previous release


class ReleaseStatus(DeviceReport, frozen=True, omit_defaults=True):
    """Release status of a device on dev/<device>/up/installed, at each change and each connection."""

    rollout: Name
    kind: ReleaseKind
    serial: Count
    phase: ReleasePhase
    current: OptionalDigest = ""  # blob of the running release, "" for the flashed one
    name: ShortText = ""
    reason: Sentence = ""  # reason for the phase
    metrics: Metrics = msgspec.field(default_factory=dict)  # accuracy[_before], latency_s, energy_j, peak_bytes


class ChunkRequest(WireMessage, frozen=True):
    """Request for chunks of a blob on <up|dn>/blob/get, or for its manifest without indices."""

    sha256: Digest
    chunk: Annotated[int, Meta(ge=MIN_CHUNK, le=MAX_CHUNK)]  # largest chunk that the requester accepts
    indices: Annotated[tuple[Count, ...], Meta(max_length=MAX_WINDOW)] = ()


class BlobManifest(WireMessage, frozen=True):
    """Digests of a blob's chunks on <dn|up>/blob/<sha256>/manifest, concatenated in hex."""

    sha256: Digest
    size: Count
    chunk: Annotated[int, Meta(ge=MIN_CHUNK, le=MAX_CHUNK)]
    digests: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})*\Z")]


class MissingBlob(WireMessage, frozen=True):
    """Report on <dn|up>/blob/<sha256>/missing that the requested blob is not sent."""

    sha256: Digest
    reason: Sentence = ""


class Hello(DeviceReport, frozen=True):
    """Message of a TLS handshake on <up|dn>/hello. An empty `attempt` requests a handshake."""

    attempt: Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""
    flight: Annotated[int, Meta(ge=0, le=3)] = 0
    tls: Annotated[str, Meta(max_length=MAX_CONTROL)] = ""  # base64


Message = (
    CoordState
    | ProcessState
    | RoundState
    | Presence
    | Profile
    | Claim
    | Progress
    | Update
    | Telemetry
    | Task
    | Ack
    | DesiredRelease
    | ReleaseStatus
    | ChunkRequest
    | BlobManifest
    | MissingBlob
    | LocationOffer
    | UploadProgress
    | Hello
)

# -- bytes ----------------------------------------------------------------------------------------

_PREFIX = re.compile(rb'^\{"v":(\d{1,3}),"crc":"([0-9a-f]{8})"(,|\})')
_PREFIX_SIZE: Final = len(b'{"v":1,"crc":"00000000"')
_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}

M = TypeVar("M", bound=WireMessage)


def encode(message: WireMessage) -> bytes:
    """Return the bytes of a message.

    Raises:
        WireError: If the message exceeds the size limit or contains text that is not Unicode.
    """
    try:
        body = _encoder.encode(message)[1:]
    except UnicodeEncodeError as error:  # such as a file name that is not UTF-8
        raise WireError(f"a {type(message).__name__} contains text that is not Unicode: {error}") from None
    if body != b"}":
        body = b"," + body
    limit = MAX_CHUNK if isinstance(message, BlobManifest) else MAX_CONTROL
    if len(body) > limit - _PREFIX_SIZE:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes exceeds the {limit} allowed")
    return b'{"v":%d,"crc":"%08x"' % (VERSION, zlib.crc32(body)) + body


def decode(payload: bytes, kind: type[M]) -> M:
    """Return the message of type `kind` in a payload, after strict checks.

    Raises:
        WireError: If the payload is too large, of another protocol version, has a wrong checksum, or is not a valid
            message of this type.
    """
    limit = MAX_CHUNK if kind is BlobManifest else MAX_CONTROL
    if len(payload) > limit:
        raise WireError(f"a {kind.__name__} of {len(payload)} bytes exceeds the {limit} allowed")
    prefix = _PREFIX.match(payload)
    if prefix is None:
        raise WireError(f"not a fedquilt message: {_describe_payload(payload)}")
    if int(prefix[1]) != VERSION:
        raise WireError(f"protocol version {int(prefix[1])}, this side uses {VERSION}: update the older side")
    body = payload[prefix.end(2) + 1 :]
    if zlib.crc32(body) != int(prefix[2], 16):
        raise WireError(f"checksum does not match: {_describe_payload(payload)}")
    decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        return decoder.decode(b"{" + body[1:] if body[:1] == b"," else b"{" + body)
    except DECODE_ERRORS as error:
        raise WireError(f"not a {kind.__name__}: {error}") from None


def _describe_payload(payload: bytes) -> str:
    return f"{bytes(payload[:40])!r} ({len(payload)} bytes)"


# -- topics ---------------------------------------------------------------------------------------

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_SHA = re.compile(r"[0-9a-f]{64}\Z")

DEVICE_MESSAGES: dict[str, type[WireMessage]] = {
    "presence": Presence,
    "profile": Profile,
    "claim": Claim,
    "progress": Progress,
    "update": Update,
    "telemetry": Telemetry,
    "installed": ReleaseStatus,
    "hello": Hello,
}
COORDINATOR_MESSAGES: dict[str, type[WireMessage]] = {
    "task": Task,
    "ack": Ack,
    "hello": Hello,
    "presence": CoordState,
    **dict.fromkeys(get_args(ReleaseKind), DesiredRelease),
}
BLOB_MESSAGES: dict[str, type[WireMessage]] = {
    "manifest": BlobManifest,
    "missing": MissingBlob,
    "place": LocationOffer,
    "placed": UploadProgress,
}

Direction = Literal["up", "dn"]


class Topics:
    """Topic tree of one fleet, `fq/1/<fleet>/...`."""

    def __init__(self, fleet: str) -> None:
        self.root = f"fq/{VERSION}/{fleet}"
        self.coord = f"{self.root}/coord/state"
        self.coordinator_process = f"{self.root}/coord/process"

    def round_topic(self, job: str) -> str:
        """Return the topic of a job's round state."""
        return f"{self.root}/job/{job}/round"

    def device_topic(self, device: str, direction: Direction, subtopic: str) -> str:
        """Return the topic of a device for a direction and a subtopic, such as "up" and "presence"."""
        return f"{self.root}/dev/{device}/{direction}/{subtopic}"

    def device_process(self, device: str) -> str:
        """Return the topic of the process that uses a device's name."""
        return f"{self.root}/dev/{device}/process"

    def retained_of_device(self, device: str) -> tuple[str, ...]:
        """Return the topics on which a device publishes retained messages."""
        presence, profile = (self.device_topic(device, "up", subtopic) for subtopic in ("presence", "profile"))
        return presence, profile, self.device_process(device)

    def chunk_topic(self, device: str, direction: Direction, sha256: str, index: int) -> str:
        """Return the topic of a blob's chunk."""
        return f"{self.root}/dev/{device}/{direction}/blob/{sha256}/{index}"

    def blob_topic(self, device: str, direction: Direction, sha256: str, subtopic: str) -> str:
        """Return the topic of a blob for a subtopic, such as "manifest" or "missing"."""
        return f"{self.root}/dev/{device}/{direction}/blob/{sha256}/{subtopic}"

    def coordinator_filters(self) -> tuple[str, ...]:
        """Return the topic filters of the coordinator."""
        return (f"{self.root}/dev/+/up/#",)

    def device_filters(self, device: str) -> tuple[str, ...]:
        """Return the topic filters of a device."""
        return (f"{self.root}/dev/{device}/dn/#", self.coord)


class Route(msgspec.Struct, frozen=True):
    """Parts of a topic. Parts that the topic does not have are "" or -1."""

    subtopic: str  # "presence", ..., "get", "chunk", "manifest", "missing", "place", "coord", "process", "round"
    message_type: type[WireMessage] | None  # None for the raw bytes of a chunk
    device: str = ""
    direction: str = ""
    sha256: str = ""
    index: int = -1
    job: str = ""


def device_from_topic(topic: str) -> str:
    """Return the device in a topic, or "" if the topic is not a device's."""
    parts = topic.split("/", 5)
    return parts[4] if len(parts) > 5 and parts[3] == "dev" and _NAME.match(parts[4]) else ""


@lru_cache(maxsize=1 << 14)  # large for simulated fleets; a device has a few topics
def parse_topic(topic: str) -> Route:
    """Return the parts of a topic.

    Raises:
        WireError: If this is not a topic of this protocol version.
    """
    match topic.split("/"):
        case ["fq", "1", fleet, "coord", "state"] if _NAME.match(fleet):
            return Route("coord", CoordState)
        case ["fq", "1", fleet, "coord", "process"] if _NAME.match(fleet):
            return Route("process", ProcessState)
        case ["fq", "1", fleet, "dev", device, "process"] if _NAME.match(fleet) and _NAME.match(device):
            return Route("process", ProcessState, device)
        case ["fq", "1", fleet, "job", job, "round"] if _NAME.match(fleet) and _NAME.match(job):
            return Route("round", RoundState, job=job)
        case ["fq", "1", fleet, "dev", device, ("up" | "dn") as direction, *levels] if _NAME.match(
            fleet
        ) and _NAME.match(device):
            route = _parse_levels(device, direction, levels)
            if route is not None:
                return route
    raise WireError(f"not a topic of this protocol: {topic[:200]!r}")


def _parse_levels(device: str, direction: str, levels: list[str]) -> Route | None:
    message_types = DEVICE_MESSAGES if direction == "up" else COORDINATOR_MESSAGES
    match levels:
        case [name] if name in message_types:
            return Route(name, message_types[name], device, direction)
        case ["blob", "get"]:
            return Route("get", ChunkRequest, device, direction)
        case ["blob", sha, name] if _SHA.match(sha) and name in BLOB_MESSAGES:
            return Route(name, BLOB_MESSAGES[name], device, direction, sha)
        case ["blob", sha, index] if _SHA.match(sha) and index.isascii() and index.isdigit() and len(index) < 8:
            return Route("chunk", None, device, direction, sha, int(index))
    return None
