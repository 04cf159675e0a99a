"""Eligibility of devices, and random selection of a round's cohort. Pure.

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
from fedquilt.coordinator.device_columns import (
    CostColumn,
    DeviceSet,
    RoundColumn,
    device_names,
    hash_name,
    name_hashes,
)
from fedquilt.coordinator.rounds.deadline import MemoryShortage
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import Profile, derive_seed
from fedquilt.formats import labels
from fedquilt.wire import Telemetry

BUSY: Final = "busy"  # not a matter of the device and the job alone, nor is the next: `JobController` knows them
SHARE: Final = "share"
REASONS: Final[Mapping[str, str]] = {
    "offline": "offline",
    "silent": "silent: its broker reports it online, and it does not answer",
    "flooding": "sent more than can be answered, and is set aside for a while",
    "profile": "has not said what it is",
    "labels": "has not the labels that [cohort] select asks for",
    "engine": "has no engine that the job's method runs on, or one that refused the task",
    "codec": "does not know the codec of the job's [wire]: its fedquilt is older than the job wants",
    "plugin": "lacks a package that the job needs, or has another content of it",
    "battery": "its battery is below [cohort] min_battery, and not charging",
    "hot": "hotter than [cohort] max_temperature_c",
    "full": "its disk is full: free some space there",
    "memory": "declined such work for want of memory: it is asked again after some rounds, or for less",
    "data": "declined for its data: it is asked again once its agent has started anew, or the run is resumed",
    "budget": "declined such work for its memory budget: it is asked again after some rounds, or for less",
    **dict.fromkeys(
        ("diverged", "exception", "model", "update"),
        "failed at this round's task, and would fail again: it is asked again in the next round",
    ),
    "method": "declined for the job's method: it is asked again once its agent has started anew, or the run is resumed",
    BUSY: "was at work on another job's task, or left to another job that had had less of the boards' time",
    SHARE: "was left free: its submitter's jobs had as many boards as [submitter] share of limits.toml allows",
}
ABLE: Final = frozenset(REASONS) - {"offline", "profile", "labels", "engine", "codec", "plugin"}
"""Reasons of devices that are there, and are spared."""


class DeviceSnapshot(NamedTuple):
    online: bool
    profile: Profile | None = None
    telemetry: Telemetry | None = None  # None without a recent report
    flooding: bool = False  # it sent more than can be answered; nothing from it is read now
    silent: bool = False  # its broker reports it online, and it does not answer


class JobRequirements(NamedTuple):
    engines: tuple[str, ...]
    cohort: CohortSettings
    codec: str = "raw"
    plugins: tuple[tuple[str, str], ...] = ()  # of other packages: `fedquilt.plugins.required_modules`, as pairs


def ineligibility_code(seen: DeviceSnapshot, wants: JobRequirements) -> str | None:
    """Return the code of the first reason why a device cannot be selected, or None.

    Other jobs are not considered. Without telemetry, battery, temperature and disk are not checked.
    """
    profile, told, cohort = seen.profile, seen.telemetry, wants.cohort
    if not seen.online:
        return "silent" if seen.silent else "offline"
    if seen.flooding:
        return "flooding"
    if profile is None:
        return "profile"
    if not any(engine in profile.engines for engine in wants.engines):
        return "engine"
    if not labels.is_selected(cohort.select, profile.labels):
        return "labels"
    if wants.codec not in profile.codecs:
        return "codec"
    if (code := _plugin_code(profile, wants)) is not None or told is None:
        return code
    if told.battery is not None and not told.charging and told.battery < cohort.min_battery:
        return "battery"
    limit_c = cohort.max_temperature_c
    if limit_c is not None and told.temperature_c is not None and told.temperature_c > limit_c:
        return "hot"
    return "full" if told.disk_full else None


def reason_key(code: str) -> str:
    return code.partition(" ")[0]


def reason_text(code: str) -> str:
    key, _, rest = code.partition(" ")
    if key != "plugin" or not rest:
        return REASONS.get(code, code)
    package, wanted, found = rest.split("|")
    if not found:
        return (
            f"has no package {package}, of which the job needs {wanted}: install it there, and allow it in agent.toml"
        )
    return f"has package {package} {found}, and the job needs {wanted}: install the same content there"


def _plugin_code(profile: Profile, wants: JobRequirements) -> str | None:
    """Return "plugin PACKAGE|REQUIRED|FOUND" for a missing or different package, or None."""
    for module, proof in wants.plugins:
        found = profile.versions.get(f"plugin {module}", "")
        if found != proof:
            texts = plugins.format_fingerprint(proof), plugins.format_fingerprint(found)
            return f"plugin {proof.split(' ')[0]}|{texts[0]}|{texts[1]}"
    return None


Lasts: TypeAlias = Literal["attempt", "round", "rounds", "start"]
"""How long a device is not selected. "attempt": until the next attempt. "round": until the next round.
"rounds": for `AGAIN_ROUNDS` rounds, for as much work. "start": until the device's agent starts anew or announces
another profile."""
NOTHING: Final = "none"  # code of a device that the method has no task for
UPDATE: Final = "update"  # code of an update that was rejected for its content
FULL: Final = "full"  # code of a device whose disk is full
AGAIN_ROUNDS: Final = 10  # rounds until a device that declined for lack of memory is asked again for such work


class DeclineReason(NamedTuple):
    lasts: Lasts  # how long the device is not selected
    recurs: bool  # whether the same task would fail again, so that no attempt is spent on it
    cause: str  # as part of "CAUSE in round 3 on 2 of 5 devices"
    fix: str


_RESUME: Final = "then `fedquilt resume` the run"
_UPGRADE: Final = "install the coordinator's fedquilt and packages on these devices"
REFUSALS: Final[Mapping[str, DeclineReason]] = {
    "data": DeclineReason(
        "start", True, "the data cannot be used", f"correct the data or [data], restart these agents, {_RESUME}"
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
    FULL: DeclineReason("round", True, "the disk is full", f"free disk space on these devices, {_RESUME}"),
    UPDATE: DeclineReason(
        "round", True, "the update was rejected", f"remove these devices, or correct what they send, {_RESUME}"
    ),
    "disk": DeclineReason("attempt", False, "the disk failed", f"check the disks, {_RESUME}"),
    "failed": DeclineReason("attempt", False, "the work failed", f"see to these devices, {_RESUME}"),
    "flooding": DeclineReason("attempt", False, "the device sent too much", f"remove it, {_RESUME}"),
    "removed": DeclineReason("attempt", False, "the device was removed from the fleet", "none is needed"),
    NOTHING: DeclineReason("attempt", False, "the method has no task", "none is needed"),
}
"""Code -> what is known of refusals with it."""
UNKNOWN: Final = REFUSALS["failed"]  # of a code that only later versions have


class LastingDecline(msgspec.Struct, frozen=True):
    round: int
    code: str
    reason: str
    actions: frozenset[str]
    start: str = ""  # as of `DeviceRegistry.agent_start_key`; "": not known
    short: MemoryShortage | None = None

    def would_recur(self, round: int, actions: Collection[str], start: str, short: MemoryShortage) -> bool:
        """Return whether the device would decline the present task again."""
        kind = REFUSALS[self.code]
        if (start != self.start and self.code != UPDATE) or not self.actions.issubset(actions):
            return False
        if round == self.round or kind.lasts == "start":
            return kind.recurs
        within = kind.lasts == "rounds" and round < self.round + AGAIN_ROUNDS
        return within and self.short is not None and self.short.is_at_least(short)


_SHIFTS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # of SplitMix64, with its factors
_ROUNDING: Final = 1e-9  # relative difference of a vectorised key from the exact one, at most


def select_cohort(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    *,
    costs: Mapping[str, float] = {},
    since: Mapping[str, int] = {},
    turns: float = math.inf,
) -> tuple[str, ...]:
    """Select up to `count` of the eligible devices, sorted by id.

    Arguments are as for `rank_devices`, whose first devices are selected. Vectorised operations exclude most others.
    """
    import numpy as np

    pool = DeviceSet.from_devices(eligible)
    if not 0 < count < len(pool):
        return tuple(sorted(pool)) if count > 0 else ()
    rows, late = np.flatnonzero(pool.mask), turns * len(pool) / count
    first, median = rows[:0], 1.0
    if costs:
        known = CostColumn.from_values(costs).to_array(len(pool.mask))
        median = float(np.median(paid)) if len(paid := known[rows][known[rows] >= 0]) else 1.0
    if late <= round:  # else nobody can have waited for so long
        waits = round - np.maximum(RoundColumn.from_values(since).to_array(len(pool.mask))[rows], 0)
        waits = np.where(waits >= late, waits, 0)
        least = np.partition(waits, -count)[-count]
        first, rows = rows[waits > least], rows[waits == least]
    numbers, left = name_hashes(rows), count - len(first)
    numbers ^= np.uint64(derive_seed("cohort", seed, round))
    for shift, factor in _SHIFTS:
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers >>= np.uint64(11)
    if costs:
        keys = -np.log1p(-numbers.astype(float) / 2**53) * np.where(known[rows] >= 0, known[rows], median)
    else:  # a limit that some more numbers are below than needed saves a partition of them all
        near = numbers < 2**53 * (2 * left + 20) // len(rows)
        if np.count_nonzero(near) >= left:
            rows, numbers = rows[near], numbers[near]
        keys = numbers.astype(float)
    best = rows[keys <= np.partition(keys, left - 1)[left - 1] * (1 + _ROUNDING)]
    drawn = sorted(device_names(best.tolist()), key=_create_key(seed, round, costs, median))
    return tuple(sorted([*device_names(first.tolist()), *drawn[:left]]))


def rank_devices(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    *,
    costs: Mapping[str, float] = {},
    since: Mapping[str, int] = {},
    turns: float = math.inf,
) -> list[str]:
    """Return the eligible devices in the order of selection.

    Args:
        seed: Seed of the job.
        round: Number of the round.
        eligible: Devices to rank.
        count: Size of the cohort.
        costs: Joules per operation of each device, or empty to ignore energy. Missing values count as the median.
        since: Round in which a device was last selected, or first eligible. Missing values count as 0.
        turns: Limit on a wait, in turns. Devices that were not selected for so long precede all others.
    """
    late = turns * len(eligible) / count if count > 0 else math.inf
    waited = {device: round - since.get(device, 0) for device in eligible}
    median = statistics.median([costs[device] for device in eligible if device in costs] or [1.0])
    key = _create_key(seed, round, costs, median)
    return sorted(eligible, key=lambda device: (-waited[device] if waited[device] >= late else 0, *key(device)))


def _create_key(seed: int, round: int, costs: Mapping[str, float], median: float) -> Callable[[str], tuple[float, str]]:
    salt = derive_seed("cohort", seed, round)

    def key(device: str) -> tuple[float, str]:
        number = hash_name(device) ^ salt
        for shift, factor in _SHIFTS:
            number = (number ^ (number >> shift)) * factor % 2**64
        if not costs:  # the numbers have the order of exponential keys of equal costs
            return number >> 11, device
        return -math.log1p(-(number >> 11) / 2**53) * costs.get(device, median), device

    return key


def joules_per_flop(profile: Profile | None) -> float | None:
    """Return the energy of one FLOP at the device's most efficient point, or None if unknown."""
    known = [p.busy_w / p.flops_per_s for p in (profile.points if profile else ()) if p.busy_w and p.flops_per_s]
    return min((cost for cost in known if 1e-100 < cost < 1e100), default=None)


def energy_costs(profiles: Mapping[str, Profile | None]) -> dict[str, float]:
    """Return `joules_per_flop` by device where known, rounded to three digits for the event log."""
    known = {device: joules_per_flop(profile) for device, profile in profiles.items()}
    return {device: float(f"{cost:.3g}") for device, cost in known.items() if cost is not None}
