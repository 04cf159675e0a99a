"""State machine of the agent, with its events, actions and state: pure decisions without I/O, clock or randomness.

    (nothing) --TaskReceived--> FETCHING --BlobFetched--> WORKING --TaskCompleted--> in the outbox --UpdateAcked--> gone
                   |                |                       |
                   +----------------+------ decline --------+-- TaskFailed      TaskCancelled or a later task: stopped

One task is open at a time, the latest from the coordinator. Updates in the outbox are never computed again: they are
submitted with growing intervals until the coordinator counts or rejects each. Private state that a round leaves on the
device counts only together with the round's update. While an update with private state is unanswered, the next task of
the same job waits.

A coordinator restored from an older copy of its log requests rounds that this device has already counted. Its epoch,
which grows with every start, identifies it. A task of a later epoch than the counted round is run, and an update
computed from another state is deleted. A task of the same or an earlier epoch is declined with the epoch known here, so
that the coordinator can continue with a later epoch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec import field
from msgspec.structs import replace

from fedquilt.core import CODECS, REFETCH, RESEND, BlobRef, Reading, Task, Update, shorten_error
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.memory_budget import MemoryMargin
from fedquilt.wire import Claim, RefusalCode

Key = tuple[str, int]  # job, round

# -- events ---------------------------------------------------------------------------------------


class SessionStarted(msgspec.Struct, frozen=True):
    """New session with the broker, or restart of the coordinator. Earlier messages may be lost."""


class TaskReceived(msgspec.Struct, frozen=True):
    task: Task
    missing: frozenset[BlobRef] = frozenset()


class TaskCancelled(msgspec.Struct, frozen=True): ...


class BlobFetched(msgspec.Struct, frozen=True):
    sha256: str
    error: str | None = None


class TaskCompleted(msgspec.Struct, frozen=True):
    update: Update
    private: bool  # the result includes private state
    learned: LearnedModel = LearnedModel()  # of its workload, this task included
    planned_bytes: int | None = None  # peak that its engine predicted, beside the bare process


class TaskFailed(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str
    overrun: bool = False  # memory ran out during the work
    killed: bool = False  # its process was killed from outside: the next attempt may succeed


class UpdateAcked(msgspec.Struct, frozen=True):
    """Final answer to an update, which is counted or rejected. The outbox drops the update."""

    key: Key
    accepted: bool
    epoch: int = 0  # start of the coordinator that answered
    attempt: int = 0  # at the round, of the update that it answered


class TimerFired(msgspec.Struct, frozen=True): ...


class TaskPauseChanged(msgspec.Struct, frozen=True):
    on: bool


Event = (
    SessionStarted
    | TaskReceived
    | TaskCancelled
    | BlobFetched
    | TaskCompleted
    | TaskFailed
    | UpdateAcked
    | TimerFired
    | TaskPauseChanged
)

# -- actions --------------------------------------------------------------------------------------


class PublishClaim(msgspec.Struct, frozen=True):
    claim: Claim


class FetchBlobs(msgspec.Struct, frozen=True):
    refs: tuple[BlobRef, ...]


class CancelFetch(msgspec.Struct, frozen=True):
    sha256: str


class StartTask(msgspec.Struct, frozen=True):
    task: Task


class StopTask(msgspec.Struct, frozen=True): ...


class SendUpdate(msgspec.Struct, frozen=True):
    update: Update


class DeleteUpdate(msgspec.Struct, frozen=True):
    update: Update


class StoreLearnedCosts(msgspec.Struct, frozen=True):
    learned: Mapping[str, LearnedModel]


Action = PublishClaim | FetchBlobs | CancelFetch | StartTask | StopTask | SendUpdate | DeleteUpdate | StoreLearnedCosts

# -- state ----------------------------------------------------------------------------------------


class CountedRound(msgspec.Struct, frozen=True):
    round: int
    epoch: int = 0  # start of the coordinator that said so


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities and labels of a device. While the agent runs, only `runs_on` changes."""

    budget_bytes: int
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS
    plugins: Mapping[str, str] = field(
        default_factory=dict
    )  # of other packages: `fedquilt.plugins.plugin_fingerprints`
    confined: tuple[str, ...] | None = None  # by `task.sandbox`, or None without a process
    labels: tuple[str, ...] = ()  # labels given by the owner: `fedquilt.formats.labels`
    boards: int = 0  # of a site
    runs_on: Mapping[str, str] = field(default_factory=dict)  # engine that may use a GPU -> what its latest task used


class OpenTask(msgspec.Struct, frozen=True):
    task: Task
    missing: frozenset[BlobRef]
    due_s: float = math.inf  # its deadline by this device's own clock, set when it first arrived
    working: bool = False
    down_bytes: int = 0  # size of the fetched blobs
    again: frozenset[BlobRef] = frozenset()  # part of `missing` that failed, to be fetched again at `again_s`
    again_s: float = math.inf
    failures: int = 0  # to fetch a blob, since one last arrived
    killed: int = 0  # times its process was killed from outside


class OutboxUpdate(msgspec.Struct, frozen=True):
    update: Update
    private: bool
    due_s: float
    sends: int = 0  # in this session with the coordinator
    since_s: float | None = None  # when it was first offered; None: before this process began


class DeviceState(msgspec.Struct, frozen=True):
    means: Capabilities
    open: OpenTask | None = None
    outbox: Mapping[Key, OutboxUpdate] = field(default_factory=dict)
    counted: Mapping[str, CountedRound] = field(default_factory=dict)  # by job
    refusal: Claim | None = None  # latest refusal, repeated with its task
    base_bytes: Mapping[str, int] = field(default_factory=dict)  # engine -> resident with nothing but it
    learned: Mapping[str, LearnedModel] = field(default_factory=dict)  # by `workload_key`, the latest last
    sent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by job: latest seconds from offer to answer
    cautions: Mapping[tuple[str, str], MemoryMargin] = field(default_factory=dict)  # (method, engine) -> what was seen
    rests: bool = False  # whether no task is begun now


def workload_key(task: Task) -> str:
    return " ".join(filter(None, (task.engine, task.method, task.work.workload)))


REMEMBERED_JOBS: Final = 64
REMEMBERED_WORKLOADS: Final = 16  # that something was learned of
REMEMBERED_WAYS: Final = 3  # answered updates of a job: their median leaves out one that met an outage
RESERVED_MOST: Final = 0.5  # most of the time left that is kept for the update's way
COUNTED: Final = "counted already: this is an old message, or the coordinator's log is an older copy"
KILLED_MOST: Final = 2  # most restarts of a task whose process was killed from outside

Step = tuple[DeviceState, tuple[Action, ...]]


def next_due_s(state: DeviceState) -> float:
    """Return the time at which `advance` may act without an event, or infinity."""
    again_s = state.open.again_s if state.open else math.inf
    return min([again_s, *(offer.due_s for offer in state.outbox.values())]) if state.outbox else again_s


def advance(state: DeviceState, event: Event, now_s: float, reading: Reading = Reading()) -> Step:
    """Return the next state after an event, and the actions to carry out in order.

    `reading.available_bytes` is the memory that the board could give to a task's process.
    """
    match event:
        case TaskReceived():
            return _handle_task(state, event, now_s, reading)
        case TaskCancelled():
            return _handle_cancellation(state)
        case BlobFetched():
            return _handle_fetched(state, event, now_s)
        case TaskCompleted():
            return _handle_completion(state, event, now_s)
        case TaskFailed() if state.open is not None:
            return _handle_failure(state, state.open, event)
        case UpdateAcked():
            return _handle_ack(state, event, now_s)
        case SessionStarted():
            offers = {key: replace(offer, due_s=now_s, sends=0) for key, offer in state.outbox.items()}
            return _repeat_due_actions(replace(state, outbox=offers), now_s)
        case TimerFired():
            return _repeat_due_actions(state, now_s)
        case TaskPauseChanged():
            return _start_if_ready(replace(state, rests=event.on))
        case _:
            return state, ()


# -- a task arrives -------------------------------------------------------------------------------


def _handle_task(state: DeviceState, event: TaskReceived, now_s: float, reading: Reading) -> Step:
    task, open = event.task, state.open
    key = (task.job, task.round)
    if key in state.outbox and state.outbox[key].update.state == task.state:
        offer = state.outbox[key]
        update = replace(offer.update, attempt=task.attempt, epoch=max(task.epoch, offer.update.epoch))
        again = _with_submission_counted(replace(offer, update=update, sends=0), now_s)
        return replace(state, outbox={**state.outbox, key: again}), (SendUpdate(update),)
    last = state.counted.get(task.job)
    if last is not None and task.round <= last.round and task.epoch <= last.epoch:
        claim = replace(_acceptance_claim(state, task), accepted=False, code="counted", reason=COUNTED)
        return state, (PublishClaim(claim),)  # the coordinator ignores it, if this was an old message
    if open is not None and open.task.job == task.job and _task_order(open.task) > _task_order(task):
        return state, ()  # superseded by the task in hand before it arrived
    if open is not None and _is_same_work(open.task, task):
        due_s = open.due_s if task == open.task else now_s + task.deadline_s  # an old message carries an old deadline
        return replace(state, open=replace(open, task=task, due_s=due_s)), (
            PublishClaim(_acceptance_claim(state, task)),
        )
    told = _acceptance_claim(state, task)
    if state.refusal is not None and told == replace(state.refusal, accepted=True, code="ok", reason=""):
        return state, (PublishClaim(state.refusal),)
    stale = state.outbox.get(key)  # computed from another state: by this device, for a copy of the coordinator's log
    if stale is not None:
        state = replace(state, outbox={other: offer for other, offer in state.outbox.items() if other != key})
    refusal = decline_reason(state, task, reading)
    after, actions = _decline_task(state, task, *refusal) if refusal is not None else _accept_task(state, event, now_s)
    return after, actions if stale is None else (DeleteUpdate(stale.update), *actions)


def decline_reason(state: DeviceState, task: Task, reading: Reading) -> tuple[RefusalCode, str] | None:
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
    return memory_budget.memory_shortage(
        task.engine,
        task.work,
        means.budget_bytes,
        reading.available_bytes,
        measured=state.base_bytes,
        caution=_memory_margin(state, task),
    )


def plan_limit_bytes(state: DeviceState, task: Task) -> int:
    base = memory_budget.engine_base_bytes(task.engine, state.base_bytes)
    return _memory_margin(state, task).plan_limit_bytes(state.means.budget_bytes, base)


def _memory_margin(state: DeviceState, task: Task) -> memory_budget.MemoryMargin:
    return state.cautions.get((task.method, task.engine), memory_budget.MemoryMargin())


def _with_memory_margin(state: DeviceState, task: Task, caution: memory_budget.MemoryMargin) -> DeviceState:
    return replace(state, cautions={**state.cautions, (task.method, task.engine): caution})


def _with_raised_margin(state: DeviceState, event: TaskFailed) -> DeviceState:
    # An engine that refused before the work started is no reason for a larger margin.
    if state.open is None or event.code != "memory" or not event.overrun:
        return state
    return _with_memory_margin(state, state.open.task, _memory_margin(state, state.open.task).with_failure())


def _accept_task(state: DeviceState, event: TaskReceived, now_s: float) -> Step:
    given_up = _stop_actions(state, keep=event.missing)
    down_bytes, due_s = sum(ref.size for ref in event.missing), now_s + event.task.deadline_s
    opened = OpenTask(event.task, event.missing, due_s, down_bytes=down_bytes)
    under_way = state.open.missing - state.open.again if state.open else frozenset()
    wanted = _sorted_refs(event.missing - under_way)
    fetch = (FetchBlobs(wanted),) if wanted else ()
    state, begun = _start_if_ready(replace(state, open=opened, refusal=None))
    return state, (*given_up, PublishClaim(_acceptance_claim(state, event.task)), *fetch, *begun)


def _is_same_work(one: Task, other: Task) -> bool:
    return replace(one, attempt=other.attempt, deadline_s=other.deadline_s, epoch=other.epoch) == other


def _task_order(task: Task) -> tuple[int, int]:
    # A restored coordinator begins at an earlier round, with a later epoch.
    return task.epoch, task.round


def _acceptance_claim(state: DeviceState, task: Task) -> Claim:
    claim = Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True)
    last = state.counted.get(task.job)
    if last is None or last.round < task.round:
        return claim
    return replace(claim, last_counted_round=last.round, epoch=last.epoch)


def _decline_task(state: DeviceState, task: Task, code: RefusalCode, reason: str) -> Step:
    claim = replace(_acceptance_claim(state, task), accepted=False, code=code, reason=shorten_error(reason))
    return replace(_without_task(state), refusal=claim), (*_stop_actions(state), PublishClaim(claim))


def _handle_cancellation(state: DeviceState) -> Step:
    """Stop the task and publish a claim, since others than the coordinator can empty the topic."""
    told: tuple[Action, ...] = ()
    if state.open is not None:
        reason = "its topic was emptied: by the coordinator, or by somebody at the broker"
        claim = replace(_acceptance_claim(state, state.open.task), accepted=False, code="cleared", reason=reason)
        told = (PublishClaim(claim),)
    return replace(_without_task(state), refusal=None), (*_stop_actions(state), *told)


def upload_reserve_s(state: DeviceState, now_s: float) -> float:
    """Return the seconds before the current task's deadline that are reserved for its upload.

    This is the median of the job's latest uploads. Before the first, it is the time that fetching the task's blobs
    took.
    """
    open = state.open
    if open is None or not math.isfinite(open.due_s):
        return 0.0
    fetched_s = now_s - (open.due_s - open.task.deadline_s) if open.down_bytes else 0.0
    known = state.sent.get(open.task.job)
    import statistics  # here: it takes 0.3 MB, and an idle agent sends nothing

    return min(statistics.median(known) if known else fetched_s, RESERVED_MOST * max(open.due_s - now_s, 0.0))


# -- it goes on -----------------------------------------------------------------------------------


def _handle_fetched(state: DeviceState, event: BlobFetched, now_s: float) -> Step:
    open = state.open
    found = [ref for ref in open.missing if ref.sha256 == event.sha256] if open else []
    if open is None or not found:
        return state, ()
    if event.error is None:
        left = replace(open, missing=open.missing.difference(found), failures=0)
        return _start_if_ready(replace(state, open=left))
    later = replace(
        open,
        again=open.again.union(found),
        again_s=min(open.again_s, now_s + REFETCH.delay_s(open.failures)),
        failures=open.failures + 1,
    )
    return replace(state, open=later), ()


def _start_if_ready(state: DeviceState) -> Step:
    """Start the open task, unless blobs are missing, tasks pause or private state is unacknowledged."""
    open = state.open
    if open is None or open.working or open.missing or state.rests:
        return state, ()
    if any(offer.private and job == open.task.job for (job, _), offer in state.outbox.items()):
        return state, ()
    return replace(state, open=replace(open, working=True)), (StartTask(open.task),)


def _handle_completion(state: DeviceState, event: TaskCompleted, now_s: float) -> Step:
    update, bases = event.update, dict(state.base_bytes)
    if state.open is not None and update.usage.base_bytes is not None:
        engine = state.open.task.engine
        bases[engine] = min(update.usage.base_bytes, bases.get(engine, update.usage.base_bytes))
    noted: tuple[Action, ...] = ()
    if state.open is not None and event.learned != state.learned.get(
        kind := workload_key(state.open.task), LearnedModel()
    ):
        others = {name: known for name, known in state.learned.items() if name != kind}
        kept = dict([*others.items(), (kind, event.learned)][-REMEMBERED_WORKLOADS:])
        state, noted = replace(state, learned=kept), (StoreLearnedCosts(kept),)
    peak = update.usage.peak_bytes
    if state.open is not None and event.planned_bytes is not None and peak is not None:
        base = memory_budget.engine_base_bytes(
            state.open.task.engine, bases
        )  # of a bare process: this one may have been warm
        seen = _memory_margin(state, state.open.task).with_peak(peak - base, event.planned_bytes)
        state = _with_memory_margin(state, state.open.task, seen)
    offer = _with_submission_counted(OutboxUpdate(update, event.private, now_s, since_s=now_s), now_s)
    outbox = {**state.outbox, (update.job, update.round): offer}
    return replace(_without_task(state), outbox=outbox, base_bytes=bases), (SendUpdate(update), *noted)


def _handle_failure(state: DeviceState, open: OpenTask, event: TaskFailed) -> Step:
    """Restart a task whose process was killed from outside, at most KILLED_MOST times, else decline it."""
    # A task whose process was killed by another cause is restarted with the same plan, for a bit-identical result.
    if event.killed and open.working and open.killed < KILLED_MOST:
        return _start_if_ready(replace(state, open=replace(open, killed=open.killed + 1, working=False)))
    times = f" ({open.killed + 1} times)" if event.killed else ""
    return _decline_task(_with_raised_margin(state, event), open.task, event.code, f"{event.reason}{times}")


def _handle_ack(state: DeviceState, event: UpdateAcked, now_s: float) -> Step:
    job, round = event.key
    offer = state.outbox.get(event.key)
    if offer is not None and event.epoch < offer.update.epoch:
        return state, ()  # of an earlier coordinator, to an earlier update of this round
    if offer is not None and not event.accepted and event.attempt != offer.update.attempt:
        return state, ()  # it was asked for again since, and may be counted by what was offered then
    counted = dict(state.counted)
    asked_epoch = event.epoch if offer is None else offer.update.epoch
    if event.accepted:
        before = counted.pop(job, CountedRound(-1))  # popped, so that the latest job is last
        # an earlier round counts instead if a coordinator from an older copy asked for it, not if it answers late
        asked_again = event.epoch > before.epoch and (round == before.round or asked_epoch > before.epoch)
        later = round > before.round or asked_again
        counted[job] = CountedRound(round, event.epoch) if later else before
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
        return _without_task(state), _stop_actions(state)  # counted while it was worked on again
    return _start_if_ready(state)


def _with_submission_counted(offer: OutboxUpdate, now_s: float) -> OutboxUpdate:
    return replace(offer, due_s=now_s + RESEND.delay_s(offer.sends), sends=offer.sends + 1)


def _repeat_due_actions(state: DeviceState, now_s: float) -> Step:
    if now_s < next_due_s(state):
        return state, ()
    actions: list[Action] = []
    outbox = dict(state.outbox)
    for key, offer in state.outbox.items():
        if offer.due_s <= now_s:
            outbox[key] = _with_submission_counted(offer, now_s)
            actions.append(SendUpdate(offer.update))
    open = state.open
    if open is not None and open.again_s <= now_s:
        actions.append(FetchBlobs(_sorted_refs(open.again)))
        open = replace(open, again=frozenset(), again_s=math.inf)
    return replace(state, outbox=outbox, open=open), tuple(actions)


def _sorted_refs(refs: Collection[BlobRef]) -> tuple[BlobRef, ...]:
    return tuple(sorted(refs, key=lambda ref: ref.sha256))


def _without_task(state: DeviceState) -> DeviceState:
    return replace(state, open=None)


def _stop_actions(state: DeviceState, keep: frozenset[BlobRef] = frozenset()) -> tuple[Action, ...]:
    if state.open is None:
        return ()
    abandoned = (CancelFetch(ref.sha256) for ref in _sorted_refs(state.open.missing - keep))
    return (*((StopTask(),) if state.open.working else ()), *abandoned)
