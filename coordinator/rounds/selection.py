"""Eligibility of devices, and random selection of a round's cohort, as pure functions.

The reasons why a device cannot be selected are short codes for the event log. `reason_text` returns the sentence for a
code. Unknown values exclude no device: a device without a battery or a temperature sensor is eligible.

The selection depends on the seed and the round alone, on every machine and after every restart. Every device draws a
number from (seed, round, its id), and the devices with the smallest numbers are selected. So the presence of other
devices changes no device's draw. With `prefer = "energy"` the draw is weighted: a device that needs twice the joules
for the same work is selected half as often in the long run (exponential keys: Efraimidis and Spirakis, Weighted random
sampling with a reservoir, IPL 97, 2006).

A turn is the number of rounds needed to select every device once. Devices that have not been selected for `turns`
turns precede all other devices, the longest waiting first. So no device that is always present waits for more than
`turns` + 1 turns, for any draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from fedquilt import plugins
from fedquilt.coordinator.device_columns import CostColumn, DeviceSet, RoundColumn, device_names, hash_name, name_hashes
from fedquilt.coordinator.rounds.deadline import MemoryShortage
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import Profile, derive_seed
from fedquilt.formats import labels
from fedquilt.wire import Telemetry

BUSY: Final = "busy"  # BUSY and SHARE depend on other jobs, and are set by `jobs.job.decide_next_event`
SHARE: Final = "share"
REMOVED: Final = "removed"
SPENT: Final = "privacy"
REASONS: Final[Mapping[str, str]] = {
    "offline": "offline",
    REMOVED: "removed from the fleet",
    "silent": "silent: the broker reports the device online, but the device does not answer",
    "flooding": "sent too many messages, and is ignored for a while",
    "profile": "has not sent its profile yet",
    "labels": "lacks labels that [cohort] select requires",
    "engine": "has no engine for the job's method, or the engine refused the task",
    "codec": "does not support the codec of [wire]: update fedquilt on the device",
    "plugin": "lacks a package that the job needs, or has another version of it",
    "site": 'is a site, and [privacy] or [cohort] mode "buffered" or "auto" takes the updates of devices only',
    "ahead": 'waits for slower devices ([cohort] fair = "contributions")',
    "outdated": "did not finish its task within [cohort] staleness.max commits: can be selected again later",
    "unneeded": "would submit its update after the end of the job",
    SPENT: "has contributed as many updates as [privacy] epsilon allows",
    "battery": "has less battery charge than [cohort] min_battery, and is not charging",
    "hot": "is hotter than [cohort] max_temperature_c",
    "full": "has a full disk: free disk space on the device",
    "memory": "lacked memory for this work: can be selected again after some rounds, or for less work",
    "data": "declined because of its data: can be selected again after a restart of its agent, or a resume of the run",
    "budget": "has too small a memory budget for this work: can be selected again after some rounds, or for less work",
    **dict.fromkeys(
        ("diverged", "exception", "model", "update"),
        "failed at this round's task, and would fail again: can be selected again in the next round",
    ),
    "method": "declined the job's method: can be selected again after a restart of its agent, or a resume of the run",
    BUSY: "is working for another job, or reserved for a job that has used less device time",
    SHARE: "is left free: this submitter's jobs have as many devices as [submitter] share in limits.toml allows",
}
ONLINE_REASONS: Final = frozenset(REASONS) - {
    "offline",
    REMOVED,
    "profile",
    "labels",
    "engine",
    "codec",
    "plugin",
    "site",
}
"""Reasons that exclude devices which are online and suitable for the job."""


class DeviceSnapshot(NamedTuple):
    online: bool
    profile: Profile | None = None
    telemetry: Telemetry | None = None  # None without a recent report
    flooding: bool = False  # sent too many messages, which are ignored now
    silent: bool = False  # online according to the broker, but without an answer
    removed: bool = False  # by a user, and without a message since


class JobRequirements(NamedTuple):
    engines: tuple[str, ...]
    cohort: CohortSettings
    codec: str = "raw"
    plugins: tuple[tuple[str, str], ...] = ()  # (module, fingerprint) pairs of `fedquilt.plugins.required_modules`
    is_private: bool = False  # with [privacy]


def ineligibility_code(snapshot: DeviceSnapshot, requirements: JobRequirements) -> str | None:
    """Return the code of the first reason why a device cannot be selected, or None.

    Other jobs are not considered. Without telemetry, battery, temperature and disk are not checked.
    """
    profile, telemetry, cohort = snapshot.profile, snapshot.telemetry, requirements.cohort
    if not snapshot.online:
        return REMOVED if snapshot.removed else "silent" if snapshot.silent else "offline"
    if snapshot.flooding:
        return "flooding"
    if profile is None:
        return "profile"
    if not any(engine in profile.engines for engine in requirements.engines):
        return "engine"
    if not labels.is_selected(cohort.select, profile.labels):
        return "labels"
    if requirements.codec not in profile.codecs:
        return "codec"
    if (requirements.is_private or cohort.mode != "synchronous") and profile.site_device_count:
        return "site"
    if (code := _plugin_code(profile, requirements)) is not None or telemetry is None:
        return code
    if telemetry.battery is not None and not telemetry.charging and telemetry.battery < cohort.min_battery:
        return "battery"
    limit_c = cohort.max_temperature_c
    if limit_c is not None and telemetry.temperature_c is not None and telemetry.temperature_c > limit_c:
        return "hot"
    return "full" if telemetry.disk_full else None


def reason_key(code: str) -> str:
    """Return the code without details, a key of REASONS."""
    return code.partition(" ")[0]


def reason_text(code: str) -> str:
    """Return a code's text to follow the device's name, or the code itself if unknown."""
    key, _, rest = code.partition(" ")
    if key != "plugin" or not rest:
        return REASONS.get(code, code)
    package, required, installed = rest.split("|")
    if not installed:
        return f"lacks package {package} {required}: install it on the device, and allow it in agent.toml"
    return f"has package {package} {installed}, and the job needs {required}: install that version on the device"


def _plugin_code(profile: Profile, requirements: JobRequirements) -> str | None:
    for module, required in requirements.plugins:
        installed = profile.versions.get(f"plugin {module}", "")
        if installed != required:
            texts = plugins.format_fingerprint(required), plugins.format_fingerprint(installed)
            return f"plugin {required.split(' ')[0]}|{texts[0]}|{texts[1]}"
    return None


Duration: TypeAlias = Literal["attempt", "round", "rounds", "start"]
"""How long a device is not selected. "attempt": until the next attempt. "round": until the next round.
"rounds": for `MEMORY_DECLINE_ROUNDS` rounds, for as much work. "start": until the device's agent restarts or sends
another profile."""
NO_WORK: Final = "none"  # code of a device that the method has no task for
UPDATE: Final = "update"  # code of an update that was rejected for its content
DISK_FULL: Final = "full"  # code of a device whose disk is full
MEMORY_DECLINE_ROUNDS: Final = 10  # rounds for which a device that lacked memory is not selected for as much work


class DeclineReason(NamedTuple):
    duration: Duration  # how long the device is not selected
    recurs: bool  # whether the same task would fail again, so that no attempt is spent on it
    cause: str  # as part of "CAUSE in round 3 on 2 of 5 devices"
    fix: str
    holds_for_any_task: bool = False  # whether tasks with other actions would fail as well


_RESUME: Final = "then `fedquilt resume` the run"
_UPGRADE: Final = "install the coordinator's fedquilt and packages on these devices"
DECLINE_REASONS: Final[Mapping[str, DeclineReason]] = {
    "data": DeclineReason(
        "start",
        True,
        "the data cannot be used",
        f"correct the data or [data], restart these agents, {_RESUME}",
        holds_for_any_task=True,
    ),
    "engine": DeclineReason("start", True, "the engine cannot run the task", f"{_UPGRADE}, or set another engine"),
    "method": DeclineReason(
        "start", True, "the method refused the task", f"change the job as the reason says, or {_UPGRADE}"
    ),
    "codec": DeclineReason("start", True, "the codec is unknown", f"{_UPGRADE}, or set another [wire] codec"),
    "budget": DeclineReason(
        "rounds",
        True,
        "the task does not fit the memory budget",
        "raise the devices' budget (agent.toml, or [fleet] budgets), or make the model or [params] batch smaller",
    ),
    "memory": DeclineReason(
        "rounds", False, "memory ran out", f"free memory on these devices or make the task smaller, {_RESUME}"
    ),
    "model": DeclineReason("round", True, "the model does not fit", "change the model or donor as the reason says"),
    "diverged": DeclineReason(
        "round",
        True,
        "training diverged",
        "lower [params] lr (0.01 to 0.1 is usual with SGD); if feature scales differ, set [input] standardise = true",
    ),
    "exception": DeclineReason(
        "round", True, "the method's code failed", "correct the code at the line named, install it on the devices"
    ),
    DISK_FULL: DeclineReason("round", True, "the disk is full", f"free disk space on these devices, {_RESUME}"),
    UPDATE: DeclineReason(
        "round", True, "the update was rejected", f"remove these devices, or correct what they send, {_RESUME}"
    ),
    "disk": DeclineReason("attempt", False, "the disk failed", f"check the disks, {_RESUME}"),
    "failed": DeclineReason("attempt", False, "the work failed", f"check these devices, {_RESUME}"),
    "flooding": DeclineReason("attempt", False, "the device sent too much", f"remove it, {_RESUME}"),
    REMOVED: DeclineReason("attempt", False, "the device was removed from the fleet", "none is needed"),
    NO_WORK: DeclineReason("attempt", False, "the method has no task", "none is needed"),
}
"""Code of a decline -> duration, cause and fix."""
UNKNOWN_DECLINE: Final = DECLINE_REASONS["failed"]  # for codes of later versions


class LastingDecline(msgspec.Struct, frozen=True):
    round: int
    code: str
    reason: str
    actions: frozenset[str]
    agent_start_key: str = ""  # `DeviceRegistry.agent_start_key`, or "" if unknown
    shortage: MemoryShortage | None = None

    def would_recur(self, round: int, actions: Collection[str], agent_start_key: str, shortage: MemoryShortage) -> bool:
        kind = DECLINE_REASONS[self.code]
        if agent_start_key != self.agent_start_key and self.code != UPDATE:
            return False
        if not (kind.holds_for_any_task or self.actions.issubset(actions)):
            return False
        if round == self.round or kind.duration == "start":
            return kind.recurs
        is_memory_decline = kind.duration == "rounds" and round < self.round + MEMORY_DECLINE_ROUNDS
        return is_memory_decline and self.shortage is not None and self.shortage.is_at_most(shortage)


def format_by_reason(reasons_by_device: Mapping[str, str], max_shown: int = 5) -> str:
    """Return up to `max_shown` reasons as text, each after its devices: "a, b and 6 more: too big"."""
    devices: dict[str, list[str]] = {}
    for device, reason in sorted(reasons_by_device.items()):
        devices.setdefault(reason, []).append(device)
    suffixes = {
        reason: f" and {len(names) - max_shown} more" for reason, names in devices.items() if len(names) > max_shown
    }
    shown_reasons = list(devices.items())[:max_shown]
    parts = [f"{', '.join(names[:max_shown])}{suffixes.get(reason, '')}: {reason}" for reason, names in shown_reasons]
    hidden_count = len(devices) - max_shown
    return "; ".join([*parts, *([f"{hidden_count} more reason{'s' * (hidden_count > 1)}"] if hidden_count > 0 else [])])


_SHIFTS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shifts and factors of SplitMix64
_KEY_TOLERANCE: Final = 1e-9  # relative difference of a vectorised key from the exact one, at most


class CohortDraw(NamedTuple):
    """Parameters of a round's selection.

    Attributes:
        seed: Seed of the job.
        round: Number of the round.
        costs: Joules per operation of each device, or empty to ignore energy. Missing values count as the median.
        last_selected_rounds: Round in which a device was last selected, or first eligible. Missing values count as 0.
        turns: Limit on a wait, in turns. Devices that were not selected for so long precede all others.
    """

    seed: int
    round: int
    costs: Mapping[str, float] = {}
    last_selected_rounds: Mapping[str, int] = {}
    turns: float = math.inf


def select_cohort(draw: CohortDraw, eligible: Collection[str], count: int) -> tuple[str, ...]:
    """Select up to `count` of the eligible devices, sorted by id.

    The result has the first devices of `rank_devices`, without ranking the whole fleet.
    """
    import numpy as np

    pool = DeviceSet.from_devices(eligible)
    if not 0 < count < len(pool):
        return tuple(sorted(pool)) if count > 0 else ()
    rows, wait_limit = np.flatnonzero(pool.mask), draw.turns * len(pool) / count
    overdue_rows, median = rows[:0], 1.0
    if draw.costs:
        cost_array = CostColumn.from_values(draw.costs).to_array(len(pool.mask))
        median = float(np.median(known_costs)) if len(known_costs := cost_array[rows][cost_array[rows] >= 0]) else 1.0
    if wait_limit <= draw.round:
        rounds = RoundColumn.from_values(draw.last_selected_rounds).to_array(len(pool.mask))[rows]
        waits = draw.round - np.maximum(rounds, 0)
        waits = np.where(waits >= wait_limit, waits, 0)
        limit_wait = np.partition(waits, -count)[-count]
        overdue_rows, rows = rows[waits > limit_wait], rows[waits == limit_wait]
    numbers, remaining = name_hashes(rows), count - len(overdue_rows)
    numbers ^= np.uint64(derive_seed("cohort", draw.seed, draw.round))
    for shift, factor in _SHIFTS:
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers >>= np.uint64(11)
    if draw.costs:
        keys = -np.log1p(-numbers.astype(float) / 2**53) * np.where(cost_array[rows] >= 0, cost_array[rows], median)
    else:  # a limit slightly above the expected quantile avoids a partition of all numbers
        is_candidate = numbers < 2**53 * (2 * remaining + 20) // len(rows)
        if np.count_nonzero(is_candidate) >= remaining:
            rows, numbers = rows[is_candidate], numbers[is_candidate]
        keys = numbers.astype(float)
    candidates = rows[keys <= np.partition(keys, remaining - 1)[remaining - 1] * (1 + _KEY_TOLERANCE)]
    drawn_devices = sorted(device_names(candidates.tolist()), key=_create_key(draw, median))
    return tuple(sorted([*device_names(overdue_rows.tolist()), *drawn_devices[:remaining]]))


def rank_devices(draw: CohortDraw, eligible: Collection[str], count: int) -> list[str]:
    """Return the eligible devices in the order of selection into a cohort of `count` devices."""
    wait_limit = draw.turns * len(eligible) / count if count > 0 else math.inf
    waits = {device: draw.round - draw.last_selected_rounds.get(device, 0) for device in eligible}
    median = statistics.median([draw.costs[device] for device in eligible if device in draw.costs] or [1.0])
    key = _create_key(draw, median)
    return sorted(eligible, key=lambda device: (-waits[device] if waits[device] >= wait_limit else 0, *key(device)))


def _create_key(draw: CohortDraw, median: float) -> Callable[[str], tuple[float, str]]:
    salt = derive_seed("cohort", draw.seed, draw.round)

    def key(device: str) -> tuple[float, str]:
        number = hash_name(device) ^ salt
        for shift, factor in _SHIFTS:
            number = (number ^ (number >> shift)) * factor % 2**64
        if not draw.costs:  # the numbers have the order of exponential keys of equal costs
            return number >> 11, device
        return -math.log1p(-(number >> 11) / 2**53) * draw.costs.get(device, median), device

    return key


def joules_per_flop(profile: Profile | None) -> float | None:
    """Return the energy of one FLOP at the device's most efficient point, or None if unknown."""
    costs = [p.busy_w / p.flops_per_s for p in (profile.points if profile else ()) if p.busy_w and p.flops_per_s]
    return min((cost for cost in costs if 1e-100 < cost < 1e100), default=None)


def energy_costs(profiles: Mapping[str, Profile | None]) -> dict[str, float]:
    """Return `joules_per_flop` by device where known, rounded to three digits for the event log."""
    costs = {device: joules_per_flop(profile) for device, profile in profiles.items()}
    return {device: float(f"{cost:.3g}") for device, cost in costs.items() if cost is not None}
