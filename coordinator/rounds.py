"""Which fact of a job comes next, decided purely: no I/O, no clock, no randomness of its own.

What has happened is a sequence of `facts`, and the state that they add up to. `decide` says which fact should come
next, given the time and who is online. The server writes it to the event log before it acts on it, and after a crash
issues again what is open.

Before devices are asked, whom there was to choose from is noted (Surveyed), as what has changed since it was
noted last: so the choice rests on nothing but the log, and why somebody was not chosen can be told from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from fedquilt.coordinator import deadline, stop
from fedquilt.coordinator.cohort import sample
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import AnyFact, Asked, Closed, Ended, Extended, Reopened, Rounds, Short, Surveyed

DECLINED_S = 10.0  # for others to come, when everybody who is there has declined
AGAIN_ROUNDS = 10  # after which a device that declined for want of memory is asked for such work again


def decide(
    state: Rounds,
    now_s: float,
    online: Collection[str],
    ask: Callable[[str], Ask] = lambda device: Ask(),
) -> AnyFact | None:
    """The fact that should come next; None: nothing until something happens or `next_s`.

    `online` are the devices that could take a task of this round, or are at one; `ask` what it asks of one of them.
    """
    if state.phase == "selecting":
        return _select(state, online, ask)
    if state.phase == "open":
        return _attend(state, now_s, online, ask)
    return None


def survey(
    state: Rounds, eligible: Collection[str], passed: Mapping[str, str], costs: Mapping[str, float]
) -> Surveyed | None:
    """The fact to note before devices are asked; None: the log says all of it.

    Of a device that the log knows and nobody else does, a restarted coordinator has heard nothing.
    """
    if not passed and not state.passed and state.eligible == eligible and not costs:
        return None
    lost = dict.fromkeys((state.eligible | state.passed.keys()) - set(eligible) - passed.keys(), "offline")
    changed: dict[str, list[str]] = {}
    for device, code in sorted({**passed, **lost}.items()):
        if state.passed.get(device) != code:
            changed.setdefault(code, []).append(device)
    fact = Surveyed(
        state.round,
        tuple(sorted(set(eligible) - state.eligible)),
        {code: tuple(devices) for code, devices in sorted(changed.items())},
        {device: cost for device, cost in sorted(costs.items()) if state.costs.get(device) != cost},
    )
    return fact if fact.eligible or fact.passed or fact.costs else None


def left_alone(state: Rounds, devices: Collection[str], ask: Callable[[str], Ask]) -> dict[str, str]:
    """Device -> "memory", of those that would decline again what they declined in an earlier round.

    Another attempt at the same round asks them again, for what a board has left may change; and so does every
    AGAIN_ROUNDS-th round, work that is smaller, and another budget. Where the others are too few to begin, they are
    asked all the same: the round would wait for ever, and no later one would ask them.
    """
    if not state.short:
        return {}
    found = {
        device: "memory"
        for device, (round, short) in state.short.items()
        if device in devices and round < state.round < round + AGAIN_ROUNDS and short.same(Short.of(ask(device)))
    }
    return {} if 0 < len(devices) - len(found) < needed(state) <= len(devices) else found


def next_s(state: Rounds) -> float:
    """When time alone will change what `decide` says."""
    return state.opened_s + _patience_s(state) if state.phase == "open" else math.inf


def idle(state: Rounds, able: Collection[str]) -> bool:
    """Whether the running round waits, and nobody is at its work; `able` are the devices that could be."""
    return state.phase in ("selecting", "open") and not state.asked & set(able)


def wanted(state: Rounds, online: Collection[str]) -> int:
    """How many contributions close the round at once.

    Without a size: of all who are there or have been asked in this attempt, and have not declined. A board that is
    at its task is waited for until the deadline, whether it looks online or not.
    """
    there = {*online, *state.answered, *state.asked} - set(state.declined)
    return _size(state) or max(len(there), least(state))


def _size(state: Rounds) -> int:
    """Contributions wanted; 0: of all devices, as always in a round that gathers what an evaluation needs."""
    return 0 if state.settling else state.plan.cohort.size


def quorum(state: Rounds, want: int) -> int:
    """How many contributions of `want` suffice at the deadline; where all are asked, no more than of another round."""
    if state.settling:
        want = min(want, state.plan.cohort.size or want)
    return max(least(state), math.ceil(want * state.plan.cohort.quorum))


def least(state: Rounds) -> int:
    """How many contributions a round cannot do without, and how many devices it cannot begin without.

    `min_devices` where the job says it (of a smaller `size`, all). Else, where all are wanted: half of those whom the
    log knows to be at the job, or the quorum where that is less; so a coordinator that has just been restarted does
    not take the first board that it hears for all there are.
    """
    cohort = state.plan.cohort
    if cohort.min_devices:
        return min(cohort.min_devices, cohort.size or cohort.min_devices)
    return 1 if cohort.size else max(1, math.ceil(min(cohort.quorum, 0.5) * len(state.roll)))


def needed(state: Rounds) -> int:
    """How many devices have to be there for the running round to begin."""
    cohort = state.plan.cohort
    return max(cohort.min_devices, cohort.start_devices if state.round == 0 else 0, least(state))


def _select(state: Rounds, online: Collection[str], ask: Callable[[str], Ask]) -> AnyFact | None:
    plan = state.plan
    if not state.settling:
        if state.over and (state.checked or not plan.check_every or plan.check_beside):
            return Ended("done", stop.caveat(plan.stop, state.spent) or "")
        if (limit := stop.reached(plan.stop, state.spent)) is not None:
            return Ended("done", limit)
    if len(online) < needed(state):
        return None
    free = set(online) - set(state.answered) - set(state.declined)
    want = wanted(state, online) - len(state.answered)
    count = math.ceil(want * (1 + plan.cohort.over_select))
    chosen = _drawn(state, free, count)
    if not chosen:
        return None
    asks = {device: ask(device) for device in chosen}
    allowed_s = deadline.allowed_s(plan.cohort, state.took, asks)
    return Asked(state.round, state.attempt, chosen, _amounts(asks), allowed_s)


def _drawn(state: Rounds, free: set[str], count: int) -> tuple[str, ...]:
    """So many of the devices that are free, fewer where there are not so many."""
    costs = {device: state.costs[device] for device in free if device in state.costs} if state.costs else {}
    known = free <= state.since.keys()
    since = state.since if known else {device: state.since.get(device, 0) for device in free}
    return sample(state.plan.seed, state.round, free, count, costs=costs, since=since, turns=state.plan.cohort.turns)


def _amounts(asks: Mapping[str, Ask]) -> dict[str, float]:
    amounts = {device: deadline.amount(ask.work) for device, ask in asks.items()}
    return {device: amount for device, amount in amounts.items() if amount > 0}


def _attend(state: Rounds, now_s: float, online: Collection[str], ask: Callable[[str], Ask]) -> AnyFact | None:
    cohort = state.plan.cohort
    have, want = len(state.answered), wanted(state, online)
    if have >= want:
        return Closed(state.round)
    enough = have >= quorum(state, want)
    if enough and state.extended:
        return Closed(state.round)
    if now_s >= next_s(state):
        if enough:
            return Closed(state.round)
        if state.deadline_s < cohort.deadline_s and not _all_declined(state):
            return Extended(state.round)
        if len({*online, *state.answered}) < least(state) or not online:
            return Reopened(state.round, state.attempt)  # a fleet that is gone for a night costs no attempt
        if state.attempt + 1 >= cohort.attempts:
            return Ended("failed", _no_quorum(state, want))
        return Reopened(state.round, state.attempt + 1)
    free = set(online) - set(state.answered) - set(state.declined) - state.asked
    missing = math.ceil((want - have) * (1 + cohort.over_select)) - len(state.asked & set(online))
    chosen = _drawn(state, free, missing) if missing > 0 else ()
    if chosen:
        return Asked(state.round, state.attempt, chosen, _amounts({device: ask(device) for device in chosen}))
    # whom the method has nothing for counts as answered once nobody else can be asked in its place
    if not state.asked and (enough or (state.idle and have + len(state.idle) >= quorum(state, want))):
        return Closed(state.round)
    return None


def _patience_s(state: Rounds) -> float:
    """How long an attempt may take; not long when all who could be asked have declined."""
    return min(state.deadline_s, DECLINED_S) if _all_declined(state) else state.deadline_s


def _all_declined(state: Rounds) -> bool:
    return bool(state.declined) and not state.asked


def _by_reason(declined: Mapping[str, str], most: int = 5) -> str:
    """The first `most` reasons, each once, behind the devices that gave it: "a, b and 6 more: too big; x: NaN"."""
    devices: dict[str, list[str]] = {}
    for device, reason in sorted(declined.items()):
        devices.setdefault(reason, []).append(device)
    more = {reason: f" and {len(names) - most} more" for reason, names in devices.items() if len(names) > most}
    told = list(devices.items())[:most]
    return "; ".join(f"{', '.join(names[:most])}{more.get(reason, '')}: {reason}" for reason, names in told)


def _no_quorum(state: Rounds, want: int) -> str:
    """What became of everybody who was asked in the round: the numbers add up, whatever the attempt."""
    asked = state.asked_s.keys() | state.answered.keys() | state.declined.keys()
    rejected = state.declined.keys() & state.roll
    declined = state.declined.keys() - rejected - state.idle
    silent = sorted(asked - state.answered.keys() - state.declined.keys())
    counts = [
        f"{len(state.answered)} answered",
        *([f"{len(declined)} declined"] if declined else []),
        *([f"{len(rejected)} sent what was rejected"] if rejected else []),
        *([f"{len(state.idle)} had nothing to do"] if state.idle else []),
        *([f"{len(silent)} stayed silent"] if silent else []),
    ]
    reasons = _by_reason(state.declined)
    enough = quorum(state, want)
    return (
        f"round {state.round} asked {len(asked)} {'device' if len(asked) == 1 else 'devices'} in {state.attempt + 1} "
        f"{'attempt' if not state.attempt else 'attempts'}: {', '.join(counts)}, "
        f"and {enough} {'update is' if enough == 1 else 'updates are'} needed"
        + (f"; refused: {reasons}" if reasons else "")
        + (f"; silent: {', '.join(silent[:5])}" if silent else "")
        + "; see to these devices and `fedquilt resume` it (a simulated fleet's: the same `fedquilt fleet` "
        "again), or run the job anew with another "
        "[cohort] size, quorum or deadline_s"
    )
