"""Messages between coordinator and devices, with types and bounds checked at decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fedquilt.core.last_call_cache import cache_last_call

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
"""A job, fleet or device id: safe in a topic, a file name and a log line."""

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError)
"""What msgspec raises for bytes that are not JSON of the wanted type: every reader of bytes from outside takes all."""

Code = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63}|[A-Za-z_][\w.]{0,99}:[A-Za-z_]\w{0,99})\Z")]
"""A method by its name, or as module:name."""

Word = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}(=[A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")]
"""A label of a board: "site=lab", or a group's name alone, "window"."""

Label = Annotated[str, Meta(max_length=200)]
Sentence = Annotated[str, Meta(max_length=1000)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
AnyDigest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]  # or "", where there is none
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Amount = Annotated[float, Meta(ge=0.0, le=1e24)]
Metrics = Annotated[dict[Label, float], Meta(max_length=1000)]
Layout = Annotated[dict[Label, Label], Meta(max_length=20_000)]
"""Tensor -> its type and shape, "f4:64,3,7,7": `fedquilt.arrays.tensors.layout_from_tensors`."""


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of messages: immutable, keyword-only, unknown fields rejected by default."""


class DeviceReport(WireMessage, frozen=True, forbid_unknown_fields=False):
    """Base class of messages from devices. Unknown fields of newer agents are skipped.

    A field that changes the meaning of an update's tensors may be sent only at the request of the task, because an
    older coordinator skips the field. Example: the task's codec requests `bases`.
    """


class BlobRef(WireMessage, frozen=True):
    """Reference to a blob by sha256 and size of its content."""

    sha256: Digest
    size: Count


class WorkEstimate(WireMessage, frozen=True, omit_defaults=True):
    """Predicted cost of a task, for deadlines, clocks and memory checks.

    Counts that end in `_per_example` and `_per_batch` are added for the examples of the device that the task uses.
    """

    flops: Amount = 0.0  # one multiply-add is 2
    flops_per_example: Amount = 0.0
    read_bytes: Amount = 0.0  # weights and activations read from memory and written to it
    bytes_per_example: Amount = 0.0
    launches: Amount = 0.0  # operations that an engine begins, whatever their size: kernels of a GPU
    launches_per_batch: Amount = 0.0  # of one mini-batch, in all passes over the examples
    bytes_per_batch: Amount = 0.0
    batch: Count = 0  # examples in a mini-batch; 0: all of them
    tasks: Annotated[float, Meta(ge=0, le=1)] = 1.0  # share of a task's own cost: below 1 for a part of a task
    examples: Count = 0  # of the device's own, that the task uses at most; 0: all of them
    peak_bytes: Count = 0  # least memory beyond an idle engine's; 0: not predicted
    workload: Label = ""  # which of a point's `rates` apply, "torch-conv"; "": the point's own numbers

    @cache_last_call
    def total_for_examples(self, examples: int) -> WorkEstimate:
        """Return the work for a device with `examples` examples. All counts are then totals."""
        examples = min(examples, self.examples or examples)
        batches = -(-examples // self.batch) if self.batch else min(examples, 1)
        return msgspec.structs.replace(
            self,
            flops=self.flops + self.flops_per_example * examples,
            read_bytes=self.read_bytes + self.bytes_per_example * examples + self.bytes_per_batch * batches,
            launches=self.launches + self.launches_per_batch * batches,
            flops_per_example=0.0,
            bytes_per_example=0.0,
            launches_per_batch=0.0,
            bytes_per_batch=0.0,
        )

    def add(self, other: WorkEstimate) -> WorkEstimate:
        """Return the sum of two works of one task.

        Counts per mini-batch are converted to the mini-batch size of the first work.
        """
        if not other.flops and not other.flops_per_example and not other.launches:
            return self
        times = self.batch / other.batch if self.batch and other.batch else 1.0
        sums = {name: getattr(self, name) + getattr(other, name) for name in ADDED if "_per_batch" not in name}
        for name in ("launches_per_batch", "bytes_per_batch"):
            sums[name] = getattr(self, name) + times * getattr(other, name)
        return msgspec.structs.replace(
            self,
            **sums,
            batch=self.batch or other.batch,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            workload=self.workload or other.workload,
        )

    def scale(self, share: float) -> WorkEstimate:
        """Return a share of this work, from 0 to 1. Predicted seconds scale by the same factor."""
        if share == 1:
            return self
        return msgspec.structs.replace(self, **{name: getattr(self, name) * share for name in (*ADDED, "tasks")})


ADDED: Final = (
    "flops",
    "flops_per_example",
    "read_bytes",
    "bytes_per_example",
    "launches",
    "launches_per_batch",
    "bytes_per_batch",
)
"""Counts of `WorkEstimate` that add up where one work follows another."""


Action = Literal["check", "work"]
CODECS: Final = ("raw", "fp16", "int8", "topk")  # known to this version: `fedquilt.compression`


class Encoding(WireMessage, frozen=True):
    """Encoding of the tensors of an update, from a job's [wire] table.

    The codecs are described in `fedquilt.compression`.
    """

    codec: Name = "raw"  # one of CODECS; a device that lacks it is not asked
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.05  # of "topk": share of a tensor's entries that is sent
    unchanged: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()  # tensors that no codec rounds, by name


class Task(WireMessage, frozen=True):
    """Work for one device, identified by job, round and device. `attempt` counts repetitions."""

    job: Name
    round: Count
    attempt: Count
    method: Code
    engine: Name  # which engine the method asks for: "onnx", "torch", "numpy"
    actions: Annotated[tuple[Action, ...], Meta(min_length=1, max_length=2)]
    params: Annotated[dict[Label, Any], Meta(max_length=1000)]
    bundles: Annotated[dict[Label, BlobRef], Meta(max_length=2000)]
    work: WorkEstimate
    seed: Count
    deadline_s: Seconds  # remaining when sent: a board's clock may say 1970
    tier: Label = ""
    wire: Encoding = Encoding()
    state: AnyDigest = ""  # the round's state (sha256): an update of another state is not this round's
    counted: Count | None = None  # last round of this job that the coordinator counted of this device; None: none
    class_shares: Shares | None = None
    """Share of each class among the fleet's examples, for an evaluation with class priors. (): equal. None: without."""
    epoch: Count = 0  # start of the coordinator that sends it


class Usage(DeviceReport, frozen=True):
    """Measured cost of a task. Bytes count blob payloads, not protocol overhead."""

    wall_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    energy_j: Amount | None = None  # gross: everything the board used during the task
    idle_j: Amount | None = None  # part of energy_j that the idle board would have used in that time
    energy_error_j: Amount | None = None  # half-width of the interval around energy_j that holds the true value
    energy_source: Label | None = None  # "ina3221 VDD_IN, 10 Hz, trapezoids", "rapl", "profile tx2 (assumed)", ...
    point: Label | None = None  # operating point held during the task; None: the board's own governor
    peak_bytes: Count | None = None  # resident peak of the task's own process
    base_bytes: Count | None = None  # resident of that process before the task: runtime imports
    examples: Count | None = None  # the device's own, held-out ones aside
    down_bytes: Count = 0
    up_bytes: Count = 0


TaskKind = Literal["classes", "regression", "labels"]
"""One class of several; one or more real numbers; each of several labels present or absent."""

DETAILED: Final = 100
"""Outputs of a network up to which each one has a row of the confusion matrix, an AUC or an R²."""

Sum = Annotated[tuple[float, ...], Meta(max_length=40)]
"""Floats whose exact sum is meant, as of `evaluation.exact_sum`."""

Sums = Annotated[tuple[Sum, ...], Meta(max_length=DETAILED)]
SHARES_MOST: Final = 1000  # largest number of classes with shares in a task
Shares = Annotated[tuple[Annotated[float, Meta(gt=0, le=1)], ...], Meta(max_length=SHARES_MOST)]
Packed = Annotated[bytes, Meta(max_length=100_000)]
"""Counts as of `evaluation.pack_counts`."""


class EvaluationSums(DeviceReport, frozen=True, omit_defaults=True):
    """Sums over the examples of an evaluation.

    Attributes:
        examples: Number of examples.
        task: Kind of prediction.
        outputs: Number of classes, regressed numbers or labels.
        loss: Sum of the examples' losses.
        counts: Of up to 100 classes the confusion matrix (true class, predicted class). Of more classes, and of labels,
            true positives, false positives and false negatives of each output.
        whole: Of labels: the number of examples whose labels are all right.
        scores: Of up to 100 classes or labels: histograms of the predicted probability of each output, of its positive
            examples, then of its negative ones.
        absolute: Of a regression: sum of the absolute errors of all outputs.
        squares: Of a regression: sum of the squared errors of each output, or of all if they are more than 100.
        targets: Of a regression with up to 100 outputs: sum of each output's targets.
        target_squares: Likewise, of their squares.
        devices: Of a total of several devices: values of their main metric in ascending order, rounded to three
            digits, each with the number of devices that have it.
        right_with_priors: Of classes: correct predictions with the devices' class priors, where these help. None: the
            task did not ask for them.
    """

    examples: Count
    task: TaskKind = "classes"
    outputs: Annotated[int, Meta(ge=1, le=100_000)] = 1
    loss: Sum = ()
    counts: Packed = b""
    whole: Count = 0
    scores: Packed = b""
    absolute: Sum = ()
    squares: Sums = ()
    targets: Sums = ()
    target_squares: Sums = ()
    devices: Annotated[tuple[tuple[float, Count], ...], Meta(max_length=20_000)] = ()
    right_with_priors: Count | None = None


class Update(DeviceReport, frozen=True, omit_defaults=True):
    """Result of a device's task. The tensors are fetched separately as blobs."""

    job: Name
    round: Count
    attempt: Count
    device: Name
    weight: Amount  # weight in the method's mean, usually the number of examples
    bundles: Annotated[dict[Label, BlobRef], Meta(max_length=2000)]
    metrics: Metrics
    usage: Usage
    evaluation: EvaluationSums | None = None  # of a task with the action "check"
    bases: Annotated[dict[Label, Digest], Meta(max_length=2000)] = {}  # with a codec: start of each difference
    layouts: Annotated[dict[Label, Layout], Meta(max_length=2000)] = {}  # of bundles, as they travel; {}: not told
    state: AnyDigest = ""  # of the task: the state that it was computed from
    epoch: Count = 0  # of the task
    note: Sentence = ""  # for the round's log, such as the restart of lost private state
    below: Usage | None = None  # of a site: total usage of its devices
    boards: Annotated[tuple[Name, ...], Meta(max_length=1_000_000)] = ()  # of a site, as read by the coordinator

    @property
    def down_bytes(self) -> int:
        """Bytes that the device fetched for the task, including those of a site's devices."""
        return self.usage.down_bytes + (self.below.down_bytes if self.below else 0)

    @property
    def up_bytes(self) -> int:
        """Bytes that the device sent for the task, including those of a site's devices."""
        return self.usage.up_bytes + (self.below.up_bytes if self.below else 0)


class Rates(DeviceReport, frozen=True, array_like=True, omit_defaults=True):
    """Speed of one workload at an operating point. `fedquilt.costs.cost_model` adds up the four times.

    Rates are encoded as a list in this order: 200 points of a few workloads have to fit into a message of 128 KiB.
    """

    flops_per_s: Amount | None = None  # sustained on our own work, not a data sheet's peak
    bytes_per_s: Amount | None = None  # memory traffic, likewise
    launch_s: Seconds | None = None  # cost of one of `WorkEstimate.launches`, whatever its size
    task_s: Seconds | None = None  # cost of a task, whatever its work: reading its files, building its network


class OperatingPoint(DeviceReport, frozen=True, omit_defaults=True):
    """Clock setting of a board, with the speed and power measured at this setting."""

    name: Label
    cpu_hz: Amount | None = None
    gpu_hz: Amount | None = None
    emc_hz: Amount | None = None
    flops_per_s: Amount | None = None  # these four as in `Rates`, for workloads that `rates` does not have
    bytes_per_s: Amount | None = None
    launch_s: Seconds | None = None
    task_s: Seconds | None = None
    busy_w: Amount | None = None  # of the whole board, while it works
    rates: Annotated[dict[Label, Rates], Meta(max_length=20)] = {}  # by `WorkEstimate.workload`


UPGRADES: Final = "upgrades"  # in `Profile.versions`: why its agent can never be upgraded over the air, if that is so


class Profile(DeviceReport, frozen=True):
    """Self-description of a device. Numbers are measured on the device itself unless `provenance` differs."""

    device: Name
    board: Label
    memory_bytes: Count
    budget_bytes: Count  # most that one task's process may hold resident
    engines: Annotated[tuple[Name, ...], Meta(max_length=20)]
    versions: Annotated[dict[Label, Label], Meta(max_length=50)]  # of libraries, and as "plugin <module>" of plug-ins
    points: Annotated[tuple[OperatingPoint, ...], Meta(max_length=200)] = ()
    idle_w: Amount | None = None
    provenance: Label = "unknown"  # sysfs | table | measured | assumed | unknown
    codecs: Annotated[tuple[Name, ...], Meta(max_length=20)] = ("raw",)
    labels: Annotated[
        tuple[Word, ...], Meta(max_length=32)
    ] = ()  # what its owner calls it by: `fedquilt.formats.labels`
    boards: Count = 0  # of a site; the coordinator believes it only of a device with a `SiteRight`


# -- locations of blobs ---------------------------------------------------------------------------


class BlobLocation(WireMessage, frozen=True, omit_defaults=True):
    """Location of a blob: URL and access token. Both are secret, so `repr` shows only the origin."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/]+/", max_length=4096)]
    token: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,100}\Z")] = ""  # of the coordinator's server; "": a store's
    start: Count = 0  # offset of the first byte that is to be put there

    def __repr__(self) -> str:
        return f"Source({self.origin})"

    @property
    def origin(self) -> str:
        """Scheme, host and port of the URL, which may be logged."""
        return "/".join(self.url.split("/", 3)[:3])


class LocationOffer(WireMessage, frozen=True):
    """Offer of locations on dn/blob/<sha256>/place, for fetching or uploading a blob.

    The device uses the first location that it can reach, and the broker if no location can be reached.
    """

    sha256: Digest
    way: Literal["get", "put"]
    sources: Annotated[tuple[BlobLocation, ...], Meta(min_length=1, max_length=4)]


class UploadProgress(WireMessage, frozen=True, omit_defaults=True):
    """Progress of an upload on up/blob/<sha256>/placed, sent every few seconds and at the end."""

    sha256: Digest
    moved: Count = 0  # bytes so far
    source: Annotated[int, Meta(ge=0, le=3)] = 0  # which of the sources it is, or was
    done: bool = False
    error: Sentence = ""  # why it was put nowhere; then it has to be asked for in chunks


# -- sites ----------------------------------------------------------------------------------------

SITE_BUNDLES: Final = "site."  # prefix of the names of bundles in a site's update

NamePattern = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63}|[a-z0-9][a-z0-9._-]{0,62}\*|\*)\Z")]
"""The name of a device, or the beginning of names: "cam-*"."""


class SiteRight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Right of a site to submit updates of other devices."""

    boards: Annotated[tuple[NamePattern, ...], Meta(min_length=1, max_length=10_000)]  # names of these devices
    most: Annotated[int, Meta(ge=1, le=1_000_000)]  # number of them in one round

    def authorizes(self, name: str) -> bool:
        """Return whether the site may submit updates of a device."""
        return not self.unauthorized_devices([name])

    def unauthorized_devices(self, names: Iterable[str]) -> list[str]:
        """Return the devices whose updates the site may not submit."""
        known = frozenset(self.boards)
        beginnings = tuple(pattern[:-1] for pattern in known if pattern.endswith("*"))
        return [name for name in names if name not in known and not name.startswith(beginnings)]

    def overlaps(self, other: SiteRight) -> bool:
        """Return whether any device name is authorized by both rights."""
        return any(
            _matches_pattern(one.removesuffix("*"), another) or _matches_pattern(another.removesuffix("*"), one)
            for one in self.boards
            for another in other.boards
        )


def has_site_bundles(names: Collection[str]) -> bool:
    """Return whether bundles of these names are those of a site's update."""
    return any(name.startswith(SITE_BUNDLES) for name in names)


def _matches_pattern(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
