"""Validation of updates: plausible claims, a manifest that fits the round, finite numbers.

The table in docs/security.md lists each field of each message that devices send: verified, bounded or informational.
The bounds of claims are wide. They reject values that are impossible for a device, not values that are wrong by a
factor of two.
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
from fedquilt.coordinator.device_columns import MOST_EXAMPLES
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.core import (
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
from fedquilt.metrics import KNOWN, MAIN

if TYPE_CHECKING:
    from fedquilt.coordinator.updates import sites

MOST_W: Final = 3000.0  # of any board
UNKNOWN_W: Final = 1000.0  # of one whose profile has no watts
LEAST_W: Final = 100.0  # that a profile's watts are taken for: a meter may cover more than they do
WIDE: Final = 3.0  # times a profile's watts
LEAST_FLOPS: Final = 1e6  # a second, that a board is taken for
FASTER: Final = 10.0  # times as fast as its profile a board may be
SPARE_S: Final = 60.0
SPARE_BYTES: Final = 1 << 20
MOST_BYTES: Final = 1 << 30  # that a board of a site can have fetched or sent for a task
ROUNDING: Final = 1e-6  # by which a mean of shares may be above 1
MOST_METRICS: Final = 64  # of an update, beside its evaluation
METRIC_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
LATER_EPOCHS: Final = 1 << 20  # starts of the coordinator that a device may know and this home has lost
UNENTITLED: Final = (
    "%s says that it is a site, and has no right to speak for other devices: it gets the tasks of a device. "
    "With certificates, `fedquilt identity issue NAME --role site` grants the right; without, [sites.NAME] in "
    "limits.toml does"
)

M = TypeVar("M", bound=Struct)


class ClaimBounds(NamedTuple):
    """Limits on the claims of a device, known when its update arrives."""

    ask: DeviceWorkload = DeviceWorkload()  # of its task
    limit_s: float = math.inf  # longest time that it can have worked on the task
    examples: float = MOST_EXAMPLES  # most that a device of the job may count as
    reported: float = MOST_EXAMPLES  # most examples that a device of the job may report
    right: SiteRight | None = None  # None unless the device is a site
    checks: bool = True  # whether its task is to evaluate
    task: TaskKind = "classes"  # of the job's network
    outputs: int | None = None  # of the job's network, or None if its table does not declare outputs
    priors: bool = False  # whether its job wants class priors


def replace_unprintable(message: M, payload: bytes) -> M:
    """Return the message with unprintable characters of its texts replaced by "?" or a space."""
    if payload.isascii() and b"\\" not in payload and b"\x7f" not in payload:
        return message
    return msgspec.convert(_replace_in_texts(msgspec.to_builtins(message)), type(message))


def _replace_in_texts(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value
            if value.isprintable()
            else "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in value)
        )
    if isinstance(value, dict):
        return {_replace_in_texts(name): _replace_in_texts(each) for name, each in value.items()}
    return [_replace_in_texts(each) for each in value] if isinstance(value, list | tuple) else value


def limit_profile(profile: Profile, right: SiteRight | None) -> Profile:
    """Return the profile with its number of boards limited to the site right, or 0 without a right."""
    boards = min(profile.site_device_count, right.most) if right is not None else 0
    return profile if boards == profile.site_device_count else replace(profile, site_device_count=boards)


def longest_work_s(waited_s: float, deadline_s: float, attempts: int) -> float:
    """Return the longest time in seconds that a device can have worked on a task."""
    return 2 * max(waited_s, deadline_s * attempts) + SPARE_S


def highest_power_w(profile: Profile | None) -> float:
    said = [profile.idle_w, *(point.busy_w for point in profile.points)] if profile else []
    known = [watts for watts in said if watts is not None]
    most = min(max(WIDE * max(known), LEAST_W), MOST_W) if known else UNKNOWN_W
    return most * (max(profile.site_device_count, 1) if profile else 1)


def limit_claims(update: Update, bounds: ClaimBounds) -> tuple[Update, str]:
    """Return the update with implausible claims lowered or removed, and a sentence about them, or ""."""
    usage, odd, ask, limit_s = update.usage, [], bounds.ask, bounds.limit_s
    if usage.wall_s > limit_s:
        odd.append(f"{usage.wall_s:.4g} s of work, and it was asked {limit_s:.4g} s ago at the most")
        usage = replace(usage, wall_s=limit_s)
    most_j = highest_power_w(ask.profile) * limit_s
    joules = max(usage.energy_j or 0.0, usage.idle_j or 0.0, usage.energy_error_j or 0.0)
    if not joules <= most_j:
        watts = highest_power_w(ask.profile)
        odd.append(f"{joules:.4g} J, and {watts:.4g} W for {limit_s:.4g} s are {most_j:.4g} J: not counted")
        usage = replace(usage, energy_j=None, idle_j=None, energy_error_j=None)
    sent = sum({ref.sha256: ref.size for ref in update.bundles.values()}.values())
    for name, most in (("down_bytes", 2 * ask.bytes + SPARE_BYTES), ("up_bytes", sent)):
        if (said := getattr(usage, name)) > most:
            odd.append(f"{name} of {said}, and it was {most} at the most")
            usage = replace(usage, **{name: most})
    below, sums = update.devices_usage, update.evaluation
    if sums is not None and not bounds.checks:
        odd.append("an evaluation that it was not asked for")
        sums = None
    if sums is not None and sums.correct_with_priors is not None and not bounds.priors:
        odd.append("predictions with class priors that it was not asked for")
        sums = replace(sums, correct_with_priors=None)
    if (usage.examples or 0) > (most_examples := bounds.reported * (bounds.right.most if bounds.right else 1)):
        odd.append(f"{usage.examples} examples, and {most_examples:g} are the most: not counted")
        usage = replace(usage, examples=None)
    most = MOST_BYTES * (bounds.right.most if bounds.right else 0)
    if below is not None and max(below.down_bytes, below.up_bytes) > most:
        odd.append(f"{below.down_bytes} bytes down and {below.up_bytes} up of its boards, and {most} are the most")
        below = None
    return (replace(update, usage=usage, devices_usage=below, evaluation=sums), "; ".join(odd)) if odd else (update, "")


def require_plausible(update: Update, bounds: ClaimBounds, *, work: bool) -> None:
    """Check the metrics of an update and, if it is `work` to fold and no evaluation alone, its weight."""
    require_valid_metrics(update.metrics)
    for_boards = has_site_bundles(update.bundles) or not work
    boards = bounds.right.most if bounds.right and for_boards else 1
    most = bounds.reported * boards
    if update.evaluation is not None:
        _require_valid_evaluation(update.evaluation, bounds, most, boards=boards if bounds.right and for_boards else 0)
    if work:
        _require_weight_within(update, bounds.examples * boards, update.usage.examples)
        _require_plausible_speed(update, bounds)


def require_valid_metrics(metrics: Mapping[str, float]) -> None:
    if len(metrics) > MOST_METRICS:
        raise UpdateError(f"{len(metrics)} metrics, and {MOST_METRICS} are the most")
    for name, value in metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise UpdateError(f"metric {name!r} has a name other than up to 40 of a-z, 0-9, _, . and -")
        if not math.isfinite(value):
            raise UpdateError(f"metric {name!r} is not a finite number")
        metric = KNOWN.get(name)
        if metric is not None and metric.share and not 0 <= value <= 1 + ROUNDING:
            raise UpdateError(f"metric {name!r} is {value:g}: a share is from 0 to 1")


def _require_valid_evaluation(sums: EvaluationSums, bounds: ClaimBounds, most: float, boards: int) -> None:
    if sums.examples > most:
        raise UpdateError(f"an evaluation on {sums.examples} examples, and {most:g} are the most")
    wanted = (bounds.task, bounds.outputs or sums.outputs)
    if sums.examples and (sums.task, sums.outputs) != wanted:
        raise UpdateError(
            f"an evaluation of {sums.outputs} outputs ({sums.task}), and the network has {wanted[1]} ({wanted[0]})"
        )
    metric = MAIN[sums.task]
    odd = evaluation.find_inconsistency(sums) or evaluation.find_device_inconsistency(
        sums, boards, 1.0 if metric.share else math.inf
    )
    if odd:
        raise UpdateError(f"its evaluation has {odd}")


def require_site_right(update: Update, parts: Sequence[sites.SiteUpdatePart], bounds: ClaimBounds) -> None:
    """Check that a site may submit updates of these devices, and that no device's weight is too large."""
    right = bounds.right
    if right is None:
        raise UpdateError(f"{update.device} has no right to speak for other devices")
    if len(parts) > right.most:
        raise UpdateError(f"{update.device} speaks for {len(parts)} boards, and may speak for {right.most}")
    if uncovered := right.unauthorized_devices(part.device for part in parts):
        raise UpdateError(f"{update.device} has no right to speak for {', '.join(uncovered[:5])}")
    for part in parts:
        require_valid_metrics(part.metrics)
        if part.weight > bounds.examples:
            raise UpdateError(_weight_problem(part.device, part.weight, bounds.examples))
    _require_weight_within(update, len(parts) * bounds.examples, None)


def _require_weight_within(update: Update, most: float, told: int | None) -> None:
    if not update.weight <= most:
        raise UpdateError(_weight_problem(update.device, update.weight, most))
    if told is not None and update.weight > max(told, 1):
        raise UpdateError(f"{update.device} claims to count as {update.weight:g} examples and says that it has {told}")


def _weight_problem(device: str, weight: float, most: float) -> str:
    return (
        f"{device} claims to count as {weight:g} examples, and {most:g} are the most here: set [cohort] max_examples "
        "if it really has so many"
    )


def _require_plausible_speed(update: Update, bounds: ClaimBounds) -> None:
    ask, limit_s = bounds.ask, bounds.limit_s
    each = ask.work.flops_per_example
    speed = max((point.flops_per_s or 0.0 for point in ask.profile.points), default=0.0) if ask.profile else 0.0
    if not each or not speed:
        return
    speed = max(speed, LEAST_FLOPS)
    most = FASTER * speed * limit_s / each
    if update.weight > most:
        raise UpdateError(
            f"{update.device} claims to count as {update.weight:g} examples, and at {speed:.3g} FLOP/s it can "
            f"have worked through {most / FASTER:.3g} in {limit_s:.4g} s"
        )


@contextmanager
def name_device_in_errors(device: str) -> Iterator[None]:
    """Prefix the message of an UpdateError with the device's name, unless already included."""
    try:
        yield
    except UpdateError as error:
        said = str(error)
        if re.search(rf"(?<![\w.-]){re.escape(device)}(?![\w-])", said):
            raise
        raise UpdateError(f"{device}: {said}") from None


def require_finite_state(state: Any, devices: tuple[str, ...]) -> None:
    """Raise UpdateError if a new state contains numbers that are not finite."""
    for at, value in _iterate_floats(state, ""):
        finite = np.isfinite(value).all() if isinstance(value, np.ndarray | np.generic) else math.isfinite(value)
        if not finite:
            some = ", ".join(devices[:5]) + (" ..." if len(devices) > 5 else "")
            raise UpdateError(
                f"{at} came out as numbers that are not finite, from updates of {some}: the round is not committed; "
                "run the job anew with a lower learning rate"
            )


def _iterate_floats(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, float | np.floating):
        yield at, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            yield at, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _iterate_floats(getattr(value, field.name), f"{at}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _iterate_floats(each, f"{at}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _iterate_floats(each, f"{at}[{index}]")


UNKNOWN_MB: Final = 1024  # that a device may send where the method does not say how much it is
LOSSY: Final = 2  # times as many bytes as the tensors have: topk with all entries, each with its place
HEADER_BYTES: Final = 1024  # of a safetensors file without tensors, more than enough
ENTRY_BYTES: Final = 300  # of a header for each tensor, besides its name
SUM_TIMES: Final = 10  # a site's sum is at most so many times as large as the tensors that a board sends
SITE_BYTES: Final = 2 << 20  # what a site's update may have besides
BOARDS_MOST: Final = 10_000  # whose updates a site may pass up


def max_bundle_bytes(expected: Mapping[str, Any], wire: Encoding) -> int:
    factor = 1 if wire.codec == "raw" else LOSSY
    held = sum(prod(each.shape) * each.dtype.itemsize for each in expected.values())
    return factor * (held + sum(ENTRY_BYTES + 2 * len(name) for name in expected)) + HEADER_BYTES


def require_manifest_fits(update: Update, expected: UpdateSchema | None, wire: Encoding, boards: int = 0) -> None:
    """Raise UpdateError if an update does not fit the running round, judged by its manifest."""
    whole_bytes = sum(ref.size for ref in update.bundles.values())
    if has_site_bundles(update.bundles):
        return _require_site_size(whole_bytes, expected, boards)
    if expected is None:
        if whole_bytes > UNKNOWN_MB << 20:
            raise UpdateError(f"larger than {UNKNOWN_MB} MB")
        return
    if odd := sorted(update.bundles.keys() - expected.bundles.keys()):
        raise UpdateError(f"bundle {odd[0]!r} was not asked for")
    if expected.exact and (absent := sorted(expected.bundles.keys() - update.bundles.keys())):
        raise UpdateError(f"it has no bundle {absent[0]!r}")
    for bundle, ref in update.bundles.items():
        like = expected.bundles[bundle]
        if (most := max_bundle_bytes(like, wire)) < ref.size:
            raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, and what was asked for has {most} at the most")
        if bundle in update.layouts:
            sent = tensors.specs_from_layout(update.layouts[bundle])
            if (held := sum(each.nbytes for each in sent.values())) > ref.size:
                raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, and its tensors {held}")
            _require_expected_tensors(compression.decoded_specs(wire, sent, like), like, expected.exact)


class ManifestValidator:
    """Validator of the manifests of a round. Equal manifests are checked once."""

    def __init__(self, expected: UpdateSchema | None, wire: Encoding) -> None:
        self._expected, self._wire = expected, wire
        self._fitted: object = None  # sizes and layouts of the last update that fitted

    def manifest_problem(self, update: Update, boards: int = 0) -> str:
        """Return why an update of a device or of a site's `boards` does not fit the round, or ""."""
        told = {name: ref.size for name, ref in update.bundles.items()}, update.layouts
        if told == self._fitted:
            return ""
        try:
            require_manifest_fits(update, self._expected, self._wire, boards)
        except UpdateError as error:
            return f"{update.device}: {error}"
        self._fitted = None if boards else told
        return ""


def _require_site_size(whole_bytes: int, expected: UpdateSchema | None, boards: int) -> None:
    if not boards:
        raise UpdateError("it is what a site sends, and the device has no right to be one")
    times = max(SUM_TIMES, min(boards, BOARDS_MOST))
    each = UNKNOWN_MB << 20
    if expected is not None:
        each = sum(max_bundle_bytes(bundle, Encoding()) for bundle in expected.bundles.values())
    if whole_bytes > (most := times * each + SITE_BYTES):
        raise UpdateError(f"it has {whole_bytes} bytes, and {boards} boards send {most} at the most")


def _require_expected_tensors(told: Mapping[str, Any], like: Mapping[str, Any], whole: bool) -> None:
    odd = sorted(told.keys() ^ like.keys() if whole else told.keys() - like.keys())
    if odd:
        raise UpdateError(f"tensor names differ: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")
    for name, each in told.items():
        wanted = like[name]
        if each.dtype != wanted.dtype:
            raise UpdateError(f"tensor {name!r} is {each.dtype}, expected {wanted.dtype}")
        if whole and each.shape != wanted.shape:
            raise UpdateError(f"tensor {name!r} has shape {each.shape}, expected {wanted.shape}")
        if prod(each.shape) > prod(wanted.shape):
            raise UpdateError(f"tensor {name!r} has shape {each.shape}, expected {wanted.shape} or a part of it")
