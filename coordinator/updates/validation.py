"""Validation of updates: plausible claims, a manifest that fits the round, finite numbers.

The table in docs/security.md lists each field of each message that devices send: verified, bounded or informational.
The bounds of claims are wide: they reject values that are impossible for a device, not values that are merely wrong.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fedquilt import compression
from fedquilt.arrays import tensors
from fedquilt.coordinator.device_columns import MAX_EXAMPLES
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.core import (
    NEW_DEVICE,
    Encoding,
    EvaluationSums,
    Profile,
    SiteRight,
    TaskKind,
    Update,
    UpdateError,
    UpdateSchema,
    evaluation,
)
from fedquilt.core.messages import has_site_bundles
from fedquilt.metrics import MAIN_METRICS, METRICS

if TYPE_CHECKING:
    from fedquilt.coordinator.updates import sites

MAX_POWER_W: Final = 3000.0  # highest plausible power of any device
DEFAULT_POWER_W: Final = 1000.0  # highest plausible power without watts in the profile
MIN_POWER_W: Final = 100.0  # lowest power limit, since a meter may cover more than the profile
POWER_TOLERANCE: Final = 3.0  # plausible power, as a multiple of the profile's watts
MIN_FLOPS_PER_S: Final = 1e6  # lowest assumed speed of a device
SPEED_TOLERANCE: Final = 10.0  # plausible speed, as a multiple of the profile's speed
SPARE_S: Final = 60.0
SPARE_BYTES: Final = 1 << 20
MAX_SITE_TASK_BYTES: Final = 1 << 30  # plausible transfer of one device of a site per task
SHARE_TOLERANCE: Final = 1e-6  # a mean of shares may exceed 1 by this much
MAX_METRICS: Final = 64  # number of metrics in an update
METRIC_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
MAX_EPOCH_LEAD: Final = 1 << 20  # largest plausible difference between a device's epoch and the stored epoch
NO_SITE_RIGHT_TEXT: Final = (
    "%s claims to be a site but has no site right, and gets the tasks of one device. To grant the right, issue a "
    "certificate (`fedquilt identity issue NAME --role site`) or, without certificates, add [sites.NAME] to limits.toml"
)

M = TypeVar("M", bound=Struct)


class ClaimBounds(NamedTuple):
    workload: DeviceWorkload = DeviceWorkload()
    limit_s: float = math.inf  # longest possible duration of the task
    max_weight: float = MAX_EXAMPLES  # largest weight of one device
    max_examples: float = MAX_EXAMPLES  # largest number of examples of one device
    site_right: SiteRight | None = None  # None unless the device is a site
    is_evaluation: bool = True  # whether the task contains an evaluation
    task: TaskKind = "classes"  # prediction task of the job's network
    outputs: int | None = None  # outputs of the job's network, or None if not declared
    uses_class_priors: bool = False
    is_new: bool = True  # whether no earlier update of the device has been aggregated


def replace_unprintable(message: M, payload: bytes) -> M:
    """Return the message with unprintable characters of its texts replaced by "?" or a space."""
    if payload.isascii() and b"\\" not in payload and b"\x7f" not in payload:
        return message
    return msgspec.convert(_replace_in_texts(msgspec.to_builtins(message)), type(message))


def _replace_in_texts(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in value)
    if isinstance(value, dict):
        return {_replace_in_texts(name): _replace_in_texts(item) for name, item in value.items()}
    return [_replace_in_texts(item) for item in value] if isinstance(value, list | tuple) else value


def limit_profile(profile: Profile, site_right: SiteRight | None) -> Profile:
    """Return the profile with its number of site devices limited to the site right, or 0 without a right."""
    count = min(profile.site_device_count, site_right.most) if site_right is not None else 0
    return profile if count == profile.site_device_count else replace(profile, site_device_count=count)


def longest_work_s(waited_s: float, deadline_s: float, attempts: int) -> float:
    """Return the longest plausible seconds of work of a device selected `waited_s` ago."""
    return 2 * max(waited_s, deadline_s * attempts) + SPARE_S


def highest_power_w(profile: Profile | None) -> float:
    """Return the highest plausible power of a device, or of all devices of a site, in watts."""
    claimed_w = [profile.idle_w, *(point.busy_w for point in profile.points)] if profile else []
    known_w = [watts for watts in claimed_w if watts is not None]
    max_w = min(max(POWER_TOLERANCE * max(known_w), MIN_POWER_W), MAX_POWER_W) if known_w else DEFAULT_POWER_W
    return max_w * (max(profile.site_device_count, 1) if profile else 1)


def limit_claims(update: Update, bounds: ClaimBounds) -> tuple[Update, str]:
    """Return the update with implausible claims lowered or removed, and a text that lists them, or ""."""
    usage, problems, workload, limit_s = update.usage, [], bounds.workload, bounds.limit_s
    if usage.wall_s > limit_s:
        problems.append(f"{usage.wall_s:.4g} s of work, lowered to the possible {limit_s:.4g} s")
        usage = replace(usage, wall_s=limit_s)
    max_j = highest_power_w(workload.profile) * limit_s
    joules = max(usage.energy_j or 0.0, usage.idle_j or 0.0, usage.energy_error_j or 0.0)
    if not joules <= max_j:
        watts = highest_power_w(workload.profile)
        problems.append(f"{joules:.4g} J ignored, as {watts:.4g} W for {limit_s:.4g} s give {max_j:.4g} J")
        usage = replace(usage, energy_j=None, idle_j=None, energy_error_j=None)
    sent_bytes = sum({ref.sha256: ref.size for ref in update.bundles.values()}.values())
    for name, limit in (("down_bytes", 2 * workload.bytes + SPARE_BYTES), ("up_bytes", sent_bytes)):
        if (claim := getattr(usage, name)) > limit:
            problems.append(f"{name} = {claim}, lowered to the possible {limit}")
            usage = replace(usage, **{name: limit})
    site_transfers, sums = update.devices_usage, update.evaluation
    if sums is not None and not bounds.is_evaluation:
        problems.append("an unrequested evaluation, ignored")
        sums = None
    if sums is not None and sums.correct_with_priors is not None and not bounds.uses_class_priors:
        problems.append("unrequested predictions with class priors, ignored")
        sums = replace(sums, correct_with_priors=None)
    max_examples = bounds.max_examples * (bounds.site_right.most if bounds.site_right else 1)
    if (usage.examples or 0) > max_examples:
        problems.append(f"{usage.examples} examples ignored, as {max_examples:g} are the maximum")
        usage = replace(usage, examples=None)
    limit = MAX_SITE_TASK_BYTES * (bounds.site_right.most if bounds.site_right else 0)
    if site_transfers is not None and max(site_transfers.down_bytes, site_transfers.up_bytes) > limit:
        problems.append(
            f"{site_transfers.down_bytes} bytes down and {site_transfers.up_bytes} up ignored, as {limit} are the "
            f"maximum for the site's devices"
        )
        site_transfers = None
    metrics = update.metrics
    if metrics.get(NEW_DEVICE, bounds.is_new) != bounds.is_new and not has_site_bundles(update.bundles):
        problems.append(f"{NEW_DEVICE} = {metrics[NEW_DEVICE]:g}, which the coordinator's records contradict")
        metrics = {**metrics, NEW_DEVICE: float(bounds.is_new)}
    if not problems:
        return update, ""
    update = replace(update, usage=usage, devices_usage=site_transfers, evaluation=sums, metrics=metrics)
    return update, "; ".join(problems)


def require_plausible(update: Update, bounds: ClaimBounds, *, work: bool) -> None:
    """Raise UpdateError if the metrics, evaluation or (with `work`) weight and speed are implausible."""
    require_valid_metrics(update.metrics)
    covers_site_devices = has_site_bundles(update.bundles) or not work
    boards = bounds.site_right.most if bounds.site_right and covers_site_devices else 1
    max_examples = bounds.max_examples * boards
    if update.evaluation is not None:
        _require_valid_evaluation(
            update.evaluation, bounds, max_examples, boards=boards if bounds.site_right and covers_site_devices else 0
        )
    if work:
        _require_weight_within(update, bounds.max_weight * boards, update.usage.examples)
        _require_plausible_speed(update, bounds)


def require_valid_metrics(metrics: Mapping[str, float]) -> None:
    if len(metrics) > MAX_METRICS:
        raise UpdateError(f"update has {len(metrics)} metrics, at most {MAX_METRICS} are allowed")
    for name, value in metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise UpdateError(
                f"metric name {name!r} is invalid: use up to 40 of a-z, 0-9, _, . and -, with a letter first"
            )
        if not math.isfinite(value):
            raise UpdateError(f"metric {name!r} is not a finite number")
        metric = METRICS.get(name)
        if metric is not None and metric.share and not 0 <= value <= 1 + SHARE_TOLERANCE:
            raise UpdateError(f"metric {name!r} is {value:g}, but must be between 0 and 1")


def _require_valid_evaluation(sums: EvaluationSums, bounds: ClaimBounds, max_examples: float, boards: int) -> None:
    if sums.examples > max_examples:
        raise UpdateError(f"evaluation claims {sums.examples} examples, at most {max_examples:g} are possible")
    expected_outputs = (bounds.task, bounds.outputs or sums.outputs)
    if sums.examples and (sums.task, sums.outputs) != expected_outputs:
        raise UpdateError(
            f"evaluation has {sums.outputs} outputs ({sums.task}), but the network has {expected_outputs[1]} "
            f"({expected_outputs[0]})"
        )
    metric = MAIN_METRICS[sums.task]
    problem = evaluation.find_inconsistency(sums) or evaluation.find_device_inconsistency(
        sums, boards, 1.0 if metric.share else math.inf
    )
    if problem:
        raise UpdateError(f"the evaluation has {problem}")


def require_site_right(update: Update, parts: Sequence[sites.SiteUpdatePart], bounds: ClaimBounds) -> None:
    """Raise UpdateError if the site has no right to submit for these devices, or if a weight is too large."""
    site_right = bounds.site_right
    if site_right is None:
        raise UpdateError(f"{update.device} has no right to submit updates of other devices")
    if len(parts) > site_right.most:
        raise UpdateError(
            f"{update.device} submits updates of {len(parts)} devices, its site right allows {site_right.most}"
        )
    if unauthorized := site_right.unauthorized_devices(part.device for part in parts):
        raise UpdateError(f"{update.device} has no right to submit updates of {', '.join(unauthorized[:5])}")
    for part in parts:
        require_valid_metrics(part.metrics)
        if part.weight > bounds.max_weight:
            raise UpdateError(_describe_excessive_weight(part.device, part.weight, bounds.max_weight))
    _require_weight_within(update, len(parts) * bounds.max_weight, None)


def _require_weight_within(update: Update, max_weight: float, reported_examples: int | None) -> None:
    if not update.weight <= max_weight:
        raise UpdateError(_describe_excessive_weight(update.device, update.weight, max_weight))
    if reported_examples is not None and update.weight > max(reported_examples, 1):
        raise UpdateError(f"{update.device} claims weight {update.weight:g}, but has only {reported_examples} examples")


def _describe_excessive_weight(device: str, weight: float, max_weight: float) -> str:
    return (
        f"{device} claims weight {weight:g}, but at most {max_weight:g} is plausible: set [cohort] max_examples if "
        f"the device has that many examples"
    )


def _require_plausible_speed(update: Update, bounds: ClaimBounds) -> None:
    workload, limit_s = bounds.workload, bounds.limit_s
    example_flops = workload.work.flops_per_example
    points = workload.profile.points if workload.profile else ()
    speed = max((point.flops_per_s or 0.0 for point in points), default=0.0)
    if not example_flops or not speed:
        return
    speed = max(speed, MIN_FLOPS_PER_S)
    max_examples = SPEED_TOLERANCE * speed * limit_s / example_flops
    if update.weight > max_examples:
        raise UpdateError(
            f"{update.device} claims weight {update.weight:g}, but at {speed:.3g} FLOP/s a device can process "
            f"{max_examples / SPEED_TOLERANCE:.3g} examples in {limit_s:.4g} s"
        )


@contextmanager
def name_device_in_errors(device: str) -> Iterator[None]:
    """Prefix the message of an UpdateError with the device's name, unless already included."""
    try:
        yield
    except UpdateError as error:
        text = str(error)
        if re.search(rf"(?<![\w.-]){re.escape(device)}(?![\w-])", text):
            raise
        raise UpdateError(f"{device}: {text}") from None


def require_finite_state(state: Any, devices: tuple[str, ...]) -> None:
    for path, value in _iterate_floats(state, ""):
        is_finite = np.isfinite(value).all() if isinstance(value, np.ndarray | np.generic) else math.isfinite(value)
        if not is_finite:
            names = ", ".join(devices[:5]) + (" ..." if len(devices) > 5 else "")
            raise UpdateError(
                f"new state: {path} is not finite after updates of {names}. The round is not committed: submit the "
                f"job again with a lower learning rate"
            )


def _iterate_floats(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, float | np.floating):
        yield path, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _iterate_floats(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iterate_floats(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _iterate_floats(item, f"{path}[{index}]")


DEFAULT_UPDATE_MB: Final = 1024  # size limit of an update if the method declares no schema
CODEC_SIZE_FACTOR: Final = 2  # size limit with a codec, as a multiple of the tensors (topk with all indices)
HEADER_BYTES: Final = 1024  # size limit of a safetensors header without entries
ENTRY_BYTES: Final = 300  # size limit of a tensor's entry in the header, without its name
AGGREGATE_SIZE_FACTOR: Final = 10  # size limit of a site's aggregate, as a multiple of a device's update
SITE_OVERHEAD_BYTES: Final = 2 << 20  # size limit of tables in a site's update
MAX_SITE_DEVICES: Final = 10_000  # largest number of devices whose updates a site may forward


def max_bundle_bytes(expected: Mapping[str, Any], wire: Encoding) -> int:
    factor = 1 if wire.codec == "raw" else CODEC_SIZE_FACTOR
    tensor_bytes = sum(prod(schema.shape) * schema.dtype.itemsize for schema in expected.values())
    return factor * (tensor_bytes + sum(ENTRY_BYTES + 2 * len(name) for name in expected)) + HEADER_BYTES


def require_manifest_fits(update: Update, expected: UpdateSchema | None, wire: Encoding, boards: int = 0) -> None:
    """Raise UpdateError if the sizes, bundles or tensors in an update's manifest do not fit the round."""
    total_bytes = sum(ref.size for ref in update.bundles.values())
    if has_site_bundles(update.bundles):
        return _require_site_size(total_bytes, expected, boards)
    if expected is None:
        if total_bytes > DEFAULT_UPDATE_MB << 20:
            raise UpdateError(f"update is larger than {DEFAULT_UPDATE_MB} MB")
        return
    if unexpected := sorted(update.bundles.keys() - expected.bundles.keys()):
        raise UpdateError(f"bundle {unexpected[0]!r} was not requested")
    if expected.exact and (missing := sorted(expected.bundles.keys() - update.bundles.keys())):
        raise UpdateError(f"bundle {missing[0]!r} is missing")
    for bundle, ref in update.bundles.items():
        expected_tensors = expected.bundles[bundle]
        if (max_bytes := max_bundle_bytes(expected_tensors, wire)) < ref.size:
            raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, at most {max_bytes} are expected")
        if bundle in update.layouts:
            sent_tensors = tensors.specs_from_layout(update.layouts[bundle])
            if (tensor_bytes := sum(tensor.nbytes for tensor in sent_tensors.values())) > ref.size:
                raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, fewer than its tensors ({tensor_bytes})")
            _require_expected_tensors(
                compression.decoded_specs(wire, sent_tensors, expected_tensors), expected_tensors, expected.exact
            )


class ManifestValidator:
    """Validator of the manifests of a round. Equal manifests are checked once."""

    def __init__(self, expected: UpdateSchema | None, wire: Encoding) -> None:
        self._expected, self._wire = expected, wire
        self._last_valid_manifest: object = None  # sizes and layouts of the latest valid update

    def manifest_problem(self, update: Update, boards: int = 0) -> str:
        """Return why an update does not fit the round, or "". `boards` counts a site's devices, or is 0."""
        manifest = {name: ref.size for name, ref in update.bundles.items()}, update.layouts
        if manifest == self._last_valid_manifest:
            return ""
        try:
            require_manifest_fits(update, self._expected, self._wire, boards)
        except UpdateError as error:
            return f"{update.device}: {error}"
        self._last_valid_manifest = None if boards else manifest
        return ""


def _require_site_size(total_bytes: int, expected: UpdateSchema | None, boards: int) -> None:
    if not boards:
        raise UpdateError("a site's update, but the device has no site right")
    factor = max(AGGREGATE_SIZE_FACTOR, min(boards, MAX_SITE_DEVICES))
    update_bytes = DEFAULT_UPDATE_MB << 20
    if expected is not None:
        update_bytes = sum(max_bundle_bytes(bundle, Encoding()) for bundle in expected.bundles.values())
    if total_bytes > (max_bytes := factor * update_bytes + SITE_OVERHEAD_BYTES):
        raise UpdateError(
            f"update has {total_bytes} bytes, at most {max_bytes} are expected from a site with {boards} devices"
        )


def _require_expected_tensors(
    tensors_by_name: Mapping[str, Any], expected: Mapping[str, Any], is_complete: bool
) -> None:
    unexpected = sorted(
        tensors_by_name.keys() ^ expected.keys() if is_complete else tensors_by_name.keys() - expected.keys()
    )
    if unexpected:
        raise UpdateError(f"tensor names differ: {', '.join(unexpected[:5])}{' ...' if len(unexpected) > 5 else ''}")
    for name, tensor in tensors_by_name.items():
        expected_tensor = expected[name]
        if tensor.dtype != expected_tensor.dtype:
            raise UpdateError(f"tensor {name!r} is {tensor.dtype}, expected {expected_tensor.dtype}")
        if is_complete and tensor.shape != expected_tensor.shape:
            raise UpdateError(f"tensor {name!r} has shape {tensor.shape}, expected {expected_tensor.shape}")
        if prod(tensor.shape) > prod(expected_tensor.shape):
            raise UpdateError(
                f"tensor {name!r} has shape {tensor.shape}, larger than the expected {expected_tensor.shape}"
            )
