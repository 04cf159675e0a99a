"""Next fact of a job: pure decisions, no I/O, no clock, no randomness of its own.

A job's past is a sequence of `facts`, and the state that they add up to. `decide` returns the fact that should come
next, given the time and the devices online. The server writes it to the event log before it acts on it, and after a
crash issues again what is open.

Before devices are selected, the candidates are noted (Surveyed), as changes since the last note: so the selection
depends on nothing but the log, which can explain why a device was not selected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from fedquilt.coordinator import deadline, stop
from fedquilt.coordinator.cohort import sample
from fedquilt.coordinator.deadline import Ask, Short
from fedquilt.coordinator.facts import AnyFact, Asked, Closed, Ended, Extended, Reopened, Restarted, Rounds, Surveyed
from fedquilt.coordinator.refusals import FULL, REFUSALS, UPDATE, Refused

LEFT = 0.1  # share of its deadline that an attempt has at the least, once another process takes it up
UNKNOWN = 0.01  # share of it that counts at a restart where the wall clock does not show how long it took
LATE = 1.05  # times the deadline that a site's round waits at the most; its task has a ninth more (tools/site)
DECLINED_S = 10.0  # wait for other devices after all those present have declined


def decide(
    state: Rounds,
    now_s: float,
    online: Collection[str],
    ask: Callable[[str], Ask] = lambda device: Ask(),
    busy: AbstractSet[str] = frozenset(),
    most: float = math.inf,
    gone: AbstractSet[str] = frozenset(),
) -> AnyFact | None:
    """Return the next event, or None to wait for input or until `next_s`.

    Args:
        state: of the job.
        now_s: seconds of the coordinator's clock.
        online: devices that could take a task of this round, or have one.
        ask: gives the work of a device's task.
        busy: of them, those that have to be left to other jobs now: they take part, and are asked later.
        most: number of devices that may be asked now.
        gone: devices of the round that are known to be offline or silent: nobody waits for them.
    """
    if state.phase == "selecting":
        return _select(state, online, ask, busy, most)
    if state.phase == "open":
        return _decide_open_round(state, now_s, online, ask, busy, most, gone)
    return None


def on_process_clock(state: Rounds, now_s: float, by_wall: bool) -> Rounds:
    """Return a state loaded from its log, with its times on this process's clock.

    Without `by_wall` the log's times say nothing here, and the running attempt has its whole deadline.
    """
    opened_s = state.opened_s if by_wall else now_s
    return replace(state, opened_s=opened_s, began_s=now_s, asked_s=dict.fromkeys(state.asked_s, now_s))


def restart_event(state: Rounds, now_s: float) -> Restarted | None:
    """Return the event of a coordinator restart within a running time limit, or None if no limit runs.

    The time since the latest restart counts as the wall clock has it. Where that was set back, or on by more than the
    limit, or no coordinator was there for so long, a hundredth of the limit counts, so that an attempt ends whatever
    the clocks show. A tenth of the limit is left at the least, for devices that could not answer meanwhile. At the next
    restart it is a twentieth, and so on, so that an attempt ends however soon its coordinators are killed.
    """
    limit_s = state.plan.cohort.start_timeout_s if starting(state) else state.deadline_s
    if not limit_s or not (starting(state) or state.phase == "open"):
        return None
    since_s = now_s - (state.opened_s + state.passed_s)
    return Restarted(state.round, passed_at_restart(state.passed_s, since_s, limit_s, state.restarts))


def passed_at_restart(passed_s: float, since_s: float, limit_s: float, restarts: int) -> float:
    """Return how much of a limit of time has passed when a coordinator restarts.

    Args:
        passed_s: Seconds that had passed at the restart before.
        since_s: Seconds since then by the wall clock.
        limit_s: The limit.
        restarts: Number of restarts before.
    """
    passed_s += since_s if 0 < since_s < limit_s else UNKNOWN * limit_s
    return min(passed_s, (1 - LEFT * 0.5**restarts) * limit_s)


def survey(
    state: Rounds, eligible: Collection[str], passed: Mapping[str, str], costs: Mapping[str, float]
) -> Surveyed | None:
    """Fact to note before devices are selected; None: the log already holds all of it.

    A restarted coordinator has not yet heard from devices that only the log knows.
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


def devices_to_skip(
    state: Rounds,
    devices: Collection[str],
    ask: Callable[[str], Ask],
    start: Callable[[str], str] = lambda device: "",
) -> dict[str, str]:
    """Return the devices expected to decline again, with the code of the last refusal of each.

    `refusals.REFUSALS` says how long each kind of refusal holds. If the other devices are too few for the round,
    devices that declined in an earlier round are asked once in this one: the round would wait for ever otherwise, and
    can end with their reasons. Only before a round, while no other device is there at all, the round waits for one.

    Args:
        state: of the job.
        devices: those that could be asked.
        ask: gives the work of a device's task.
        start: gives the start of a device's agent, as of `Registry.agent_start_key`.
    """
    if not state.refused:
        return {}
    found = {
        device: refused.code
        for device, refused in state.refused.items()
        if device in devices and refused.would_recur(state.round, state.actions, start(device), Short.of(ask(device)))
    }
    others = len(devices) - len(found)
    waits = not others and state.phase == "selecting"
    if waits or not others < needed(state) <= len(devices):
        return found
    return {device: code for device, code in found.items() if state.refused[device].round == state.round}


def next_s(state: Rounds) -> float:
    """Time at which `decide` may change its answer without an event."""
    return state.opened_s + _attempt_limit_s(state) if state.phase == "open" else math.inf


def later(state: Rounds, lost_s: float) -> Rounds:
    """The state with an attempt that begins, and so ends, later by `lost_s`; infinite: it does not end."""
    return replace(state, opened_s=state.opened_s + lost_s) if lost_s else state


def latest_s(state: Rounds) -> float:
    """Time after which a round waits for nobody, in time or not: a site's, which has to answer in time itself."""
    return state.opened_s + LATE * state.deadline_s if state.ordered else math.inf


def waits_for_updates(state: Rounds, now_s: float, gone: AbstractSet[str] = frozenset()) -> bool:
    """Return whether further updates leave `decide` nothing to do, so that the call can be saved.

    A device that answers was asked and wanted: whom to ask besides stays the same, until all have answered or as many
    as are wanted.
    """
    return (
        state.phase == "open"
        and not state.asked <= gone
        and not (state.extended or full(state))
        and not any(device in state.asked for device in state.refused)  # an answer takes a refusal back
        and now_s < next_s(state)
    )


def full(state: Rounds) -> bool:
    """Whether as many have answered as are wanted, where the job says how many: the round closes, whatever the time."""
    size = _size(state)
    return bool(size) and len(state.answered) >= size


def idle(state: Rounds, able: Collection[str], busy: AbstractSet[str] = frozenset()) -> bool:
    """Whether the running round waits while no device works on it.

    Args:
        state: of the job.
        able: devices that could work on it.
        busy: devices that other jobs have, also of those that this one has asked.
    """
    return state.phase in ("selecting", "open") and not any(
        device in able and device not in busy for device in state.asked
    )


def updates_to_close(state: Rounds, online: Collection[str], gone: AbstractSet[str] = frozenset()) -> int:
    """Return the number of updates that closes the round at once.

    Without a size: of all devices that are present, asked in this attempt or due to be, except those that have declined
    or are gone. A device at work, or left to another job, is waited for until the deadline while it can be reached.
    """
    if size := _size(state):
        return size
    present = {*online, *state.answered, *state.asked, *state.due} - set(state.declined)
    return max(len(present - (gone - state.answered.keys())), least(state))


def _size(state: Rounds) -> int:
    """Contributions wanted; 0: of all devices, as always in a settling round."""
    return 0 if state.settling else state.plan.cohort.size


def quorum(state: Rounds, want: int) -> int:
    """Contributions of `want` that suffice at the deadline; where all are asked, no more than in another round."""
    if state.settling:
        want = min(want, state.plan.cohort.size or want)
    return max(least(state), math.ceil(want * state.plan.cohort.quorum))


def least(state: Rounds) -> int:
    """Fewest contributions that a round can commit with, and fewest devices that it can begin with.

    `min_devices` if the job sets it (of a smaller `size`, all). Else, where all are wanted: half of the devices that
    the log knows to take part, or the quorum if that is less; so a restarted coordinator does
    not mistake the first board that it hears from for the whole fleet.
    """
    cohort = state.plan.cohort
    if cohort.min_devices:
        return min(cohort.min_devices, cohort.size or cohort.min_devices)
    return 1 if cohort.size else max(1, math.ceil(min(cohort.quorum, 0.5) * len(state.roll)))


def needed(state: Rounds) -> int:
    """Number of devices that have to be present for the running round to begin."""
    cohort = state.plan.cohort
    return max(cohort.min_devices, cohort.start_devices if state.round == 0 else 0, least(state))


def starting(state: Rounds) -> bool:
    """Whether nobody has been asked for anything yet."""
    return state.phase == "selecting" and not state.round and not state.asked_s


def too_late(state: Rounds, online: int) -> Ended | None:
    """End of a job that has waited for its [cohort] start_timeout_s; None: its first round has begun.

    Args:
        state: of the job.
        online: number of devices that could be asked, at other jobs' tasks or not.
    """
    limit_s = state.plan.cohort.start_timeout_s
    if limit_s is None or not starting(state):
        return None
    return Ended(
        "failed",
        f"no round could begin within {limit_s:g} s ([cohort] start_timeout_s): {online} "
        f"{'device' if online == 1 else 'devices'} could be asked, {needed(state)} needed; `fedquilt why` says what "
        "keeps the others, `fedquilt resume` tries again",
    )


def _select(
    state: Rounds, online: Collection[str], ask: Callable[[str], Ask], busy: AbstractSet[str], most: float
) -> AnyFact | None:
    plan = state.plan
    if not state.settling:
        if state.over and (state.checked or not plan.check_every or plan.check_beside):
            return Ended("done", stop.caveat(plan.stop, state.spent) or "")
        if (limit := stop.reached(plan.stop, state.spent)) is not None:
            return Ended("done", limit)
    if len(online) < needed(state):
        return None
    free = set(online) - set(state.answered) - set(state.declined) - busy
    want = updates_to_close(state, online) - len(state.answered)
    count = math.ceil(want * (1 + plan.cohort.over_select))
    chosen = _drawn(state, free, min(count, most))
    if not chosen:
        return None
    asks = {device: ask(device) for device in chosen}
    allowed = deadline.allowed(plan.cohort, state.took, asks)
    asks.update({device: asks[device].trained_for(epochs) for device, epochs in allowed.epochs.items()})
    return Asked(state.round, state.attempt, chosen, _amounts(asks), allowed.seconds, epochs=dict(allowed.epochs))


def _drawn(state: Rounds, free: set[str], most: float) -> tuple[str, ...]:
    """Sample up to `most` free devices; those that stayed silent in earlier attempts at the round go last, in turn."""
    count = int(min(most, len(free)))
    if tried := [device for device in state.silent if device in free]:
        fresh = _drawn(replace(state, silent=()), free.difference(tried), count)
        return tuple(sorted((*fresh, *tried[: max(count - len(fresh), 0)])))
    costs = {device: state.costs[device] for device in free if device in state.costs} if state.costs else {}
    known = free <= state.since.keys()
    since = state.since if known else {device: state.since.get(device, 0) for device in free}
    return sample(state.plan.seed, state.round, free, count, costs=costs, since=since, turns=state.plan.cohort.turns)


def _amounts(asks: Mapping[str, Ask]) -> dict[str, float]:
    amounts = {device: deadline.amount(ask.work) for device, ask in asks.items()}
    return {device: amount for device, amount in amounts.items() if amount > 0}


def _decide_open_round(
    state: Rounds,
    now_s: float,
    online: Collection[str],
    ask: Callable[[str], Ask],
    busy: AbstractSet[str],
    most: float,
    gone: AbstractSet[str],
) -> AnyFact | None:
    """Return the next event of an open round, or None to wait."""
    cohort = state.plan.cohort
    have, want = len(state.answered), updates_to_close(state, online, gone)
    if have >= want:
        return Closed(state.round)
    enough = have >= quorum(state, want)
    at_work = state.asked - busy  # after a restart or a pause, another job may have a device that was asked
    left = set(online) - set(state.answered) - set(state.declined) - at_work
    missing = math.ceil((want - have) * (1 + cohort.over_select)) - len(at_work & set(online))
    chosen = _drawn(state, left - busy, min(missing, most)) if missing > 0 else ()
    apart = frozenset() if _size(state) else state.due.difference(online, state.answered, state.declined, state.asked)
    waits = missing > 0 and (most < 1 or bool(apart) or not left.isdisjoint(busy))  # others have boards that it needs
    if enough and state.extended:
        return Closed(state.round)
    if now_s >= next_s(state) and not (chosen and all_declined(state) and now_s < state.opened_s + state.deadline_s):
        if enough:
            return Closed(state.round)
        if state.deadline_s < state.longest_s and not all_declined(state):
            return Extended(state.round)
        failed = _recurring_failures(state, online)
        if _is_quorum_impossible(state, failed, {*online, *apart}, quorum(state, want)):
            return _end_without_quorum(state, want, failed)
        failed = {device: kept for device, kept in failed.items() if kept.code != FULL}
        if len({*online, *state.answered, *failed}) < least(state) or not (online or failed) or waits:
            return Reopened(state.round, state.attempt)  # a fleet that is offline for a night costs no attempt
        if state.attempt + 1 >= cohort.attempts:
            return _end_without_quorum(state, want, failed)
        return Reopened(state.round, state.attempt + 1)
    if chosen:
        return Asked(state.round, state.attempt, chosen, _amounts({device: ask(device) for device in chosen}))
    # a device that the method has no task for counts as answered once no other can be asked instead
    if state.asked <= gone and not waits and (enough or (state.idle and have + len(state.idle) >= quorum(state, want))):
        return Closed(state.round)
    return None


def _attempt_limit_s(state: Rounds) -> float:
    """Return the duration in seconds that an attempt may take, shorter once all devices have declined."""
    return min(state.deadline_s, DECLINED_S) if all_declined(state) else state.deadline_s


def all_declined(state: Rounds) -> bool:
    """Return whether devices have declined and none is working on a task."""
    return bool(state.declined) and not state.asked


def _recurring_failures(state: Rounds, online: Collection[str]) -> dict[str, Refused]:
    """Return the refusals of unavailable devices that would fail again with the task of this round."""
    found = {device: kept for device, kept in state.refused.items() if REFUSALS[kept.code].recurs}
    return {device: kept for device, kept in found.items() if device not in online and device not in state.answered}


def _is_quorum_impossible(state: Rounds, failed: Mapping[str, Refused], present: Collection[str], enough: int) -> bool:
    """Return whether the quorum cannot be reached because of devices that would fail again.

    Devices that stayed silent or failed for a passing reason may still answer in another attempt. So may devices with a
    full disk, unless nobody else is left.
    """
    possible = {*present, *state.asked_s, *state.answered}.difference(failed)
    if possible:
        possible |= {device for device, kept in failed.items() if kept.code == FULL}
    return len(possible) < enough <= len(possible | failed.keys())


def _end_without_quorum(state: Rounds, want: int, failed: Mapping[str, Refused]) -> Ended:
    """Return the failed end of a job without a quorum: the causes, and the fix in a second line."""
    of_round = {device: kept for device, kept in state.refused.items() if kept.round == state.round}
    refused = {device: (kept.code, kept.reason) for device, kept in {**failed, **of_round}.items()}
    asked = {*state.asked_s, *state.answered, *state.declined, *refused} - state.idle
    if refused and len(refused) + len(state.answered) >= len(asked):
        codes = [code for code, _ in Counter(code for code, _ in refused.values()).most_common()]
        causes = "; ".join(_describe_refusals(state.round, code, refused, len(asked)) for code in codes)
        return Ended("failed", f"{causes}.\nFix: {REFUSALS[codes[0]].fix}.", codes[0])
    passing = {device: ("", reason) for device, reason in state.declined.items() if device not in refused}
    return Ended("failed", _describe_outcomes(state, want, refused | passing))


def _describe_refusals(round: int, code: str, refused: Mapping[str, tuple[str, str]], asked: int) -> str:
    """Return a text on one kind of refusal: on how many devices, and the most frequent reason."""
    reasons = [reason for _, (found, reason) in sorted(refused.items()) if found == code]
    reason, count = Counter(reasons).most_common(1)[0]
    example = "" if count == len(reasons) else f"{min(d for d, each in refused.items() if each == (code, reason))}: "
    devices = f"{len(reasons)} of {asked} {'device' if asked == 1 else 'devices'}"
    return f"{REFUSALS[code].cause} in round {round} on {devices}" + (f" ({example}{reason})" if reason else "")


def by_reason(declined: Mapping[str, str], most: int = 5) -> str:
    """The first `most` reasons, each once, after the devices that gave it: "a, b and 6 more: too big; x: NaN"."""
    devices: dict[str, list[str]] = {}
    for device, reason in sorted(declined.items()):
        devices.setdefault(reason, []).append(device)
    more = {reason: f" and {len(names) - most} more" for reason, names in devices.items() if len(names) > most}
    told = list(devices.items())[:most]
    return "; ".join(f"{', '.join(names[:most])}{more.get(reason, '')}: {reason}" for reason, names in told)


def _describe_outcomes(state: Rounds, want: int, reasons: Mapping[str, tuple[str, str]]) -> str:
    """Return how many devices answered, declined, were rejected or stayed silent, and how to fix it."""
    asked = state.asked_s.keys() | state.answered.keys() | reasons.keys()
    rejected = {device for device, (code, _) in reasons.items() if code == UPDATE} | (
        state.declined.keys() & state.roll
    )
    declined = reasons.keys() - rejected - state.idle
    silent = sorted(asked - state.answered.keys() - reasons.keys())
    counts = [
        f"{len(state.answered)} answered",
        *([f"{len(declined)} declined"] if declined else []),
        *([f"{len(rejected)} sent what was rejected"] if rejected else []),
        *([f"{len(state.idle)} had nothing to do"] if state.idle else []),
        *([f"{len(silent)} stayed silent"] if silent else []),
    ]
    refused = by_reason({device: reason for device, (_, reason) in reasons.items()})
    enough = quorum(state, want)
    return (
        f"round {state.round} asked {len(asked)} {'device' if len(asked) == 1 else 'devices'} in {state.attempt + 1} "
        f"{'attempt' if not state.attempt else 'attempts'}: {', '.join(counts)}, "
        f"and {enough} {'update is' if enough == 1 else 'updates are'} needed"
        + (f"; refused: {refused}" if refused else "")
        + (f"; silent: {', '.join(silent[:5])}" if silent else "")
        + ".\nFix: see to these devices and `fedquilt resume` the run (a simulated fleet: the same command again), or "
        "run the job anew with another [cohort] size, quorum or deadline_s."
    )
