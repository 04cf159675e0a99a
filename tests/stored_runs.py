"""Runs in a store, written as their coordinator writes them, and what their facts come to."""

from __future__ import annotations

import random

from job_facts import BLOB
from stored_job import JOB

from fedquilt.coordinator.deadline import Short
from fedquilt.coordinator.facts import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Extended,
    Lost,
    Noted,
    Rejected,
    Reopened,
    Restarted,
    Resumed,
    Rounds,
    Started,
    Surveyed,
    apply_event,
)
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.snapshots import Standing
from fedquilt.coordinator.store import Store
from fedquilt.core import BlobRef, Update, Usage

NOW_S = 7.0
DEVICES = tuple("abcdef")


class Run:
    """A run in a store, written as its coordinator writes it."""

    def __init__(self, store: Store) -> None:
        self.store, self.id = store, store.add_job(JOB, store.home / "bundle")
        self.plan = Plan.from_job(JOB)
        self.standing = Standing(Rounds(self.plan))

    def record(self, *facts: AnyFact) -> None:
        for fact in facts:
            after = apply_event(self.standing.rounds, fact, NOW_S)
            self.store.append_event(self.id, fact)
            self.standing.apply_event(fact, after)
            if isinstance(fact, Committed | Ended):
                self.store.snapshots.save_if_due(self.id, self.standing)

    def round(self, number: int, *devices: str) -> None:
        answers = [Answered(number, of(self.id, device, number)) for device in devices]
        self.record(Asked(number, 0, devices), *answers, Closed(number), Committed(number, state(number), False, {}))


def of(run: str, device: str, round: int) -> Update:
    """An update with a blob of its own."""
    blob = BlobRef(sha256=f"{round:02x}{ord(device):02x}" * 16, size=1)
    usage = Usage(wall_s=1.5, examples=40 + round, energy_j=0.25 if device < "c" else None, up_bytes=9)
    return Update(run, round, 0, device, 1.0, {"model": blob}, {"loss": 0.5}, usage)


def state(round: int) -> BlobRef:
    return BlobRef(sha256=f"{round:04x}" * 16, size=5)


def taken_up(store: Store, run: str, plan: Plan, now_s: float = NOW_S) -> tuple[Standing, int]:
    """As a coordinator takes a run up: its snapshot, and the facts behind it; and where the snapshot ended."""
    standing, upto = store.snapshots.load_state(run, plan, now_s)
    for _, _, fact in store.read_events(run, upto):
        standing.apply_event(fact, apply_event(standing.rounds, fact, now_s))
    return standing, upto


def whole(store: Store, run: str, plan: Plan, now_s: float = NOW_S) -> Standing:
    """What all facts of a run come to."""
    standing = Standing(Rounds(plan))
    for _, _, fact in store.read_events(run):
        standing.apply_event(fact, apply_event(standing.rounds, fact, now_s))
    return standing


def blob_of(run: str, device: str, round: int) -> set[str]:
    return {ref.sha256 for ref in of(run, device, round).bundles.values()}


def any_fact(roll: random.Random, run: str, now: Rounds) -> AnyFact:
    """A fact that may come next, of any kind that there is."""
    one = roll.choice(DEVICES)
    asked = sorted(now.asked)
    if now.phase == "new":
        return roll.choice([Started(BLOB, settles=roll.random() < 0.3), Noted("by [trigger]")])
    if now.phase in ("stopped", "failed"):
        return Resumed()
    if now.phase == "closing":
        if now.answered and roll.random() < 0.2:
            return Lost(now.round, min(now.answered), "it is gone")
        return Committed(now.round, state(now.round), False, {}, (), 2.5, settled=now.settling)
    if roll.random() < 0.05:
        return Ended(roll.choice(["stopped", "failed"]), "by request")
    if now.phase == "selecting":
        some = tuple(sorted(roll.sample(DEVICES, 3)))
        survey = Surveyed(now.round, some, {"hot": tuple(sorted(set(DEVICES) - set(some)))}, {one: roll.random()})
        epochs = {some[0]: 2} if roll.random() < 0.3 else {}
        return roll.choice([survey, Asked(now.round, now.attempt, some, dict.fromkeys(some, 2.0), 9.0, epochs=epochs)])
    if not asked:
        return roll.choice([Closed(now.round), Reopened(now.round, now.attempt + 1), Asked(now.round, 0, (one,))])
    code = roll.choice(["memory", "data", "none", "failed"])
    return roll.choice(
        [
            Answered(now.round, of(run, asked[0], now.round), 3.5, roll.choice([None, 1.25])),
            Answered(now.round, of(run, asked[-1], now.round), 0.1),
            Declined(now.round, asked[0], code, "x", Short(5, 1.5, None) if code == "memory" else None, "boot 1"),
            Rejected(now.round, asked[0], "not finite"),
            Extended(now.round),
            Restarted(now.round, 4.5),
            Reopened(now.round, now.attempt + 1),
        ]
    )
