"""Next action of the agent: pure decisions, no I/O, no clock, no randomness.

    (nothing) --Arrived--> FETCHING --Fetched--> WORKING --Done--> in the outbox --Acked--> gone
                   |           |                    |
                   +-----------+--- a refusal ------+-- Failed       Cleared or a later task: given up

One task is open at a time, the coordinator's latest. Results in the outbox are
never computed again: they are offered, ever more rarely, until the coordinator answers that each
is counted or refused. Private state that a round leaves on the device counts only together with the
round's contribution; so while an update with private state is unanswered, the job's next task waits.

A coordinator whose log is an older copy asks for rounds that this device has counted. It is known by its
epoch, which grows with every start: a task of a later epoch than the one that counted the round is carried
out, and what was computed from a state that this coordinator does not have is dropped. A task of the same or
an earlier epoch is an old message, or one of a coordinator whose epoch lies behind as well; it is refused with the
epoch that is known here, so that such a coordinator can go on with a later one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from fedquilt.core import BlobRef, Reading, Task, Update, shorten_error
from fedquilt.edge_agent.events import (
    REFETCH_S,
    RESEND_S,
    Abandon,
    Acked,
    Action,
    Arrived,
    Begin,
    Cleared,
    Connected,
    Done,
    Drop,
    Event,
    Failed,
    Fetch,
    Fetched,
    Learn,
    Offer,
    Open,
    Rest,
    Say,
    Send,
    State,
    Stop,
    Tick,
    workload,
)
from fedquilt.edge_agent.power.learned import Learned
from fedquilt.edge_agent.remembered import Counted
from fedquilt.edge_agent.task import budget
from fedquilt.wire import Claim, RefusalCode

RESEND_MOST_S: Final = 60.0
REFETCH_MOST_S: Final = 60.0
REMEMBERED_JOBS: Final = 64
REMEMBERED_WORKLOADS: Final = 16  # that something was learned of
REMEMBERED_WAYS: Final = 3  # answered updates of a job: their median leaves out one that met an outage
RESERVED_MOST: Final = 0.5  # most of the time left that is kept for the update's way
COUNTED: Final = "counted already: this is an old message, or the coordinator's log is an older copy"
KILLED_MOST: Final = 2  # most restarts of a task whose process was killed from outside

Step = tuple[State, tuple[Action, ...]]


def next_s(state: State) -> float:
    """Time at which `advance` may change something without an event."""
    again_s = state.open.again_s if state.open else math.inf
    return min([again_s, *(offer.due_s for offer in state.outbox.values())]) if state.outbox else again_s


def advance(state: State, event: Event, now_s: float, reading: Reading = Reading()) -> Step:
    """Next state after an event, and the actions to take, in order.

    `reading.available_bytes` is the memory that the board could give to a task's process.
    """
    match event:
        case Arrived():
            return _arrived(state, event, now_s, reading)
        case Cleared():
            return _cleared(state)
        case Fetched():
            return _fetched(state, event, now_s)
        case Done():
            return _done(state, event, now_s)
        case Failed() if state.open is not None:
            return _handle_failure(state, state.open, event)
        case Acked():
            return _handle_ack(state, event, now_s)
        case Connected():
            offers = {key: replace(offer, due_s=now_s, patience_s=RESEND_S) for key, offer in state.outbox.items()}
            return _due(replace(state, outbox=offers), now_s)
        case Tick():
            return _due(state, now_s)
        case Rest():
            return _proceed(replace(state, rests=event.on))
        case _:
            return state, ()


# -- a task arrives -------------------------------------------------------------------------------


def _arrived(state: State, event: Arrived, now_s: float, reading: Reading) -> Step:
    task, open = event.task, state.open
    key = (task.job, task.round)
    if key in state.outbox and _of_its_state(state.outbox[key].update, task):
        offer = state.outbox[key]
        update = replace(offer.update, attempt=task.attempt, epoch=max(task.epoch, offer.update.epoch))
        again = replace(offer, update=update, due_s=now_s + RESEND_S, patience_s=RESEND_S)
        return replace(state, outbox={**state.outbox, key: again}), (Send(update),)
    last = state.counted.get(task.job)
    if last is not None and task.round <= last.round and task.epoch <= last.epoch:
        claim = replace(_claim(state, task), accepted=False, code="counted", reason=COUNTED)
        return state, (Say(claim),)  # the coordinator ignores it, if this was an old message
    if open is not None and open.task.job == task.job and _rank(open.task) > _rank(task):
        return state, ()  # superseded by the task in hand before it arrived
    if open is not None and _same(open.task, task):
        due_s = open.due_s if task == open.task else now_s + task.deadline_s  # an old message carries an old deadline
        return replace(state, open=replace(open, task=task, due_s=due_s)), (Say(_claim(state, task)),)
    told = _claim(state, task)
    if state.refusal is not None and told == replace(state.refusal, accepted=True, code="ok", reason=""):
        return state, (Say(state.refusal),)
    stale = state.outbox.get(key)  # computed from another state: by this device, for a copy of the coordinator's log
    if stale is not None:
        state = replace(state, outbox={other: offer for other, offer in state.outbox.items() if other != key})
    refusal = refusal_of(state, task, reading)
    after, actions = _refuse_task(state, task, *refusal) if refusal is not None else _open(state, event, now_s)
    return after, actions if stale is None else (Drop(stale.update), *actions)


def refusal_of(state: State, task: Task, reading: Reading) -> tuple[RefusalCode, str] | None:
    """Return why this device cannot take a task, as code and reason, or None if it can."""
    means = state.means
    if task.method not in means.methods:
        return "method", (
            f"there is no method {task.method!r} here: install the coordinator's version of fedquilt, or the package "
            "that gives it"
        )
    if task.engine not in means.engines:
        there_are = ", ".join(means.engines) or "none"
        return "engine", f"the {task.engine} engine cannot run here (there are: {there_are}): install its packages"
    if task.wire.codec not in means.codecs:
        known = ", ".join(means.codecs)
        return "codec", f"no codec {task.wire.codec!r} here (known: {known}): install the coordinator's fedquilt"
    return budget.memory_shortage(
        task.engine,
        task.work,
        means.budget_bytes,
        reading.available_bytes,
        measured=state.base_bytes,
        caution=_caution(state, task),
    )


def plannable_bytes(state: State, task: Task) -> int:
    """Memory for the plan of the task's engine: below the budget if such tasks exceeded their predicted peaks."""
    base = budget.base_bytes(task.engine, state.base_bytes)
    return _caution(state, task).plannable_bytes(state.means.budget_bytes, base)


def _caution(state: State, task: Task) -> budget.Caution:
    return state.cautions.get((task.method, task.engine), budget.Caution())


def _cautious(state: State, task: Task, caution: budget.Caution) -> State:
    return replace(state, cautions={**state.cautions, (task.method, task.engine): caution})


def _warned(state: State, event: Failed) -> State:
    """State with one more step of caution if memory ran out; an engine that refused at once teaches nothing."""
    if state.open is None or event.code != "memory" or not event.overrun:
        return state
    return _cautious(state, state.open.task, _caution(state, state.open.task).failed())


def _open(state: State, event: Arrived, now_s: float) -> Step:
    """Take a task in place of the one in hand."""
    given_up = _give_up(state, keep=event.missing)
    down_bytes, due_s = sum(ref.size for ref in event.missing), now_s + event.task.deadline_s
    opened = Open(event.task, event.missing, due_s, down_bytes=down_bytes)
    under_way = state.open.missing - state.open.again if state.open else frozenset()
    wanted = _ordered(event.missing - under_way)
    fetch = (Fetch(wanted),) if wanted else ()
    state, begun = _proceed(replace(state, open=opened, refusal=None))
    return state, (*given_up, Say(_claim(state, event.task)), *fetch, *begun)


def _same(one: Task, other: Task) -> bool:
    """Whether two tasks ask for the same work; attempts, deadlines and the coordinator's start may differ."""
    return replace(one, attempt=other.attempt, deadline_s=other.deadline_s, epoch=other.epoch) == other


def _rank(task: Task) -> tuple[int, int]:
    """Order in which tasks of a job are sent: a restored coordinator begins at an earlier round, with a later epoch."""
    return task.epoch, task.round


def _of_its_state(update: Update, task: Task) -> bool:
    """Whether an update was computed from the state that the task is about, as far as both say."""
    return update.state == task.state or not update.state or not task.state


def _claim(state: State, task: Task) -> Claim:
    """That a task is accepted; names the last round counted where the coordinator cannot know of it."""
    claim = Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True)
    last = state.counted.get(task.job)
    if last is None or last.round < task.round:
        return claim
    return replace(claim, counted=last.round, epoch=last.epoch)


def _refuse_task(state: State, task: Task, code: RefusalCode, reason: str) -> Step:
    """Publish a refusal of the task, end it if it has begun, and remember the refusal."""
    claim = replace(_claim(state, task), accepted=False, code=code, reason=shorten_error(reason))
    return replace(_without_open(state), refusal=claim), (*_give_up(state), Say(claim))


def _cleared(state: State) -> Step:
    """Give the task up and publish so: anyone who empties topics at the broker looks like the coordinator here."""
    told: tuple[Action, ...] = ()
    if state.open is not None:
        reason = "its topic was emptied: by the coordinator, or by somebody at the broker"
        claim = replace(_claim(state, state.open.task), accepted=False, code="cleared", reason=reason)
        told = (Say(claim),)
    return replace(_without_open(state), refusal=None), (*_give_up(state), *told)


def way_s(state: State, now_s: float) -> float:
    """Seconds before the deadline of the task in hand, which begins now, that are left for the way of its update.

    The median of the job's latest; before the first, as long as the task's blobs took to come.
    """
    open = state.open
    if open is None or not math.isfinite(open.due_s):
        return 0.0
    fetched_s = now_s - (open.due_s - open.task.deadline_s) if open.down_bytes else 0.0
    known = state.sent.get(open.task.job)
    return min(statistics.median(known) if known else fetched_s, RESERVED_MOST * max(open.due_s - now_s, 0.0))


# -- it goes on -----------------------------------------------------------------------------------


def _fetched(state: State, event: Fetched, now_s: float) -> Step:
    open = state.open
    found = [ref for ref in open.missing if ref.sha256 == event.sha256] if open else []
    if open is None or not found:
        return state, ()
    if event.error is None:
        left = replace(open, missing=open.missing.difference(found), patience_s=REFETCH_S)
        return _proceed(replace(state, open=left))
    later = replace(
        open,
        again=open.again.union(found),
        again_s=min(open.again_s, now_s + open.patience_s),
        patience_s=min(open.patience_s * 2, REFETCH_MOST_S),
    )
    return replace(state, open=later), ()


def _proceed(state: State) -> Step:
    """Begin the open task, if nothing prevents it."""
    open = state.open
    if open is None or open.working or open.missing or state.rests:
        return state, ()
    if any(offer.private and job == open.task.job for (job, _), offer in state.outbox.items()):
        return state, ()
    return replace(state, open=replace(open, working=True)), (Begin(open.task),)


def _done(state: State, event: Done, now_s: float) -> Step:
    update, bases = event.update, dict(state.base_bytes)
    if state.open is not None and update.usage.base_bytes is not None:
        engine = state.open.task.engine
        bases[engine] = min(update.usage.base_bytes, bases.get(engine, update.usage.base_bytes))
    noted: tuple[Action, ...] = ()
    if state.open is not None and event.learned != state.learned.get(kind := workload(state.open.task), Learned()):
        others = {name: known for name, known in state.learned.items() if name != kind}
        kept = dict([*others.items(), (kind, event.learned)][-REMEMBERED_WORKLOADS:])
        state, noted = replace(state, learned=kept), (Learn(kept),)
    peak = update.usage.peak_bytes
    if state.open is not None and event.planned_bytes is not None and peak is not None:
        base = budget.base_bytes(state.open.task.engine, bases)  # of a bare process: this one may have been warm
        seen = _caution(state, state.open.task).seen(peak - base, event.planned_bytes)
        state = _cautious(state, state.open.task, seen)
    offer = Offer(update, event.private, now_s + RESEND_S, since_s=now_s)
    outbox = {**state.outbox, (update.job, update.round): offer}
    return replace(_without_open(state), outbox=outbox, base_bytes=bases), (Send(update), *noted)


def _handle_failure(state: State, open: Open, event: Failed) -> Step:
    """Refuse the task, or begin it again if its process was killed without own fault.

    With the same plan, so that the result has the same bits; only a refusal makes the next attempt more cautious.
    """
    if event.killed and open.working and open.killed < KILLED_MOST:
        return _proceed(replace(state, open=replace(open, killed=open.killed + 1, working=False)))
    times = f" ({open.killed + 1} times)" if event.killed else ""
    return _refuse_task(_warned(state, event), open.task, event.code, f"{event.reason}{times}")


def _handle_ack(state: State, event: Acked, now_s: float) -> Step:
    """Remove an answered update from the outbox, note a counted round, and end a task that it made useless."""
    job, round = event.key
    offer = state.outbox.get(event.key)
    if offer is not None and event.epoch < offer.update.epoch:
        return state, ()  # of an earlier coordinator, to an earlier update of this round
    if offer is not None and not event.accepted and event.attempt != offer.update.attempt:
        return state, ()  # it was asked for again since, and may be counted by what was offered then
    counted = dict(state.counted)
    asked_epoch = event.epoch if offer is None else offer.update.epoch
    if event.accepted:
        before = counted.pop(job, Counted(-1))  # popped, so that the latest job is last
        # an earlier round counts instead if a coordinator from an older copy asked for it, not if it answers late
        asked_again = event.epoch > before.epoch and (round == before.round or asked_epoch > before.epoch)
        later = round > before.round or asked_again
        counted[job] = Counted(round, event.epoch) if later else before
        counted = dict(list(counted.items())[-REMEMBERED_JOBS:])
    if event.accepted and offer is not None and offer.since_s is not None:
        others = {name: known for name, known in state.sent.items() if name != job}
        latest = (*state.sent.get(job, ()), now_s - offer.since_s)[-REMEMBERED_WAYS:]
        state = replace(state, sent=dict([*others.items(), (job, latest)][-REMEMBERED_JOBS:]))
    outbox = {key: offer for key, offer in state.outbox.items() if key != event.key}
    state = replace(state, outbox=outbox, counted=counted)
    open = state.open
    last = None if open is None else counted.get(open.task.job)
    if open is not None and last is not None and open.task.round <= last.round and open.task.epoch <= last.epoch:
        return _without_open(state), _give_up(state)  # counted while it was worked on again
    return _proceed(state)


def _due(state: State, now_s: float) -> Step:
    """Offers and fetches that are due for repetition."""
    if now_s < next_s(state):
        return state, ()
    actions: list[Action] = []
    outbox = dict(state.outbox)
    for key, offer in state.outbox.items():
        if offer.due_s <= now_s:
            outbox[key] = replace(
                offer, due_s=now_s + offer.patience_s, patience_s=min(offer.patience_s * 2, RESEND_MOST_S)
            )
            actions.append(Send(offer.update))
    open = state.open
    if open is not None and open.again_s <= now_s:
        actions.append(Fetch(_ordered(open.again)))
        open = replace(open, again=frozenset(), again_s=math.inf)
    return replace(state, outbox=outbox, open=open), tuple(actions)


def _ordered(refs: Collection[BlobRef]) -> tuple[BlobRef, ...]:
    return tuple(sorted(refs, key=lambda ref: ref.sha256))


def _without_open(state: State) -> State:
    return replace(state, open=None)


def _give_up(state: State, keep: frozenset[BlobRef] = frozenset()) -> tuple[Action, ...]:
    """Drop the task in hand, except for blobs that the next one needs."""
    if state.open is None:
        return ()
    abandoned = (Abandon(ref.sha256) for ref in _ordered(state.open.missing - keep))
    return (*((Stop(),) if state.open.working else ()), *abandoned)
