"""Messages between coordinator and devices, with types and bounds checked at decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fedquilt.core.last_call_cache import cache_last_call

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
"""Id of a job, fleet or device, safe in a topic, a file name and a log line."""

DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError)
"""Exceptions of msgspec for bytes that are not JSON of the expected type."""

MethodName = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63}|[A-Za-z_][\w.]{0,99}:[A-Za-z_]\w{0,99})\Z")]
"""Name of a built-in method, or module:name of any other method."""

DeviceLabel = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}(=[A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")]
"""Label of a device: key=value, such as "site=lab", or the name of a group, such as "window"."""

ShortText = Annotated[str, Meta(max_length=200)]
Sentence = Annotated[str, Meta(max_length=1000)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
OptionalDigest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]  # "" for no blob
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Amount = Annotated[float, Meta(ge=0.0, le=1e24)]
Metrics = Annotated[dict[ShortText, float], Meta(max_length=1000)]
Layout = Annotated[dict[ShortText, ShortText], Meta(max_length=20_000)]
"""Type and shape by tensor name, such as "f4:64,3,7,7" (see `fedquilt.arrays.tensors.layout_from_tensors`)."""


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

    Counts that end in `_per_example` and `_per_batch` are multiplied by the device's examples and mini-batches.
    """

    flops: Amount = 0.0  # one multiply-add is 2
    flops_per_example: Amount = 0.0
    read_bytes: Amount = 0.0  # weights and activations read from memory and written to it
    bytes_per_example: Amount = 0.0
    launches: Amount = 0.0  # number of operations that the engine starts, such as GPU kernels
    launches_per_batch: Amount = 0.0  # for one mini-batch, in all passes over the examples
    bytes_per_batch: Amount = 0.0
    batch: Count = 0  # examples in a mini-batch, 0 for all examples
    task_share: Annotated[float, Meta(ge=0, le=1)] = 1.0  # share of a task's fixed cost, below 1 for a part of a task
    max_examples: Count = 0  # largest number of the device's examples that the task uses, 0 for all
    peak_bytes: Count = 0  # memory required in addition to an idle engine's, 0 if not predicted
    workload: ShortText = ""  # key of `OperatingPoint.rates`, such as "torch-conv"; "" selects the point's own rates

    @cache_last_call
    def total_for_examples(self, examples: int) -> WorkEstimate:
        """Return the work for a device with `examples` examples. All counts are then totals."""
        examples = min(examples, self.max_examples or examples)
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
        """Return the sum of two estimates for one task.

        Counts per mini-batch are converted to the mini-batch size of the first estimate.
        """
        if not other.flops and not other.flops_per_example and not other.launches:
            return self
        batch_ratio = self.batch / other.batch if self.batch and other.batch else 1.0
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in ADDITIVE_FIELDS if "_per_batch" not in name
        }
        for name in ("launches_per_batch", "bytes_per_batch"):
            sums[name] = getattr(self, name) + batch_ratio * getattr(other, name)
        return msgspec.structs.replace(
            self,
            **sums,
            batch=self.batch or other.batch,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            workload=self.workload or other.workload,
        )

    def scale(self, share: float) -> WorkEstimate:
        """Return the estimate for a share of this work, from 0 to 1. The predicted seconds scale by `share`."""
        if share == 1:
            return self
        return msgspec.structs.replace(
            self, **{name: getattr(self, name) * share for name in (*ADDITIVE_FIELDS, "task_share")}
        )


ADDITIVE_FIELDS: Final = (
    "flops",
    "flops_per_example",
    "read_bytes",
    "bytes_per_example",
    "launches",
    "launches_per_batch",
    "bytes_per_batch",
)
"""Fields of `WorkEstimate` that are summed when one task consists of several parts."""


Action = Literal["check", "work"]
CODECS: Final = ("raw", "fp16", "int8", "topk")  # known to this version: `fedquilt.compression`


class Encoding(WireMessage, frozen=True):
    """Encoding of the tensors of an update, from a job's [wire] table.

    The codecs are described in `fedquilt.compression`.
    """

    codec: Name = "raw"  # one of CODECS; devices without the codec are not selected
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.05  # for "topk": share of a tensor's entries that is sent
    unchanged: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()  # names of tensors that no codec rounds


class Task(WireMessage, frozen=True):
    """Work for one device, identified by job, round and device. `attempt` counts repetitions."""

    job: Name
    round: Count
    attempt: Count
    method: MethodName
    engine: Name  # required engine: "onnx", "torch" or "numpy"
    actions: Annotated[tuple[Action, ...], Meta(min_length=1, max_length=2)]
    params: Annotated[dict[ShortText, Any], Meta(max_length=1000)]
    bundles: Annotated[dict[ShortText, BlobRef], Meta(max_length=2000)]
    work: WorkEstimate
    seed: Count
    deadline_s: Seconds  # remaining seconds at sending, because the clock of a board may be wrong
    tier: ShortText = ""
    wire: Encoding = Encoding()
    state: OptionalDigest = ""  # sha256 of the round's state, which the update must quote
    last_counted_round: Count | None = None  # last round of this job with an accepted update of this device
    class_shares: Shares | None = None
    """Share of each class in the fleet, () for equal shares, or None for an evaluation without class priors."""
    epoch: Count = 0  # number of the coordinator start that sent the task


class Usage(DeviceReport, frozen=True):
    """Measured cost of a task. Bytes count blob payloads, not protocol overhead."""

    wall_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    energy_j: Amount | None = None  # gross energy of the board during the task
    idle_j: Amount | None = None  # part of energy_j that the idle board would have used in that time
    energy_error_j: Amount | None = None  # half-width of the interval around energy_j that holds the true value
    energy_source: ShortText | None = None  # "ina3221 VDD_IN, 10 Hz, trapezoids", "rapl", "profile tx2 (assumed)", ...
    point: ShortText | None = None  # pinned operating point, None under the board's own governor
    peak_bytes: Count | None = None  # resident peak of the task's own process
    base_bytes: Count | None = None  # resident memory of that process before the task: runtime imports
    examples: Count | None = None  # training examples of the device
    down_bytes: Count = 0
    up_bytes: Count = 0


TaskKind = Literal["classes", "regression", "labels"]
"""Prediction of one class, of one or more real numbers, or of the presence of each label."""

MAX_DETAILED_OUTPUTS: Final = 100
"""Largest number of outputs with a row in the confusion matrix, an AUC or an R² for each output."""

Sum = Annotated[tuple[float, ...], Meta(max_length=40)]
"""Floats whose exact sum is the value (see `evaluation.exact_summands`)."""

Sums = Annotated[tuple[Sum, ...], Meta(max_length=MAX_DETAILED_OUTPUTS)]
MAX_CLASS_SHARES: Final = 1000  # largest number of classes with shares in a task
Shares = Annotated[tuple[Annotated[float, Meta(gt=0, le=1)], ...], Meta(max_length=MAX_CLASS_SHARES)]
Packed = Annotated[bytes, Meta(max_length=100_000)]
"""Counts packed by `evaluation.pack_counts`."""


class EvaluationSums(DeviceReport, frozen=True, omit_defaults=True):
    """Sums over the examples of an evaluation.

    Attributes:
        examples: Number of examples.
        task: Kind of prediction.
        outputs: Number of classes, regressed numbers or labels.
        loss: Sum of the examples' losses.
        counts: Confusion matrix (true class, predicted class) for up to 100 classes. For more classes, and for labels,
            true positives, false positives and false negatives of each output.
        exact_matches: Number of examples whose labels are all correct, for labels only.
        scores: Histograms of the predicted probability of each output, first for positive and then for negative
            examples, for up to 100 classes or labels.
        absolute_errors: Sum of the absolute errors of all outputs, for a regression.
        squared_errors: Sum of the squared errors of each output, or of all outputs if there are more than 100, for a
            regression.
        targets: Sum of the targets of each output, for a regression with up to 100 outputs.
        target_squares: Sum of the squared targets of each output, for a regression with up to 100 outputs.
        device_values: Values of the devices' main metric in ascending order, rounded to three digits, each with its
            number of devices. Empty for a single device.
        correct_with_priors: Number of correct predictions with the devices' class priors, or None if the task did not
            request class priors.
    """

    examples: Count
    task: TaskKind = "classes"
    outputs: Annotated[int, Meta(ge=1, le=100_000)] = 1
    loss: Sum = ()
    counts: Packed = b""
    exact_matches: Count = 0
    scores: Packed = b""
    absolute_errors: Sum = ()
    squared_errors: Sums = ()
    targets: Sums = ()
    target_squares: Sums = ()
    device_values: Annotated[tuple[tuple[float, Count], ...], Meta(max_length=20_000)] = ()
    correct_with_priors: Count | None = None


class Update(DeviceReport, frozen=True, omit_defaults=True):
    """Result of a device's task. The tensors are fetched separately as blobs."""

    job: Name
    round: Count
    attempt: Count
    device: Name
    weight: Amount  # weight in the method's mean, usually the number of examples
    bundles: Annotated[dict[ShortText, BlobRef], Meta(max_length=2000)]
    metrics: Metrics
    usage: Usage
    evaluation: EvaluationSums | None = None  # only for a task with the action "check"
    bases: Annotated[dict[ShortText, Digest], Meta(max_length=2000)] = {}
    """By bundle, the blob that the encoded changes are relative to. Empty without a codec."""
    layouts: Annotated[dict[ShortText, Layout], Meta(max_length=2000)] = {}  # by bundle, as encoded; {} if not reported
    state: OptionalDigest = ""  # sha256 of the state in the task
    epoch: Count = 0  # as in the task
    note: Sentence = ""  # for the round's log, such as the restart of lost private state
    devices_usage: Usage | None = None  # total usage of a site's devices
    site_devices: Annotated[tuple[Name, ...], Meta(max_length=1_000_000)] = ()  # filled in by the coordinator

    @property
    def down_bytes(self) -> int:
        """Bytes that the device fetched for the task, including those of a site's devices."""
        return self.usage.down_bytes + (self.devices_usage.down_bytes if self.devices_usage else 0)

    @property
    def up_bytes(self) -> int:
        """Bytes that the device sent for the task, including those of a site's devices."""
        return self.usage.up_bytes + (self.devices_usage.up_bytes if self.devices_usage else 0)


class Rates(DeviceReport, frozen=True, array_like=True, omit_defaults=True):
    """Speed of one workload at an operating point: the rates and fixed times that `costs.cost_model` uses.

    Rates are encoded as a list in this order: 200 points of a few workloads have to fit into a message of 128 KiB.
    """

    flops_per_s: Amount | None = None  # sustained rate of training, not the peak of a data sheet
    bytes_per_s: Amount | None = None  # sustained memory traffic
    launch_s: Seconds | None = None  # fixed time of each of `WorkEstimate.launches`
    task_s: Seconds | None = None  # fixed time of a task, for reading its files and building its network


class OperatingPoint(DeviceReport, frozen=True, omit_defaults=True):
    """Clock setting of a board, with the speed and power measured at this setting."""

    name: ShortText
    cpu_hz: Amount | None = None
    gpu_hz: Amount | None = None
    emc_hz: Amount | None = None
    flops_per_s: Amount | None = None  # these four as in `Rates`, for workloads missing in `rates`
    bytes_per_s: Amount | None = None
    launch_s: Seconds | None = None
    task_s: Seconds | None = None
    busy_w: Amount | None = None  # power of the whole board under load
    rates: Annotated[dict[ShortText, Rates], Meta(max_length=20)] = {}  # by `WorkEstimate.workload`


UPGRADES: Final = "upgrades"  # key in `Profile.versions` of the reason why the agent cannot be upgraded over the air


class Profile(DeviceReport, frozen=True):
    """Self-description of a device, with numbers measured on the device unless `provenance` differs."""

    device: Name
    board: ShortText
    memory_bytes: Count
    budget_bytes: Count  # limit on the resident memory of a task's process
    engines: Annotated[tuple[Name, ...], Meta(max_length=20)]
    versions: Annotated[dict[ShortText, ShortText], Meta(max_length=50)]  # by library or "plugin <module>"
    points: Annotated[tuple[OperatingPoint, ...], Meta(max_length=200)] = ()
    idle_w: Amount | None = None
    provenance: ShortText = "unknown"  # sysfs | table | measured | assumed | unknown
    codecs: Annotated[tuple[Name, ...], Meta(max_length=20)] = ("raw",)
    labels: Annotated[tuple[DeviceLabel, ...], Meta(max_length=32)] = ()  # chosen by the owner of the device
    site_device_count: Count = 0  # devices of a site, set to 0 without a `SiteRight`


# -- locations of blobs ---------------------------------------------------------------------------


class BlobLocation(WireMessage, frozen=True, omit_defaults=True):
    """Location of a blob: URL and access token. Both are secret, so `repr` shows only the origin."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/]+/", max_length=4096)]
    token: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,100}\Z")] = ""  # "" for an external blob store
    start: Count = 0  # offset of the first byte to upload

    def __repr__(self) -> str:
        return f"BlobLocation({self.origin})"

    @property
    def origin(self) -> str:
        """Scheme, host and port of the URL, which may be logged."""
        return "/".join(self.url.split("/", 3)[:3])


class LocationOffer(WireMessage, frozen=True):
    """Offer of locations on dn/blob/<sha256>/place, for fetching or uploading a blob.

    The device uses the first location that it can reach, and the broker if no location can be reached.
    """

    sha256: Digest
    direction: Literal["get", "put"]
    locations: Annotated[tuple[BlobLocation, ...], Meta(min_length=1, max_length=4)]


class UploadProgress(WireMessage, frozen=True, omit_defaults=True):
    """Progress of an upload on up/blob/<sha256>/placed, sent every few seconds and at the end."""

    sha256: Digest
    uploaded_bytes: Count = 0
    location_index: Annotated[int, Meta(ge=0, le=3)] = 0  # index in `LocationOffer.locations`
    complete: bool = False
    error: Sentence = ""  # why the upload failed; the coordinator then requests chunks


# -- sites ----------------------------------------------------------------------------------------

SITE_BUNDLES: Final = "site."  # prefix of the names of bundles in a site's update

NamePattern = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63}|[a-z0-9][a-z0-9._-]{0,62}\*|\*)\Z")]
"""Name of a device, or a prefix of names such as "cam-*"."""


class SiteRight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Right of a site to submit updates of other devices."""

    boards: Annotated[tuple[NamePattern, ...], Meta(min_length=1, max_length=10_000)]  # names of these devices
    most: Annotated[int, Meta(ge=1, le=1_000_000)]  # limit on the number of devices in one round

    def authorizes(self, name: str) -> bool:
        """Return whether the site may submit updates of a device."""
        return not self.unauthorized_devices([name])

    def unauthorized_devices(self, names: Iterable[str]) -> list[str]:
        """Return the devices whose updates the site may not submit."""
        patterns = frozenset(self.boards)
        prefixes = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
        return [name for name in names if name not in patterns and not name.startswith(prefixes)]

    def overlaps(self, other: SiteRight) -> bool:
        """Return whether both rights authorize some device name."""
        return any(
            _matches_pattern(pattern.removesuffix("*"), other_pattern)
            or _matches_pattern(other_pattern.removesuffix("*"), pattern)
            for pattern in self.boards
            for other_pattern in other.boards
        )


def has_site_bundles(names: Collection[str]) -> bool:
    """Return whether any of an update's bundles has the name prefix that sites use for theirs."""
    return any(name.startswith(SITE_BUNDLES) for name in names)


def _matches_pattern(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
