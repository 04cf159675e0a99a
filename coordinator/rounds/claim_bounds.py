"""Plausibility checks of the values that devices report.

The table in docs/security.md lists each field of each message that devices send: verified, bounded or informational.
The bounds are wide. They reject values that are impossible for a device, not values that are wrong by a factor of two.
Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.core import EvaluationSums, Profile, SiteRight, TaskKind, Update, UpdateError, evaluation
from fedquilt.core.messages import has_site_bundles
from fedquilt.metrics import KNOWN, MAIN

if TYPE_CHECKING:
    from fedquilt.coordinator.updates import site_updates

MOST_W: Final = 3000.0  # of any board
UNKNOWN_W: Final = 1000.0  # of one whose profile has no watts
LEAST_W: Final = 100.0  # that a profile's watts are taken for: a meter may cover more than they do
WIDE: Final = 3.0  # times a profile's watts
LEAST_FLOPS: Final = 1e6  # a second, that a board is taken for
FASTER: Final = 10.0  # times as fast as its profile a board may be
SPARE_S: Final = 60.0
SPARE_BYTES: Final = 1 << 20
MOST_BYTES: Final = 1 << 30  # that a board of a site can have fetched or sent for a task
MOST_EXAMPLES: Final = 10_000_000  # of a device, before enough devices have reported numbers
USUAL: Final = 100.0  # largest weight, as a multiple of the median of the job's devices
ROUNDING: Final = 1e-6  # by which a mean of shares may be above 1
MOST_METRICS: Final = 64  # of an update, beside its evaluation
METRIC_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
ENOUGH: Final = 3  # devices of which the median is used
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


class DeviceWeights(Struct):
    """Weight (or number of examples) of each device of a job, and all weights in ascending order."""

    by_device: dict[str, float] = {}
    ascending: list[float] = []

    def set_number(self, device: str, number: float) -> None:
        if (before := self.by_device.get(device)) is not None:
            del self.ascending[bisect_left(self.ascending, before)]
        self.by_device[device] = number
        insort(self.ascending, number)

    def largest_allowed(self, device: str, limit: int | None) -> float:
        """Return the largest number that a device may report: `limit`, or a multiple of the others' median.

        Args:
            device: The device, whose own number does not count.
            limit: The job's [cohort] max_examples, or None if the numbers of the other devices decide.
        """
        if limit is not None:
            return limit
        own = self.by_device.get(device)
        others = len(self.ascending) - (own is not None)
        if others < ENOUGH:
            return MOST_EXAMPLES
        at = others // 2
        if own is not None and bisect_left(self.ascending, own) <= at:
            at += 1
        return min(USUAL * max(self.ascending[at], 1.0), MOST_EXAMPLES)


def replace_unprintable(message: M, payload: bytes) -> M:
    """Return the message with unprintable characters of its texts replaced by "?" or a space.

    Args:
        message: Message of a device.
        payload: Bytes that the message was decoded from.
    """
    if payload.isascii() and b"\\" not in payload and b"\x7f" not in payload:
        return message
    return msgspec.convert(_replace_in_texts(msgspec.to_builtins(message)), type(message))


def _replace_in_texts(value: Any) -> Any:
    """Return the value with unprintable characters replaced in all nested texts."""
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
    boards = min(profile.boards, right.most) if right is not None else 0
    return profile if boards == profile.boards else replace(profile, boards=boards)


def longest_work_s(waited_s: float, deadline_s: float, attempts: int) -> float:
    """Return the longest time in seconds that a device can have worked on a task.

    Args:
        waited_s: Seconds since the device was selected, as far as this process knows.
        deadline_s: Deadline of an attempt in seconds.
        attempts: Number of attempts so far.
    """
    return 2 * max(waited_s, deadline_s * attempts) + SPARE_S


def highest_power_w(profile: Profile | None) -> float:
    """Return the highest plausible power in watts of a device, or of all boards of a site."""
    said = [profile.idle_w, *(point.busy_w for point in profile.points)] if profile else []
    known = [watts for watts in said if watts is not None]
    most = min(max(WIDE * max(known), LEAST_W), MOST_W) if known else UNKNOWN_W
    return most * (max(profile.boards, 1) if profile else 1)


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
    below, sums = update.below, update.evaluation
    if sums is not None and not bounds.checks:
        odd.append("an evaluation that it was not asked for")
        sums = None
    if sums is not None and sums.right_with_priors is not None and not bounds.priors:
        odd.append("predictions with class priors that it was not asked for")
        sums = replace(sums, right_with_priors=None)
    if (usage.examples or 0) > (most_examples := bounds.reported * (bounds.right.most if bounds.right else 1)):
        odd.append(f"{usage.examples} examples, and {most_examples:g} are the most: not counted")
        usage = replace(usage, examples=None)
    most = MOST_BYTES * (bounds.right.most if bounds.right else 0)
    if below is not None and max(below.down_bytes, below.up_bytes) > most:
        odd.append(f"{below.down_bytes} bytes down and {below.up_bytes} up of its boards, and {most} are the most")
        below = None
    return (replace(update, usage=usage, below=below, evaluation=sums), "; ".join(odd)) if odd else (update, "")


def require_plausible(update: Update, bounds: ClaimBounds, *, work: bool) -> None:
    """Check that the metrics of an update and, if it is work, its weight are plausible.

    Args:
        update: Update as sent by the device.
        bounds: Limits on the claims of the device.
        work: Whether the update is to be folded. Otherwise it contains an evaluation only.

    Raises:
        UpdateError: If a value is implausible.
    """
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
    """Check the names and values of training metrics.

    Raises:
        UpdateError: If there are more than MOST_METRICS, or a name or value is invalid.
    """
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


def require_site_right(update: Update, parts: Sequence[site_updates.SiteUpdatePart], bounds: ClaimBounds) -> None:
    """Check that a site may submit updates of these devices, and that no device's weight is too large.

    Raises:
        UpdateError: If the site has no right to submit them, or a weight or metric is invalid.
    """
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
    """Raise UpdateError if the weight exceeds `most`, or the reported number of examples, `told`."""
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
