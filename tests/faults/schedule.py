"""Schedules: settings and faults of a simulated federation, derived from a seed.

A schedule has a short text, from which the same one is read again:

    seed=17 method=ditto devices=3 rounds=3 crash:dev-1,42,1,5.0 cut:coordinator,1.5,8.0,0
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

COORDINATOR: Final = "coordinator"
ROUND_S: Final = 1.5  # about how long a calm round takes
AGENT_CALLS: Final = 60  # about how many calls an agent makes in a calm round: to its disk, and to publish
COORDINATOR_CALLS: Final = 45  # likewise a coordinator, for each device
PUBLISHED: Final = 0.13  # about the share of these calls that publish a message
SYNCED: Final = 0.2  # about the share of these calls that sync a file or folder
WRITTEN: Final = 0.08  # about the share of these calls that write a file


class Fault(msgspec.Struct, frozen=True, tag=True): ...


class ParticipantFault(Fault, frozen=True):
    who: str


class ProcessCrash(ParticipantFault, frozen=True, tag="crash"):
    """End of a process at one of its calls, and of its computer with `power`.

    Only calls of the kind `at` are counted, or all calls if it is "".
    """

    call: int
    power: bool
    down_s: float
    at: Literal["", "publish", "published", "sync", "write"] = ""


class ProcessKill(ParticipantFault, frozen=True, tag="kill"):
    at_s: float
    power: bool
    down_s: float


class DiskFault(ParticipantFault, frozen=True, tag="refuse"):
    call: int
    calls: int
    how: Literal["full", "readonly", "io"]


class NetworkNoise(Fault, frozen=True, tag="noise"):
    start_s: float
    length_s: float
    drop: float
    duplicate: float
    corrupt: float
    delay_s: float


class ConnectionLoss(ParticipantFault, frozen=True, tag="cut"):
    start_s: float
    length_s: float
    keep: bool


class BrokerRestart(Fault, frozen=True, tag="broker"):
    start_s: float
    length_s: float
    sessions: bool
    retained: bool


class ClockJump(ParticipantFault, frozen=True, tag="jump"):
    at_s: float
    sleep_s: float
    wall_s: float


class SlowTask(ParticipantFault, frozen=True, tag="slow"):
    factor: float


class WorkerFault(ParticipantFault, frozen=True, tag="worker"):
    start: int
    how: Literal["killed", "failed", "memory"]


class JobStop(Fault, frozen=True, tag="stop"):
    at_s: float
    length_s: float


class NewerParticipant(ParticipantFault, frozen=True, tag="newer"):
    """Participant of a newer version with an unknown field in all messages."""


class DeviceLoss(ParticipantFault, frozen=True, tag="death"):
    ack: int  # number of the acknowledgement, from 1


class NewerCoordinator(Fault, frozen=True, tag="ahead"):
    start_s: float
    length_s: float


class SecondCoordinator(Fault, frozen=True, tag="second"):
    at_s: float


class BitRot(ParticipantFault, frozen=True, tag="rot"):
    at_s: float
    place: float


class HomeRestore(Fault, frozen=True, tag="restore"):
    at_s: float
    back_s: float


AnyFault: TypeAlias = (
    ProcessCrash
    | ProcessKill
    | DiskFault
    | NetworkNoise
    | ConnectionLoss
    | BrokerRestart
    | ClockJump
    | SlowTask
    | WorkerFault
    | JobStop
    | NewerParticipant
    | DeviceLoss
    | NewerCoordinator
    | SecondCoordinator
    | BitRot
    | HomeRestore
)
KINDS: Final[dict[str, type[Fault]]] = {str(kind.__struct_config__.tag): kind for kind in AnyFault.__args__}
BUFFERED: Final = ("fedavg", "fedopt", "fedprox")
"""Methods whose updates may be of earlier states."""
LATER: Final = ("rot", "restore")
"""Kinds that schedules do not draw of themselves: what they find is mended by verified reads and reconciled epochs."""


class FaultSchedule(msgspec.Struct, frozen=True):
    seed: int = 0
    method: str = "fedavg"
    codec: str = "raw"
    devices: int = 3
    rounds: int = 3
    size: int = 0  # of the cohort; 0: all devices, so that every round has all of them
    quorum: float = 1.0
    over_select: float = 0.0
    concurrency: int = 0  # devices at work in buffered mode; 0: rounds are synchronous
    deadline_s: float = 20_000.0
    check: int = 0  # rounds between evaluations
    jobs: int = 1
    also: str = ""  # method of the jobs after the first; "": the same
    twice_s: float = -1.0  # seconds after which the first job is submitted again as the second; below 0: it is not
    payload: int = 1 << 20  # bytes of the largest message
    beside_s: float = -1.0  # until the coordinator's worker has done something; below 0: nothing is large enough for it
    faults: tuple[AnyFault, ...] = ()

    @property
    def requires_all_devices(self) -> bool:
        return self.size == 0

    def for_job(self, number: int) -> FaultSchedule:
        if not number or not self.also:
            return self
        return msgspec.structs.replace(self, method=self.also, codec="raw", also="")

    def job_name(self, number: int) -> str:
        return "sim0" if self.twice_s >= 0 else f"sim{number}"

    def to_text(self) -> str:
        plain = FaultSchedule()
        words = [
            f"{name}={getattr(self, name)}"
            for name in self.__struct_fields__
            if name != "faults" and getattr(self, name) != getattr(plain, name)
        ]
        return " ".join([*words, *(_format_fault(fault) for fault in self.faults)])


def _format_fault(fault: AnyFault) -> str:
    """Return a fault as a word of a schedule's text, such as "kill:dev-0,3.0,1,8.0"."""
    values = [getattr(fault, name) for name in fault.__struct_fields__]
    told = (str(int(value)) if isinstance(value, bool) else f"{value}" for value in values if value != "")
    return f"{fault.__struct_config__.tag}:{','.join(told)}"


def parse_schedule(text: str) -> FaultSchedule:
    """Return the schedule of a text.

    Raises:
        ValueError: If the text has an unknown word or value.
    """
    given: dict[str, Any] = {}
    faults: list[Any] = []
    try:
        for word in text.split():
            if ":" not in word:
                name, _, value = word.partition("=")
                given[name] = value
                continue
            name, _, rest = word.partition(":")
            kind = KINDS[name]
            values = rest.split(",")
            optional = len(kind.__struct_defaults__)
            if not len(kind.__struct_fields__) - optional <= len(values) <= len(kind.__struct_fields__):
                raise ValueError(f"{word} has {len(values)} values")
            found = dict(zip(kind.__struct_fields__, values, strict=False))
            faults.append(msgspec.convert({"type": name, **found}, AnyFault, strict=False))
        if unknown := given.keys() - set(FaultSchedule.__struct_fields__):
            raise ValueError(f"no setting {', '.join(sorted(unknown))}")
        made = msgspec.convert(given, FaultSchedule, strict=False)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{text!r} is no schedule: {error}") from None
    return msgspec.structs.replace(made, faults=tuple(faults))


def draw_schedule(
    seed: int, methods: Sequence[str], kinds: Sequence[str] = (), only: Sequence[str] = (), **settings: Any
) -> FaultSchedule:
    """Return the schedule that follows from a seed.

    Args:
        seed: Seed of everything.
        methods: Methods to draw from.
        kinds: Kinds of faults of LATER to draw as well.
        only: Kinds of faults to draw, or all if it is empty.
        settings: Settings that are fixed before faults are drawn, by their names in `FaultSchedule`.
    """
    roll = random.Random(f"schedule {seed}")
    method, codec = roll.choice(methods), "raw"
    if "fedavg" in methods and roll.random() < 0.15:  # a codec that leaves something for the next time
        method, codec = "fedavg", roll.choice(["int8", "topk"])
    devices, rounds = roll.choice([2, 2, 3]), roll.choice([2, 3, 4, 5])
    base = FaultSchedule(
        seed=seed,
        method=method,
        codec=codec,
        devices=devices,
        rounds=rounds,
        payload=roll.choice([1 << 20, 1 << 20, 2048]),
        check=roll.choice([0, 0, 0, 2]),
        jobs=roll.choice([1] * 9 + [2]),
    )
    if roll.random() < 0.4:  # rounds that not every device is in
        base = msgspec.structs.replace(
            base,
            devices=3,
            size=2,
            quorum=roll.choice([0.5, 1.0]),
            over_select=roll.choice([0.0, 0.5]),
            deadline_s=roll.choice([4.0, 15.0, 60.0]),
        )
    buffered = random.Random(f"buffered {seed}")
    if method in BUFFERED and buffered.random() < 0.3:
        size, concurrency = buffered.choice([1, 2]), buffered.choice([2, 3])
        deadline_s = buffered.choice([4.0, 15.0, 60.0])
        base = msgspec.structs.replace(
            base, devices=3, size=size, concurrency=concurrency, over_select=0.0, deadline_s=deadline_s, check=0
        )
    base = msgspec.structs.replace(base, **settings)
    likely = only or ("crash", "crash", "kill", "refuse", "noise", "noise", *_OFTEN, *kinds)
    every = [_DRAW[kind] for kind in likely if not (base.requires_all_devices and kind in ("newer", "death"))]
    count = roll.choice([1, 1, 2, 2, 3, 4])
    faults = tuple(roll.choice(every)(roll, base) for _ in range(count))
    if (base.jobs > 1 or roll.random() < 0.2) and "jobs" not in settings:
        also, twice_s = (
            roll.choice(BUFFERED if base.concurrency else methods),
            roll.choice([0.0, 0.0, _draw_time_s(roll, base)]),
        )
        way = roll.choice(["same method", "other method", "twice"])
        base = msgspec.structs.replace(
            base, jobs=2, also=also if way == "other method" else "", twice_s=twice_s if way == "twice" else -1.0
        )
    beside_s = settings.get("beside_s", roll.choice([-1.0, -1.0, 0.0, 0.2, 3.0]))
    if roll.random() < 0.1 and not only:
        faults = (*faults, NewerCoordinator(_draw_time_s(roll, base), roll.choice([1.0, 10.0, 60.0])))
    return msgspec.structs.replace(base, faults=faults, beside_s=beside_s)


def _draw_participant(roll: random.Random, base: FaultSchedule) -> str:
    return roll.choice([COORDINATOR, *(f"dev-{index}" for index in range(base.devices))])


def _draw_call(roll: random.Random, base: FaultSchedule, who: str) -> int:
    each = COORDINATOR_CALLS * base.devices if who == COORDINATOR else AGENT_CALLS
    return roll.randrange(1, each * base.rounds)


def _draw_time_s(roll: random.Random, base: FaultSchedule) -> float:
    return round(roll.uniform(0.0, ROUND_S * base.rounds * base.jobs), 2)


def _draw_crash(roll: random.Random, base: FaultSchedule) -> AnyFault:
    who = roll.choice([COORDINATOR, _draw_participant(roll, base)])
    at: Literal["", "publish", "published", "sync", "write"] = roll.choice(["", "publish", "sync", "write"])
    share = {"": 1.0, "publish": PUBLISHED, "sync": SYNCED, "write": WRITTEN}[at]
    call = max(1, int(_draw_call(roll, base, who) * share))
    if at == "publish" and call % 2:
        at = "published"
    return ProcessCrash(who, call, roll.random() < 0.6, roll.choice([0.5, 8.0, 40.0]), at)


def _draw_kill(roll: random.Random, base: FaultSchedule) -> AnyFault:
    who = roll.choice([COORDINATOR, _draw_participant(roll, base)])
    return ProcessKill(who, _draw_time_s(roll, base), roll.random() < 0.5, roll.choice([0.5, 8.0, 40.0]))


def _draw_disk_fault(roll: random.Random, base: FaultSchedule) -> AnyFault:
    who = _draw_participant(roll, base)
    return DiskFault(
        who, _draw_call(roll, base, who), roll.choice([1, 1, 5, 30]), roll.choice(["full", "readonly", "io"])
    )


def _draw_network_noise(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return NetworkNoise(
        _draw_time_s(roll, base) * roll.choice([0, 1]),
        roll.choice([1.0, 5.0, 20.0]),
        drop=roll.choice([0.0, 0.1, 0.4]),
        duplicate=roll.choice([0.0, 0.2]),
        corrupt=roll.choice([0.0, 0.05, 0.2]),
        delay_s=roll.choice([0.0, 0.3, 3.0]),
    )


def _draw_cut(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return ConnectionLoss(
        _draw_participant(roll, base), _draw_time_s(roll, base), roll.choice([0.3, 3.0, 30.0]), roll.random() < 0.5
    )


def _draw_broker(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return BrokerRestart(
        _draw_time_s(roll, base), roll.choice([0.1, 4.0, 30.0]), roll.random() < 0.5, roll.random() < 0.5
    )


def _draw_jump(roll: random.Random, base: FaultSchedule) -> AnyFault:
    sleep_s = roll.choice([0.0, 5.0, 100.0, 10_000.0])
    return ClockJump(_draw_participant(roll, base), _draw_time_s(roll, base), sleep_s, roll.choice([0.0, -1e6, 1e6]))


def _draw_slow(roll: random.Random, base: FaultSchedule) -> AnyFault:
    # If not all devices are required, the last one is slower than a round permits.
    index = roll.randrange(base.devices) if base.requires_all_devices else base.devices - 1
    return SlowTask(f"dev-{index}", roll.choice([3.0, 10.0, 30.0]))


def _draw_worker(roll: random.Random, base: FaultSchedule) -> AnyFault:
    who, start = f"dev-{roll.randrange(base.devices)}", roll.randrange(1, base.rounds + 1)
    how: Literal["killed", "failed", "memory"] = roll.choice(["killed", "killed", "failed", "memory"])
    return WorkerFault(who, start, how)


def _draw_stop(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return JobStop(_draw_time_s(roll, base), roll.choice([1.0, 20.0]))


def _draw_newer(roll: random.Random, base: FaultSchedule) -> AnyFault:
    # Messages of a newer participant are refused, so the other devices must suffice.
    return NewerParticipant(f"dev-{base.devices - 1}")


def _draw_death(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return DeviceLoss(f"dev-{base.devices - 1}", roll.choice([1, 1, 2, 3]))


def _draw_second(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return SecondCoordinator(_draw_time_s(roll, base))


def _draw_rot(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return BitRot(_draw_participant(roll, base), _draw_time_s(roll, base), round(roll.random(), 4))


def _draw_restore(roll: random.Random, base: FaultSchedule) -> AnyFault:
    return HomeRestore(_draw_time_s(roll, base), roll.choice([1.0, 2.0, 4.0]))


_OFTEN: Final = ("cut", "broker", "jump", "slow", "worker", "stop", "second", "newer", "death")
_DRAW: Final[dict[str, Callable[[random.Random, FaultSchedule], AnyFault]]] = {
    "crash": _draw_crash,
    "kill": _draw_kill,
    "refuse": _draw_disk_fault,
    "noise": _draw_network_noise,
    "cut": _draw_cut,
    "broker": _draw_broker,
    "jump": _draw_jump,
    "slow": _draw_slow,
    "worker": _draw_worker,
    "stop": _draw_stop,
    "newer": _draw_newer,
    "death": _draw_death,
    "second": _draw_second,
    "rot": _draw_rot,
    "restore": _draw_restore,
}
